/* Writes many records at once: the counterpart of the end of store/mqstore/layout/arrays/encode.py. */

#include "native.h"

/* lay(out, position, data): copy `data` into `out` from front to back. */
PyObject *native_lay(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    int64_t position = PyLong_AsLongLong(args[1]);
    Py_buffer *out = hold(held, args[0], 1, -1, true, "out"), *data = hold(held, args[2], 1, -1, false, "data");
    if (PyErr_Occurred())
        return NULL;
    if (position < 0 || position > out->len || data->len > out->len - position)
        return PyErr_Format(PyExc_ValueError, "lay: %zd bytes at %lld are not within %zd", data->len, (long long)position, out->len);
    lay((uint8_t *)out->buf + position, data->buf, data->len);
    Py_RETURN_NONE;
}

/* lengths(bodies) -> (the greatest, their sum), of a list of plain bytes; None if anything else is in it. */
PyObject *native_lengths(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    if (!PyList_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "lengths takes a list");
    Py_ssize_t greatest = 0, sum = 0;
    for (Py_ssize_t i = 0; i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *body = PyList_GET_ITEM(args[0], i);
        if (!PyBytes_CheckExact(body))
            Py_RETURN_NONE;
        Py_ssize_t size = PyBytes_GET_SIZE(body);
        if (__builtin_add_overflow(sum, size, &sum)) /* possible: often all items are one object */
            return PyErr_Format(PyExc_OverflowError, "lengths: the sum is beyond 64 bits");
        greatest = size > greatest ? size : greatest;
    }
    return Py_BuildValue("nn", greatest, sum);
}

/* encode(headers, width, bodies, tails, flags, queue_offset, physical_offset, checksums) -> (records, positions), as bytearrays;
   the positions in int64: the physical offset of each record, and the end of the last one.

   Encode consecutive records: each has its header of `width` bytes, or the only one. Filled in are sizes and physical offset, with
   `checksums` the checksum over the whole, and unless they are None its flag (`flags` is a list of as many ints) and a queue offset
   that increases from the given one. `bodies` is a list of bytes, `tails` a list of the same length or one tail for all. */
PyObject *native_encode(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    if (!PyBytes_Check(args[0]) || !PyList_Check(args[2]) ||
        !(PyList_Check(args[3]) || PyBytes_Check(args[3])) || !(PyList_Check(args[4]) || args[4] == Py_None))
        return PyErr_Format(PyExc_TypeError, "encode takes headers, their width, bodies, tails, flags, two offsets and checksums");
    bool each = PyList_Check(args[3]), flagged = args[4] != Py_None, numbered = args[5] != Py_None;
    long long queue_offset = numbered ? PyLong_AsLongLong(args[5]) : 0, physical_offset = PyLong_AsLongLong(args[6]);
    Py_ssize_t width = PyLong_AsSsize_t(args[1]), count = PyList_GET_SIZE(args[2]), total = 0;
    int checksums = PyObject_IsTrue(args[7]);
    if (PyErr_Occurred())
        return NULL;
    bool shared = PyBytes_GET_SIZE(args[0]) == width;
    if (width < BODY_AT_V4 || width > BODY_AT_V4 + 2 * IPV6_EXTRA || (!shared && PyBytes_GET_SIZE(args[0]) / width != count) ||
        (each && PyList_GET_SIZE(args[3]) != count) || (flagged && PyList_GET_SIZE(args[4]) != count))
        return PyErr_Format(PyExc_ValueError, "encode: no header, or not as many headers, tails or flags as bodies");
    PyObject *positions = PyByteArray_FromStringAndSize(NULL, (count + 1) * (Py_ssize_t)sizeof(int64_t)), *records = NULL;
    if (!positions)
        return NULL;
    int64_t *at = (int64_t *)PyByteArray_AS_STRING(positions);
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *body = PyList_GET_ITEM(args[2], i), *tail = each ? PyList_GET_ITEM(args[3], i) : args[3];
        if (!PyBytes_Check(body) || !PyBytes_Check(tail) || (flagged && !PyLong_Check(PyList_GET_ITEM(args[4], i)))) {
            PyErr_SetString(PyExc_TypeError, "encode: bodies and tails must be bytes, flags int");
            goto failed;
        }
        at[i] = physical_offset + total;
        total += width + PyBytes_GET_SIZE(body) + PyBytes_GET_SIZE(tail);
        if (total > INT32_MAX) {
            PyErr_SetString(PyExc_OverflowError, "encode: the records do not fit in a segment");
            goto failed;
        }
    }
    at[count] = physical_offset + total;
    if (!(records = PyByteArray_FromStringAndSize(NULL, total)))
        goto failed;
    /* From here on only the conversion of a flag, which is an int, calls Python: the lists do not change. */
    const char *header = PyBytes_AS_STRING(args[0]);
    uint8_t *to = (uint8_t *)PyByteArray_AS_STRING(records), *ended[SIDE_BY_SIDE];
    size_t sizes_of[SIDE_BY_SIDE];
    int together = 0;
    for (Py_ssize_t i = 0; i < count; i++, header += shared ? 0 : width) {
        PyObject *body = PyList_GET_ITEM(args[2], i), *tail = each ? PyList_GET_ITEM(args[3], i) : args[3];
        size_t body_size = (size_t)PyBytes_GET_SIZE(body);
        memcpy(to, header, (size_t)width);
        memcpy(to + width, PyBytes_AS_STRING(body), body_size);
        memcpy(to + width + body_size, PyBytes_AS_STRING(tail), (size_t)PyBytes_GET_SIZE(tail));
        put32(to, (uint32_t)(at[i + 1] - at[i]));
        put32(to + width - BODY_LENGTH_BYTES, (uint32_t)body_size);
        put64(to + PHYSICAL_OFFSET_AT, (uint64_t)at[i]);
        if (numbered)
            put64(to + QUEUE_OFFSET_AT, (uint64_t)(queue_offset + i));
        if (flagged) {
            long flag = PyLong_AsLong(PyList_GET_ITEM(args[4], i));
            if (flag == -1 && PyErr_Occurred())
                goto failed;
            put32(to + FLAG_AT, (uint32_t)flag);
        }
        sizes_of[together] = (size_t)(at[i + 1] - at[i]);
        ended[together++] = to;
        if (checksums && (together == SIDE_BY_SIDE || i == count - 1)) {
            uint32_t sums[SIDE_BY_SIDE];
            crc32c_records((const uint8_t *const *)ended, sizes_of, together, sums);
            for (int k = 0; k < together; k++)
                put32(ended[k] + CHECKSUM_AT, sums[k]);
        }
        together %= SIDE_BY_SIDE;
        to += at[i + 1] - at[i];
    }
    return Py_BuildValue("NN", records, positions);
