/* See quantized.h. */
#include "quantized.h"

#include <string.h>

#include "float_codes.h"
#include "quantized_layout.h"

enum {
    ROWS = VECTORS >= 32 ? 6 : 4,  /* of a register tile */
    WHOLE = VECTORS >= 32 ? 6 : 2, /* rows whose sums are in registers over a whole panel; of more, half of it */
    WIDEST = 16,                   /* see WIDTHS */
    FEWEST = 2,                    /* rows that memory bounds: they read codes as they are packed, a piece at a time */
};

/* --- unpacking ----------------------------------------------------------------------------------------- */

/* Brings `bytes` from `from` on to the second cache: in the first they would drive out what is computed with. */
RZ_INLINE void ask_for(const uint8_t *from, const size_t bytes)
{
#pragma GCC unroll 16
    for (size_t i = 0; i < bytes; i += LINE_BYTES)
        __builtin_prefetch(from + i, 0, 2);
}

/* `value`'s bits from `from` on, as many as `mask` has, moved to where `mask` is. */
RZ_INLINE bytes field(bytes value, int from, int mask)
{
    const int by = from - __builtin_ctz((unsigned)mask);
    value = by > 0 ? bytes_right(value, by) : by < 0 ? bytes_left(value, -by) : value;
    return bytes_and(value, bytes_set1((uint8_t)mask));
}

/* The codes of quad `quad`, `side` 0 left, 1 right, of a block of fewer than 8 bits. */
RZ_INLINE bytes quad_codes(const int bits, const uint8_t *block, int quad, int side)
{
    const int low = bits >= 4 ? 4 : 2; /* bits of the first plane */
    const uint8_t *second = block + QUADS * LINE_BYTES, *third = bits == 5 ? second : block + QUADS / 2 * LINE_BYTES;
    bytes codes = low == 4 ? field(bytes_load_once(block + quad * LINE_BYTES), side * 4, 15)
                             : field(bytes_load(block + quad / 2 * LINE_BYTES), (quad % 2 * 2 + side) * 2, 3);
    if (bits == 6)
        codes = bytes_or(
            codes, field(bytes_load(second + quad / 2 * LINE_BYTES), (quad % 2 * 2 + side) * 2, 3 << 4));
    if (bits == 3 || bits == 5)
        codes = bytes_or(
            codes, field(bytes_load(third + quad / 4 * LINE_BYTES), quad % 4 * 2 + side, 1 << low));
    return codes;
}

typedef struct {
    bytes table;   /* of 16 bytes, four times; where there is one */
    bytes more[2]; /* what is added to the codes of each side, for their zero points */
} amends;

RZ_INLINE void unpack_block(const int bits, const int has_table, const int has_zeros, const uint8_t *block,
                            const amends *amend, int first, int end, uint8_t *to)
{
#pragma GCC unroll 8
    for (int quad = first; quad < end; quad++)
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            bytes codes = quad_codes(bits, block, quad, side);
            if (has_table)
                codes = bytes_look_up(amend->table, codes);
            if (has_zeros)
                codes = bytes_add(codes, amend->more[side]);
            bytes_store(to + (quad * 2 + side) * LINE_BYTES, codes);
        }
}

/* Those of the groups of a slab; of a group that is summed in parts, its own for each. `minimums`: whether there are
 * any; `simple`: groups are summed at once, and have no zero points. */
