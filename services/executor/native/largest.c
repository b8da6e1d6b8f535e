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
        float values[LANES];
        int at[LANES];
        _mm512_storeu_ps(values, bests[i * stride].value);
        _mm512_storeu_si512(at, bests[i * stride].at);
        for (int lane = 0; lane < LANES; lane++)
            if (at[lane] >= 0 && (index < 0 || goes_before(values[lane], at[lane], largest, index))) {
                largest = values[lane];
                index = at[lane];
            }
    }
    *value = largest;
    return index < 0 ? 0 : index;
}

long rz_largest(const float *values, long count)
{
    rz_best best = rz_best_none();
    for (long i = 0; i < count; i += LANES) {
        __mmask16 there = count - i >= LANES ? 0xffff : (__mmask16)((1u << (count - i)) - 1);
        rz_best_add(&best, _mm512_maskz_loadu_ps(there, values + i), there, i);
    }
    float value;
    return rz_best_of(&best, 1, 1, &value);
}
