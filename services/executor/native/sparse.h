/* Sparse attention: summaries of full blocks, and the blocks that a row reads (core/sparse_attention.py).
 *
 *     summary of a block    mean and deviation of its keys, as they are kept, of each KV head
 *     score for a row       the highest, over the query heads of a KV head, of q . mean + |q| . deviation
 *     what a row reads      its KV head's table: sinks, the best blocks between, recent ones, its own
 *
 * A table of a row and KV head is one as attention.h reads it, only shorter: what is not read is left out, so that all
 * that is said of parts and rounds there holds. Scores are float32, summed in one order whatever else is computed; of
 * blocks that tie the earlier are chosen.
 */
#ifndef RZ_SPARSE_H
#define RZ_SPARSE_H

#include "state.h"

enum { RZ_CHOICE_FIELDS = 7 /* of a sequence: kind, threshold, sinks, recent, budget, share, dense layers */ };
enum { RZ_DENSE, RZ_PAGES, RZ_WINDOW }; /* kinds */

/* How many times the deviation of its keys a block's score is above that of their mean (DEVIATIONS there). */
#define RZ_DEVIATIONS 1.0f

/* Whether a row at `position` whose sequence has this choice does not read all that is before it; then what it reads
 * goes to `row`. */
int rz_reads_some(const int32_t *choice, int block_size, int position, rz_choice *row);

/* Whether `count` choices are what admission lets through. */
int rz_choices_are_sound(const int32_t *choices, long count);

/* Writes the summaries of the blocks that the step has filled, for one layer. Called by all threads alike, as is: */
void rz_summarise(rz_decoder *decoder, int thread, const rz_layer *layer);

/* Fills the tables of the plan's choices, for one layer. */
void rz_choose_blocks(rz_decoder *decoder, int thread, const rz_layer *layer, const rz_attention_plan *plan);

#endif
