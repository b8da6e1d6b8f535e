/* The largest logit of a row, for greedy sampling. */
#ifndef RZ_LARGEST_H
#define RZ_LARGEST_H

#include "vector.h"

/* Index of the largest of `count` values, the smallest index where several tie; a NaN is larger than all. */
long rz_largest(const float *values, long count);

#endif
