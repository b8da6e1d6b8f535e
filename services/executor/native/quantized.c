/* See quantized.h. */
#include "quantized.h"

#include <string.h>

#include "float_codes.h"
#include "quantized_quads.h"
#include "spans.h"

/* --- products ------------------------------------------------------------------------------------------ */

/* What a tile multiplies a slab by: its first row, and how far the next one is. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *starts;
    long stride, apart; /* apart: of what is kept of each row, to the next block or group */
} tile_rows;

/* sums[rows][32] += those of `sides` sides of a slab of `blocks` blocks. Every row is summed in the same order, however
 * many rows there are. */
RZ_INLINE void multiply_sides(const int rows, const int sides, const int bits, const int zeros, const int grouping,
                              const int minimums, const slab *from, int side, long blocks, tile_rows x, float *sums)
{
    f32 totals[ROWS][2];
    const uint8_t *codes = from->codes;
    amends amend;
    const int halves = grouping == BY_HALVES ? 2 : 1;
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < sides; i++)
            totals[row][i] = f32_load(sums + row * PANEL + (side + i) * LANES);
    for (long block = 0, group = 0; block < blocks;) {
        f32 parts[ROWS][2]; /* of the weight's scales, by halves */
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
            parts[row][0] = parts[row][1] = f32_zero();
        if (zeros)
            amend = (amends){ .more = { bytes_load(from->added[group]), bytes_load(from->added[group] + LINE_BYTES) } };
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++, group++) {
            i32 dots[ROWS][2];
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++)
                dots[row][0] = dots[row][1] = i32_set1(x.starts[group * x.apart + row]);
            const int8_t *here = x.codes + block * BLOCK;
#define ADD_QUADS(first, last) \
    add_quads(rows, sides, bits, zeros, dots, codes, side, &amend, from->ahead, here, x.stride, first, last, NULL, NULL, 0)
            if (halves == 1)
                ADD_QUADS(0, QUADS);
            else if (half == 0)
                ADD_QUADS(0, QUADS / 2);
            else
                ADD_QUADS(QUADS / 2, QUADS);
#undef ADD_QUADS
            f32 scales[2];
#pragma GCC unroll 2
            for (int i = 0; i < sides; i++)
                scales[i] = f32_load(from->scales[group] + (side + i) * LANES);
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
                for (int i = 0; i < sides; i++) {
                    parts[row][i] = f32_fma(f32_from_i32(dots[row][i]), scales[i], parts[row][i]);
                    if (half + 1 == halves)
                        totals[row][i] =
                            f32_fma(parts[row][i], f32_set1(x.scales[block * x.apart + row]), totals[row][i]);
                }
            if (minimums)
#pragma GCC unroll 6
                for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
                    for (int i = 0; i < sides; i++)
                        totals[row][i] =
                            f32_fma(f32_set1(x.sums[group * x.apart + row]),
                                    f32_load(from->minimums[group] + (side + i) * LANES), totals[row][i]);
        }
        codes += block_bytes(bits);
        if (++block % PIECE == 0)
            codes += from->head;
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < sides; i++)
            f32_store(sums + row * PANEL + (side + i) * LANES, totals[row][i]);
}

RZ_INLINE void multiply_slab(const int rows, const int bits, const int zeros, const int grouping, const int minimums,
                             const slab *from, long blocks, tile_rows x, float *sums)
{
    if (rows <= WHOLE)
        multiply_sides(rows, 2, bits, zeros, grouping, minimums, from, 0, blocks, x, sums);
    else
        for (int side = 0; side < 2; side++)
            multiply_sides(rows, 1, bits, zeros, grouping, minimums, from, side, blocks, x, sums);
}

typedef void (*slab_function)(const slab *, long, tile_rows, float *);

#define TILE_OF(rows, bits, zeros, grouping, minimums) \
    static __attribute__((noinline)) void slab_##rows##_##bits##_##zeros##_##grouping##_##minimums( \
        const slab *from, long blocks, tile_rows x, float *sums) \
    { \
        multiply_slab(rows, bits, zeros, grouping, minimums, from, blocks, x, sums); \
    }
#define EVERY_GROUPING(make, ...) \
    make(__VA_ARGS__, BY_HALVES, 0) make(__VA_ARGS__, BY_HALVES, 1) make(__VA_ARGS__, BY_BLOCKS, 0) \
    make(__VA_ARGS__, BY_BLOCKS, 1)
#define EACH_GROUPING(name) \
    { { name(BY_HALVES, 0), name(BY_HALVES, 1) }, { name(BY_BLOCKS, 0), name(BY_BLOCKS, 1) } }
