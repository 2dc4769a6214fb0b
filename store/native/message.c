/* Reads messages by the units of a consume queue, checking each record on the way (format#tags-code).

   `Located` is the base class of `Message`: position of a record in a buffer, and its body. */

#include "native.h"
#include <stddef.h>
#include <structmember.h>

enum { MOST_BYTES = 4 << 20 }; /* read in one call, which other threads wait for */

static int topic_index = 0, queue_id_index = 1;
static PyTypeObject *batch_type; /* the class of nearly all batches, and the places of `buffer` and `find` in its objects */
static Py_ssize_t buffer_at, find_at;

static void located_dealloc(Located *self)
{
    Py_XDECREF(self->batch);
    Py_TYPE(self)->tp_free((PyObject *)self);
}

/* Return the place of a slot in the objects of a class, or 0: looking its name up takes longer than copying a small body. */
static Py_ssize_t slot_of(PyTypeObject *type, const char *name)
{
    PyObject *slot = PyObject_GetAttrString((PyObject *)type, name);
    bool found = slot && Py_IS_TYPE(slot, &PyMemberDescr_Type) && ((PyMemberDescrObject *)slot)->d_member->type == T_OBJECT_EX;
    Py_ssize_t at = found ? ((PyMemberDescrObject *)slot)->d_member->offset : 0;
    Py_XDECREF(slot);
    PyErr_Clear();
    return at;
}

/* Set the fields of a message. The garbage collector need not see it: readers make thousands at once, and nothing that it refers to
   refers back. That is not certain of a batch that finds bodies in other records, or of a subclass with more fields. */
static void locate(Located *self, PyObject *batch, int64_t start, int64_t offset)
{
    if (!batch_type && (buffer_at = slot_of(Py_TYPE(batch), "buffer")) && (find_at = slot_of(Py_TYPE(batch), "find")))
        batch_type = (PyTypeObject *)Py_NewRef(Py_TYPE(batch));
    Py_XSETREF(self->batch, Py_NewRef(batch));
    self->start = start;
    self->offset = offset;
    PyTypeObject *type = Py_TYPE(self);
    if (type->tp_basicsize == sizeof *self && !type->tp_dictoffset && PyObject_IS_GC((PyObject *)self) &&
        Py_IS_TYPE(batch, batch_type) && *(PyObject **)((char *)batch + find_at) == Py_None)
        PyObject_GC_UnTrack(self);
}

static int located_init(Located *self, PyObject *args, PyObject *kwargs)
{
    static char *names[] = {"batch", "start", "offset", NULL};
    PyObject *batch;
    long long start, offset;
    if (!PyArg_ParseTupleAndKeywords(args, kwargs, "OLL", names, &batch, &start, &offset))
        return -1;
    locate(self, batch, start, offset);
    return 0;
}

static PyObject *not_initialized(void) { return PyErr_Format(PyExc_AttributeError, "the message was not initialized"); }

/* Get the buffer that contains the record and, unless `parts` is NULL, find its parts. Without `parts` only room for the smallest
   record is checked. 0, or -1 with an exception; then the buffer is released. */
static int open_record(Located *self, Py_buffer *view, Parts *parts)
{
    PyObject *buffer = self->batch && Py_IS_TYPE(self->batch, batch_type) ? *(PyObject **)((char *)self->batch + buffer_at) : NULL;
    if (buffer)
        Py_INCREF(buffer);
    else if (!(buffer = self->batch ? PyObject_GetAttr(self->batch, name_buffer) : not_initialized()))
        return -1;
    int got = PyObject_GetBuffer(buffer, view, PyBUF_SIMPLE);
    Py_DECREF(buffer);
    if (got < 0)
        return -1;
    if (self->start < 0 || self->start > view->len - MIN_RECORD_BYTES ||
        (parts && !parts_of(view->buf, view->len, self->start, parts))) {
        PyErr_Format(PyExc_IndexError, "no record at %lld of a buffer of %zd bytes", self->start, view->len);
        PyBuffer_Release(view);
        return -1;
    }
    return 0;
}

/* Return true if the body can be read as a slice. */
static bool is_plain(const uint8_t *record)
{
    return !(get32(record + SYS_FLAG_AT) & (COMPRESSED | BORN_HOST_V6 | STORE_HOST_V6));
}

