/* Vectors of 16 lanes in four registers of NEON, with dot products of bytes; with those of bf16 and of mixed signs where
 * it is compiled for them. See vector.h; what each function does is said in vector_avx512.h. */
#ifndef RZ_VECTOR_NEON_H
#define RZ_VECTOR_NEON_H

#include <arm_neon.h>

typedef struct { float32x4_t part[4]; } f32;
typedef struct { int32x4_t part[4]; } i32;
typedef struct { uint8x16_t part[4]; } bytes;
typedef struct { uint32x4_t part[4]; } lanes; /* all bits of a lane, or none */

#define VECTORS 8

/* `type` whose part i is `expression`. */
#define PARTS(type, expression) \
    type made; \
    _Pragma("GCC unroll 4") \
    for (int i = 0; i < 4; i++) \
        made.part[i] = expression; \
    return made

/* --- lanes --- */

RZ_INLINE lanes lanes_first(long count)
{
    static const int32_t numbers[LANES] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    const int32x4_t end = vdupq_n_s32(count >= LANES ? LANES : (int)count);
    PARTS(lanes, vcgtq_s32(end, vld1q_s32(numbers + 4 * i)));
}

RZ_INLINE lanes lanes_and(lanes a, lanes b) { PARTS(lanes, vandq_u32(a.part[i], b.part[i])); }
RZ_INLINE lanes lanes_or(lanes a, lanes b) { PARTS(lanes, vorrq_u32(a.part[i], b.part[i])); }

/* --- float32 --- */

RZ_INLINE f32 f32_set1(float value) { PARTS(f32, vdupq_n_f32(value)); }
RZ_INLINE f32 f32_zero(void) { return f32_set1(0.0f); }
RZ_INLINE f32 f32_load(const float *from) { PARTS(f32, vld1q_f32(from + 4 * i)); }

RZ_INLINE void f32_store(float *to, f32 a)
{
    for (int i = 0; i < 4; i++)
        vst1q_f32(to + 4 * i, a.part[i]);
}

RZ_INLINE f32 f32_load_some(lanes some, const float *from)
{
    float values[LANES];
    uint32_t there[LANES];
    for (int i = 0; i < 4; i++)
        vst1q_u32(there + 4 * i, some.part[i]);
    for (int i = 0; i < LANES; i++)
        values[i] = there[i] ? from[i] : 0.0f;
    return f32_load(values);
}

RZ_INLINE void f32_store_some(lanes some, float *to, f32 a)
{
    float values[LANES];
    uint32_t there[LANES];
    f32_store(values, a);
    for (int i = 0; i < 4; i++)
        vst1q_u32(there + 4 * i, some.part[i]);
    for (int i = 0; i < LANES; i++)
        if (there[i])
            to[i] = values[i];
}

RZ_INLINE f32 f32_add(f32 a, f32 b) { PARTS(f32, vaddq_f32(a.part[i], b.part[i])); }
RZ_INLINE f32 f32_sub(f32 a, f32 b) { PARTS(f32, vsubq_f32(a.part[i], b.part[i])); }
RZ_INLINE f32 f32_mul(f32 a, f32 b) { PARTS(f32, vmulq_f32(a.part[i], b.part[i])); }
RZ_INLINE f32 f32_div(f32 a, f32 b) { PARTS(f32, vdivq_f32(a.part[i], b.part[i])); }
RZ_INLINE f32 f32_rounded(f32 a)
{
    __asm__("" : "+w"(a.part[0]), "+w"(a.part[1]), "+w"(a.part[2]), "+w"(a.part[3]));
    return a;
}
RZ_INLINE f32 f32_fma(f32 a, f32 b, f32 c) { PARTS(f32, vfmaq_f32(c.part[i], a.part[i], b.part[i])); }
RZ_INLINE f32 f32_max(f32 a, f32 b) { PARTS(f32, vmaxnmq_f32(a.part[i], b.part[i])); }
RZ_INLINE f32 f32_min(f32 a, f32 b) { PARTS(f32, vminnmq_f32(a.part[i], b.part[i])); }
RZ_INLINE f32 f32_abs(f32 a) { PARTS(f32, vabsq_f32(a.part[i])); }
RZ_INLINE f32 f32_round(f32 a) { PARTS(f32, vrndnq_f32(a.part[i])); }

