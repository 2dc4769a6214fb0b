/* The fields of pop's states: `QueueFields` of a queue, with its lock, `BatchFields` of a batch, `TimelineFields` of a timeline. */

#include "popfields.h"
#include <stddef.h>
#include <structmember.h>

static PyObject *heappush, *acquire, *is_owned, *release, *no_args, *at_once; /* methods of RLock, and arguments for them */

/* --- a batch --- */

#define BATCH(F) F(deltas) F(left) F(moved)

static void batch_fields_dealloc(BatchFields *self)
{
#define DROP(field) Py_XDECREF(self->field);
    BATCH(DROP)
    Py_TYPE(self)->tp_free((PyObject *)self);
}

static PyMemberDef batch_fields_members[] = {
#define NUMBER(field) {#field, T_LONGLONG, offsetof(FIELDS, field), 0, NULL},
#define MEMBER(field) {#field, T_OBJECT_EX, offsetof(FIELDS, field), 0, NULL},
#define FIELDS BatchFields
    NUMBER(name) NUMBER(start) NUMBER(pop_time_ms) NUMBER(invisible_ms)
    BATCH(MEMBER)
    {"count", T_INT, offsetof(BatchFields, count), 0, NULL},
    {"local", T_BOOL, offsetof(BatchFields, local), 0, NULL},
    {NULL},
};

/* Without garbage collection: it refers only to a number, and to collections of numbers. */
PyTypeObject BatchFieldsType = {
    PyVarObject_HEAD_INIT(NULL, 0)
    .tp_name = "mqstore._native.BatchFields",
    .tp_doc = "The messages of one pop.",
    .tp_basicsize = sizeof(BatchFields),
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE,
    .tp_new = PyType_GenericNew,
    .tp_dealloc = (destructor)batch_fields_dealloc,
    .tp_members = batch_fields_members,
};

/* --- times at which batches become visible --- */

#define TIMELINE(F) F(buckets) F(times)

COLLECTED(timeline, TimelineFields, TIMELINE)

static PyMemberDef timeline_members[] = {
    {"_buckets", T_OBJECT_EX, offsetof(TimelineFields, buckets), 0, NULL},
    {"_times", T_OBJECT_EX, offsetof(TimelineFields, times), 0, NULL},
    {"entries", T_LONGLONG, offsetof(TimelineFields, entries), 0, NULL},
    {"asked", T_LONGLONG, offsetof(TimelineFields, asked), 0, NULL},
    {NULL},
};

PyTypeObject TimelineFieldsType = {
    COLLECTED_TYPE(timeline, TimelineFields, PyType_GenericNew),
    .tp_doc = "Batches by the time at which they become visible.",
    .tp_members = timeline_members,
};

int timeline_add(TimelineFields *self, PyObject *at, PyObject *batch)
{
    PyObject *there = PyDict_GetItemWithError(self->buckets, at);
    if (!there) {
        if (PyErr_Occurred() || PyDict_SetItem(self->buckets, at, batch) < 0 ||
            !succeeded(PyObject_CallFunctionObjArgs(heappush, self->times, at, NULL)))
            return -1;
    } else if (PyList_CheckExact(there)) {
        if (PyList_Append(there, batch) < 0)
            return -1;
    } else {
        PyObject *both = Py_BuildValue("[OO]", there, batch);
        int set = both ? PyDict_SetItem(self->buckets, at, both) : -1;
        Py_XDECREF(both);
        if (set < 0)
            return -1;
    }
    self->entries++;
    return 0;
}

/* --- the state of a queue --- */

#define STATE(F) F(key) F(head) F(lock) F(in_flight) F(released) F(acks) F(fifo) F(timeline) F(ahead) F(ahead_filter)

COLLECTED(queue_fields, QueueFields, STATE)

