/* The hot path of a put: one record stored at the end of the log, in one call that nothing interrupts.

   `LogTail` is the base class of `CommitLog`, `QueueTail` that of a queue. Their numbers are C integers; their rules are those of
   `CommitLog.append`, which does whatever this declines. Declining means to return None without a change that readers see:
   after the end there may be part of a record if a call could not write all of it. */

#include "native.h"
#include <stddef.h>
#include <structmember.h>
#include <time.h>
#include <unistd.h>

/* --- the fields of a queue that a put uses --- */

#define NUMBERED(F) F(ref) F(plain_tail)

COLLECTED(numbered, QueueTail, NUMBERED)

static PyMemberDef numbered_members[] = {
    {"next_offset", T_LONGLONG, offsetof(QueueTail, next_offset), 0, "Offset of the next message."},
    {"queue_id", T_INT, offsetof(QueueTail, queue_id), 0, NULL},
    {"magic", T_INT, offsetof(QueueTail, magic), 0, "Magic of its records: V1, or V2 for a long topic."},
    {"ref", T_OBJECT, offsetof(QueueTail, ref), 0, "Its topic and id, for receipts."},
    {"plain_tail", T_OBJECT, offsetof(QueueTail, plain_tail), 0, "Topic and empty properties, as at the end of a record."},
    {NULL},
};

PyTypeObject QueueTailType = {
    COLLECTED_TYPE(numbered, QueueTail, PyType_GenericNew),
    .tp_doc = "The fields of a queue that a put uses.",
    .tp_members = numbered_members,
};

/* --- the end of the log --- */

/* Largest record that is written by a call, and largest body whose checksum is computed here: zlib's is faster for longer ones. */
enum { MOST_CALLED = 16384, MOST_SUMMED = 16384 };
/* Size of a batch from which it is written by a call, since new pages cost more by faults, and from which Python does it, which lets
   other threads run. Then the room that `LogWriter.check_room` wants after it. */
enum { LEAST_CALLED = 16384, MOST_TOGETHER = 131072, ROOM = 65536, ROOM_OF_EACH = 64 };

typedef struct {
    PyObject_HEAD
    long long end, alarm, base, limit, called_end;
    bool plain;           /* the checksum covers the whole record, otherwise the body */
    bool appending;       /* Python appends, in any thread, under its lock: then Python must do every put */
    int fd;               /* of the segment of `mapping`; -1: write only to the mapping */
    PyObject *mapping;    /* of the segment that contains `end`; used only while limit > -1 */
    PyObject *group;      /* GroupCommit, or None */
    PyObject *now_ns;     /* None: the system's clock */
    PyObject *on_alarm;
    PyObject *born_host, *store_host;
    PyObject *receipt;    /* the type: a tuple of seven */
} LogTail;

#define PRIVATE(F) F(mapping) F(now_ns) F(on_alarm) F(born_host) F(store_host) F(receipt)
#define OBJECTS(F) PRIVATE(F) F(group)

COLLECTED(tip, LogTail, OBJECTS)

/* Nanoseconds since the epoch; -1 with an exception. */
static long long now_of(LogTail *self)
{
    if (!self->now_ns || self->now_ns == Py_None) {
        struct timespec now;
        clock_gettime(CLOCK_REALTIME, &now);
        return now.tv_sec * 1000000000LL + now.tv_nsec;
    }
    PyObject *found = PyObject_CallNoArgs(self->now_ns);
    long long now = found ? PyLong_AsLongLong(found) : -1;
    Py_XDECREF(found);
    return now;
}

static const Extra NOTHING = {0};

