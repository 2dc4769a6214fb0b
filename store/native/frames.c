/* Reads and writes binary headers of remoting frames: the counterpart of store/mqstore/remoting/frames.py, which handles JSON
   headers, damage, and whatever else is declined here. */

#include "native.h"
#include <structmember.h>

enum { PREFIX_BYTES = 8, HEAD_BYTES = 13, BINARY = 1, MOST_HEADER_BYTES = 64 << 10, RESPONSE_BIT = 1 };
/* Attributes of a frame, in the order of the slots given. */
enum { CODE, FIELDS, BODY, OPAQUE, FLAG, REMARK, VERSION, LANGUAGE, IS_BINARY, ATTRIBUTES };

/* Part of a header that is being read. */
typedef struct {
    const uint8_t *at, *end;
} Rest;

/* Read a size of 2 or 4 bytes, and take as many bytes. False if they are not all there. */
static bool sized(Rest *rest, int width, Rest *taken)
{
    if (rest->end - rest->at < width)
        return false;
    int64_t size = width == 2 ? (int16_t)get16(rest->at) : (int32_t)get32(rest->at);
    rest->at += width;
    if (size < 0 || size > rest->end - rest->at)
        return false;
    *taken = (Rest){rest->at, rest->at + size};
    rest->at += size;
    return true;
}

static PyObject *text_of(Rest text) { return PyUnicode_DecodeUTF8((const char *)text.at, text.end - text.at, NULL); }

/* Read the fields. NULL if they are damaged, with or without an exception. */
static PyObject *fields_of(Rest pairs)
{
    PyObject *fields = PyDict_New();
    while (fields && pairs.at < pairs.end) {
        Rest name, value;
        PyObject *key = NULL, *text = NULL;
        if (!sized(&pairs, 2, &name) || !sized(&pairs, 4, &value) || !(key = text_of(name)) || !(text = text_of(value)) ||
            PyDict_SetItem(fields, key, text) < 0)
            Py_CLEAR(fields);
        Py_XDECREF(key);
        Py_XDECREF(text);
    }
    return fields;
}

/* Read the frame of which `header` and `body` are the parts. NULL if it is damaged, with or without an exception. */
static PyObject *frame_of(Rest header, Rest body, PyObject *slots, PyObject *wide, PyObject *languages)
{
    const uint8_t *head = header.at;
    Rest remark, pairs;
    if (header.end - head < HEAD_BYTES)
        return NULL;
    header.at += HEAD_BYTES;
    if (!sized(&header, 4, &remark) || !sized(&header, 4, &pairs) || header.at != header.end)
        return NULL;
    PyObject *fields = fields_of(pairs), *text = !fields ? NULL : remark.at < remark.end ? text_of(remark) : Py_NewRef(Py_None);
    if (!text) {
        Py_XDECREF(fields);
        return NULL;
    }
    PyTypeObject *type = PyDescr_TYPE(PyTuple_GET_ITEM(slots, 0));
    PyObject *values[ATTRIBUTES] = {[FIELDS] = fields, [REMARK] = text}, *frame = type->tp_alloc(type, 0), *other;
    int32_t flag = (int32_t)get32(head + 9);
    size_t language = head[2];
    Py_ssize_t known = PyTuple_GET_SIZE(languages);
    values[CODE] = PyLong_FromLong((int16_t)get16(head));
    values[BODY] = PyBytes_FromStringAndSize((const char *)body.at, body.end - body.at);
    values[OPAQUE] = PyLong_FromLong((int32_t)get32(head + 5));
    values[FLAG] = PyLong_FromLong(flag);
    values[VERSION] = PyLong_FromLong((int16_t)get16(head + 3));
    values[LANGUAGE] = Py_NewRef(PyTuple_GET_ITEM(languages, (Py_ssize_t)language < known ? (Py_ssize_t)language : known - 1));
    values[IS_BINARY] = Py_NewRef(Py_True);
    if (values[CODE] && !(flag & RESPONSE_BIT) && (other = PyDict_GetItemWithError(wide, values[CODE])))
        Py_SETREF(values[CODE], Py_NewRef(other));
    bool whole = frame != NULL;
    for (int i = 0; i < ATTRIBUTES; i++) {
        whole = whole && values[i];
        if (frame)
            *(PyObject **)((char *)frame + ((PyMemberDescrObject *)PyTuple_GET_ITEM(slots, i))->d_member->offset) = values[i];
        else
            Py_XDECREF(values[i]);
    }
    if (!whole)
        Py_CLEAR(frame);
    return frame;
}

/* frames(data, at, limit, most, slots, wide, languages, into) -> the position after the last one

   Append up to `most` frames from position `at` to the list `into`, before the first that is not whole, has no binary header, is
   larger than `limit` or is damaged. `slots` are the descriptors of a frame's attributes, `wide` has the requests whose codes do not
   fit, by their lower bits, and `languages` the names by number, the last for all others. */
