/* The hot path of pop: delivers a batch, or settles messages of one, in one call (delivery#pop-log).

   `PopFields` is the base of the state that all queues share. The rules are those of unordered.py, ordered.py and state.py,
   which do whatever this declines. Declining means to return None without a change. As there, the record is in the log before
   memory changes. Between the two no Python code runs, except for the alarm that a put may call; if that raises, memory is
   unchanged. */

#include "popfields.h"
#include <stddef.h>
#include <structmember.h>

enum {
    MOST_BITS = 62, /* of a batch that is handled here */
    MOST_SETTLED = MOST_BITS + 1,
    MOST_CLAIMS = 256,     /* of one call */
    HEAD_BYTES = 1024,     /* room for the names in a record: Python handles longer ones */
    MIN_INVISIBLE_MS = 100,
    MAX_INVISIBLE_MS = 12 * 3600 * 1000,
    TEXT_BYTES = 192,      /* room for the numbers of a record or receipt, six at most, and the text between them */
    POPPED_BYTES = HEAD_BYTES + TEXT_BYTES + 3 * MAX_BATCH,
    ENTRY_AT = 16,    /* bytes before the body of an entry (journal.py) */
    ENTRY_ROOM = 512, /* the journal is full without so many bytes, which suffice for most entries */
    SETTLED_BYTES = TEXT_BYTES + MOST_SETTLED * (NUMBER_BYTES + 1),
};

/* The first members of a `Route` (routes.py). */
enum { RANKS, SETTLED, AT_ONCE, RNG, ROUTE_ITEMS };

/* In a receipt: the revive queue, the mark and the broker's name. */
#define NO_ORDER " 0 0 mqstore "
#define IN_ORDER " 999 0 mqstore "

/* Text, piece by piece: each function returns the position of the next piece. */
static char *write_text(char *at, const char *text)
{
    size_t size = strlen(text);
    memcpy(at, text, size);
    return at + size;
}

char *write_number(char *at, long long number)
{
    char digits[NUMBER_BYTES + 1], *begin = digits + sizeof digits;
    unsigned long long rest = number < 0 ? 0ULL - (unsigned long long)number : (unsigned long long)number;
    if (number < 0)
        *at++ = '-';
    do { /* two digits at once, since each division waits for the one before */
        *--begin = (char)('0' + rest % 100 % 10);
        *--begin = (char)('0' + rest % 100 / 10);
    } while (rest /= 100);
    begin += *begin == '0' && begin + 1 < digits + sizeof digits;
    size_t size = (size_t)(digits + sizeof digits - begin);
    memcpy(at, begin, size);
    return at + size;
}

static PyObject *ascii_of(const char *text, Py_ssize_t size)
{
    PyObject *made = PyUnicode_New(size, 127);
    if (made)
        memcpy(PyUnicode_1BYTE_DATA(made), text, (size_t)size);
    return made;
}

/* --- state shared by the queues --- */

typedef struct {
    PyObject_HEAD
    PyObject *tip, *queue, *pop_tail, *ack_tail, *resets, *orders, *by_topic, *note, *freed, *batch, *delivery, *journal,
        *routes, *parked, *slow;
    long long max_body, order_changes, offset_changes, journal_end;
} PopFields;

#define SHARED(F) \
    F(tip) F(queue) F(pop_tail) F(ack_tail) F(resets) F(orders) F(by_topic) F(note) F(freed) F(batch) F(delivery) F(journal) F(routes) \
    F(parked) F(slow)

COLLECTED(pop_fields, PopFields, SHARED)

/* Return true if all members are set, so that a put into the log is all that a record needs. */
static bool has_log(const PopFields *self)
{
    return self->tip && is_a(self->tip, &LogTailType) && self->queue &&
           is_a(self->queue, &QueueTailType) && self->pop_tail && PyBytes_Check(self->pop_tail) &&
           self->ack_tail && PyBytes_Check(self->ack_tail) && self->resets && PyDict_Check(self->resets) && self->orders &&
           PyDict_CheckExact(self->orders) && self->by_topic && PyDict_CheckExact(self->by_topic) && self->note &&
           self->freed && self->batch && PyType_Check(self->batch) && ((PyTypeObject *)self->batch)->tp_base == &BatchFieldsType &&
           makes_tuples(self->delivery);
}

static int append(PopFields *self, const char *body, Py_ssize_t size, PyObject *tail, Stored *stored)
{
    if (size > self->max_body)
        return 0;
    return log_tail_store(self->tip, (QueueTail *)self->queue, body, size, PyBytes_AS_STRING(tail), PyBytes_GET_SIZE(tail), NULL,
                     stored);
}

