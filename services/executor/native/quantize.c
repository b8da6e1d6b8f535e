/* Quantizes weights: finds scales and codes. See rz_quantize in quantized.h.
 *
 * A lane is a group: the inputs of up to 16 groups of a row lie side by side, so all sums are of one lane, in one order
 * at every level of instructions. */
#include <float.h>
#include <string.h>

#include "codec.h"
#include "quantized_layout.h"

enum { TRIALS_OF_SIGNED = 9, TRIALS_OF_MINIMUMS = 11, TRIALS_OF_ZEROS = 9 };

static const float TINY = 1e-30f;

typedef struct {
    int size, lanes, most; /* inputs of a group; groups that are here; the largest code */
    f32 x[WIDEST_GROUP], weight[WIDEST_GROUP];
    f32 scale, least; /* of each group; least: a minimum or a zero point */
} batch;

RZ_INLINE f32 nearest(f32 x, f32 least, f32 most)
{
    return f32_min(f32_max(f32_round(x), least), most);
}

/* 1 / scale; 0 where it is 0. */
RZ_INLINE f32 inverse(f32 scale)
{
    return f32_select(f32_equal(scale, f32_zero()), f32_zero(), f32_div(f32_set1(1), scale));
}

RZ_INLINE f32 negative(f32 x)
{
    return f32_sub(f32_zero(), x);
}

RZ_INLINE f32 as_half(f32 x)
{
    uint16_t halves[LANES];
    f32_store_f16(halves, x);
    return f32_load_f16(halves);
}

/* 16 values from place `at` of a row. */
RZ_INLINE f32 load_values(const void *row, int type, long at)
{
    if (type == RZ_BF16)
        return f32_load_bf16((const bf16 *)row + at);
    return type == RZ_F16 ? f32_load_f16((const uint16_t *)row + at) : f32_load((const float *)row + at);
}

static void load_batch(batch *b, const void *row, int type, long group)
{
    float *to = (float *)b->x;
    memset(to, 0, (size_t)b->size * sizeof(f32));
    for (int lane = 0; lane < b->lanes; lane++)
        for (int i = 0; i < b->size; i += LANES) {
            float values[LANES];
            f32_store(values, load_values(row, type, (group + lane) * b->size + i));
            for (int j = 0; j < LANES; j++)
                to[(i + j) * LANES + lane] = values[j];
        }
}

/* Errors count for more where values are large. */
static void weigh(batch *b)
{
    f32 squares = f32_zero();
    for (int i = 0; i < b->size; i++)
        squares = f32_fma(b->x[i], b->x[i], squares);
    float mean[LANES];
    f32_store(mean, f32_div(squares, f32_set1((float)b->size)));
    for (int lane = 0; lane < LANES; lane++)
        mean[lane] = __builtin_sqrtf(mean[lane]);
    const f32 root = f32_load(mean);
    for (int i = 0; i < b->size; i++)
        b->weight[i] = f32_add(root, f32_abs(b->x[i]));
}

static void span(const batch *b, f32 *low, f32 *high)
{
    *low = *high = f32_zero();
    for (int i = 0; i < b->size; i++) {
        *low = f32_min(*low, b->x[i]);
        *high = f32_max(*high, b->x[i]);
    }
}

/* The largest value is the largest code, 127. */
static void find_symmetric(batch *b)
{
    f32 most = f32_zero();
    for (int i = 0; i < b->size; i++)
        most = f32_max(most, f32_abs(b->x[i]));
    b->scale = as_half(f32_div(most, f32_set1(127)));
}

