/* Shared by the files of `mqstore._native`: big-endian numbers, buffers passed as arguments, the checksum. */

#ifndef MQSTORE_NATIVE_H
#define MQSTORE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "table.h"

/* Incremented with every change of a function's arguments or result; store/mqstore/native.py has the same number. */
#define NATIVE_VERSION 45

#if !defined(__GNUC__) || __BYTE_ORDER__ != __ORDER_LITTLE_ENDIAN__ || !defined(__LP64__)
#error "built by GCC or Clang, for processors with 64 bits that are little-endian; elsewhere mqstore runs on Python and numpy"
#endif

/* Functions by which the garbage collector visits, clears and frees objects of a type. REFERENCES(F) is `F(member)` for each
   member that is a reference. */
#define VISIT_MEMBER(member) Py_VISIT(self->member);
#define CLEAR_MEMBER(member) Py_CLEAR(self->member);
#define COLLECTED(name, Type, REFERENCES)                                     \
    static int name##_traverse(Type *self, visitproc visit, void *arg)        \
    {                                                                         \
        REFERENCES(VISIT_MEMBER)                                              \
        return 0;                                                             \
    }                                                                         \
    static int name##_clear(Type *self)                                       \
    {                                                                         \
        REFERENCES(CLEAR_MEMBER)                                              \
        return 0;                                                             \
    }                                                                         \
    static void name##_dealloc(Type *self)                                    \
    {                                                                         \
        PyObject_GC_UnTrack(self);                                            \
        name##_clear(self);                                                   \
        Py_TYPE(self)->tp_free((PyObject *)self);                             \
    }
/* The members of such a type's PyTypeObject that are the same for all. `make` is its `tp_new`, followed by other flags, if any. */
#define COLLECTED_TYPE(name, Type, make, ...)                                 \
    PyVarObject_HEAD_INIT(NULL, 0)                                            \
    .tp_name = "mqstore._native." #Type,                                      \
    .tp_basicsize = sizeof(Type),                                             \
    .tp_flags = Py_TPFLAGS_DEFAULT | Py_TPFLAGS_BASETYPE | Py_TPFLAGS_HAVE_GC __VA_ARGS__, \
    .tp_new = make,                                              \
    .tp_dealloc = (destructor)name##_dealloc,                                 \
    .tp_traverse = (traverseproc)name##_traverse,                             \
    .tp_clear = (inquiry)name##_clear

/* --- the record (format#record); its numbers are in table.h --- */

enum {
    SMALLEST_PAIR = 4, /* of properties: name, 01, value, 02 */
    PAIR_ROWS = 4,
    PARTS = 6, /* `note_parts` */
    MANY_PAIRS = 64,
};
#define SCHEDULE_TOPIC "SCHEDULE_TOPIC_XXXX"

static inline uint16_t get16(const uint8_t *at) { uint16_t v; memcpy(&v, at, 2); return __builtin_bswap16(v); }
static inline uint32_t get32(const uint8_t *at) { uint32_t v; memcpy(&v, at, 4); return __builtin_bswap32(v); }
static inline uint64_t get64(const uint8_t *at) { uint64_t v; memcpy(&v, at, 8); return __builtin_bswap64(v); }
static inline void put16(uint8_t *at, uint16_t v) { v = __builtin_bswap16(v); memcpy(at, &v, 2); }
static inline void put32(uint8_t *at, uint32_t v) { v = __builtin_bswap32(v); memcpy(at, &v, 4); }
static inline void put64(uint8_t *at, uint64_t v) { v = __builtin_bswap64(v); memcpy(at, &v, 8); }

/* Number of bytes by which IPv6 addresses move the fields after storeHost. */
static inline int64_t extra_of(uint32_t sys_flag)
{
    return IPV6_EXTRA * (((sys_flag & BORN_HOST_V6) != 0) + ((sys_flag & STORE_HOST_V6) != 0));
}

