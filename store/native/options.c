/* Encodes the options of a message that is put, as the bytes after its body. */

#include "native.h"
#include <structmember.h>

bool add(Text *to, const char *from, size_t size)
{
    if (size > MOST_OPTIONS_BYTES - to->size)
        return false;
    memcpy(to->bytes + to->size, from, size);
    to->size += size;
    return true;
}

bool add_number(Text *to, const char *name, long long value)
{
    char text[NUMBER_BYTES + 2] = {1}, *end = write_number(text + 1, value);
    *end++ = 2;
    return add(to, name, strlen(name)) && add(to, text, (size_t)(end - text));
}

bool number_of(PyObject *object, long long *number)
{
    int beyond = 1;
    if (object && PyLong_CheckExact(object))
        *number = PyLong_AsLongLongAndOverflow(object, &beyond);
    return !beyond;
}

bool small_integer(PyObject *value, int32_t *found)
{
    long long number = 0;
    bool small = number_of(value, &number) && number >= INT32_MIN && number <= INT32_MAX;
    *found = (int32_t)number;
    return small;
}

/* Add a str that has a visible character, no control character, and not `forbidden`. False for all others. */
static bool add_text(Text *to, PyObject *text, char forbidden)
{
    if (!PyUnicode_CheckExact(text))
        return false;
    Py_ssize_t size;
    const char *utf8 = PyUnicode_AsUTF8AndSize(text, &size);
    if (!utf8) {
        PyErr_Clear();
        return false;
    }
    bool visible = false;
    for (Py_ssize_t i = 0; i < size; i++) {
        uint8_t c = (uint8_t)utf8[i];
        if (c < ' ' || c == 0x7F || (forbidden && c == (uint8_t)forbidden) ||
            (c == 0xC2 && (uint8_t)utf8[i + 1] < 0xA0)) /* U+0080 to U+009F */
            return false;
        /* Blanks beyond ASCII begin with C2, E1, E2 or E3. */
        visible |= (c > ' ' && c < 0x80) || (c > 0xC2 && c <= 0xE0) || c > 0xE3;
    }
    return visible && add(to, utf8, (size_t)size);
}

static bool add_pair(Text *to, const char *name, PyObject *value, char forbidden)
{
    return add(to, name, strlen(name)) && add(to, "\1", 1) && add_text(to, value, forbidden) && add(to, "\2", 1);
}

static bool add_keys(Text *to, PyObject *keys)
{
    if (PyUnicode_CheckExact(keys))
        return add_pair(to, "KEYS", keys, ' ');
    if (!PyList_CheckExact(keys) && !PyTuple_CheckExact(keys))
        return false;
    Py_ssize_t count = PySequence_Fast_GET_SIZE(keys);
    for (Py_ssize_t i = 0; i < count; i++)
        if (!add(to, i ? " " : "KEYS\1", i ? 1 : 5) || !add_text(to, PySequence_Fast_GET_ITEM(keys, i), ' '))
            return false;
    return !count || add(to, "\2", 1);
}

static bool add_properties(Text *to, PyObject *properties, PyObject *reserved)
{
    if (!PyDict_CheckExact(properties))
        return false;
    Py_ssize_t at = 0;
    PyObject *name, *value;
    while (PyDict_Next(properties, &at, &name, &value)) {
        size_t start = to->size;
        if (!add_text(to, name, 0) || PySet_Contains(reserved, name) || to->bytes[start] == '_' || !add(to, "\1", 1) ||
            !add_text(to, value, 0) || !add(to, "\2", 1))
            return false;
    }
    return true;
}

bool add_options(Text *to, const Options *options, PyObject *reserved)
{
    if ((options->properties && !add_properties(to, options->properties, reserved)) ||
        (options->keys && !add_keys(to, options->keys)) ||
        (options->tag && !add_pair(to, "TAGS", options->tag, '|')) ||
        (options->unique_key && !add_pair(to, "UNIQ_KEY", options->unique_key, 0)))
        return false;
    size_t before = to->size;
    return !options->message_group || (add_pair(to, "__SHARDINGKEY", options->message_group, 0) &&
                                       to->size - before <= strlen("__SHARDINGKEY\1\2") + MAX_MESSAGE_GROUP);
}

/* Return the value of a slot, borrowed; NULL if it is None or not set. */
static PyObject *slot(PyObject *item, PyObject *slots, Py_ssize_t i)
{
    const PyMemberDef *member = ((PyMemberDescrObject *)PyTuple_GET_ITEM(slots, i))->d_member;
    PyObject *value = *(PyObject **)((char *)item + member->offset);
    return value == Py_None ? NULL : value;
}

