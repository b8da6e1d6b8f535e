/* The largest logit of a row, for greedy sampling: from logits in memory, or while they are computed.
 *
 * Of those that tie the one with the smallest index; a NaN is larger than all. */
#ifndef RZ_LARGEST_H
#define RZ_LARGEST_H

#include "vector.h"

/* The best so far, of each lane for itself. Values must come by ascending index. */
typedef struct {
    __m512 value;
    __m512i at; /* int32: its index; -1 before the first */
} rz_best;

RZ_INLINE rz_best rz_best_none(void)
{
    return (rz_best){ _mm512_set1_ps(-__builtin_inff()), _mm512_set1_epi32(-1) };
}

/* `value`: those at `first` and after it, where `there` has a bit. */
RZ_INLINE void rz_best_add(rz_best *best, __m512 value, __mmask16 there, long first)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __mmask16 larger = _mm512_mask_cmp_ps_mask(there, value, best->value, _CMP_NLE_UQ); /* or one is a NaN */
    larger &= _mm512_cmp_ps_mask(best->value, best->value, _CMP_ORD_Q);
    best->value = _mm512_mask_mov_ps(best->value, larger, value);
    best->at = _mm512_mask_add_epi32(best->at, larger, lanes, _mm512_set1_epi32((int)first));
}

/* Index of the largest of `count` bests, `stride` apart; 0 where all that came was minus infinity. */
long rz_best_of(const rz_best *bests, long count, long stride, float *value);

/* Index of the largest of `count` values. */
long rz_largest(const float *values, long count);

#endif
