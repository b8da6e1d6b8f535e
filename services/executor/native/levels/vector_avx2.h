/* Vectors of 16 lanes in two registers of AVX2, with FMA and F16C; with AVX-VNNI's products of integers where it is
 * compiled for that. See vector.h; what each function does is said in vector_avx512.h. */
#ifndef RZ_VECTOR_AVX2_H
#define RZ_VECTOR_AVX2_H

#include <immintrin.h>

typedef struct { __m256 low, high; } f32;
typedef struct { __m256i low, high; } i32;
typedef i32 bytes;
typedef i32 lanes; /* all bits of a lane, or none */

#define VECTORS 8

#define RZ_NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)
/* `type` of what `function` makes of the halves of one vector, or two. */
#define HALVES(type, function, a) ((type){ function((a).low), function((a).high) })
#define HALVES2(type, function, a, b) ((type){ function((a).low, (b).low), function((a).high, (b).high) })

RZ_INLINE __m256i bits_of(__m256 a) { return _mm256_castps_si256(a); }
RZ_INLINE __m256 as_float(__m256i a) { return _mm256_castsi256_ps(a); }

/* --- lanes --- */

RZ_INLINE lanes lanes_first(long count)
{
    const __m256i numbers = _mm256_set_epi32(7, 6, 5, 4, 3, 2, 1, 0);
    const __m256i end = _mm256_set1_epi32(count >= LANES ? LANES : (int)count);
    return (lanes){ _mm256_cmpgt_epi32(end, numbers),
                    _mm256_cmpgt_epi32(end, _mm256_add_epi32(numbers, _mm256_set1_epi32(8))) };
}

RZ_INLINE lanes lanes_and(lanes a, lanes b) { return HALVES2(lanes, _mm256_and_si256, a, b); }
RZ_INLINE lanes lanes_or(lanes a, lanes b) { return HALVES2(lanes, _mm256_or_si256, a, b); }

/* --- float32 --- */

RZ_INLINE f32 f32_zero(void) { return (f32){ _mm256_setzero_ps(), _mm256_setzero_ps() }; }
RZ_INLINE f32 f32_set1(float value) { return (f32){ _mm256_set1_ps(value), _mm256_set1_ps(value) }; }
RZ_INLINE f32 f32_load(const float *from) { return (f32){ _mm256_loadu_ps(from), _mm256_loadu_ps(from + 8) }; }

RZ_INLINE void f32_store(float *to, f32 a)
{
    _mm256_storeu_ps(to, a.low);
    _mm256_storeu_ps(to + 8, a.high);
}

RZ_INLINE f32 f32_load_some(lanes some, const float *from)
{
    return (f32){ _mm256_maskload_ps(from, some.low), _mm256_maskload_ps(from + 8, some.high) };
}

/* A bit for each lane. */
RZ_INLINE int lanes_bits(lanes a)
{
    return _mm256_movemask_ps(as_float(a.low)) | _mm256_movemask_ps(as_float(a.high)) << 8;
}

/* All of them is the usual case, and stores with a mask are slow on some processors. */
RZ_INLINE void f32_store_some(lanes some, float *to, f32 a)
{
    if (lanes_bits(some) == 0xffff) {
        f32_store(to, a);
        return;
    }
    _mm256_maskstore_ps(to, some.low, a.low);
    _mm256_maskstore_ps(to + 8, some.high, a.high);
}

RZ_INLINE f32 f32_add(f32 a, f32 b) { return HALVES2(f32, _mm256_add_ps, a, b); }
RZ_INLINE f32 f32_sub(f32 a, f32 b) { return HALVES2(f32, _mm256_sub_ps, a, b); }
RZ_INLINE f32 f32_mul(f32 a, f32 b) { return HALVES2(f32, _mm256_mul_ps, a, b); }
RZ_INLINE f32 f32_div(f32 a, f32 b) { return HALVES2(f32, _mm256_div_ps, a, b); }
RZ_INLINE f32 f32_max(f32 a, f32 b) { return HALVES2(f32, _mm256_max_ps, a, b); }
RZ_INLINE f32 f32_min(f32 a, f32 b) { return HALVES2(f32, _mm256_min_ps, a, b); }

