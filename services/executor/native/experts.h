/* Mixtures of experts: which rows go where, and their products. */
#ifndef RZ_EXPERTS_H
#define RZ_EXPERTS_H

#include "products.h"

/* Bytes that the activations of a layer's experts take for a token as products take them. */
size_t rz_experts_prepared(const rz_experts *experts);

/* Chooses the experts of the normed rows. This and what follows: called by all threads alike. */
void rz_choose_experts(rz_decoder *decoder, int thread, const rz_experts *experts);

/* Adds to `out` [tokens, hidden], float32, what the experts that were chosen make of the normed rows, times `scale`. */
void rz_run_experts(rz_decoder *decoder, int thread, const rz_experts *experts, float *out, float scale);

/* The weight of the shared expert for each row, or NULL where it is 1. */
const float *rz_weigh_shared(rz_decoder *decoder, int thread, const rz_experts *experts);

#endif