#define FEW_ROWS(bits, zeros, kind) NULL, slab_1_##bits##_##zeros##_##kind, slab_2_##bits##_##zeros##_##kind

/* Of unpacked codes: see unpacked_width. */
#if SUMS_OF_16_BITS
#define WIDTHS(make) \
    EVERY_GROUPING(make, 8) EVERY_GROUPING(make, 14) make(15, BY_BLOCKS, 0) make(15, BY_BLOCKS, 1) make(16, BY_HALVES, 0)
#elif FASTER_BELOW_128
#define WIDTHS(make) EVERY_GROUPING(make, 8) EVERY_GROUPING(make, 7)
#else
#define WIDTHS(make) EVERY_GROUPING(make, 8)
#endif
#if VECTORS >= 32
#define MORE_ROWS_OF(bits, grouping, minimums) \
    TILE_OF(5, bits, 0, grouping, minimums) TILE_OF(6, bits, 0, grouping, minimums)
#define MORE_ROWS(bits, kind) , slab_5_##bits##_0_##kind, slab_6_##bits##_0_##kind
#else
#define MORE_ROWS_OF(bits, grouping, minimums)
#define MORE_ROWS(bits, kind)
#endif
#define UNPACKED_OF(bits, grouping, minimums) \
    TILE_OF(1, bits, 0, grouping, minimums) TILE_OF(2, bits, 0, grouping, minimums) \
    TILE_OF(3, bits, 0, grouping, minimums) TILE_OF(4, bits, 0, grouping, minimums) \
    MORE_ROWS_OF(bits, grouping, minimums)