RZ_INLINE f32 f32_fma(f32 a, f32 b, f32 c)
{
    return (f32){ _mm256_fmadd_ps(a.low, b.low, c.low), _mm256_fmadd_ps(a.high, b.high, c.high) };
}

RZ_INLINE f32 f32_rounded(f32 a)
{
    __asm__("" : "+x"(a.low), "+x"(a.high));
    return a;
}

RZ_INLINE f32 f32_masked(f32 a, int mask)
{
    const __m256 bits = as_float(_mm256_set1_epi32(mask));
    return (f32){ _mm256_and_ps(a.low, bits), _mm256_and_ps(a.high, bits) };
}

RZ_INLINE f32 f32_abs(f32 a) { return f32_masked(a, 0x7fffffff); }
RZ_INLINE f32 f32_power_below(f32 a) { return f32_masked(a, 0x7f800000); }

RZ_INLINE f32 f32_round(f32 a)
{
    return (f32){ _mm256_round_ps(a.low, RZ_NEAREST), _mm256_round_ps(a.high, RZ_NEAREST) };
}

RZ_INLINE __m256 fraction(__m256 a) { return _mm256_sub_ps(a, _mm256_floor_ps(a)); }
RZ_INLINE f32 f32_fraction(f32 a) { return HALVES(f32, fraction, a); }

/* In two factors, of which each is a normal number. */
RZ_INLINE __m256 times_power(__m256 a, __m256 power)
{
    const __m256i bias = _mm256_set1_epi32(127);
    const __m256 least = _mm256_set1_ps(-126.0f), normal = _mm256_cmp_ps(power, least, _CMP_GE_OQ);
    power = _mm256_min_ps(_mm256_floor_ps(_mm256_max_ps(power, least)), _mm256_set1_ps(250.0f));
    __m256i whole = _mm256_cvtps_epi32(power);
    __m256i half = _mm256_srai_epi32(whole, 1), rest = _mm256_sub_epi32(whole, half);
    a = _mm256_mul_ps(a, as_float(_mm256_slli_epi32(_mm256_add_epi32(half, bias), 23)));
    return _mm256_and_ps(normal, _mm256_mul_ps(a, as_float(_mm256_slli_epi32(_mm256_add_epi32(rest, bias), 23))));
}

RZ_INLINE f32 f32_times_power(f32 a, f32 power) { return HALVES2(f32, times_power, a, power); }

RZ_INLINE __m256 times_nonpositive_power(__m256 a, __m256 power)
{
    const __m256 normal = _mm256_cmp_ps(power, _mm256_set1_ps(-126.0f), _CMP_GE_OQ);
    const __m256i exponent = _mm256_slli_epi32(_mm256_cvtps_epi32(_mm256_floor_ps(power)), 23);
    return _mm256_and_ps(normal, as_float(_mm256_add_epi32(bits_of(a), exponent)));
}

/* The same of powers up to 0 and a in [1, 2]. */
RZ_INLINE f32 f32_times_nonpositive_power(f32 a, f32 power) { return HALVES2(f32, times_nonpositive_power, a, power); }

/* In the order of AVX-512's. */
RZ_INLINE float f32_sum(f32 a)
{
    __m256 eight = _mm256_add_ps(a.low, a.high);
    __m128 four = _mm_add_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_add_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(two) + _mm_cvtss_f32(_mm_shuffle_ps(two, two, 1));
}

RZ_INLINE float f32_largest(f32 a)
{
    __m256 eight = _mm256_max_ps(a.low, a.high);
    __m128 four = _mm_max_ps(_mm256_castps256_ps128(eight), _mm256_extractf128_ps(eight, 1));
    __m128 two = _mm_max_ps(four, _mm_movehl_ps(four, four));
    return _mm_cvtss_f32(_mm_max_ss(two, _mm_shuffle_ps(two, two, 1)));
}

