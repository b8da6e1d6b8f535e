/* Vectors of 16 lanes in one register of AVX-512 (F, BW, VL, DQ, VNNI); with bf16's dot product where it is compiled
 * for that. See vector.h. */
#ifndef RZ_VECTOR_AVX512_H
#define RZ_VECTOR_AVX512_H

#include <immintrin.h>

typedef __m512 f32;
typedef __m512i i32;
typedef __m512i bytes;
typedef __mmask16 lanes;

#define VECTORS 32 /* f32 that fit into the registers */

#define RZ_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

/* --- lanes --- */

/* The first `count` of them; all, none. */
RZ_INLINE lanes lanes_first(long count)
{
    return count >= LANES ? 0xffff : count <= 0 ? 0 : (lanes)((1u << count) - 1);
}

RZ_INLINE lanes lanes_and(lanes a, lanes b) { return a & b; }
RZ_INLINE lanes lanes_or(lanes a, lanes b) { return a | b; }

/* --- float32 --- */

RZ_INLINE f32 f32_zero(void) { return _mm512_setzero_ps(); }
RZ_INLINE f32 f32_set1(float value) { return _mm512_set1_ps(value); }
RZ_INLINE f32 f32_load(const float *from) { return _mm512_loadu_ps(from); }
RZ_INLINE void f32_store(float *to, f32 a) { _mm512_storeu_ps(to, a); }
/* Lanes that are left out are not read (0) and not written. */
RZ_INLINE f32 f32_load_some(lanes some, const float *from) { return _mm512_maskz_loadu_ps(some, from); }
RZ_INLINE void f32_store_some(lanes some, float *to, f32 a) { _mm512_mask_storeu_ps(to, some, a); }
RZ_INLINE f32 f32_add(f32 a, f32 b) { return _mm512_add_ps(a, b); }
RZ_INLINE f32 f32_sub(f32 a, f32 b) { return _mm512_sub_ps(a, b); }
RZ_INLINE f32 f32_mul(f32 a, f32 b) { return _mm512_mul_ps(a, b); }
RZ_INLINE f32 f32_div(f32 a, f32 b) { return _mm512_div_ps(a, b); }
/* a * b + c, rounded once */
RZ_INLINE f32 f32_fma(f32 a, f32 b, f32 c) { return _mm512_fmadd_ps(a, b, c); }
/* What is added to it is added to a rounded number: compilers make one instruction of a product and a sum where they can. */
RZ_INLINE f32 f32_rounded(f32 a)
{
    __asm__("" : "+v"(a));
    return a;
}
/* Of a NaN and a number: b. */
RZ_INLINE f32 f32_max(f32 a, f32 b) { return _mm512_max_ps(a, b); }
RZ_INLINE f32 f32_min(f32 a, f32 b) { return _mm512_min_ps(a, b); }
RZ_INLINE f32 f32_abs(f32 a) { return _mm512_abs_ps(a); }
/* To the nearest integer, half to even. */
RZ_INLINE f32 f32_round(f32 a) { return _mm512_roundscale_ps(a, RZ_NEAREST); }
/* What is above the next lower integer. */
RZ_INLINE f32 f32_fraction(f32 a) { return _mm512_reduce_ps(a, _MM_FROUND_TO_NEG_INF | _MM_FROUND_NO_EXC); }
/* a * 2^power, rounded down to an integer; 0 for powers below -126 and NaN. */
RZ_INLINE f32 f32_times_power(f32 a, f32 power)
{
    return _mm512_maskz_scalef_ps(_mm512_cmp_ps_mask(power, _mm512_set1_ps(-126.0f), _CMP_GE_OQ), a, power);
}
/* The same of powers up to 0 and a in [1, 2]. */
RZ_INLINE f32 f32_times_nonpositive_power(f32 a, f32 power) { return f32_times_power(a, power); }
/* The largest power of two that is at most |a|; 0 for zeros and denormals. */
RZ_INLINE f32 f32_power_below(f32 a) { return _mm512_and_ps(a, _mm512_castsi512_ps(_mm512_set1_epi32(0x7f800000))); }
RZ_INLINE float f32_sum(f32 a) { return _mm512_reduce_add_ps(a); }
RZ_INLINE float f32_largest(f32 a) { return _mm512_reduce_max_ps(a); }
RZ_INLINE lanes f32_equal(f32 a, f32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_EQ_OQ); }
/* a > b, or one of them is a NaN */
RZ_INLINE lanes f32_above(f32 a, f32 b) { return _mm512_cmp_ps_mask(a, b, _CMP_NLE_UQ); }
RZ_INLINE lanes f32_is_number(f32 a) { return _mm512_cmp_ps_mask(a, a, _CMP_ORD_Q); }
RZ_INLINE f32 f32_select(lanes some, f32 there, f32 elsewhere) { return _mm512_mask_mov_ps(elsewhere, some, there); }