/* Like `PopFields.note_entry` of tables.py. No Python code runs in here. */
static long long note_entry(PopFields *self, long long position, const char *body, Py_ssize_t body_bytes)
{
    long long at = self->journal_end, size = body_bytes, end = at + ENTRY_AT + (size + 7) / 8 * 8;
    Py_buffer view;
    if (!at || !self->journal || self->journal == Py_None)
        return 0;
    if (PyObject_GetBuffer(self->journal, &view, PyBUF_WRITABLE) < 0) {
        PyErr_Clear();
        return 0;
    }
    Py_ssize_t view_bytes = view.len;
    bool fits = end + 8 <= view_bytes;
    if (fits) {
        char *entry = (char *)view.buf + at;
        memset(entry, 0, 8);
        atomic_thread_fence(memory_order_release);
        memcpy(entry + 8, &position, 8);
        memcpy(entry + ENTRY_AT, body, (size_t)size);
        memset((char *)view.buf + end, 0, 8);
        atomic_thread_fence(memory_order_release);
        memcpy(entry, &size, 8); /* last: until then the entry is the end */
    }
    PyBuffer_Release(&view);
    self->journal_end = fits && end + ENTRY_ROOM <= view_bytes ? end : 0;
    return fits ? -at : 0;
}

/* note_entry(position, body) -> the name of the entry, or 0. */
static PyObject *method_note(PopFields *self, PyObject *const *args, Py_ssize_t nargs)
{
    long long position;
    if (!has_arguments("note_entry", nargs, 2))
        return NULL;
    if (!number_of(args[0], &position) || !PyBytes_CheckExact(args[1]))
        return PyLong_FromLong(0);
    return PyLong_FromLongLong(note_entry(self, position, PyBytes_AS_STRING(args[1]), PyBytes_GET_SIZE(args[1])));
}

/* How to record something of a receiver in this process: 1 in the journal, -1 by Python, which opens the journal again, 0 in the
   log, because there is no journal. */
static int noting(const PopFields *self, bool local, bool in_order)
{
    bool there = local && !in_order && self->journal && self->journal != Py_None;
    return !there ? 0 : self->journal_end && log_tail_is_open(self->tip) ? 1 : -1;
}

/* Return the batch that was popped in order last if the order info has it, borrowed. */
static BatchFields *last_in_order(const PopFields *shared, const QueueFields *state)
{
    PyObject *record = PyDict_GetItemWithError(shared->orders, state->key);
    if (!record)
        PyErr_Clear();
    return record && record == state->fifo && is_a(record, &BatchFieldsType) ? (BatchFields *)record : NULL;
}

/* Return the first of the next `count` messages if they are consecutive and only need to be delivered, borrowed. In order, all
   of the last batch, popped at *last_ms, must be settled. */
static Located *next_of(const PopFields *shared, const QueueFields *state, int count, long long visible_ms, bool in_order,
                        long long *last_ms)
{
    long long left;
    if (state->gone || state->cursor < 0 || state->ahead_filter != Py_None || PyDict_GET_SIZE(shared->resets) ||
        PyDict_GET_SIZE(state->released) || state->ahead_at < 0 || state->ahead_at > PyList_GET_SIZE(state->ahead) - count)
        return NULL;
    if (in_order) {
        const BatchFields *last = last_in_order(shared, state);
        if (!last || PyDict_GET_SIZE(state->in_flight) || !number_of(last->left, &left) || left)
            return NULL;
        *last_ms = last->pop_time_ms;
    } else if (state->fifo != Py_None) {
        return NULL;
    }
    if (visible_ms < state->announced_ms)
        return NULL; /* the housekeeper must be notified */
    Located **next = (Located **)((PyListObject *)state->ahead)->ob_item + state->ahead_at;
    for (int i = 0; i < count; i++)
        if (!is_a((PyObject *)next[i], &LocatedType) || next[i]->offset != next[0]->offset + i)
            return NULL;
    /* Offsets skipped between two messages count as settled. With nothing in flight before them, the offset table changes. */
    return PyDict_GET_SIZE(state->in_flight) || state->committed == next[0]->offset ? next[0] : NULL;
}

/* Like `pop_time`. */
static long long pop_time(long long now_ms, long long last_ms)
{
    return now_ms <= last_ms && last_ms < now_ms + SAME_MOMENT_MS ? last_ms + 1 : now_ms;
}

