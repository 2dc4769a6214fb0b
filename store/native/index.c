/* Entries of an index file; format#index has the bytes, layout/indexfile.py the rules. */

#include "native.h"

/* put_entries(file, slots, number, hashes, physical, stamps): put entries from `number` on, which must fit. Each entry is stored
   before the header counts it, and the header before the entry's slot leads to it: readers, which take no lock, rely on that. */
PyObject *native_put_entries(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    int64_t slots = PyLong_AsLongLong(args[1]), number = PyLong_AsLongLong(args[2]);
    Py_buffer *file = hold(held, args[0], 1, -1, true, "file"), *hashes = hold(held, args[3], 8, -1, false, "hashes");
    const Py_ssize_t count = hashes->len / 8;
    Py_buffer *physical = hold(held, args[4], 8, count, false, "physical"), *stamps = hold(held, args[5], 8, count, false, "stamps");
    if (PyErr_Occurred())
        return NULL;
    const int64_t entries = 0 < slots && slots < file->len ? (file->len - HEADER_BYTES - SLOT_BYTES * slots) / ENTRY_BYTES : 0;
    if (number < 1 || number > entries || count > entries - number)
        return PyErr_Format(PyExc_ValueError, "no room for %zd entries from %lld on", count, (long long)number);
    const int64_t *hash = hashes->buf, *offset = physical->buf, *stamp = stamps->buf;
    for (Py_ssize_t i = 0; i < count; i++)
        if (hash[i] < 0 || hash[i] > INT32_MAX)
            return PyErr_Format(PyExc_ValueError, "a key hash must be within 0..2147483647");
    uint8_t header[HEADER_BYTES], *data = file->buf, *entry = data + HEADER_BYTES + SLOT_BYTES * slots + ENTRY_BYTES * number;
    memcpy(header, data, HEADER_BYTES);
    if (count && number == 1) {
        put64(header + BEGIN_TIMESTAMP_AT, (uint64_t)stamp[0]);
        put64(header + BEGIN_OFFSET_AT, (uint64_t)offset[0]);
    }
    const int64_t begin = (int64_t)get64(header + BEGIN_TIMESTAMP_AT);
    for (Py_ssize_t i = 0; i < count; i++, number++, entry += ENTRY_BYTES) {
        uint8_t *slot = data + HEADER_BYTES + SLOT_BYTES * (hash[i] % slots);
        uint32_t previous = get32(slot);
        if (previous > (uint64_t)number) /* negative, too: no chain can have led there */
            previous = 0;
        int64_t seconds = begin > 0 && stamp[i] > begin ? (stamp[i] - begin) / SECOND_MS : 0;
        put32(entry + ENTRY_HASH_AT, (uint32_t)hash[i]);
        put64(entry + ENTRY_OFFSET_AT, (uint64_t)offset[i]);
        put32(entry + ENTRY_SECONDS_AT, (uint32_t)(seconds < INT32_MAX ? seconds : INT32_MAX));
        put32(entry + ENTRY_PREVIOUS_AT, previous);
        put64(header + END_TIMESTAMP_AT, (uint64_t)stamp[i]);
        put64(header + END_OFFSET_AT, (uint64_t)offset[i]);
        put32(header + USED_SLOTS_AT, get32(header + USED_SLOTS_AT) + !previous);
        put32(header + NEXT_ENTRY_AT, (uint32_t)number + 1);
        atomic_thread_fence(memory_order_release);
        memcpy(data, header, HEADER_BYTES);
        atomic_thread_fence(memory_order_release);
        put32(slot, (uint32_t)number);
    }
    Py_RETURN_NONE;
}
