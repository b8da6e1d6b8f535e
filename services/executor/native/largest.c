/* See largest.h. */
#include "largest.h"

#include <math.h>

long rz_largest(const float *values, long count)
{
    const __m512i lanes = _mm512_set_epi32(15, 14, 13, 12, 11, 10, 9, 8, 7, 6, 5, 4, 3, 2, 1, 0);
    __m512 best = _mm512_set1_ps(-INFINITY);
    __m512i at = lanes; /* each lane's index of its best */
    for (long i = 0; i < count; i += LANES) {
        __mmask16 there = count - i >= LANES ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
        __m512 value = _mm512_mask_loadu_ps(_mm512_set1_ps(-INFINITY), there, values + i);
        __mmask16 nan = _mm512_cmp_ps_mask(value, value, _CMP_UNORD_Q);
        if (__builtin_expect(nan, 0))
            return i + __builtin_ctz(nan);
        __mmask16 larger = _mm512_cmp_ps_mask(value, best, _CMP_GT_OQ);
        best = _mm512_mask_mov_ps(best, larger, value);
        at = _mm512_mask_mov_epi32(at, larger, _mm512_add_epi32(lanes, _mm512_set1_epi32((int)i)));
    }
    __mmask16 winners = _mm512_cmp_ps_mask(best, _mm512_set1_ps(_mm512_reduce_max_ps(best)), _CMP_EQ_OQ);
    return _mm512_mask_reduce_min_epi32(winners, at);
}