static PyObject *deliver(PopFields *self, QueueFields *state, int count, long long invisible_ms, PyObject *topic, bool local,
                          bool in_order)
{
    long long now_ms = tip_now_ms(self->tip);
    if (now_ms < 0 || now_ms > INT64_MAX - INT32_MAX)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    long long visible_ms = now_ms + invisible_ms, last_ms = 0, queue_id, bytes = 0;
    Located *first = next_of(self, state, count, visible_ms, in_order, &last_ms);
    int noted = noting(self, local, in_order);
    if (!first || noted < 0 || (!noted && state->noted))
        Py_RETURN_NONE;
    long long pop_time_ms = pop_time(now_ms, last_ms > state->reset_ms ? last_ms : state->reset_ms);
    invisible_ms = visible_ms > pop_time_ms ? visible_ms - pop_time_ms : 0;
    bool is_last = state->ahead_at + count == PyList_GET_SIZE(state->ahead);
    long long offset = first->offset, next_offset = is_last ? state->ahead_next : offset + count;
    Py_ssize_t head_bytes;
    const char *head = PyUnicode_AsUTF8AndSize(state->head, &head_bytes);
    if (!head)
        return NULL;
    if (head_bytes > HEAD_BYTES || !number_of(PyTuple_GET_ITEM(state->key, 2), &queue_id))
        Py_RETURN_NONE;
    char body[POPPED_BYTES], *at = body + head_bytes;
    memcpy(body, head, (size_t)head_bytes);
    at = write_number(write_text(at, "\"so\":"), offset);
    at = write_number(write_text(at, ",\"pt\":"), pop_time_ms);
    at = write_number(write_text(at, ",\"it\":"), invisible_ms);
    at = write_text(at, ",\"d\":[0");
    for (int i = 1; i < count; i++)
        at = write_number(write_text(at, ","), i);
    at = write_number(write_text(at, "],\"nx\":"), next_offset);
    at = write_text(at, in_order ? ",\"f\":1,\"oc\":{}" : "");
    at = write_text(at, local ? ",\"l\":1}" : "}");
    Py_ssize_t size = at - body;
    char shown[TEXT_BYTES];
    at = write_number(shown, offset);
    at = write_number(write_text(at, " "), pop_time_ms);
    at = write_number(write_text(at, " "), invisible_ms);
    at = write_text(write_number(write_text(at, in_order ? IN_ORDER : NO_ORDER), queue_id), " ");

    /* Everything that needs memory is allocated before the record is written. */
    PyObject *numbers[MAX_BATCH], *result = NULL, *visible = PyLong_FromLongLong(visible_ms), *found = PyList_New(count);
    /* If the clock was set back, the pop time may be after `visible`. */
    PyObject *due = pop_time_ms + invisible_ms == visible_ms ? Py_XNewRef(visible) : PyLong_FromLongLong(pop_time_ms + invisible_ms);
    BatchFields *batch = (BatchFields *)((PyTypeObject *)self->batch)->tp_alloc((PyTypeObject *)self->batch, 0);
    Near near = {0};
    Parts parts;
    int made = 0;
    if (!visible || !due || !found || !batch)
        goto done;
    for (; made < count; made++) {
        PyObject *message = PyList_GET_ITEM(state->ahead, state->ahead_at + made);
        int found_parts = near_record(&near, (Located *)message, &parts);
        PyObject *items[] = {Py_NewRef(message),
                             ascii_of(shown, write_number(at, offset + made) - shown),
                             Py_NewRef(visible),
                             Py_NewRef(topic),
                             Py_NewRef(PyTuple_GET_ITEM(state->key, 2)),
                             in_order ? PyLong_FromLong(0) : Py_NewRef(Py_None)};
        PyObject *delivery = tuple_of(self->delivery, items, sizeof items / sizeof *items);
        if (delivery)
            PyList_SET_ITEM(found, made, delivery);
        if (!delivery || found_parts < 0 || !(numbers[made] = PyLong_FromLongLong(offset + made)))
            goto done;
        bytes += (int32_t)get32((const uint8_t *)near.view.buf + ((Located *)message)->start);
    }
    near_close(&near); /* an alarm below lets other threads run, and a mapping with an open buffer cannot be closed */
    batch->start = offset;
    batch->count = count;
    batch->pop_time_ms = pop_time_ms;
    batch->invisible_ms = invisible_ms;
    batch->deltas = Py_NewRef(Py_None);
    batch->moved = Py_NewRef(Py_None);
    batch->local = local;
    if (!(batch->left = PyLong_FromLongLong((1LL << count) - 1)))
        goto done;

    Stored stored;
    int done = 1;
    if (noted)
        done = (stored.offset = note_entry(self, ((QueueTail *)self->queue)->next_offset, body, size)) != 0;
    else
        done = append(self, body, size, self->pop_tail, &stored);
    if (done <= 0) {
        result = done < 0 ? NULL : Py_NewRef(Py_None);
        goto done;
    }
    state->noted |= noted > 0;
    batch->name = stored.offset;
    if (in_order) {
        if (PyDict_SetItem(self->orders, state->key, (PyObject *)batch) < 0)
            goto done;
        Py_SETREF(state->fifo, Py_NewRef(batch));
        self->order_changes++;
    } else {
        for (int i = 0; i < count; i++)
            if (PyDict_SetItem(state->in_flight, numbers[i], (PyObject *)batch) < 0)
                goto done;
        state->batches++;
    }
    state->ahead_at += count;
    state->ahead_from = next_offset;
    state->cursor = in_order ? offset : next_offset;
    if (is_last) {
        PyObject *empty = PyList_New(0);
        if (!empty)
            goto done;
        Py_SETREF(state->ahead, empty);
        state->ahead_at = 0;
    }
    state->pops++;
    state->popped += count;
    state->popped_bytes += bytes;
    if (pop_time_ms > state->last_pop_ms)
        state->last_pop_ms = pop_time_ms;
    if (in_order || timeline_add((TimelineFields *)state->timeline, due, (PyObject *)batch) == 0)
        result = Py_NewRef(found);
done:
    near_close(&near);
    Py_XDECREF(found);
    Py_XDECREF(batch);
    Py_XDECREF(visible);
    Py_XDECREF(due);
    while (made)
        Py_DECREF(numbers[--made]);
    return result;
}

