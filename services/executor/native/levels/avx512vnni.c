/* AVX-512 with VNNI: Intel since Cascade Lake and Ice Lake. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni")
#define RZ_LEVEL avx512vnni
#include "kernels.h"
#endif
