/* Spans of spans.h on AMX: tiles of 16 rows by 16 outputs, of bytes, 64 columns at a time.
 *
 *     two levels of scales   codes times s[g], less what they are too large by, are two bytes, 256 * upper + lower:
 *                            ┌ lower of left │ upper of left │ lower of right │ upper of right ┐   16 rows by each
 *     larger groups          codes as they are: 32 rows by left and right
 */
#ifndef RZ_SPANS_AMX_H
#define RZ_SPANS_AMX_H

#include "../state.h"
#include "instructions_amx.h"
#include "tile_amx.h"

enum {
    TILE_COLUMNS = 64,
    FEWEST_FOR_FACTORS = 32, /* rows: of fewer, factors take longer to make than they save */
    TILE_BYTES = ROWS_OF_TILE * 64,
};

typedef struct {
    uint8_t lower[TILE_BYTES], upper[TILE_BYTES];
} factors;

/* What the tiles of spans are made of: left, right; and sums. */
typedef struct {
    _Alignas(LINE_BYTES) factors tiles[2][LONGEST_SPAN / TILE_COLUMNS][2]; /* of what is multiplied, and of what comes next */
    int32_t sums[4][ROWS_OF_TILE][LANES];
} span_work;

/* Codes of a quad times the scales of their outputs, each twice as 16 bits. */
RZ_INLINE void store_factors(factors *to, int row, bytes codes, bytes scales, bytes offset)
{
    const bytes low = _mm512_set1_epi16(0xff);
    const bytes even = _mm512_mullo_epi16(_mm512_sub_epi16(bytes_and(codes, low), offset), scales);
    const bytes odd = _mm512_mullo_epi16(_mm512_sub_epi16(bytes_right(codes, 8), offset), scales);
    bytes_store(to->lower + row * LINE_BYTES, bytes_or(bytes_and(even, low), bytes_left(odd, 8)));
    bytes_store(to->upper + row * LINE_BYTES, bytes_or(bytes_right(even, 8), _mm512_andnot_si512(low, odd)));
}

/* Of one side of block `block` of those here. */
RZ_INLINE void make_factors_of(const int bits, const int halves, const int side, const span_slab *from, long block, int offset,
                               factors (*to)[2])
{
    const bytes shift = _mm512_set1_epi16((short)offset);
    const uint8_t *codes = from->of.codes + block * block_bytes(bits);
    if (from->of.head)
        codes += ((from->first + block) / PIECE - from->first / PIECE) * (long)from->of.head;
    if (bits < 8 && side == 0)
        ask_for(codes + from->of.ahead, block_bytes(bits));
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        const i32 scale = i32_load(from->scales[block * halves + half] + side * LANES);
        const bytes scales = i32_pair(scale, scale);
#pragma GCC unroll 8
        for (int i = 0; i < QUADS / halves; i++) {
            const int quad = half * QUADS / halves + i;
            store_factors(&to[block / 2][side], (int)(block % 2) * QUADS + quad, codes_at(bits, codes, quad, side, 0), scales,
                          shift);
        }
    }
}

typedef void (*factor_maker)(const span_slab *, long block, int offset, factors (*)[2]);

#define MAKE_FACTORS(bits, halves, side) \
    static void make_factors_##bits##_##halves##_##side(const span_slab *from, long block, int offset, factors (*to)[2]) \
    { \
        make_factors_of(bits, halves, side, from, block, offset, to); \
    }
#define FACTOR_MAKER(bits, halves, side) [bits][halves][side] = make_factors_##bits##_##halves##_##side,
#define FACTORS_OF(make, bits) make(bits, 1, 0) make(bits, 1, 1) make(bits, 2, 0) make(bits, 2, 1)
#define ALL_FACTORS(make) \
    FACTORS_OF(make, 2) FACTORS_OF(make, 3) FACTORS_OF(make, 4) FACTORS_OF(make, 5) FACTORS_OF(make, 6) FACTORS_OF(make, 8)
ALL_FACTORS(MAKE_FACTORS)

/* By bits, halves of a block that have scales, and sides. */
static const factor_maker FACTOR_MAKERS[9][3][2] = { ALL_FACTORS(FACTOR_MAKER) };

/* Blocks that are made into factors, a side at a time, between the products of others: vectors and tiles overlap only where
 * few instructions of one stand between those of the other. */
typedef struct {
    const span_slab *from;
    factors (*to)[2];
    const factor_maker *make;
    int offset;
    long made, sides; /* of blocks */
} factor_making;

