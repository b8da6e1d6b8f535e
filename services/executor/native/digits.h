/* Products of numbers of 14 bits with codes of 8 bits, exact.
 *
 *     sum[row][column] = sum over k of number[row][k] * code[k][column]          8 rows, 64 columns
 *
 * A number in units of its row is an integer of 14 bits, kept as two bytes (upper and lower): of seven bits without a sign
 * for codes that lie as lines; up to 64 with one for codes that lie as columns, which are kept 128 above what they are.
 * Processors multiply unsigned bytes with signed ones four at a time (vpdpbusd, sdot, tdpbusd, tdpbsud). Sums of integers
 * are the same in any order, and one rounding makes a float32 of each: what comes out is the same bits whatever is computed
 * beside it.
 *
 * Codes lie in quads of k. Of lines that follow each other, 16 are a group, which is one of two:
 *
 *     as columns  the lines are 16 of the columns       k 0..3 of lines 0..15 | k 4..7 of lines 0..15 | ...
 *     as lines    the lines are 16 k, of 64 columns each    lines 0..3 of columns 0..15 | .. 16..31 | .. 32..47 | .. 48..63 |
 *                                                           lines 4..7 of columns 0..15 | ...
 *
 * 4 bytes each. Both take as many bytes as the lines do, where these are whole: keys and values may be kept so.
 */
#ifndef RZ_DIGITS_H
#define RZ_DIGITS_H

#include "upcoming.h"
#include "vector.h"

enum {
    COLUMNS = 64,         /* of a product */
    NUMBERS_AT_ONCE = 8,  /* rows of one, at most */
    UPCOMING_OF_QUAD = 4, /* lines: a quad of a round's keys or values is so many bytes, too */
    FEWEST_FOR_DIGIT_TILES = 4, /* rows: fewer are sooner multiplied in lanes, whose sums are in registers */
    UPPER = 128,          /* an upper digit, in lower ones */
    LARGEST_NUMBER = UPPER * (UPPER - 1),   /* of those that have no sign */
    LARGEST_SIGNED = UPPER * UPPER / 2 - 1, /* of those that have one: digits of both signs, up to 64 */
};

/* What a row's values are as numbers. */
typedef struct {
    float unit;      /* NaN where a value is none or infinite */
    int32_t surplus; /* that codes which count COUNTS_MORE_BY more than they are add to each product */
} number_row;

/* `count` values, a multiple of LANES, as numbers with signs: upper digits to `digits`, lower ones `stride` behind. */
number_row rz_store_numbers(uint8_t *digits, long stride, const bf16 *values, long count);

enum { GROUP_COLUMNS = LANES * COLUMNS /* bytes of a group that lies as lines, of COLUMNS columns */ };

/* A group of `width` codes a line, a multiple of 32, becomes columns, each code 128 above what it is; behind them, up to
 * whole COLUMNS, there are zeros. */
void rz_pack_as_columns(int8_t *packed, const int8_t *rows, int width);

/* COLUMNS codes of each line of such a group from `column` on, or 32 at their end, become lines. A column's place: the
 * quarters of the four vectors are transposed, and transpose_quarters turns them back. */
void rz_pack_as_lines(int8_t *packed, const int8_t *rows, int column, int width);

/* `count` codes from `column` on of one line of a group that lies as columns, as they are. */
RZ_INLINE void unpack_line_of_columns(int8_t *codes, const int8_t *packed, int line, int column, int count)
{
    for (int i = 0; i < count; i += 4)
        memcpy(codes + i, packed + (column + i) * LANES + line * 4, 4);
    for (int i = 0; i < count; i++)
        codes[i] = (int8_t)(codes[i] ^ -128);
}

/* The other way, of lines of whole COLUMNS. */
void rz_unpack_columns(int8_t *rows, const int8_t *packed, int width);
void rz_unpack_lines(int8_t *rows, const int8_t *packed, int width);

/* Sums of the products of rows' upper digits and of their lower ones. */
typedef struct {
    int32_t of[NUMBERS_AT_ONCE][2][COLUMNS];
} digit_sums;

/* The products of a row: LANES columns. */
RZ_INLINE i32 digit_sum(const int32_t of[2][COLUMNS], int vector)
{
    return i32_join_sevens(i32_load(of[0] + vector * LANES), i32_load(of[1] + vector * LANES));
}

enum { QUARTERS = COLUMNS / LANES };

/* Products of `rows` rows of digits, lower ones `stride` behind the upper, rows 2 * `stride` apart. Digits are read as those
 * of NUMBERS_AT_ONCE rows, and all sums may be written. */
typedef struct {
    int rows, quads;              /* quads: of a group as columns; 0: groups lie as lines */
    const uint8_t *digits;
    long stride;
    const int8_t *const *groups;  /* [QUARTERS]; for tiles, groups as lines are GROUP_COLUMNS apart */
    int count;                    /* of groups whose products are asked for, or whose digits are not zeros */
    long offset;                  /* in each group */
    digit_sums *sums;
    rz_upcoming *ahead;           /* what is asked for meanwhile, UPCOMING_OF_QUAD lines for each quad; or NULL */
} digit_product;

/* Whether tiles may multiply. */
RZ_INLINE int rz_has_digit_tiles(void)
{
#if defined(__AMX_INT8__)
    return 1;
#else
    return 0;
#endif
}

/* Sums in a tile. They are stored when the next ones have begun in another: sooner, all that follows would wait for them. */
typedef struct {
    int32_t *to; /* NULL: none are */
    int tile;
} waiting_quarter;

/* The first, ... fourth LANES columns of it; they are there when all have been asked for, and rz_end_quarters was. Between
 * them, vectors may do something else: tiles multiply meanwhile, and what waits for them does not hold it up. */
void rz_multiply_quarter(const digit_product *product, int quarter, waiting_quarter *before);

void rz_end_quarters(waiting_quarter *before);

#endif
