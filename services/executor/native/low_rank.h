/* The two products of a low-rank adapter, of a few rows: t = A x by blocks of 16 columns, y += B t by blocks of 16 outputs.
 *
 * Factors are bf16, or codes of 8 bits with scales, half as many bytes:
 *
 *     bf16     A, B    k 0,1 of outputs 0 .. 15 | k 2,3 of outputs 0 .. 15 | ...                    4 bytes each
 *     coded    A       for each 64 pairs: 16 scales (bf16) | k 0,1 of 0 .. 15, signed | ...         2 bytes each
 *              B       16 scales (bf16) | k 0 .. 3 of outputs 0 .. 15, plus 128 | ...               4 bytes each
 *
 * Codes of A are widened in registers and multiplied with x as it is; t is then rounded to 8 bits, 16 columns with one
 * scale, so that B needs one instruction for four products, and no widening. What B multiplies is then a whole number of
 * such 16 columns, or 4 or 8 of one of them. Without codes t is rounded to bf16. A row is summed in one order, whatever
 * rows are beside it.
 */
#ifndef RZ_LOW_RANK_H
#define RZ_LOW_RANK_H

#include "decoder.h"
#include "vector.h"

enum { ROWS_TOGETHER = VECTORS / 8 /* rows whose sums are in registers */ };

/* Bytes of a block of A with `inputs` inputs, and of one of B with `pairs` pairs of columns. */
size_t rz_shrink_bytes(const rz_low_rank *low, long inputs);
size_t rz_expand_bytes(const rz_low_rank *low, long pairs);

/* `rows` <= ROWS_TOGETHER rows of x by one block of A, to 16 columns of t each. `coming`: the block that this thread needs
 * next, or NULL. */
void rz_shrink_block(const rz_low_rank *low, int rows, const bf16 *const *x, const uint8_t *a, const uint8_t *coming,
                     long inputs, operand *const *to);

/* Blocks of one or two times 16 outputs, of as many pairs of columns each. */
typedef struct {
    const operand *t[ROWS_TOGETHER]; /* of each row */
    float *sums[ROWS_TOGETHER];      /* likewise: of a panel */
    long pairs;
    int halves;
    long first[2], column[2];        /* of t, and of the sums, that each begins with */
    const uint8_t *b[2];
    const char *ahead[2];            /* what comes: as many bytes; or readable addresses */
} rz_expanding;

/* Adds to the sums of `rows` <= ROWS_TOGETHER rows. */
void rz_expand_blocks(const rz_low_rank *low, int rows, const rz_expanding *at);

#endif