#define COMPARED(a, b, how) \
    ((lanes){ bits_of(_mm256_cmp_ps((a).low, (b).low, how)), bits_of(_mm256_cmp_ps((a).high, (b).high, how)) })

RZ_INLINE lanes f32_equal(f32 a, f32 b) { return COMPARED(a, b, _CMP_EQ_OQ); }
RZ_INLINE lanes f32_above(f32 a, f32 b) { return COMPARED(a, b, _CMP_NLE_UQ); }
RZ_INLINE lanes f32_is_number(f32 a) { return COMPARED(a, a, _CMP_ORD_Q); }

RZ_INLINE f32 f32_select(lanes some, f32 there, f32 elsewhere)
{
    return (f32){ _mm256_blendv_ps(elsewhere.low, there.low, as_float(some.low)),
                  _mm256_blendv_ps(elsewhere.high, there.high, as_float(some.high)) };
}

/* 16 values of 16 bits, as lanes of 32. */
RZ_INLINE i32 widened(const void *from)
{
    const __m128i *at = from;
    return (i32){ _mm256_cvtepu16_epi32(_mm_loadu_si128(at)), _mm256_cvtepu16_epi32(_mm_loadu_si128(at + 1)) };
}

RZ_INLINE f32 f32_load_bf16(const bf16 *from)
{
    i32 values = widened(from);
    return (f32){ as_float(_mm256_slli_epi32(values.low, 16)), as_float(_mm256_slli_epi32(values.high, 16)) };
}

/* Of each number the upper 16 bits are its bf16, to nearest even. */
RZ_INLINE __m256i rounded_bits(__m256 a)
{
    __m256i bits = bits_of(a), odd = _mm256_and_si256(_mm256_srli_epi32(bits, 16), _mm256_set1_epi32(1));
    return _mm256_add_epi32(bits, _mm256_add_epi32(odd, _mm256_set1_epi32(0x7fff)));
}

/* These bits; a NaN is one whatever its bits are. */
RZ_INLINE __m256i upper_rounded(__m256 a)
{
    __m256i quiet = _mm256_or_si256(bits_of(a), _mm256_set1_epi32(0x400000));
    quiet = _mm256_blendv_epi8(rounded_bits(a), quiet, bits_of(_mm256_cmp_ps(a, a, _CMP_UNORD_Q)));
    return _mm256_srli_epi32(quiet, 16);
}

RZ_INLINE void f32_store_bf16(bf16 *to, f32 a)
{
    __m256i packed = _mm256_packus_epi32(upper_rounded(a.low), upper_rounded(a.high));
    _mm256_storeu_si256((__m256i *)to, _mm256_permute4x64_epi64(packed, 0xd8));
}

RZ_INLINE __m256 as_bf16(__m256 a)
{
    return as_float(_mm256_and_si256(rounded_bits(a), _mm256_set1_epi32((int)0xffff0000)));
}

/* Rounded to bf16. A NaN that arithmetic has made stays one. */
RZ_INLINE f32 f32_as_bf16(f32 a) { return HALVES(f32, as_bf16, a); }

RZ_INLINE void f32_store_some_bf16(lanes some, bf16 *to, f32 a)
{
    const int bits = lanes_bits(some);
    if (bits == 0xffff) {
        f32_store_bf16(to, a);
        return;
    }
    bf16 all[LANES];
    f32_store_bf16(all, a);
    for (int i = 0; i < LANES; i++)
        if (bits >> i & 1)
            to[i] = all[i];
}

RZ_INLINE void f32_store_two_bf16(bf16 *to, f32 first, f32 second)
{
    f32_store_bf16(to, first);
    f32_store_bf16(to + LANES, second);
}

RZ_INLINE f32 f32_load_f16(const uint16_t *from)
{
    const __m128i *at = (const __m128i *)from;
    return (f32){ _mm256_cvtph_ps(_mm_loadu_si128(at)), _mm256_cvtph_ps(_mm_loadu_si128(at + 1)) };
}

