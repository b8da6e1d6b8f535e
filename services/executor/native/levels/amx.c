/* AMX, products of tiles of bf16 and of bytes: Intel since Sapphire Rapids. */
#if defined(__x86_64__)
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16,amx-tile,amx-bf16,amx-int8")
#define RZ_LEVEL amx
#include "kernels.h"
#endif