RZ_INLINE f32 f32_load_bf16(const bf16 *from)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* As bf16, rounded to nearest even. */
RZ_INLINE __m256i f32_to_bf16(f32 a)
{
#if defined(__AVX512BF16__)
    return (__m256i)_mm512_cvtneps_pbh(a);
#else
    __m512i bits = _mm512_castps_si512(a);
    __m512i odd = _mm512_and_si512(_mm512_srli_epi32(bits, 16), _mm512_set1_epi32(1));
    __m512i rounded = _mm512_add_epi32(bits, _mm512_add_epi32(odd, _mm512_set1_epi32(0x7fff)));
    __m512i quiet = _mm512_or_si512(bits, _mm512_set1_epi32(0x400000));
    rounded = _mm512_mask_mov_epi32(rounded, _mm512_cmp_ps_mask(a, a, _CMP_UNORD_Q), quiet);
    return _mm512_cvtepi32_epi16(_mm512_srli_epi32(rounded, 16));
#endif
}

/* Rounded to bf16. */
RZ_INLINE f32 f32_as_bf16(f32 a)
{
    return _mm512_castsi512_ps(_mm512_slli_epi32(_mm512_cvtepu16_epi32(f32_to_bf16(a)), 16));
}

RZ_INLINE void f32_store_bf16(bf16 *to, f32 a) { _mm256_storeu_si256((__m256i *)to, f32_to_bf16(a)); }
RZ_INLINE void f32_store_some_bf16(lanes some, bf16 *to, f32 a) { _mm256_mask_storeu_epi16(to, some, f32_to_bf16(a)); }

/* One behind the other. */
RZ_INLINE void f32_store_two_bf16(bf16 *to, f32 first, f32 second)
{
#if defined(__AVX512BF16__)
    _mm512_storeu_si512(to, (__m512i)_mm512_cvtne2ps_pbh(second, first));
#else
    f32_store_bf16(to, first);
    f32_store_bf16(to + LANES, second);
#endif
}

RZ_INLINE f32 f32_load_f16(const uint16_t *from)
{
    return _mm512_cvtph_ps(_mm256_loadu_si256((const __m256i *)from));
}

RZ_INLINE void f32_store_f16(uint16_t *to, f32 a)
{
    _mm256_storeu_si256((__m256i *)to, _mm512_cvtps_ph(a, RZ_NEAREST));
}

RZ_INLINE f32 f32_load_i8(const int8_t *from)
{
    return _mm512_cvtepi32_ps(_mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)));
}

/* Rounded to nearest even; |a| < 128. */
RZ_INLINE void f32_store_i8(int8_t *to, f32 a)
{
    _mm_storeu_si128((__m128i *)to, _mm512_cvtepi32_epi8(_mm512_cvt_roundps_epi32(a, RZ_NEAREST)));
}

/* 32 codes of e4m3, as values over 256: it is float16 with three exponent bits less, moved into its place. */
RZ_INLINE void f32_load_two_e4m3(const uint8_t *codes, f32 *first, f32 *second)
{
    const __m512i sign = _mm512_set1_epi16((short)0x8000), rest = _mm512_set1_epi16(0x3f80);
    __m512i wide = _mm512_cvtepi8_epi16(_mm256_loadu_si256((const __m256i *)codes));
    wide = _mm512_slli_epi16(wide, 7);
    /* A sign that was extended has filled a bit of the exponent as well. */
    __m512i half = _mm512_or_si512(_mm512_and_si512(wide, sign), _mm512_and_si512(wide, rest));
    *first = _mm512_cvtph_ps(_mm512_castsi512_si256(half));
    *second = _mm512_cvtph_ps(_mm512_extracti64x4_epi64(half, 1));
}

