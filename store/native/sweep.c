/* Reads the log record by record and prepares the units of queues and the index entries: for recovery, verification and
   dispatch. Counterparts: `scan.read_run`, and `dispatch.rows_of` with `Rows.by_queue`.

   The input may be damaged, on purpose: a record counts only if its lengths add up within the room that is left. Every length
   is read once, because another process may be writing there. */

#include "native.h"

/* Keys found so far, each a range of `data`, by hash. Most logs change topic and queue seldom: the last key is compared first, and
   the table is made only for the second one. */
typedef struct {
    const uint8_t *data;
    int32_t *slots; /* number + 1, 0 for none */
    uint32_t mask;
    int64_t count, last;
    int64_t *first, *size; /* by number: position of its first occurrence */
} Keys;

static uint32_t hash_of(const uint8_t *at, int64_t size)
{
    uint32_t hash = 2166136261u;
    for (int64_t i = 0; i < size; i++)
        hash = (hash ^ at[i]) * 16777619u;
    return hash ^ hash >> 15;
}

static bool is_key(const Keys *keys, int64_t number, int64_t at, int64_t size)
{
    return keys->size[number] == size && !memcmp(keys->data + keys->first[number], keys->data + at, (size_t)size);
}

/* Return the number of a key, a new number for a new key; -1 without memory. There is room for `limit` of them. */
static int64_t number_of_key(Keys *keys, int64_t at, int64_t size, int64_t limit)
{
    if (keys->count && is_key(keys, keys->last, at, size))
        return keys->last;
    if (keys->count && !keys->slots) {
        uint32_t room = 4;
        while (room < 2 * (uint64_t)limit)
            room *= 2;
        if (!(keys->slots = calloc(room, sizeof *keys->slots)))
            return -1;
        keys->mask = room - 1;
        keys->slots[hash_of(keys->data + keys->first[0], keys->size[0]) & keys->mask] = 1;
    }
    if (keys->slots) {
        uint32_t slot = hash_of(keys->data + at, size) & keys->mask;
        for (; keys->slots[slot]; slot = (slot + 1) & keys->mask)
            if (is_key(keys, keys->slots[slot] - 1, at, size))
                return keys->last = keys->slots[slot] - 1;
        keys->slots[slot] = (int32_t)keys->count + 1;
    }
    keys->first[keys->count] = at;
    keys->size[keys->count] = size;
    return keys->last = keys->count++;
}

/* Rows of the tables that `sweep` fills, each as long as the table has room; layout/arrays/scan.py names them in this order. The
   length should not be a power of two: the rows would share few lines of the cache. */
enum { POSITION, QUEUE_OFFSET, STORE_TIMESTAMP, PROPERTIES, PROPERTIES_SIZE, TOPIC_FIRST, TOPIC_SIZE, LONG_ROWS };
enum { SIZE, QUEUE_ID, SYS_FLAG, TOPIC, TAIL, INT_ROWS };

/* A mapping's pages are loaded on first access, by an interrupt for each sixteen or so, which takes as long again as reading
   them, and prefetching stops at a page that is not loaded. So pages are loaded a stretch at a time. Not all at once: the rest
   is read from the disk while the loaded part is processed. */
enum { STRETCH = 1 << 20, COME_TOGETHER = 1 << 16, MUCH_BYTES = 1 << 22, MANY_RECORDS = 1 << 12 };

/* Load the pages of the stretch that starts at `from`, and return its end. */
static int64_t meet(const uint8_t *data, int64_t length, int64_t from)
{
    int64_t end = length - from > STRETCH ? from + STRETCH : length;
    for (int64_t at = from; at < end; at += COME_TOGETHER)
        (void)*(const volatile uint8_t *)(data + at);
    return end;
}

/* meet(buffer, start, end): load the pages of a range of a mapping before a `sweep`. */
PyObject *native_meet(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    int64_t at = PyLong_AsLongLong(args[1]), end = PyLong_AsLongLong(args[2]);
    Py_buffer *view = hold_range(held, args[0], at, end);
    if (PyErr_Occurred())
        return NULL;
    PyThreadState *others = PyEval_SaveThread();
    while (at < end)
        at = meet(view->buf, end, at);
    PyEval_RestoreThread(others);
    Py_RETURN_NONE;
}

