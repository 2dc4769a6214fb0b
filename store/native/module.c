/* mqstore._native: the loops, the put and the pop that gain from being compiled. Everything here has a counterpart in Python,
   which is used where this module was not built, and tests compare the two. */

#include "native.h"

/* fence(): a full memory barrier. No load or store of this thread is moved across it. */
static PyObject *native_fence(PyObject *module, PyObject *const *args, Py_ssize_t nargs)
{
    if (!has_arguments("fence", nargs, 0))
        return NULL;
    atomic_thread_fence(memory_order_seq_cst);
    Py_RETURN_NONE;
}

#define FUNCTION(name, doc) {#name, (PyCFunction)(void (*)(void))native_##name, METH_FASTCALL, doc}

static PyMethodDef functions[] = {
    FUNCTION(walk, "walk(buffer, start, end, limit) -> (positions, stop)"),
    FUNCTION(fence, "fence()"),
    FUNCTION(crc32c_by_table, "crc32c_by_table(wanted) -> bool: for tests"),
    FUNCTION(sweep,
             "sweep(buffer, start, stop, base, limit, checksums, populated, longs, ints) -> "
             "(count, stop, topics, tails, populated)"),
    FUNCTION(list,
             "list(buffer, limit, count, base, longs, ints, prefixes, out, has_unit, units) -> "
             "(rows, queues, entry_row, entry_hash), or None"),
    FUNCTION(meet, "meet(buffer, start, end)"),
    FUNCTION(content_end, "content_end(buffer, start, end) -> position"),
    FUNCTION(gather, "gather(buffer, positions, width, out)"),
    FUNCTION(join, "join(buffer, starts, sizes, out)"),
    FUNCTION(measure, "measure(buffer, positions, ok, table)"),
    FUNCTION(pairs, "pairs(data, blob_ends) -> (table, room, count, distinct)"),
    FUNCTION(find_inner, "find_inner(buffer, starts, sizes, out)"),
    FUNCTION(record_holds, "record_holds(buffer, position, limit, physical_offset) -> size or 0"),
    FUNCTION(tagged, "tagged(messages, tags) -> list"),
    FUNCTION(read_units, "read_units(type, batch, buffer, start, units, first, hashes, most, queue_id, topic, budget) -> tuple"),
    FUNCTION(check_units,
             "check_units(buffer, starts, physical, sizes, slots, queue_id, topic, out, body_ends, bodies, table, "
             "checksums) -> int"),
    FUNCTION(read_at, "read_at(fds, positions, sizes) -> bytes, or None"),
    FUNCTION(open_beneath, "open_beneath(path, flags, mode, folder) -> descriptor, or negative errno"),
    FUNCTION(data_end, "data_end(fd, start, end) -> position"),
    FUNCTION(lengths, "lengths(bodies) -> (greatest, sum), or None"),
    FUNCTION(encode, "encode(header, bodies, tails, flags, queue_offset, physical_offset) -> (records, sizes)"),
    FUNCTION(assemble, "assemble(headers, bodies, tails, out, checksums)"),
    FUNCTION(lay, "lay(out, position, data)"),
    FUNCTION(restore, "restore(messages, first, mark, ways, names, copies) -> count"),
    FUNCTION(identify, "identify(copies, names, origin) -> copies"),
    FUNCTION(copy_parts, "copy_parts(copies, first, putters, overhead, room, queues, heads, bodies, tails) -> (count, room)"),
    FUNCTION(message_parts,
             "message_parts(items, first, topic, plain_tail, slots, reserved, bodies, tails, flags, unique) -> count"),
    FUNCTION(put_entries, "put_entries(file, slots, number, hashes, physical, stamps)"),
    FUNCTION(renumber, "renumber(data, positions, offsets, places, timestamp)"),
    {NULL},
};

static int fill(PyObject *module)
{
    PyTypeObject *const types[] = {&QueueTailType, &LogTailType,     &SenderType,    &LocatedType, &BatchFieldsType,
                                   &TimelineFieldsType,    &QueueFieldsType, &PutMethodType, &PopFieldsType, &OffsetFieldsType};
    if (crc32c_init() < 0 || message_init() < 0 || pop_init() < 0 || sender_init() < 0 ||
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
