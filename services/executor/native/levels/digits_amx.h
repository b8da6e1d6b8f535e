/* The products of digits.h on AMX: tiles of 16 rows of digits, which are eight numbers' upper and lower ones, by 16 quads
 * of codes. What a number's row has behind its digits meets codes that are zeros. */
#ifndef RZ_DIGITS_AMX_H
#define RZ_DIGITS_AMX_H

#include "../gemm.h"
#include "tile_amx.h"

enum {
    NUMBERS_OF_TILE = ROWS_OF_TILE / 2,
    QUADS_OF_TILE = 16,
    FEWEST_FOR_DIGIT_TILES = 8, /* rows: fewer are sooner multiplied in lanes, whose sums are in registers */
};

/* Tiles 0 to 3: sums, of 16 columns each; 4: digits; 5: codes. All are whole, as two of 16 rows are elsewhere: to shape
 * them anew takes as long as to multiply one. What the last reads behind the rows is left. */
static void multiply_tile(const uint8_t *digits, long stride, const int8_t *packed, int quads,
                          int32_t sums[QUARTERS][ROWS_OF_TILE][LANES])
{
    tile_zero(0);
    tile_zero(1);
    tile_zero(2);
    tile_zero(3);
    for (int quad = 0; quad < quads; quad += QUADS_OF_TILE, packed += QUADS_OF_TILE * QUAD) {
        tile_load(4, digits + 4 * quad, stride);
        tile_load(5, packed, QUAD);
        tile_multiply_bytes(0, 4, 5);
        tile_load(5, packed + 64, QUAD);
        tile_multiply_bytes(1, 4, 5);
        tile_load(5, packed + 2 * 64, QUAD);
        tile_multiply_bytes(2, 4, 5);
        tile_load(5, packed + 3 * 64, QUAD);
        tile_multiply_bytes(3, 4, 5);
    }
    tile_store(0, sums[0], 64);
    tile_store(1, sums[1], 64);
    tile_store(2, sums[2], 64);
    tile_store(3, sums[3], 64);
}

static void multiply_in_tiles(int rows, const uint8_t *digits, long stride, const int8_t *packed, int quads,
                              const int32_t *zero, float *c, long ldc)
{
    int32_t sums[QUARTERS][ROWS_OF_TILE][LANES];
    shape_tiles(2 * ROWS_OF_TILE);
    for (int done = 0; done < rows; done += NUMBERS_OF_TILE) {
        const int here = rows - done < NUMBERS_OF_TILE ? rows - done : NUMBERS_OF_TILE;
        multiply_tile(digits + done * 2 * stride, stride, packed, quads, sums);
        for (int row = 0; row < here; row++)
            for (int v = 0; v < QUARTERS; v++)
                f32_store(c + (done + row) * ldc + v * LANES,
                          joined(i32_add(i32_load(sums[v][2 * row]), i32_load(zero + v * LANES)),
                                 i32_load(sums[v][2 * row + 1])));
    }
}

#endif