RZ_INLINE void unpack_scales_of(const int type, const int super, const int two, const int minimums, const int simple,
                                const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    const long many = blocks_together(format), halves = format->group == BLOCK / 2 ? 2 : 1;
    const long parts = (blocks * halves + many - 1) / many, begin = first * halves / many;
    /* How many parts a group is summed in: larger ones than MANY blocks. */
    const long times = !simple && format->group > MANY * BLOCK ? format->group / (MANY * BLOCK) : 1;
    const int zeros = !simple && format->minimums == RZ_ZEROS;
    long group = simple || format->group ? begin / times : 0, part = simple ? 0 : begin % times;
    long over = two ? group / format->per : 0, under = two ? group % format->per : 0;
    for (long i = 0; i < parts; i++) {
        const uint8_t *scales = group_at(at, at->scales, type_bytes(type), group);
        const uint8_t *least = group_at(at, at->minimums, zeros ? 1 : type_bytes(type), group);
#pragma GCC unroll 2
        for (int side = 0; side < 2; side++) {
            const long here = side * LANES, there = over * PANEL + side * LANES;
            f32 scale = scales_at(scales, type, here);
            if (two)
                scale = f32_mul(scale, scales_at(at->supers, super, there));
            f32_store(to->scales[i] + side * LANES, scale);
            if (!minimums)
                continue;
            f32 minimum = scales_at(least, zeros ? RZ_U8 : type, here);
            if (zeros || two)
                minimum = f32_mul(minimum, zeros ? scale : scales_at(at->super_minimums, super, there));
            f32_store(to->minimums[i] + side * LANES, f32_sub(f32_zero(), minimum));
        }
        if ((simple || format->group) && ++part == times) {
            part = 0;
            group++;
            if (two && ++under == format->per) {
                under = 0;
                over++;
            }
        }
    }
}

static void unpack_scales(const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    const int type = format->scale_type, super = format->super_type, two = format->per > 0;
    const int minimums = has_minimums(format);
    const int simple = format->group && format->group <= MANY * BLOCK && !(minimums && format->minimums == RZ_ZEROS);
#define UNPACK_SCALES(type, super, two, minimums, simple) \
    unpack_scales_of(type, super, two, minimums, simple, format, at, first, blocks, to)
    if (simple && type == RZ_F16 && !two && !minimums)
        UNPACK_SCALES(RZ_F16, 0, 0, 0, 1);
    else if (simple && type == RZ_F16 && !two)
        UNPACK_SCALES(RZ_F16, 0, 0, 1, 1);
    else if (simple && type == RZ_U8 && two && super == RZ_F16 && minimums)
        UNPACK_SCALES(RZ_U8, RZ_F16, 1, 1, 1);
    else if (simple && type == RZ_I8 && two && super == RZ_F16 && !minimums)
        UNPACK_SCALES(RZ_I8, RZ_F16, 1, 0, 1);
    else
        UNPACK_SCALES(type, super, two, minimums, 0);
}

/* What is added to the codes of one group for its zero points: 2 ** bits less the zero point, in every byte. */
RZ_INLINE void amend_zeros(amends *amend, const uint8_t *zeros, int bits)
{
    for (int side = 0; side < 2; side++) {
        int32_t more[LANES];
        i32 here = i32_sub(i32_set1(1 << bits), i32_load_u8(zeros + side * LANES));
        i32_store(more, i32_mul(here, i32_set1(0x01010101)));
        amend->more[side] = bytes_load(more);
    }
}

/* What zero points add to the codes of a slab. */
static void unpack_zeros(const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    const long many = blocks_together(format);
    for (long i = 0; i * many < blocks; i++) {
        amends amend;
        const long group = format->group ? (first + i * many) * BLOCK / format->group : 0;
        amend_zeros(&amend, group_at(at, at->minimums, 1, group), format->bits);
        bytes_store(to->added[i], amend.more[0]);
        bytes_store(to->added[i] + LINE_BYTES, amend.more[1]);
    }
}

RZ_INLINE void unpack_codes_of(const int bits, const int has_table, const int has_zeros, const rz_format *format,
                            const places *at, long first, long blocks, uint8_t *to)
{
    amends amend = { 0 };
    if (has_table) {
        const int shift = unpacked_offset(format) - (has_zeros ? 1 << bits : 0);
        amend.table = bytes_add(bytes_repeat16(format->table), bytes_set1((uint8_t)shift));
    }
    for (long block = first; block < first + blocks; block++, to += BLOCK_BYTES) {
        const uint8_t *from = block_at(at, bits, block);
        ask_for(from + at->ahead, block_bytes(bits));
        if (has_zeros && format->group == BLOCK / 2) {
            for (int half = 0; half < 2; half++) {
                amend_zeros(&amend, group_at(at, at->minimums, 1, block * 2 + half), bits);
                unpack_block(bits, has_table, has_zeros, from, &amend, half * QUADS / 2, (half + 1) * QUADS / 2, to);
            }
            continue;
        }
        if (has_zeros)
            amend_zeros(&amend, group_at(at, at->minimums, 1, format->group ? block * BLOCK / format->group : 0), bits);
        unpack_block(bits, has_table, has_zeros, from, &amend, 0, QUADS, to);
    }
}