static PyObject *located_body(Located *self, void *closure)
{
    Py_buffer view;
    Parts parts;
    if (open_record(self, &view, &parts) < 0)
        PyErr_Clear();
    else {
        const char *data = view.buf;
        bool plain = is_plain((const uint8_t *)data + self->start);
        PyObject *body = plain ? PyBytes_FromStringAndSize(data + parts.body, (Py_ssize_t)parts.body_size) : NULL;
        PyBuffer_Release(&view);
        if (plain)
            return body;
    }
    return PyObject_CallMethodNoArgs((PyObject *)self, name__stored_body);
}

static PyObject *located_encoded_properties(Located *self, void *closure)
{
    Py_buffer view;
    Parts parts;
    if (open_record(self, &view, &parts) < 0)
        return NULL;
    PyObject *properties =
        PyBytes_FromStringAndSize((const char *)view.buf + parts.properties, (Py_ssize_t)parts.properties_size);
    PyBuffer_Release(&view);
    return properties;
}

/* Find the value of a property, like `decode_properties`: of several with this name, the last one that has a value. Return true if
   there is one. */
static bool value_of(const char *record, const Parts *parts, const char *name, Py_ssize_t name_size, const char **value,
                     Py_ssize_t *value_size)
{
    const char *at = record + parts->properties, *end = at + parts->properties_size;
    *value = NULL;
    *value_size = 0;
    while (at < end) {
        const char *closing = memchr(at, 2, (size_t)(end - at));
        Py_ssize_t size = (closing ? closing : end) - at;
        if (size > name_size + 1 && at[name_size] == 1 && !memcmp(at, name, (size_t)name_size)) {
            *value = at + name_size + 1;
            *value_size = size - name_size - 1;
        }
        at += size + 1;
    }
    return *value != NULL;
}

static PyObject *located_stored_property(Located *self, PyObject *name)
{
    Py_buffer view;
    Parts parts;
    Py_ssize_t name_size, size;
    const char *value, *wanted = PyUnicode_Check(name) ? PyUnicode_AsUTF8AndSize(name, &name_size) : NULL;
    if (!wanted && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "the name of a property must be str");
    if (!wanted || open_record(self, &view, &parts) < 0)
        return NULL;
    bool found = value_of(view.buf, &parts, wanted, name_size, &value, &size);
    PyObject *text = found ? PyUnicode_DecodeUTF8(value, size, "replace") : Py_NewRef(Py_None);
    PyBuffer_Release(&view);
    return text;
}

static PyObject *located_property(Located *self, void *name)
{
    return located_stored_property(self, *(PyObject **)name);
}

/* Return the words of KEYS. */
static PyObject *located_keys(Located *self, void *closure)
{
    Py_buffer view;
    Parts parts;
    const char *value;
    Py_ssize_t size, count = 0;
    if (open_record(self, &view, &parts) < 0)
        return NULL;
    const char *end = value_of(view.buf, &parts, "KEYS", 4, &value, &size) ? value + size : NULL, *space;
    for (const char *at = value; at < end; at++)
        count += *at != ' ' && (at == value || at[-1] == ' ');
    PyObject *keys = PyTuple_New(count), *key = keys;
    for (Py_ssize_t i = 0; key && i < count; value = space) {
        while (*value == ' ')
            value++;
        space = memchr(value, ' ', (size_t)(end - value));
        if ((key = PyUnicode_DecodeUTF8(value, (space ? space : end) - value, "replace")))
            PyTuple_SET_ITEM(keys, i++, key);
        else
            Py_CLEAR(keys);
    }
    PyBuffer_Release(&view);
    return keys;
}

/* Return the queue, or its item *closure. */
static PyObject *located_queue(Located *self, void *closure)
{
    if (!self->batch)
        return not_initialized();
    PyObject *queue = PyObject_GetAttr(self->batch, name_queue);
    if (queue && closure)
        Py_SETREF(queue, PySequence_GetItem(queue, *(const int *)closure));
    return queue;
}

/* The integers of the header: position if both hosts are IPv4, width, and the hosts that move them. */
typedef struct {
    int at, bytes;
    uint32_t moved_by;
} Field;