RZ_INLINE void f32_store_f16(uint16_t *to, f32 a)
{
    _mm_storeu_si128((__m128i *)to, _mm256_cvtps_ph(a.low, RZ_NEAREST));
    _mm_storeu_si128((__m128i *)to + 1, _mm256_cvtps_ph(a.high, RZ_NEAREST));
}

RZ_INLINE i32 i32_load_i8(const int8_t *from)
{
    __m128i codes = _mm_loadu_si128((const __m128i *)from);
    return (i32){ _mm256_cvtepi8_epi32(codes), _mm256_cvtepi8_epi32(_mm_unpackhi_epi64(codes, codes)) };
}

RZ_INLINE f32 f32_from_i32(i32 a) { return HALVES(f32, _mm256_cvtepi32_ps, a); }
RZ_INLINE i32 i32_from_f32(f32 a) { return HALVES(i32, _mm256_cvtps_epi32, a); }

RZ_INLINE i32 i32_join_sevens(i32 a, i32 b)
{
    return (i32){ _mm256_add_epi32(_mm256_slli_epi32(a.low, 7), b.low),
                  _mm256_add_epi32(_mm256_slli_epi32(a.high, 7), b.high) };
}

RZ_INLINE f32 f32_load_i8(const int8_t *from) { return f32_from_i32(i32_load_i8(from)); }

RZ_INLINE void f32_store_i8(int8_t *to, f32 a)
{
    f32 whole = f32_round(a);
    __m256i words = _mm256_packs_epi32(_mm256_cvtps_epi32(whole.low), _mm256_cvtps_epi32(whole.high));
    words = _mm256_permute4x64_epi64(words, 0xd8);
    _mm_storeu_si128((__m128i *)to, _mm_packs_epi16(_mm256_castsi256_si128(words), _mm256_extracti128_si256(words, 1)));
}

RZ_INLINE f32 f32_load_e4m3(const uint8_t *codes)
{
    __m256i moved = _mm256_slli_epi16(_mm256_cvtepi8_epi16(_mm_loadu_si128((const __m128i *)codes)), 7);
    __m256i half = _mm256_or_si256(_mm256_and_si256(moved, _mm256_set1_epi16((short)0x8000)),
                                   _mm256_and_si256(moved, _mm256_set1_epi16(0x3f80)));
    return (f32){ _mm256_cvtph_ps(_mm256_castsi256_si128(half)), _mm256_cvtph_ps(_mm256_extracti128_si256(half, 1)) };
}

RZ_INLINE void f32_load_two_e4m3(const uint8_t *codes, f32 *first, f32 *second)
{
    *first = f32_load_e4m3(codes);
    *second = f32_load_e4m3(codes + LANES);
}

/* --- int32 --- */

RZ_INLINE i32 i32_set1(int32_t value) { return (i32){ _mm256_set1_epi32(value), _mm256_set1_epi32(value) }; }

RZ_INLINE bytes bytes_load(const void *from)
{
    const __m256i *at = from;
    return (bytes){ _mm256_loadu_si256(at), _mm256_loadu_si256(at + 1) };
}
RZ_INLINE bytes bytes_load_once(const void *from) { return bytes_load(from); }

RZ_INLINE void bytes_store(void *to, bytes a)
{
    _mm256_storeu_si256(to, a.low);
    _mm256_storeu_si256((__m256i *)to + 1, a.high);
}

RZ_INLINE i32 i32_load(const int32_t *from) { return bytes_load(from); }
RZ_INLINE void i32_store(int32_t *to, i32 a) { bytes_store(to, a); }

RZ_INLINE i32 i32_load_u8(const uint8_t *from)
{
    __m128i codes = _mm_loadu_si128((const __m128i *)from);
    return (i32){ _mm256_cvtepu8_epi32(codes), _mm256_cvtepu8_epi32(_mm_unpackhi_epi64(codes, codes)) };
}

