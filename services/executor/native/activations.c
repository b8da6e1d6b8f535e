/* Activations, rounded to int8 for integer products: see quantized.h. */
#include <math.h>

#include "quantized.h"
#include "quantized_layout.h"

size_t rz_rounded_bytes(long columns)
{
    const size_t blocks = (size_t)(columns + BLOCK - 1) / BLOCK;
    return blocks * (BLOCK + sizeof(float) + 2 * sizeof(int32_t) + 2 * sizeof(float));
}

rz_rounded rz_rounded_in(void *memory, const rz_format *format, long rows)
{
    const long blocks = blocks_of(format);
    rz_rounded to = { .columns = blocks * BLOCK, .codes = memory };
    to.scales = (float *)(to.codes + rows * to.columns);
    to.starts = (int32_t *)(to.scales + rows * blocks);
    to.sums = (float *)(to.starts + rows * blocks * 2);
    return to;
}

/* int8 of a half block; returns them. */
RZ_INLINE f32 round_half(int8_t *to, f32 values, f32 inverse)
{
    f32 rounded = f32_round(f32_mul(values, inverse));
    f32_store_i8(to, rounded);
    return rounded;
}

RZ_INLINE f32 half_of(const bf16 *x, const int32_t *order, long column, long columns)
{
    if (!order && column + LANES <= columns)
        return f32_load_bf16(x + column);
    bf16 found[LANES];
    for (long i = 0; i < LANES; i++) {
        long input = column + i >= columns ? -1 : order ? order[column + i] : column + i;
        found[i] = input < 0 ? 0 : x[input];
    }
    return f32_load_bf16(found);
}

void rz_round_row(const rz_rounded *to, const rz_format *format, long row, const bf16 *x, long inputs)
{
    const long blocks = blocks_of(format), columns = format->permutation ? format->columns : inputs;
    const int offset = unpacked_offset(format), by_halves = format->group == BLOCK / 2;
    const long together = blocks_together(format), shift = __builtin_ctzl((unsigned long)together);
    int8_t *codes = to->codes + row * to->columns;
    float *scales = to->scales + row * blocks, *sums = to->sums + row * blocks * 2, sum = 0;
    int32_t *starts = to->starts + row * blocks * 2;
    f32 flaws = f32_zero();
    for (long block = 0; block < blocks; block++, codes += BLOCK) {
        f32 left = half_of(x, format->permutation, block * BLOCK, columns);
        f32 right = half_of(x, format->permutation, block * BLOCK + LANES, columns);
        flaws = f32_add(flaws, f32_add(f32_sub(left, left), f32_sub(right, right)));
        const float most = f32_largest(f32_max(f32_abs(left), f32_abs(right)));
        const f32 inverse = f32_set1(most > 0 ? 127.0f / most : 0);
        const float scale = scales[block] = most / 127.0f;
        left = round_half(codes, left, inverse);
        right = round_half(codes + LANES, right, inverse);
        if (by_halves) {
            const float first = f32_sum(left), second = f32_sum(right);
            starts[block * 2] = -offset * (int)first;
            starts[block * 2 + 1] = -offset * (int)second;
            sums[block * 2] = scale * first;
            sums[block * 2 + 1] = scale * second;
        } else {
            const float both = f32_sum(f32_add(left, right));
            starts[block] = -offset * (int)both;
            sum = (block & (together - 1) ? sum : 0) + scale * both;
            sums[block >> shift] = sum;
        }
    }
    if (f32_sum(flaws) != 0) /* infinity or NaN, which int8 would hide */
        for (long block = 0; block < blocks; block++)
            scales[block] = NAN;
}
