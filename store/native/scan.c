/* Reads many records at once: the counterparts of functions in store/mqstore/layout/arrays/scan.py and columnar/arrow.py.

   The input may be damaged, on purpose: nothing reads outside the buffer, and every length is compared with the room that is
   left before it is used. */

#include "native.h"

Py_buffer *hold(Buffers *held, PyObject *object, Py_ssize_t width, Py_ssize_t count, bool writable, const char *name)
{
    static Py_buffer none;
    if (held->count == sizeof held->views / sizeof *held->views) {
        PyErr_Format(PyExc_SystemError, "%s: more buffers than `Buffers` has room for", name);
        return &none;
    }
    Py_buffer *view = &held->views[held->count];
    if (PyErr_Occurred() || PyObject_GetBuffer(object, view, PyBUF_C_CONTIGUOUS | (writable ? PyBUF_WRITABLE : 0)) < 0)
        return &none;
    held->count++;
    uintptr_t both = (uintptr_t)view->buf | (uintptr_t)view->len; /* a width is a power of two */
    if ((view->len && both & (uintptr_t)(width - 1)) || (count >= 0 && view->len != count * width)) {
        PyErr_Format(PyExc_ValueError, "%s: expected %zd items of %zd bytes, got %zd bytes", name, count, width, view->len);
        return &none;
    }
    return view;
}

bool has_arguments(const char *name, Py_ssize_t got, Py_ssize_t wanted)
{
    if (got != wanted)
        PyErr_Format(PyExc_TypeError, "%s takes %zd arguments, got %zd", name, wanted, got);
    return got == wanted;
}

Py_buffer *hold_range(Buffers *held, PyObject *object, int64_t start, int64_t end)
{
    Py_buffer *view = hold(held, object, 1, -1, false, "buffer");
    if (!PyErr_Occurred() && (start < 0 || start > end || end > view->len))
        PyErr_Format(PyExc_ValueError, "the range %lld..%lld is not within a buffer of %zd bytes", (long long)start, (long long)end,
                     view->len);
    return view;
}

/* walk(buffer, start, end, limit) -> (positions, stop): int64 positions as a bytearray. See `scan.walk`. */
PyObject *native_walk(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    int64_t start = PyLong_AsLongLong(args[1]), end = PyLong_AsLongLong(args[2]), limit = PyLong_AsLongLong(args[3]);
    Py_buffer *view = hold_range(held, args[0], start, end);
    if (PyErr_Occurred())
        return NULL;
    const uint8_t *data = view->buf;
    int64_t count = 0, most = (end - start) / MIN_RECORD_BYTES;
    int64_t *found = malloc((size_t)(limit < most ? limit : most) * sizeof *found + 1); /* unused pages take no memory */
    PyThreadState *others = PyEval_SaveThread();
    while (found && count < limit && end - start >= MIN_RECORD_BYTES) {
        int32_t size = (int32_t)get32(data + start);
        if (size < MIN_RECORD_BYTES || size > end - start || !is_magic((int32_t)get32(data + start + MAGIC_AT)))
            break;
        found[count++] = start;
        /* Each step depends on the one before, so every record would wait for memory. Most records are small: prefetch. */
        fetch(data + start + AHEAD, size < AHEAD ? size : 1);
        start += size;
    }
    PyEval_RestoreThread(others);
    if (!found)
        return PyErr_NoMemory();
    PyObject *positions = PyByteArray_FromStringAndSize((char *)found, (Py_ssize_t)count * (Py_ssize_t)sizeof *found);
    free(found);
    return positions ? Py_BuildValue("NL", positions, (long long)start) : NULL;
}

/* join(buffer, starts, sizes, out): copy the ranges [start, start + size) one after the other. `out` is exactly as long. */
PyObject *native_join(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    Py_buffer *view = hold(held, args[0], 1, -1, false, "buffer"), *starts = hold(held, args[1], 8, -1, false, "starts");
    Py_ssize_t count = starts->len / 8;
    Py_buffer *sizes = hold(held, args[2], 8, count, false, "sizes"), *out = hold(held, args[3], 1, -1, true, "out");
    if (PyErr_Occurred())
        return NULL;
    const int64_t *at = starts->buf, *size = sizes->buf;
    const uint8_t *data = view->buf;
    uint8_t *to = out->buf;
    int64_t room = out->len;
    Py_ssize_t i = 0;
    PyThreadState *others = out->len >= LONG_BYTES ? PyEval_SaveThread() : NULL;
    for (; i < count; i++) {
        if (at[i] < 0 || size[i] < 0 || size[i] > room || at[i] > view->len || size[i] > view->len - at[i])
            break;
        if (i + NEXT < count)
            fetch_at(data, view->len, at[i + NEXT], size[i + NEXT]);
        memcpy(to, data + at[i], (size_t)size[i]);
        to += size[i];
        room -= size[i];
    }
    if (others)
        PyEval_RestoreThread(others);
    if (i < count)
        return PyErr_Format(PyExc_IndexError, "%lld bytes at %lld of a buffer of %zd, with room for %lld", (long long)size[i],
                            (long long)at[i], view->len, (long long)room);
    if (room)
        return PyErr_Format(PyExc_ValueError, "out has %lld bytes more than the ranges", (long long)room);
    Py_RETURN_NONE;
}

