/* Products with a linear layer's weights, and what is done with the sums while they are in registers. */
#ifndef RZ_PRODUCTS_H
#define RZ_PRODUCTS_H

#include "state.h"

typedef enum { STORE, ADD, ACTIVATE, GATE, LARGEST, ROUND } rz_product_end;

typedef struct {
    const rz_linear *linear; /* with ACTIVATE, GATE and LARGEST one alone */
    const bf16 *x;
    long rows, stride; /* of x, in values; stride 0: rows follow each other */
    rz_product_end end;
    void *out; /* STORE: float32 [rows, outputs]; ADD: float32, added to; ACTIVATE: bf16 [rows, outputs / 2];
                  GATE: bf16 [rows, outputs], the activations of the sums times `by`;
                  LARGEST: rz_best [threads, rows], which are set anew; ROUND: bf16, rows `out_stride` apart */
    long out_stride;
    float scale, cap;
    const rz_model *activation; /* whose it is, with ACTIVATE and GATE */
    const float *by;            /* [rows, outputs], with GATE; rows are `by_stride` apart */
    long by_stride;
    const int32_t *from;  /* [rows]: of x, where experts take theirs; or NULL: one after the other */
    const int32_t *to;    /* [rows]: of out, with ADD; or NULL */
    const float *weights; /* [rows]: what each is multiplied with besides, with ADD and STORE; or NULL */
} rz_product;

/* Whether its products take activations rounded. */
RZ_INLINE int rz_rounds(const rz_linear *linear)
{
    return linear->format.bits && !linear->format.floats;
}

/* Called by all threads alike; its time is booked on `part`. Where a linear is quantized, there must be room for the
 * rounded rows: rz_workspace_reserve_prepared. Those of bf16 are widened ahead where there is room. */
void rz_multiply(rz_decoder *decoder, int thread, int part, rz_product job);

enum {
    ROWS_OF_TASK = 96, /* rows of a task: they stay in the second cache for all panels */
#if defined(__AMX_BF16__)
    /* Tiles multiply faster than the third cache gives panels: each panel is read once for more rows, as many as fit. */
    MOST_ROWS_OF_TASK = 512,
    CACHE_OF_TASK = 1 << 20, /* of the 2 MB that the second cache has on all processors with AMX */
    TASKS_OF_THREAD = 8,     /* at least, so that none waits long for the others */
#else
    MOST_ROWS_OF_TASK = ROWS_OF_TASK,
    CACHE_OF_TASK = 0,
    TASKS_OF_THREAD = 1,
#endif
};

RZ_INLINE long rz_pieces_of(long rows)
{
    return (rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
}

/* Each group of rows by its expert's share of `linear`, of `experts` as many outputs each, with ACTIVATE or ADD: what is
 * added to a row comes in the order of the groups. Weights of other experts are not read. As `rz_multiply` else, but that
 * what is not rounded takes x as it is, without `from`. */
void rz_multiply_experts(rz_decoder *decoder, int thread, int part, rz_product job, long experts, rz_group *groups,
                         long count);

/* Products of each head's own inputs with its share of `linear`, bf16, `heads` heads of whole panels each, with ROUND: the
 * inputs of a head lie `step` behind those of the head before it, its outputs `out_step`. */
void rz_multiply_heads(rz_decoder *decoder, int thread, int part, rz_product job, long heads, long step, long out_step);

/* Bytes of one row of its inputs as products take it, rounded or widened; 0 where that is as it is. */
size_t rz_prepared_row(const rz_linear *linear);

#endif
