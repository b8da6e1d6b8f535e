/* Quads of packed codes, and the sums of their products: what products of whole groups (quantized.c) and of whole spans
 * (spans.c) are made of. Layouts: quantized.h. */
#ifndef RZ_QUANTIZED_QUADS_H
#define RZ_QUANTIZED_QUADS_H

#include "quantized_layout.h"

/* What groups are: of blocks, blocks, of which halves are multiplied by their scale, or spans (spans.h). */
enum { BY_HALVES, BY_BLOCKS, BY_HALVED_BLOCKS, BY_SPANS };

enum {
    ROWS = VECTORS >= 32 ? 6 : 4,  /* of a register tile */
    WHOLE = VECTORS >= 32 ? 6 : 2, /* rows whose sums are in registers over a whole panel; of more, half of it */
    WIDEST = 16,                   /* what `bits` of unpacked codes are, at most: see unpacked_width */
    FEWEST = 2,                    /* rows that memory bounds: they read codes as they are packed */
};

/* Brings `bytes` from `from` on to the second cache: in the first they would drive out what is computed with. */
RZ_INLINE void ask_for(const uint8_t *from, const size_t bytes)
{
#pragma GCC unroll 16
    for (size_t i = 0; i < bytes; i += LINE_BYTES)
        __builtin_prefetch(from + i, 0, 2);
}

/* `value`'s bits from `from` on, as many as `mask` has, moved to where `mask` is. */
RZ_INLINE bytes field(bytes value, int from, int mask)
{
    const int by = from - __builtin_ctz((unsigned)mask);
    value = by > 0 ? bytes_right(value, by) : by < 0 ? bytes_left(value, -by) : value;
    return bytes_and(value, bytes_set1((uint8_t)mask));
}

/* The codes of quad `quad`, `side` 0 left, 1 right, of a block of fewer than 8 bits. */
RZ_INLINE bytes quad_codes(const int bits, const uint8_t *block, int quad, int side)
{
    const int low = bits >= 4 ? 4 : 2; /* bits of the first plane */
    const uint8_t *second = block + QUADS * LINE_BYTES, *third = bits == 5 ? second : block + QUADS / 2 * LINE_BYTES;
    bytes codes = low == 4 ? field(bytes_load_once(block + quad * LINE_BYTES), side * 4, 15)
                             : field(bytes_load(block + quad / 2 * LINE_BYTES), (quad % 2 * 2 + side) * 2, 3);
    if (bits == 6)
        codes = bytes_or(
            codes, field(bytes_load(second + quad / 2 * LINE_BYTES), (quad % 2 * 2 + side) * 2, 3 << 4));
    if (bits == 3 || bits == 5)
        codes = bytes_or(
            codes, field(bytes_load(third + quad / 4 * LINE_BYTES), quad % 4 * 2 + side, 1 << low));
    return codes;
}

typedef struct {
    bytes table;   /* of 16 bytes, four times; where there is one */
    bytes more[2]; /* what is added to the codes of each side, for their zero points */
} amends;

/* What `bits` of unpacked codes below `most` are: 8; 7, where those are faster; and where products are summed in 16 bits
 * 10 + n, those below 2^n. */
RZ_INLINE int unpacked_width(int most)
{
    if (!SUMS_OF_16_BITS)
        return FASTER_BELOW_128 && most <= 128 ? 7 : 8;
    return most <= 16 ? 14 : most <= 32 ? 15 : most <= 64 ? 16 : 8;
}

/* One more than the largest of unpacked codes can be. */
static int unpacked_most(const rz_format *format)
{
    int most = (format->minimums == RZ_ZEROS ? 2 << format->bits : 1 << format->bits) - 1;
    for (int code = 0; format->has_table && code < 16; code++) {
        const int here = format->table[code] + unpacked_offset(format);
        most = code == 0 || here > most ? here : most;
    }
    return most + 1;
}

/* The codes of quad `quad`, `side` 0 left, 1 right, of a block as `bits` says it is: packed, or as unpacked_width has it.
 * Of 8 bits a half, `plane` 0 the lower one, where products are summed in 16 bits. */
RZ_INLINE bytes codes_at(const int bits, const uint8_t *block, int quad, int side, int plane)
{
    if (bits < 7)
        return quad_codes(bits, block, quad, side);
    const bytes codes = bytes_load(block + (quad * 2 + side) * LINE_BYTES);
    return SUMS_OF_16_BITS && bits == 8 ? field(codes, plane * 4, 15) : codes;
}

#if SUMS_OF_16_BITS
/* Codes of 8 bits that no whole number scales are multiplied as 16 bits each, by activations that were widened for it: of
 * each four columns the first and the third, and SHORTS_APART bytes on the second and the fourth. */
enum { SHORTS_APART = SLAB * BLOCK, SHORTS_ROW = 2 * SHORTS_APART };

/* to[rows][SHORTS_ROW], from `columns` columns, whole blocks. */
static void widen_rows(int8_t *to, const int8_t *x, long stride, long rows, long columns)
{
    for (long row = 0; row < rows; row++, x += stride, to += SHORTS_ROW)
        for (long i = 0; i < columns; i += BLOCK)
            store_shorts(to + i, to + i + SHORTS_APART, x + i);
}

