/* What all kernels share: vectors of 16 lanes, bf16 conversion, exp and activations.
 *
 * The kernels are compiled once per level of instructions (levels/). A level's own header has the types and what they
 * do; it is the same set at every level:
 *
 *     f32    16 float32                   i32    16 int32                  lanes  a choice of the 16
 *     bytes  64 bytes: 16 lanes of 4, as products of integers read them
 *     wide   the registers of the processor, WIDTH float32 each, which gemm.c fills with sums
 */
#ifndef RZ_VECTOR_H
#define RZ_VECTOR_H

#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define RZ_INLINE static inline __attribute__((always_inline))

typedef uint16_t bf16;

enum { LANES = 16 /* float32 values of one vector */ };

#if defined(__AVX512F__)
#include "levels/vector_avx512.h"
#elif defined(__AVX2__)
#include "levels/vector_avx2.h"
#else
#include "levels/vector_neon.h"
#endif

RZ_INLINE float bf16_to_float(bf16 value)
{
    union { uint32_t bits; float value; } both = { (uint32_t)value << 16 };
    return both.value;
}

/* Values of two vectors rounded to bf16, as gemm.c multiplies them: bf16, or float32 where the two of a pair take turns. */
RZ_INLINE void f32_store_two_operands(operand *to, f32 a, f32 b)
{
    if (TURNS == 1) {
        f32_store_two_bf16((bf16 *)to, a, b);
        return;
    }
    f32_store((float *)to, f32_as_bf16(a));
    f32_store((float *)to + LANES, f32_as_bf16(b));
}

/* 2^(x - floor(x)), in [1, 2]: of the polynomials of degree 5 that are 1 at 0, the one with the smallest relative error on
 * [0, 1]. */
RZ_INLINE f32 exp2_of_fraction(f32 x)
{
    const f32 part = f32_fraction(x);
    f32 sum = f32_set1(1.867130213e-3f);
    sum = f32_fma(sum, part, f32_set1(9.017030019e-3f));
    sum = f32_fma(sum, part, f32_set1(5.579991332e-2f));
    sum = f32_fma(sum, part, f32_set1(2.401644501e-1f));
    sum = f32_fma(sum, part, f32_set1(6.931513118e-1f));
    return f32_fma(sum, part, f32_set1(1.0f));
}

/* 2^x, relative error below 1.5e-7; 0 for NaN, -inf and all below -126: what is smaller than normal numbers takes many times
 * as long, and every key that a query does not see was so. */
RZ_INLINE f32 exp2_f32(f32 x)
{
    return f32_times_power(exp2_of_fraction(x), x);
}

/* The same of x up to 0. */
RZ_INLINE f32 exp2_nonpositive_f32(f32 x)
{
    return f32_times_nonpositive_power(exp2_of_fraction(x), x);
}

RZ_INLINE f32 exp_f32(f32 x)
{
    return exp2_f32(f32_mul(x, f32_set1(1.44269504f)));
}

RZ_INLINE f32 sigmoid_f32(f32 x)
{
    f32 one = f32_set1(1.0f);
    return f32_div(one, f32_add(one, exp_f32(f32_sub(f32_zero(), x))));
}

/* tanh(x) = 2 sigmoid(2x) - 1: absolute error below 2e-7. */
RZ_INLINE f32 tanh_f32(f32 x)
{
    f32 two = f32_set1(2.0f);
    return f32_fma(two, sigmoid_f32(f32_mul(two, x)), f32_set1(-1.0f));
}

RZ_INLINE f32 silu_f32(f32 x)
{
    return f32_mul(x, sigmoid_f32(x));
}

/* GELU, tanh form: Hendrycks and Gimpel, https://arxiv.org/abs/1606.08415, section 2. */
RZ_INLINE f32 gelu_tanh_f32(f32 x)
{
    f32 cube = f32_mul(f32_mul(x, x), x);
    f32 inner = f32_fma(f32_set1(0.044715f), cube, x);
    /* 0.5 (1 + tanh(y)) = sigmoid(2y) */
    return f32_mul(x, sigmoid_f32(f32_mul(f32_set1(1.5957691216f), inner)));
}

#endif