static void take_factors(const rz_format *format, const places *at, long first, long blocks, span_slab *from, factor_making *to)
{
    take_spans(format, at, first, blocks, from);
    (format->has_table ? take_unpacked : take_packed)(format, at, from);
    to->from = from;
    to->made = 0;
    to->sides = 2 * blocks;
}

RZ_INLINE void make_some(factor_making *of)
{
    if (of->made < of->sides) {
        of->make[of->made % 2](of->from, of->made / 2, of->offset, of->to);
        of->made++;
    }
}

/* Sums leave their tiles when the next ones begin: where a tile is stored behind its last product, all wait for it. */
#define BEGIN_SUM(tile, stored) \
    do { \
        if (stored) \
            tile_store(tile, stored[tile], LINE_BYTES); \
        tile_zero(tile); \
    } while (0)

static void store_sums(int32_t (*sums)[ROWS_OF_TILE][LANES])
{
    tile_store(0, sums[0], LINE_BYTES);
    tile_store(1, sums[1], LINE_BYTES);
    tile_store(2, sums[2], LINE_BYTES);
    tile_store(3, sums[3], LINE_BYTES);
}

/* Sums of 16 rows of a span of `tiles` tiles: lower and upper ones of the left outputs, then of the right ones. `stored`:
 * where those before go, or NULL. */
RZ_INLINE void sum_factors(const factors (*of)[2], long tiles, const int8_t *x, long stride,
                           int32_t (*stored)[ROWS_OF_TILE][LANES], factor_making *next)
{
    for (long tile = 0; tile < tiles; tile++, x += TILE_COLUMNS) {
        const factors *left = &of[tile][0], *right = &of[tile][1];
        tile_load_passing(4, x, stride);
        tile_load(5, left->lower, LINE_BYTES);
        if (tile == 0)
            BEGIN_SUM(0, stored);
        tile_multiply_signed_unsigned(0, 4, 5);
        tile_load(6, left->upper, LINE_BYTES);
        if (tile == 0)
            BEGIN_SUM(1, stored);
        tile_multiply_signed(1, 4, 6);
        make_some(next);
        tile_load(7, right->lower, LINE_BYTES);
        if (tile == 0)
            BEGIN_SUM(2, stored);
        tile_multiply_signed_unsigned(2, 4, 7);
        tile_load(5, right->upper, LINE_BYTES);
        if (tile == 0)
            BEGIN_SUM(3, stored);
        tile_multiply_signed(3, 4, 5);
        make_some(next);
    }
}

/* Sums of 16 rows from `x` on, and of 16 from `next` on: left outputs and right ones, of codes as they are. */
RZ_INLINE void sum_codes(const uint8_t *codes, long tiles, const int8_t *x, const int8_t *next, long stride,
                         int32_t (*stored)[ROWS_OF_TILE][LANES])
{
    for (long tile = 0; tile < tiles; tile++, codes += 2 * TILE_BYTES) {
        tile_load_passing(4, x + tile * TILE_COLUMNS, stride);
        tile_load(6, codes, 2 * LINE_BYTES);
        if (tile == 0)
            BEGIN_SUM(0, stored);
        tile_multiply_signed_unsigned(0, 4, 6);
        tile_load(7, codes + LINE_BYTES, 2 * LINE_BYTES);
        if (tile == 0)
            BEGIN_SUM(1, stored);
        tile_multiply_signed_unsigned(1, 4, 7);
        tile_load_passing(5, next + tile * TILE_COLUMNS, stride);
        if (tile == 0)
            BEGIN_SUM(2, stored);
        tile_multiply_signed_unsigned(2, 5, 6);
        if (tile == 0)
            BEGIN_SUM(3, stored);
        tile_multiply_signed_unsigned(3, 5, 7);
    }
}

/* Rows of one tile: the last one's may begin before the end of the one before, as tiles are whole. */
typedef struct {
    long row, begin, end;
} tile_part;

RZ_INLINE tile_part tile_part_of(long begin, long rows)
{
    return (tile_part){ least(begin, rows - ROWS_OF_TILE), begin, least(begin + ROWS_OF_TILE, rows) };
}

/* The same rows, from the first column of the next span on. */
RZ_INLINE span_rows next_span(const span_slab *from, span_rows x)
{
    x.codes += from->each * BLOCK;
    x.scales += x.apart;
    x.starts += x.apart; /* where groups have no scales: else factors have none */
    x.pairs += (from->pairs ? from->pairs : 1) * x.apart;
    return x;
}

enum { ADDED_AT_ONCE = 4 /* rows of a tile */ };