static Field size_field = {0, 4, 0}, flag_field = {FLAG_AT, 4, 0}, physical_field = {PHYSICAL_OFFSET_AT, 8, 0},
             sys_flag_field = {SYS_FLAG_AT, 4, 0}, born_field = {BORN_TIMESTAMP_AT, 8, 0},
             stored_field = {STORE_TIMESTAMP_AT_V4, 8, BORN_HOST_V6},
             reconsume_field = {RECONSUME_TIMES_AT_V4, 4, BORN_HOST_V6 | STORE_HOST_V6};

static PyObject *located_number(Located *self, void *closure)
{
    const Field *field = closure;
    Py_buffer view;
    if (open_record(self, &view, NULL) < 0)
        return NULL;
    const uint8_t *record = (const uint8_t *)view.buf + self->start;
    long long at = self->start + field->at + extra_of(get32(record + SYS_FLAG_AT) & field->moved_by), value = 0;
    bool inside = at <= view.len - field->bytes;
    if (inside)
        value = field->bytes == 8 ? (int64_t)get64((const uint8_t *)view.buf + at) : (int32_t)get32((const uint8_t *)view.buf + at);
    PyBuffer_Release(&view);
    if (!inside)
        return PyErr_Format(PyExc_IndexError, "the record at %lld ends before its header does", self->start);
    return PyLong_FromLongLong(value);
}

Py_ssize_t message_id_of(const uint8_t *record, char *text)
{
    static const char digits[] = "0123456789ABCDEF";
    uint32_t flags = get32(record + SYS_FLAG_AT);
    const uint8_t *host = record + STORE_HOST_AT_V4 + extra_of(flags & BORN_HOST_V6);
    int host_bytes = flags & STORE_HOST_V6 ? IPV6_BYTES : IPV4_BYTES, length = 0;
    for (int i = 0; i < host_bytes + 8; i++) {
        uint8_t byte = i < host_bytes ? host[i] : record[PHYSICAL_OFFSET_AT + i - host_bytes];
        text[length++] = digits[byte >> 4];
        text[length++] = digits[byte & 15];
    }
    return length;
}

static PyObject *located_message_id(Located *self, void *closure)
{
    char text[MAX_ID];
    Py_buffer view;
    Parts parts;
    if (open_record(self, &view, &parts) < 0)
        return NULL;
    Py_ssize_t length = message_id_of((const uint8_t *)view.buf + self->start, text);
    PyBuffer_Release(&view);
    return PyUnicode_FromStringAndSize(text, length);
}

int near_record(Near *near, Located *message, Parts *parts)
{
    if (near->batch && near->batch == message->batch && message->start >= 0 &&
        message->start <= near->view.len - MIN_RECORD_BYTES &&
        parts_of(near->view.buf, near->view.len, message->start, parts))
        return 0;
    near_close(near);
    if (open_record(message, &near->view, parts) < 0)
        return -1;
    near->batch = Py_NewRef(message->batch);
    return 0;
}

void near_close(Near *near)
{
    if (near->batch)
        PyBuffer_Release(&near->view);
    Py_CLEAR(near->batch);
}

int located_plain(Located *message, Near *near, PyObject **head, PyObject **body)
{
    Parts parts;
    if (near_record(near, message, &parts) < 0)
        return -1;
    const char *data = near->view.buf;
    uint32_t flags = get32((const uint8_t *)data + message->start + SYS_FLAG_AT), transaction = flags & TRANSACTION_MASK;
    int plain = !(flags & (BORN_HOST_V6 | STORE_HOST_V6)) && (flags & BODY_ELSEWHERE) != BODY_ELSEWHERE &&
                (!transaction || transaction == TRANSACTION_COMMIT);
    if (plain) {
        *head = PyBytes_FromStringAndSize(data + message->start, BODY_AT_V4);
        *body = PyBytes_FromStringAndSize(data + parts.body, (Py_ssize_t)parts.body_size);
        if (!*head || !*body) {
            Py_CLEAR(*head);
            Py_CLEAR(*body);
            plain = -1;
        }
    }
    return plain;
}

static PyMemberDef located_members[] = {
    {"_batch", T_OBJECT, offsetof(Located, batch), READONLY, NULL},
    {"_start", T_LONGLONG, offsetof(Located, start), READONLY, NULL},
    {"offset", T_LONGLONG, offsetof(Located, offset), READONLY, "The queue offset."},
    {NULL},
};

