/* Many records at once, written: the counterpart of the end of store/mqstore/layout/encode.py. */

#include "native.h"

/* assemble(headers, bodies, tails, out, checksums): header, body and tail of each record, one after the other in `out`.

   `headers` are all of one width, `bodies` a list of bytes, `tails` a list of as many or one for all. With `checksums`
   the field for it is filled in, over the whole record (2.10). */
PyObject *native_assemble(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 5 || !PyList_Check(args[1]) || !(PyList_Check(args[2]) || PyBytes_Check(args[2]))) {
        PyErr_SetString(PyExc_TypeError, "assemble takes headers, bodies, tails, out and checksums");
        return NULL;
    }
    Py_ssize_t count = PyList_GET_SIZE(args[1]);
    bool each = PyList_Check(args[2]);
    int checksums = PyObject_IsTrue(args[4]);
    if (checksums < 0)
        return NULL;
    if (!count || (each && PyList_GET_SIZE(args[2]) != count)) {
        PyErr_SetString(PyExc_ValueError, "assemble: no bodies, or not as many tails");
        return NULL;
    }
    Py_buffer headers, out;
    if (array_of(args[0], &headers, 1, -1, false, "headers") < 0)
        return NULL;
    PyObject *result = NULL;
    if (array_of(args[3], &out, 1, -1, true, "out") < 0)
        goto no_out;
    Py_ssize_t width = headers.len / count;
    if (headers.len % count || width < QUEUE_ID_AT) {
        PyErr_Format(PyExc_ValueError, "%zd bytes are no %zd headers", headers.len, count);
        goto done;
    }
    const uint8_t *header = headers.buf;
    uint8_t *to = out.buf;
    Py_ssize_t room = out.len;
    for (Py_ssize_t i = 0; i < count; i++, header += width) {
        /* No call of Python in this loop: the lists stay as they are. */
        PyObject *body = PyList_GET_ITEM(args[1], i), *tail = each ? PyList_GET_ITEM(args[2], i) : args[2];
        if (!PyBytes_Check(body) || !PyBytes_Check(tail)) {
            PyErr_SetString(PyExc_TypeError, "assemble: bodies and tails must be bytes");
            goto done;
        }
        Py_ssize_t body_size = PyBytes_GET_SIZE(body), tail_size = PyBytes_GET_SIZE(tail);
        if (width > room || body_size > room - width || tail_size > room - width - body_size) {
            PyErr_SetString(PyExc_ValueError, "assemble: out is too short");
            goto done;
        }
        memcpy(to, header, (size_t)width);
        memcpy(to + width, PyBytes_AS_STRING(body), (size_t)body_size);
        memcpy(to + width + body_size, PyBytes_AS_STRING(tail), (size_t)tail_size);
        Py_ssize_t size = width + body_size + tail_size;
        if (checksums)
            put32(to + CHECKSUM_AT, crc32c_record(to, (size_t)size));
        to += size;
        room -= size;
    }
    if (room)
        PyErr_Format(PyExc_ValueError, "assemble: out has %zd bytes too many", room);
    else
        result = Py_NewRef(Py_None);
done:
    PyBuffer_Release(&out);
no_out:
    PyBuffer_Release(&headers);
    return result;
}
