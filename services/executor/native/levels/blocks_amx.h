/* Blocks of quantized.h on AMX: tiles of 16 rows by 16 outputs, of bytes, a block's 32 columns at a time.
 *
 *     tiles    products of a block  ─▶  sums [16 rows][16 outputs]  ─▶  vectors: times both scales, added to totals
 *
 * Totals of one side stay in registers over a slab. While tiles multiply a block, the sums of the one before it are stored,
 * and those of the one before that are scaled, a few rows between two instructions of tiles. What a row comes to has the
 * bits that dot products of lanes have: sums are integers, and are scaled in the same order.
 */
#ifndef RZ_BLOCKS_AMX_H
#define RZ_BLOCKS_AMX_H

#include "../quantized_quads.h"
#include "instructions_amx.h"

enum { SHAPED_FOR_BLOCKS = -2, ROWS_WOVEN = 4 /* that are scaled between two instructions of tiles */ };

/* Tiles 0 and 1: sums; 4: rows, of 32 columns; 6: codes, of 8 quads. */
static void shape_block_tiles(void)
{
    if (shaped_for == SHAPED_FOR_BLOCKS)
        return;
    shaped_for = SHAPED_FOR_BLOCKS;
    tile_shapes shapes = { .palette = 1 };
    for (int i = 0; i < TILE_REGISTERS; i++) {
        shapes.row_bytes[i] = i == 4 ? BLOCK : 64;
        shapes.rows[i] = i == 6 ? QUADS : ROWS_OF_TILE;
    }
    tiles_shape(&shapes);
}

/* Whether codes of `format`, less what they are too large by, are bytes with a sign that tiles multiply. */
static int has_block_tiles(const rz_format *format)
{
    const int offset = unpacked_offset(format);
    return !format->floats && format->group == BLOCK && offset <= 128 && unpacked_most(format) - offset <= 128;
}

/* Codes of `blocks` blocks become what they stand for. */
RZ_INLINE void sign_codes(const rz_format *format, const places *at, long first, long blocks, slab *here)
{
    const bytes offset = bytes_set1((uint8_t)unpacked_offset(format));
    uint8_t *to = here->unpacked;
    for (long block = first; block < first + blocks; block++) {
        const uint8_t *from = format->bits == 8 ? block_at(at, 8, block) : to;
        if (format->bits == 8)
            ask_for(from + at->ahead, BLOCK_BYTES);
#pragma GCC unroll 4
        for (int i = 0; i < BLOCK_BYTES; i += LINE_BYTES, to += LINE_BYTES)
            bytes_store(to, _mm512_sub_epi8(bytes_load(from + i), offset));
    }
    here->codes = here->unpacked;
}

typedef int32_t block_sums[ROWS_OF_TILE][LANES];

/* What rows and outputs of one side of a slab are added from, and the totals. */
typedef struct {
    const slab *from;
    int side;
    const int8_t *x;     /* codes of 16 rows, `stride` apart */
    const float *scales; /* of rows, by blocks, `apart` from block to block */
    const float *least;  /* sums of rows, likewise */
    long stride, apart;
} side_of_slab;

/* totals[first, first + ROWS_WOVEN) += products of block `block`. */
RZ_INLINE void scale_rows(const int minimums, const side_of_slab *of, const block_sums products, long block, const int first,
                          f32 *totals)
{
    const f32 scale = f32_load(of->from->scales[block] + of->side * LANES);
    const float *scales = of->scales + block * of->apart, *least = of->least + block * of->apart;
#pragma GCC unroll 4
    for (int row = first; row < first + ROWS_WOVEN; row++) {
        const f32 value = f32_mul(f32_from_i32(i32_load(products[row])), scale);
        totals[row] = f32_fma(value, f32_set1(scales[row]), totals[row]);
        if (minimums)
            totals[row] = f32_fma(f32_set1(least[row]), f32_load(of->from->minimums[block] + of->side * LANES), totals[row]);
    }
}

/* Tile `sums` (0 or 1, by the block) becomes the products of block `block`; tile `before`, those of the block before, are
 * stored, and those of two blocks before are scaled. */