#define NUMBER(name, field, doc) {name, (getter)located_number, NULL, doc, &field}

static PyGetSetDef located_attributes[] = {
    {"body", (getter)located_body, NULL,
     "The body as it was sent. Raises FormatError if a compressed body cannot be decompressed.", NULL},
    {"_encoded_properties", (getter)located_encoded_properties, NULL,
     "The bytes of the properties, as stored (format#properties).", NULL},
    {"message_id", (getter)located_message_id, NULL,
     "Offset message id, the address of this stored copy (format#ids).", NULL},
    {"queue", (getter)located_queue, NULL, "Queue that contains this copy.", NULL},
    {"topic", (getter)located_queue, NULL, "Topic of that queue.", &topic_index},
    {"queue_id", (getter)located_queue, NULL, "Id of that queue in its topic, from 0.", &queue_id_index},
    {"tag", (getter)located_property, NULL, "Tag that consumers filter by, or None.", &name_TAGS},
    {"keys", (getter)located_keys, NULL, "Keys by which `find` looks the message up, besides its unique key.", NULL},
    {"message_group", (getter)located_property, NULL, "Name of the group whose messages keep their order, or None.", &name___SHARDINGKEY},
    NUMBER("size", size_field, "Size of the whole record in bytes."),
    NUMBER("flag", flag_field, "The sender's own number, 32 bits; 0 unless it was set."),
    NUMBER("physical_offset", physical_field, "Position of the record in the commitlog."),
    NUMBER("sys_flag", sys_flag_field, "Bits of the record: compression, transaction, IPv6 hosts (format#flags)."),
    NUMBER("born_timestamp_ms", born_field, "Time of its creation, by its sender's clock: ms since the epoch."),
    NUMBER("store_timestamp_ms", stored_field, "When this copy was stored: ms since the epoch."),
    NUMBER("reconsume_times", reconsume_field, "Number of ended attempts, as stored with this copy."),
    {NULL},
};

static PyMethodDef located_methods[] = {
    {"_stored_property", (PyCFunction)located_stored_property, METH_O,
     "One of `stored_properties`, found without decoding the others; None if it has no such property."},
    {NULL},
};

PyTypeObject LocatedType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "mqstore._native.Located",
    .tp_doc = "A record in a buffer, found by a unit.",
    .tp_basicsize = sizeof(Located),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_init = (initproc)located_init,
    .tp_dealloc = (destructor)located_dealloc,
    .tp_members = located_members,
    .tp_getset = located_attributes,
    .tp_methods = located_methods,
};

/* tagged(messages, tags) -> list of the messages whose tag is in the set `tags` */
PyObject *native_tagged(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    PyObject *passing = PyList_CheckExact(args[0]) && PyAnySet_Check(args[1]) ? PyList_New(0) : NULL;
    if (!passing && !PyErr_Occurred())
        PyErr_SetString(PyExc_TypeError, "tagged takes a list of messages and a set of tags");
    Near near = {0};
    Parts parts;
    for (Py_ssize_t i = 0; passing && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *message = PyList_GET_ITEM(args[0], i);
        const char *value;
        Py_ssize_t size;
        int passes = -1;
        if (!is_a(message, &LocatedType))
            PyErr_SetString(PyExc_TypeError, "tagged: messages must be Located");
        else if (near_record(&near, (Located *)message, &parts) == 0) {
            bool has_tag = value_of(near.view.buf, &parts, "TAGS", 4, &value, &size);
            PyObject *tag = has_tag ? PyUnicode_DecodeUTF8(value, size, "replace") : NULL;
            passes = tag ? PySet_Contains(args[1], tag) : has_tag ? -1 : 0;
            Py_XDECREF(tag);
        }
        if (passes < 0 || (passes && PyList_Append(passing, message) < 0))
            Py_CLEAR(passing);
    }
    near_close(&near);
    return passing;
}

/* The fields that a unit's record must have. */
typedef struct {
    int64_t physical, size, slot, queue_id;
    const char *topic;
    Py_ssize_t topic_bytes;
} Expected;