/* The scale, with its sign, whose codes in [-half, half) are nearest, a value's square being its weight. */
static void find_signed(batch *b, int half)
{
    f32 largest = f32_zero(), best = f32_set1(-1);
    for (int i = 0; i < b->size; i++)
        largest = f32_select(f32_above(f32_abs(b->x[i]), f32_abs(largest)), b->x[i], largest);
    const f32 low = f32_set1((float)-half), high = f32_set1((float)half - 1), unit = negative(inverse(largest));
    b->scale = f32_zero();
    for (int trial = 0; trial < TRIALS_OF_SIGNED; trial++) {
        const f32 by = f32_mul(unit, f32_set1((float)half + 0.2f * (float)(trial - TRIALS_OF_SIGNED / 2)));
        f32 cx = f32_zero(), cc = f32_zero();
        for (int i = 0; i < b->size; i++) {
            const f32 x = b->x[i], code = nearest(f32_mul(x, by), low, high), product = f32_mul(code, x);
            cx = f32_fma(product, f32_mul(x, x), cx);
            cc = f32_fma(product, product, cc);
        }
        const f32 fitted = f32_div(cx, f32_max(cc, f32_set1(TINY))), gain = f32_mul(fitted, cx);
        const lanes better = f32_above(gain, best);
        best = f32_select(better, gain, best);
        b->scale = f32_select(better, fitted, b->scale);
    }
}

/* The scale and minimum, none negative, whose codes are nearest: of several scales the codes, each with the scale and
 * minimum that fit them best (weighted least squares). */
static void find_minimums(batch *b)
{
    f32 low, high, total = f32_zero(), sum_x = f32_zero(), best = f32_set1(3e38f);
    weigh(b);
    span(b, &low, &high);
    for (int i = 0; i < b->size; i++) {
        total = f32_add(total, b->weight[i]);
        sum_x = f32_fma(b->weight[i], b->x[i], sum_x);
    }
    const f32 zero = f32_zero(), tiny = f32_set1(TINY), most = f32_set1((float)b->most);
    const f32 unit = inverse(f32_sub(high, low));
    b->scale = f32_div(f32_sub(high, low), most);
    b->least = negative(low);
    for (int trial = 0; trial <= TRIALS_OF_MINIMUMS; trial++) {
        /* The first is the whole span as it is. */
        const float more = trial ? 0.2f * (float)(trial - 1 - TRIALS_OF_MINIMUMS / 2) : 0;
        const f32 by = f32_mul(unit, f32_set1((float)b->most + more));
        f32 c = zero, cc = zero, cx = zero, error = zero;
        for (int i = 0; i < b->size; i++) {
            const f32 code = nearest(f32_mul(f32_sub(b->x[i], low), by), zero, most), weighted = f32_mul(b->weight[i], code);
            c = f32_add(c, weighted);
            cc = f32_fma(weighted, code, cc);
            cx = f32_fma(weighted, b->x[i], cx);
        }
        f32 fitted = b->scale, least = b->least, spread = f32_set1(1);
        if (trial) {
            spread = f32_sub(f32_mul(total, cc), f32_mul(c, c));
            const f32 over = f32_div(f32_set1(1), f32_max(spread, tiny));
            fitted = f32_mul(f32_sub(f32_mul(total, cx), f32_mul(c, sum_x)), over);
            least = f32_mul(f32_sub(f32_mul(c, cx), f32_mul(cc, sum_x)), over);
            fitted = f32_select(f32_above(zero, least), f32_div(cx, f32_max(cc, tiny)), fitted);
            least = f32_max(least, zero);
        }
        for (int i = 0; i < b->size; i++) {
            const f32 code = nearest(f32_mul(f32_sub(b->x[i], low), by), zero, most);
            const f32 off = f32_sub(f32_sub(f32_mul(code, fitted), least), b->x[i]);
            error = f32_fma(f32_mul(b->weight[i], off), off, error);
        }
        const lanes sound = lanes_and(f32_above(spread, tiny), f32_above(fitted, zero));
        const lanes better = lanes_and(sound, f32_above(best, error));
        best = f32_select(better, error, best);
        b->scale = f32_select(better, fitted, b->scale);
        b->least = f32_select(better, least, b->least);
    }
}