/* deliver(state, n, invisible_ms, topic, local, in_order) -> a list of `n` deliveries; None if `pop` of
   `UnorderedQueues` or `OrderedQueues` must do it.

   Delivers the queue's next messages if they were read ahead without a filter and are consecutive. The state's lock is
   acquired here. */
static PyObject *method_deliver(PopFields *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("deliver", nargs, 6))
        return NULL;
    long long count, invisible_ms;
    if (!has_log(self) || !is_whole(args[0]) || !number_of(args[1], &count) || !number_of(args[2], &invisible_ms) ||
        count < 1 || count > MAX_BATCH || invisible_ms < 0 || invisible_ms > INT32_MAX)
        Py_RETURN_NONE;
    QueueFields *state = (QueueFields *)args[0];
    int taken = try_lock(state);
    if (taken <= 0)
        return taken < 0 ? NULL : Py_NewRef(Py_None);
    PyObject *lock = Py_NewRef(state->lock);
    bool local = args[4] == Py_True, in_order = args[5] == Py_True;
    return unlocked(lock, deliver(self, state, (int)count, invisible_ms, args[3], local, in_order));
}

/* The contents of a receipt of ours, for an ordinary topic (`ask.claim_of`). The offset is at the end of its text, after `head`
   bytes that the receipts of one batch have in common. */
typedef struct {
    long long start, pop_time_ms, queue_id, offset;
    Py_ssize_t head;
    bool in_order;
} Claim;

/* Read a number of at most `most` digits at *at, and advance *at. */
static bool digits(const char **at, const char *stop, int most, long long *number)
{
    const char *begin = *at;
    for (*number = 0; *at < stop && **at >= '0' && **at <= '9'; (*at)++) {
        if (*at - begin == most)
            return false;
        *number = *number * 10 + (**at - '0');
    }
    return *at > begin;
}

static bool text_is(const char **at, const char *stop, const char *text)
{
    size_t size = strlen(text);
    if ((size_t)(stop - *at) < size || memcmp(*at, text, size))
        return false;
    *at += size;
    return true;
}

/* Parse a receipt. `last` is the claim before, parsed from `last_text`, or NULL. */
static bool claim_of(PyObject *text, Claim *claim, PyObject *last_text, const Claim *last)
{
    if (!PyUnicode_CheckExact(text) || PyUnicode_READY(text) < 0 || !PyUnicode_IS_COMPACT_ASCII(text)) {
        PyErr_Clear();
        return false;
    }
    const char *at = (const char *)PyUnicode_1BYTE_DATA(text), *stop = at + PyUnicode_GET_LENGTH(text);
    long long invisible_ms;
    if (last && stop - at > last->head && !memcmp(at, PyUnicode_1BYTE_DATA(last_text), (size_t)last->head)) {
        *claim = *last;
        at += last->head;
    } else {
        const char *begin = at;
        if (!digits(&at, stop, 18, &claim->start) || !text_is(&at, stop, " ") || !digits(&at, stop, 15, &claim->pop_time_ms) ||
            !text_is(&at, stop, " ") || !digits(&at, stop, 15, &invisible_ms))
            return false;
        claim->in_order = text_is(&at, stop, IN_ORDER);
        if ((!claim->in_order && !text_is(&at, stop, NO_ORDER)) || !digits(&at, stop, 9, &claim->queue_id) ||
            !text_is(&at, stop, " "))
            return false;
        claim->head = at - begin;
    }
    return digits(&at, stop, 18, &claim->offset) && at == stop && claim->start <= claim->offset;
}

/* Like `QueueState.advance`. -1 with an exception. */
static int advance(QueueFields *state)
{
    if (!PyDict_GET_SIZE(state->in_flight) && !PyDict_GET_SIZE(state->released)) {
        state->committed = state->cursor;
        return 0;
    }
    for (; state->committed < state->cursor; state->committed++) {
        PyObject *number = PyLong_FromLongLong(state->committed);
        if (!number)
            return -1;
        int open = PyDict_Contains(state->in_flight, number);
        if (open == 0)
            open = PyDict_Contains(state->released, number);
        Py_DECREF(number);
        if (open)
            return open < 0 ? -1 : 0;
    }
    return 0;
}

/* Like `OffsetTable.note`, which handles the other cases. 1, or -1 with an exception. */
static int note(PopFields *self, PyObject *key, PyObject *offset)
{
    PyObject *groups = NULL, *queues = NULL;
    /* No Python code runs in here, so the table's lock is not needed: its owner reads and writes an offset without a call in
       between, and `reset` fills `resets` first. */
    if (!PyDict_GET_SIZE(self->resets))
        groups = PyDict_GetItemWithError(self->by_topic, PyTuple_GET_ITEM(key, 1));
    if (groups && PyDict_CheckExact(groups))
        queues = PyDict_GetItemWithError(groups, PyTuple_GET_ITEM(key, 0));
    if (queues && PyDict_CheckExact(queues) && PyDict_Contains(queues, PyTuple_GET_ITEM(key, 2)) == 1) {
        self->offset_changes++;
        return PyDict_SetItem(queues, PyTuple_GET_ITEM(key, 2), offset) < 0 ? -1 : 1;
    }
    if (PyErr_Occurred())
        return -1;
    return succeeded(PyObject_CallFunctionObjArgs(self->note, key, offset, NULL)) ? 1 : -1;
}

