/* What is asked before any kernel runs. Compiled for any x86-64 processor, so without vector.h. */
#include "decoder.h"

/* Whether this processor runs the kernels. */
int rz_supported(void)
{
#if defined(__x86_64__)
    __builtin_cpu_init();
    return __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")
        && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("fma");
#else
    return 0;
#endif
}

void rz_sizes(int64_t *sizes)
{
    sizes[0] = sizeof(rz_linear);
    sizes[1] = sizeof(rz_layer);
    sizes[2] = sizeof(rz_model);
    sizes[3] = sizeof(rz_step);
}