RZ_INLINE f32 f32_power_below(f32 a)
{
    const uint32x4_t exponent = vdupq_n_u32(0x7f800000);
    PARTS(f32, vreinterpretq_f32_u32(vandq_u32(vreinterpretq_u32_f32(a.part[i]), exponent)));
}

RZ_INLINE f32 f32_fraction(f32 a) { PARTS(f32, vsubq_f32(a.part[i], vrndmq_f32(a.part[i]))); }

/* In two factors, of which each is a normal number. */
RZ_INLINE float32x4_t times_power(float32x4_t a, float32x4_t power)
{
    const int32x4_t bias = vdupq_n_s32(127);
    const float32x4_t least = vdupq_n_f32(-126.0f);
    const uint32x4_t normal = vcgeq_f32(power, least);
    int32x4_t whole = vcvtmq_s32_f32(vminnmq_f32(vmaxnmq_f32(power, least), vdupq_n_f32(250.0f)));
    int32x4_t half = vshrq_n_s32(whole, 1), rest = vsubq_s32(whole, half);
    a = vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(half, bias), 23)));
    a = vmulq_f32(a, vreinterpretq_f32_s32(vshlq_n_s32(vaddq_s32(rest, bias), 23)));
    return vreinterpretq_f32_u32(vandq_u32(normal, vreinterpretq_u32_f32(a)));
}

RZ_INLINE f32 f32_times_power(f32 a, f32 power) { PARTS(f32, times_power(a.part[i], power.part[i])); }

RZ_INLINE float32x4_t times_nonpositive_power(float32x4_t a, float32x4_t power)
{
    const uint32x4_t normal = vcgeq_f32(power, vdupq_n_f32(-126.0f));
    const int32x4_t bits = vaddq_s32(vreinterpretq_s32_f32(a), vshlq_n_s32(vcvtmq_s32_f32(power), 23));
    return vreinterpretq_f32_u32(vandq_u32(normal, vreinterpretq_u32_s32(bits)));
}

/* The same of powers up to 0 and a in [1, 2]. */
RZ_INLINE f32 f32_times_nonpositive_power(f32 a, f32 power) { PARTS(f32, times_nonpositive_power(a.part[i], power.part[i])); }

/* In the order of AVX-512's. */
RZ_INLINE float f32_sum(f32 a)
{
    float32x4_t four = vaddq_f32(vaddq_f32(a.part[0], a.part[2]), vaddq_f32(a.part[1], a.part[3]));
    float32x2_t two = vadd_f32(vget_low_f32(four), vget_high_f32(four));
    return vget_lane_f32(two, 0) + vget_lane_f32(two, 1);
}

RZ_INLINE float f32_largest(f32 a)
{
    return vmaxnmvq_f32(vmaxnmq_f32(vmaxnmq_f32(a.part[0], a.part[1]), vmaxnmq_f32(a.part[2], a.part[3])));
}

RZ_INLINE lanes f32_equal(f32 a, f32 b) { PARTS(lanes, vceqq_f32(a.part[i], b.part[i])); }
RZ_INLINE lanes f32_above(f32 a, f32 b) { PARTS(lanes, vmvnq_u32(vcleq_f32(a.part[i], b.part[i]))); }
RZ_INLINE lanes f32_is_number(f32 a) { PARTS(lanes, vceqq_f32(a.part[i], a.part[i])); }

RZ_INLINE f32 f32_select(lanes some, f32 there, f32 elsewhere)
{
    PARTS(f32, vbslq_f32(some.part[i], there.part[i], elsewhere.part[i]));
}

RZ_INLINE f32 f32_load_bf16(const bf16 *from)
{
    PARTS(f32, vreinterpretq_f32_u32(vshll_n_u16(vld1_u16(from + 4 * i), 16)));
}

/* Its upper 16 bits, rounded to nearest even. */
RZ_INLINE uint16x4_t upper_rounded(float32x4_t a)
{
    uint32x4_t bits = vreinterpretq_u32_f32(a), odd = vandq_u32(vshrq_n_u32(bits, 16), vdupq_n_u32(1));
    uint32x4_t rounded = vaddq_u32(bits, vaddq_u32(odd, vdupq_n_u32(0x7fff)));
    rounded = vbslq_u32(vceqq_f32(a, a), rounded, vorrq_u32(bits, vdupq_n_u32(0x400000)));
    return vshrn_n_u32(rounded, 16);
}

