/* Attention over the rows of a step: planned once per step, run once per layer. */
#ifndef RZ_ATTENTION_STAGES_H
#define RZ_ATTENTION_STAGES_H

#include "state.h"

/* Lists the parts of the attention of `decoder->step`. 0 when there is no memory. */
int rz_plan_attention(rz_decoder *decoder);

/* Places the step's keys and values and attends, for one layer. 0 when the ring is lost. Called by all threads alike. */
int rz_attend_rows(rz_decoder *decoder, int thread, const rz_layer *layer);

rz_cache rz_cache_of(const rz_layer *layer);

#endif
