/* Layers that keep a state per sequence in place of keys and values: its size does not grow with the text.
 *
 *     projected ─ convolution over the last tokens, per channel ─ scan over the tokens, per head ─ norm and gate
 *
 * A row of the projection, and what the scan does with a head's state S, float32, at each token in turn:
 *
 *     RZ_DELTA   q k v │ gate │ beta │ decay      S [key dim, value dim] = d S + k (v - d S'k) beta; out = S'q
 *     RZ_SCAN    x B C │ gate │ step              S [value dim, key dim] = d S + step x B; out = S C + skip x
 *     RZ_SHORT   B │ C │ x                        convolution of B x, times C; no scan
 *
 * Tokens follow each other in the order of positions, whatever else is computed and however a step is cut, and every
 * sum is in one order: a row's bits depend on its sequence alone. Threads share heads, and columns or rows of a head's
 * state that do not meet in a sum. Of a chunk, some of a head's state stays in the first cache for all its tokens.
 *
 * Sources: Yang et al., "Gated Delta Networks", https://arxiv.org/abs/2412.06464; Dao and Gu, "Transformers are SSMs",
 * https://arxiv.org/abs/2405.21060.
 */
#ifndef RZ_RECURRENT_H
#define RZ_RECURRENT_H

#include "state.h"

/* Lists the rows of `decoder->step` by sequence. 0 when there is no memory. */
int rz_plan_recurrent(rz_decoder *decoder);

/* From `projected` [tokens, width] to `out` [tokens, rz_recurrent_inner], and the states of the step's sequences.
 * 0 when the ring is lost. Called by all threads alike. */
int rz_recur_rows(rz_decoder *decoder, int thread, const rz_recurrent *layer, const float *projected, long width,
                  bf16 *out);

/* Values of a row behind the convolution, behind the gate, and of the projection. */
long rz_recurrent_channels(const rz_recurrent *layer);
long rz_recurrent_inner(const rz_recurrent *layer);
long rz_recurrent_projected(const rz_recurrent *layer);

#endif
