/* Layers at a model's end that read what others store, and store nothing: nobody reads of them what is not sampled. Of a
 * prompt they compute its last row alone, or none. */
#ifndef RZ_TAIL_H
#define RZ_TAIL_H

#include "state.h"

/* The first of those layers. */
int rz_first_of_tail(const rz_model *model);

/* Makes the tail of `step`, where it is worth it. 0 when there is no memory. */
int rz_make_tail(rz_decoder *decoder, const rz_step *step);

void rz_free_tail(rz_tail *tail);

#endif
