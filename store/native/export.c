/* Writes messages as lines of JSON, like `json_lines` in `log/message.py`. */

#include "native.h"

enum { MOST_TEXT = 1 << 20, MOST_HEAD = 1024 }; /* bytes of one call; bytes of a line besides its texts */

typedef struct {
    char *bytes;
    Py_ssize_t size, room;
} Lines;

/* Positions of a value in quotation marks, for the fields that repeat a property. */
typedef struct {
    Py_ssize_t start, size;
} Span;

static bool reserve(Lines *to, Py_ssize_t size)
{
    if (size <= to->room - to->size)
        return true;
    Py_ssize_t room = to->size + size + (to->size + size) / 2;
    char *bytes = PyMem_Realloc(to->bytes, (size_t)room);
    if (!bytes)
        return PyErr_NoMemory() != NULL;
    *to = (Lines){bytes, to->size, room};
    return true;
}

/* The next functions write to reserved room. */

static void lay_text(Lines *to, const char *text, Py_ssize_t size)
{
    memcpy(to->bytes + to->size, text, (size_t)size);
    to->size += size;
}

#define LAY(to, text) lay_text(to, "" text, sizeof(text) - 1)

static void lay_number(Lines *to, int64_t number) { to->size = write_number(to->bytes + to->size, number) - to->bytes; }

static void lay_host(Lines *to, const uint8_t *host)
{
    for (int i = 0; i < 4; i++) {
        lay_number(to, host[i]);
        lay_text(to, i < 3 ? "." : ":", 1);
    }
    lay_number(to, (int32_t)get32(host + 4));
}

static void lay_base64(Lines *to, const uint8_t *from, Py_ssize_t size)
{
    static const char digits[] = "ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    static char pairs[4096][2]; /* of 12 bits each */
    if (!pairs[0][0])
        for (int i = 4095; i >= 0; i--)
            memcpy(pairs[i], (char[]){digits[i >> 6], digits[i & 63]}, 2);
    char *at = to->bytes + to->size;
    for (; size > 2; from += 3, size -= 3, at += 4) {
        uint32_t bits = (uint32_t)from[0] << 16 | (uint32_t)from[1] << 8 | from[2];
        memcpy(at, pairs[bits >> 12], 2);
        memcpy(at + 2, pairs[bits & 4095], 2);
    }
    if (size) {
        uint32_t bits = (uint32_t)from[0] << 16 | (size > 1 ? (uint32_t)from[1] << 8 : 0);
        memcpy(at, pairs[bits >> 12], 2);
        at[2] = size > 1 ? digits[bits >> 6 & 63] : '=';
        at[3] = '=';
        at += 4;
    }
    to->size = at - to->bytes;
}

/* Add the JSON string of a str. */
static bool add_quoted(Lines *to, PyObject *quote, PyObject *text)
{
    Py_ssize_t size;
    PyObject *quoted = text ? PyObject_CallOneArg(quote, text) : NULL;
    const char *bytes = quoted ? PyUnicode_AsUTF8AndSize(quoted, &size) : NULL;
    bool added = bytes && reserve(to, size);
    if (added)
        lay_text(to, bytes, size);
    Py_XDECREF(quoted);
    Py_XDECREF(text);
    return added;
}

/* Return true for text of which JSON escapes nothing. */
static bool is_simple(const char *text, Py_ssize_t size)
{
    for (Py_ssize_t i = 0; i < size; i++)
        if (text[i] < ' ' || text[i] > '~' || text[i] == '"' || text[i] == '\\')
            return false;
    return true;
}

/* Add the properties (format#properties), and note those of the fields TAGS, KEYS and UNIQ_KEY. False, without an exception for names
   that Python must compare or escape. */
static bool add_properties(Lines *to, PyObject *quote, const char *at, Py_ssize_t size, Span *fields)
{
    static const char *const names[] = {"TAGS", "KEYS", "UNIQ_KEY"};
    const char *end = at + size, *known[MANY_PAIRS];
    Py_ssize_t lengths[MANY_PAIRS];
    int count = 0;
    for (const char *next; at < end; at = next) {
        const char *closing = memchr(at, 2, (size_t)(end - at)), *middle;
        Py_ssize_t length = (closing ? closing : end) - at;
        next = at + length + 1;
        if (!(middle = memchr(at, 1, (size_t)length)) || middle == at || middle + 1 == at + length)
            continue;
        Py_ssize_t name_size = middle - at, value_size = length - name_size - 1;
        if (count == MANY_PAIRS || !is_simple(at, name_size))
            return false;
        for (int i = 0; i < count; i++)
            if (lengths[i] == name_size && !memcmp(known[i], at, (size_t)name_size))
                return false;
        known[count] = at;
        lengths[count] = name_size;
        if (!reserve(to, name_size + value_size + 8))
            return false;
        lay_text(to, ", \"", count++ ? 3 : 0);
        if (count == 1)
            LAY(to, "\"");
        lay_text(to, at, name_size);
        LAY(to, "\": ");
        Py_ssize_t start = to->size;
        if (is_simple(middle + 1, value_size)) {
            LAY(to, "\"");
            lay_text(to, middle + 1, value_size);
            LAY(to, "\"");
        } else if (!add_quoted(to, quote, PyUnicode_DecodeUTF8(middle + 1, value_size, "replace"))) {
            return false;
        }
        for (int i = 0; i < 3; i++)
            if (name_size == (Py_ssize_t)strlen(names[i]) && !memcmp(at, names[i], (size_t)name_size))
                fields[i] = (Span){start, to->size - start};
    }
    return true;
}

