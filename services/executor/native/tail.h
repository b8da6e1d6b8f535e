/* The tail of a step: its sampled rows, alone from where nobody reads the others. That is in the last layer that stores keys
 * and values, once it has stored them; layers behind it store nothing, since they read what others have stored. Of a
 * prompt the tail has its last row, or none. */
#ifndef RZ_TAIL_H
#define RZ_TAIL_H

#include "state.h"

/* The first layer of the model's end that stores nothing. */
int rz_first_of_tail(const rz_model *model);

/* Whether `layer` goes on with the tail alone once it has stored its keys and values. */
int rz_leaves_rows(const rz_decoder *decoder, const rz_layer *layer);

/* Makes the tail of `step`, where it is worth it. 0 when there is no memory. */
int rz_make_tail(rz_decoder *decoder, const rz_step *step);

void rz_free_tail(rz_tail *tail);

#endif
