/* State of queues that are popped from: the structures that state.py extends (popfields.c). */

#ifndef MQSTORE_POPFIELDS_H
#define MQSTORE_POPFIELDS_H

#include "native.h"

/* A batch. */
typedef struct {
    PyObject_HEAD
    long long name, start, pop_time_ms, invisible_ms;
    PyObject *deltas, *left, *moved;
    int count;
    char local;
} BatchFields;

/* Batches by the time at which they become visible. */
typedef struct {
    PyObject_HEAD
    PyObject *buckets, *times;
    long long entries, asked;
} TimelineFields;

/* The state of a queue. */
typedef struct {
    PyObject_HEAD
    long long cursor, committed, ahead_at, ahead_from, ahead_next, last_pop_ms, reset_ms, announced_ms, written;
    long long pops, popped, popped_bytes, acked, batches;
    char gone, noted;
    PyObject *key, *head, *lock, *in_flight, *released, *acks, *fifo, *timeline, *ahead, *ahead_filter;
} QueueFields;

/* Like `Timeline.add`. 0, or -1 with an exception. */
int timeline_add(TimelineFields *self, PyObject *at, PyObject *batch);
/* Return true if `object` is a state with all members set, as after `QueueState.__init__`. */
bool is_whole(PyObject *object);
/* Acquire the lock without waiting: 1 if acquired, 0 if another thread has it, -1 with an exception. */
int try_lock(QueueFields *state);
/* Release the lock and return `result`, with the current exception kept. If that fails, `result` is dropped. */
PyObject *unlocked(PyObject *lock, PyObject *result);

#endif
