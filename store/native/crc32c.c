/* CRC-32C: by the processor's instruction, eight bytes in three cycles and three streams at once; by tables if the processor has
   no such instruction, or the compiler does not know it. */

#include "native.h"

/* --- by tables: eight bytes at a time. The other ways must compute the same --- */

static uint32_t table[8][256], body_table[8][256];

/* Compute on the bare register: it is inverted neither before nor after. */
static inline uint32_t run_by(const uint32_t table[8][256], uint32_t crc, const uint8_t *at, size_t n)
{
    for (; n >= 8; n -= 8, at += 8) {
        uint64_t word;
        memcpy(&word, at, 8);
        word ^= crc;
        crc = 0;
        for (int i = 0; i < 8; i++)
            crc ^= table[7 - i][word >> 8 * i & 255];
    }
    for (; n; n--)
        crc = crc >> 8 ^ table[0][(crc ^ *at++) & 255];
    return crc;
}

static uint32_t run_by_table(uint32_t crc, const uint8_t *at, size_t n) { return run_by(table, crc, at, n); }

/* Continue CRC-32. */
static uint32_t body_by_table(uint32_t crc, const uint8_t *at, size_t n) { return run_by(body_table, crc, at, n); }
static uint32_t (*sum_of_body)(uint32_t, const uint8_t *, size_t) = body_by_table;

uint32_t crc32_body(const uint8_t *body, size_t n) { return ~sum_of_body(~0u, body, n) & 0x7FFFFFFF; }

static uint32_t record_by_table(const uint8_t *record, size_t n)
{
    uint8_t head[QUEUE_ID_AT] = {0};
    memcpy(head, record, CHECKSUM_AT);
    return ~run_by_table(run_by_table(~0u, head, sizeof head), record + QUEUE_ID_AT, n - QUEUE_ID_AT);
}

static uint32_t (*sum_of_record)(const uint8_t *, size_t) = record_by_table;
static uint32_t (*sum_of_bytes)(uint32_t, const uint8_t *, size_t) = run_by_table;

uint32_t crc32c_record(const uint8_t *record, size_t n) { return sum_of_record(record, n); }

/* --- by instruction --- */

#if defined(__x86_64__)
#include <immintrin.h>

/* CRC-32 has no instruction here, but a multiplication without carries moves sixteen bytes on, behind other bytes, before they are
   divided: four times sixteen at once, and then by one. The factors are remainders of powers of x (Gopal et al., Intel, 2009). */
__attribute__((target("pclmul"))) static inline __m128i fold(__m128i sum, __m128i factors, __m128i next)
{
    __m128i low = _mm_clmulepi64_si128(sum, factors, 0x00), high = _mm_clmulepi64_si128(sum, factors, 0x11);
    return _mm_xor_si128(_mm_xor_si128(low, high), next);
}

__attribute__((target("pclmul"))) static uint32_t body_by_instruction(uint32_t crc, const uint8_t *at, size_t n)
{
    const __m128i by_four = _mm_set_epi64x(0x1C6E41596, 0x154442BD4), by_one = _mm_set_epi64x(0x0CCAA009E, 0x1751997D0);
    const __m128i *next = (const __m128i *)at;
    if (n < 64)
        return body_by_table(crc, at, n);
    __m128i sums[4] = {_mm_cvtsi32_si128((int)crc)};
    for (int i = 0; i < 4; i++)
        sums[i] = _mm_xor_si128(sums[i], _mm_loadu_si128(next++));
    for (n -= 64; n >= 64; n -= 64)
        for (int i = 0; i < 4; i++)
            sums[i] = fold(sums[i], by_four, _mm_loadu_si128(next++));
    for (int i = 1; i < 4; i++)
        sums[0] = fold(sums[0], by_one, sums[i]);
    for (; n >= 16; n -= 16)
        sums[0] = fold(sums[0], by_one, _mm_loadu_si128(next++));
    return body_by_table(body_by_table(0, (const uint8_t *)sums, 16), (const uint8_t *)next, n);
}