/* Return true if the record at `position` is sound (`sound_record`) and the one that a unit refers to, with its parts. */
static bool matches_unit(const Py_buffer *view, int64_t position, const Expected *expected, bool checksum, Parts *parts)
{
    const uint8_t *data = view->buf;
    if (expected->size <= 0 || sound_record(data, view->len, position, expected->physical, checksum, parts) != expected->size)
        return false;
    const uint8_t *record = data + position;
    return (int32_t)get32(record + QUEUE_ID_AT) == expected->queue_id &&
           (int64_t)get64(record + QUEUE_OFFSET_AT) == expected->slot &&
           has_topic(data, parts, expected->topic, expected->topic_bytes);
}

/* Return true if the message of a unit may have one of these tags (`TagFilter.units`). */
static bool may_pass(const uint8_t *unit, const Py_buffer *hashes)
{
    int64_t code = (int64_t)get64(unit + UNIT_TAGS_CODE_AT);
    bool passes = code <= LAST_ADDRESS;
    for (Py_ssize_t i = 0; i < hashes->len / 4 && !passes; i++)
        passes = (int32_t)code == ((const int32_t *)hashes->buf)[i];
    return passes;
}

/* read_units(type, batch, buffer, segment_start, units, first, skipped, hashes, most, queue_id, topic, budget)
       -> (messages, number of units passed, total bytes of the messages, whether the budget was used up)

   `type` is a subclass of Located, `units` those of the slots from `first` on, of which `skipped` are not read, `hashes` those of the tags that may pass (int32) or
   None for all. Ends before the first record that is not an ordinary, sound record of this queue and segment with a checksum over
   the whole, which Python checks, and after MOST_BYTES. Limits are `most` messages and `budget`: bytes of records, -1 for no
   limit. A value below -1 is a budget of -budget - 2 bytes that lets the first message through. */
PyObject *native_read_units(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    PyTypeObject *type = (PyTypeObject *)args[0];
    if (!PyType_Check(args[0]) || !PyType_IsSubtype(type, &LocatedType))
        return PyErr_Format(PyExc_TypeError, "read_units: messages must be Located");
    long long segment_start = PyLong_AsLongLong(args[3]), first = PyLong_AsLongLong(args[5]);
    long long skipped = PyLong_AsLongLong(args[6]), most = PyLong_AsLongLong(args[8]), queue_id = PyLong_AsLongLong(args[9]);
    long long budget = PyLong_AsLongLong(args[11]);
    Expected expected = {.queue_id = queue_id};
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[10], (char **)&expected.topic, &expected.topic_bytes) < 0)
        return NULL;
    if (skipped < 0)
        return PyErr_Format(PyExc_ValueError, "read_units: `skipped` must not be negative");
    bool unlimited = budget == -1, first_is_free = budget < -1;
    if (first_is_free)
        budget = -budget - 2;
    Py_buffer *view = hold(held, args[2], 1, -1, false, "buffer"), *units = hold(held, args[4], 1, -1, false, "units");
    Py_buffer *hashes = args[7] == Py_None ? NULL : hold(held, args[7], 4, -1, false, "hashes");
    if (PyErr_Occurred())
        return NULL;
    Py_ssize_t there = units->len / UNIT_BYTES, looked = (Py_ssize_t)skipped;
    long long total = 0;
    bool stopped = false;
    Py_ssize_t room = there - looked < most ? there - looked : (Py_ssize_t)most, found = 0;
    PyObject *result = NULL, *messages = PyList_New(room > 0 ? room : 0);
    if (!messages)
        return NULL;
    for (; looked < there && total < MOST_BYTES && found < most; looked++) {
        const uint8_t *unit = (const uint8_t *)units->buf + looked * UNIT_BYTES, *later = unit + NEXT * UNIT_BYTES;
        if (looked + NEXT < there)
            fetch_at(view->buf, view->len, (int64_t)(get64(later) - (uint64_t)segment_start),
                     (int32_t)get32(later + UNIT_SIZE_AT));
        expected.physical = (int64_t)get64(unit);
        expected.size = (int32_t)get32(unit + UNIT_SIZE_AT);
        expected.slot = first + looked;
        if (expected.physical < segment_start || expected.size <= 0 || expected.size == VOID_SIZE)
            break;
        if (hashes && !may_pass(unit, hashes))
            continue;
        int64_t position = expected.physical - segment_start;
        Parts parts;
        if (!matches_unit(view, position, &expected, true, &parts))
            break;
        if (!unlimited) {
            budget -= expected.size;
            if ((stopped = budget < 0 && !(first_is_free && !found)))
                break;
        }
        Located *message = (Located *)type->tp_alloc(type, 0);
        if (!message)
            goto done;
        locate(message, args[1], position, expected.slot);
        PyList_SET_ITEM(messages, found++, (PyObject *)message);
        total += expected.size;
    }
    Py_SET_SIZE(messages, found);
    result = Py_BuildValue("OnLO", messages, looked - (Py_ssize_t)skipped, total, stopped ? Py_True : Py_False);
