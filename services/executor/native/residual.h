/* The residual stream: what a step begins with, what is added to it, and the norms that read it. */
#ifndef RZ_RESIDUAL_H
#define RZ_RESIDUAL_H

#include "state.h"

/* What becomes of the residual before it is read. */
typedef struct {
    const float *after; /* norm of what is added; or NULL */
    int adds;           /* delta is added */
    float scale;        /* what the sum is multiplied with */
} rz_pending;

static const rz_pending RZ_NOTHING_LEFT = { NULL, 0, 1.0f };

/* All of these are called by all threads alike. */

/* Embeds the step's tokens, turns their positions into angles and makes the layers' inputs. 0 when the ring is lost. */
int rz_embed_rows(rz_decoder *decoder, int thread);

/* The normed rows, behind what is left to do; `weight` NULL: the rows as they are. */
void rz_norm_rows(rz_decoder *decoder, int thread, const float *weight, rz_pending left);

/* Rows, of which a step has one for each token. */
typedef struct {
    void *first;
    size_t bytes; /* of one; 0: there are none */
} rz_step_rows;

/* Goes on with the step's tail: its rows are moved to where those of a step are, the residual behind what is left to do,
 * and `also` [2]. */
void rz_keep_rows(rz_decoder *decoder, int thread, rz_pending left, const rz_step_rows *also);

/* Hands over what `layer` reads of all rows, where a tap is there, normed by `weight` or as it is (NULL). Returns what
 * is left to do. */
rz_pending rz_tap_rows(rz_decoder *decoder, int thread, int layer, const float *weight, rz_pending left);

/* The rows that are sampled, behind the last norm; the sums of pools, and what is tapped there. */
void rz_norm_sampled(rz_decoder *decoder, int thread, rz_pending left);

#endif