bool parts_of(const uint8_t *data, int64_t length, int64_t position, Parts *parts)
{
    const uint8_t *record = data + position;
    int64_t size = (int32_t)get32(record);
    int32_t magic = (int32_t)get32(record + MAGIC_AT);
    int64_t second = magic == MAGIC_V2; /* V2 has one more byte of topicLength */
    int64_t extra = extra_of(get32(record + SYS_FLAG_AT));
    int64_t spare = size - MIN_RECORD_BYTES - extra - second; /* what body, topic and properties share */
    if (!is_magic(magic) || spare <= 0 || size > length - position)
        return false;
    int64_t body_size = (int32_t)get32(record + BODY_LENGTH_AT_V4 + extra);
    if (body_size < 0 || body_size >= spare)
        return false;
    spare -= body_size;
    const uint8_t *at = record + BODY_AT_V4 + extra + body_size;
    int64_t topic_size = second ? (int16_t)get16(at) : (int8_t)at[0];
    if (topic_size <= 0 || topic_size > spare)
        return false;
    at += 1 + second;
    int64_t properties_size = (int16_t)get16(at + topic_size);
    if (properties_size != spare - topic_size)
        return false;
    parts->size = size;
    parts->body = position + BODY_AT_V4 + extra;
    parts->body_size = body_size;
    parts->topic = at - data;
    parts->topic_size = topic_size;
    parts->properties = parts->topic + topic_size + PROPERTIES_LENGTH_BYTES;
    parts->properties_size = properties_size;
    return true;
}

/* measure(buffer, positions, ok, table): `ok` is a bool for each record, `table` as in `note_parts`. See `Headers.parts`. */
PyObject *native_measure(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    Py_buffer *view = hold(held, args[0], 1, -1, false, "buffer"), *positions = hold(held, args[1], 8, -1, false, "positions");
    Py_ssize_t count = positions->len / 8;
    Py_buffer *ok = hold(held, args[2], 1, count, true, "ok"), *table = hold(held, args[3], 8, PARTS * count, true, "table");
    if (PyErr_Occurred())
        return NULL;
    const int64_t *at = positions->buf;
    int64_t *row = table->buf;
    uint8_t *good = ok->buf;
    for (Py_ssize_t i = 0; i < count; i++) {
        if (at[i] < 0 || at[i] > view->len - MIN_RECORD_BYTES)
            return PyErr_Format(PyExc_ValueError, "no record can start at %lld in %zd bytes", (long long)at[i], view->len);
        if (i + NEXT < count)
            fetch_at(view->buf, view->len, at[i + NEXT], BODY_AT_V4);
        Parts parts = {0};
        good[i] = parts_of(view->buf, view->len, at[i], &parts);
        note_parts(row, count, i, &parts);
    }
    Py_RETURN_NONE;
}

/* Return true if each property DELAY is a number of few digits. */
static bool delays_are_short(const uint8_t *at, int64_t size)
{
    for (const uint8_t *stop = at + size; at < stop;) {
        const uint8_t *end = memchr(at, 2, (size_t)(stop - at));
        end = end ? end : stop;
        if (end - at >= 6 && !memcmp(at, "DELAY\1", 6)) {
            at += 6;
            if (end - at < 1 || end - at > 9)
                return false;
            for (; at < end; at++)
                if (*at < '0' || *at > '9')
                    return false;
        }
        at = end + 1;
    }
    return true;
}

/* Return true if "INNER_" occurs in the bytes. For such short input `memmem` takes longer to start than to search. */
static inline bool has_inner(const uint8_t *at, int64_t size)
{
    const uint8_t *stop = at + size - 5;
    while (at < stop && (at = memchr(at, 'I', (size_t)(stop - at)))) {
        if (!memcmp(at, "INNER_", 6))
            return true;
        at++;
    }
    return false;
}