/* Rounded to bf16. */
RZ_INLINE f32 f32_as_bf16(f32 a) { PARTS(f32, vreinterpretq_f32_u32(vshll_n_u16(upper_rounded(a.part[i]), 16))); }

RZ_INLINE void f32_store_bf16(bf16 *to, f32 a)
{
    for (int i = 0; i < 4; i++)
        vst1_u16(to + 4 * i, upper_rounded(a.part[i]));
}

RZ_INLINE void f32_store_some_bf16(lanes some, bf16 *to, f32 a)
{
    bf16 values[LANES];
    uint32_t there[LANES];
    f32_store_bf16(values, a);
    for (int i = 0; i < 4; i++)
        vst1q_u32(there + 4 * i, some.part[i]);
    for (int i = 0; i < LANES; i++)
        if (there[i])
            to[i] = values[i];
}

RZ_INLINE void f32_store_two_bf16(bf16 *to, f32 first, f32 second)
{
    f32_store_bf16(to, first);
    f32_store_bf16(to + LANES, second);
}

RZ_INLINE f32 f32_load_f16(const uint16_t *from)
{
    PARTS(f32, vcvt_f32_f16(vreinterpret_f16_u16(vld1_u16(from + 4 * i))));
}

RZ_INLINE void f32_store_f16(uint16_t *to, f32 a)
{
    for (int i = 0; i < 4; i++)
        vst1_u16(to + 4 * i, vreinterpret_u16_f16(vcvt_f16_f32(a.part[i])));
}

/* --- int32 --- */

RZ_INLINE i32 i32_set1(int32_t value) { PARTS(i32, vdupq_n_s32(value)); }
RZ_INLINE i32 i32_load(const int32_t *from) { PARTS(i32, vld1q_s32(from + 4 * i)); }

RZ_INLINE void i32_store(int32_t *to, i32 a)
{
    for (int i = 0; i < 4; i++)
        vst1q_s32(to + 4 * i, a.part[i]);
}

RZ_INLINE i32 i32_load_i8(const int8_t *from)
{
    int8x16_t codes = vld1q_s8(from);
    int16x8_t low = vmovl_s8(vget_low_s8(codes)), high = vmovl_high_s8(codes);
    return (i32){ { vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high) } };
}

RZ_INLINE i32 i32_load_u8(const uint8_t *from)
{
    uint8x16_t codes = vld1q_u8(from);
    int16x8_t low = vreinterpretq_s16_u16(vmovl_u8(vget_low_u8(codes)));
    int16x8_t high = vreinterpretq_s16_u16(vmovl_high_u8(codes));
    return (i32){ { vmovl_s16(vget_low_s16(low)), vmovl_high_s16(low), vmovl_s16(vget_low_s16(high)), vmovl_high_s16(high) } };
}

RZ_INLINE i32 i32_add(i32 a, i32 b) { PARTS(i32, vaddq_s32(a.part[i], b.part[i])); }
RZ_INLINE i32 i32_sub(i32 a, i32 b) { PARTS(i32, vsubq_s32(a.part[i], b.part[i])); }
RZ_INLINE i32 i32_mul(i32 a, i32 b) { PARTS(i32, vmulq_s32(a.part[i], b.part[i])); }
/* The lower 16 bits of each: of `low`, and above them of `high`. */
RZ_INLINE i32 i32_pair(i32 low, i32 high) { PARTS(i32, vsliq_n_s32(low.part[i], high.part[i], 16)); }
/* Two of 16 bits in each lane: of `low`, and above them of `high`. */
RZ_INLINE i32 i32_load_pairs_u8(const uint8_t *low, const uint8_t *high) { return i32_pair(i32_load_u8(low), i32_load_u8(high)); }
RZ_INLINE i32 i32_load_pairs_i8(const int8_t *low, const int8_t *high) { return i32_pair(i32_load_i8(low), i32_load_i8(high)); }
RZ_INLINE lanes i32_greater(i32 a, i32 b) { PARTS(lanes, vcgtq_s32(a.part[i], b.part[i])); }

RZ_INLINE i32 i32_select(lanes some, i32 there, i32 elsewhere)
{
    PARTS(i32, vbslq_s32(some.part[i], there.part[i], elsewhere.part[i]));
}

