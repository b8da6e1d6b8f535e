/* Rounds of few queries, as those of decodes are: their products with keys and values as these lie in memory. To pack a
 * round's keys and values takes longer than to multiply them by a few rows.
 *
 *     scores   keys are the rows of tiles, and queries the columns (AMX alone)
 *     values   each key's values times its weights, in vectors
 *
 * Each sum is of the same products in the same order as in rz_tile: to the bit what it would be among many queries (but
 * for numbers below 2^-126, which AMX takes for zeros). */
#ifndef RZ_ATTENTION_FEW_H
#define RZ_ATTENTION_FEW_H

#include "attention_scratch.h"
#include "gemm.h"

/* Whether vectors can add in the order of rz_tile: vdpbf16ps alone has one of its own. */
#if defined(__AMX_BF16__)
enum { ADDS_FEW = 1, PAIRS_APART = 1 /* the two of each pair have sums of their own, over 16 pairs */ };
#else
enum { ADDS_FEW = TURNS == 2, PAIRS_APART = 0 };
#endif

/* Whether keys are multiplied by so few queries where they lie; else only values are. */
RZ_INLINE int rz_scores_few(int queries)
{
#if defined(__AMX_BF16__)
    return queries <= FEW_QUERIES;
#else
    (void)queries;
    return 0;
#endif
}

/* Few queries as columns: [d / 2][FEW_QUERIES][2], zeros behind the last one. */
void rz_place_few(bf16 *columns, const bf16 *queries, long stride, int rows, int heads, int d);

/* Scores of queries [first, first + count) of `columns` with the keys of a round, whose rows these are: `keys` of them, and
 * behind them rows of zeros. `scores`: [count][KEYS]; of the keys behind the last one there may be any. */
void rz_score_few(const bf16 *columns, int first, int count, const bf16 *const *rows, int keys, int d, float *scores,
                  rz_attention_memory *memory, rz_upcoming *ahead);

/* Adds weights [count][KEYS], numbers that bf16 has, times the values of `keys` keys to sums, `width` apart. */
void rz_add_few(const float *weights, int count, const bf16 *const *rows, int keys, int value_dim, float *sums, int width,
                rz_upcoming *ahead);

#endif