/* Adds `rows` rows of tiles. `at`: lower and upper sums of one side of factors; of codes the sums of both sides. */
RZ_INLINE void add_tile_rows(const int grouping, const int rows, const int minimums, const span_slab *from, long span, int side,
                             span_rows x, const int32_t (*at)[ROWS_OF_TILE][LANES], long row, float *sums)
{
    const int sides = grouping == BY_SPANS ? 2 : 1;
    i32 wholes[ROWS][2];
#pragma GCC unroll 4
    for (int i = 0; i < rows; i++)
#pragma GCC unroll 2
        for (int j = 0; j < sides; j++)
            wholes[i][j] = i32_add(i32_load(at[j][row + i]), grouping == BY_SPANS
                                                                   ? i32_set1(x.starts[i])
                                                                   : _mm512_slli_epi32(i32_load(at[1][row + i]), 8));
    add_span(rows, sides, minimums, from, span, side, wholes, x, sums);
}

/* The rows of one part. `x`: of the span. */
RZ_INLINE void add_tiles(const int grouping, const int minimums, const span_slab *from, long span, int side, span_rows x,
                         const int32_t (*at)[ROWS_OF_TILE][LANES], tile_part part, float *sums)
{
    long row = part.begin;
    for (; row + ADDED_AT_ONCE <= part.end; row += ADDED_AT_ONCE)
        add_tile_rows(grouping, ADDED_AT_ONCE, minimums, from, span, side, rows_from(x, row), at, row - part.row,
                      sums + row * PANEL);
    for (; row < part.end; row++)
        add_tile_rows(grouping, 1, minimums, from, span, side, rows_from(x, row), at, row - part.row, sums + row * PANEL);
}

/* Sums that are in tiles, and not yet added to those of rows. */
typedef struct {
    const span_slab *from; /* NULL: none are */
    long span;
    span_rows x;
    tile_part parts[2]; /* of factors the first alone, of codes none or some of the second */
} waiting_sums;

RZ_INLINE void add_waiting(const int grouping, const int minimums, const waiting_sums *of, span_work *work, float *sums)
{
    const int32_t (*at)[ROWS_OF_TILE][LANES] = (const int32_t (*)[ROWS_OF_TILE][LANES])work->sums;
#pragma GCC unroll 2
    for (int i = 0; i < 2; i++) /* a part, or a side */
        add_tiles(grouping, minimums, of->from, of->span, grouping == BY_SPANS ? 0 : i, of->x, at + i * 2,
                  of->parts[grouping == BY_SPANS ? i : 0], sums);
}

/* The same at the end of a panel. */
RZ_INLINE void add_last(const int grouping, const int minimums, const waiting_sums *of, span_work *work, float *sums)
{
    store_sums(work->sums);
    add_waiting(grouping, minimums, of, work, sums);
}

RZ_INLINE void multiply_factors(const int minimums, const span_slab *from, const factors (*of)[2], span_rows x, long rows,
                                span_work *work, factor_making *next, waiting_sums *waiting, float *sums)
{
    const long tiles = from->each / 2;
    for (long span = 0; span * from->each < from->blocks; span++, of += tiles, x = next_span(from, x))
        for (long begin = 0; begin < rows; begin += ROWS_OF_TILE) {
            const tile_part part = tile_part_of(begin, rows);
            sum_factors(of, tiles, x.codes + part.row * x.stride, x.stride, waiting->from ? work->sums : NULL, next);
            if (waiting->from)
                add_waiting(BY_BLOCKS, minimums, waiting, work, sums);
            *waiting = (waiting_sums){ from, span, x, { part } };
        }
    while (next->made < next->sides)
        make_some(next);
}

RZ_INLINE void multiply_codes(const int minimums, const span_slab *from, span_rows x, long rows, span_work *work,
                              waiting_sums *waiting, float *sums)
{
    const uint8_t *codes = from->of.codes;
    for (long span = 0, left = from->blocks; left > 0; span++, left -= from->each, x = next_span(from, x)) {
        const long blocks = least(left, from->each);
        if (from->of.ahead)
            ask_for(codes + from->of.ahead, (size_t)blocks * BLOCK_BYTES);
        for (long begin = 0; begin < rows; begin += 2 * ROWS_OF_TILE) {
            const tile_part part = tile_part_of(begin, rows), next = tile_part_of(begin + ROWS_OF_TILE, rows);
            sum_codes(codes, (blocks + 1) / 2, x.codes + part.row * x.stride, x.codes + next.row * x.stride, x.stride,
                      waiting->from ? work->sums : NULL);
            if (waiting->from)
                add_waiting(BY_SPANS, minimums, waiting, work, sums);
            *waiting = (waiting_sums){ from, span, x, { part, next } };
        }
        codes += from->each * BLOCK_BYTES;
    }
}