/* Return the bit of a claim's message in its batch, 0 if Python must handle it, -1 with an exception. `number` is its offset.
   `batch`, and the bits `left` in it, are those of the claims before. */
static long long bit_of(const PopFields *self, const QueueFields *state, const Claim *claim, PyObject *number, BatchFields **batch,
                        long long *left)
{
    PyObject *found = claim->in_order ? (PyObject *)last_in_order(self, state)
                                      : PyDict_GetItemWithError(state->in_flight, number);
    if (!found)
        return PyErr_Occurred() ? -1 : 0;
    if (found != (PyObject *)*batch) {
        if (*batch || !is_a(found, &BatchFieldsType))
            return 0;
        *batch = (BatchFields *)found;
        if ((*batch)->moved != Py_None || (*batch)->deltas != Py_None || (*batch)->pop_time_ms != claim->pop_time_ms ||
            (*batch)->start != claim->start || !number_of((*batch)->left, left))
            return 0;
    }
    return claim->offset - claim->start > MOST_BITS ? 0 : *left & 1LL << (claim->offset - claim->start);
}

/* Settle deliveries of one batch: 1 when done, 0 if Python must do it, -1 with an exception. */
static int settle(PopFields *self, QueueFields *state, const Claim *claims, int count)
{
    long long bits = 0, bit, left = 0;
    PyObject *numbers[MOST_SETTLED], *rest = NULL, *name = NULL;
    BatchFields *batch = NULL;
    int made = 0, result = 0;
    bool in_order = claims->in_order, known = !state->gone;
    while (known && made < count) {
        const Claim *claim = &claims[made];
        numbers[made] = PyLong_FromLongLong(claim->offset);
        bit = numbers[made] ? bit_of(self, state, claim, numbers[made], &batch, &left) : -1;
        result = bit < 0 ? -1 : 0;
        known = bit > 0 && !(bits & bit) && claim->in_order == in_order;
        bits |= bit;
        made++;
    }
    Py_XINCREF(batch);
    if (!known)
        goto done;
    char body[SETTLED_BYTES];
    char *at = write_text(write_number(write_text(body, "{\"k\":"), batch->name), ",\"o\":[");
    for (int i = 0; i < count; i++)
        at = write_number(write_text(at, i ? "," : ""), claims[i].offset);
    at = write_text(at, "]}");
    left &= ~bits;
    Stored stored;
    int noted = noting(self, batch->local, in_order);
    if (noted < 0 || (!noted && batch->name < 0))
        goto done;
    bool named = noted && batch->name >= 0; /* the log has it, and not yet this acknowledgement */
    result = (rest = PyLong_FromLongLong(left)) && (!named || (name = PyLong_FromLongLong(batch->name))) ? 1 : -1;
    if (result > 0 && noted)
        result = note_entry(self, ((QueueTail *)self->queue)->next_offset, body, at - body) != 0;
    else if (result > 0)
        result = append(self, body, at - body, self->ack_tail, &stored);
    if (result <= 0)
        goto done;
    state->noted |= noted > 0;
    for (int i = 0; i < count && named; i++)
        if (PyDict_SetItem(state->acks, numbers[i], name) < 0) {
            result = -1;
            goto done;
        }
    Py_SETREF(batch->left, Py_NewRef(rest));
    if (in_order) {
        state->cursor = claims->start + (left ? __builtin_ctzll((unsigned long long)left) : batch->count);
        self->order_changes++;
    } else {
        state->batches -= !left;
    }
    state->acked += count;
    for (int i = 0; i < count && !in_order; i++)
        if (PyDict_DelItem(state->in_flight, numbers[i]) < 0)
            result = -1;
    if (result < 0 || advance(state) < 0) {
        result = -1;
        goto done;
    }
    TimelineFields *timeline = (TimelineFields *)state->timeline;
    if (timeline->entries > COMPACT_FROM + 2 * state->batches && 4 * ++timeline->asked > timeline->entries)
        result = succeeded(PyObject_CallMethodNoArgs((PyObject *)timeline, name_compact)) ? 1 : -1;
    if (result > 0 && state->written != state->committed) {
        PyObject *committed = PyLong_FromLongLong(state->committed), *key = Py_NewRef(state->key);
        result = committed ? note(self, key, committed) : -1;
        if (result > 0)
            state->written = state->committed;
        Py_DECREF(key);
        Py_XDECREF(committed);
    }
done:
    Py_XDECREF(rest);
    Py_XDECREF(name);
    Py_XDECREF(batch);
    while (made)
        Py_XDECREF(numbers[--made]);
    return result;
}

static bool of_one_batch(const Claim *one, const Claim *other)
{
    return one->queue_id == other->queue_id && one->start == other->start && one->pop_time_ms == other->pop_time_ms &&
           one->in_order == other->in_order;
}

