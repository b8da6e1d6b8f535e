/* The level amx over a model of its instructions, for processors that have AVX-512 with bf16 and no AMX. Source: Intel
 * 64 and IA-32 Architectures Software Developer's Manual, volume 2: LDTILECFG, TILELOADD, TDPBF16PS, TDPBUSD. */
#pragma GCC target("avx2,fma,f16c,avx512f,avx512bw,avx512vl,avx512dq,avx512vnni,avx512bf16")
#define __AMX_BF16__ 1
#define __AMX_INT8__ 1
#include <immintrin.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

typedef struct {
    uint8_t palette, start_row, reserved[14];
    uint16_t row_bytes[16];
    uint8_t rows[16];
} modelled_shapes;

static _Thread_local modelled_shapes modelled;
static _Thread_local uint32_t modelled_tiles[8][16][16];

static void model_fault(int faults)
{
    if (faults) {
        printf("differs: a tile is used otherwise than it was shaped\n");
        exit(1);
    }
}

static void model_loadconfig(const void *shapes)
{
    memcpy(&modelled, shapes, 64);
    model_fault(modelled.palette != 1 || modelled.start_row);
    for (int tile = 0; tile < 8; tile++)
        model_fault(modelled.rows[tile] < 1 || modelled.rows[tile] > 16 || modelled.row_bytes[tile] > 64);
    memset(modelled_tiles, 0, sizeof modelled_tiles);
}

static void model_release(void)
{
    memset(&modelled, 0, sizeof modelled);
}

static void model_loadd(int tile, const void *from, long stride)
{
    model_fault(!modelled.palette);
    for (int row = 0; row < modelled.rows[tile]; row++)
        memcpy(modelled_tiles[tile][row], (const char *)from + row * stride, modelled.row_bytes[tile]);
}

static void model_stored(int tile, void *to, long stride)
{
    model_fault(!modelled.palette);
    for (int row = 0; row < modelled.rows[tile]; row++)
        memcpy((char *)to + row * stride, modelled_tiles[tile][row], modelled.row_bytes[tile]);
}

static float model_bf16(uint32_t pair, int which)
{
    uint32_t bits = which ? pair & 0xffff0000u : pair << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

static void model_dpbf16ps(int c, int a, int b)
{
    model_fault(modelled.rows[c] != modelled.rows[a] || modelled.rows[b] * 4 != modelled.row_bytes[a]);
    for (int m = 0; m < modelled.rows[c]; m++)
        for (int n = 0; n < modelled.row_bytes[c] / 4; n++) {
            float sums[2] = { 0, 0 }, before;
            for (int k = 0; k < modelled.rows[b]; k++)
                for (int which = 0; which < 2; which++)
                    sums[which] = __builtin_fmaf(model_bf16(modelled_tiles[a][m][k], which),
                                                 model_bf16(modelled_tiles[b][k][n], which), sums[which]);
            memcpy(&before, &modelled_tiles[c][m][n], sizeof before);
            before += sums[0] + sums[1];
            memcpy(&modelled_tiles[c][m][n], &before, sizeof before);
        }
}

static void model_dpbusd(int c, int a, int b)
{
    model_fault(modelled.rows[c] != modelled.rows[a] || modelled.rows[b] * 4 != modelled.row_bytes[a]);
    for (int m = 0; m < modelled.rows[c]; m++)
        for (int n = 0; n < modelled.row_bytes[c] / 4; n++)
            for (int k = 0; k < modelled.rows[b]; k++)
                for (int byte = 0; byte < 32; byte += 8)
                    modelled_tiles[c][m][n] += (uint32_t)((int)(modelled_tiles[a][m][k] >> byte & 255)
                                                          * (int8_t)(modelled_tiles[b][k][n] >> byte & 255));
}

#undef _tile_loadconfig
#undef _tile_release
#undef _tile_loadd
#undef _tile_stored
#undef _tile_dpbf16ps
#undef _tile_dpbusd
#define _tile_loadconfig model_loadconfig
#define _tile_release model_release
#define _tile_loadd model_loadd
#define _tile_stored model_stored
#define _tile_dpbf16ps model_dpbf16ps
#define _tile_dpbusd model_dpbusd

#define RZ_LEVEL amx
#include "../../../../../services/executor/native/levels/kernels.h"
