/* Activations, rounded to int8 for integer products: see quantized.h and spans.h. */
#include <math.h>

#include "quantized.h"
#include "quantized_layout.h"
#include "spans.h"

size_t rz_rounded_bytes(long columns)
{
    const size_t blocks = (size_t)(columns + BLOCK - 1) / BLOCK;
    return LINE_BYTES + blocks * (BLOCK + sizeof(float) + 2 * sizeof(int32_t) + 2 * sizeof(float));
}

rz_rounded rz_rounded_in(void *memory, const rz_format *format, long rows)
{
    const long blocks = blocks_of(format);
    rz_rounded to = { .rows = rows, .stride = blocks * BLOCK + LINE_BYTES, .codes = memory };
    to.scales = (float *)(to.codes + rows * to.stride);
    to.starts = (int32_t *)(to.scales + rows * blocks);
    to.sums = (float *)(to.starts + rows * blocks * 2);
    to.pairs = (int32_t *)to.sums;
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

/* By blocks. Returns a vector of zeros, or of NaN where a value is none or infinite. */
static f32 round_blocks(const rz_rounded *to, const rz_format *format, long row, const bf16 *x, long columns)
{
    const long blocks = blocks_of(format);
    const int offset = unpacked_offset(format), by_halves = format->group == BLOCK / 2;
    int8_t *codes = to->codes + row * to->stride;
    float *scales = to->scales + row, *sums = to->sums + row;
    int32_t *starts = to->starts + row;
    const long apart = to->rows;
    f32 flaws = f32_zero();
    for (long block = 0; block < blocks; block++, codes += BLOCK) {
        f32 left = half_of(x, format->permutation, block * BLOCK, columns);
        f32 right = half_of(x, format->permutation, block * BLOCK + LANES, columns);
        flaws = f32_add(flaws, f32_add(f32_sub(left, left), f32_sub(right, right)));
        const float most = f32_largest(f32_max(f32_abs(left), f32_abs(right)));
        const f32 inverse = f32_set1(most > 0 ? 127.0f / most : 0);
        const float scale = scales[block * apart] = most / 127.0f;
        left = round_half(codes, left, inverse);
        right = round_half(codes + LANES, right, inverse);
        if (by_halves) {
            const float first = f32_sum(left), second = f32_sum(right);
            starts[block * 2 * apart] = -offset * (int)first;
            starts[(block * 2 + 1) * apart] = -offset * (int)second;
            sums[block * 2 * apart] = scale * first;
            sums[(block * 2 + 1) * apart] = scale * second;
        } else {
            const float both = f32_sum(f32_add(left, right));
            starts[block * apart] = -offset * (int)both;
            sums[block * apart] = scale * both;
        }
    }
    return flaws;
}

/* -`offset` times the sums of `count` codes, as sums of 16 bits are kept: two, of the first and the last two of each quad. */
RZ_INLINE int32_t short_starts(const int8_t *codes, int count, int offset)
{
    int32_t first = 0, second = 0;
    for (int i = 0; i < count; i += 4) {
        first += codes[i] + codes[i + 1];
        second += codes[i + 2] + codes[i + 3];
    }
    return (int32_t)((uint32_t)(-offset * first & 0xffff) | (uint32_t)(-offset * second) << 16);
}

/* Sums of a span's codes, in groups, or of all of them; each `apart` from the next. `halves`: those of `count` times 16
 * columns; `offset`: what the weight's codes are too large by. */
RZ_INLINE void sum_span(const rz_format *format, int offset, int as_shorts, const int8_t *codes, const int32_t *halves,
                        int count, int32_t *starts, int32_t *pairs, long apart)
{
    const int groups = groups_of_span(format);
    int32_t sums[SPAN_GROUPS + 1] = { 0 };
    if (!has_whole_scales(format)) {
        for (int half = 0; half < count; half++)
            sums[0] += halves[half];
        pairs[0] = sums[0];
        starts[0] = -offset * sums[0];
        return;
    }
    for (int group = 0; group < groups; group++) {
        sums[group] = groups == count ? halves[group] : halves[group * 2] + halves[group * 2 + 1];
        starts[group * apart] =
            as_shorts ? short_starts(codes + group * format->group, format->group, offset) : -offset * sums[group];
    }
    for (int group = 0; group < groups; group += 2)
        pairs[group / 2 * apart] = (sums[group] & 0xffff) | (int32_t)((uint32_t)sums[group + 1] << 16);
}

/* By spans; returns as round_blocks. */
static f32 round_spans(const rz_rounded *to, const rz_format *format, long row, const bf16 *x, long columns)
{
    const long blocks = blocks_of(format), all = blocks * BLOCK, most = span_of(format);
    const int groups = groups_of_span(format), pairs = (groups + 1) / 2;
    const int offset = unpacked_offset(format), as_shorts = starts_are_shorts(format);
    int8_t *codes = to->codes + row * to->stride;
    const long apart = to->rows;
    float *scales = to->scales + row;
    int32_t *starts = to->starts + row, *sums = to->pairs + row;
    f32 flaws = f32_zero();
    for (long first = 0; first < all; first += most, scales += apart, starts += groups * apart, sums += pairs * apart) {
        const int count = (int)((all - first < most ? all - first : most) / LANES);
        f32 values[LONGEST_SPAN / LANES], largest = f32_zero();
        int32_t halves[LONGEST_SPAN / LANES];
        for (int i = 0; i < count; i++) {
            values[i] = half_of(x, format->permutation, first + i * LANES, columns);
            flaws = f32_add(flaws, f32_sub(values[i], values[i]));
            largest = f32_max(largest, f32_abs(values[i]));
        }
        const float peak = f32_largest(largest);
        const f32 inverse = f32_set1(peak > 0 ? 127.0f / peak : 0);
        *scales = peak / 127.0f;
        for (int i = 0; i < count; i++)
            halves[i] = (int32_t)f32_sum(round_half(codes + first + i * LANES, values[i], inverse));
        sum_span(format, offset, as_shorts, codes + first, halves, count, starts, sums, apart);
    }
    return flaws;
}

void rz_round_row(const rz_rounded *to, const rz_format *format, long row, const bf16 *x, long inputs)
{
    const long blocks = blocks_of(format), columns = format->permutation ? format->columns : inputs;
    const f32 flaws = (span_of(format) ? round_spans : round_blocks)(to, format, row, x, columns);
    if (f32_sum(flaws) != 0) /* infinity or NaN, which int8 would hide */
        for (long block = 0; block < blocks; block++)
            to->scales[block * to->rows + row] = NAN;
}
