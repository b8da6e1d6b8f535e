/* What the files of the decoder share: its state, stages with their time booked, small functions. */
#ifndef RZ_STATE_H
#define RZ_STATE_H

#include "vector.h"

#include <math.h>
#include <stdatomic.h>

#include "decoder.h"
#include "low_rank.h"
#include "threads.h"
#include "workspace.h"

/* Rows of a step that have one adapter. */
typedef struct {
    long slot, first, rows; /* first: in `order` */
    long batched;           /* of them, while batches are made */
} rz_slot_rows;

/* Some of them, of one piece of a product's rows (products.h). */
typedef struct {
    int32_t slot, count, rows[ROWS_TOGETHER];
} rz_row_batch;

/* A step's rows by their adapters: see adapters.h. */
typedef struct {
    long room;            /* of what follows */
    int32_t *slots;       /* [tokens]: of each row's adapter; -1: it has none */
    int32_t *order;       /* rows that have one, by slots */
    rz_slot_rows *groups; /* [count] */
    long count;
    rz_row_batch *batches; /* piece by piece, by slots */
    int32_t *pieces;       /* [pieces and one more]: where those of each begin */
} rz_adapter_rows;

/* The sampled rows of a step, where the others are not computed: see tail.h. */
typedef struct {
    int from;         /* the first layer that stores nothing; as many as there are layers: there is none */
    int there;        /* whether the step at hand has a tail, */
    int within;       /* and the layer before `from` has a part in it */
    rz_step step;
    int32_t *numbers; /* its arrays */
    long room;        /* of them */
    rz_attention_plan attention[RZ_HEADS];
    rz_adapter_rows adapter_rows;
} rz_tail;

struct rz_decoder {
    rz_model model;
    rz_threads *threads;
    int borrowed; /* whether the threads are another decoder's */
    rz_workspace space;
    const rz_step *step;               /* what is computed: the caller's, or the tail's */
    const rz_attention_plan *attention; /* of that, for each of the model's heads */
    rz_attention_plan whole[RZ_HEADS]; /* of the caller's step */
    rz_tail tail;
    size_t prepared_row; /* bytes of a row of activations as products take it, at most; 0: as it is */
    const rz_adapter_rows *adapter_rows; /* of `step`; NULL: no sequence has an adapter */
    rz_adapter_rows whole_rows;          /* of the caller's step */
    operand *shrunk;                     /* [rows of a product, shrunk_stride] */
    size_t shrunk_room;                  /* bytes */
    long shrunk_stride;
    long *shrinks_due;                   /* of each thread */
    atomic_long shrinks_done;
    atomic_int failed;
    int64_t spent[RZ_PARTS]; /* written by thread 0 */
};

/* A stage (threads.h), its time booked on `part`. */
void rz_run_stage(rz_decoder *decoder, int thread, int part, long tasks, rz_task task, void *argument);

/* The same of short tasks, of a row each: several are taken at a time. */
void rz_run_rows(rz_decoder *decoder, int thread, int part, long rows, rz_task task, void *argument);

/* Adds `values` [tokens of the step, width] over the ranks, in place. 0 when the ring is lost. Called by all threads
 * alike, after a stage. */
int rz_sum_over_ranks(rz_decoder *decoder, int thread, float *values, long width);

/* Nanoseconds on a clock that only goes forward. */
int64_t rz_now(void);

RZ_INLINE long least(long a, long b)
{
    return a < b ? a : b;
}

/* How many parts of `each` `all` takes. */
RZ_INLINE long whole_parts(long all, long each)
{
    return (all + each - 1) / each;
}

/* `count`: a multiple of LANES. */
RZ_INLINE void to_bf16(bf16 *to, const float *from, long count)
{
    for (long i = 0; i < count; i += LANES)
        f32_store_bf16(to + i, f32_load(from + i));
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