/* Write an ordinary record, its checksum last (format#record). */
static void lay_record(LogTail *self, QueueTail *queue, uint8_t *record, const Stored *stored, const char *body,
                       Py_ssize_t body_size, const char *tail, Py_ssize_t tail_size, const Extra *extra)
{
    uint8_t *at = record;
    PyObject *born_host = extra->born_host ? extra->born_host : self->born_host;
    size_t born = (size_t)PyBytes_GET_SIZE(born_host), store = (size_t)PyBytes_GET_SIZE(self->store_host);
    put32(at, (uint32_t)stored->size);
    put32(at + MAGIC_AT, (uint32_t)queue->magic);
    put32(at + CHECKSUM_AT, 0);
    put32(at + QUEUE_ID_AT, (uint32_t)queue->queue_id);
    put32(at + FLAG_AT, extra->flag);
    put64(at + QUEUE_OFFSET_AT, (uint64_t)queue->next_offset);
    put64(at + PHYSICAL_OFFSET_AT, (uint64_t)stored->position);
    put32(at + SYS_FLAG_AT, extra->sys_flag | (born == IPV6_BYTES ? BORN_HOST_V6 : 0) | (store == IPV6_BYTES ? STORE_HOST_V6 : 0));
    put64(at + BORN_TIMESTAMP_AT, (uint64_t)(extra->born_host ? extra->born_ms : stored->now_ms));
    memcpy(at + BORN_HOST_AT, PyBytes_AS_STRING(born_host), born);
    at += born - IPV4_BYTES; /* which moves all fields after it */
    put64(at + STORE_TIMESTAMP_AT_V4, (uint64_t)stored->now_ms);
    memcpy(at + STORE_HOST_AT_V4, PyBytes_AS_STRING(self->store_host), store);
    at += store - IPV4_BYTES;
    put32(at + RECONSUME_TIMES_AT_V4, extra->reconsume_times);
    put64(at + PREPARED_OFFSET_AT_V4, 0);
    put32(at + BODY_LENGTH_AT_V4, (uint32_t)body_size);
    at = (uint8_t *)memcpy(at + BODY_AT_V4, body, (size_t)body_size) + body_size;
    if (extra->size)
        lay_tail((char *)at, tail, tail_size, extra->properties, extra->size);
    else
        memcpy(at, tail, (size_t)tail_size);
    put32(record + CHECKSUM_AT, self->plain ? crc32c_record(record, (size_t)stored->size)
                                            : crc32_body((const uint8_t *)body, (size_t)body_size));
}

PyObject *tuple_of(PyObject *type, PyObject **items, Py_ssize_t count)
{
    PyTypeObject *made = (PyTypeObject *)type;
    PyObject *tuple = made->tp_alloc(made, count);
    bool whole = tuple != NULL;
    for (Py_ssize_t i = 0; i < count; i++) {
        whole = whole && items[i];
        if (tuple)
            PyTuple_SET_ITEM(tuple, i, items[i]);
        else
            Py_XDECREF(items[i]);
    }
#if PY_VERSION_HEX >= 0x030E0000
    if (tuple)
        ((PyTupleObject *)tuple)->ob_hash = -1; /* not computed yet; the allocator sets 0 */
#endif
    if (!whole)
        Py_CLEAR(tuple);
    return tuple;
}

bool is_host(PyObject *host)
{
    return host && PyBytes_Check(host) && (PyBytes_GET_SIZE(host) == IPV4_BYTES || PyBytes_GET_SIZE(host) == IPV6_BYTES);
}

long long tip_now_ms(PyObject *tip)
{
    long long now_ns = now_of((LogTail *)tip);
    return now_ns < 0 ? -1 : now_ns / 1000000;
}

bool log_tail_is_open(PyObject *tip) { return ((LogTail *)tip)->limit >= 0; }

void lay_tail(char *to, const char *plain, Py_ssize_t plain_size, const char *properties, Py_ssize_t size)
{
    memcpy(to, plain, (size_t)plain_size);
    memcpy(to + plain_size, properties, (size_t)size);
    put16((uint8_t *)to + plain_size - PROPERTIES_LENGTH_BYTES, (uint16_t)size);
}

int log_tail_store(PyObject *tip, QueueTail *queue, const char *body, Py_ssize_t body_size, const char *tail, Py_ssize_t tail_size,
              const Extra *extra, Stored *stored)
{
    LogTail *self = (LogTail *)tip;
    extra = extra ? extra : &NOTHING;
    PyObject *born_host = extra->born_host ? extra->born_host : self->born_host;
    if ((!self->plain && body_size > MOST_SUMMED) || self->appending || !self->now_ns || !is_host(born_host) || !is_host(self->store_host))
        return 0;
    /* If every put waits for its sync, write by a call: each sync makes the pages of a mapping that were stored to read-only,
       which takes longer than the sync itself, and the next store faults again. */
    bool by_call = self->group && self->group != Py_None;
    Py_ssize_t hosts_size = PyBytes_GET_SIZE(born_host) + PyBytes_GET_SIZE(self->store_host);
    Py_ssize_t size = BODY_AT_V4 - 2 * IPV4_BYTES + hosts_size + body_size + tail_size + extra->size;
    if (size > INT32_MAX || (by_call && (self->fd < 0 || size > MOST_CALLED)))
        return 0;

    bool done = false;
    long long now_ns = now_of(self);
    if (now_ns == -1 && PyErr_Occurred())
        return -1;
    Py_buffer view;
    /* From here to the end of this block no Python code runs: no signal handler, no other thread. So the log's lock is not
       needed. While Python appends under that lock, `appending` is true. */
    if (self->end + size <= self->limit && self->mapping && self->mapping != Py_None) {
        if (PyObject_GetBuffer(self->mapping, &view, PyBUF_WRITABLE) < 0)
            return -1;
        long long position = self->end, at = position - self->base;
        if (at >= 0 && at <= view.len - size) {
            uint8_t called[MOST_CALLED], *record = by_call ? called : (uint8_t *)view.buf + at;
            *stored = (Stored){queue->next_offset, position, size, now_ns / 1000000 - (now_ns % 1000000 < 0)};
            lay_record(self, queue, record, stored, body, body_size, tail, tail_size, extra);
            /* After an error or a short write, Python writes over it, or raises the error. */
            done = !by_call || pwrite(self->fd, record, (size_t)size, at) == size;
            if (done) {
                queue->next_offset++;
                self->end = position + size;
            }
        }
        PyBuffer_Release(&view);
    }
    if (done && (self->end >= self->alarm || stored->position == self->called_end) && self->on_alarm && !succeeded(PyObject_CallNoArgs(self->on_alarm)))
        return -1;
    return done;
}

