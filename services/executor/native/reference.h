/* What the proof of a level (proof.c) is held against: plain C, compiled for any processor of the architecture. */
#ifndef RZ_REFERENCE_H
#define RZ_REFERENCE_H

#include <stdint.h>

/* sums[rows][outputs]: x [rows][inputs] times w [outputs][inputs]. */
void rz_reference_products(int rows, int outputs, int inputs, const int32_t *x, const int32_t *w, int32_t *sums);

/* out[dim]: attention of one query to keys [first, last), `dim` values each, with their values, both in units. */
void rz_reference_attention(int dim, int first, int last, const int32_t *query, const int32_t *keys,
                            const int32_t *values, double score_unit, double value_unit, double *out);

#endif
