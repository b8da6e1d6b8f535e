/* See gemm.h. */
#include "gemm.h"

#include <string.h>

RZ_INLINE __m512bh pair_of(const bf16 *x)
{
    int32_t pair;
    memcpy(&pair, x, sizeof pair);
    return (__m512bh)_mm512_set1_epi32(pair);
}

/* Every row is summed in the same order, however many rows there are: what a row comes to does not depend on its
 * neighbours. */
RZ_INLINE void tile(const int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
                    const char *ahead, long step)
{
    __m512 sums[TILE_ROWS][2];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        sums[row][0] = add ? _mm512_loadu_ps(c + row * ldc) : _mm512_setzero_ps();
        sums[row][1] = add ? _mm512_loadu_ps(c + row * ldc + LANES) : _mm512_setzero_ps();
    }
    for (long pair = 0; pair < pairs; pair++) {
        __m512bh left = (__m512bh)_mm512_loadu_si512(panel);
        __m512bh right = (__m512bh)_mm512_loadu_si512(panel + PANEL);
        _mm_prefetch(ahead, _MM_HINT_T0);
        _mm_prefetch(ahead + 64, _MM_HINT_T0);
        ahead += step;
#pragma GCC unroll 12
        for (int row = 0; row < rows; row++) {
            __m512bh both = pair_of(x + row * ldx);
            sums[row][0] = _mm512_dpbf16_ps(sums[row][0], both, left);
            sums[row][1] = _mm512_dpbf16_ps(sums[row][1], both, right);
        }
        x += 2;
        panel += 2 * PANEL;
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++) {
        _mm512_storeu_ps(c + row * ldc, sums[row][0]);
        _mm512_storeu_ps(c + row * ldc + LANES, sums[row][1]);
    }
}

#define TILE_OF(n) \
    static __attribute__((noinline)) void tile_##n( \
        const bf16 *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add, \
        const char *ahead, long step) \
    { \
        tile(n, x, ldx, panel, pairs, c, ldc, add, ahead, step); \
    }

TILE_OF(1) TILE_OF(2) TILE_OF(3) TILE_OF(4) TILE_OF(5) TILE_OF(6)
TILE_OF(7) TILE_OF(8) TILE_OF(9) TILE_OF(10) TILE_OF(11) TILE_OF(12)

typedef void (*tile_function)(const bf16 *, long, const bf16 *, long, float *, long, int, const char *, long);

static const tile_function TILES[TILE_ROWS + 1] = {
    NULL, tile_1, tile_2, tile_3, tile_4, tile_5, tile_6, tile_7, tile_8, tile_9, tile_10, tile_11, tile_12,
};

rz_ahead rz_look_ahead(const bf16 *panel, long tiles)
{
    return (rz_ahead){ (const char *)panel, panel ? 2 * PANEL * (long)sizeof(bf16) / tiles : 0 };
}

void rz_tile(int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
             rz_ahead *ahead)
{
    long step = ahead ? ahead->step : 0;
    TILES[rows](x, ldx, panel, pairs, c, ldc, add, step ? ahead->next : (const char *)x, step);
    if (step)
        ahead->next += step * pairs;
}

size_t rz_packed_bytes(long outputs, long inputs)
{
    size_t panels = (size_t)(outputs + PANEL - 1) / PANEL, pairs = (size_t)(inputs + 1) / 2;
    return panels * pairs * 2 * PANEL * sizeof(bf16);
}

RZ_INLINE bf16 *place(bf16 *packed, long output, long pairs)
{
    return packed + output / PANEL * pairs * 2 * PANEL + output % PANEL * 2;
}

/* 16 rows that become neighbours, a vector at a time; returns the inputs that are done. */
static long pack_vectors(bf16 *to, const bf16 *weights, long inputs, long stride)
{
    const bf16 *rows[LANES];
    for (int row = 0; row < LANES; row++)
        rows[row] = weights + row * stride;
    long k = 0;
    for (; k + 2 * LANES <= inputs; k += 2 * LANES)
        transpose_pairs(rows, (int)k, (int32_t *)to + k / 2 * PANEL, PANEL);
    return k;
}

void rz_pack(bf16 *packed, const bf16 *weights, long rows, long inputs, long stride, long first, long run, long step)
{
    const long pairs = (inputs + 1) / 2;
    for (long row = 0; row < rows;) {
        const long output = first + row / run * step + row % run;
        const long together = row % run + LANES <= run && row + LANES <= rows && output % LANES == 0 ? LANES : 1;
        bf16 *to = place(packed, output, pairs);
        const bf16 *from = weights + row * stride;
        const long done = together == LANES ? pack_vectors(to, from, inputs, stride) : 0;
        for (long i = 0; i < together; i++)
            for (long k = done; k < inputs; k++)
                to[i * 2 + k / 2 * 2 * PANEL + k % 2] = from[i * stride + k];
        row += together;
    }
}

void rz_unpack_row(bf16 *row, const bf16 *packed, long output, long inputs)
{
    long pairs = (inputs + 1) / 2;
    const bf16 *from = place((bf16 *)packed, output, pairs);
    for (long k = 0; k < inputs; k++)
        row[k] = from[k / 2 * 2 * PANEL + k % 2];
}
