/* See digits.h. */
#include "digits.h"

#include <float.h>

enum {
    QUAD = 4 * COLUMNS, /* bytes of four k */
    MOST_NUMBERS = VECTORS == 32 ? 3 : 1, /* whose sums are in registers */
};

float rz_store_numbers(uint8_t *digits, long stride, const bf16 *values, long count)
{
    f32 peak = f32_zero(), nothing = f32_zero();
    for (long i = 0; i < count; i += LANES) {
        const f32 value = f32_load_bf16(values + i);
        peak = f32_max(peak, f32_abs(value));
        nothing = f32_fma(value, f32_zero(), nothing); /* NaN, of what is no finite number */
    }
    const float largest = f32_largest(peak) / (ZERO_NUMBER - 1), unit = largest > FLT_MIN ? largest : FLT_MIN;
    for (long i = 0; i < count; i += LANES) {
        const f32 in_units = f32_div(f32_load_bf16(values + i), f32_set1(unit));
        store_digits(digits + i, digits + stride + i, f32_add(f32_round(in_units), f32_set1(ZERO_NUMBER)));
    }
    return unit + f32_sum(nothing);
}

/* --- packing ----------------------------------------------------------------------------------------- */

/* The last codes of `count` rows, COLUMNS / 2 of each, filled up with zeros: behind them lies what is not theirs. */
static void copy_ends(int8_t *ends, const int8_t *rows, int count, int width)
{
    for (int i = 0; i < count; i++) {
        memcpy(ends + i * COLUMNS, rows + (i + 1) * width - COLUMNS / 2, COLUMNS / 2);
        memset(ends + i * COLUMNS + COLUMNS / 2, 0, COLUMNS / 2);
    }
}

void rz_pack_as_columns(int8_t *packed, const int8_t *rows, int width)
{
    int32_t *to = (int32_t *)packed;
    int8_t ends[LANES * COLUMNS];
    const bf16 *pairs[LANES]; /* four codes are moved as two pairs */
    for (int column = 0; column < width; column += COLUMNS) {
        const int whole = column + COLUMNS <= width;
        if (!whole)
            copy_ends(ends, rows, LANES, width);
        for (int i = 0; i < LANES; i++)
            pairs[i] = (const bf16 *)(whole ? rows + i * width + column : ends + i * COLUMNS);
        transpose_pairs(pairs, 0, to + column / 4 * COLUMNS, COLUMNS);
    }
}

/* Four rows of COLUMNS codes, `stride` apart. */
RZ_INLINE void pack_quad(int8_t *packed, const int8_t *rows, long stride)
{
    const bytes first = bytes_load(rows), second = bytes_load(rows + stride);
    const bytes third = bytes_load(rows + 2 * stride), fourth = bytes_load(rows + 3 * stride);
    const bytes even_low = bytes_zip_low(first, third), even_high = bytes_zip_high(first, third);
    const bytes odd_low = bytes_zip_low(second, fourth), odd_high = bytes_zip_high(second, fourth);
    bytes_store(packed, bytes_zip_low(even_low, odd_low));
    bytes_store(packed + COLUMNS, bytes_zip_high(even_low, odd_low));
    bytes_store(packed + 2 * COLUMNS, bytes_zip_low(even_high, odd_high));
    bytes_store(packed + 3 * COLUMNS, bytes_zip_high(even_high, odd_high));
}

void rz_pack_as_lines(int8_t *packed, const int8_t *rows, int column, int width)
{
    int8_t ends[4 * COLUMNS];
    for (int k = 0; k < LANES; k += 4) {
        if (column + COLUMNS <= width) {
            pack_quad(packed + k * COLUMNS, rows + k * width + column, width);
        } else {
            copy_ends(ends, rows + k * width, 4, width);
            pack_quad(packed + k * COLUMNS, ends, COLUMNS);
        }
    }
}

/* --- products ---------------------------------------------------------------------------------------- */

void rz_zero_products(digit_sums *zero, const int8_t *packed, int quads)
{
    i32 sums[QUARTERS];
    for (int v = 0; v < QUARTERS; v++)
        sums[v] = i32_set1(0);
    for (int quad = 0; quad < quads; quad++)
        for (int v = 0; v < QUARTERS; v++)
            sums[v] = i32_dot_u7(sums[v], bytes_set1(ZERO_NUMBER / UPPER), bytes_load(packed + quad * QUAD + v * 64));
    for (int v = 0; v < QUARTERS; v++) {
        const i32 negative = i32_sub(i32_set1(0), sums[v]);
        for (int row = 0; row < NUMBERS_AT_ONCE; row++)
            i32_store(zero->of[row][0] + v * LANES, negative);
    }
}

/* `rows` rows by `vectors` vectors of columns, whose sums stay in registers. */
RZ_INLINE void digits_block(const int rows, const int vectors, const uint8_t *digits, long stride, const int8_t *packed,
                            int quads, const int32_t (*start)[2][COLUMNS], int32_t (*sums)[2][COLUMNS], const int column)
{
    i32 upper[MOST_NUMBERS][QUARTERS], lower[MOST_NUMBERS][QUARTERS];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            upper[row][v] = start ? i32_load(start[0][0] + column + v * LANES) : i32_set1(0);
            lower[row][v] = i32_set1(0);
        }
    for (int quad = 0; quad < quads; quad++, packed += QUAD, digits += 4) {
        bytes codes[QUARTERS];
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++)
            codes[v] = bytes_load_once(packed + v * 64);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            const bytes high = bytes_repeat4(digits + 2 * row * stride);
            const bytes low = bytes_repeat4(digits + (2 * row + 1) * stride);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++) {
                i32_add_dot_u7(&upper[row][v], high, codes[v]);
                i32_add_dot_u7(&lower[row][v], low, codes[v]);
            }
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            i32_store(sums[row][0] + column + v * LANES, upper[row][v]);
            i32_store(sums[row][1] + column + v * LANES, lower[row][v]);
        }
}

static void multiply_in_lanes(const digit_product *product)
{
    enum { AT_ONCE = VECTORS == 32 ? QUARTERS : QUARTERS / 2 };
    const int32_t (*begin)[2][COLUMNS] = product->start ? product->start->of : NULL;
    const long stride = product->stride;
    for (int v = 0; v < QUARTERS; v += AT_ONCE) {
        const int8_t *from = product->packed + v * 64;
        const uint8_t *at = product->digits;
        int32_t (*to)[2][COLUMNS] = product->sums->of;
        int left = product->rows;
#if VECTORS == 32
        for (; left >= 3 && left != 4; left -= 3, at += 6 * stride, to += 3)
            digits_block(3, AT_ONCE, at, stride, from, product->quads, begin, to, v * LANES);
        for (; left >= 2; left -= 2, at += 4 * stride, to += 2)
            digits_block(2, AT_ONCE, at, stride, from, product->quads, begin, to, v * LANES);
#endif
        for (; left; left--, at += 2 * stride, to++)
            digits_block(1, AT_ONCE, at, stride, from, product->quads, begin, to, v * LANES);
    }
}

#if defined(__AMX_INT8__)
#include "levels/digits_amx.h"
#endif

void rz_multiply_quarter(const digit_product *product, int quarter)
{
#if defined(__AMX_INT8__)
    if (product->rows >= FEWEST_FOR_DIGIT_TILES) { /* sums of integers are the same either way */
        multiply_in_tiles(product, quarter);
        return;
    }
#endif
    if (quarter == 0) /* in lanes, digits are spread once for all columns */
        multiply_in_lanes(product);
}
