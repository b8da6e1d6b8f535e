/* See digits.h. */
#include "digits.h"

#include <float.h>

enum {
    QUAD_BYTES = 4 * LANES, /* of LANES columns */
    QUAD = 4 * COLUMNS, /* bytes of four k */
    MOST_NUMBERS = VECTORS == 32 ? 3 : 1, /* whose sums are in registers */
};

/* LANES whole numbers with signs. */
RZ_INLINE void store_digits(int8_t *upper, int8_t *lower, f32 whole)
{
    const f32 high = f32_round(f32_mul(whole, f32_set1(1.0f / UPPER)));
    f32_store_i8(upper, high);
    f32_store_i8(lower, f32_fma(high, f32_set1(-UPPER), whole));
}

number_row rz_store_numbers(uint8_t *digits, long stride, const bf16 *values, long count)
{
    f32 peak = f32_zero(), nothing = f32_zero(), sums = f32_zero();
    for (long i = 0; i < count; i += LANES) {
        const f32 value = f32_load_bf16(values + i);
        peak = f32_max(peak, f32_abs(value));
        nothing = f32_fma(value, f32_zero(), nothing); /* NaN, of what is no finite number */
    }
    const float largest = f32_largest(peak) / LARGEST_SIGNED, unit = largest > FLT_MIN ? largest : FLT_MIN;
    for (long i = 0; i < count; i += LANES) {
        const f32 whole = f32_round(f32_div(f32_load_bf16(values + i), f32_set1(unit)));
        store_digits((int8_t *)digits + i, (int8_t *)digits + stride + i, whole);
        sums = f32_add(sums, whole);
    }
    const float sum = f32_sum(sums), none = f32_sum(nothing); /* whole numbers below 2^24 */
    return (number_row){ unit + none, none == 0.0f ? (int32_t)sum * COUNTS_MORE_BY : 0 };
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

/* `count` codes, a multiple of LINE_BYTES: above what they are by 128, or no more so. */
RZ_INLINE void raise_codes(int8_t *codes, long count)
{
    for (long i = 0; i < count; i += LINE_BYTES)
        bytes_store(codes + i, bytes_xor(bytes_load(codes + i), bytes_set1(128)));
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
        transpose_pairs(pairs, 0, to + column / 4 * LANES, LANES);
    }
    raise_codes(packed, (long)LANES * width);
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

void rz_unpack_columns(int8_t *rows, const int8_t *packed, int width)
{
    const bf16 *quads[LANES];
    for (int column = 0; column < width; column += COLUMNS, packed += GROUP_COLUMNS) {
        for (int i = 0; i < LANES; i++)
            quads[i] = (const bf16 *)(packed + i * LANES * 4);
        transpose_pairs(quads, 0, (int32_t *)(rows + column), width / 4);
    }
    raise_codes(rows, (long)LANES * width);
}

void rz_unpack_lines(int8_t *rows, const int8_t *packed, int width)
{
    for (int column = 0; column < width; column += COLUMNS)
        for (int k = 0; k < LANES; k += 4, packed += 4 * COLUMNS) {
            int8_t once[4 * COLUMNS], twice[4 * COLUMNS]; /* packed three times, bytes are where they were */
            pack_quad(once, packed, COLUMNS);
            pack_quad(twice, once, COLUMNS);
            for (int i = 0; i < 4; i++)
                memcpy(rows + (k + i) * width + column, twice + i * COLUMNS, COLUMNS);
        }
}

/* --- products ---------------------------------------------------------------------------------------- */

RZ_INLINE void add_products(i32 *sum, const int are_lines, bytes digits, bytes codes)
{
    if (are_lines)
        i32_add_dot_u7(sum, digits, codes);
    else
        i32_add_dot_raised(sum, codes, digits);
}

/* `rows` rows from `row` on by `vectors` vectors of columns, whose sums stay in registers. */
RZ_INLINE void digits_block(const digit_product *product, const int are_lines, const int row, const int rows, const int vector,
                            const int vectors)
{
    const int runs = are_lines ? product->count : 1, quads = are_lines ? LANES / 4 : product->quads;
    const long stride = product->stride, step = are_lines ? QUAD : QUAD_BYTES;
    const uint8_t *digits = product->digits + 2 * row * stride;
    i32 upper[MOST_NUMBERS][QUARTERS], lower[MOST_NUMBERS][QUARTERS];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            upper[i][v] = i32_set1(0);
            lower[i][v] = i32_set1(0);
        }
    for (int run = 0; run < runs; run++) {
        const int8_t *at[QUARTERS];
#pragma GCC unroll 4
        for (int v = vector; v < vector + vectors; v++)
            at[v - vector] = product->groups[are_lines ? run : v] + product->offset + (are_lines ? v * QUAD_BYTES : 0);
#pragma GCC unroll 1
        for (int quad = 0; quad < quads; quad++, digits += 4) {
            bytes codes[QUARTERS];
            if (row == 0 && vector == 0 && product->ahead)
                pull(product->ahead, UPCOMING_OF_QUAD);
#pragma GCC unroll 4
            for (int v = 0; v < vectors; v++)
                codes[v] = bytes_load_once(at[v] + quad * step);
#pragma GCC unroll 4
            for (int i = 0; i < rows; i++) {
                const bytes high = bytes_repeat4(digits + 2 * i * stride), low = bytes_repeat4(digits + (2 * i + 1) * stride);
#pragma GCC unroll 4
                for (int v = 0; v < vectors; v++) {
                    add_products(&upper[i][v], are_lines, high, codes[v]);
                    add_products(&lower[i][v], are_lines, low, codes[v]);
                }
            }
        }
    }
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 4
        for (int v = 0; v < vectors; v++) {
            i32_store(product->sums->of[row + i][0] + (vector + v) * LANES, upper[i][v]);
            i32_store(product->sums->of[row + i][1] + (vector + v) * LANES, lower[i][v]);
        }
}

