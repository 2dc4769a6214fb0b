/* Copies stored messages to other queues: restores them, adds an id, splits them into parts. A copy is a tuple like `Copy` of
   store/mqstore/log/writing/outgoing.py: message, topic, queue id, properties. */

#define _GNU_SOURCE
#include "native.h"

/* Return true if a pair of `properties` starts with one of `names` (bytes that end in 01) and, if `filled`, has a value. */
static bool has_one_of(const char *properties, Py_ssize_t size, PyObject *names, bool filled)
{
    for (const char *at = properties, *end = properties + size; at < end;) {
        const char *stop = memchr(at, 2, (size_t)(end - at));
        stop = stop ? stop : end;
        for (Py_ssize_t i = 0; i < PyTuple_GET_SIZE(names); i++) {
            PyObject *name = PyTuple_GET_ITEM(names, i);
            Py_ssize_t bytes = PyBytes_GET_SIZE(name);
            if (stop - at >= bytes + filled && !memcmp(at, PyBytes_AS_STRING(name), (size_t)bytes))
                return true;
        }
        at = stop + 1;
    }
    return false;
}

static bool are_bytes(PyObject *names)
{
    bool so = PyTuple_Check(names);
    for (Py_ssize_t i = 0; so && i < PyTuple_GET_SIZE(names); i++)
        so = PyBytes_Check(PyTuple_GET_ITEM(names, i));
    return so;
}

static bool is_copy(PyObject *copy)
{
    return PyTuple_Check(copy) && PyTuple_GET_SIZE(copy) == 4 && is_a(PyTuple_GET_ITEM(copy, 0), &LocatedType) &&
           PyBytes_CheckExact(PyTuple_GET_ITEM(copy, 3));
}

/* Takes the reference to `properties`, which may be NULL. */
static PyObject *copy_of(PyObject *message, PyObject *topic, PyObject *queue_id, PyObject *properties)
{
    PyObject *copy = properties ? PyTuple_Pack(4, message, topic, queue_id, properties) : NULL;
    Py_XDECREF(properties);
    return copy;
}

/* Return the position of the last `mark` in the data, or -1. */
static Py_ssize_t last_of(const char *data, Py_ssize_t size, const char *mark, Py_ssize_t mark_bytes)
{
    for (Py_ssize_t at = size - mark_bytes; at >= 0; at--)
        if (data[at] == mark[0] && !memcmp(data + at, mark, (size_t)mark_bytes))
            return at;
    return -1;
}

/* restore(messages, first, mark, ways, names, copies) -> count

   Restore messages of a list by `ways`, from index `first` to the first one that Python must restore, and append their copies to
   `copies`. The suffix of a message's properties starts after the first byte of their last `mark`. `ways` maps such a suffix to a
   topic, a queue id, and the suffix of the copy. The properties before it are kept. A message that has one of `names` there is
   left to Python, and so is one with properties that may leave no room for a reason (`set_reason`). */
PyObject *native_restore(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    if (!PyList_Check(args[0]) || !PyBytes_Check(args[2]) || !PyBytes_GET_SIZE(args[2]) || !PyDict_Check(args[3]) ||
        !are_bytes(args[4]) || !PyList_Check(args[5]))
        return PyErr_Format(PyExc_TypeError, "restore takes a list, an index, bytes, a dict, a tuple of bytes and a list");
    Py_ssize_t first = PyLong_AsSsize_t(args[1]), i = first;
    if (first == -1 && PyErr_Occurred())
        return NULL;
    if (first < 0)
        return PyErr_Format(PyExc_ValueError, "restore: a negative index");
    PyObject *known_end = NULL, *way = NULL; /* of the message before, whose suffix is often the same */
    Near near = {0};
    bool failed = false;
    for (; i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *message = PyList_GET_ITEM(args[0], i);
        Parts parts;
        if (!is_a(message, &LocatedType))
            break;
        if ((failed = near_record(&near, (Located *)message, &parts) < 0))
            break;
        const char *properties = (const char *)near.view.buf + parts.properties;
        Py_ssize_t size = (Py_ssize_t)parts.properties_size;
        if (size > MAX_PROPERTIES_BYTES / 8)
            break;
        Py_ssize_t begin = last_of(properties, size, PyBytes_AS_STRING(args[2]), PyBytes_GET_SIZE(args[2])) + 1;
        if (!known_end || PyBytes_GET_SIZE(known_end) != size - begin ||
            memcmp(PyBytes_AS_STRING(known_end), properties + begin, (size_t)(size - begin))) {
            Py_XSETREF(known_end, PyBytes_FromStringAndSize(properties + begin, size - begin));
            way = known_end ? PyDict_GetItemWithError(args[3], known_end) : NULL;
            if ((failed = !way && PyErr_Occurred()))
                break;
        }
        if (!way || !PyTuple_Check(way) || PyTuple_GET_SIZE(way) != 3 || !PyBytes_Check(PyTuple_GET_ITEM(way, 2)) ||
            has_one_of(properties, begin, args[4], false))
            break;
        const char *end = PyBytes_AS_STRING(PyTuple_GET_ITEM(way, 2));
        Py_ssize_t end_bytes = PyBytes_GET_SIZE(PyTuple_GET_ITEM(way, 2));
        PyObject *stored = PyBytes_FromStringAndSize(NULL, begin + end_bytes);
        if (stored) {
            memcpy(PyBytes_AS_STRING(stored), properties, (size_t)begin);
            memcpy(PyBytes_AS_STRING(stored) + begin, end, (size_t)end_bytes);
        }
        PyObject *copy = copy_of(message, PyTuple_GET_ITEM(way, 0), PyTuple_GET_ITEM(way, 1), stored);
        failed = !copy || PyList_Append(args[5], copy) < 0;
        Py_XDECREF(copy);
        if (failed)
            break;
    }
    Py_XDECREF(known_end);
    near_close(&near);
    return failed ? NULL : PyLong_FromSsize_t(i - first);
}

