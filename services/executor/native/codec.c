/* See codec.h. */
#include "codec.h"

#include <float.h>
#include <string.h>

#define NEAREST (_MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC)

RZ_INLINE __m128i to_int8(__m512 values)
{
    __m512 limit = _mm512_set1_ps(127.0f);
    values = _mm512_min_ps(_mm512_max_ps(values, _mm512_sub_ps(_mm512_setzero_ps(), limit)), limit);
    return _mm512_cvtepi32_epi8(_mm512_cvt_roundps_epi32(values, NEAREST));
}

/* e4m3: rounded to what it can hold, which float16 holds too; its bits are float16's, moved (attention.c). */
RZ_INLINE __m128i to_fp8(__m512 values)
{
    __m512 limit = _mm512_set1_ps(448.0f);
    values = _mm512_min_ps(_mm512_max_ps(values, _mm512_sub_ps(_mm512_setzero_ps(), limit)), limit);
    __m512 exponent = _mm512_max_ps(_mm512_getexp_ps(values), _mm512_set1_ps(-6.0f));
    __m512 step = _mm512_scalef_ps(_mm512_set1_ps(0.125f), exponent);
    __m512 rounded = _mm512_mul_ps(_mm512_roundscale_ps(_mm512_div_ps(values, step), NEAREST), step);
    __m256i half = _mm512_cvtps_ph(_mm512_mul_ps(rounded, _mm512_set1_ps(1.0f / 256)), NEAREST);
    __m256i rest = _mm256_and_si256(_mm256_srli_epi16(half, 7), _mm256_set1_epi16(0x7f));
    __m256i sign = _mm256_and_si256(_mm256_srli_epi16(half, 8), _mm256_set1_epi16(0x80));
    return _mm256_cvtepi16_epi8(_mm256_or_si256(rest, sign));
}

void rz_encode(int codec, const bf16 *values, long count, void *codes, float *scale)
{
    __m512 peak = _mm512_setzero_ps();
    for (long i = 0; i < count; i += LANES)
        peak = _mm512_max_ps(peak, _mm512_abs_ps(load_bf16(values + i)));
    float unit = _mm512_reduce_max_ps(peak) / (codec == RZ_CODEC_INT8 ? 127.0f : 448.0f);
    unit = unit > FLT_MIN ? unit : FLT_MIN;
    *scale = unit;
    __m512 divisor = _mm512_set1_ps(unit);
    for (long i = 0; i < count; i += LANES) {
        __m512 scaled = _mm512_div_ps(load_bf16(values + i), divisor);
        __m128i code = codec == RZ_CODEC_INT8 ? to_int8(scaled) : to_fp8(scaled);
        _mm_storeu_si128((__m128i *)((uint8_t *)codes + i), code);
    }
}

void rz_compress_plane(const rz_cache *cache, long count, long hot, long cold)
{
    const bf16 *from = cache->hot + hot * count;
    if (cache->codec == RZ_CODEC_NONE)
        memcpy((bf16 *)cache->codes + cold * count, from, (size_t)count * sizeof(bf16));
    else
        rz_encode(cache->codec, from, count, (uint8_t *)cache->codes + cold * count, (float *)cache->scales + cold);
}
