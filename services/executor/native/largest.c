/* See largest.h. */
#include "largest.h"

#include <math.h>

/* Whether (value, at) goes before (than, its at). */
static int goes_before(float value, int at, float than, int than_at)
{
    if (isnan(value) || isnan(than))
        return isnan(value) && (!isnan(than) || at < than_at);
    return value > than || (value == than && at < than_at);
}

long rz_best_of(const rz_best *bests, long count, long stride, float *value)
{
    float largest = -INFINITY;
    int index = -1;
    for (long i = 0; i < count; i++) {
        const rz_best *best = &bests[i * stride];
        for (int lane = 0; lane < LANES; lane++)
            if (best->at[lane] >= 0 && (index < 0 || goes_before(best->value[lane], best->at[lane], largest, index))) {
                largest = best->value[lane];
                index = best->at[lane];
            }
    }
    *value = largest;
    return index < 0 ? 0 : index;
}

long rz_largest(const float *values, long count)
{
    rz_best best = rz_best_none();
    for (long i = 0; i < count; i += LANES) {
        lanes there = lanes_first(count - i);
        rz_best_add(&best, f32_load_some(there, values + i), there, i);
    }
    float value;
    return rz_best_of(&best, 1, 1, &value);
}
