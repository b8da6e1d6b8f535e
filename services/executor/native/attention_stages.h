/* Attention over the rows of a step: planned once per step, run once per layer. */
#ifndef RZ_ATTENTION_STAGES_H
#define RZ_ATTENTION_STAGES_H

#include "state.h"

/* Room for the parts of the attention of `step`, in `plans` [RZ_HEADS]. 0 when there is no memory. */
int rz_reserve_attention(rz_decoder *decoder, const rz_step *step, rz_attention_plan *plans);

/* Lists them; they point to what must not be reserved again. */
void rz_plan_attention(rz_decoder *decoder, const rz_step *step, rz_attention_plan *plans);

/* Places the step's keys and values and attends, for one layer. 0 when the ring is lost. Called by all threads alike. */
int rz_attend_rows(rz_decoder *decoder, int thread, const rz_layer *layer);

/* Turns `x`, a query or key of the step's row `token`, by the frequencies `set`. */
void rz_rotate(const rz_decoder *decoder, int set, long token, float *restrict x);

rz_cache rz_cache_of(const rz_layer *layer);

#endif