RZ_INLINE i32 i32_add(i32 a, i32 b) { return HALVES2(i32, _mm256_add_epi32, a, b); }
RZ_INLINE i32 i32_sub(i32 a, i32 b) { return HALVES2(i32, _mm256_sub_epi32, a, b); }
RZ_INLINE i32 i32_mul(i32 a, i32 b) { return HALVES2(i32, _mm256_mullo_epi32, a, b); }
/* The lower 16 bits of each: of `low`, and above them of `high`. */
RZ_INLINE i32 i32_pair(i32 low, i32 high)
{
    return (i32){ _mm256_blend_epi16(low.low, _mm256_slli_epi32(high.low, 16), 0xaa),
                  _mm256_blend_epi16(low.high, _mm256_slli_epi32(high.high, 16), 0xaa) };
}

/* Two of 16 bits in each lane: of `low`, and above them of `high`. */
RZ_INLINE i32 i32_load_pairs_u8(const uint8_t *low, const uint8_t *high)
{
    const __m128i a = _mm_loadu_si128((const __m128i *)low), b = _mm_loadu_si128((const __m128i *)high);
    return (i32){ _mm256_cvtepu8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepu8_epi16(_mm_unpackhi_epi8(a, b)) };
}

RZ_INLINE i32 i32_load_pairs_i8(const int8_t *low, const int8_t *high)
{
    const __m128i a = _mm_loadu_si128((const __m128i *)low), b = _mm_loadu_si128((const __m128i *)high);
    return (i32){ _mm256_cvtepi8_epi16(_mm_unpacklo_epi8(a, b)), _mm256_cvtepi8_epi16(_mm_unpackhi_epi8(a, b)) };
}

RZ_INLINE lanes i32_greater(i32 a, i32 b) { return HALVES2(lanes, _mm256_cmpgt_epi32, a, b); }

RZ_INLINE i32 i32_select(lanes some, i32 there, i32 elsewhere)
{
    return (i32){ _mm256_blendv_epi8(elsewhere.low, there.low, some.low),
                  _mm256_blendv_epi8(elsewhere.high, there.high, some.high) };
}

/* --- bytes, and products of integers --- */

RZ_INLINE bytes bytes_set1(uint8_t value)
{
    return (bytes){ _mm256_set1_epi8((char)value), _mm256_set1_epi8((char)value) };
}

RZ_INLINE bytes bytes_and(bytes a, bytes b) { return HALVES2(bytes, _mm256_and_si256, a, b); }
RZ_INLINE bytes bytes_or(bytes a, bytes b) { return HALVES2(bytes, _mm256_or_si256, a, b); }
RZ_INLINE bytes bytes_xor(bytes a, bytes b) { return HALVES2(bytes, _mm256_xor_si256, a, b); }
RZ_INLINE bytes bytes_add(bytes a, bytes b) { return HALVES2(bytes, _mm256_add_epi8, a, b); }
RZ_INLINE bytes bytes_and_or(bytes a, bytes mask, bytes b) { return bytes_or(bytes_and(a, mask), b); }

RZ_INLINE bytes bytes_right(bytes a, int bits)
{
    return (bytes){ _mm256_srli_epi16(a.low, bits), _mm256_srli_epi16(a.high, bits) };
}

RZ_INLINE bytes bytes_left(bytes a, int bits)
{
    return (bytes){ _mm256_slli_epi16(a.low, bits), _mm256_slli_epi16(a.high, bits) };
}

RZ_INLINE bytes bytes_repeat4(const void *from)
{
    int32_t four;
    memcpy(&four, from, sizeof four);
    return i32_set1(four);
}

RZ_INLINE bytes bytes_repeat16(const void *from)
{
    __m256i table = _mm256_broadcastsi128_si256(_mm_loadu_si128(from));
    return (bytes){ table, table };
}

RZ_INLINE bytes bytes_look_up(bytes table, bytes index) { return HALVES2(bytes, _mm256_shuffle_epi8, table, index); }
RZ_INLINE bytes bytes_look_up_first(bytes table, bytes index)
{
    return bytes_look_up(table, bytes_add(index, bytes_set1(0x70)));
}

RZ_INLINE int has_whole_look_ups(void) { return 0; }