static PyMemberDef queue_fields_members[] = {
#undef FIELDS
#define FIELDS QueueFields
    NUMBER(cursor) NUMBER(committed) NUMBER(ahead_at) NUMBER(ahead_from) NUMBER(ahead_next) NUMBER(last_pop_ms)
    NUMBER(reset_ms) NUMBER(announced_ms) NUMBER(written) NUMBER(pops) NUMBER(popped) NUMBER(popped_bytes) NUMBER(acked)
    {"_batches", T_LONGLONG, offsetof(QueueFields, batches), 0, NULL},
    {"gone", T_BOOL, offsetof(QueueFields, gone), 0, NULL},
    {"noted", T_BOOL, offsetof(QueueFields, noted), 0, NULL},
    STATE(MEMBER)
    {NULL},
};

PyTypeObject QueueFieldsType = {
    COLLECTED_TYPE(queue_fields, QueueFields, PyType_GenericNew),
    .tp_doc = "State of a queue that is popped from.",
    .tp_members = queue_fields_members,
};

bool is_whole(PyObject *object)
{
    if (!is_a(object, &QueueFieldsType))
        return false;
    const QueueFields *state = (const QueueFields *)object;
#define THERE(field) state->field &&
    return STATE(THERE) PyDict_CheckExact(state->in_flight) && PyDict_CheckExact(state->released) &&
           PyDict_CheckExact(state->acks) &&
           PyList_CheckExact(state->ahead) && is_a(state->timeline, &TimelineFieldsType) &&
           ((const TimelineFields *)state->timeline)->buckets && PyDict_CheckExact(((const TimelineFields *)state->timeline)->buckets) &&
           ((const TimelineFields *)state->timeline)->times && PyUnicode_Check(state->head) && PyTuple_Check(state->key) &&
           PyTuple_GET_SIZE(state->key) == 3;
}

/* Call a method of RLock directly: the usual ways check and copy the arguments, which takes as long again. */
static PyObject *call(PyObject *method, PyObject *lock, PyObject *args)
{
    const PyMethodDef *def = ((PyMethodDescrObject *)method)->d_method;
    if (def->ml_flags == METH_NOARGS)
        return def->ml_meth(lock, NULL);
    if (def->ml_flags == (METH_VARARGS | METH_KEYWORDS))
        return ((PyCFunctionWithKeywords)(void (*)(void))def->ml_meth)(lock, args, NULL);
    PyObject *both[] = {lock, PyTuple_GET_SIZE(args) ? PyTuple_GET_ITEM(args, 0) : NULL};
    return PyObject_Vectorcall(method, both, (size_t)PyTuple_GET_SIZE(args) + 1, NULL);
}

int try_lock(QueueFields *state)
{
    PyObject *owned = call(is_owned, state->lock, no_args);
    /* If it is owned, a signal handler has interrupted its owner: Python raises the error. */
    PyObject *granted = owned == Py_False ? call(acquire, state->lock, at_once) : Py_NewRef(Py_False);
    int taken = owned && granted ? granted == Py_True : -1;
    Py_XDECREF(owned);
    Py_XDECREF(granted);
    return taken;
}

PyObject *unlocked(PyObject *lock, PyObject *result)
{
    PyObject *type, *value, *traceback;
    PyErr_Fetch(&type, &value, &traceback);
    bool released = succeeded(call(release, lock, no_args));
    if (!released)
        Py_CLEAR(result);
    if (released || type) /* the first error counts */
        PyErr_Restore(type, value, traceback);
    Py_DECREF(lock);
    return result;
}

int pop_fields_init(void)
{
    PyObject *module = PyImport_ImportModule("_thread"), *lock = module ? PyObject_GetAttrString(module, "RLock") : NULL;
    Py_XSETREF(module, PyImport_ImportModule("heapq"));
    if (!lock || !module || !(no_args = PyTuple_New(0)) || !(at_once = PyTuple_Pack(1, Py_False)) || !(heappush = PyObject_GetAttrString(module, "heappush")) ||
        !(acquire = PyObject_GetAttrString(lock, "acquire")) || !(is_owned = PyObject_GetAttrString(lock, "_is_owned")) ||
        !(release = PyObject_GetAttrString(lock, "release")))
        return -1;
    Py_DECREF(lock);
    Py_DECREF(module);
    return 0;
}
