/* What the parts of `mqstore._native` share: big-endian numbers, buffers given as arguments, the checksum. */

#ifndef MQSTORE_NATIVE_H
#define MQSTORE_NATIVE_H

#define PY_SSIZE_T_CLEAN
#include <Python.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>
#include <string.h>

#include "table.h"

/* Counted up with every change of what a function takes or gives; store/mqstore/native.py has the same number. */
#define NATIVE_VERSION 29

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
static inline void put32(uint8_t *at, uint32_t v) { v = __builtin_bswap32(v); memcpy(at, &v, 4); }
static inline void put64(uint8_t *at, uint64_t v) { v = __builtin_bswap64(v); memcpy(at, &v, 8); }

/* How far the fields behind storeHost are moved by IPv6 addresses. */
static inline int64_t extra_of(uint32_t sys_flag)
{
    return IPV6_EXTRA * (((sys_flag & BORN_HOST_V6) != 0) + ((sys_flag & STORE_HOST_V6) != 0));
}

static inline bool is_magic(int32_t magic) { return magic == MAGIC_V1 || magic == MAGIC_V2; }

/* --- checksum (crc32c.c) --- */

/* The CRC-32C of a whole record, its checksum field read as zero (format#checksum). `n` is at least 12. */
uint32_t crc32c_record(const uint8_t *record, size_t n);
/* Of several of them, or fewer, side by side. */
enum { SIDE_BY_SIDE = 3 };
void crc32c_records(const uint8_t *const *records, const size_t *sizes, int count, uint32_t *sums);
/* 0, or -1 with an exception where it is computed wrongly. */
int crc32c_init(void);

/* --- one record (scan.c) --- */

/* Its size and the places of its variable parts, relative to the buffer. What is here was compared with the room there is;
   the same bytes read once more may have changed, since another process may write to the file. */
typedef struct {
    int64_t size, body, body_size, topic, topic_size, properties, properties_size;
} Parts;

/* Row `i` of a table of `count`: six columns of int64, what `Parts` has behind the size, in its order. */
static inline void note_parts(int64_t *table, Py_ssize_t count, Py_ssize_t i, const Parts *parts)
{
    table[i] = parts->body;
    table[i + count] = parts->body_size;
    table[i + 2 * count] = parts->topic;
    table[i + 3 * count] = parts->topic_size;
    table[i + 4 * count] = parts->properties;
    table[i + 5 * count] = parts->properties_size;
}

/* Whether the lengths in the record at `position`, where there is room for the smallest, add up; else nothing is set. */
bool parts_of(const uint8_t *data, int64_t length, int64_t position, Parts *parts);
int64_t sound_record(const uint8_t *data, int64_t length, int64_t position, int64_t physical_offset, bool checksum,
                     Parts *parts);

/* Whether that is its topic. */
static inline bool bears(const uint8_t *data, const Parts *parts, const char *topic, Py_ssize_t topic_bytes)
{
    return parts->topic_size == topic_bytes && !memcmp(data + parts->topic, topic, (size_t)topic_bytes);
}

/* Copy from front to back. If the process is killed meanwhile, the front of it is there, where memcpy may store the first
   bytes last. The fence keeps the compiler from making a memcpy of the loop. */
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

/* The buffers that a function holds, to be let go together, whatever comes. Begin with {0}. */
typedef struct {
    Py_buffer views[9];
    int count;
} Buffers;

/* An argument as a buffer: C-contiguous, of `count` items of `width` bytes; `count` -1 takes any. NULL with an exception. */
Py_buffer *hold(Buffers *held, PyObject *object, Py_ssize_t width, Py_ssize_t count, bool writable, const char *name);
void let_go(Buffers *held);
/* The same of one buffer alone, that [start, end) lies within: to be released. */
bool hold_range(PyObject *object, int64_t start, int64_t end, Py_buffer *view);
/* Whether a function got as many arguments as it takes; else there is an exception. */
bool has_arguments(const char *name, Py_ssize_t got, Py_ssize_t wanted);

/* More bytes than this are worth letting other threads run meanwhile. */
#define LONG_BYTES (1 << 16)

/* Records lie here and there, and each is waited for unless it was asked for in time: AHEAD bytes before the end of a
   chain, NEXT records before one whose place is known. Harmless for any address. */
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