/* Return true if nothing, or a BLANK and zeros, are left of a segment. */
static bool is_used_up(const uint8_t *at, const uint8_t *end)
{
    bool blank = end - at >= BLANK_BYTES && get32(at) == (uint32_t)(end - at) && get32(at + MAGIC_AT) == (uint32_t)MAGIC_BLANK;
    for (const uint8_t *next = at + BLANK_BYTES; blank && next < end; next++)
        blank = !*next;
    return blank || at == end;
}

/* Values of `checksums`; layout/arrays/scan.py names the last two in this order. */
enum { NOT_CHECKED, OF_RECORD, OF_BODY };

/* sweep(buffer, start, stop, base, limit, checksums, populated, longs, ints, segment) -> (count, stop, topics, tails, populated)

   Read consecutive records from `start`, those that start before `stop`, at most `limit`. Ends at the first one that is not a
   record, does not have its own position as its physical offset (`base` is that of the buffer's start), or does not match its
   checksum, of the record or of its body. An empty body is not checked. The buffer may have several segments of `segment` bytes;
   0: it is one. The enums name the rows of the tables. `topics` is the number of distinct topics, numbered in order of first
   occurrence. `tails` counts the records with a possible CRC tail, marked in TAIL: Python must check them. */
PyObject *native_sweep(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    int64_t at = PyLong_AsLongLong(args[1]), stop = PyLong_AsLongLong(args[2]), base = PyLong_AsLongLong(args[3]);
    int64_t limit = PyLong_AsLongLong(args[4]), populated = PyLong_AsLongLong(args[6]), segment = PyLong_AsLongLong(args[9]);
    long checksums = PyLong_AsLong(args[5]);
    Py_buffer *view = hold(held, args[0], 1, -1, false, "buffer"), *longs = hold(held, args[7], 8, -1, true, "longs");
    const int64_t room = longs->len / 8 / LONG_ROWS;
    Py_buffer *ints = hold(held, args[8], 4, INT_ROWS * room, true, "ints");
    Keys topics = {0};
    if (PyErr_Occurred())
        return NULL;
    if (at < 0 || at > stop || stop > view->len || limit < 0 || limit > room || limit > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "%lld records of %lld..%lld are not within a buffer of %zd bytes, or tables of %lld records",
                     (long long)limit, (long long)at, (long long)stop, view->len, (long long)room);
    const uint8_t *data = view->buf;
    int64_t length = segment > 0 ? at - at % segment : view->len, count = 0, tails = 0; /* length: end of the segment */
    int64_t *l = longs->buf;
    int32_t *n = ints->buf;
    topics.data = data;
    topics.first = l + TOPIC_FIRST * room;
    topics.size = l + TOPIC_SIZE * room;
    bool full = false, more = true;
    /* The lock is kept for a short range: next to a thread that puts all the time, getting it back takes milliseconds, and
       reading what was put just now takes less. */
    PyThreadState *others = checksums || stop - at >= MUCH_BYTES ? PyEval_SaveThread() : NULL;
    while (more) {
        if (segment > 0 && at >= length)
            length = segment < view->len - length ? length + segment : view->len;
        if (at >= populated && at < stop)
            populated = meet(data, stop, at);
        const uint8_t *record[SIDE_BY_SIDE];
        Parts parts[SIDE_BY_SIDE];
        size_t sizes[SIDE_BY_SIDE];
        int together = 0;
        for (int64_t next = at; together < SIDE_BY_SIDE; together++) {
            more = next < stop && next <= length - MIN_RECORD_BYTES && count + together < limit &&
                   parts_of(data, length, next, &parts[together]) &&
                   (int64_t)(get64(data + next + PHYSICAL_OFFSET_AT) - (uint64_t)base) == next;
            if (!more)
                break;
            record[together] = data + next;
            sizes[together] = (size_t)parts[together].size;
            next += parts[together].size;
        }
        uint32_t sums[SIDE_BY_SIDE];
        if (checksums == OF_RECORD)
            crc32c_records(record, sizes, together, sums);
        for (int i = 0; i < together; i++, count++) {
            const Parts *p = &parts[i];
            bool summed = checksums == OF_BODY ? p->body_size > 0 : checksums != NOT_CHECKED;
            uint32_t sum = checksums == OF_BODY && summed ? crc32_body(data + p->body, (size_t)p->body_size) : sums[i];
            if (summed && sum != get32(record[i] + CHECKSUM_AT)) {
                more = false;
                break;
            }
            uint32_t flags = get32(record[i] + SYS_FLAG_AT);
            int64_t topic = number_of_key(&topics, p->topic, p->topic_size, limit);
            if (topic < 0) {
                full = true;
                more = false;
                break;
            }
            /* An IPv6 host before the field moves it. The record is long enough for both: `parts_of` has checked. */
            int64_t stamp_at = STORE_TIMESTAMP_AT_V4 + (flags & BORN_HOST_V6 ? IPV6_EXTRA : 0);
            bool tail = p->properties_size >= CRC_TAIL_BYTES &&
                        !memcmp(record[i] + p->size - CRC_TAIL_BYTES, "__CRC32#", 8);
            l[POSITION * room + count] = at;
            l[QUEUE_OFFSET * room + count] = (int64_t)get64(record[i] + QUEUE_OFFSET_AT);
            l[STORE_TIMESTAMP * room + count] = (int64_t)get64(record[i] + stamp_at);
            l[PROPERTIES * room + count] = p->properties;
            l[PROPERTIES_SIZE * room + count] = p->properties_size;
            n[SIZE * room + count] = (int32_t)p->size;
            n[QUEUE_ID * room + count] = (int32_t)get32(record[i] + QUEUE_ID_AT);
            n[SYS_FLAG * room + count] = (int32_t)flags;
            n[TOPIC * room + count] = (int32_t)topic;
            n[TAIL * room + count] = tail;
            tails += tail;
            at += p->size;
        }
        if (!more && !full && segment > 0 && at < stop && count < limit && (more = is_used_up(data + at, data + length)))
            at = length;
    }
    free(topics.slots);
    if (others)
        PyEval_RestoreThread(others);
    if (full)
        return PyErr_NoMemory();
    return Py_BuildValue("LLLLL", (long long)count, (long long)at, (long long)topics.count, (long long)tails, (long long)populated);
}