static inline bool is_magic(int32_t magic) { return magic == MAGIC_V1 || magic == MAGIC_V2; }

/* --- checksum (crc32c.c) --- */

/* Return the CRC-32C of a whole record, its checksum field read as zero (format#checksum). `n` must be at least 12. */
uint32_t crc32c_record(const uint8_t *record, size_t n);
/* Compute the checksum of profile rocketmq: CRC-32 of the body, without its highest bit. */
uint32_t crc32_body(const uint8_t *body, size_t n);
/* Compute the checksums of `count` records, SIDE_BY_SIDE of them at most, in parallel. */
enum { SIDE_BY_SIDE = 3 };
void crc32c_records(const uint8_t *const *records, const size_t *sizes, int count, uint32_t *sums);
/* Return 0, or -1 with an exception if the checksum is computed wrongly. */
int crc32c_init(void);

/* --- one record (scan.c) --- */

/* Size of a record and positions of its variable parts, relative to the buffer. They are checked against the buffer's length.
   Do not read them from the buffer again: another process may write to the file meanwhile. */
typedef struct {
    int64_t size, body, body_size, topic, topic_size, properties, properties_size;
} Parts;

/* Fill row `i` of a table of `count` rows: six columns of int64, the members of `Parts` after `size`, in their order. */
static inline void note_parts(int64_t *table, Py_ssize_t count, Py_ssize_t i, const Parts *parts)
{
    table[i] = parts->body;
    table[i + count] = parts->body_size;
    table[i + 2 * count] = parts->topic;
    table[i + 3 * count] = parts->topic_size;
    table[i + 4 * count] = parts->properties;
    table[i + 5 * count] = parts->properties_size;
}

/* Return true if the lengths of the record at `position` add up; otherwise `parts` is not set. The buffer must have room for
   the smallest record there. */
bool parts_of(const uint8_t *data, int64_t length, int64_t position, Parts *parts);
int64_t sound_record(const uint8_t *data, int64_t length, int64_t position, int64_t physical_offset, bool checksum,
                     Parts *parts);

/* Return true if the record has this topic. */
static inline bool has_topic(const uint8_t *data, const Parts *parts, const char *topic, Py_ssize_t topic_bytes)
{
    return parts->topic_size == topic_bytes && !memcmp(data + parts->topic, topic, (size_t)topic_bytes);
}

/* Copy from front to back. If the process is killed during the copy, a prefix is in place, whereas memcpy may store the first
   bytes last. The fence keeps the compiler from replacing the loop with memcpy. */
static inline void lay(uint8_t *to, const uint8_t *from, Py_ssize_t size)
{
    Py_ssize_t i = 0;
    for (; i + 8 <= size; i += 8) {
        memcpy(to + i, from + i, 8);
        atomic_signal_fence(memory_order_seq_cst);
    }
    for (; i < size; i++) {
        to[i] = from[i];
        atomic_signal_fence(memory_order_seq_cst);
    }
}

/* --- arguments --- */

/* The buffers that a function of the module holds. They are released after it, on success and on failure (module.c). */
typedef struct {
    Py_buffer views[9]; /* as many as `check_units` takes */
    int count;
} Buffers;

/* Get an argument as a buffer: C-contiguous, `count` items of `width` bytes (any number if -1). With an exception, also an earlier
   one, the buffer is empty: a function gets all its buffers, and then asks for an exception once. */
Py_buffer *hold(Buffers *held, PyObject *object, Py_ssize_t width, Py_ssize_t count, bool writable, const char *name);
/* Get one that contains [start, end). */
Py_buffer *hold_range(Buffers *held, PyObject *object, int64_t start, int64_t end);
/* Return true if a function got as many arguments as it takes; otherwise an exception is set. */
bool has_arguments(const char *name, Py_ssize_t got, Py_ssize_t wanted);

/* Write a number as text, and return the position after it. */
enum { NUMBER_BYTES = 20 }; /* of 64 bits, with its sign */
char *write_number(char *at, long long number);