/* As add_quads. */
RZ_INLINE void add_quads_of_shorts(const int rows, const int sides, i32 (*dots)[2], const uint8_t *codes, int side,
                                   ptrdiff_t ahead, const int8_t *x, const int from, const int end)
{
    static const int32_t even = 0x00ff00ff;
#pragma GCC unroll 8
    for (int quad = from; quad < end; quad++) {
        if (side == 0)
            ask_for(codes + ahead + quad * 2 * LINE_BYTES, 2 * LINE_BYTES);
#pragma GCC unroll 2
        for (int odd = 0; odd < 2; odd++) {
            bytes here[2];
#pragma GCC unroll 2
            for (int i = 0; i < sides; i++) {
                const bytes line = bytes_load(codes + (quad * 2 + side + i) * LINE_BYTES);
                here[i] = odd ? bytes_right(line, 8) : bytes_and(line, bytes_repeat4(&even));
            }
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++) {
                const bytes two = bytes_repeat4(x + row * SHORTS_ROW + odd * SHORTS_APART + quad * 4);
#pragma GCC unroll 2
                for (int i = 0; i < sides; i++)
                    dots[row][i] = i32_dot_shorts(dots[row][i], here[i], two);
            }
        }
    }
}
#endif

/* dots[row] += quads [from, end) of `sides` sides of a block, from `side` on. Where products are summed in 16 bits, and
 * there are `scales` (of each side, each twice as 16 bits), they are multiplied by them; `starts` of each row, two of 16
 * bits each, are what such sums begin with, or NULL: zeros. */
RZ_INLINE void add_quads(const int rows, const int sides, const int bits, const int zeros, i32 (*dots)[2],
                         const uint8_t *codes, int side, const amends *amend, ptrdiff_t ahead, const int8_t *x,
                         long columns, const int from, const int end, const bytes *scales, const int32_t *starts,
                         long start_stride)
{
    const int width = bits > 10 ? bits - 10 : bits + zeros, planes = SUMS_OF_16_BITS && width == 8 ? 2 : 1;
#if SUMS_OF_16_BITS
    if (!scales && width == 8) {
        add_quads_of_shorts(rows, sides, dots, codes, side, ahead, x, from, end);
        return;
    }
#endif
    /* How many quads' products fit into sums of 16 bits. */
    const int fit = planes == 2 || width <= 4 ? QUADS : width == 5 ? 4 : width == 6 ? 2 : 1;
    const int run = !SUMS_OF_16_BITS ? 1 : fit < end - from ? fit : end - from;
#pragma GCC unroll 2
    for (int plane = 0; plane < planes; plane++) {
        if (plane) /* loads the activations again: there are no registers to keep them in */
            __asm__("" : "+r"(x));
#pragma GCC unroll 8
        for (int begin = from; begin < end; begin += run) {
            bytes sums[ROWS][2]; /* of 16 bits */
#pragma GCC unroll 8
            for (int quad = begin; quad < begin + run; quad++) {
                bytes here[2];
#pragma GCC unroll 2
                for (int i = 0; i < sides; i++)
                    here[i] = codes_at(bits, codes, quad, side + i, plane);
                if (plane == 0 && side == 0 && (bits < 7 || bits == 8))
                    ask_for(codes + ahead + quad * bits / 4 * LINE_BYTES,
                            (size_t)((quad + 1) * bits / 4 - quad * bits / 4) * LINE_BYTES);
#pragma GCC unroll 2
                for (int i = 0; i < sides && zeros; i++)
                    here[i] = bytes_add(here[i], amend->more[side + i]);
#pragma GCC unroll 6
                for (int row = 0; row < rows; row++) {
                    bytes four = bytes_repeat4(x + row * columns + quad * 4);
#pragma GCC unroll 2
                    for (int i = 0; i < sides; i++) {
                        if (!SUMS_OF_16_BITS) {
                            dots[row][i] = width < 8 ? i32_dot_u7(dots[row][i], here[i], four)
                                                     : i32_dot_u8(dots[row][i], here[i], four);
                            continue;
                        }
                        const bytes two = shorts_dot_u7(here[i], four);
                        if (quad == begin && starts && begin == from && plane == 0)
                            sums[row][i] = shorts_add(bytes_repeat4(starts + row * start_stride), two);
                        else
                            sums[row][i] = quad == begin ? two : shorts_add(sums[row][i], two);
                    }
                }
            }
#pragma GCC unroll 6
            for (int row = 0; row < rows && SUMS_OF_16_BITS; row++)
#pragma GCC unroll 2
                for (int i = 0; i < sides; i++)
                    dots[row][i] =
                        scales ? i32_dot_shorts(dots[row][i], sums[row][i], plane ? bytes_left(scales[i], 4) : scales[i])
                               : i32_add_shorts(dots[row][i], sums[row][i], plane ? 16 : 1);
        }
    }
}

#endif