/* Return the number of claims at the front that are of one batch. */
static int run_of(const Claim *claims, int count)
{
    int run = 1;
    while (run < count && run < MOST_SETTLED && of_one_batch(claims, claims + run))
        run++;
    return run;
}

/* Return true if several batches may be settled one by one: all messages were popped, so that no receipt turns out to be wrong
   after others were settled, and no batch occurs twice, because Python writes that as one record. */
static bool are_apart(PyObject *states, const Claim *claims, int count)
{
    for (int i = 0; i < count; i++) {
        PyObject *state = PyList_GET_ITEM(states, claims[i].queue_id);
        if (claims[i].in_order || !is_whole(state) || claims[i].offset >= ((QueueFields *)state)->cursor)
            return false;
        bool begins = i && !of_one_batch(claims + i - 1, claims + i);
        for (int j = 0; begins && j < i; j++)
            if (of_one_batch(claims + j, claims + i))
                return false;
    }
    return true;
}

/* Like `settle`, with the lock of the queue. */
static int settle_run(PopFields *self, PyObject *states, const Claim *claims, int count)
{
    if (claims->queue_id >= PyList_GET_SIZE(states) || !is_whole(PyList_GET_ITEM(states, claims->queue_id)))
        return 0;
    QueueFields *state = (QueueFields *)Py_NewRef(PyList_GET_ITEM(states, claims->queue_id));
    int done = try_lock(state);
    if (done > 0) {
        PyObject *lock = Py_NewRef(state->lock);
        done = settle(self, state, claims, count);
        if (!succeeded(unlocked(lock, done < 0 ? NULL : Py_NewRef(Py_None))))
            done = -1;
    }
    long long left;
    if (done > 0 && claims->in_order && is_a(state->fifo, &BatchFieldsType) &&
        number_of(((BatchFields *)state->fifo)->left, &left) && !left &&
        !succeeded(PyObject_CallOneArg(self->freed, (PyObject *)state)))
        done = -1;
    Py_DECREF(state);
    return done;
}

/* Acknowledge deliveries that are in flight in `states`, a list by queue id. The states' locks are acquired here. Return the number
   of receipts settled, from the front, or -1 with an exception. `settle` of `UnorderedQueues` or `OrderedQueues` must do the others. */
static int settle_all(PopFields *self, PyObject *states, PyObject *given)
{
    Claim claims[MOST_CLAIMS];
    bool listed = PyList_CheckExact(given); /* otherwise it is one receipt */
    PyObject *const *receipts = listed ? ((PyListObject *)given)->ob_item : &given;
    Py_ssize_t size = listed ? PyList_GET_SIZE(given) : 1;
    int count = has_log(self) && PyList_CheckExact(states) && size <= MOST_CLAIMS ? (int)size : 0, done = 0;
    for (int i = 0; i < count; i++)
        if (!claim_of(receipts[i], &claims[i], i ? receipts[i - 1] : NULL, i ? &claims[i - 1] : NULL) ||
            claims[i].queue_id >= PyList_GET_SIZE(states))
            count = 0;
    if (count && run_of(claims, count) < count && !are_apart(states, claims, count))
        count = 0;
    while (done < count) {
        int run = run_of(claims + done, count - done), settled = settle_run(self, states, claims + done, run);
        if (settled < 0)
            return -1;
        if (!settled)
            break;
        done += run;
    }
    return done;
}

/* settle(states, receipts) -> number of receipts settled (`settle_all`). */
static PyObject *method_settle(PopFields *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("settle", nargs, 2))
        return NULL;
    int done = settle_all(self, args[0], args[1]);
    return done < 0 ? NULL : PyLong_FromLong(done);
}

/* Return the route of a group and topic. A new reference; NULL, perhaps with an exception, if there is none. */
static PyObject *route_of(const PopFields *self, PyObject *group, PyObject *topic)
{
    PyObject *topics = self->routes && PyDict_CheckExact(self->routes) ? PyDict_GetItemWithError(self->routes, group) : NULL;
    PyObject *route = topics && PyDict_CheckExact(topics) ? PyDict_GetItemWithError(topics, topic) : NULL;
    return route && PyTuple_Check(route) && PyTuple_GET_SIZE(route) >= ROUTE_ITEMS ? Py_NewRef(route) : NULL;
}