/* From this many bytes on, a loop releases the interpreter lock so that other threads can run. */
#define LONG_BYTES (1 << 16)

/* Records are scattered in memory, and reading one waits for memory unless it was prefetched: AHEAD bytes before the end of a
   chain, NEXT records before one with a known position. Prefetching is harmless for any address. */
enum { AHEAD = 2048, NEXT = 6 };

static inline void fetch(const uint8_t *at, int64_t size)
{
    for (int64_t line = 0; line < size; line += 64)
        __builtin_prefetch(at + line);
}

static inline void fetch_at(const uint8_t *data, int64_t length, int64_t at, int64_t size)
{
    if (at >= 0 && at < length)
        fetch(data + at, size < AHEAD ? size : AHEAD);
}

/* --- the functions and types of the module, by file --- */

/* Each has its arguments and its result in the comment above its definition. It is called with as many arguments as are noted here;
   crc32c checks their number itself. */
enum { ANY = -1 };
#define FUNCTIONS(F) \
    F(crc32c, ANY) F(crc32c_by_table, 1) F(sweep, 10) F(lay, 3) F(meet, 3) F(list, 10) F(walk, 4) F(join, 4) \
    F(measure, 4) F(pairs, 2) F(record_holds, 4) F(read_at, 3) F(lengths, 1) F(encode, 8) F(restore, 6) \
    F(identify, 3) F(copy_parts, 9) F(message_parts, 10) F(renumber, 5) F(put_entries, 6) F(read_units, 12) F(tagged, 2) \
    F(check_units, 12) F(frames, 8) F(frame_head, 8) F(records_of, 1) F(json_lines, 5) F(fence, 0)
#define DECLARED(name, count) PyObject *native_##name(PyObject *const *, Py_ssize_t, Buffers *);
FUNCTIONS(DECLARED)
/* Interned strings: the name of each is the text after `name_`. */
#define NAMES(F) \
    F(buffer) F(queue) F(_stored_body) F(TAGS) F(__SHARDINGKEY) F(compact) F(pop_at_once) F(ack_at_once) F(ack) F(_sendable) \
    F(write_queues) F(_prefix) F(_origin_ms) F(_sequence) F(_sender)
#define NAMED(text) extern PyObject *name_##text;
NAMES(NAMED)
extern PyTypeObject QueueTailType, LogTailType, LocatedType, SenderType, PutMethodType;
extern PyTypeObject BatchFieldsType, TimelineFieldsType, QueueFieldsType, PopFieldsType, LeaseFieldsType;
int pop_fields_init(void);
int sender_init(void);

/* Return true if `tuple_of` may be called with the type. */
static inline bool makes_tuples(PyObject *type)
{
    return type && PyType_Check(type) && PyType_FastSubclass((PyTypeObject *)type, Py_TPFLAGS_TUPLE_SUBCLASS);
}

/* PyObject_TypeCheck, which calls a function unless the type is that of the object, also at once for a class derived from it. */
static inline bool is_a(PyObject *object, PyTypeObject *type)
{
    return Py_TYPE(object) == type || Py_TYPE(object)->tp_base == type || PyType_IsSubtype(Py_TYPE(object), type);
}

/* Drop the result of a call that is made for its effect. False with an exception. */
static inline bool succeeded(PyObject *result)
{
    Py_XDECREF(result);
    return result != NULL;
}

/* Make a tuple of a subclass of tuple. Takes the references; NULL with an exception, also if one of them is NULL. */
PyObject *tuple_of(PyObject *type, PyObject **items, Py_ssize_t count);

/* --- used across files --- */

/* The fields of a queue that a put uses (log_tail.c). */
typedef struct {
    PyObject_HEAD
    long long next_offset;
    int queue_id, magic;
    PyObject *ref, *plain_tail;
} QueueTail;

/* Result of a put. */
typedef struct {
    long long offset, position, size, now_ms;
} Stored;