/* --- units and index entries of records that `sweep` has read --- */

/* Continue Java's string hash from `hash`. False for bytes that are not ASCII, which Python decodes. */
static bool java_hash(const uint8_t *at, int64_t size, uint32_t *hash)
{
    uint32_t value = *hash, seen = 0;
    for (int64_t i = 0; i < size; i++) {
        value = value * 31 + at[i];
        seen |= at[i];
    }
    *hash = value;
    return seen < 0x80;
}

/* Index entries, in arrays that grow. */
typedef struct {
    int64_t *row;
    int32_t *hash;
    size_t count, room;
} Entries;

static bool note_entry(Entries *entries, int64_t row, uint32_t hash)
{
    if (entries->count == entries->room) {
        size_t room = entries->room ? 2 * entries->room : 1024;
        int64_t *rows = realloc(entries->row, room * sizeof *rows);
        if (rows)
            entries->row = rows;
        int32_t *hashes = rows ? realloc(entries->hash, room * sizeof *hashes) : NULL;
        if (!hashes)
            return false;
        entries->hash = hashes;
        entries->room = room;
    }
    int32_t value = (int32_t)hash;
    /* Math.abs leaves the smallest number negative; then the hash is 0 (format#key-hash). */
    entries->hash[entries->count] = value == INT32_MIN ? 0 : value < 0 ? -value : value;
    entries->row[entries->count++] = row;
    return true;
}

typedef struct {
    const uint8_t *at;
    int64_t size; /* 0: not set. A value has at least one byte */
} Value;

/* Find the properties that queues and index need; the last of several pairs with the same name counts. False if the record may
   name light queues. */
static bool find_values(const uint8_t *at, int64_t size, Value *tags, Value *unique, Value *keys)
{
    enum { INNER_MULTI_DISPATCH_BYTES = 20 };
    for (const uint8_t *stop = at + size, *end; at < stop; at = end + 1) {
        end = memchr(at, 2, (size_t)(stop - at));
        end = end ? end : stop;
        const uint8_t *separator = end - at >= SMALLEST_PAIR - 1 ? memchr(at, 1, (size_t)(end - at)) : NULL;
        if (!separator || separator == at || separator == end - 1)
            continue;
        int64_t name = separator - at;
        Value value = {separator + 1, end - separator - 1};
        if (name == INNER_MULTI_DISPATCH_BYTES)
            return false;
        if (name == 4 && !memcmp(at, "TAGS", 4))
            *tags = value;
        else if (name == 4 && !memcmp(at, "KEYS", 4))
            *keys = value;
        else if (name == 8 && !memcmp(at, "UNIQ_KEY", 8))
            *unique = value;
    }
    return true;
}