RZ_INLINE f32 f32_from_i32(i32 a) { PARTS(f32, vcvtq_f32_s32(a.part[i])); }
RZ_INLINE i32 i32_from_f32(f32 a) { PARTS(i32, vcvtnq_s32_f32(a.part[i])); }
RZ_INLINE i32 i32_join_sevens(i32 a, i32 b) { PARTS(i32, vaddq_s32(vshlq_n_s32(a.part[i], 7), b.part[i])); }
RZ_INLINE f32 f32_load_i8(const int8_t *from) { return f32_from_i32(i32_load_i8(from)); }

RZ_INLINE void f32_store_i8(int8_t *to, f32 a)
{
    for (int i = 0; i < 4; i++) {
        int32_t whole[4];
        vst1q_s32(whole, vcvtnq_s32_f32(a.part[i]));
        for (int lane = 0; lane < 4; lane++)
            to[4 * i + lane] = (int8_t)whole[lane];
    }
}

RZ_INLINE f32 f32_load_e4m3(const uint8_t *codes)
{
    uint16_t half[LANES];
    for (int i = 0; i < LANES; i++)
        half[i] = (uint16_t)((codes[i] & 0x7f) << 7 | (codes[i] & 0x80) << 8);
    return f32_load_f16(half);
}

RZ_INLINE void f32_load_two_e4m3(const uint8_t *codes, f32 *first, f32 *second)
{
    *first = f32_load_e4m3(codes);
    *second = f32_load_e4m3(codes + LANES);
}

/* --- bytes, and products of integers --- */

RZ_INLINE bytes bytes_load(const void *from) { PARTS(bytes, vld1q_u8((const uint8_t *)from + 16 * i)); }
RZ_INLINE bytes bytes_load_once(const void *from) { return bytes_load(from); }

RZ_INLINE void bytes_store(void *to, bytes a)
{
    for (int i = 0; i < 4; i++)
        vst1q_u8((uint8_t *)to + 16 * i, a.part[i]);
}

RZ_INLINE bytes bytes_set1(uint8_t value) { PARTS(bytes, vdupq_n_u8(value)); }
RZ_INLINE bytes bytes_and(bytes a, bytes b) { PARTS(bytes, vandq_u8(a.part[i], b.part[i])); }
RZ_INLINE bytes bytes_or(bytes a, bytes b) { PARTS(bytes, vorrq_u8(a.part[i], b.part[i])); }
RZ_INLINE bytes bytes_xor(bytes a, bytes b) { PARTS(bytes, veorq_u8(a.part[i], b.part[i])); }
RZ_INLINE bytes bytes_add(bytes a, bytes b) { PARTS(bytes, vaddq_u8(a.part[i], b.part[i])); }
RZ_INLINE bytes bytes_and_or(bytes a, bytes mask, bytes b) { return bytes_or(bytes_and(a, mask), b); }

RZ_INLINE bytes bytes_left(bytes a, int bits)
{
    PARTS(bytes, vreinterpretq_u8_u16(vshlq_u16(vreinterpretq_u16_u8(a.part[i]), vdupq_n_s16((int16_t)bits))));
}

RZ_INLINE bytes bytes_right(bytes a, int bits) { return bytes_left(a, -bits); }

RZ_INLINE bytes bytes_repeat4(const void *from)
{
    uint32_t four;
    memcpy(&four, from, sizeof four);
    PARTS(bytes, vreinterpretq_u8_u32(vdupq_n_u32(four)));
}

RZ_INLINE bytes bytes_repeat16(const void *from) { PARTS(bytes, vld1q_u8(from)); }
RZ_INLINE bytes bytes_look_up(bytes table, bytes index) { PARTS(bytes, vqtbl1q_u8(table.part[i], index.part[i])); }
RZ_INLINE bytes bytes_look_up_first(bytes table, bytes index) { return bytes_look_up(table, index); }

RZ_INLINE int has_whole_look_ups(void) { return 0; }

RZ_INLINE bytes bytes_zip_low(bytes a, bytes b) { PARTS(bytes, vzip1q_u8(a.part[i], b.part[i])); }
RZ_INLINE bytes bytes_zip_high(bytes a, bytes b) { PARTS(bytes, vzip2q_u8(a.part[i], b.part[i])); }

RZ_INLINE i32 i32_dot_u7(i32 sum, bytes a, bytes b)
{
    PARTS(i32, vdotq_s32(sum.part[i], vreinterpretq_s8_u8(a.part[i]), vreinterpretq_s8_u8(b.part[i])));
}

RZ_INLINE void i32_add_dot_u7(i32 *sum, bytes a, bytes b) { *sum = i32_dot_u7(*sum, a, b); }