#if defined(__clang__) && __clang_major__ >= 14 /* since then the instruction is a feature of its own */
#define TARGET __attribute__((target("sse4.2,crc32")))
#else
#define TARGET __attribute__((target("sse4.2")))
#endif
#define HAS_INSTRUCTION (__builtin_cpu_init(), __builtin_cpu_supports("sse4.2") && __builtin_cpu_supports("pclmul"))
#define STEP_8(crc, word) _mm_crc32_u64(crc, word)
#define STEP_4(crc, word) _mm_crc32_u32((uint32_t)(crc), word)
#define STEP_1(crc, byte) _mm_crc32_u8((uint32_t)(crc), byte)
#elif defined(__aarch64__)
#define body_by_instruction body_by_table
#ifdef __clang__
#define TARGET __attribute__((target("crc")))
#define STEP_8(crc, word) __builtin_arm_crc32cd((uint32_t)(crc), word)
#define STEP_4(crc, word) __builtin_arm_crc32cw((uint32_t)(crc), word)
#define STEP_1(crc, byte) __builtin_arm_crc32cb((uint32_t)(crc), byte)
#else
#define TARGET __attribute__((target("+crc")))
#define STEP_8(crc, word) __builtin_aarch64_crc32cx((uint32_t)(crc), word)
#define STEP_4(crc, word) __builtin_aarch64_crc32cw((uint32_t)(crc), word)
#define STEP_1(crc, byte) __builtin_aarch64_crc32cb((uint32_t)(crc), byte)
#endif
#ifdef __ARM_FEATURE_CRC32 /* every processor that this is compiled for has it, as on macOS */
#define HAS_INSTRUCTION true
#elif defined(__linux__)
#include <sys/auxv.h>
#define HAS_INSTRUCTION ((getauxval(AT_HWCAP) & HWCAP_CRC32) != 0)
#else
#define HAS_INSTRUCTION false
#endif
#endif

#ifdef TARGET

/* The instruction accepts a new value each cycle but returns its result after three. So long inputs are read as three strands
   in parallel, which are then combined: a CRC is linear, so the state after the first strand, moved on by as many zero bytes as
   the next one has, is the state that the next one would have started from. Tables hold that move, for three lengths. */
enum { SWEEP_STRAND = 4096, LONG_STRAND = 256, SHORT_STRAND = 64 };
static uint32_t moved_sweep[4][256], moved_long[4][256], moved_short[4][256];

static void fill_moved(uint32_t moved[4][256], size_t length)
{
    static const uint8_t zeros[SWEEP_STRAND];
    for (int bit = 0; bit < 32; bit++) {
        uint32_t image = run_by_table(1u << bit, zeros, length);
        uint32_t *row = moved[bit / 8];
        for (int low = 1 << bit % 8, i = 0; i < low; i++)
            row[low + i] = row[i] ^ image;
    }
}

static inline uint32_t move_on(uint32_t crc, uint32_t moved[4][256])
{
    return moved[0][crc & 255] ^ moved[1][crc >> 8 & 255] ^ moved[2][crc >> 16 & 255] ^ moved[3][crc >> 24];
}

TARGET static inline uint64_t step(uint64_t crc, const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return STEP_8(crc, word);
}

/* Three strands of `length` bytes. */
TARGET static inline uint64_t three_strands(uint64_t crc, const uint8_t *at, size_t length, uint32_t moved[4][256])
{
    uint64_t second = 0, third = 0;
    for (const uint8_t *stop = at + length; at < stop; at += 8) {
        crc = step(crc, at);
        second = step(second, at + length);
        third = step(third, at + 2 * length);
    }
    return move_on((uint32_t)(move_on((uint32_t)crc, moved) ^ second), moved) ^ third;
}

/* As `run_by_table`. */
TARGET static uint32_t run(uint32_t start, const uint8_t *at, size_t n)
{
    uint64_t crc = start;
    for (; n >= 3 * SWEEP_STRAND; n -= 3 * SWEEP_STRAND, at += 3 * SWEEP_STRAND)
        crc = three_strands(crc, at, SWEEP_STRAND, moved_sweep);
    for (; n >= 3 * LONG_STRAND; n -= 3 * LONG_STRAND, at += 3 * LONG_STRAND)
        crc = three_strands(crc, at, LONG_STRAND, moved_long);
    for (; n >= 3 * SHORT_STRAND; n -= 3 * SHORT_STRAND, at += 3 * SHORT_STRAND)
        crc = three_strands(crc, at, SHORT_STRAND, moved_short);
    for (; n >= 8; n -= 8, at += 8)
        crc = step(crc, at);
    if (n & 4) {
        uint32_t word;
        memcpy(&word, at, 4);
        crc = STEP_4(crc, word);
        at += 4;
    }
    for (n &= 3; n; n--)
        crc = STEP_1(crc, *at++);
    return (uint32_t)crc;
}

/* Return the state after the first twelve bytes of a record. */
TARGET static inline uint64_t begin(const uint8_t *record) { return STEP_4(step(0xFFFFFFFFu, record), 0); }

TARGET static uint32_t record_by_instruction(const uint8_t *record, size_t n)
{
    return ~run((uint32_t)begin(record), record + QUEUE_ID_AT, n - QUEUE_ID_AT);
}

/* Distance of prefetching: the processor does not recognize three readers as one by itself. */
enum { READ_AHEAD = 8192 };

