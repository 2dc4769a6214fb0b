/* CRC-32C by the instruction that the processor has for it: eight bytes in three cycles, three streams at once. */

#include "native.h"
#include <nmmintrin.h>

#define TARGET __attribute__((target("sse4.2")))

/* The instruction takes a new value each cycle but gives its result after three. So long inputs are read as three
   strands side by side, and the strands joined: a CRC is linear, so the state behind the first strand, moved on by as
   many zero bytes as the next has, is what the next would have begun with. `moved` holds that move by tables. */
enum { STRAND = 256 };
static uint32_t moved[4][256];

static inline uint32_t move_on(uint32_t crc)
{
    return moved[0][crc & 255] ^ moved[1][crc >> 8 & 255] ^ moved[2][crc >> 16 & 255] ^ moved[3][crc >> 24];
}

TARGET static inline uint64_t step(uint64_t crc, const uint8_t *at)
{
    uint64_t word;
    memcpy(&word, at, 8);
    return _mm_crc32_u64(crc, word);
}

/* The bare register: neither inverted before nor after. */
TARGET static uint32_t run(uint32_t start, const uint8_t *at, size_t n)
{
    uint64_t crc = start;
    while (n >= 3 * STRAND) {
        uint64_t second = 0, third = 0;
        for (const uint8_t *stop = at + STRAND; at < stop; at += 8) {
            crc = step(crc, at);
            second = step(second, at + STRAND);
            third = step(third, at + 2 * STRAND);
        }
        crc = move_on((uint32_t)(move_on((uint32_t)crc) ^ second)) ^ third;
        at += 2 * STRAND;
        n -= 3 * STRAND;
    }
    for (; n >= 8; n -= 8, at += 8)
        crc = step(crc, at);
    if (n & 4) {
        uint32_t word;
        memcpy(&word, at, 4);
        crc = _mm_crc32_u32((uint32_t)crc, word);
        at += 4;
    }
    for (n &= 3; n; n--)
        crc = _mm_crc32_u8((uint32_t)crc, *at++);
    return (uint32_t)crc;
}

uint32_t crc32c(uint32_t crc, const uint8_t *data, size_t n) { return ~run(~crc, data, n); }

TARGET uint32_t crc32c_record(const uint8_t *record, size_t n)
{
    uint64_t crc = step(0xFFFFFFFFu, record);
    crc = _mm_crc32_u32((uint32_t)crc, 0);
    return ~run((uint32_t)crc, record + QUEUE_ID_AT, n - QUEUE_ID_AT);
}

/* How far before it is used memory is asked for: by itself the processor does not see three readers as one. */
enum { READ_AHEAD = 8192 };

/* Each value waits for the one before, so records that are short are read side by side, as long as all of them last. */
TARGET void crc32c_records(const uint8_t *const *records, const size_t *sizes, int count, uint32_t *sums)
{
    if (count < 3) {
        for (int i = 0; i < count; i++)
            sums[i] = crc32c_record(records[i], sizes[i]);
        return;
    }
    const uint8_t *a = records[0] + QUEUE_ID_AT, *b = records[1] + QUEUE_ID_AT, *c = records[2] + QUEUE_ID_AT;
    uint64_t first = step(0xFFFFFFFFu, records[0]), second = step(0xFFFFFFFFu, records[1]), third = step(0xFFFFFFFFu, records[2]);
    first = _mm_crc32_u32((uint32_t)first, 0);
    second = _mm_crc32_u32((uint32_t)second, 0);
    third = _mm_crc32_u32((uint32_t)third, 0);
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

int crc32c_init(void)
{
    __builtin_cpu_init();
    if (!__builtin_cpu_supports("sse4.2")) {
        PyErr_SetString(PyExc_ImportError, "this processor has no instruction for CRC-32C");
        return -1;
    }
    static const uint8_t zeros[STRAND];
    for (int bit = 0; bit < 32; bit++) {
        /* Shorter than three strands, so it does not use the table that is being made. */
        uint32_t image = run(1u << bit, zeros, STRAND);
        uint32_t *row = moved[bit / 8];
        for (int low = 1 << bit % 8, i = 0; i < low; i++)
            row[low + i] = row[i] ^ image;
    }
    /* The published check value, and long inputs against short ones. */
    uint8_t sample[4 * STRAND];
    for (size_t i = 0; i < sizeof sample; i++)
        sample[i] = (uint8_t)(i * 31 + (i >> 5));
    uint32_t pieces = 0;
    for (size_t i = 0; i < sizeof sample; i += 64)
        pieces = crc32c(pieces, sample + i, 64);
    if (crc32c(0, (const uint8_t *)"123456789", 9) != 0xE3069283u || crc32c(0, sample, sizeof sample) != pieces) {
        PyErr_SetString(PyExc_ImportError, "mqstore._native computes CRC-32C wrongly on this processor");
        return -1;
    }
    return 0;
}