/* Return the first queue of `Route.sources` (routes.py) without retries, borrowed; None without one, NULL with an exception. */
static PyObject *first_source(PyObject *route, bool in_order)
{
    PyObject *ranks = PyTuple_GET_ITEM(route, RANKS), *queues = PyTuple_GET_ITEM(route, SETTLED);
    PyObject *rng = PyTuple_GET_ITEM(route, RNG);
    ranks = PyTuple_Check(ranks) && !in_order ? PyTuple_GET_ITEM(ranks, 0) : Py_None;
    Py_ssize_t count = PyList_CheckExact(ranks) ? PyList_GET_SIZE(ranks) : 0;
    for (Py_ssize_t i = 0; i < count; i++) {
        PyObject *rank = PyList_GET_ITEM(ranks, i);
        if (!PyTuple_Check(rank) || PyTuple_GET_SIZE(rank) != 3 || !is_whole(PyTuple_GET_ITEM(rank, 1)) ||
            !is_a(PyTuple_GET_ITEM(rank, 2), &QueueTailType))
            return PyErr_Format(PyExc_TypeError, "a rank is a mark, a state and the end of a queue");
        const QueueFields *state = (const QueueFields *)PyTuple_GET_ITEM(rank, 1);
        if (((const QueueTail *)PyTuple_GET_ITEM(rank, 2))->next_offset > state->cursor || PyDict_GET_SIZE(state->released))
            return (PyObject *)state;
    }
    if (count || !PyList_CheckExact(queues) || !PyList_GET_SIZE(queues))
        return Py_None;
    if (rng == Py_None)
        return PyList_GET_ITEM(queues, 0);
    PyObject *number = PyObject_CallNoArgs(rng);
    double roll = number ? PyFloat_AsDouble(number) * 100 * (double)PyList_GET_SIZE(queues) : -1;
    Py_XDECREF(number);
    return PyErr_Occurred() ? NULL : roll < 0 ? Py_None : PyList_GET_ITEM(queues, (Py_ssize_t)roll % PyList_GET_SIZE(queues));
}

/* pop_at_once(group, topic, n, invisible_ms, order) -> deliveries: `UnorderedQueues.pop_at_once`, without a call of Python for the
   ordinary case. */
static PyObject *method_pop_at_once(PopFields *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("pop_at_once", nargs, 5))
        return NULL;
    long long invisible_ms;
    PyObject *found = Py_None, *route = route_of(self, args[0], args[1]);
    if (!route && PyErr_Occurred())
        return NULL;
    if (route && self->slow && PyTuple_GET_ITEM(route, AT_ONCE) == Py_True) {
        bool plain = self->parked && PyAnySet_Check(self->parked) && !PySet_GET_SIZE(self->parked) &&
                     number_of(args[3], &invisible_ms) && invisible_ms >= MIN_INVISIBLE_MS && invisible_ms <= MAX_INVISIBLE_MS;
        PyObject *state = plain ? first_source(route, args[4] == Py_True) : Py_None;
        PyObject *items[] = {state, args[2], args[3], args[1], Py_True, args[4]};
        found = !state ? NULL : plain ? method_deliver(self, items, 6) : PyObject_Vectorcall(self->slow, args, 5, NULL);
    }
    Py_XDECREF(route);
    return found == Py_None ? PyList_New(0) : found;
}

static int ack_all(PopFields *self, PyObject *group, PyObject *topic, PyObject *receipts)
{
    PyObject *route = route_of(self, group, topic);
    bool known = route && PyTuple_GET_ITEM(route, SETTLED) != Py_None;
    int done = known ? settle_all(self, PyTuple_GET_ITEM(route, SETTLED), receipts) : PyErr_Occurred() ? -1 : 0;
    Py_XDECREF(route);
    return done;
}

/* ack_at_once(group, topic, receipts) -> the number settled, like `UnorderedQueues.ack_at_once`. */
static PyObject *method_ack_at_once(PopFields *self, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("ack_at_once", nargs, 3))
        return NULL;
    int done = ack_all(self, args[0], args[1], args[2]);
    return done < 0 ? NULL : PyLong_FromLong(done);
}

/* --- a lease (client/pop/delivery.py) --- */

typedef struct {
    PyObject_HEAD
    PyObject *context, *delivery, *message, *verb, *expires_at, *value;
} LeaseFields;

#define LEASE(F) F(context) F(delivery) F(message) F(verb) F(expires_at) F(value)
enum { RECEIPT = 1, TOPIC = 3 };                          /* members of a `Delivery` */
enum { BROKER, GROUP, WAITING, TOLD, CONTEXT_ITEMS }; /* the first members of a `LeaseContext` */

COLLECTED(lease, LeaseFields, LEASE)

/* Return the `PopFields` whose method a broker has under this name: only one of this process does. A new reference; NULL, perhaps
   with an exception, for others. */
static PopFields *tables_of(PyObject *context, PyObject *name, void *method)
{
    bool whole = context && PyTuple_Check(context) && PyTuple_GET_SIZE(context) >= CONTEXT_ITEMS;
    PyObject *found = whole ? PyObject_GetAttr(PyTuple_GET_ITEM(context, BROKER), name) : NULL, *tables = NULL;
    if (found && PyCFunction_Check(found) && (void *)PyCFunction_GET_FUNCTION(found) == method)
        tables = Py_NewRef(PyCFunction_GET_SELF(found));
    Py_XDECREF(found);
    return (PopFields *)tables;
}