#define MULTIPLY_BLOCK(sums, before, block, stores, scales) \
    do { \
        tile_zero(sums); \
        tile_load(4, of->x + (block) * BLOCK, of->stride); \
        if (scales) \
            scale_rows(minimums, of, products[sums], (block)-2, 0, totals); \
        tile_load(6, codes + (block) * BLOCK_BYTES, 2 * LINE_BYTES); \
        if (scales) \
            scale_rows(minimums, of, products[sums], (block)-2, ROWS_WOVEN, totals); \
        tile_multiply_signed(sums, 4, 6); \
        if (scales) \
            scale_rows(minimums, of, products[sums], (block)-2, 2 * ROWS_WOVEN, totals); \
        if (stores) \
            tile_store(before, products[before], LINE_BYTES); \
        if (scales) \
            scale_rows(minimums, of, products[sums], (block)-2, 3 * ROWS_WOVEN, totals); \
    } while (0)

/* sums[rows from `begin` on] += those of `blocks` blocks: of 16 rows, of which the first may have been added. */
RZ_INLINE void add_side(const int minimums, const side_of_slab *of, long blocks, long begin, float *sums)
{
    block_sums products[2];
    f32 totals[ROWS_OF_TILE];
    const uint8_t *codes = of->from->codes + of->side * LINE_BYTES;
    sums += of->side * LANES;
#pragma GCC unroll 16
    for (int row = 0; row < ROWS_OF_TILE; row++)
        totals[row] = f32_load(sums + row * PANEL);
    MULTIPLY_BLOCK(0, 1, 0L, 0, 0);
    if (blocks > 1)
        MULTIPLY_BLOCK(1, 0, 1L, 1, 0);
    long block = 2;
    for (; block + 1 < blocks; block += 2) {
        MULTIPLY_BLOCK(0, 1, block, 1, 1);
        MULTIPLY_BLOCK(1, 0, block + 1, 1, 1);
    }
    if (block < blocks)
        MULTIPLY_BLOCK(0, 1, block, 1, 1);
    if (blocks % 2)
        tile_store(0, products[0], LINE_BYTES);
    else
        tile_store(1, products[1], LINE_BYTES);
    for (block = blocks > 1 ? blocks - 2 : 0; block < blocks; block++)
#pragma GCC unroll 4
        for (int row = 0; row < ROWS_OF_TILE; row += ROWS_WOVEN)
            scale_rows(minimums, of, products[block % 2], block, row, totals);
#pragma GCC unroll 16
    for (int row = 0; row < ROWS_OF_TILE; row++)
        if (row >= begin)
            f32_store(sums + row * PANEL, totals[row]);
}

RZ_INLINE void multiply_blocks(const int minimums, const rz_format *format, const places *at, const rz_rounded *x, long first,
                               long rows, float *sums)
{
    const long all = blocks_of(format);
    slab here;
    for (long block = 0; block < all; block += SLAB) {
        const long some = all - block < SLAB ? all - block : SLAB;
        rz_unpack_slab(format, at, block, some, &here);
        sign_codes(format, at, block, some, &here);
        for (long begin = 0; begin < rows; begin += ROWS_OF_TILE) {
            const long row = begin + ROWS_OF_TILE < rows ? begin : rows - ROWS_OF_TILE, at_x = first + row;
            side_of_slab of = { &here, 0, x->codes + at_x * x->stride + block * BLOCK, x->scales + block * x->rows + at_x,
                                x->sums + block * x->rows + at_x, x->stride, x->rows };
            for (; of.side < 2; of.side++)
                add_side(minimums, &of, some, begin - row, sums + row * PANEL);
        }
    }
}

/* sums[rows][32] += a panel's, of at least ROWS_OF_TILE rows. */
static __attribute__((noinline)) void multiply_blocks_in_tiles(const rz_format *format, const places *at, const rz_rounded *x,
                                                               long first, long rows, float *sums)
{
    shape_block_tiles();
    if (has_minimums(format))
        multiply_blocks(1, format, at, x, first, rows, sums);
    else
        multiply_blocks(0, format, at, x, first, rows, sums);
}

#endif