RZ_INLINE bytes bytes_zip_low(bytes a, bytes b) { return HALVES2(bytes, _mm256_unpacklo_epi8, a, b); }
RZ_INLINE bytes bytes_zip_high(bytes a, bytes b) { return HALVES2(bytes, _mm256_unpackhi_epi8, a, b); }

#if defined(__AVXVNNI__)
/* Where it stands: compilers put it off, and keep the sums in memory. */
RZ_INLINE i32 i32_dot_u8(i32 sum, bytes a, bytes b)
{
    sum = (i32){ _mm256_dpbusd_avx_epi32(sum.low, a.low, b.low), _mm256_dpbusd_avx_epi32(sum.high, a.high, b.high) };
    __asm__("" : "+x"(sum.low), "+x"(sum.high));
    return sum;
}

RZ_INLINE i32 i32_dot_u7(i32 sum, bytes a, bytes b) { return i32_dot_u8(sum, a, b); }
#define FASTER_BELOW_128 0
#define SUMS_OF_16_BITS 0
#else
#define FASTER_BELOW_128 1
#define SUMS_OF_16_BITS 1
/* Sums of two products fit into 16 bits where the bytes of `a` are below 128: vpmaddubsw saturates beyond. */
RZ_INLINE __m256i dot_u7(__m256i sum, __m256i a, __m256i b, int unit)
{
    return _mm256_add_epi32(sum, _mm256_madd_epi16(_mm256_maddubs_epi16(a, b), _mm256_set1_epi16((short)unit)));
}

RZ_INLINE i32 i32_dot_u7(i32 sum, bytes a, bytes b)
{
    return (i32){ dot_u7(sum.low, a.low, b.low, 1), dot_u7(sum.high, a.high, b.high, 1) };
}

/* The upper bit by itself. */
RZ_INLINE i32 i32_dot_u8(i32 sum, bytes a, bytes b)
{
    bytes lower = bytes_and(a, bytes_set1(0x7f)), upper = bytes_and(bytes_right(a, 7), bytes_set1(1));
    sum = i32_dot_u7(sum, lower, b);
    return (i32){ dot_u7(sum.low, upper.low, b.low, 128), dot_u7(sum.high, upper.high, b.high, 128) };
}
#endif

RZ_INLINE void i32_add_dot_u7(i32 *sum, bytes a, bytes b) { *sum = i32_dot_u7(*sum, a, b); }

/* Signed codes, kept 128 above what they are, by signed bytes of 64 at most (two products fit 16 bits); a code counts so
 * much more than it is. */
enum { COUNTS_MORE_BY = 128 };
RZ_INLINE void i32_add_dot_raised(i32 *sum, bytes raised, bytes digits) { i32_add_dot_u7(sum, raised, digits); }

RZ_INLINE bytes shorts_dot_u7(bytes a, bytes b) { return HALVES2(bytes, _mm256_maddubs_epi16, a, b); }
/* Where it stands: compilers put additions off, and run out of registers for what is to be added. */
RZ_INLINE bytes shorts_add(bytes a, bytes b)
{
    bytes sum = HALVES2(bytes, _mm256_add_epi16, a, b);
    __asm__("" : "+x"(sum.low), "+x"(sum.high));
    return sum;
}

RZ_INLINE i32 i32_add_shorts(i32 sum, bytes a, int times)
{
    const __m256i by = _mm256_set1_epi16((short)times);
    return i32_add(sum, (i32){ _mm256_madd_epi16(a.low, by), _mm256_madd_epi16(a.high, by) });
}

RZ_INLINE bytes bytes_of_i32(i32 a) { return a; }

/* sum + the products of each lane's two of 16 bits, with their signs: where it stands, as of shorts_add. */
RZ_INLINE i32 i32_dot_shorts(i32 sum, bytes a, bytes b)
{
    sum = i32_add(sum, HALVES2(i32, _mm256_madd_epi16, a, b));
    __asm__("" : "+x"(sum.low), "+x"(sum.high));
    return sum;
}