typedef struct {
    uint64_t key;
    int64_t number;
} Order;

static int by_key(const void *a, const void *b)
{
    uint64_t left = ((const Order *)a)->key, right = ((const Order *)b)->key;
    return (left > right) - (left < right);
}

/* Rows of the table that `list` fills; layout/arrays/dispatch.py names them in this order. */
enum { TAGS_CODE, SLOT, QUEUE_TOPIC, QUEUE_NUMBER, QUEUE_END, KEY, QUEUE_OF_RECORD, SIZE_OF, FIRST_OF, KEY_SIZE, LISTED_ROWS };
enum { CACHE_LINE = 64, SOON = 16 };

/* list(buffer, limit, count, base, longs, ints, prefixes, out, has_unit, units) -> (rows, queues, entry_row, entry_hash), or None

   Prepare units and index entries of `count` records that `sweep` has read into tables of `limit`. TAGS_CODE and `has_unit` are
   set for each record. Ordered by topic and queue id follow SLOT (the queue offset) of each record that has a unit, and its unit.
   Each of the `queues` has its topic, its id, and the end of its `rows`. Entries are int64 and int32, as bytearrays. `prefixes` are
   the int32 hashes of each topic's prefix of keys. `out` has room for `limit`, too. It has the memory that this needs itself: if that
   were freed here, malloc would give memory back to the system, and take it again, for each call.

   None: a record is of a rare kind that Python checks, or a tag or key is not ASCII. */