/* Each step waits for the one before, so short records are read in parallel, up to the end of the shortest. */
TARGET static void three_by_instruction(const uint8_t *const *records, const size_t *sizes, uint32_t *sums)
{
    const uint8_t *a = records[0] + QUEUE_ID_AT, *b = records[1] + QUEUE_ID_AT, *c = records[2] + QUEUE_ID_AT;
    uint64_t first = begin(records[0]), second = begin(records[1]), third = begin(records[2]);
    size_t least = sizes[0] < sizes[1] ? sizes[0] : sizes[1];
    least = ((sizes[2] < least ? sizes[2] : least) - QUEUE_ID_AT) & ~(size_t)7;
    for (size_t at = 0; at < least; at += 8) {
        if (at % 64 == 0) {
            __builtin_prefetch(a + at + READ_AHEAD);
            __builtin_prefetch(b + at + READ_AHEAD);
            __builtin_prefetch(c + at + READ_AHEAD);
        }
        first = step(first, a + at);
        second = step(second, b + at);
        third = step(third, c + at);
    }
    least += QUEUE_ID_AT;
    sums[0] = ~run((uint32_t)first, records[0] + least, sizes[0] - least);
    sums[1] = ~run((uint32_t)second, records[1] + least, sizes[1] - least);
    sums[2] = ~run((uint32_t)third, records[2] + least, sizes[2] - least);
}
#endif

void crc32c_records(const uint8_t *const *records, const size_t *sizes, int count, uint32_t *sums)
{
#ifdef TARGET
    if (count == SIDE_BY_SIDE && sum_of_record == record_by_instruction) {
        three_by_instruction(records, sizes, sums);
        return;
    }
#endif
    for (int i = 0; i < count; i++)
        sums[i] = crc32c_record(records[i], sizes[i]);
}

/* crc32c(data, sum=0) -> CRC-32C of `data`, or of the bytes before it and of `data`, if `sum` is that of the former. */
PyObject *native_crc32c(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    if (nargs != 2 && !has_arguments("crc32c", nargs, 1))
        return NULL;
    uint32_t sum = nargs > 1 ? (uint32_t)PyLong_AsUnsignedLongMask(args[1]) : 0;
    Py_buffer *data = hold(held, args[0], 1, -1, false, "data");
    if (PyErr_Occurred())
        return NULL;
    PyThreadState *released = data->len >= LONG_BYTES ? PyEval_SaveThread() : NULL;
    sum = ~sum_of_bytes(~sum, data->buf, (size_t)data->len);
    if (released != NULL)
        PyEval_RestoreThread(released);
    return PyLong_FromUnsignedLong(sum);
}

/* crc32c_by_table(wanted) -> true if records are summed by tables from now on: for tests, which try both ways. Without `wanted`
   the tables are used only if the processor has no instruction. */
PyObject *native_crc32c_by_table(PyObject *const *args, Py_ssize_t nargs, Buffers *held)
{
    sum_of_record = record_by_table;
    sum_of_bytes = run_by_table;
    sum_of_body = body_by_table;
#ifdef TARGET
    if (args[0] != Py_True && HAS_INSTRUCTION) {
        sum_of_record = record_by_instruction;
        sum_of_bytes = run;
        sum_of_body = body_by_instruction;
    }
#endif
    return PyBool_FromLong(sum_of_record == record_by_table);
}

static void fill_table(uint32_t table[8][256], uint32_t polynomial)
{
    for (uint32_t byte = 0; byte < 256; byte++) {
        table[0][byte] = byte;
        for (int bit = 0; bit < 8; bit++)
            table[0][byte] = table[0][byte] >> 1 ^ (table[0][byte] & 1 ? polynomial : 0);
    }
    for (int i = 1; i < 8; i++)
        for (int byte = 0; byte < 256; byte++)
            table[i][byte] = table[i - 1][byte] >> 8 ^ table[0][table[i - 1][byte] & 255];
}

int crc32c_init(void)
{
    fill_table(table, 0x82F63B78u);
    fill_table(body_table, 0xEDB88320u);
    /* The published check value for the tables; the instruction is compared with them. */
    bool right = ~run_by_table(~0u, (const uint8_t *)"123456789", 9) == 0xE3069283u &&
                 crc32_body((const uint8_t *)"123456789", 9) == (0xCBF43926u & 0x7FFFFFFF);
#ifdef TARGET
    if (HAS_INSTRUCTION) {
        fill_moved(moved_sweep, SWEEP_STRAND);
        fill_moved(moved_long, LONG_STRAND);
        fill_moved(moved_short, SHORT_STRAND);
        uint8_t sample[4 * SWEEP_STRAND];
        for (size_t i = 0; i < sizeof sample; i++)
            sample[i] = (uint8_t)(i * 31 + (i >> 5));
        right = right && record_by_instruction(sample, sizeof sample) == record_by_table(sample, sizeof sample) &&
                body_by_instruction(~0u, sample, sizeof sample - 3) == body_by_table(~0u, sample, sizeof sample - 3);
        Py_XDECREF(native_crc32c_by_table((PyObject *[]){Py_False}, 1, NULL));
    }
#endif
    if (!right)
        PyErr_SetString(PyExc_ImportError, "mqstore._native computes CRC-32C wrongly on this processor");
    return right ? 0 : -1;
}