bool log_tail_has_receipts(PyObject *tip, QueueTail *queue) { return queue->ref && makes_tuples(((LogTail *)tip)->receipt); }

PyObject *log_tail_receipt(PyObject *tip, QueueTail *queue, const Stored *stored, PyObject *unique_key)
{
    LogTail *self = (LogTail *)tip;
    PyObject *items[RECEIPT_ITEMS] = {
        Py_NewRef(queue->ref),
        PyLong_FromLongLong(stored->offset),
        PyLong_FromLongLong(stored->position),
        PyLong_FromLongLong(stored->size),
        PyLong_FromLongLong(stored->now_ms),
        Py_NewRef(self->store_host),
        Py_NewRef(unique_key),
    };
    return tuple_of(self->receipt, items, RECEIPT_ITEMS);
}

/* put(queue, body, tail, unique_key) -> a receipt, or None if `append` must do it. */
static PyObject *log_tail_put(LogTail *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 4 || !is_a(args[0], &QueueTailType))
        return PyErr_Format(PyExc_TypeError, "put takes a queue, the body, the tail and the unique key");
    QueueTail *queue = (QueueTail *)args[0];
    if (!PyBytes_Check(args[1]) || !PyBytes_Check(args[2]) || !log_tail_has_receipts((PyObject *)self, queue))
        Py_RETURN_NONE;
    Stored stored;
    int done = log_tail_store((PyObject *)self, queue, PyBytes_AS_STRING(args[1]), PyBytes_GET_SIZE(args[1]),
                         PyBytes_AS_STRING(args[2]), PyBytes_GET_SIZE(args[2]), NULL, &stored);
    return done > 0 ? log_tail_receipt((PyObject *)self, queue, &stored, args[3]) : done < 0 ? NULL : Py_NewRef(Py_None);
}

/* put_packed(queue, data, max_body): put the messages in the body of a `put_many` (remoting/short.py), and return the body of its
   answer, or None if `append_many` must do it. */
