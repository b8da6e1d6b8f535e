/* Scores of few queries on AMX: tiles of 16 keys by FEW_QUERIES queries. tdpbf16ps makes a sum of the same products in the
 * same order whichever of its operands is the row's. */
#ifndef RZ_FEW_AMX_H
#define RZ_FEW_AMX_H

#include "../attention_few.h"
#include "tile_amx.h"

enum { SHAPED_FOR_FEW = -1 };

/* Tiles 0 to 3: sums, a row for each of 16 keys; 4 and 5: keys; 6: queries, as columns. */
static void shape_few_tiles(void)
{
    if (shaped_for == SHAPED_FOR_FEW)
        return;
    shaped_for = SHAPED_FOR_FEW;
    tile_shapes shapes = { .palette = 1 };
    for (int i = 0; i < TILE_REGISTERS; i++) {
        shapes.row_bytes[i] = i == 4 || i == 5 ? 64 : FEW_QUERIES * 4;
        shapes.rows[i] = ROWS_OF_TILE;
    }
    tiles_shape(&shapes);
}

/* Where 16 keys lie one behind the other: where they are, or copied. */
static const bf16 *together(const bf16 *const *rows, int group, int d, rz_attention_memory *memory)
{
    rows += group * LANES;
    int key = 1;
    while (key < LANES && rows[key] == rows[0] + (long)key * d)
        key++;
    if (key == LANES)
        return rows[0];
    bf16 *copies = memory->keys + (long)group * LANES * d; /* nothing is packed there meanwhile */
    for (key = 0; key < LANES; key++)
        memcpy(copies + key * d, rows[key], (size_t)d * sizeof(bf16));
    return copies;
}

/* Sums [16 keys][FEW_QUERIES] become rows of queries. */
RZ_INLINE void turn_sums_of_few(const float *sums, int first, int count, float *scores)
{
    const __m512i in_order = _mm512_set_epi32(15, 11, 7, 3, 14, 10, 6, 2, 13, 9, 5, 1, 12, 8, 4, 0);
    const __m512 a = f32_load(sums), b = f32_load(sums + LANES), c = f32_load(sums + 2 * LANES), d = f32_load(sums + 3 * LANES);
    const __m512d low = _mm512_castps_pd(_mm512_unpacklo_ps(a, b)), low2 = _mm512_castps_pd(_mm512_unpacklo_ps(c, d));
    const __m512d high = _mm512_castps_pd(_mm512_unpackhi_ps(a, b)), high2 = _mm512_castps_pd(_mm512_unpackhi_ps(c, d));
    const __m512d turned[FEW_QUERIES] = { _mm512_unpacklo_pd(low, low2), _mm512_unpackhi_pd(low, low2),
                                          _mm512_unpacklo_pd(high, high2), _mm512_unpackhi_pd(high, high2) };
#pragma GCC unroll 4
    for (int i = 0; i < FEW_QUERIES; i++)
        if (i >= first && i < first + count)
            f32_store(scores + (i - first) * KEYS, _mm512_permutexvar_ps(in_order, _mm512_castpd_ps(turned[i])));
}

static void score_in_tiles(const bf16 *columns, int first, int count, const bf16 *const *rows, int keys, int d,
                           float *scores, rz_attention_memory *memory, rz_upcoming *ahead)
{
    _Alignas(64) float sums[KEYS / LANES][LANES * FEW_QUERIES];
    const bf16 *groups[KEYS / LANES];
    const int used = (keys + LANES - 1) / LANES;
    const long stride = d * (long)sizeof(bf16), narrow = FEW_QUERIES * sizeof(float);
    for (int group = 0; group < KEYS / LANES; group++)
        groups[group] = group < used ? together(rows, group, d, memory) : groups[0];
    shape_few_tiles();
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int column = 0; column < d; column += 2 * PAIRS_OF_TILE) {
        tile_load(6, columns + column * FEW_QUERIES, narrow);
        tile_load_passing(4, groups[0] + column, stride);
        tile_multiply_bf16(0, 4, 6);
        tile_load_passing(5, groups[1] + column, stride);
        tile_multiply_bf16(1, 5, 6);
        tile_load_passing(4, groups[2] + column, stride);
        tile_multiply_bf16(2, 4, 6);
        tile_load_passing(5, groups[3] + column, stride);
        tile_multiply_bf16(3, 5, 6);
        pull(ahead, 64);
    }
    tile_store(0, sums[0], narrow);
    tile_store(1, sums[1], narrow);
    tile_store(2, sums[2], narrow);
    tile_store(3, sums[3], narrow);
    for (int group = 0; group < used; group++)
        turn_sums_of_few(sums[group], first, count, scores + group * LANES);
}

#endif