/* 32 bytes as 16 bits each: even ones and odd ones. */
RZ_INLINE void store_shorts(int8_t *even, int8_t *odd, const int8_t *from)
{
    const __m256i all = _mm256_loadu_si256((const __m256i *)from);
    _mm256_storeu_si256((__m256i *)even, _mm256_srai_epi16(_mm256_slli_epi16(all, 8), 8));
    _mm256_storeu_si256((__m256i *)odd, _mm256_srai_epi16(all, 8));
}

/* --- layouts --- */

RZ_INLINE void store_sevens(uint8_t *upper, uint8_t *lower, const i32 *four)
{
    const __m256i low = _mm256_set1_epi16(127);
    /* Four bytes lie together by then: of the first half's first quarter, of the second's, of the next vector. */
    const __m256i in_order = _mm256_set_epi32(7, 3, 6, 2, 5, 1, 4, 0);
    for (int i = 0; i < 4; i += 2, upper += 32, lower += 32) {
        const __m256i first = _mm256_packus_epi32(four[i].low, four[i].high);
        const __m256i second = _mm256_packus_epi32(four[i + 1].low, four[i + 1].high);
        const __m256i high = _mm256_packus_epi16(_mm256_srli_epi16(first, 7), _mm256_srli_epi16(second, 7));
        const __m256i rest = _mm256_packus_epi16(_mm256_and_si256(first, low), _mm256_and_si256(second, low));
        _mm256_storeu_si256((__m256i *)upper, _mm256_permutevar8x32_epi32(high, in_order));
        _mm256_storeu_si256((__m256i *)lower, _mm256_permutevar8x32_epi32(rest, in_order));
    }
}

#define FOUR_REDUCED(to, four, combine, combine_halves)                                                               \
    do {                                                                                                              \
        __m256 a_[4];                                                                                                 \
        for (int i_ = 0; i_ < 4; i_++)                                                                                \
            a_[i_] = combine((four)[i_].low, (four)[i_].high);                                                        \
        const __m256 two_ = combine(_mm256_unpacklo_ps(a_[0], a_[1]), _mm256_unpackhi_ps(a_[0], a_[1]));              \
        const __m256 more_ = combine(_mm256_unpacklo_ps(a_[2], a_[3]), _mm256_unpackhi_ps(a_[2], a_[3]));             \
        const __m256d x_ = _mm256_castps_pd(two_), y_ = _mm256_castps_pd(more_);                                      \
        const __m256 all_ = combine(_mm256_castpd_ps(_mm256_unpacklo_pd(x_, y_)), _mm256_castpd_ps(_mm256_unpackhi_pd(x_, y_))); \
        _mm_storeu_ps(to, combine_halves(_mm256_castps256_ps128(all_), _mm256_extractf128_ps(all_, 1)));              \
    } while (0)

RZ_INLINE void f32_store_largest(float *to, const f32 *four) { FOUR_REDUCED(to, four, _mm256_max_ps, _mm_max_ps); }
RZ_INLINE void f32_store_sums(float *to, const f32 *four) { FOUR_REDUCED(to, four, _mm256_add_ps, _mm_add_ps); }

RZ_INLINE void transpose_quarters(f32 *four)
{
    const f32 a = four[0], b = four[1], c = four[2], d = four[3];
    four[0] = (f32){ _mm256_permute2f128_ps(a.low, b.low, 0x20), _mm256_permute2f128_ps(c.low, d.low, 0x20) };
    four[1] = (f32){ _mm256_permute2f128_ps(a.low, b.low, 0x31), _mm256_permute2f128_ps(c.low, d.low, 0x31) };
    four[2] = (f32){ _mm256_permute2f128_ps(a.high, b.high, 0x20), _mm256_permute2f128_ps(c.high, d.high, 0x20) };
    four[3] = (f32){ _mm256_permute2f128_ps(a.high, b.high, 0x31), _mm256_permute2f128_ps(c.high, d.high, 0x31) };
}