/* --- int32 --- */

RZ_INLINE i32 i32_set1(int32_t value) { return _mm512_set1_epi32(value); }
RZ_INLINE i32 i32_load(const int32_t *from) { return _mm512_loadu_si512(from); }
RZ_INLINE void i32_store(int32_t *to, i32 a) { _mm512_storeu_si512(to, a); }
RZ_INLINE i32 i32_load_u8(const uint8_t *from) { return _mm512_cvtepu8_epi32(_mm_loadu_si128((const __m128i *)from)); }
RZ_INLINE i32 i32_load_i8(const int8_t *from) { return _mm512_cvtepi8_epi32(_mm_loadu_si128((const __m128i *)from)); }
RZ_INLINE i32 i32_add(i32 a, i32 b) { return _mm512_add_epi32(a, b); }
RZ_INLINE i32 i32_sub(i32 a, i32 b) { return _mm512_sub_epi32(a, b); }
RZ_INLINE i32 i32_mul(i32 a, i32 b) { return _mm512_mullo_epi32(a, b); }
RZ_INLINE lanes i32_greater(i32 a, i32 b) { return _mm512_cmpgt_epi32_mask(a, b); }
/* The lower 16 bits of each: of `low`, and above them of `high`. */
RZ_INLINE i32 i32_pair(i32 low, i32 high)
{
    return _mm512_mask_mov_epi16(low, 0xaaaaaaaa, _mm512_slli_epi32(high, 16));
}
/* Two of 16 bits in each lane: of `low`, and above them of `high`. */
RZ_INLINE i32 i32_load_pairs_u8(const uint8_t *low, const uint8_t *high) { return i32_pair(i32_load_u8(low), i32_load_u8(high)); }
RZ_INLINE i32 i32_load_pairs_i8(const int8_t *low, const int8_t *high) { return i32_pair(i32_load_i8(low), i32_load_i8(high)); }

RZ_INLINE i32 i32_select(lanes some, i32 there, i32 elsewhere) { return _mm512_mask_mov_epi32(elsewhere, some, there); }
RZ_INLINE f32 f32_from_i32(i32 a) { return _mm512_cvtepi32_ps(a); }
/* Rounded to nearest even. */
RZ_INLINE i32 i32_from_f32(f32 a) { return _mm512_cvtps_epi32(a); }
/* a * 128 + b */
RZ_INLINE i32 i32_join_sevens(i32 a, i32 b) { return _mm512_add_epi32(_mm512_slli_epi32(a, 7), b); }

/* --- bytes, and products of integers --- */

RZ_INLINE bytes bytes_load(const void *from) { return _mm512_loadu_si512(from); }
/* For several uses, which compilers make as many loads of. */
RZ_INLINE bytes bytes_load_once(const void *from)
{
    bytes a = bytes_load(from);
    __asm__("" : "+v"(a));
    return a;
}

RZ_INLINE void bytes_store(void *to, bytes a) { _mm512_storeu_si512(to, a); }
RZ_INLINE bytes bytes_set1(uint8_t value) { return _mm512_set1_epi8((char)value); }
RZ_INLINE bytes bytes_and(bytes a, bytes b) { return _mm512_and_si512(a, b); }
RZ_INLINE bytes bytes_or(bytes a, bytes b) { return _mm512_or_si512(a, b); }
RZ_INLINE bytes bytes_xor(bytes a, bytes b) { return _mm512_xor_si512(a, b); }
RZ_INLINE bytes bytes_add(bytes a, bytes b) { return _mm512_add_epi8(a, b); }
/* (a & mask) | b */
RZ_INLINE bytes bytes_and_or(bytes a, bytes mask, bytes b) { return _mm512_ternarylogic_epi64(a, mask, b, 0xea); }
/* By 16 bits at once: what leaves a byte enters the next one, and is to be masked. */
RZ_INLINE bytes bytes_right(bytes a, int bits) { return _mm512_srli_epi16(a, (unsigned)bits); }
RZ_INLINE bytes bytes_left(bytes a, int bits) { return _mm512_slli_epi16(a, (unsigned)bits); }

/* The same four bytes in every lane. */
RZ_INLINE bytes bytes_repeat4(const void *from)
{
    int32_t four;
    memcpy(&four, from, sizeof four);
    return _mm512_set1_epi32(four);
}

