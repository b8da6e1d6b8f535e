/* Blocks in a mapped file: the system is asked for what attention is going to read, so that the disk works meanwhile.
 *
 *     layer   0                          1                          2 ...
 *     asks    for its own, and 1's       for 2's                    for 3's          a layer ahead
 *             chooses: for what is new   chooses: for what is new   ...              at once, before it attends
 *
 * What a layer will read is known where all is read, and foretold where blocks are chosen: what the same layer chose
 * one step before, which changes slowly. All of it is advice. What is not there when it is read comes with a page
 * fault, so nothing here decides anything but the time.
 */
#ifndef RZ_FETCH_H
#define RZ_FETCH_H

#include "state.h"

/* Asks for what the layer behind `layer` will read and write; before the first layer, for what that one will, too.
 * Called by all threads alike. */
void rz_fetch_ahead(rz_decoder *decoder, int thread, const rz_layer *layer);

/* Asks for those of the `count` blocks in `table`, which a row reads of a KV head, that were not asked for ahead. */
void rz_fetch_chosen(const rz_decoder *decoder, const rz_layer *layer, const int32_t *table, long count, int head);

#endif