/* Codes, unpacked; those of 8 bits where they lie. They end with whole tiles. */
static void take_codes(const rz_format *format, const places *at, span_slab *from)
{
    take_unpacked(format, at, from);
    from->of.ahead = format->bits == 8 ? at->ahead : 0; /* those of fewer bits were asked for where they were unpacked */
    if (from->blocks % 2 == 0)
        return;
    if (from->of.codes != from->of.unpacked)
        memcpy(from->of.unpacked, from->of.codes, (size_t)from->blocks * BLOCK_BYTES);
    from->of.codes = from->of.unpacked;
    memset(from->of.unpacked + from->blocks * BLOCK_BYTES, 0, BLOCK_BYTES); /* columns of no one */
}

/* Rows by the panel's factors: those of the next spans are made while these are multiplied. */
RZ_INLINE void multiply_panel_of_factors(const int minimums, const rz_format *format, const places *at, const rz_rounded *x,
                                         long first, long rows, float *sums)
{
    const long blocks = blocks_of(format), most = blocks_at_once(format);
    span_work work;
    span_slab slabs[3]; /* whose sums are added, that is multiplied, and that is made ready */
    waiting_sums waiting = { 0 };
    factor_making making = { .make = FACTOR_MAKERS[format->has_table ? 8 : format->bits][format->group == BLOCK / 2 ? 2 : 1],
                             .offset = unpacked_offset(format), .to = work.tiles[0] };
    for (int i = 0; i < 3; i++)
        describe_spans(format, &slabs[i]);
    take_factors(format, at, 0, least(most, blocks), &slabs[0], &making);
    while (making.made < making.sides)
        make_some(&making);
    for (long block = 0, turn = 0; block < blocks; block += most, turn++) {
        span_slab *here = &slabs[turn % 3];
        making.sides = making.made = 0;
        making.to = work.tiles[(turn + 1) % 2];
        if (block + most < blocks)
            take_factors(format, at, block + most, least(most, blocks - block - most), &slabs[(turn + 1) % 3], &making);
        multiply_factors(minimums, here, (const factors (*)[2])work.tiles[turn % 2],
                         rows_of_spans(format, x, first, block / here->each), rows, &work, &making, &waiting, sums);
    }
    add_last(BY_BLOCKS, minimums, &waiting, &work, sums);
}

/* Rows by the panel's codes as they are. */
RZ_INLINE void multiply_panel_of_codes(const int minimums, const rz_format *format, const places *at, const rz_rounded *x,
                                       long first, long rows, float *sums)
{
    span_work work;
    span_slab slabs[2]; /* whose sums are added, and that is multiplied */
    waiting_sums waiting = { 0 };
    describe_spans(format, &slabs[0]);
    describe_spans(format, &slabs[1]);
    /* Codes of 8 bits are read where they lie, which is a piece after the other. */
    for (long block = 0; block < blocks_of(format); block += PIECE) {
        span_slab *here = &slabs[block / PIECE % 2];
        take_spans(format, at, block, least(PIECE, blocks_of(format) - block), here);
        take_codes(format, at, here);
        multiply_codes(minimums, here, rows_of_spans(format, x, first, block / here->each), rows, &work, &waiting, sums);
    }
    add_last(BY_SPANS, minimums, &waiting, &work, sums);
}

/* By what is added: what does not change in a panel is known where rows are added. */
#define MULTIPLY_PANEL(name, multiply, minimums) \
    static __attribute__((noinline)) void name(const rz_format *format, const places *at, const rz_rounded *x, long first, \
                                               long rows, float *sums) \
    { \
        multiply(minimums, format, at, x, first, rows, sums); \
    }
MULTIPLY_PANEL(factors_without_minimums, multiply_panel_of_factors, 0)
MULTIPLY_PANEL(factors_with_minimums, multiply_panel_of_factors, 1)
MULTIPLY_PANEL(codes_without_minimums, multiply_panel_of_codes, 0)
MULTIPLY_PANEL(codes_with_minimums, multiply_panel_of_codes, 1)

static void multiply_spans_in_tiles(const rz_format *format, const places *at, const rz_rounded *x, long first, long rows,
                                    float *sums)
{
    const int whole = has_whole_scales(format);
    shape_tiles(2 * ROWS_OF_TILE);
    if (has_minimums(format))
        (whole ? factors_with_minimums : codes_with_minimums)(format, at, x, first, rows, sums);
    else
        (whole ? factors_without_minimums : codes_without_minimums)(format, at, x, first, rows, sums);
}

#endif
