/* Blocks of GGUF files taken apart into codes and scales, and codes into numbers: what model/loading/gguf_blocks.py and
 * model/quantized.py do with PyTorch, in one pass. Source: llama.cpp, ggml/src/ggml-common.h. */
#include "vector.h"

/* As ggml numbers them. */
enum { Q4_0 = 2, Q4_1 = 3, Q5_0 = 6, Q5_1 = 7, Q8_0 = 8, Q4_K = 12, Q5_K = 13, Q6_K = 14 };
enum { SMALL_BLOCK = 32, LARGE_BLOCK = 256 };

/* Where the parts of a row go, each behind the row before it. */
typedef struct {
    uint8_t *codes, *scales, *minimums, *supers, *super_minimums;
} row_parts;

/* Codes of `bits` bits: of `width` bytes the lowest bits, then those above; so for each of `runs`. They go to the bits
 * from `at` on of theirs. */
RZ_INLINE void take_plane(uint8_t *restrict to, const uint8_t *restrict from, long runs, long width, int bits, int at)
{
    for (long run = 0; run < runs; run++, from += width)
        for (int shift = 0; shift < 8; shift += bits, to += width)
            for (long i = 0; i < width; i++)
                to[i] = (uint8_t)((at ? to[i] : 0) | ((from[i] >> shift) & ((1 << bits) - 1)) << at);
}

RZ_INLINE void take_fifth_bits(uint8_t *codes, const uint8_t *from)
{
    for (int i = 0; i < SMALL_BLOCK; i++)
        codes[i] |= (uint8_t)((from[i / 8] >> i % 8 & 1) << 4);
}

/* A half with the other sign. */
RZ_INLINE void take_negative(uint8_t *to, const uint8_t *from)
{
    to[0] = from[0], to[1] = from[1] ^ 0x80;
}

static void take_small(int type, const uint8_t *from, row_parts *to)
{
    const int has_minimum = type == Q4_1 || type == Q5_1, has_fifth = type == Q5_0 || type == Q5_1;
    const uint8_t *codes = from + 2 + 2 * has_minimum + 4 * has_fifth;
    memcpy(to->scales, from, 2);
    if (has_minimum)
        take_negative(to->minimums, from + 2), to->minimums += 2;
    if (type == Q8_0)
        for (int i = 0; i < SMALL_BLOCK; i++)
            to->codes[i] = codes[i] ^ 128;
    else
        take_plane(to->codes, codes, 1, 16, 4, 0);
    if (has_fifth)
        take_fifth_bits(to->codes, codes - 4);
    to->codes += SMALL_BLOCK, to->scales += 2;
}

/* Of Q4_K and Q5_K: eight scales and minimums of six bits in twelve bytes. */
static void take_six_bits(const uint8_t *from, row_parts *to)
{
    for (int i = 0; i < 4; i++) {
        const uint8_t first = from[i], second = from[4 + i], third = from[8 + i];
        to->scales[i] = first & 63, to->scales[4 + i] = (third & 15) | (first >> 2 & 48);
        to->minimums[i] = second & 63, to->minimums[4 + i] = third >> 4 | (second >> 2 & 48);
    }
    to->scales += 8, to->minimums += 8;
}

static void take_large(int type, const uint8_t *from, row_parts *to)
{
    if (type == Q6_K) {
        take_plane(to->codes, from, 2, 64, 4, 0);
        take_plane(to->codes, from + 128, 2, 32, 2, 4);
        memcpy(to->scales, from + 192, 16);
        memcpy(to->supers, from + 208, 2);
        to->scales += 16;
    } else {
        memcpy(to->supers, from, 2);
        memcpy(to->super_minimums, from + 2, 2);
        take_six_bits(from + 4, to);
        take_plane(to->codes, from + (type == Q5_K ? 48 : 16), 4, 32, 4, 0);
        if (type == Q5_K)
            take_plane(to->codes, from + 16, 1, 32, 1, 4);
        to->super_minimums += 2;
    }
    to->codes += LARGE_BLOCK, to->supers += 2;
}

/* `rows` rows of `blocks` blocks of `bytes` bytes; a row begins `stride` bytes behind the row before it. */
void rz_block_codes(int type, const uint8_t *raw, long stride, long rows, long blocks, long bytes, uint8_t *codes,
                    uint8_t *scales, uint8_t *minimums, uint8_t *supers, uint8_t *super_minimums)
{
    row_parts to = { codes, scales, minimums, supers, super_minimums };
    for (long row = 0; row < rows; row++)
        for (long block = 0; block < blocks; block++) {
            const uint8_t *from = raw + row * stride + block * bytes;
            if (type >= Q4_K)
                take_large(type, from, &to);
            else
                take_small(type, from, &to);
        }
}

/* Products are rounded before they are subtracted from, as PyTorch does: numbers are the same at every level. */
#if defined(__GNUC__) && !defined(__clang__)
#define RZ_ROUNDS_PRODUCTS __attribute__((optimize("fp-contract=off")))
#else
#define RZ_ROUNDS_PRODUCTS
#endif

RZ_ROUNDS_PRODUCTS static void group_values(const uint8_t *codes, long count, int offset, float scale, float minimum,
                                            float *to)
{
    for (long i = 0; i < count; i++) {
        const float product = (float)(codes[i] - offset) * scale;
        to[i] = product - minimum;
    }
}

/* To nearest, ties to even. */
RZ_INLINE void store_nearest(const float *values, long count, bf16 *to)
{
    for (long i = 0; i < count; i++) {
        const union { float value; uint32_t bits; } both = { values[i] };
        to[i] = (bf16)((both.bits + 0x7fff + (both.bits >> 16 & 1)) >> 16);
    }
}

/* (code - offset) * scale - minimum, of `rows` rows of `groups` groups of `group` codes: to float32 or bf16, a row
 * `stride` values behind the row before it. `minimums` may be NULL. */
void rz_code_values(const uint8_t *codes, const float *scales, const float *minimums, long rows, long groups, long group,
                    int offset, void *values, int is_float, long stride)
{
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < groups; i++, codes += group) {
            const float scale = *scales++, minimum = minimums ? *minimums++ : 0.0f;
            const long at = row * stride + i * group;
            for (long first = 0; first < group; first += LARGE_BLOCK) {
                const long left = group - first, count = left < LARGE_BLOCK ? left : LARGE_BLOCK;
                float some[LARGE_BLOCK];
                float *to = is_float ? (float *)values + at + first : some;
                group_values(codes + first, count, offset, scale, minimum, to);
                if (!is_float)
                    store_nearest(some, count, (bf16 *)values + at + first);
            }
        }
}
