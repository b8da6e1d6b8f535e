/* The products of digits.h on AMX: tiles of 16 rows of digits, which are eight numbers' upper and lower ones, by 16 quads
 * of codes. What a number's row has behind its digits meets codes that are zeros. */
#ifndef RZ_DIGITS_AMX_H
#define RZ_DIGITS_AMX_H

#include "../gemm.h"
#include "tile_amx.h"

enum {
    QUADS_OF_TILE = 16,
    FEWEST_FOR_DIGIT_TILES = 4, /* rows: fewer are sooner multiplied in lanes, whose sums are in registers */
};

_Static_assert(2 * NUMBERS_AT_ONCE == ROWS_OF_TILE, "a tile is the digits of rows that are multiplied at once");

/* Tile 0: sums of 16 columns; 4: digits; 5: codes. All are whole, as two of 16 rows are elsewhere: to shape them anew
 * takes as long as to multiply one. */
static void multiply_in_tiles(const digit_product *product, int quarter)
{
    const long line = COLUMNS * sizeof(int32_t);
    const int quads = product->quads ? product->quads : QUADS_OF_TILE;
    const int8_t *codes = product->groups[product->quads ? quarter : 0] + product->offset + (product->quads ? 0 : quarter * QUAD_BYTES);
    shape_tiles(2 * ROWS_OF_TILE);
    if (product->start)
        tile_load(0, product->start->of[0][0] + quarter * LANES, line);
    else
        tile_zero(0);
    for (int quad = 0; quad < quads; quad += QUADS_OF_TILE) {
        tile_load(4, product->digits + 4 * quad, product->stride);
        tile_load(5, codes + quad * QUAD_BYTES, product->quads ? QUAD_BYTES : QUAD);
        tile_multiply_bytes(0, 4, 5);
    }
    tile_store(0, product->sums->of[0][0] + quarter * LANES, line);
}

#endif
