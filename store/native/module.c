/* mqstore._native: the loops, the put and the pop that gain from being compiled. Everything here has a counterpart in Python,
   which is used where this module was not built, and tests compare the two. */

#include "native.h"

/* fence(): a full memory barrier. No load or store of this thread is moved across it. */
PyObject *native_fence(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

#define CHECKED(name, wanted)                                                                      \
    static PyObject *checked_##name(PyObject *module, PyObject *const *args, Py_ssize_t nargs)     \
    {                                                                                              \
        Buffers held;                                                                              \
        held.count = 0;                                                                            \
        bool right = wanted == ANY || has_arguments(#name, nargs, wanted);                         \
        PyObject *result = right ? native_##name(args, nargs, &held) : NULL;                       \
        while (held.count)                                                                         \
            PyBuffer_Release(&held.views[--held.count]);                                           \
        return result;                                                                             \
    }
FUNCTIONS(CHECKED)
#define FUNCTION(name, count) {#name, (PyCFunction)(void (*)(void))checked_##name, METH_FASTCALL, NULL},

static PyMethodDef functions[] = {FUNCTIONS(FUNCTION) {NULL}};

#define NAME(text) PyObject *name_##text;
NAMES(NAME)
#define INTERN(text) && (name_##text = PyUnicode_InternFromString(#text))

static int fill(PyObject *module)
{
    PyTypeObject *const types[] = {&QueueTailType, &LogTailType, &SenderType, &LocatedType, &BatchFieldsType,
                                   &TimelineFieldsType, &QueueFieldsType, &PutMethodType, &PopFieldsType, &LeaseFieldsType};
    if (!(true NAMES(INTERN)) || crc32c_init() < 0 || pop_fields_init() < 0 || sender_init() < 0 ||
        PyModule_AddIntConstant(module, "VERSION", NATIVE_VERSION) < 0 ||
        PyModule_AddIntConstant(module, "SOURCES", MQSTORE_NATIVE_SOURCES) < 0)
        return -1;
    for (size_t i = 0; i < sizeof types / sizeof *types; i++)
        if (PyModule_AddType(module, types[i]) < 0)
            return -1;
    return 0;
}

static PyModuleDef_Slot slots[] = {
    {Py_mod_exec, fill},
#ifdef Py_mod_multiple_interpreters
    {Py_mod_multiple_interpreters, Py_MOD_MULTIPLE_INTERPRETERS_NOT_SUPPORTED}, /* types and names are static */
#endif
#ifdef Py_mod_gil
    /* A put and a pop are atomic because no other Python code runs during them, and lists passed as arguments do not change
       while they are read. This flag makes free-threaded interpreters keep the lock; mqstore was not tested without it. */
    {Py_mod_gil, Py_MOD_GIL_USED},
#endif
    {0, NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mqstore._native",
    .m_doc = "Compiled parts of mqstore; mqstore.native reports whether they are used.",
    .m_size = 0,
    .m_methods = functions,
    .m_slots = slots,
};

PyMODINIT_FUNC PyInit__native(void) { return PyModuleDef_Init(&definition); }