PyObject *native_list(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    int64_t limit = PyLong_AsLongLong(args[1]), count = PyLong_AsLongLong(args[2]), base = PyLong_AsLongLong(args[3]);
    if (PyErr_Occurred())
        return NULL;
    PyObject *result = NULL;
    Keys queues = {0};
    Entries entries = {0};
    Order *order = NULL;
    if (count < 0 || count > limit || limit > INT32_MAX)
        return PyErr_Format(PyExc_ValueError, "%lld records of %lld", (long long)count, (long long)limit);
    Py_buffer *view = hold(held, args[0], 1, -1, false, "buffer");
    Py_buffer *longs = hold(held, args[4], 8, LONG_ROWS * limit, false, "longs");
    Py_buffer *ints = hold(held, args[5], 4, INT_ROWS * limit, false, "ints");
    Py_buffer *prefixes = hold(held, args[6], 4, -1, false, "prefixes");
    Py_buffer *out = hold(held, args[7], 8, LISTED_ROWS * limit, true, "out");
    Py_buffer *has_unit = hold(held, args[8], 1, count, true, "has_unit");
    Py_buffer *units = hold(held, args[9], 1, UNIT_BYTES * count, true, "units");
    if (PyErr_Occurred())
        return NULL;
    const uint8_t *data = view->buf;
    const int64_t *l = longs->buf;
    const int32_t *n = ints->buf, *prefix = prefixes->buf;
    int64_t *o = out->buf, topics = prefixes->len / 4;
    uint8_t *listed = has_unit->buf;
    bool full = false, plain = true;
    PyThreadState *others = count >= MANY_RECORDS ? PyEval_SaveThread() : NULL; /* as in `sweep` */
    /* By record: topic and queue id, and the number of that queue; by queue: the number of its rows, and members of `Keys`. */
    int64_t *key = o + KEY * limit, *queue_of_row = o + QUEUE_OF_RECORD * limit, *sizes = o + SIZE_OF * limit;
    queues = (Keys){.data = (const uint8_t *)key, .first = o + FIRST_OF * limit, .size = o + KEY_SIZE * limit};
    /* Most records have short properties, or none; in a stream without keys they are often the same. */
    const uint8_t *before = NULL;
    int64_t before_size = 0, before_code = 0;
    for (int64_t i = 0; i < count && plain && !full; i++) {
        uint32_t flags = (uint32_t)n[SYS_FLAG * limit + i], transaction = flags & TRANSACTION_MASK;
        int64_t topic = n[TOPIC * limit + i], at = l[PROPERTIES * limit + i], size = l[PROPERTIES_SIZE * limit + i];
        int64_t code = 0;
        if (i + SOON < count && l[PROPERTIES_SIZE * limit + i + SOON]) { /* they are far apart: wait for several at once */
            uintptr_t soon = (uintptr_t)data + (uintptr_t)l[PROPERTIES * limit + i + SOON];
            __builtin_prefetch((const void *)soon);
            __builtin_prefetch((const void *)(soon + CACHE_LINE));
        }
        /* `sweep` has compared the positions with the room, but other callers' tables may contain anything. */
        if (flags & INNER_BATCH || topic < 0 || topic >= topics || at < 0 || size < 0 || at > view->len || size > view->len - at) {
            plain = false;
            break;
        }
        if (size && size == before_size && !memcmp(before, data + at, (size_t)size))
            code = before_code;
        else if (size) {
            Value tags = {0}, unique = {0}, keys = {0};
            uint32_t hash = 0;
            if (!find_values(data + at, size, &tags, &unique, &keys) || !java_hash(tags.at, tags.size, &hash)) {
                plain = false;
                break;
            }
            code = (int32_t)hash;
            bool indexed = transaction != TRANSACTION_ROLLBACK;
            if (unique.size) {
                hash = (uint32_t)prefix[topic];
                plain = java_hash(unique.at, unique.size, &hash);
                full = indexed && !note_entry(&entries, i, hash);
            }
            for (int64_t from = 0; keys.size && plain && !full && from < keys.size;) {
                const uint8_t *space = memchr(keys.at + from, ' ', (size_t)(keys.size - from));
                int64_t word = (space ? space - keys.at : keys.size) - from;
                if (word) {
                    hash = (uint32_t)prefix[topic];
                    plain = java_hash(keys.at + from, word, &hash);
                    full = indexed && !note_entry(&entries, i, hash);
                }
                from += word + 1;
            }
            before = data + at;
            before_size = unique.size || keys.size ? 0 : size;
            before_code = code;
        }
        o[TAGS_CODE * limit + i] = code;
        listed[i] = !transaction || transaction == TRANSACTION_COMMIT;
        if (listed[i]) {
            int64_t before_it = queues.count, number;
            key[i] = topic << 32 | (uint32_t)n[QUEUE_ID * limit + i];
            number = queue_of_row[i] = number_of_key(&queues, i * (int64_t)sizeof *key, sizeof *key, count);
            full = number < 0;
            if (!full)
                sizes[number] = queues.count > before_it ? 1 : sizes[number] + 1;
        }
    }
    int64_t rows = 0;
    if (plain && !full && !(order = malloc(((size_t)queues.count + 1) * sizeof *order)))
        full = true;
    if (plain && !full) {
        for (int64_t i = 0; i < queues.count; i++)
            order[i] = (Order){(uint64_t)key[queues.first[i] / (int64_t)sizeof *key], i};
        qsort(order, (size_t)queues.count, sizeof *order, by_key);
        for (int64_t i = 0; i < queues.count; i++) {
            int64_t size = sizes[order[i].number];
            sizes[order[i].number] = rows; /* from here on: position of its next row */
            rows += size;
            o[QUEUE_TOPIC * limit + i] = (int64_t)(order[i].key >> 32);
            o[QUEUE_NUMBER * limit + i] = (int32_t)order[i].key;
            o[QUEUE_END * limit + i] = rows;
        }
        uint8_t *unit = units->buf;
        for (int64_t i = 0; i < count; i++) {
            if (!listed[i])
                continue;
            int64_t to = sizes[queue_of_row[i]]++;
            o[SLOT * limit + to] = l[QUEUE_OFFSET * limit + i];
            put64(unit + UNIT_BYTES * to, (uint64_t)l[POSITION * limit + i] + (uint64_t)base);
            put32(unit + UNIT_BYTES * to + UNIT_SIZE_AT, (uint32_t)n[SIZE * limit + i]);
            put64(unit + UNIT_BYTES * to + UNIT_TAGS_CODE_AT, (uint64_t)o[TAGS_CODE * limit + i]);
        }
    }
    if (others)
        PyEval_RestoreThread(others);
    if (full)
        PyErr_NoMemory();
    else if (!plain)
        result = Py_NewRef(Py_None);
    else
        result = Py_BuildValue("LLNN", (long long)rows, (long long)queues.count,
                               PyByteArray_FromStringAndSize((char *)entries.row, (Py_ssize_t)(entries.count * 8)),
                               PyByteArray_FromStringAndSize((char *)entries.hash, (Py_ssize_t)(entries.count * 4)));
    free(queues.slots);
    free(order);
    free(entries.row);
    free(entries.hash);
    return result;
}