failed:
    Py_XDECREF(records);
    Py_DECREF(positions);
    return NULL;
}

/* renumber(data, positions, offsets, places, timestamp): set queue offset, physical offset and store time of the record at each
   position, and recompute its checksum. */
PyObject *native_renumber(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    long long timestamp = PyLong_AsLongLong(args[4]);
    Py_buffer *data = hold(held, args[0], 1, -1, true, "data"), *positions = hold(held, args[1], 8, -1, false, "positions");
    Py_ssize_t count = positions->len / 8, i = 0;
    Py_buffer *offsets = hold(held, args[2], 8, count, false, "offsets"), *places = hold(held, args[3], 8, count, false, "places");
    if (PyErr_Occurred())
        return NULL;
    const int64_t *at = positions->buf;
    PyThreadState *others = PyEval_SaveThread();
    for (bool whole = true; whole && i < count;) {
        const uint8_t *records[SIDE_BY_SIDE];
        size_t sizes[SIDE_BY_SIDE];
        int together = 0;
        for (; i < count && together < SIDE_BY_SIDE; i++) {
            if (!(whole = at[i] >= 0 && at[i] <= data->len - MIN_RECORD_BYTES))
                break;
            uint8_t *record = (uint8_t *)data->buf + at[i];
            int64_t size = (int32_t)get32(record);
            int64_t moved = get32(record + SYS_FLAG_AT) & BORN_HOST_V6 ? IPV6_EXTRA : 0;
            if (!(whole = size >= MIN_RECORD_BYTES + moved && size <= data->len - at[i]))
                break;
            put64(record + QUEUE_OFFSET_AT, ((const uint64_t *)offsets->buf)[i]);
            put64(record + PHYSICAL_OFFSET_AT, ((const uint64_t *)places->buf)[i]);
            put64(record + STORE_TIMESTAMP_AT_V4 + moved, (uint64_t)timestamp);
            records[together] = record;
            sizes[together++] = (size_t)size;
        }
        uint32_t sums[SIDE_BY_SIDE];
        crc32c_records(records, sizes, together, sums);
        for (int k = 0; k < together; k++)
            put32((uint8_t *)data->buf + at[i - together + k] + CHECKSUM_AT, sums[k]);
    }
    PyEval_RestoreThread(others);
    if (i < count)
        return PyErr_Format(PyExc_IndexError, "no record at %lld of %zd bytes", (long long)at[i], data->len);
    Py_RETURN_NONE;
}