static void unpack_codes(const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    const int zeros = format->minimums == RZ_ZEROS;
    to->codes = to->unpacked;
#define UNPACK_OF(n, table, zeros) unpack_codes_of(n, table, zeros, format, at, first, blocks, to->unpacked)
#define UNPACK(n) \
    case n: \
        if (format->has_table) \
            UNPACK_OF(n, 1, 0); \
        else if (zeros) \
            UNPACK_OF(n, 0, 1); \
        else \
            UNPACK_OF(n, 0, 0); \
        break
    switch (format->bits) {
        UNPACK(2);
        UNPACK(3);
        UNPACK(4);
        UNPACK(5);
        UNPACK(6);
    default:
        to->codes = block_at(at, 8, first);
    }
}

/* --- products ------------------------------------------------------------------------------------------ */

/* What a tile multiplies a slab by: its first row, and how far the next one is. */
typedef struct {
    const int8_t *codes;
    const float *scales, *sums;
    const int32_t *starts;
    long columns, blocks;
} tile_rows;

enum { BY_HALVES, BY_BLOCKS, BY_MANY /* blocks */ };

/* The codes of quad `quad`, `side` 0 left, 1 right, of a block as `bits` says it is: packed, or as WIDTHS has it. Of 8
 * bits a half, `plane` 0 the lower one, where products are summed in 16 bits. */
RZ_INLINE bytes codes_at(const int bits, const uint8_t *block, int quad, int side, int plane)
{
    if (bits < 7)
        return quad_codes(bits, block, quad, side);
    const bytes codes = bytes_load(block + (quad * 2 + side) * LINE_BYTES);
    return SUMS_OF_16_BITS && bits == 8 ? field(codes, plane * 4, 15) : codes;
}

/* dots[row] += quads [from, end) of `sides` sides of a block, from `side` on. */
RZ_INLINE void add_quads(const int rows, const int sides, const int bits, const int zeros, i32 (*dots)[2],
                         const uint8_t *codes, int side, const amends *amend, ptrdiff_t ahead, const int8_t *x,
                         long columns, const int from, const int end)
{
    const int width = bits > 10 ? bits - 10 : bits + zeros, planes = SUMS_OF_16_BITS && width == 8 ? 2 : 1;
    /* How many quads' products fit into sums of 16 bits. */
    const int fit = planes == 2 || width <= 4 ? QUADS : width == 5 ? 4 : width == 6 ? 2 : 1;
    const int run = !SUMS_OF_16_BITS ? 1 : fit < end - from ? fit : end - from;
#pragma GCC unroll 2
    for (int plane = 0; plane < planes; plane++) {
        if (plane) /* loads the activations again: there are no registers to keep them in */
            __asm__("" : "+r"(x));
#pragma GCC unroll 8
        for (int begin = from; begin < end; begin += run) {
            bytes sums[ROWS][2]; /* of 16 bits */
#pragma GCC unroll 8
            for (int quad = begin; quad < begin + run; quad++) {
                bytes here[2];
#pragma GCC unroll 2
                for (int i = 0; i < sides; i++)
                    here[i] = codes_at(bits, codes, quad, side + i, plane);
                if (plane == 0 && side == 0 && (bits < 7 || bits == 8))
                    ask_for(codes + ahead + quad * bits / 4 * LINE_BYTES,
                            (size_t)((quad + 1) * bits / 4 - quad * bits / 4) * LINE_BYTES);
#pragma GCC unroll 2
                for (int i = 0; i < sides && zeros; i++)
                    here[i] = bytes_add(here[i], amend->more[side + i]);
#pragma GCC unroll 6
                for (int row = 0; row < rows; row++) {
                    bytes four = bytes_repeat4(x + row * columns + quad * 4);
#pragma GCC unroll 2
                    for (int i = 0; i < sides; i++) {
                        if (!SUMS_OF_16_BITS) {
                            dots[row][i] = width < 8 ? i32_dot_u7(dots[row][i], here[i], four)
                                                     : i32_dot_u8(dots[row][i], here[i], four);
                            continue;
                        }
                        const bytes two = shorts_dot_u7(here[i], four);
                        sums[row][i] = quad == begin ? two : shorts_add(sums[row][i], two);
                    }
                }
            }
#pragma GCC unroll 6
            for (int row = 0; row < rows && SUMS_OF_16_BITS; row++)
#pragma GCC unroll 2
                for (int i = 0; i < sides; i++)
                    dots[row][i] = i32_add_shorts(dots[row][i], sums[row][i], plane ? 16 : 1);
        }
    }
}