static bool add_field(Lines *to, const char *name, const Span *value)
{
    if (!reserve(to, MOST_HEAD + value->size))
        return false;
    lay_text(to, name, (Py_ssize_t)strlen(name));
    lay_text(to, value->size ? to->bytes + value->start : "null", value->size ? value->size : 4);
    return true;
}

/* Add the line of a message. False, perhaps with an exception, if Python must do it. */
static bool add_line(Lines *to, PyObject **begin, Near *near, Located *message, PyObject *quote, PyObject *begin_of, bool stored)
{
    PyObject *last = near->batch;
    Parts parts;
    if (near_record(near, message, &parts) < 0)
        return false;
    if (last != near->batch || !*begin) {
        PyObject *queue = PyObject_GetAttrString(near->batch, "queue");
        Py_XDECREF(*begin);
        *begin = queue ? PyObject_CallOneArg(begin_of, queue) : NULL;
        Py_XDECREF(queue);
    }
    Py_ssize_t size;
    const char *text = *begin ? PyUnicode_AsUTF8AndSize(*begin, &size) : NULL;
    if (!text)
        return false;
    const uint8_t *data = near->view.buf, *record = data + message->start;
    uint32_t flags = get32(record + SYS_FLAG_AT);
    if (flags & (BORN_HOST_V6 | STORE_HOST_V6 | (stored ? 0 : COMPRESSED)) ||
        !reserve(to, size + MOST_HEAD + (parts.body_size + 2) / 3 * 4))
        return false;
    Span fields[3] = {{0}};
    lay_text(to, text, size);
    lay_number(to, message->offset);
    LAY(to, ", \"physical_offset\": ");
    lay_number(to, (int64_t)get64(record + PHYSICAL_OFFSET_AT));
    LAY(to, ", \"size\": ");
    lay_number(to, parts.size);
    LAY(to, ", \"body\": \"");
    lay_base64(to, data + parts.body, parts.body_size);
    LAY(to, "\"");
    Py_ssize_t head = to->size, first;
    /* The fields before the properties repeat some of them, so the properties are written first, and moved. */
    if (!add_properties(to, quote, (const char *)data + parts.properties, parts.properties_size, fields))
        return false;
    first = to->size;
    if (!add_field(to, ", \"tags\": ", &fields[0]) || !add_field(to, ", \"keys\": ", &fields[1]) ||
        !reserve(to, MOST_HEAD + first - head))
        return false;
    LAY(to, ", \"properties\": {");
    lay_text(to, to->bytes + head, first - head);
    LAY(to, "}, \"flag\": ");
    lay_number(to, (int32_t)get32(record + FLAG_AT));
    LAY(to, ", \"sys_flag\": ");
    lay_number(to, (int32_t)flags);
    LAY(to, ", \"born_timestamp_ms\": ");
    lay_number(to, (int64_t)get64(record + BORN_TIMESTAMP_AT));
    LAY(to, ", \"born_host\": \"");
    lay_host(to, record + BORN_HOST_AT);
    LAY(to, "\", \"store_timestamp_ms\": ");
    lay_number(to, (int64_t)get64(record + STORE_TIMESTAMP_AT_V4));
    LAY(to, ", \"store_host\": \"");
    lay_host(to, record + STORE_HOST_AT_V4);
    LAY(to, "\", \"reconsume_times\": ");
    lay_number(to, (int32_t)get32(record + RECONSUME_TIMES_AT_V4));
    LAY(to, ", \"prepared_transaction_offset\": ");
    lay_number(to, (int64_t)get64(record + PREPARED_OFFSET_AT_V4));
    LAY(to, ", \"message_id\": \"");
    to->size += message_id_of(record, to->bytes + to->size);
    LAY(to, "\"");
    if (!add_field(to, ", \"unique_key\": ", &fields[2]))
        return false;
    LAY(to, "}\n");
    memmove(to->bytes + head, to->bytes + first, (size_t)(to->size - first));
    to->size -= first - head;
    return true;
}

/* json_lines(messages, first, stored, quote, begin_of) -> (text, the first message that is not in it)

   Lines of the messages from `first` on, before a message that Python must write, and about MOST_TEXT bytes. With `stored` bodies stay
   compressed. `quote` returns a str as JSON, `begin_of` the first fields of a line of a queue. */
PyObject *native_json_lines(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    Py_ssize_t i = PyLong_AsSsize_t(args[1]);
    int stored = PyObject_IsTrue(args[2]);
    if (PyErr_Occurred() || !PyList_Check(args[0]) || i < 0)
        return PyErr_Occurred() ? NULL : PyErr_Format(PyExc_TypeError, "json_lines takes a list and an index");
    Lines lines = {0};
    Near near = {0};
    PyObject *begin = NULL;
    Py_ssize_t whole = 0;
    for (; i < PyList_GET_SIZE(args[0]) && whole < MOST_TEXT; i++, whole = lines.size) {
        PyObject *message = PyList_GET_ITEM(args[0], i);
        if (!is_a(message, &LocatedType) ||
            !add_line(&lines, &begin, &near, (Located *)message, args[3], args[4], stored))
            break;
    }
    near_close(&near);
    Py_XDECREF(begin);
    PyErr_Clear(); /* Python writes that message, or raises its error */
    PyObject *text = PyUnicode_DecodeASCII(lines.bytes ? lines.bytes : "", whole, NULL);
    PyMem_Free(lines.bytes);
    return text ? Py_BuildValue("Nn", text, i) : NULL;
}