/* Signed codes, kept 128 above what they are, by signed bytes; a code counts as what it is. */
enum { COUNTS_MORE_BY = 0 };
RZ_INLINE void i32_add_dot_raised(i32 *sum, bytes raised, bytes digits)
{
    i32_add_dot_u7(sum, bytes_xor(raised, bytes_set1(128)), digits);
}

#if defined(__ARM_FEATURE_MATMUL_INT8)
#define FASTER_BELOW_128 0

RZ_INLINE i32 i32_dot_u8(i32 sum, bytes a, bytes b)
{
    PARTS(i32, vusdotq_s32(sum.part[i], a.part[i], vreinterpretq_s8_u8(b.part[i])));
}
#else
#define FASTER_BELOW_128 1

/* (a - 128) b + 64 b + 64 b */
RZ_INLINE i32 i32_dot_u8(i32 sum, bytes a, bytes b)
{
    const bytes half = bytes_set1(64);
    return i32_dot_u7(i32_dot_u7(i32_dot_u7(sum, bytes_xor(a, bytes_set1(128)), b), half, b), half, b);
}
#endif
#define SUMS_OF_16_BITS 0

RZ_INLINE int16x8_t pairs_of(uint8x16_t a, int8x16_t b)
{
    int8x16_t codes = vreinterpretq_s8_u8(a);
    return vpaddq_s16(vmull_s8(vget_low_s8(codes), vget_low_s8(b)), vmull_high_s8(codes, b));
}

RZ_INLINE bytes shorts_dot_u7(bytes a, bytes b)
{
    PARTS(bytes, vreinterpretq_u8_s16(pairs_of(a.part[i], vreinterpretq_s8_u8(b.part[i]))));
}

RZ_INLINE bytes shorts_add(bytes a, bytes b)
{
    PARTS(bytes, vreinterpretq_u8_s16(vaddq_s16(vreinterpretq_s16_u8(a.part[i]), vreinterpretq_s16_u8(b.part[i]))));
}

RZ_INLINE i32 i32_add_shorts(i32 sum, bytes a, int times)
{
    PARTS(i32, vpadalq_s16(sum.part[i], vmulq_n_s16(vreinterpretq_s16_u8(a.part[i]), (int16_t)times)));
}

/* The products of two of 16 bits, added in pairs. */
RZ_INLINE int32x4_t pairs_of_shorts(uint8x16_t a, uint8x16_t b)
{
    const int16x8_t first = vreinterpretq_s16_u8(a), second = vreinterpretq_s16_u8(b);
    return vpaddq_s32(vmull_s16(vget_low_s16(first), vget_low_s16(second)), vmull_high_s16(first, second));
}

RZ_INLINE bytes bytes_of_i32(i32 a) { PARTS(bytes, vreinterpretq_u8_s32(a.part[i])); }

/* sum + the products of each lane's two of 16 bits, with their signs. */
RZ_INLINE i32 i32_dot_shorts(i32 sum, bytes a, bytes b)
{
    PARTS(i32, vaddq_s32(sum.part[i], pairs_of_shorts(a.part[i], b.part[i])));
}

/* --- layouts --- */

RZ_INLINE void store_sevens(uint8_t *upper, uint8_t *lower, const i32 *four)
{
    const uint16x8_t low = vdupq_n_u16(127);
    for (int i = 0; i < 4; i++, upper += LANES, lower += LANES) {
        const int32x4_t *part = four[i].part;
        const uint16x8_t first = vqmovun_high_s32(vqmovun_s32(part[0]), part[1]);
        const uint16x8_t second = vqmovun_high_s32(vqmovun_s32(part[2]), part[3]);
        vst1q_u8(upper, vshrn_high_n_u16(vshrn_n_u16(first, 7), second, 7));
        vst1q_u8(lower, vmovn_high_u16(vmovn_u16(vandq_u16(first, low)), vandq_u16(second, low)));
    }
}

#define FOUR_REDUCED(to, four, combine, combine_pairs)                                                                \
    do {                                                                                                              \
        float32x4_t a_[4];                                                                                            \
        for (int i_ = 0; i_ < 4; i_++)                                                                                \
            a_[i_] = combine(combine((four)[i_].part[0], (four)[i_].part[2]), combine((four)[i_].part[1], (four)[i_].part[3])); \
        vst1q_f32(to, combine_pairs(combine_pairs(a_[0], a_[1]), combine_pairs(a_[2], a_[3])));                       \
    } while (0)

