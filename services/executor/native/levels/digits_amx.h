/* The products of digits.h on AMX: tiles of 16 rows of digits, which are eight numbers' upper and lower ones, by 16 quads
 * of codes. What a number's row has behind its digits meets codes that are zeros. */
#ifndef RZ_DIGITS_AMX_H
#define RZ_DIGITS_AMX_H

#include "../gemm.h"
#include "tile_amx.h"

enum { QUADS_OF_TILE = 16 };

_Static_assert(2 * NUMBERS_AT_ONCE == ROWS_OF_TILE, "a tile is the digits of rows that are multiplied at once");

RZ_INLINE void store_waiting(const waiting_quarter *before)
{
    if (!before->to)
        return;
    if (before->tile)
        tile_store(1, before->to, COLUMNS * sizeof(int32_t));
    else
        tile_store(0, before->to, COLUMNS * sizeof(int32_t));
}

#define ADD_DIGITS(sums, digits, codes) \
    do { \
        if (product->quads) \
            tile_multiply_signed_unsigned(sums, digits, codes); \
        else \
            tile_multiply_bytes(sums, digits, codes); \
    } while (0)

/* Tiles 0 and 1, in turns: sums of 16 columns; 4: digits, which stay for all quarters of a product where they are one tile;
 * 5: codes. All are whole, as two of 16 rows are elsewhere: to shape them anew takes as long as to multiply one. */
static void multiply_in_tiles(const digit_product *product, int quarter, waiting_quarter *before)
{
    const int turn = !before->tile, as_columns = product->quads > 0;
    const int8_t *codes = as_columns ? product->groups[quarter] + product->offset
                                     : product->groups[0] + product->offset + quarter * QUAD_BYTES;
    shape_tiles(2 * ROWS_OF_TILE);
    if (product->ahead)
        pull(product->ahead, UPCOMING_OF_QUAD * (as_columns ? product->quads : LANES) / QUARTERS);
    for (int quad = 0; quad == 0 || quad < product->quads; quad += QUADS_OF_TILE) {
        if (quarter == 0 || product->quads > QUADS_OF_TILE)
            tile_load(4, product->digits + 4 * quad, product->stride);
        tile_load(5, codes + quad * QUAD_BYTES, as_columns ? QUAD_BYTES : QUAD);
        if (quad == 0) {
            store_waiting(before);
            if (turn)
                tile_zero(1);
            else
                tile_zero(0);
        }
        if (turn)
            ADD_DIGITS(1, 4, 5);
        else
            ADD_DIGITS(0, 4, 5);
    }
    *before = (waiting_quarter){ product->sums->of[0][0] + quarter * LANES, turn };
}

#endif
