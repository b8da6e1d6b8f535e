/* NEON with products of bf16 and mixed dot products: Graviton 3, Apple M2. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod+bf16+i8mm")
#define RZ_LEVEL neonbf16
#include "kernels.h"
#endif