/* Return the size of a record that is sound: its lengths add up, and its CRC-32C over the whole matches (not compared without
   `checksum`). 0 for all others, and for rare kinds that Python checks: records of the schedule topic with an odd DELAY, or with
   a property INNER_..., which need readable numbers, or with something like a CRC tail. */
int64_t sound_record(const uint8_t *data, int64_t length, int64_t position, int64_t physical_offset, bool checksum,
                     Parts *parts)
{
    if (position < 0 || length < MIN_RECORD_BYTES || position > length - MIN_RECORD_BYTES ||
        !parts_of(data, length, position, parts))
        return 0;
    const uint8_t *record = data + position, *properties = data + parts->properties;
    int64_t size = parts->size;
    if ((int64_t)get64(record + PHYSICAL_OFFSET_AT) != physical_offset)
        return 0;
    if (has_topic(data, parts, SCHEDULE_TOPIC, sizeof SCHEDULE_TOPIC - 1) &&
        !delays_are_short(properties, parts->properties_size))
        return 0;
    if (parts->properties_size >= CRC_TAIL_BYTES && !memcmp(record + size - CRC_TAIL_BYTES, "__CRC32#", 8))
        return 0;
    if (has_inner(properties, parts->properties_size))
        return 0;
    return !checksum || crc32c_record(record, (size_t)size) == get32(record + CHECKSUM_AT) ? size : 0;
}

/* record_holds(buffer, position, limit, physical_offset) -> `sound_record` of the record that starts there and ends by `limit`.
   On 0, `record.check_record` checks again: the record may be of a rare kind. */
PyObject *native_record_holds(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    int64_t position = PyLong_AsLongLong(args[1]), limit = PyLong_AsLongLong(args[2]);
    int64_t physical_offset = PyLong_AsLongLong(args[3]);
    Py_buffer *view = hold(held, args[0], 1, -1, false, "buffer");
    if (PyErr_Occurred())
        return NULL;
    Parts parts;
    int64_t end = limit < view->len ? limit : view->len;
    return PyLong_FromLongLong(sound_record(view->buf, end, position, physical_offset, true, &parts));
}

/* pairs(data, blob_ends) -> (table, room, count, distinct): a bytearray of four rows of `room` int64, of which the first `count`
   are used: start, separator, end and blob of each pair (see `Pairs`). `blob_ends` are int64, ascending. `distinct` is true if no
   blob has a name twice or a name that is not ASCII: when decoded, different names may become the same. It is also false if a blob
   has too many pairs to compare them all. */
PyObject *native_pairs(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    Py_buffer *view = hold(held, args[0], 1, -1, false, "data"), *blob_ends = hold(held, args[1], 8, -1, false, "blob_ends");
    if (PyErr_Occurred())
        return NULL;
    const uint8_t *data = view->buf, *stop = data + view->len;
    const int64_t *closes = blob_ends->buf;
    int64_t blobs = blob_ends->len / 8, blob = 0, count = 0;
    Py_ssize_t room = view->len / SMALLEST_PAIR;
    PyObject *table = PyByteArray_FromStringAndSize(NULL, PAIR_ROWS * room * (Py_ssize_t)sizeof(int64_t));
    if (!table)
        return NULL;
    int64_t *row = (int64_t *)PyByteArray_AS_STRING(table), first = 0;
    bool distinct = true;
    PyThreadState *others = view->len >= LONG_BYTES ? PyEval_SaveThread() : NULL;
    for (const uint8_t *at = data, *end; (end = memchr(at, 2, (size_t)(stop - at))); at = end + 1) {
        const uint8_t *separator = end - at >= SMALLEST_PAIR - 1 ? memchr(at, 1, (size_t)(end - at)) : NULL;
        if (!separator || separator == at || separator == end - 1)
            continue;
        while (blob < blobs && closes[blob] < end - data) {
            blob++;
            first = count;
        }
        distinct = distinct && count - first < MANY_PAIRS;
        for (const uint8_t *c = at; distinct && c < separator; c++)
            distinct = *c < 0x80;
        for (int64_t i = first; distinct && i < count; i++)
            distinct = row[i + room] - row[i] != separator - at || memcmp(data + row[i], at, (size_t)(separator - at));
        row[count] = at - data;
        row[count + room] = separator - data;
        row[count + 2 * room] = end - data;
        row[count + 3 * room] = blob;
        count++;
    }
    if (others)
        PyEval_RestoreThread(others);
    return Py_BuildValue("NnLN", table, room, (long long)count, PyBool_FromLong(distinct));
}