/* Eight rows of eight pairs become eight pairs of eight rows. */
RZ_INLINE void transpose_eight(const bf16 *const *rows, int column, int32_t *to, long to_stride)
{
    __m256i a[8], b[8];
#pragma GCC unroll 8
    for (int i = 0; i < 8; i++)
        a[i] = _mm256_loadu_si256((const __m256i *)(rows[i] + column));
#pragma GCC unroll 4
    for (int i = 0; i < 8; i += 2) {
        b[i] = _mm256_unpacklo_epi32(a[i], a[i + 1]);
        b[i + 1] = _mm256_unpackhi_epi32(a[i], a[i + 1]);
    }
#pragma GCC unroll 2
    for (int i = 0; i < 8; i += 4) {
        a[i] = _mm256_unpacklo_epi64(b[i], b[i + 2]);
        a[i + 1] = _mm256_unpackhi_epi64(b[i], b[i + 2]);
        a[i + 2] = _mm256_unpacklo_epi64(b[i + 1], b[i + 3]);
        a[i + 3] = _mm256_unpackhi_epi64(b[i + 1], b[i + 3]);
    }
#pragma GCC unroll 4
    for (int j = 0; j < 4; j++) {
        _mm256_storeu_si256((__m256i *)(to + j * to_stride), _mm256_permute2x128_si256(a[j], a[4 + j], 0x20));
        _mm256_storeu_si256((__m256i *)(to + (4 + j) * to_stride), _mm256_permute2x128_si256(a[j], a[4 + j], 0x31));
    }
}

RZ_INLINE void transpose_pairs(const bf16 *const *rows, int column, int32_t *to, long to_stride)
{
    for (int row = 0; row < LANES; row += 8)
        for (int pair = 0; pair < LANES; pair += 8)
            transpose_eight(rows + row, column + 2 * pair, to + pair * to_stride + row, to_stride);
}

RZ_INLINE void interleave_rows(const bf16 *even, const bf16 *odd, bf16 *to)
{
    for (int i = 0; i < 2 * LANES; i += LANES) {
        __m256i a = _mm256_loadu_si256((const __m256i *)(even + i)), b = _mm256_loadu_si256((const __m256i *)(odd + i));
        __m256i low = _mm256_unpacklo_epi16(a, b), high = _mm256_unpackhi_epi16(a, b);
        __m256i *at = (__m256i *)(to + 2 * i);
        _mm256_storeu_si256(at, _mm256_permute2x128_si256(low, high, 0x20));
        _mm256_storeu_si256(at + 1, _mm256_permute2x128_si256(low, high, 0x31));
    }
}

/* --- sums of products of bf16 (gemm.c) --- */

typedef __m256 wide;
typedef float operand;

#define MOST_AT_ONCE 6
enum { WIDTH = 8, WHOLE_AT_ONCE = 2, TURNS = 2 };

RZ_INLINE wide wide_zero(void) { return _mm256_setzero_ps(); }
RZ_INLINE wide wide_load(const float *from) { return _mm256_loadu_ps(from); }
RZ_INLINE void wide_store(float *to, wide a) { _mm256_storeu_ps(to, a); }

RZ_INLINE wide weights_of(const bf16 *panel, int turn)
{
    __m256i pairs = _mm256_loadu_si256((const __m256i *)panel);
    return as_float(turn ? _mm256_and_si256(pairs, _mm256_set1_epi32((int)0xffff0000)) : _mm256_slli_epi32(pairs, 16));
}

RZ_INLINE wide weights_of_codes(const int8_t *codes, int turn)
{
    __m256i pairs = _mm256_cvtepi16_epi32(_mm_loadu_si128((const __m128i *)codes));
    return _mm256_cvtepi32_ps(_mm256_srai_epi32(turn ? pairs : _mm256_slli_epi32(pairs, 24), turn ? 8 : 24));
}

RZ_INLINE wide operand_of(const operand *x, int turn) { return _mm256_set1_ps(x[turn]); }
RZ_INLINE wide multiply_add(wide sum, wide x, wide weights) { return _mm256_fmadd_ps(x, weights, sum); }

#endif