/* The rest of a record: properties go after the tail, and their length replaces its last two bytes. */
typedef struct {
    const char *properties;
    Py_ssize_t size;
    uint32_t flag, sys_flag, reconsume_times;
    PyObject *born_host; /* bytes of an address; NULL: born here and now */
    long long born_ms;
} Extra;

/* Store one ordinary record like `CommitLog.append`. 1 if it was stored, 0 if Python must do it (then nothing was changed that
   readers see), -1 with an exception. `tip` is a LogTail; `extra` may be NULL. */
int log_tail_store(PyObject *tip, QueueTail *queue, const char *body, Py_ssize_t body_size, const char *tail, Py_ssize_t tail_size,
              const Extra *extra, Stored *stored);
/* Return false if every put is refused: after a close, a fork or a failed sync. */
bool log_tail_is_open(PyObject *tip);
/* Write a tail with its properties to `to`, which must have room for both. */
void lay_tail(char *to, const char *plain, Py_ssize_t plain_size, const char *properties, Py_ssize_t size);
/* Return the store's time; -1, with an exception if the clock raised one. */
long long tip_now_ms(PyObject *tip);
/* Return true for the bytes of an address. */
bool is_host(PyObject *host);
/* Return true if `log_tail_receipt` may be called. */
bool log_tail_has_receipts(PyObject *tip, QueueTail *queue);
enum { RECEIPT_ITEMS = 7, UNIQUE_KEY_ITEM = 6 };
PyObject *log_tail_receipt(PyObject *tip, QueueTail *queue, const Stored *stored, PyObject *unique_key);
/* Return the queue with this id in `putters`, {topic: {queue id: queue}}, borrowed. NULL if Python must look, then without an
   exception unless one was set before. `tail` becomes the queue's `plain_tail`, a new reference. */
PyObject *putter_of(PyObject *putters, PyObject *topic, PyObject *queue_id, PyObject **tail);

/* Encoded properties of a message to put (options.c). */
enum { MOST_OPTIONS_BYTES = 2048 };
typedef struct {
    char bytes[MOST_OPTIONS_BYTES];
    size_t size;
} Text;

/* Values of the options of a put; NULL for an option that was not given. */
typedef struct {
    PyObject *tag, *keys, *properties, *unique_key, *message_group;
} Options;

/* Add the properties that `user_properties` and `encode_properties` make of the options. False for options that are invalid or
   rare: Python handles them. `reserved` is a frozenset of names that no property may have. Other names that start with an
   underscore are left to Python, too. */
bool add_options(Text *to, const Options *options, PyObject *reserved);
bool add(Text *to, const char *from, size_t size);
/* Read the number in `object`; false, without an exception, if it is not an int of 64 bits. NULL is not one. */
bool number_of(PyObject *object, long long *number);
/* Return true if the value is an int of 32 bits, and not of a subclass. */
bool small_integer(PyObject *value, int32_t *found);
bool add_number(Text *to, const char *name, long long value); /* not negative */

/* A record in a buffer, found by a unit of a consume queue (message.c). */
typedef struct {
    PyObject_HEAD
    PyObject *batch;
    long long start, offset;
} Located;

/* The buffer of the last record read, kept for the next record, which is often in the same one. Initialize with {0}. */
typedef struct {
    PyObject *batch;
    Py_buffer view;
} Near;

/* Get the buffer of a record, and find the record's parts. 0, or -1 with an exception. */
int near_record(Near *near, Located *message, Parts *parts);
void near_close(Near *near);
/* Get the bytes before the body, and the body as stored, if the record has two IPv4 hosts and no open transaction. 1; 0 for any
   other record (then nothing is set); -1 with an exception. */
int located_plain(Located *message, Near *near, PyObject **head, PyObject **body);

enum { MAX_ID = 2 * (IPV6_BYTES + 8) };
/* Write the offset message id of a record whose parts were found, and return its length. */
Py_ssize_t message_id_of(const uint8_t *record, char *text);

#endif
