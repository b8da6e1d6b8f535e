/* What the files of the decoder share: its state, stages with their time booked, small functions. */
#ifndef RZ_STATE_H
#define RZ_STATE_H

#include "vector.h"

#include <math.h>
#include <stdatomic.h>

#include "decoder.h"
#include "threads.h"
#include "workspace.h"

struct rz_decoder {
    rz_model model;
    rz_threads *threads;
    rz_workspace space;
    const rz_step *step;
    long parts, merges; /* attention parts, and rows to be merged from partial ones */
    long work, first_work[2]; /* of attention, in rows times keys: planned, and for the first rank of each shared head */
    size_t rounded_row; /* bytes of a row of rounded activations, at most; 0 where no linear is quantized */
    atomic_int failed;
    int64_t spent[RZ_PARTS]; /* written by thread 0 */
};

/* A stage (threads.h), its time booked on `part`. */
void rz_run_stage(rz_decoder *decoder, int thread, int part, long tasks, rz_task task, void *argument);

/* Adds `values` [tokens of the step, width] over the ranks, in place. 0 when the ring is lost. Called by all threads
 * alike, after a stage. */
int rz_sum_over_ranks(rz_decoder *decoder, int thread, float *values, long width);

/* Nanoseconds on a clock that only goes forward. */
int64_t rz_now(void);

RZ_INLINE long least(long a, long b)
{
    return a < b ? a : b;
}

/* What x [count] is multiplied with to have a mean square of 1. */
RZ_INLINE float rms_scale(const float *x, long count, float eps)
{
    f32 sum = f32_zero();
    for (long i = 0; i < count; i += LANES) {
        f32 value = f32_load_some(lanes_first(count - i), x + i);
        sum = f32_fma(value, value, sum);
    }
    return 1.0f / sqrtf(f32_sum(sum) / (float)count + eps);
}

#endif
