/* AVX-512 with products of bf16: AMD since Zen 4, Intel's Cooper Lake. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#define RZ_LEVEL avx512bf16
#include "kernels.h"
#endif