/* The first `vectors` of columns, `at_once` at once. */
RZ_INLINE void multiply_all(const digit_product *product, const int are_lines, const int vectors, const int at_once)
{
    for (int v = 0; v < vectors; v += at_once) {
        int row = 0;
#if VECTORS == 32
        for (; product->rows - row >= 3 && product->rows - row != 4; row += 3)
            digits_block(product, are_lines, row, 3, v, at_once);
        for (; product->rows - row >= 2; row += 2)
            digits_block(product, are_lines, row, 2, v, at_once);
#endif
        for (; row < product->rows; row++)
            digits_block(product, are_lines, row, 1, v, at_once);
    }
}

static __attribute__((noinline)) void multiply_in_lanes(const digit_product *product)
{
    enum { HALF = QUARTERS / 2, AT_ONCE = VECTORS == 32 ? QUARTERS : HALF };
    if (!product->quads)
        multiply_all(product, 1, QUARTERS, AT_ONCE);
    else if (product->count <= HALF)
        multiply_all(product, 0, HALF, HALF);
    else
        multiply_all(product, 0, QUARTERS, AT_ONCE);
}

#if defined(__AMX_INT8__)
#include "levels/digits_amx.h"
#endif

void rz_multiply_quarter(const digit_product *product, int quarter, waiting_quarter *before)
{
#if defined(__AMX_INT8__)
    if (product->rows >= FEWEST_FOR_DIGIT_TILES) { /* sums of integers are the same either way */
        multiply_in_tiles(product, quarter, before);
        return;
    }
#endif
    (void)before;
    if (quarter == 0) /* in lanes, digits are spread once for all columns */
        multiply_in_lanes(product);
}

void rz_end_quarters(waiting_quarter *before)
{
#if defined(__AMX_INT8__)
    store_waiting(before);
#endif
    before->to = NULL;
}