PyObject *native_frames(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    int64_t at = PyLong_AsLongLong(args[1]), limit = PyLong_AsLongLong(args[2]), most = PyLong_AsLongLong(args[3]);
    Py_buffer *data = hold(held, args[0], 1, -1, false, "data");
    if (PyErr_Occurred())
        return NULL;
    PyObject *slots = args[4];
    bool right = PyTuple_Check(slots) && PyTuple_GET_SIZE(slots) == ATTRIBUTES && PyDict_Check(args[5]) &&
                 PyTuple_Check(args[6]) && PyTuple_GET_SIZE(args[6]) && PyList_Check(args[7]);
    for (int i = 0; right && i < ATTRIBUTES; i++) {
        PyObject *one = PyTuple_GET_ITEM(slots, i);
        right = Py_IS_TYPE(one, &PyMemberDescr_Type) && ((PyMemberDescrObject *)one)->d_member->type == T_OBJECT_EX &&
                PyDescr_TYPE(one) == PyDescr_TYPE(PyTuple_GET_ITEM(slots, 0));
    }
    if (!right)
        return PyErr_Format(PyExc_TypeError, "frames takes data, three ints, slots, a dict, a tuple and a list");
    for (int64_t taken = 0; taken < most && at >= 0 && data->len - at >= PREFIX_BYTES; taken++) {
        const uint8_t *start = (const uint8_t *)data->buf + at;
        int64_t length = (int32_t)get32(start), header_bytes = get32(start + 4) & 0xFFFFFF;
        if (length < 4 || length > limit || start[4] != BINARY || header_bytes > length - 4 || header_bytes > MOST_HEADER_BYTES ||
            length > data->len - at - 4)
            break;
        const uint8_t *header = start + PREFIX_BYTES, *body = header + header_bytes;
        PyObject *frame =
            frame_of((Rest){header, body}, (Rest){body, start + 4 + length}, slots, args[5], args[6]);
        if (!frame || PyList_Append(args[7], frame) < 0) {
            Py_XDECREF(frame);
            break;
        }
        Py_DECREF(frame);
        at += 4 + length;
    }
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_UnicodeDecodeError))
        return NULL;
    PyErr_Clear(); /* Python says what is damaged */
    return PyLong_FromLongLong(at);
}

/* A header that is being written. */
typedef struct {
    uint8_t bytes[4096], *at;
} Head;

/* Add a size of 2 or 4 bytes, and as many bytes. False without room for them. */
static bool put_sized(Head *to, int width, const char *from, Py_ssize_t size)
{
    if (size > to->bytes + sizeof to->bytes - to->at - width)
        return false;
    if (width == 4)
        put32(to->at, (uint32_t)size);
    else
        put16(to->at, (uint16_t)size);
    memcpy(to->at + width, from, (size_t)size);
    to->at += width + size;
    return true;
}

/* Add a text, or the text of a number or boolean as Java writes it. */
static bool put_value(Head *to, int width, PyObject *value)
{
    char digits[24];
    Py_ssize_t size = 0;
    const char *text = digits;
    int beyond = 0;
    if (PyUnicode_CheckExact(value))
        text = PyUnicode_AsUTF8AndSize(value, &size);
    else if (PyBool_Check(value))
        size = (Py_ssize_t)strlen(text = value == Py_True ? "true" : "false");
    else if (PyLong_Check(value)) /* also of a subclass, as codes are */
        size = snprintf(digits, sizeof digits, "%lld", PyLong_AsLongLongAndOverflow(value, &beyond));
    else
        return false;
    return text && !beyond && put_sized(to, width, text, size);
}

/* frame_head(code, language, version, opaque, flag, remark, fields, body_bytes) -> all bytes before the body of a frame with a binary
   header; None if Python must write it. */
PyObject *native_frame_head(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    long numbers[5], body_bytes = PyLong_AsLong(args[7]);
    for (int i = 0; i < 5; i++)
        numbers[i] = PyLong_AsLong(args[i]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *remark = args[5], *fields = args[6], *name, *value;
    long version = numbers[2], opaque = numbers[3], flag = numbers[4];
    bool right = PyDict_CheckExact(fields) && version == (int16_t)version && opaque == (int32_t)opaque && flag == (int32_t)flag;
    Head to;
    to.at = to.bytes + PREFIX_BYTES + HEAD_BYTES;
    right = right && (remark == Py_None ? put_sized(&to, 4, "", 0) : PyUnicode_CheckExact(remark) && put_value(&to, 4, remark));
    uint8_t *pairs = to.at;
    right = right && put_sized(&to, 4, "", 0);
    for (Py_ssize_t at = 0; right && PyDict_Next(fields, &at, &name, &value);)
        right = PyUnicode_CheckExact(name) && put_value(&to, 2, name) && put_value(&to, 4, value);
    Py_ssize_t header_bytes = to.at - to.bytes - PREFIX_BYTES;
    if (PyErr_Occurred() && !PyErr_ExceptionMatches(PyExc_UnicodeEncodeError))
        return NULL;
    PyErr_Clear();
    if (!right || body_bytes < 0 || body_bytes > INT32_MAX - 4 - header_bytes)
        Py_RETURN_NONE;
    put32(pairs, (uint32_t)(to.at - pairs - 4));
    put32(to.bytes, (uint32_t)(4 + header_bytes + body_bytes));
    put32(to.bytes + 4, (uint32_t)header_bytes | BINARY << 24);
    uint8_t *head = to.bytes + PREFIX_BYTES;
    put16(head, (uint16_t)numbers[0]); /* as Java's cast to short does */
    head[2] = (uint8_t)numbers[1];
    put16(head + 3, (uint16_t)version);
    put32(head + 5, (uint32_t)opaque);
    put32(head + 9, (uint32_t)flag);
    return PyBytes_FromStringAndSize((const char *)to.bytes, to.at - to.bytes);
}