/* sums[rows][32] += those of `sides` sides of a slab of `blocks` blocks, `many` in a group. Every row is summed in the
 * same order, however many rows there are. */
RZ_INLINE void multiply_sides(const int rows, const int sides, const int bits, const int zeros, const int grouping,
                              const int minimums, const slab *from, int side, long blocks, long many, tile_rows x,
                              float *sums)
{
    f32 totals[ROWS][2];
    const uint8_t *codes = from->codes;
    amends amend;
    const int halves = grouping == BY_HALVES ? 2 : 1;
    if (grouping != BY_MANY)
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
            for (int i = 0; i < sides; i++)
                totals[row][i] = f32_load(sums + row * PANEL + (side + i) * LANES);
    for (long block = 0, group = 0; block < blocks;) {
        const long end = grouping == BY_MANY ? (block + many < blocks ? block + many : blocks) : block + 1;
        f32 parts[ROWS][2]; /* of this row's scales or, by halves, of the weight's */
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
            parts[row][0] = parts[row][1] = f32_zero();
        if (zeros)
            amend = (amends){ .more = { bytes_load(from->added[group]), bytes_load(from->added[group] + LINE_BYTES) } };
        for (; block < end; block++, codes += block_bytes(bits))
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++, group += grouping != BY_MANY) {
                i32 dots[ROWS][2];
#pragma GCC unroll 6
                for (int row = 0; row < rows; row++)
                    dots[row][0] = dots[row][1] =
                        i32_set1(x.starts[row * x.blocks * 2 + block * halves + half]);
                const int8_t *here = x.codes + block * BLOCK;
#define ADD_QUADS(first, last) \
    add_quads(rows, sides, bits, zeros, dots, codes, side, &amend, from->ahead, here, x.columns, first, last)
                if (halves == 1)
                    ADD_QUADS(0, QUADS);
                else if (half == 0)
                    ADD_QUADS(0, QUADS / 2);
                else
                    ADD_QUADS(QUADS / 2, QUADS);
                if (grouping == BY_MANY) {
#pragma GCC unroll 6
                    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
                        for (int i = 0; i < sides; i++) {
                            f32 scale = f32_set1(x.scales[row * x.blocks + block]);
                            parts[row][i] = f32_fma(f32_from_i32(dots[row][i]), scale, parts[row][i]);
                        }
                    continue;
                }
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
                                f32_fma(parts[row][i], f32_set1(x.scales[row * x.blocks + block]), totals[row][i]);
                    }
                if (minimums)
#pragma GCC unroll 6
                    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
                        for (int i = 0; i < sides; i++)
                            totals[row][i] =
                                f32_fma(f32_set1(x.sums[row * x.blocks * 2 + group]),
                                        f32_load(from->minimums[group] + (side + i) * LANES), totals[row][i]);
            }
        if (grouping == BY_MANY) {
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
                for (int i = side; i < side + sides; i++) {
                    float *at = sums + row * PANEL + i * LANES;
                    f32 total =
                        f32_fma(parts[row][i - side], f32_load(from->scales[group] + i * LANES), f32_load(at));
                    if (minimums)
                        total = f32_fma(f32_set1(x.sums[row * x.blocks * 2 + group]),
                                        f32_load(from->minimums[group] + i * LANES), total);
                    f32_store(at, total);
                }
            group++;
        }
        if (block % PIECE == 0)
            codes += from->head;
    }
    if (grouping != BY_MANY)
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
            for (int i = 0; i < sides; i++)
                f32_store(sums + row * PANEL + (side + i) * LANES, totals[row][i]);
}

