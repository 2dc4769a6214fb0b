/* What is known of a queue that is popped from: the structures under state.py (popfields.c). */

#ifndef MQSTORE_POPFIELDS_H
#define MQSTORE_POPFIELDS_H

#include "native.h"

/* A batch. */
typedef struct {
    PyObject_HEAD
    PyObject *name, *start, *pop_time_ms, *invisible_ms, *deltas, *left, *moved, *local, *failed;
    int count;
} BatchFields;

/* When batches become visible. */
typedef struct {
    PyObject_HEAD
    PyObject *buckets, *times;
    long long entries;
} TimelineFields;

/* The committed offsets. */
typedef struct {
    PyObject_HEAD
    PyObject *committed;
    long long changes;
} OffsetFields;

/* The state of a queue. */
typedef struct {
    PyObject_HEAD
    long long cursor, committed, ahead_at, ahead_from, ahead_next, last_pop_ms, reset_ms;
    long long pops, popped, popped_bytes, acked, batches;
    char gone;
    PyObject *key, *head, *lock, *written, *in_flight, *released, *fifo, *timeline, *ahead, *ahead_filter, *announced_ms;
} QueueFields;

/* As `Timeline.add`. 0, or -1 with an exception. */
int timeline_add(TimelineFields *self, PyObject *at, PyObject *batch);
/* Whether `object` is a state all of whose members were set, as they are once `QueueState.__init__` has run. */
bool is_whole(PyObject *object);
/* Not waited for: 1 when the lock is ours, 0 when another has it, -1 with an exception. */
int try_lock(QueueFields *state);
/* Whatever exception there is stays. `result` is let go of when the lock cannot be. */
PyObject *unlocked(PyObject *lock, PyObject *result);
int pop_fields_init(void);

#endif