/* identify(copies, names, origin) -> list of copies, each with a property that identifies it: one of `names` with a value, or its
   message's id, added with the name `origin`. Stops at the first item that is not a copy. */
PyObject *native_identify(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    if (!PyList_Check(args[0]) || !are_bytes(args[1]) || !PyBytes_Check(args[2]))
        return PyErr_Format(PyExc_TypeError, "identify takes a list, a tuple of bytes and bytes");
    PyObject *known = PyList_New(0);
    Near near = {0};
    bool failed = !known;
    for (Py_ssize_t i = 0; !failed && i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *copy = PyList_GET_ITEM(args[0], i);
        if (!is_copy(copy))
            break;
        PyObject *message = PyTuple_GET_ITEM(copy, 0), *properties = PyTuple_GET_ITEM(copy, 3);
        const char *data = PyBytes_AS_STRING(properties);
        Py_ssize_t size = PyBytes_GET_SIZE(properties), name = PyBytes_GET_SIZE(args[2]);
        if (has_one_of(data, size, args[1], true)) {
            failed = PyList_Append(known, copy) < 0;
            continue;
        }
        char id[MAX_ID];
        Parts parts;
        if ((failed = near_record(&near, (Located *)message, &parts) < 0))
            break;
        Py_ssize_t id_bytes = message_id_of((const uint8_t *)near.view.buf + ((Located *)message)->start, id);
        PyObject *longer = PyBytes_FromStringAndSize(NULL, size + name + id_bytes + 1);
        if (longer) {
            char *to = PyBytes_AS_STRING(longer);
            memcpy(to, data, (size_t)size);
            memcpy(to + size, PyBytes_AS_STRING(args[2]), (size_t)name);
            memcpy(to + size + name, id, (size_t)id_bytes);
            to[size + name + id_bytes] = 2;
        }
        PyObject *made = copy_of(message, PyTuple_GET_ITEM(copy, 1), PyTuple_GET_ITEM(copy, 2), longer);
        failed = !made || PyList_Append(known, made) < 0;
        Py_XDECREF(made);
    }
    near_close(&near);
    if (failed)
        Py_CLEAR(known);
    return known;
}

/* Return the start of a tail of a queue in `putters`: its `plain_tail` without the length of the properties. A new reference,
   and the queue, borrowed; NULL without an exception if Python must look. */
static PyObject *begin_of(PyObject *putters, PyObject *topic, PyObject *queue_id, PyObject **queue)
{
    static const char read_again[] = SCHEDULE_TOPIC; /* Python checks that the properties of its records are readable */
    PyObject *tail = NULL;
    *queue = putter_of(putters, topic, queue_id, &tail);
    if (tail && memmem(PyBytes_AS_STRING(tail), (size_t)PyBytes_GET_SIZE(tail), read_again, sizeof read_again - 1))
        Py_CLEAR(tail);
    return tail;
}

/* copy_parts(copies, first, putters, overhead, room, queues, heads, bodies, tails) -> (count, room)

   Prepare copies of a list like `LogWriter.copy_many`, from index `first` to the first one that is not ordinary or whose queue is
   not in `putters`. Their queues and parts are appended to the four lists. A tail is the queue's `plain_tail` with the length of
   the properties, and the properties. The returned `room` is reduced by `overhead`, body and tail of each. */