static PyObject *log_tail_put_packed(LogTail *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (nargs != 3 || !is_a(args[0], &QueueTailType) || !PyBytes_CheckExact(args[1]))
        return PyErr_Format(PyExc_TypeError, "put_packed takes a queue, bytes and a size");
    QueueTail *queue = (QueueTail *)args[0];
    long long max_body = PyLong_AsLongLong(args[2]), now_ns = self->now_ns ? now_of(self) : 0;
    if (PyErr_Occurred())
        return NULL;
    PyObject *host = self->store_host, *tail = queue->plain_tail, *answer = NULL;
    if (!self->now_ns || self->appending || (self->group && self->group != Py_None) || !is_host(self->born_host) || !is_host(host) ||
        !tail || !PyBytes_Check(tail))
        Py_RETURN_NONE;
    const uint8_t *sizes = (const uint8_t *)PyBytes_AS_STRING(args[1]) + 4;
    Py_ssize_t host_size = PyBytes_GET_SIZE(host), tail_size = PyBytes_GET_SIZE(tail), left = PyBytes_GET_SIZE(args[1]) - 4, each;
    Py_ssize_t overhead = BODY_AT_V4 - 2 * IPV4_BYTES + PyBytes_GET_SIZE(self->born_host) + host_size + tail_size;
    Py_ssize_t count = left < 4 ? 0 : (int32_t)get32(sizes - 4), size = left + (overhead - 4) * count;
    left -= 4 * count;
    bool whole = count > 0 && left >= 0;
    for (Py_ssize_t i = 0; whole && i < count; i++)
        whole = (each = get32(sizes + 4 * i)) <= max_body && (left -= each) >= 0;
    Py_buffer view;
    if (!whole || left || size >= MOST_TOGETHER || self->end + size + ROOM + ROOM_OF_EACH * count > self->limit ||
        !self->mapping || self->mapping == Py_None)
        Py_RETURN_NONE;
    if (PyObject_GetBuffer(self->mapping, &view, PyBUF_WRITABLE) < 0)
        return NULL;
    Stored stored = {queue->next_offset, self->end, 0, now_ns / 1000000 - (now_ns % 1000000 < 0)};
    bool fits = self->end >= self->base && self->end - self->base <= view.len - size;
    uint8_t *mapped = (uint8_t *)view.buf + (self->end - self->base);
    uint8_t *called = fits && self->fd >= 0 && size >= LEAST_CALLED ? PyMem_Malloc((size_t)size) : NULL;
    if (fits && (answer = PyBytes_FromStringAndSize(NULL, 1 + host_size + 2 * 4 + 8 * (count + 3)))) {
        uint8_t *to = (uint8_t *)PyBytes_AS_STRING(answer), *record = called ? called : mapped;
        *to++ = (uint8_t)host_size;
        to = (uint8_t *)memcpy(to, PyBytes_AS_STRING(host), (size_t)host_size) + host_size;
        put32(to, (uint32_t)queue->queue_id);
        put32(to + 4, (uint32_t)count + 3);
        put64(to + 8, (uint64_t)stored.offset);
        put64(to + 16, (uint64_t)stored.now_ms);
        const uint8_t *body = sizes + 4 * count;
        for (Py_ssize_t i = 0; i < count; i++, body += each, queue->next_offset++, stored.position += stored.size) {
            put64(to + 24 + 8 * i, (uint64_t)stored.position);
            stored.size = overhead + (each = get32(sizes + 4 * i));
            lay_record(self, queue, record, &stored, (const char *)body, each, PyBytes_AS_STRING(tail), tail_size, &NOTHING);
            record += stored.size;
            atomic_signal_fence(memory_order_seq_cst); /* if the process is killed, only whole records have one after them */
        }
        put64(to + 24 + 8 * count, (uint64_t)stored.position);
        if (called && pwrite(self->fd, called, (size_t)size, self->end - self->base) != size) {
            memset(mapped, 0, (size_t)size); /* whole records without those after them would be recovered */
            queue->next_offset = stored.offset;
            Py_CLEAR(answer); /* Python writes them, or raises the error */
        } else {
            self->end = stored.position;
            self->called_end = called ? self->end : self->called_end;
        }
    }
    PyMem_Free(called);
    PyBuffer_Release(&view);
    if (answer && (self->end >= self->alarm || self->end - size == self->called_end) && self->on_alarm && !succeeded(PyObject_CallNoArgs(self->on_alarm)))
        Py_CLEAR(answer);
    return answer || PyErr_Occurred() ? answer : Py_NewRef(Py_None);
}

static PyMethodDef tip_methods[] = {
    {"_put", (PyCFunction)(void (*)(void))log_tail_put, METH_FASTCALL, "Put one ordinary record; None: see `CommitLog.append`."},
    {"_put_packed", (PyCFunction)(void (*)(void))log_tail_put_packed, METH_FASTCALL, "Put the messages of a call."},
    {NULL},
};

static PyMemberDef tip_members[] = {
    {"end", T_LONGLONG, offsetof(LogTail, end), 0, "The write position."},
    {"alarm", T_LONGLONG, offsetof(LogTail, alarm), 0, "Position at which a put calls `_on_alarm`."},
    {"called_end", T_LONGLONG, offsetof(LogTail, called_end), 0, NULL},
    {"_base", T_LONGLONG, offsetof(LogTail, base), 0, NULL},
    {"_limit", T_LONGLONG, offsetof(LogTail, limit), 0, NULL},
    {"_whole_record", T_BOOL, offsetof(LogTail, plain), 0, NULL},
    {"_appending", T_BOOL, offsetof(LogTail, appending), 0, NULL},
    {"_fd", T_INT, offsetof(LogTail, fd), 0, NULL},
    {"group", T_OBJECT, offsetof(LogTail, group), 0, NULL},
#define MEMBER(field) {"_" #field, T_OBJECT, offsetof(LogTail, field), 0, NULL},
    PRIVATE(MEMBER)
    {NULL},
};

PyTypeObject LogTailType = {
    COLLECTED_TYPE(tip, LogTail, PyType_GenericNew),
    .tp_doc = "The end of a commitlog, where records are put.",
    .tp_members = tip_members,
    .tp_methods = tip_methods,
};