/* message_parts(items, first, topic, plain_tail, slots, reserved, bodies, tails, flags, unique) -> count

   Prepare items of a list, bodies or messages, like `LogWriter.put_many`, from index `first` to the first one that is not
   ordinary. `slots` are the descriptors of an `OutgoingMessage`'s attributes: those that are read, then the topic, then those that
   must be None. Bodies, tails and flags are appended to the lists. `unique` gets the unique keys by index. */
PyObject *native_message_parts(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    enum { BODY, TAG, KEYS, PROPERTIES, UNIQUE_KEY, FLAG, TOPIC, ELSEWHERE };
    PyObject *items = args[0], *topic = args[2], *plain = args[3], *slots = args[4];
    Py_ssize_t first = PyLong_AsSsize_t(args[1]), i = first;
    if (first == -1 && PyErr_Occurred())
        return NULL;
    bool right = PyList_Check(items) && first >= 0 && PyUnicode_Check(topic) && PyBytes_Check(plain) &&
                 PyBytes_GET_SIZE(plain) >= PROPERTIES_LENGTH_BYTES && PyTuple_Check(slots) &&
                 PyTuple_GET_SIZE(slots) >= ELSEWHERE && PyFrozenSet_CheckExact(args[5]) && PyDict_Check(args[9]);
    for (int k = 6; k < 9; k++)
        right = right && PyList_Check(args[k]);
    for (Py_ssize_t k = 0; right && k < PyTuple_GET_SIZE(slots); k++) {
        PyObject *one = PyTuple_GET_ITEM(slots, k);
        right = Py_IS_TYPE(one, &PyMemberDescr_Type) && ((PyMemberDescrObject *)one)->d_member->type == T_OBJECT_EX &&
                PyDescr_TYPE(one) == PyDescr_TYPE(PyTuple_GET_ITEM(slots, 0));
    }
    if (!right)
        return PyErr_Format(PyExc_TypeError, "message_parts takes a list, an index, a str, bytes, slots, a frozenset, lists and a dict");
    PyTypeObject *type = PyDescr_TYPE(PyTuple_GET_ITEM(slots, 0));
    for (; i < PyList_GET_SIZE(items); i++) {
        PyObject *item = PyList_GET_ITEM(items, i), *body = item, *unique_key = NULL, *flag = NULL;
        Text text;
        text.size = 0;
        if (Py_IS_TYPE(item, type)) {
            bool here = true;
            for (Py_ssize_t k = ELSEWHERE; here && k < PyTuple_GET_SIZE(slots); k++)
                here = !slot(item, slots, k);
            PyObject *to = slot(item, slots, TOPIC);
            body = slot(item, slots, BODY);
            flag = slot(item, slots, FLAG);
            unique_key = slot(item, slots, UNIQUE_KEY);
            Options options = {slot(item, slots, TAG), slot(item, slots, KEYS), slot(item, slots, PROPERTIES), unique_key, NULL};
            int32_t value;
            if (!here || (to && to != topic) || !flag || !small_integer(flag, &value) || !add_options(&text, &options, args[5]))
                break;
        }
        if (!body || !PyBytes_CheckExact(body))
            break;
        PyObject *tail = text.size ? PyBytes_FromStringAndSize(NULL, PyBytes_GET_SIZE(plain) + (Py_ssize_t)text.size)
                                   : Py_NewRef(plain);
        PyObject *none = flag ? NULL : PyLong_FromLong(0), *index = unique_key ? PyLong_FromSsize_t(i) : NULL;
        if (tail && text.size)
            lay_tail(PyBytes_AS_STRING(tail), PyBytes_AS_STRING(plain), PyBytes_GET_SIZE(plain), text.bytes,
                     (Py_ssize_t)text.size);
        bool kept = tail && (flag || none) && (!unique_key || (index && PyDict_SetItem(args[9], index, unique_key) == 0)) &&
                    PyList_Append(args[6], body) == 0 && PyList_Append(args[7], tail) == 0 &&
                    PyList_Append(args[8], flag ? flag : none) == 0;
        Py_XDECREF(tail);
        Py_XDECREF(none);
        Py_XDECREF(index);
        if (!kept)
            return NULL;
    }
    return PyLong_FromSsize_t(i - first);
}