/* The scale, held by a float16, and the code that stands for 0. */
static void find_zeros(batch *b)
{
    f32 low, high, best = f32_set1(3e38f);
    weigh(b);
    span(b, &low, &high);
    const f32 most = f32_set1((float)b->most), none = f32_zero();
    b->scale = b->least = none;
    for (int trial = 0; trial < TRIALS_OF_ZEROS; trial++) {
        const f32 shrink = f32_set1(1 - 0.03f * (float)trial);
        const f32 scale = as_half(f32_mul(f32_sub(high, low), f32_div(shrink, most))), by = inverse(scale);
        const f32 zero = nearest(f32_mul(f32_mul(negative(low), shrink), by), none, most);
        f32 error = none;
        for (int i = 0; i < b->size; i++) {
            const f32 code = nearest(f32_add(f32_round(f32_mul(b->x[i], by)), zero), none, most);
            const f32 off = f32_sub(f32_mul(f32_sub(code, zero), scale), b->x[i]);
            error = f32_fma(f32_mul(b->weight[i], off), off, error);
        }
        const lanes better = f32_above(best, error);
        best = f32_select(better, error, best);
        b->scale = f32_select(better, scale, b->scale);
        b->least = f32_select(better, zero, b->least);
    }
}

/* Rounds `scale` to whole numbers from `low` to `high` in units that `per` groups share, which a float16 holds: both are
 * stored, and `scale` is what they stand for. Signed scales: the largest is `low`. */
static void share_units(f32 *scale, int lanes, int per, float low, float high, void *small, uint16_t *units)
{
    float values[LANES], by[LANES], unit[LANES] = { 0 };
    f32_store(values, *scale);
    for (int first = 0; first < lanes; first += per) {
        float largest = 0;
        for (int lane = first; lane < first + per; lane++)
            if (__builtin_fabsf(values[lane]) > __builtin_fabsf(largest))
                largest = values[lane];
        unit[first / per] = largest / (low < 0 ? low : high);
    }
    uint16_t halves[LANES];
    f32_store_f16(halves, f32_load(unit));
    memcpy(units, halves, (size_t)(lanes / per) * sizeof *halves);
    f32_store(unit, f32_load_f16(halves));
    for (int lane = 0; lane < LANES; lane++)
        by[lane] = lane < lanes ? unit[lane / per] : 0;
    const f32 shared = f32_load(by), whole = nearest(f32_mul(*scale, inverse(shared)), f32_set1(low), f32_set1(high));
    int8_t numbers[LANES];
    f32_store_i8(numbers, whole);
    memcpy(small, numbers, (size_t)lanes);
    *scale = f32_mul(whole, shared);
}

/* Writes the codes x / scale + `zero`, from `low` on, and what stands before them in bytes: `offset` more. */
static void store_codes(const batch *b, f32 zero, float low, float high, int offset, uint8_t *to)
{
    const f32 by = inverse(b->scale);
    for (int i = 0; i < b->size; i++) {
        const f32 code = f32_add(f32_round(f32_mul(b->x[i], by)), zero);
        int8_t codes[LANES];
        /* Of eight bits only with their sign. */
        f32_store_i8(codes, f32_add(nearest(code, f32_set1(low), f32_set1(high)), f32_set1((float)(offset - 128))));
        for (int lane = 0; lane < b->lanes; lane++)
            to[lane * b->size + i] = (uint8_t)codes[lane] ^ 128;
    }
}

static void store_halves(uint16_t *to, f32 from, int lanes)
{
    uint16_t halves[LANES];
    f32_store_f16(halves, from);
    memcpy(to, halves, (size_t)lanes * sizeof *halves);
}