#define UNPACKED_AS(bits, kind) \
    { FEW_ROWS(bits, 0, kind), slab_3_##bits##_0_##kind, slab_4_##bits##_0_##kind MORE_ROWS(bits, kind) }
#define UNPACKED_AT(bits, grouping, minimums) [bits][grouping][minimums] = UNPACKED_AS(bits, grouping##_##minimums),
WIDTHS(UNPACKED_OF)

/* [bits][grouping][minimums][rows] */
static const slab_function TILES[WIDEST + 1][2][2][ROWS + 1] = { WIDTHS(UNPACKED_AT) };

/* Few rows read codes of every format as they are packed; more rows, where there are registers for their sums, those
 * of the formats that files have: the units that do not multiply unpack meanwhile. */
#define PACKED_OF(n, grouping, minimums) \
    TILE_OF(n, 2, 0, grouping, minimums) TILE_OF(n, 3, 0, grouping, minimums) TILE_OF(n, 4, 0, grouping, minimums) \
    TILE_OF(n, 5, 0, grouping, minimums) TILE_OF(n, 6, 0, grouping, minimums)
#define ZEROS_OF(n) TILE_OF(n, 4, 1, BY_BLOCKS, 0)
#define PACKED(grouping, minimums) \
    { [2] = { FEW_ROWS(2, 0, grouping##_##minimums) }, [3] = { FEW_ROWS(3, 0, grouping##_##minimums) }, \
      [4] = { FEW_ROWS(4, 0, grouping##_##minimums) }, [5] = { FEW_ROWS(5, 0, grouping##_##minimums) }, \
      [6] = { FEW_ROWS(6, 0, grouping##_##minimums) } }
EVERY_GROUPING(PACKED_OF, 1) EVERY_GROUPING(PACKED_OF, 2) ZEROS_OF(1) ZEROS_OF(2)

#if VECTORS >= 32
#define OF_FILES(make) \
    make(4, 0, BY_BLOCKS, 0) make(4, 0, BY_BLOCKS, 1) make(4, 1, BY_BLOCKS, 0) make(5, 0, BY_BLOCKS, 0) \
    make(5, 0, BY_BLOCKS, 1)
#define WIDE_OF(bits, zeros, grouping, minimums) \
    TILE_OF(3, bits, zeros, grouping, minimums) TILE_OF(4, bits, zeros, grouping, minimums) \
    TILE_OF(5, bits, zeros, grouping, minimums) TILE_OF(6, bits, zeros, grouping, minimums)
#define WIDE_AT(n, bits, zeros, grouping, minimums) \
    [zeros][grouping][minimums][bits][n] = slab_##n##_##bits##_##zeros##_##grouping##_##minimums,
#define WIDE(bits, zeros, grouping, minimums) \
    WIDE_AT(3, bits, zeros, grouping, minimums) WIDE_AT(4, bits, zeros, grouping, minimums) \
    WIDE_AT(5, bits, zeros, grouping, minimums) WIDE_AT(6, bits, zeros, grouping, minimums)
OF_FILES(WIDE_OF)
#else
#define OF_FILES(make)
#endif

/* [zeros][grouping][minimums][bits][rows]; NULL: they are unpacked first */
static const slab_function PACKED_TILES[2][2][2][9][ROWS + 2] = {
    [0] = EACH_GROUPING(PACKED),
    [1][BY_BLOCKS][0][4] = { FEW_ROWS(4, 1, BY_BLOCKS_0) },
    OF_FILES(WIDE)
};

RZ_INLINE int grouping_of(const rz_format *format)
{
    return format->group == BLOCK / 2 ? BY_HALVES : BY_BLOCKS;
}

/* What `bits` of a format's unpacked codes are. */
static int unpacked_bits(const rz_format *format)
{
    const int bits = unpacked_width(unpacked_most(format));
    return TILES[bits][grouping_of(format)][has_minimums(format)][1] ? bits : 8;
}

/* What multiplies up to ROWS of `rows` rows by codes as they are packed, or NULL: they are to be unpacked. */
static const slab_function *packed_tiles(const rz_format *format, long rows)
{
    const int zeros = format->minimums == RZ_ZEROS && format->bits < 8;
    const slab_function *tiles = PACKED_TILES[zeros][grouping_of(format)][has_minimums(format)][format->bits];
    return !format->has_table && tiles[rows <= FEWEST ? 1 : FEWEST + 1] ? tiles : NULL;
}

#if defined(__AMX_INT8__)
#include "levels/blocks_amx.h"
#endif

long rz_most_together(const rz_format *format)
{
#if defined(__AMX_INT8__)
    if (has_block_tiles(format))
        return MOST_ROUNDED_TOGETHER;
#endif
    return span_of(format) || format->bits == 8 ? MOST_ROUNDED_TOGETHER : 0;
}

void rz_quantized_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const rz_rounded *x,
                        long first, long rows, float *sums)
{
    if (span_of(format)) {
        rz_spans_panel(format, panel, coming, x, first, rows, sums);
        return;
    }
    places at = places_of(format, panel);
    at.ahead = coming ? coming - panel : 0;
    memset(sums, 0, (size_t)rows * PANEL * sizeof *sums);
#if defined(__AMX_INT8__)
    if (rows >= ROWS_OF_TILE && has_block_tiles(format)) {
        multiply_blocks_in_tiles(format, &at, x, first, rows, sums);
        return;
    }
#endif
    const long blocks = blocks_of(format);
    const slab_function *packed = packed_tiles(format, rows);
    const slab_function *tiles =
        packed ? packed : TILES[unpacked_bits(format)][grouping_of(format)][has_minimums(format)];
    const int in_place = packed || format->bits == 8;
    const int halves = format->group == BLOCK / 2 ? 2 : 1;
    const long most = rows <= FEWEST && format->bits < 8 ? PIECE : SLAB;
    slab here;
#if SUMS_OF_16_BITS
    const int bits = packed ? format->bits : unpacked_bits(format);
    int8_t wide[ROWS * SHORTS_ROW];
#endif
    for (long block = 0; block < blocks; block += most) {
        const long some = blocks - block < most ? blocks - block : most;
        rz_unpack_scales(format, &at, block, some, &here);
        for (long piece = block; piece < block + some; piece += PIECE)
            ask_for(block_at(&at, format->bits, piece) + at.ahead - at.head, at.head);
        if (in_place) {
            here.codes = block_at(&at, format->bits, block);
            if (packed && format->minimums == RZ_ZEROS)
                rz_unpack_zeros(format, &at, block, some, &here);
        } else {
            rz_unpack_codes(format, &at, block, some, &here);
        }
        here.head = in_place ? at.head : 0;
        here.ahead = in_place ? at.ahead : 0;
        for (long row = 0, left = (rows + ROWS - 1) / ROWS; left; left--) {
            const long count = (rows - row + left - 1) / left, r = first + row;
            tile_rows some_rows = { x->codes + r * x->stride + block * BLOCK, x->scales + block * x->rows + r,
                                    x->sums + block * halves * x->rows + r, x->starts + block * halves * x->rows + r,
                                    x->stride, x->rows };
#if SUMS_OF_16_BITS
            if (bits == 8) {
                widen_rows(wide, some_rows.codes, x->stride, count, some * BLOCK);
                some_rows.codes = wide;
            }
#endif
            tiles[count](&here, some, some_rows, sums + row * PANEL);
            row += count;
            here.ahead = 0;
        }
    }
}
