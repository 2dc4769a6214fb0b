/* The options of a put, as the bytes that stand behind its body. */

#include "native.h"

enum { MOST_BYTES = 2048, MAX_MESSAGE_GROUP = 63 };

/* Of what is not left to Python. */
enum { OPTIONS = 5 };
static PyObject *option_names[OPTIONS];

int options_init(void)
{
    static const char *const names[OPTIONS] = {"tag", "keys", "properties", "unique_key", "message_group"};
    for (int i = 0; i < OPTIONS; i++)
        if (!option_names[i] && !(option_names[i] = PyUnicode_InternFromString(names[i])))
            return -1;
    return 0;
}

typedef struct {
    uint8_t bytes[MOST_BYTES];
    size_t size;
} Text;

static bool add(Text *to, const char *from, size_t size)
{
    if (size > MOST_BYTES - to->size)
        return false;
    memcpy(to->bytes + to->size, from, size);
    to->size += size;
    return true;
}

/* Add a str that has something visible, no control character, and not `forbidden`; false for all else. */
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

/* options_tail(plain_tail, options, reserved) -> what stands behind the body of a message that is put with `options`:
   `plain_tail` is that of one without. None for what is not allowed, or rare: `user_properties` knows. `reserved`: a frozenset
   of names that no property may have; others that begin with an underscore are left to Python, too. */
PyObject *native_options_tail(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("options_tail", nargs, 3))
        return NULL;
    PyObject *plain = args[0], *options = args[1];
    if (!PyBytes_CheckExact(plain) || PyBytes_GET_SIZE(plain) < 2 || !PyDict_CheckExact(options) ||
        !PyFrozenSet_CheckExact(args[2])) {
        PyErr_SetString(PyExc_TypeError, "options_tail takes bytes, a dict and a frozenset");
        return NULL;
    }
    PyObject *given[OPTIONS] = {NULL}, *name, *value;
    Py_ssize_t at = 0;
    while (PyDict_Next(options, &at, &name, &value)) {
        int which = 0;
        while (which < OPTIONS && name != option_names[which])
            which++;
        if (which == OPTIONS) /* not known, or not the one object that the name of an argument is */
            Py_RETURN_NONE;
        given[which] = value == Py_None ? NULL : value;
    }
    PyObject *tag = given[0], *keys = given[1], *properties = given[2], *unique_key = given[3], *group = given[4];
    Text text;
    Py_ssize_t plain_size = PyBytes_GET_SIZE(plain);
    text.size = 0;
    bool added = add(&text, PyBytes_AS_STRING(plain), (size_t)plain_size);
    added = added && (!properties || add_properties(&text, properties, args[2]));
    added = added && (!keys || add_keys(&text, keys)) && (!tag || add_pair(&text, "TAGS", tag, '|'));
    added = added && (!unique_key || add_pair(&text, "UNIQ_KEY", unique_key, 0));
    size_t before = text.size;
    added = added && (!group || (add_pair(&text, "__SHARDINGKEY", group, 0) &&
                                 text.size - before <= strlen("__SHARDINGKEY\1\2") + MAX_MESSAGE_GROUP));
    if (!added)
        Py_RETURN_NONE;
    size_t properties_size = text.size - (size_t)plain_size;
    text.bytes[plain_size - 2] = (uint8_t)(properties_size >> 8);
    text.bytes[plain_size - 1] = (uint8_t)properties_size;
    return PyBytes_FromStringAndSize((char *)text.bytes, (Py_ssize_t)text.size);
}
