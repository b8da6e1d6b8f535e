/* Products of numbers of 14 bits with codes of 8 bits, exact.
 *
 *     c[row][column] = sum over k of number[row][k] * code[k][column]          64 columns
 *
 * A number in units of its row is an integer below 2^14, kept as two bytes of seven bits (upper and lower), which
 * processors multiply with signed codes four at a time (vpdpbusd, sdot, tdpbusd). Sums of integers are the same in any
 * order, and one rounding makes a float32 of each: what comes out is the same bits whatever is computed beside it.
 *
 * Codes are packed in quads of k, and in four vectors of 16 columns:
 *
 *     k 0..3 of columns 0..15 | k 0..3 of columns 16..31 | ..48..63 | k 4..7 of columns 0..15 | ...       4 bytes each
 */
#ifndef RZ_DIGITS_H
#define RZ_DIGITS_H

#include "vector.h"

enum {
    COLUMNS = 64,         /* of a product */
    UPPER = 128,          /* an upper digit, in lower ones */
    LARGEST_NUMBER = UPPER * (UPPER - 1), /* of those that have no sign; with one: a number that is 0 at ZERO_NUMBER */
    ZERO_NUMBER = UPPER * UPPER / 2,
};

/* Numbers in units, up to LARGEST_NUMBER, as digits: LANES of each. */
RZ_INLINE void store_digits(uint8_t *upper, uint8_t *lower, f32 in_units)
{
    const f32 whole = f32_round(in_units);
    const f32 high = f32_round(f32_fma(whole, f32_set1(1.0f / UPPER), f32_set1(-63.5f / UPPER))); /* rounded down */
    f32_store_i8((int8_t *)upper, high);
    f32_store_i8((int8_t *)lower, f32_fma(high, f32_set1(-UPPER), whole));
}

/* `count` values, a multiple of LANES, as numbers around ZERO_NUMBER: upper digits to `digits`, lower ones `stride`
 * behind. Returns their unit; NaN where a value is none or infinite. */
float rz_store_numbers(uint8_t *digits, long stride, const bf16 *values, long count);

/* LANES rows of `width` codes, a multiple of 32, that follow each other become one vector's columns of `packed`. */
void rz_pack_as_columns(int8_t *packed, const int8_t *rows, int width);

/* COLUMNS codes of each of LANES such rows from `column` on, or 32 at their end, become lines. A column's place: the
 * quarters of the four vectors are transposed, and transpose_quarters turns them back. */
void rz_pack_as_lines(int8_t *packed, const int8_t *rows, int column, int width);

/* `zero` [COLUMNS]: what a product comes to for numbers that are all ZERO_NUMBER, negative, in upper digits. */
void rz_zero_products(int32_t *zero, const int8_t *packed, int quads);

/* Products of `rows` rows of digits, lower ones `stride` behind the upper, rows 2 * `stride` apart. `zero`: what is
 * taken off where numbers have a sign, else zeros. Digits are read up to the next multiple of 8 rows. */
void rz_multiply_digits(int rows, const uint8_t *digits, long stride, const int8_t *packed, int quads,
                        const int32_t *zero, float *c, long ldc);

#endif
