/* What all kernels share: the instruction set they are compiled for, bf16 conversion, exp and activations.
 *
 * Include this first: the pragma must stand before <immintrin.h>. Nothing compiled under it may run before
 * rz_supported() (support.c) has said yes.
 */
#ifndef RZ_VECTOR_H
#define RZ_VECTOR_H

#pragma GCC target("avx2,fma,avx512f,avx512bw,avx512vl,avx512dq,avx512bf16")

#include <immintrin.h>
#include <stddef.h>
#include <stdint.h>

#define RZ_INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

enum { LANES = 16 /* float32 values of one vector */ };

RZ_INLINE __m512 load_bf16(const bf16 *from)
{
    __m512i wide = _mm512_cvtepu16_epi32(_mm256_loadu_si256((const __m256i *)from));
    return _mm512_castsi512_ps(_mm512_slli_epi32(wide, 16));
}

/* Rounds to nearest even. */
RZ_INLINE void store_bf16(bf16 *to, __m512 values)
{
    _mm256_storeu_si256((__m256i *)to, (__m256i)_mm512_cvtneps_pbh(values));
}

RZ_INLINE float bf16_to_float(bf16 value)
{
    union { uint32_t bits; float value; } both = { (uint32_t)value << 16 };
    return both.value;
}

/* 2^x, relative error below 2e-7 (Taylor polynomial of degree 6 on [-0.5, 0.5]); 0 for -inf. */
RZ_INLINE __m512 exp2_ps(__m512 x)
{
    x = _mm512_max_ps(x, _mm512_set1_ps(-150.0f));
    __m512 whole = _mm512_roundscale_ps(x, _MM_FROUND_TO_NEAREST_INT | _MM_FROUND_NO_EXC);
    __m512 part = _mm512_sub_ps(x, whole);
    __m512 sum = _mm512_set1_ps(1.5403530e-4f);
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.3333558e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(9.6181291e-3f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(5.5504109e-2f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(2.4022651e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(6.9314718e-1f));
    sum = _mm512_fmadd_ps(sum, part, _mm512_set1_ps(1.0f));
    return _mm512_scalef_ps(sum, whole);
}

RZ_INLINE __m512 exp_ps(__m512 x)
{
    return exp2_ps(_mm512_mul_ps(x, _mm512_set1_ps(1.44269504f)));
}

RZ_INLINE __m512 sigmoid_ps(__m512 x)
{
    __m512 one = _mm512_set1_ps(1.0f);
    return _mm512_div_ps(one, _mm512_add_ps(one, exp_ps(_mm512_sub_ps(_mm512_setzero_ps(), x))));
}

/* tanh(x) = 2 sigmoid(2x) - 1: absolute error below 2e-7. */
RZ_INLINE __m512 tanh_ps(__m512 x)
{
    __m512 two = _mm512_set1_ps(2.0f);
    return _mm512_fmsub_ps(two, sigmoid_ps(_mm512_mul_ps(two, x)), _mm512_set1_ps(1.0f));
}

RZ_INLINE __m512 silu_ps(__m512 x)
{
    return _mm512_mul_ps(x, sigmoid_ps(x));
}

/* GELU, tanh form: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415, section 2. */
RZ_INLINE __m512 gelu_tanh_ps(__m512 x)
{
    __m512 cube = _mm512_mul_ps(_mm512_mul_ps(x, x), x);
    __m512 inner = _mm512_fmadd_ps(_mm512_set1_ps(0.044715f), cube, x);
    /* 0.5 (1 + tanh(y)) = sigmoid(2y) */
    return _mm512_mul_ps(x, sigmoid_ps(_mm512_mul_ps(_mm512_set1_ps(1.5957691216f), inner)));
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

#endif