done:
    Py_XDECREF(messages);
    return result;
}

/* check_units(buffer, starts, physical, sizes, slots, queue_id, topic, out, body_ends, bodies, table, checksums)
       -> bytes copied, or -1

   For each unit's record, `out` is set to 1 if it is sound and the unit's, as in `read_units`; to 0 if Python must check it.
   Without `checksums` these are not compared. `starts` are relative to the buffer, and so is the end of each body that is stored
   as it was sent, after two IPv4 hosts (int64; otherwise -1). These bodies are copied to `bodies`, unless it is None, one after
   the other; -1 if a record has no such body, or there is no room for all. The parts of each sound record are written to `table`,
   unless it is None (`note_parts`). */
PyObject *native_check_units(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    Expected expected = {.queue_id = PyLong_AsLongLong(args[5])};
    if (PyErr_Occurred() || PyBytes_AsStringAndSize(args[6], (char **)&expected.topic, &expected.topic_bytes) < 0)
        return NULL;
    int checksum = PyObject_IsTrue(args[11]);
    Py_buffer *view = hold(held, args[0], 1, -1, false, "buffer"), *starts = hold(held, args[1], 8, -1, false, "starts");
    Py_ssize_t count = starts->len / 8;
    Py_buffer *physical = hold(held, args[2], 8, count, false, "physical"), *sizes = hold(held, args[3], 8, count, false, "sizes");
    Py_buffer *slots = hold(held, args[4], 8, count, false, "slots"), *out = hold(held, args[7], 1, count, true, "out");
    Py_buffer *body_ends = hold(held, args[8], 8, count, true, "body_ends");
    Py_buffer *bodies = args[9] == Py_None ? NULL : hold(held, args[9], 1, -1, true, "bodies");
    Py_buffer *table = args[10] == Py_None ? NULL : hold(held, args[10], 8, PARTS * count, true, "table");
    if (PyErr_Occurred())
        return NULL;
    const int64_t *at = starts->buf, *size = sizes->buf;
    int64_t *ends = body_ends->buf, copied = bodies ? 0 : -1;
    PyThreadState *others = PyEval_SaveThread();
    for (Py_ssize_t i = 0; i < count; i++) {
        if (i + NEXT < count)
            fetch_at(view->buf, view->len, at[i + NEXT], size[i + NEXT]);
        expected.physical = ((const int64_t *)physical->buf)[i];
        expected.size = size[i];
        expected.slot = ((const int64_t *)slots->buf)[i];
        Parts parts;
        bool matches = matches_unit(view, at[i], &expected, checksum, &parts);
        ((uint8_t *)out->buf)[i] = matches;
        ends[i] = matches && is_plain((const uint8_t *)view->buf + at[i]) ? parts.body + parts.body_size : -1;
        if (table && matches)
            note_parts(table->buf, count, i, &parts);
        if (copied < 0)
            continue;
        /* Copied here because the checksum has just read it into the processor's cache. */
        int64_t body_size = ends[i] < 0 ? 0 : ends[i] - at[i] - BODY_AT_V4;
        if (ends[i] < 0 || body_size > bodies->len - copied) {
            copied = -1;
            continue;
        }
        memcpy((uint8_t *)bodies->buf + copied, (const uint8_t *)view->buf + at[i] + BODY_AT_V4, (size_t)body_size);
        copied += body_size;
    }
    PyEval_RestoreThread(others);
    return PyLong_FromLongLong(copied);
}
