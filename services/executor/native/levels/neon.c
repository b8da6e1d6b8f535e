/* NEON with dot products of integers: Graviton 2, Apple M1, Raspberry Pi 5. */
#if defined(__aarch64__)
#pragma GCC target("arch=armv8.2-a+dotprod")
#define RZ_LEVEL neon
#include "kernels.h"
#endif