static void quantize_batch(batch *b, const rz_codes *to, int kind, int bits, int per, long row, long group)
{
    uint8_t *codes = (uint8_t *)to->codes + row * to->code_stride + group * b->size;
    const long scale = row * to->scale_stride + group, least = row * to->minimum_stride + group;
    uint16_t *supers = (uint16_t *)to->supers + row * to->super_stride + (per ? group / per : 0);
    const int half = 1 << (bits - 1);
    b->most = 2 * half - 1;
    if (kind == RZ_SYMMETRIC) {
        find_symmetric(b);
        store_halves((uint16_t *)to->scales + scale, b->scale, b->lanes);
        store_codes(b, f32_zero(), -127, 127, 128, codes);
    } else if (kind == RZ_SIGNED) {
        find_signed(b, half);
        const float least_scale = bits == 3 ? -32 : -128;
        share_units(&b->scale, b->lanes, per, least_scale, -1 - least_scale, (int8_t *)to->scales + scale, supers);
        store_codes(b, f32_zero(), (float)-half, (float)half - 1, half, codes);
    } else if (kind == RZ_WITH_MINIMUMS) {
        uint16_t *super_mins = (uint16_t *)to->super_minimums + row * to->super_minimum_stride + group / per;
        const float most_units = bits == 2 ? 15 : 63;
        find_minimums(b);
        share_units(&b->scale, b->lanes, per, 0, most_units, (uint8_t *)to->scales + scale, supers);
        share_units(&b->least, b->lanes, per, 0, most_units, (uint8_t *)to->minimums + least, super_mins);
        for (int i = 0; i < b->size; i++)
            b->x[i] = f32_add(b->x[i], b->least);
        store_codes(b, f32_zero(), 0, (float)b->most, 0, codes);
    } else {
        int8_t zeros[LANES];
        find_zeros(b);
        store_halves((uint16_t *)to->scales + scale, b->scale, b->lanes);
        f32_store_i8(zeros, b->least);
        memcpy((uint8_t *)to->minimums + least, zeros, (size_t)b->lanes);
        store_codes(b, b->least, 0, (float)b->most, 0, codes);
    }
}

/* Eight bits, integers or e4m3, with one float32 scale. */
static void quantize_row(const rz_codes *to, int kind, const void *from, int type, long columns, long row)
{
    const size_t value = type_bytes(type);
    f32 most = f32_zero();
    uint8_t *codes = (uint8_t *)to->codes + row * to->code_stride;
    float scale = 0;
    for (int pass = 0; pass < 2; pass++) {
        for (long i = 0; i < columns; i += LANES) {
            const long count = columns - i < LANES ? columns - i : LANES;
            float last[LANES] = { 0 };
            memcpy(last, (const char *)from + (size_t)i * value, (size_t)count * value);
            const f32 x = load_values(last, type, 0);
            uint8_t rounded[LANES];
            most = f32_max(most, f32_abs(x));
            if (pass && kind == RZ_OF_E4M3) {
                store_e4m3(rounded, f32_div(x, f32_set1(scale)));
            } else if (pass) {
                const f32 code = nearest(f32_mul(x, inverse(f32_set1(scale))), f32_set1(-127), f32_set1(127));
                f32_store_i8((int8_t *)rounded, code);
            }
            for (long j = 0; pass && j < count; j++)
                codes[i + j] = kind == RZ_OF_E4M3 ? rounded[j] : rounded[j] ^ 128;
        }
        scale = f32_largest(most) / (kind == RZ_OF_E4M3 ? 448.0f : 127.0f);
        if (kind == RZ_OF_E4M3)
            scale = scale > FLT_MIN ? scale : FLT_MIN;
    }
    ((float *)to->scales)[row * to->scale_stride] = scale;
}

void rz_quantize(const rz_codes *to, int kind, int bits, long columns, long group, int per, const void *from, int type,
                 long stride, long first, long end)
{
    batch b = { .size = (int)group };
    const long groups = columns / group, together = per ? LANES / per * per : LANES;
    for (long row = first; row < end; row++) {
        const char *values = (const char *)from + (size_t)(row * stride) * type_bytes(type);
        if (kind == RZ_OF_E4M3 || (group == columns && kind == RZ_SYMMETRIC)) {
            quantize_row(to, kind, values, type, columns, row);
            continue;
        }
        for (long at = 0; at < groups; at += together) {
            b.lanes = (int)(groups - at < together ? groups - at : together);
            load_batch(&b, values, type, at);
            quantize_batch(&b, to, kind, bits, per, row, at);
        }
    }
}
