/* The level avxvnni over a model of its one instruction, for processors that have AVX2 and not that. Source: Intel 64 and
 * IA-32 Architectures Software Developer's Manual, volume 2: VPDPBUSD. */
#pragma GCC target("avx2,fma,f16c")
#define __AVXVNNI__ 1
#include <immintrin.h>
#include <stdint.h>

static __m256i model_dpbusd(__m256i sum, __m256i a, __m256i b)
{
    int32_t sums[8];
    uint8_t unsigned_bytes[32];
    int8_t signed_bytes[32];
    _mm256_storeu_si256((__m256i *)sums, sum);
    _mm256_storeu_si256((__m256i *)unsigned_bytes, a);
    _mm256_storeu_si256((__m256i *)signed_bytes, b);
    for (int i = 0; i < 32; i++)
        sums[i / 4] += unsigned_bytes[i] * signed_bytes[i];
    return _mm256_loadu_si256((const __m256i *)sums);
}

#define _mm256_dpbusd_avx_epi32 model_dpbusd

#define RZ_LEVEL avxvnni
#include "../../../../../services/executor/native/levels/kernels.h"