RZ_INLINE void f32_store_largest(float *to, const f32 *four) { FOUR_REDUCED(to, four, vmaxnmq_f32, vpmaxnmq_f32); }
RZ_INLINE void f32_store_sums(float *to, const f32 *four) { FOUR_REDUCED(to, four, vaddq_f32, vpaddq_f32); }

RZ_INLINE void transpose_quarters(f32 *four)
{
    for (int i = 1; i < 4; i++)
        for (int j = 0; j < i; j++) {
            const float32x4_t one = four[i].part[j];
            four[i].part[j] = four[j].part[i];
            four[j].part[i] = one;
        }
}

RZ_INLINE void transpose_pairs(const bf16 *const *rows, int column, int32_t *to, long to_stride)
{
    for (int row = 0; row < LANES; row++) {
        int32_t pairs[LANES];
        memcpy(pairs, rows[row] + column, sizeof pairs);
        for (int pair = 0; pair < LANES; pair++)
            to[pair * to_stride + row] = pairs[pair];
    }
}

RZ_INLINE void interleave_rows(const bf16 *even, const bf16 *odd, bf16 *to)
{
    for (int i = 0; i < 2 * LANES; i += 8)
        vst2q_u16(to + 2 * i, ((uint16x8x2_t){ { vld1q_u16(even + i), vld1q_u16(odd + i) } }));
}

/* --- sums of products of bf16 (gemm.c) --- */

typedef float32x4_t wide;

#define MOST_AT_ONCE 6
enum { WIDTH = 4, WHOLE_AT_ONCE = 3 };

RZ_INLINE wide wide_zero(void) { return vdupq_n_f32(0.0f); }
RZ_INLINE wide wide_load(const float *from) { return vld1q_f32(from); }
RZ_INLINE void wide_store(float *to, wide a) { vst1q_f32(to, a); }

#if defined(__ARM_FEATURE_BF16_VECTOR_ARITHMETIC)
typedef bf16 operand;
enum { TURNS = 1 };

RZ_INLINE wide weights_of(const bf16 *panel, int turn)
{
    (void)turn;
    return vreinterpretq_f32_u16(vld1q_u16(panel));
}

/* The same of codes of 8 bits, which bf16 holds as they are. */
RZ_INLINE wide weights_of_codes(const int8_t *codes, int turn)
{
    (void)turn;
    int16x8_t whole = vmovl_s8(vld1_s8(codes));
    float32x4_t low = vcvtq_f32_s32(vmovl_s16(vget_low_s16(whole))), high = vcvtq_f32_s32(vmovl_high_s16(whole));
    return vreinterpretq_f32_u16(vuzp2q_u16(vreinterpretq_u16_f32(low), vreinterpretq_u16_f32(high)));
}

RZ_INLINE wide operand_of(const operand *x, int turn)
{
    (void)turn;
    uint32_t pair;
    memcpy(&pair, x, sizeof pair);
    return vreinterpretq_f32_u32(vdupq_n_u32(pair));
}

RZ_INLINE wide multiply_add(wide sum, wide x, wide weights)
{
    return vbfdotq_f32(sum, vreinterpretq_bf16_f32(x), vreinterpretq_bf16_f32(weights));
}
#else
typedef float operand;
enum { TURNS = 2 };

RZ_INLINE wide weights_of(const bf16 *panel, int turn)
{
    uint32x4_t pairs = vreinterpretq_u32_u16(vld1q_u16(panel));
    return vreinterpretq_f32_u32(turn ? vandq_u32(pairs, vdupq_n_u32(0xffff0000)) : vshlq_n_u32(pairs, 16));
}

RZ_INLINE wide weights_of_codes(const int8_t *codes, int turn)
{
    int32x4_t pairs = vmovl_s16(vreinterpret_s16_s8(vld1_s8(codes)));
    return vcvtq_f32_s32(turn ? vshrq_n_s32(pairs, 8) : vshrq_n_s32(vshlq_n_s32(pairs, 24), 24));
}

RZ_INLINE wide operand_of(const operand *x, int turn) { return vdupq_n_f32(x[turn]); }
RZ_INLINE wide multiply_add(wide sum, wide x, wide weights) { return vfmaq_f32(sum, x, weights); }
#endif

#endif