PyObject *native_crc32c_by_table(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_sweep(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_content_end(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_lay(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_meet(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_data_end(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_list(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_walk(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_gather(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_join(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_measure(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_pairs(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_find_inner(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_record_holds(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_assemble(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_open_beneath(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_read_at(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_lengths(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_encode(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_restore(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_identify(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_copy_parts(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_message_parts(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_renumber(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_put_entries(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_read_units(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_tagged(PyObject *, PyObject *const *, Py_ssize_t);
PyObject *native_check_units(PyObject *, PyObject *const *, Py_ssize_t);
extern PyTypeObject NumberedType, TipType, LocatedType, SenderType, PutMethodType;
extern PyTypeObject BatchFieldsType, TimelineFieldsType, QueueFieldsType, PopFieldsType, OffsetFieldsType;
int message_init(void);
int pop_init(void);
int sender_init(void);

/* Whether `tuple_of` may be called with it. */
static inline bool makes_tuples(PyObject *type)
{
    return type && PyType_Check(type) && PyType_FastSubclass((PyTypeObject *)type, Py_TPFLAGS_TUPLE_SUBCLASS);
}

/* A tuple of a subclass of tuple. Takes the references; NULL, with an exception, also when one of them is. */
PyObject *tuple_of(PyObject *type, PyObject **items, Py_ssize_t count);

/* --- what one file needs of another --- */

/* A queue, as far as a put is concerned (tip.c). */
typedef struct {
    PyObject_HEAD
    long long next_offset;
    int queue_id, magic;
    PyObject *ref, *plain_tail;
} Numbered;

/* Where a put went. */
typedef struct {
    long long offset, position, size, now_ms;
} Stored;

/* More of a record than body and tail: its properties stand behind the tail, whose last two bytes become their length. */
typedef struct {
    const char *properties;
    Py_ssize_t size;
    uint32_t flag, sys_flag;
} Extra;

/* One ordinary record, as `CommitLog.append` would: 1 when it is stored, 0 when Python must do it and nothing that counts has
   changed, -1 with an exception. `tip` is a Tip; `extra` may be NULL. */
int tip_store(PyObject *tip, Numbered *queue, const char *body, Py_ssize_t body_size, const char *tail, Py_ssize_t tail_size,
              const Extra *extra, Stored *stored);
/* Write a tail with its properties to `to`, where there is room for both. */
void lay_tail(char *to, const char *plain, Py_ssize_t plain_size, const char *properties, Py_ssize_t size);
/* The store's time; -1, with an exception if the clock raised one. */
long long tip_now_ms(PyObject *tip);
/* Whether `tip_receipt` may be called. */
bool tip_has_receipts(PyObject *tip, Numbered *queue);
enum { RECEIPT_ITEMS = 7, UNIQUE_KEY_ITEM = 6 };
PyObject *tip_receipt(PyObject *tip, Numbered *queue, const Stored *stored, PyObject *unique_key);
/* The queue with this id in `putters`, {topic: {queue id: queue}}, borrowed; NULL, without an exception unless there was one
   before, where Python has to look. `tail` becomes its `plain_tail`, a new reference. */
PyObject *putter_of(PyObject *putters, PyObject *topic, PyObject *queue_id, PyObject **tail);

/* Properties of a message that is put (options.c). */
enum { MOST_OPTIONS_BYTES = 2048 };
typedef struct {
    char bytes[MOST_OPTIONS_BYTES];
    size_t size;
} Text;

/* Values of the options of a put; NULL for one that was not given. */
typedef struct {
    PyObject *tag, *keys, *properties, *unique_key, *message_group;
} Options;

/* Add what `user_properties` and `encode_properties` make of them; false for what is not allowed, or rare: Python knows.
   `reserved`: a frozenset of names that no property may have; others with an underscore in front are left to Python, too. */
bool add_options(Text *to, const Options *options, PyObject *reserved);
bool add(Text *to, const char *from, size_t size);
/* Whether that is an int of 32 bits, and of no derived class. */
bool small_integer(PyObject *value, int32_t *found);
bool add_number(Text *to, const char *name, long long value); /* not negative */

/* A record in a buffer, found by a unit (message.c). */
typedef struct {
    PyObject_HEAD
    PyObject *batch;
    long long start, offset, body_end;
} Located;

/* The buffer that the last of several records lies in, held for the next one. Begin with {0}. */
typedef struct {
    PyObject *batch;
    Py_buffer view;
} Near;

/* Hold the buffer of a record, and find its parts: 0, or -1 with an exception. */
int near_record(Near *near, Located *message, Parts *parts);
void near_close(Near *near);
/* What stands before the body, and the body as stored, of a record with two IPv4 hosts that no transaction holds back: 1; 0
   for any other, and nothing is set; -1 with an exception. */
int located_plain(Located *message, Near *near, PyObject **head, PyObject **body);

enum { MAX_ID = 2 * (IPV6_BYTES + 8) };
/* The offset message id of a record whose parts were found; how many characters. */
Py_ssize_t message_id_of(const uint8_t *record, char *text);

#endif
