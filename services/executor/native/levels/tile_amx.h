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

/* What a tile asks for between its instructions: the panel that comes, and the lines that its sums go to. All at once would
 * hold up the tiles that are loaded meanwhile. */
typedef struct {
    const char *panel;
    long bytes; /* of the panel, at a time; 0: nothing */
    rz_sums_end end;
} asking;

enum { ASKED_OF_PAIRS = 4 /* times, of the panel, for 16 pairs of inputs */ };

RZ_INLINE void ask_for_panel(asking *for_tile)
{
    for (long byte = 0; byte < for_tile->bytes; byte += 64)
        __builtin_prefetch(for_tile->panel + byte, 0, 2); /* the first cache is full of what is multiplied */
    for_tile->panel += for_tile->bytes;
}

RZ_INLINE void ask_for_end(asking *for_tile)
{
    rz_sums_end *end = &for_tile->end;
    if (end->rows <= 0)
        return;
    for (long byte = 0; byte < end->bytes; byte += 64)
        __builtin_prefetch(end->at + byte, 1, 3);
    end->at += end->stride;
    end->rows--;
}

/* Adds the products of 16 pairs of inputs to the sums. `more`: whether there are more rows than those of one tile. All
 * tiles are loaded before they are multiplied: loads between products hold these up where another thread of the core uses
 * tiles too. */
RZ_INLINE void add_pairs(const int more, const bf16 *x, long ldx, const bf16 *panel, asking *for_tile)
{
    tile_load(6, panel, 2 * PANEL * sizeof(bf16));
    tile_load_passing(4, x, ldx * (long)sizeof(bf16));
    ask_for_panel(for_tile);
    tile_load(7, panel + PANEL, 2 * PANEL * sizeof(bf16));
    if (more)
        tile_load_passing(5, x + ROWS_OF_TILE * ldx, ldx * (long)sizeof(bf16));
    ask_for_panel(for_tile);
    tile_multiply_bf16(0, 4, 6);
    ask_for_end(for_tile);
    tile_multiply_bf16(1, 4, 7);
    ask_for_panel(for_tile);
    if (more) {
        tile_multiply_bf16(2, 5, 6);
        ask_for_end(for_tile);
        tile_multiply_bf16(3, 5, 7);
    }
    ask_for_panel(for_tile);
}

/* The same of fewer pairs, filled up with zeros. */
static __attribute__((noinline)) void add_last_pairs(int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs)
{
    bf16 inputs[TILE_ROWS][2 * PAIRS_OF_TILE] = { 0 }, weights[PAIRS_OF_TILE][2 * PANEL] = { 0 };
    asking nothing = { 0 };
    for (int row = 0; row < rows; row++)
        memcpy(inputs[row], x + row * ldx, (size_t)pairs * 2 * sizeof(bf16));
    memcpy(weights, panel, (size_t)pairs * 2 * PANEL * sizeof(bf16));
    add_pairs(rows > ROWS_OF_TILE, inputs[0], 2 * PAIRS_OF_TILE, weights[0], &nothing);
}

/* From those at `c` on, or zero. */
RZ_INLINE void begin_sums(const int more, const float *c, long stride)
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
    if (more) {
        tile_load(2, second, stride);
        tile_load(3, second + LANES, stride);
    }
}

RZ_INLINE void multiply_tile(const int more, int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs, float *c,
                             long ldc, int add, asking for_tile)
{
    const long stride = ldc * (long)sizeof(float);
    float *second = c + ROWS_OF_TILE * ldc;
    begin_sums(more, add ? c : NULL, stride);
    long pair = 0;
    for (; pair + PAIRS_OF_TILE <= pairs; pair += PAIRS_OF_TILE)
        add_pairs(more, x + 2 * pair, ldx, panel + pair * 2 * PANEL, &for_tile);
    if (pair < pairs)
        add_last_pairs(rows, x + 2 * pair, ldx, panel + pair * 2 * PANEL, pairs - pair);
    tile_store(0, c, stride);
    tile_store(1, c + LANES, stride);
    if (more) {
        tile_store(2, second, stride);
        tile_store(3, second + LANES, stride);
    }
}

static void tile(int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
                 const char *ahead, long step, rz_sums_end end)
{
    const asking for_tile = { ahead, step * PAIRS_OF_TILE / ASKED_OF_PAIRS, end };
    shape_tiles(rows);
    if (rows > ROWS_OF_TILE)
        multiply_tile(1, rows, x, ldx, panel, pairs, c, ldc, add, for_tile);
    else
        multiply_tile(0, rows, x, ldx, panel, pairs, c, ldc, add, for_tile);
}

static void tiles(int rows, const bf16 *x, long ldx, const bf16 *panel, int panels, long step, long pairs, float *c, long ldc,
                  int add)
{
    const asking nothing = { .bytes = 0 };
    for (; rows > 0; rows -= TILE_ROWS, x += TILE_ROWS * ldx, c += TILE_ROWS * ldc) {
        const int here = rows < TILE_ROWS ? rows : TILE_ROWS;
        shape_tiles(here);
        for (int i = 0; i < panels; i++)
            if (here > ROWS_OF_TILE)
                multiply_tile(1, here, x, ldx, panel + i * step, pairs, c + i * PANEL, ldc, add, nothing);
            else
                multiply_tile(0, here, x, ldx, panel + i * step, pairs, c + i * PANEL, ldc, add, nothing);
    }
}

#endif