RZ_INLINE void multiply_slab(const int rows, const int bits, const int zeros, const int grouping, const int minimums,
                             const slab *from, long blocks, long many, tile_rows x, float *sums)
{
    if (rows <= WHOLE)
        multiply_sides(rows, 2, bits, zeros, grouping, minimums, from, 0, blocks, many, x, sums);
    else
        for (int side = 0; side < 2; side++)
            multiply_sides(rows, 1, bits, zeros, grouping, minimums, from, side, blocks, many, x, sums);
}

typedef void (*slab_function)(const slab *, long, long, tile_rows, float *);

#define TILE_OF(rows, bits, zeros, grouping, minimums) \
    static __attribute__((noinline)) void slab_##rows##_##bits##_##zeros##_##grouping##_##minimums( \
        const slab *from, long blocks, long many, tile_rows x, float *sums) \
    { \
        multiply_slab(rows, bits, zeros, grouping, minimums, from, blocks, many, x, sums); \
    }
#define EVERY_GROUPING(make, ...) \
    make(__VA_ARGS__, BY_HALVES, 0) make(__VA_ARGS__, BY_HALVES, 1) make(__VA_ARGS__, BY_BLOCKS, 0) \
    make(__VA_ARGS__, BY_BLOCKS, 1) make(__VA_ARGS__, BY_MANY, 0) make(__VA_ARGS__, BY_MANY, 1)
#define EACH_GROUPING(name) \
    { { name(BY_HALVES, 0), name(BY_HALVES, 1) }, { name(BY_BLOCKS, 0), name(BY_BLOCKS, 1) }, \
      { name(BY_MANY, 0), name(BY_MANY, 1) } }
#define FEW_ROWS(bits, zeros, kind) NULL, slab_1_##bits##_##zeros##_##kind, slab_2_##bits##_##zeros##_##kind

/* What `bits` of unpacked codes are: 8; 7, where those are faster; and where products are summed in 16 bits 10 + n, those
 * below 2^n. */
#if SUMS_OF_16_BITS
#define WIDTHS(make) \
    EVERY_GROUPING(make, 8) EVERY_GROUPING(make, 14) make(15, BY_BLOCKS, 0) make(15, BY_BLOCKS, 1) \
    make(15, BY_MANY, 0) make(16, BY_HALVES, 0)
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
static const slab_function TILES[WIDEST + 1][3][2][ROWS + 1] = { WIDTHS(UNPACKED_AT) };

/* Few rows read codes of every format as they are packed; more rows, where there are registers for their sums, those
 * of the formats that files have: the units that do not multiply unpack meanwhile. */
#define PACKED_OF(n, grouping, minimums) \
    TILE_OF(n, 2, 0, grouping, minimums) TILE_OF(n, 3, 0, grouping, minimums) TILE_OF(n, 4, 0, grouping, minimums) \
    TILE_OF(n, 5, 0, grouping, minimums) TILE_OF(n, 6, 0, grouping, minimums)