/* The same sixteen bytes four times: a table for bytes_look_up. */
RZ_INLINE bytes bytes_repeat16(const void *from) { return _mm512_broadcast_i32x4(_mm_loadu_si128(from)); }
/* table[index], for indices below 16 */
RZ_INLINE bytes bytes_look_up(bytes table, bytes index) { return _mm512_shuffle_epi8(table, index); }
/* The same; 0 for those from 16 to 127. */
RZ_INLINE bytes bytes_look_up_first(bytes table, bytes index)
{
    return bytes_look_up(table, bytes_add(index, bytes_set1(0x70)));
}

/* table[index]: of 32 words, by the lowest five bits of each word */
#define LOOKS_UP_WORDS
RZ_INLINE bytes bytes_look_up_words(bytes table, bytes index) { return _mm512_permutexvar_epi16(index, table); }

#if defined(__AVX512BF16__)
/* Of such processors all but Cooper Lake have it: whoever calls it asks, and is compiled for it. */
#define LOOKS_UP_WHOLE
RZ_INLINE int has_whole_look_ups(void) { return __builtin_cpu_supports("avx512vbmi"); }

#pragma GCC push_options
#pragma GCC target("avx512vbmi")
/* table[index], of 128 bytes, by the lowest seven bits */
RZ_INLINE bytes bytes_look_up_whole(const bytes *table, bytes index)
{
    return _mm512_permutex2var_epi8(table[0], index, table[1]);
}
#pragma GCC pop_options
#else
RZ_INLINE int has_whole_look_ups(void) { return 0; }
#endif

/* a and b byte by byte: the first eight of each sixteen, and the others. */
RZ_INLINE bytes bytes_zip_low(bytes a, bytes b) { return _mm512_unpacklo_epi8(a, b); }
RZ_INLINE bytes bytes_zip_high(bytes a, bytes b) { return _mm512_unpackhi_epi8(a, b); }

/* sum + the products of each lane's four unsigned bytes of `a` with its four signed ones of `b`. */
RZ_INLINE i32 i32_dot_u8(i32 sum, bytes a, bytes b) { return _mm512_dpbusd_epi32(sum, a, b); }
/* The same, for bytes of `a` below 128: faster where FASTER_BELOW_128 says so. */
#define FASTER_BELOW_128 0
RZ_INLINE i32 i32_dot_u7(i32 sum, bytes a, bytes b) { return _mm512_dpbusd_epi32(sum, a, b); }
/* To *sum: compilers copy what dpbusd adds to, for each product. */
RZ_INLINE void i32_add_dot_u7(i32 *sum, bytes a, bytes b)
{
    __asm__("vpdpbusd %2, %1, %0" : "+v"(*sum) : "v"(a), "v"(b));
}

/* Signed codes, kept 128 above what they are, by signed bytes of 64 at most; a code counts so much more than it is. */
enum { COUNTS_MORE_BY = 128 };
RZ_INLINE void i32_add_dot_raised(i32 *sum, bytes raised, bytes digits) { i32_add_dot_u7(sum, raised, digits); }

/* Whether there is no such instruction, and sums of 16 bits are faster where they are enough. */
#define SUMS_OF_16_BITS 0
/* The products of two unsigned bytes of `a`, below 128, with two signed ones of `b`, as 16 bits. */
RZ_INLINE bytes shorts_dot_u7(bytes a, bytes b) { return _mm512_maddubs_epi16(a, b); }
RZ_INLINE bytes shorts_add(bytes a, bytes b) { return _mm512_add_epi16(a, b); }
/* sum + `times` the two of each lane */
RZ_INLINE i32 i32_add_shorts(i32 sum, bytes a, int times)
{
    return _mm512_add_epi32(sum, _mm512_madd_epi16(a, _mm512_set1_epi16((short)times)));
}

RZ_INLINE bytes bytes_of_i32(i32 a) { return a; }

/* sum + the products of each lane's two of 16 bits, with their signs. */
RZ_INLINE i32 i32_dot_shorts(i32 sum, bytes a, bytes b) { return _mm512_dpwssd_epi32(sum, a, b); }

/* --- layouts --- */