PyObject *native_copy_parts(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    static const char inner[] = "INNER_", crc[] = "__CRC32#";
    if (!PyList_Check(args[0]) || !PyDict_Check(args[2]) || !PyList_Check(args[5]) || !PyList_Check(args[6]) ||
        !PyList_Check(args[7]) || !PyList_Check(args[8]))
        return PyErr_Format(PyExc_TypeError, "copy_parts takes a list, an index, a dict, two numbers and four lists");
    Py_ssize_t first = PyLong_AsSsize_t(args[1]), i = first;
    long long overhead = PyLong_AsLongLong(args[3]), room = PyLong_AsLongLong(args[4]);
    if (PyErr_Occurred())
        return NULL;
    if (first < 0 || overhead < 0)
        return PyErr_Format(PyExc_ValueError, "copy_parts: a negative number");
    PyObject *topic = NULL, *queue_id = NULL, *queue = NULL, *begin = NULL;
    Near near = {0};
    for (; i < PyList_GET_SIZE(args[0]); i++) {
        PyObject *copy = PyList_GET_ITEM(args[0], i);
        if (!is_copy(copy))
            break;
        if (PyTuple_GET_ITEM(copy, 1) != topic || PyTuple_GET_ITEM(copy, 2) != queue_id) {
            topic = PyTuple_GET_ITEM(copy, 1);
            queue_id = PyTuple_GET_ITEM(copy, 2);
            Py_XSETREF(begin, begin_of(args[2], topic, queue_id, &queue));
            if (!begin)
                break;
        }
        const char *data = PyBytes_AS_STRING(PyTuple_GET_ITEM(copy, 3));
        Py_ssize_t size = PyBytes_GET_SIZE(PyTuple_GET_ITEM(copy, 3)), plain = PyBytes_GET_SIZE(begin);
        if (size > MAX_PROPERTIES_BYTES || memmem(data, (size_t)size, inner, sizeof inner - 1) ||
            memmem(data, (size_t)size, crc, sizeof crc - 1))
            break;
        PyObject *head, *body;
        if (located_plain((Located *)PyTuple_GET_ITEM(copy, 0), &near, &head, &body) <= 0)
            break;
        long long left = room - overhead - PyBytes_GET_SIZE(body) - plain - size;
        PyObject *tail = left < 0 ? NULL : PyBytes_FromStringAndSize(NULL, plain + size);
        bool kept = false;
        if (tail) {
            lay_tail(PyBytes_AS_STRING(tail), PyBytes_AS_STRING(begin), plain, data, size);
            kept = PyList_Append(args[5], queue) == 0 && PyList_Append(args[6], head) == 0 &&
                   PyList_Append(args[7], body) == 0 && PyList_Append(args[8], tail) == 0;
        }
        Py_DECREF(head);
        Py_DECREF(body);
        Py_XDECREF(tail);
        if (!kept)
            break;
        room = left;
    }
    Py_XDECREF(begin);
    near_close(&near);
    return PyErr_Occurred() ? NULL : Py_BuildValue("nL", i - first, room);
}

/* Records of messages: where they are, if they follow each other in one buffer, and their size. */
typedef struct {
    PyObject *buffer;
    long long first, size;
    bool together;
} Records;

/* Find the records of a list of messages, or with `to` copy as many bytes as were found before. False if Python must read one, as
   the body of a reference, with or without an exception. */
static bool find_records(PyObject *messages, Records *records, char *to)
{
    Near near = {0};
    long long size = 0;
    bool plain = true;
    for (Py_ssize_t i = 0; plain && i < PyList_GET_SIZE(messages); i++) {
        Located *message = (Located *)PyList_GET_ITEM(messages, i);
        Parts parts;
        if (!(plain = is_a((PyObject *)message, &LocatedType) && near_record(&near, message, &parts) == 0))
            break;
        const uint8_t *record = (const uint8_t *)near.view.buf + message->start;
        plain = (get32(record + SYS_FLAG_AT) & BODY_ELSEWHERE) != BODY_ELSEWHERE;
        if (!to && !i)
            *records = (Records){Py_NewRef(near.view.obj), message->start, 0, true};
        records->together = records->together && near.view.obj == records->buffer && message->start == records->first + size;
        if (to && (plain = plain && parts.size <= records->size - size)) /* another process may have changed it meanwhile */
            memcpy(to + size, record, (size_t)parts.size);
        size += parts.size;
    }
    near_close(&near);
    plain = plain && (!to || size == records->size);
    records->size = to ? records->size : size;
    return plain;
}

/* records_of(messages) -> the bytes of their records, one after the other: a view of their buffer if they follow each other there,
   otherwise a copy. None if Python must read one. */
PyObject *native_records_of(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    if (!PyList_Check(args[0]))
        return PyErr_Format(PyExc_TypeError, "records_of takes a list");
    Records found = {0};
    PyObject *result = NULL;
    if (!find_records(args[0], &found, NULL)) {
    } else if (found.together) {
        PyObject *view = PyMemoryView_FromObject(found.buffer);
        result = view ? PySequence_GetSlice(view, found.first, found.first + found.size) : NULL;
        Py_XDECREF(view);
    } else if ((result = PyBytes_FromStringAndSize(NULL, found.size)) &&
               !find_records(args[0], &found, PyBytes_AS_STRING(result))) {
        Py_CLEAR(result);
    }
    Py_XDECREF(found.buffer);
    return result ? result : PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
}
