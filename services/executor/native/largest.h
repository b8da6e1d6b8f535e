/* The largest logit of a row, for greedy sampling: from logits in memory, or while they are computed.
 *
 * Of those that tie the one with the smallest index; a NaN is larger than all. */
#ifndef RZ_LARGEST_H
#define RZ_LARGEST_H

#include "vector.h"

/* The best so far, of each lane for itself. Values must come by ascending index. */
typedef struct {
    float value[LANES];
    int32_t at[LANES]; /* its index; -1 before the first */
} rz_best;

RZ_INLINE rz_best rz_best_none(void)
{
    rz_best best;
    f32_store(best.value, f32_set1(-__builtin_inff()));
    i32_store(best.at, i32_set1(-1));
    return best;
}

/* `value`: those at `first` and after it, where they are `there`. */
RZ_INLINE void rz_best_add(rz_best *best, f32 value, lanes there, long first)
{
    static const int32_t numbers[LANES] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    const f32 before = f32_load(best->value);
    lanes larger = lanes_and(there, lanes_and(f32_above(value, before), f32_is_number(before)));
    f32_store(best->value, f32_select(larger, value, before));
    const i32 at = i32_add(i32_load(numbers), i32_set1((int)first));
    i32_store(best->at, i32_select(larger, at, i32_load(best->at)));
}

/* Index of the largest of `count` bests, `stride` apart; 0 where all that came was minus infinity. */
long rz_best_of(const rz_best *bests, long count, long stride, float *value);

/* Index of the largest of `count` values. */
long rz_largest(const float *values, long count);

#endif