/* The upper and the lower seven bits of 64 numbers below 2^14. */
RZ_INLINE void store_sevens(uint8_t *upper, uint8_t *lower, const i32 *four)
{
    const __m512i first = _mm512_packus_epi32(four[0], four[1]), second = _mm512_packus_epi32(four[2], four[3]);
    const __m512i low = _mm512_set1_epi16(127);
    /* Four bytes of each vector lie together by then, first those of all first quarters. */
    const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512i high = _mm512_packus_epi16(_mm512_srli_epi16(first, 7), _mm512_srli_epi16(second, 7));
    const __m512i rest = _mm512_packus_epi16(_mm512_and_si512(first, low), _mm512_and_si512(second, low));
    _mm512_storeu_si512(upper, _mm512_permutexvar_epi32(in_order, high));
    _mm512_storeu_si512(lower, _mm512_permutexvar_epi32(in_order, rest));
}

/* The largest value of each of four vectors, or its sum: what lies side by side is combined, then quarters are. */
#define FOUR_REDUCED(to, four, combine, combine_halves, combine_quarters)                                             \
    do {                                                                                                              \
        const f32 *a_ = (four);                                                                                       \
        const f32 two_ = combine(_mm512_unpacklo_ps(a_[0], a_[1]), _mm512_unpackhi_ps(a_[0], a_[1]));                 \
        const f32 more_ = combine(_mm512_unpacklo_ps(a_[2], a_[3]), _mm512_unpackhi_ps(a_[2], a_[3]));                \
        const __m512d x_ = _mm512_castps_pd(two_), y_ = _mm512_castps_pd(more_);                                      \
        const f32 all_ = combine(_mm512_castpd_ps(_mm512_unpacklo_pd(x_, y_)), _mm512_castpd_ps(_mm512_unpackhi_pd(x_, y_))); \
        const __m256 half_ = combine_halves(_mm512_castps512_ps256(all_), _mm512_extractf32x8_ps(all_, 1));           \
        _mm_storeu_ps(to, combine_quarters(_mm256_castps256_ps128(half_), _mm256_extractf128_ps(half_, 1)));          \
    } while (0)

RZ_INLINE void f32_store_largest(float *to, const f32 *four)
{
    FOUR_REDUCED(to, four, _mm512_max_ps, _mm256_max_ps, _mm_max_ps);
}

RZ_INLINE void f32_store_sums(float *to, const f32 *four)
{
    FOUR_REDUCED(to, four, _mm512_add_ps, _mm256_add_ps, _mm_add_ps);
}

/* Quarter i of vector j becomes quarter j of vector i. */
RZ_INLINE void transpose_quarters(f32 *four)
{
    const f32 a = _mm512_shuffle_f32x4(four[0], four[1], 0x44), b = _mm512_shuffle_f32x4(four[2], four[3], 0x44);
    const f32 c = _mm512_shuffle_f32x4(four[0], four[1], 0xee), d = _mm512_shuffle_f32x4(four[2], four[3], 0xee);
    four[0] = _mm512_shuffle_f32x4(a, b, 0x88);
    four[1] = _mm512_shuffle_f32x4(a, b, 0xdd);
    four[2] = _mm512_shuffle_f32x4(c, d, 0x88);
    four[3] = _mm512_shuffle_f32x4(c, d, 0xdd);
}

/* 16 rows of 16 pairs, from `column` on, become 16 pairs of 16 rows, `to_stride` pairs apart. */
RZ_INLINE void transpose_pairs(const bf16 *const *rows, int column, int32_t *to, long to_stride)
{
    __m512i a[LANES], b[LANES];
#pragma GCC unroll 16
    for (int i = 0; i < LANES; i++)
        a[i] = _mm512_loadu_si512(rows[i] + column);
#pragma GCC unroll 8
    for (int i = 0; i < LANES; i += 2) {
        b[i] = _mm512_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm512_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 4
    for (int i = 0; i < LANES; i += 4) {
        a[i] = _mm512_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm512_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm512_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm512_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
    /* a[4g + j] holds column 4q + j of rows 4g .. 4g+3 in its quarter q. */
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        __m512i low = _mm512_shuffle_i32x4(a[j], a[4 + j], 0x88);
        __m512i high = _mm512_shuffle_i32x4(a[j], a[4 + j], 0xdd);
        __m512i low2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0x88);
        __m512i high2 = _mm512_shuffle_i32x4(a[8 + j], a[12 + j], 0xdd);
        _mm512_storeu_si512(to + (0 + j) * to_stride, _mm512_shuffle_i32x4(low, low2, 0x88));
        _mm512_storeu_si512(to + (4 + j) * to_stride, _mm512_shuffle_i32x4(high, high2, 0x88));
        _mm512_storeu_si512(to + (8 + j) * to_stride, _mm512_shuffle_i32x4(low, low2, 0xdd));
        _mm512_storeu_si512(to + (12 + j) * to_stride, _mm512_shuffle_i32x4(high, high2, 0xdd));
    }
}

