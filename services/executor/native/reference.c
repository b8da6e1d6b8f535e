/* See reference.h. */
#include "reference.h"

#include <math.h>

void rz_reference_products(int rows, int outputs, int inputs, const int32_t *x, const int32_t *w, int32_t *sums)
{
    for (int row = 0; row < rows; row++)
        for (int output = 0; output < outputs; output++) {
            int32_t sum = 0;
            for (int i = 0; i < inputs; i++)
                sum += x[row * inputs + i] * w[output * inputs + i];
            sums[row * outputs + output] = sum;
        }
}

void rz_reference_attention(int dim, int first, int last, const int32_t *query, const int32_t *keys,
                            const int32_t *values, double score_unit, double value_unit, double *out)
{
    double total = 0;
    for (int i = 0; i < dim; i++)
        out[i] = 0;
    for (int key = first; key < last; key++) {
        int32_t score;
        rz_reference_products(1, 1, dim, query, keys + key * dim, &score);
        const double weight = exp(score * score_unit);
        total += weight;
        for (int i = 0; i < dim; i++)
            out[i] += weight * values[key * dim + i] * value_unit;
    }
    for (int i = 0; i < dim; i++)
        out[i] /= total;
}
