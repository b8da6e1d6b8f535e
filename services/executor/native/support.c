/* What is asked before any kernel runs. Compiled for any processor, so without vector.h. */
#include "decoder.h"

#include <string.h>

#if defined(__x86_64__)
#include <sys/syscall.h>
#include <unistd.h>

/* Linux lends the registers of AMX to a process that asks for them: Documentation/arch/x86/xstate.rst. */
static int lends_amx(void)
{
    enum { ARCH_REQ_XCOMP_PERM = 0x1023, XTILEDATA = 18 };
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XTILEDATA) == 0;
}

/* Each has all that the next one has, but for avx512vnni: it does without AVX-VNNI's shorter encoding. */
static void add_levels(char *names)
{
    __builtin_cpu_init();
#define HAS(feature) __builtin_cpu_supports(feature)
    const int avx2 = HAS("avx2") && HAS("fma") && HAS("f16c");
    const int avx512 = avx2 && HAS("avx512f") && HAS("avx512bw") && HAS("avx512vl") && HAS("avx512dq") && HAS("avx512vnni");
    const int bf16 = avx512 && HAS("avx512bf16");
    if (bf16 && HAS("amx-tile") && HAS("amx-bf16") && HAS("amx-int8") && lends_amx())
        strcat(names, "amx ");
    if (bf16)
        strcat(names, "avx512bf16 ");
    if (avx512)
        strcat(names, "avx512vnni ");
    if (avx2 && HAS("avxvnni"))
        strcat(names, "avxvnni ");
    if (avx2)
        strcat(names, "avx2 ");
}
#elif defined(__aarch64__)
#include <sys/auxv.h>

static void add_levels(char *names)
{
    enum { DOT_PRODUCTS = 1 << 20, MIXED_SIGNS = 1 << 13, BF16 = 1 << 14 }; /* HWCAP_ASIMDDP, HWCAP2_I8MM, HWCAP2_BF16 */
    const int neon = (getauxval(AT_HWCAP) & DOT_PRODUCTS) != 0;
    if (neon && (getauxval(AT_HWCAP2) & MIXED_SIGNS) && (getauxval(AT_HWCAP2) & BF16))
        strcat(names, "neonbf16 ");
    if (neon)
        strcat(names, "neon ");
}
#else
static void add_levels(char *names)
{
    (void)names;
}
#endif

void rz_levels(char *names)
{
    names[0] = 0;
    add_levels(names);
}

void rz_sizes(int64_t *sizes)
{
    sizes[0] = sizeof(rz_linear);
    sizes[1] = sizeof(rz_layer);
    sizes[2] = sizeof(rz_model);
    sizes[3] = sizeof(rz_step);
    sizes[4] = sizeof(rz_codes);
    sizes[5] = sizeof(rz_experts);
    sizes[6] = sizeof(rz_recurrent);
    sizes[7] = sizeof(rz_latent);
    sizes[8] = sizeof(rz_adapted);
    sizes[9] = sizeof(rz_low_rank);
}