#define ZEROS_OF(n) TILE_OF(n, 4, 1, BY_BLOCKS, 0) TILE_OF(n, 4, 1, BY_MANY, 0)
#define PACKED(grouping, minimums) \
    { [2] = { FEW_ROWS(2, 0, grouping##_##minimums) }, [3] = { FEW_ROWS(3, 0, grouping##_##minimums) }, \
      [4] = { FEW_ROWS(4, 0, grouping##_##minimums) }, [5] = { FEW_ROWS(5, 0, grouping##_##minimums) }, \
      [6] = { FEW_ROWS(6, 0, grouping##_##minimums) } }
EVERY_GROUPING(PACKED_OF, 1) EVERY_GROUPING(PACKED_OF, 2) ZEROS_OF(1) ZEROS_OF(2)

#if VECTORS >= 32
#define OF_FILES(make) \
    make(2, 0, BY_HALVES, 1) make(3, 0, BY_HALVES, 0) make(4, 0, BY_BLOCKS, 0) make(4, 0, BY_BLOCKS, 1) \
    make(4, 1, BY_BLOCKS, 0) make(4, 0, BY_MANY, 0) make(4, 0, BY_MANY, 1) make(4, 1, BY_MANY, 0) \
    make(5, 0, BY_BLOCKS, 0) make(5, 0, BY_BLOCKS, 1) make(6, 0, BY_HALVES, 0)
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
static const slab_function PACKED_TILES[2][3][2][9][ROWS + 2] = {
    [0] = EACH_GROUPING(PACKED),
    [1][BY_BLOCKS][0][4] = { FEW_ROWS(4, 1, BY_BLOCKS_0) }, [1][BY_MANY][0][4] = { FEW_ROWS(4, 1, BY_MANY_0) },
    OF_FILES(WIDE)
};

RZ_INLINE int grouping_of(const rz_format *format)
{
    return format->group == BLOCK / 2 ? BY_HALVES : blocks_together(format) == 1 ? BY_BLOCKS : BY_MANY;
}

/* How codes are unpacked: see WIDTHS. */
static int unpacked_bits(const rz_format *format)
{
    int most = (format->minimums == RZ_ZEROS ? 2 << format->bits : 1 << format->bits) - 1;
    for (int code = 0; format->has_table && code < 16; code++) {
        const int here = format->table[code] + unpacked_offset(format);
        most = code == 0 || here > most ? here : most;
    }
    if (!SUMS_OF_16_BITS)
        return FASTER_BELOW_128 && most < 128 ? 7 : 8;
    const int bits = most < 16 ? 14 : most < 32 ? 15 : most < 64 ? 16 : 8;
    return TILES[bits][grouping_of(format)][has_minimums(format)][1] ? bits : 8;
}

/* What multiplies up to ROWS of `rows` rows by codes as they are packed, or NULL: they are to be unpacked. */
static const slab_function *packed_tiles(const rz_format *format, long rows)
{
    const int zeros = format->minimums == RZ_ZEROS && format->bits < 8;
    const slab_function *tiles = PACKED_TILES[zeros][grouping_of(format)][has_minimums(format)][format->bits];
    return !format->has_table && tiles[rows <= FEWEST ? 1 : FEWEST + 1] ? tiles : NULL;
}

void rz_quantized_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const rz_rounded *x,
                        long first, long rows, float *sums)
{
    places at = places_of(format, panel);
    at.ahead = coming ? coming - panel : 0;
    const long blocks = blocks_of(format), many = blocks_together(format);
    const slab_function *packed = packed_tiles(format, rows);
    const slab_function *tiles =
        packed ? packed : TILES[unpacked_bits(format)][grouping_of(format)][has_minimums(format)];
    const int in_place = packed || format->bits == 8;
    const int halves = format->group == BLOCK / 2 ? 2 : 1;
    const long most = rows <= FEWEST && format->bits < 8 ? PIECE : SLAB;
    slab here;
    memset(sums, 0, (size_t)rows * PANEL * sizeof *sums);
    for (long block = 0; block < blocks; block += most) {
        const long some = blocks - block < most ? blocks - block : most, group = block * halves / many;
        unpack_scales(format, &at, block, some, &here);
        for (long piece = block; piece < block + some; piece += PIECE)
            ask_for(block_at(&at, format->bits, piece) + at.ahead - at.head, at.head);
        if (in_place) {
            here.codes = block_at(&at, format->bits, block);
            if (packed && format->minimums == RZ_ZEROS)
                unpack_zeros(format, &at, block, some, &here);
        } else {
            unpack_codes(format, &at, block, some, &here);
        }
        here.head = in_place ? at.head : 0;
        here.ahead = in_place ? at.ahead : 0;
        for (long row = 0, left = (rows + ROWS - 1) / ROWS; left; left--) {
            const long count = (rows - row + left - 1) / left, r = first + row;
            tile_rows some_rows = { x->codes + r * x->columns + block * BLOCK, x->scales + r * blocks + block,
                                    x->sums + r * blocks * 2 + group, x->starts + r * blocks * 2 + block * halves,
                                    x->columns, blocks };
            tiles[count](&here, some, many, some_rows, sums + row * PANEL);
            row += count;
            here.ahead = 0;
        }
    }
}

void rz_unpack_slab(const rz_format *format, const places *at, long first, long blocks, slab *to)
{
    unpack_scales(format, at, first, blocks, to);
    unpack_codes(format, at, first, blocks, to);
}
