/* AVX2 with FMA and F16C: Intel since Haswell, AMD since Excavator and Zen. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c")
#define RZ_LEVEL avx2
#include "kernels.h"
#endif