/* _get_at_once(context, topic, invisible_ms, order) -> a lease, or None: like `LeaseFields` of delivery.py. */
static PyObject *lease_get(PyTypeObject *type, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("_get_at_once", nargs, 4))
        return NULL;
    PopFields *tables = tables_of(args[0], name_pop_at_once, method_pop_at_once);
    if (!tables)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_None);
    /* First, since a delivery without its lease is lost until its time is over. */
    LeaseFields *lease = (LeaseFields *)type->tp_alloc(type, 0);
    PyObject *one = PyLong_FromLong(1), *items[] = {PyTuple_GET_ITEM(args[0], GROUP), args[1], one, args[2], args[3]};
    PyObject *found = lease ? method_pop_at_once(tables, items, 5) : NULL;
    if (found && PyList_GET_SIZE(found)) {
        lease->context = Py_NewRef(args[0]);
        lease->delivery = Py_NewRef(PyList_GET_ITEM(found, 0));
    } else if (lease) {
        Py_SETREF(lease, found ? (LeaseFields *)Py_NewRef(Py_None) : NULL);
    }
    Py_XDECREF(found);
    Py_DECREF(one);
    Py_DECREF(tables);
    return (PyObject *)lease;
}

/* _ack_at_once() -> True if the message was acknowledged, like `LeaseFields` of delivery.py. */
static PyObject *lease_ack(LeaseFields *self, PyObject *nothing)
{
    PyObject *context = self->context, *delivery = self->delivery;
    bool is_new = !self->verb || self->verb == Py_None;
    PopFields *tables = is_new && delivery && PyTuple_Check(delivery) && PyTuple_GET_SIZE(delivery) > TOPIC
                            ? tables_of(context, name_ack_at_once, method_ack_at_once) : NULL;
    if (!tables)
        return PyErr_Occurred() ? NULL : Py_NewRef(Py_False);
    Py_INCREF(context);
    Py_INCREF(delivery);
    int done = ack_all(tables, PyTuple_GET_ITEM(context, GROUP), PyTuple_GET_ITEM(delivery, TOPIC),
                       PyTuple_GET_ITEM(delivery, RECEIPT));
    if (done > 0) {
        Py_XSETREF(self->verb, Py_NewRef(name_ack));
        PyObject *told = PyTuple_GET_ITEM(context, TOLD), *waiting = PyTuple_GET_ITEM(context, WAITING);
        bool quiet = told == Py_None || (PyAnySet_Check(waiting) && !PySet_GET_SIZE(waiting));
        if (!quiet && !succeeded(PyObject_CallFunctionObjArgs(told, self, name_ack, NULL)))
            done = -1;
    }
    Py_DECREF(delivery);
    Py_DECREF(context);
    Py_DECREF(tables);
    return done < 0 ? NULL : PyBool_FromLong(done);
}

static PyMethodDef lease_methods[] = {
    {"_get_at_once", (PyCFunction)(void (*)(void))lease_get, METH_FASTCALL | METH_CLASS, "Get: see client/pop/delivery.py."},
    {"_ack_at_once", (PyCFunction)lease_ack, METH_NOARGS, "Acknowledge: see client/pop/delivery.py."},
    {NULL},
};

static PyMemberDef lease_members[] = {
#define LEASE_MEMBER(field) {"_" #field, T_OBJECT, offsetof(LeaseFields, field), 0, NULL},
    LEASE(LEASE_MEMBER)
    {NULL},
};

PyTypeObject LeaseFieldsType = {
    COLLECTED_TYPE(lease, LeaseFields, PyType_GenericNew),
    .tp_doc = "A delivery with the verb that settled it.",
    .tp_members = lease_members,
    .tp_methods = lease_methods,
};

static PyMethodDef pop_fields_methods[] = {
    {"pop_at_once", (PyCFunction)(void (*)(void))method_pop_at_once, METH_FASTCALL, "Return deliveries: see pop/unordered.py."},
    {"ack_at_once", (PyCFunction)(void (*)(void))method_ack_at_once, METH_FASTCALL, "Return the number settled."},
    {"note_entry", (PyCFunction)(void (*)(void))method_note, METH_FASTCALL, "Append to the journal: see pop/tables.py."},
    {"deliver", (PyCFunction)(void (*)(void))method_deliver, METH_FASTCALL, "Return deliveries, or None: see pop/tables.py."},
    {"settle", (PyCFunction)(void (*)(void))method_settle, METH_FASTCALL, "Return the number settled: see pop/tables.py."},
    {NULL},
};

static PyMemberDef pop_fields_members[] = {
#define MEMBER(field) {"_" #field, T_OBJECT, offsetof(PopFields, field), 0, NULL},
    SHARED(MEMBER)
    {"_max_body", T_LONGLONG, offsetof(PopFields, max_body), 0, NULL},
    {"_order_changes", T_LONGLONG, offsetof(PopFields, order_changes), 0, NULL},
    {"_offset_changes", T_LONGLONG, offsetof(PopFields, offset_changes), 0, NULL},
    {"routes", T_OBJECT, offsetof(PopFields, routes), 0, NULL},
    {"slow", T_OBJECT, offsetof(PopFields, slow), 0, NULL},
    {"journal_map", T_OBJECT, offsetof(PopFields, journal), 0, NULL},
    {"journal_end", T_LONGLONG, offsetof(PopFields, journal_end), 0, NULL},
    {NULL},
};

PyTypeObject PopFieldsType = {
    COLLECTED_TYPE(pop_fields, PopFields, PyType_GenericNew),
    .tp_doc = "Delivers and settles messages.",
    .tp_members = pop_fields_members,
    .tp_methods = pop_fields_methods,
};
