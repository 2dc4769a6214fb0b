/* mqstore._native: the loops, the put and the pop that are worth being compiled. Everything in here has a counterpart in Python
   that is taken where this was not built, and that the tests hold it against. */

#include "native.h"

#define FUNCTION(name, doc) {#name, (PyCFunction)(void (*)(void))native_##name, METH_FASTCALL, doc}

static PyMethodDef functions[] = {
    FUNCTION(walk, "walk(buffer, start, end, limit) -> (positions, stop)"),
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
    FUNCTION(measure, "measure(buffer, positions, topic, ok, table) -> bool"),
    FUNCTION(pairs, "pairs(data, blob_ends) -> (table, room, count, distinct)"),
    FUNCTION(records_hold, "records_hold(buffer, starts, sizes, stored, out)"),
    FUNCTION(find_inner, "find_inner(buffer, starts, sizes, out)"),
    FUNCTION(record_holds, "record_holds(buffer, position, limit, physical_offset) -> size or 0"),
    FUNCTION(read_units, "read_units(type, stretch, buffer, start, units, first, chosen, queue_id, topic, budget) -> tuple"),
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
    FUNCTION(renumber, "renumber(data, positions, offsets, places, timestamp)"),
    {NULL},
};

static struct PyModuleDef definition = {
    PyModuleDef_HEAD_INIT,
    .m_name = "mqstore._native",
    .m_doc = "Compiled parts of mqstore; mqstore.native tells whether they are used.",
    .m_size = -1,
    .m_methods = functions,
};

PyMODINIT_FUNC PyInit__native(void)
{
    if (crc32c_init() < 0)
        return NULL;
    if (PyType_Ready(&NumberedType) < 0 || PyType_Ready(&TipType) < 0 || message_init() < 0 || pop_init() < 0 ||
        sender_init() < 0)
        return NULL;
    PyObject *module = PyModule_Create(&definition);
    if (!module)
        return NULL;
    if (PyModule_AddIntConstant(module, "VERSION", NATIVE_VERSION) < 0 ||
        PyModule_AddIntConstant(module, "SOURCES", MQSTORE_NATIVE_SOURCES) < 0 ||
        PyModule_AddObjectRef(module, "Numbered", (PyObject *)&NumberedType) < 0 ||
        PyModule_AddObjectRef(module, "Tip", (PyObject *)&TipType) < 0 ||
        PyModule_AddObjectRef(module, "Sender", (PyObject *)&SenderType) < 0 ||
        PyModule_AddObjectRef(module, "Located", (PyObject *)&LocatedType) < 0 ||
        PyModule_AddObjectRef(module, "Lent", (PyObject *)&LentType) < 0 ||
        PyModule_AddObjectRef(module, "Timed", (PyObject *)&TimedType) < 0 ||
        PyModule_AddObjectRef(module, "Lending", (PyObject *)&LendingType) < 0 ||
        PyModule_AddObjectRef(module, "Desk", (PyObject *)&DeskType) < 0) {
        Py_DECREF(module);
        return NULL;
    }
    return module;
}