/* Interleaves 32 values of two rows: even[0] odd[0] even[1] odd[1] ... */
RZ_INLINE void interleave_rows(const bf16 *even, const bf16 *odd, bf16 *to)
{
    const __m512i low = _mm512_set_epi16(
        47, 15, 46, 14, 45, 13, 44, 12, 43, 11, 42, 10, 41, 9, 40, 8, 39, 7, 38, 6, 37, 5, 36, 4, 35, 3, 34, 2, 33, 1, 32, 0);
    const __m512i high = _mm512_add_epi16(low, _mm512_set1_epi16(16));
    __m512i a = _mm512_loadu_si512(even), b = _mm512_loadu_si512(odd);
    _mm512_storeu_si512(to, _mm512_permutex2var_epi16(a, low, b));
    _mm512_storeu_si512(to + 2 * LANES, _mm512_permutex2var_epi16(a, high, b));
}

/* --- sums of products of bf16 (gemm.c) --- */

typedef __m512 wide;

#define MOST_AT_ONCE 12 /* rows of a tile whose sums are in registers over half a panel */
enum {
    WIDTH = 16,         /* float32 lanes of `wide` */
    WHOLE_AT_ONCE = 12, /* rows whose sums are over a whole panel */
};

RZ_INLINE wide wide_zero(void) { return _mm512_setzero_ps(); }
RZ_INLINE wide wide_load(const float *from) { return _mm512_loadu_ps(from); }
RZ_INLINE void wide_store(float *to, wide a) { _mm512_storeu_ps(to, a); }

#if defined(__AVX512BF16__)
/* Both inputs of a pair at once: x is bf16, as it is in memory. */
typedef bf16 operand;
enum { TURNS = 1 /* multiplications per pair */ };

RZ_INLINE wide weights_of(const bf16 *panel, int turn)
{
    (void)turn;
    return (wide)_mm512_loadu_si512(panel);
}

/* The same of codes of 8 bits, which bf16 holds as they are. */
RZ_INLINE wide weights_of_codes(const int8_t *codes, int turn)
{
    (void)turn;
    return (wide)_mm512_cvtne2ps_pbh(f32_load_i8(codes + LANES), f32_load_i8(codes));
}

RZ_INLINE wide operand_of(const operand *x, int turn)
{
    (void)turn;
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (wide)_mm512_set1_epi32(pair);
}

RZ_INLINE wide multiply_add(wide sum, wide x, wide weights)
{
    return _mm512_dpbf16_ps(sum, (__m512bh)x, (__m512bh)weights);
}
#else
/* The first input of a pair, then the second: x is float32 by then. */
typedef float operand;
enum { TURNS = 2 };

RZ_INLINE wide weights_of(const bf16 *panel, int turn)
{
    __m512i pairs = _mm512_loadu_si512(panel);
    return _mm512_castsi512_ps(
        turn ? _mm512_and_si512(pairs, _mm512_set1_epi32((int)0xffff0000)) : _mm512_slli_epi32(pairs, 16));
}

RZ_INLINE wide weights_of_codes(const int8_t *codes, int turn)
{
    __m512i pairs = _mm512_cvtepi16_epi32(_mm256_loadu_si256((const __m256i *)codes));
    return _mm512_cvtepi32_ps(_mm512_srai_epi32(turn ? pairs : _mm512_slli_epi32(pairs, 24), turn ? 8 : 24));
}

RZ_INLINE wide operand_of(const operand *x, int turn) { return _mm512_set1_ps(x[turn]); }
RZ_INLINE wide multiply_add(wide sum, wide x, wide weights) { return _mm512_fmadd_ps(x, weights, sum); }
#endif

#endif
