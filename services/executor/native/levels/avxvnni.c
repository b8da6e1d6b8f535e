/* AVX2 with AVX-VNNI: Intel's client processors since Alder Lake, AMD's since Zen 5. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avxvnni")
#define RZ_LEVEL avxvnni
#include "kernels.h"
#endif
