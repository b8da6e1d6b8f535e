/* The tile of gemm.h on AMX: 32 rows by 32 outputs are four tiles of sums, 16 pairs of inputs at a time. A row's sums
 * do not depend on how many rows there are. */
#ifndef RZ_TILE_AMX_H
#define RZ_TILE_AMX_H

#include "instructions_amx.h"

/* Tiles 0 to 3: sums of (rows 0, outputs 0), (0, 16), (16, 0), (16, 16); 4 and 5: rows of x; 6 and 7: weights. */
static void shape_tiles(int rows)
{
    /* Whole tiles are whole in the shapes of two, too. */
    if (shaped_for == rows || (rows == ROWS_OF_TILE && shaped_for > rows))
        return;
    shaped_for = rows;
    const int first = rows < ROWS_OF_TILE ? rows : ROWS_OF_TILE, second = rows > first ? rows - first : 1;
    const int counts[TILE_REGISTERS] = { first, first, second, second, first, second, PAIRS_OF_TILE, PAIRS_OF_TILE };
    tile_shapes shapes = { .palette = 1 };
    for (int i = 0; i < TILE_REGISTERS; i++) {
        shapes.row_bytes[i] = 64;
        shapes.rows[i] = (uint8_t)counts[i];
    }
    tiles_shape(&shapes);
}

/* Adds the products of 16 pairs of inputs to the sums. */
RZ_INLINE void add_pairs(int rows, const bf16 *x, long ldx, const bf16 *panel)
{
    tile_load(6, panel, 2 * PANEL * sizeof(bf16));
    tile_load_passing(4, x, ldx * (long)sizeof(bf16));
    tile_multiply_bf16(0, 4, 6);
    tile_load(7, panel + PANEL, 2 * PANEL * sizeof(bf16));
    tile_multiply_bf16(1, 4, 7);
    if (rows > ROWS_OF_TILE) {
        tile_load_passing(5, x + ROWS_OF_TILE * ldx, ldx * (long)sizeof(bf16));
        tile_multiply_bf16(2, 5, 6);
        tile_multiply_bf16(3, 5, 7);
    }
}

/* The same of fewer pairs, filled up with zeros. */
static void add_last_pairs(int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs)
{
    bf16 inputs[TILE_ROWS][2 * PAIRS_OF_TILE] = { 0 }, weights[PAIRS_OF_TILE][2 * PANEL] = { 0 };
    for (int row = 0; row < rows; row++)
        memcpy(inputs[row], x + row * ldx, (size_t)pairs * 2 * sizeof(bf16));
    memcpy(weights, panel, (size_t)pairs * 2 * PANEL * sizeof(bf16));
    add_pairs(rows, inputs[0], 2 * PAIRS_OF_TILE, weights[0]);
}

/* From those at `c` on, or zero. */
RZ_INLINE void begin_sums(int rows, const float *c, long stride)
{
    const float *second = c + ROWS_OF_TILE * stride / (long)sizeof(float);
    if (!c) {
        tile_zero(0);
        tile_zero(1);
        tile_zero(2);
        tile_zero(3);
        return;
    }
    tile_load(0, c, stride);
    tile_load(1, c + LANES, stride);
    if (rows > ROWS_OF_TILE) {
        tile_load(2, second, stride);
        tile_load(3, second + LANES, stride);
    }
}

static void tile(int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
                 const char *ahead, long step)
{
    const long stride = ldc * (long)sizeof(float);
    float *second = c + ROWS_OF_TILE * ldc;
    shape_tiles(rows);
    begin_sums(rows, add ? c : NULL, stride);
    long pair = 0;
    for (; pair + PAIRS_OF_TILE <= pairs; pair += PAIRS_OF_TILE) {
        for (long byte = 0; byte < step * PAIRS_OF_TILE; byte += 64)
            __builtin_prefetch(ahead + pair * step + byte, 0, 2); /* the first cache is full of what is multiplied */
        add_pairs(rows, x + 2 * pair, ldx, panel + pair * 2 * PANEL);
    }
    if (pair < pairs)
        add_last_pairs(rows, x + 2 * pair, ldx, panel + pair * 2 * PANEL, pairs - pair);
    tile_store(0, c, stride);
    tile_store(1, c + LANES, stride);
    if (rows > ROWS_OF_TILE) {
        tile_store(2, second, stride);
        tile_store(3, second + LANES, stride);
    }
}

#endif
