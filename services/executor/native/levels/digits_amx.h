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
    shape_tiles(2 * ROWS_OF_TILE);
    tile_zero(0);
    if (product->quads) {
        const int8_t *codes = product->groups[quarter] + product->offset;
        for (int quad = 0; quad < product->quads; quad += QUADS_OF_TILE) {
            tile_load(4, product->digits + 4 * quad, product->stride);
            tile_load(5, codes + quad * QUAD_BYTES, QUAD_BYTES);
            tile_multiply_signed_unsigned(0, 4, 5);
        }
    } else {
        tile_load(4, product->digits, product->stride);
        tile_load(5, product->groups[0] + product->offset + quarter * QUAD_BYTES, QUAD);
        tile_multiply_bytes(0, 4, 5);
    }
    tile_store(0, product->sums->of[0][0] + quarter * LANES, COLUMNS * sizeof(int32_t));
}

#endif
