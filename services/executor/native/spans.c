/* See spans.h. */
#include "spans.h"

#include "quantized_quads.h"

/* A panel's share of up to SPANS_AT_ONCE spans. */
typedef struct {
    _Alignas(LINE_BYTES) int32_t scales[SPAN_GROUPS][PANEL]; /* of groups; where products are summed in 16 bits, each twice */
    int32_t least[SPAN_GROUPS / 2][PANEL];                   /* minimums of two groups, 16 bits each; `pairs` of a span */
    float scale[SPANS_AT_ONCE][PANEL], minimum[SPANS_AT_ONCE][PANEL]; /* of each span; minimums are negative */
    slab of;                                                 /* codes */
    long first, blocks; /* of the panel, and here */
    int minimums;       /* whether there are any */
    int pairs;          /* of groups that have minimums of their own, of a span */
    int short_sums;     /* whether scales are 16 bits, to multiply sums of 16 */
    long each;          /* blocks of a span */
    int bits;           /* of codes that no whole number scales, as they are multiplied; else 0 */
    int wide_starts;    /* whether what codes are too large by is subtracted from whole sums, not from those of 16 bits */
} span_slab;

/* What is multiplied: the first row from the span's first column on, and how far the next one is. */
typedef struct {
    const int8_t *codes;
    const float *scales;
    const int32_t *starts, *pairs;
    long stride, apart; /* in elements; of what is kept of each row, to the next span or group: rows lie side by side */
} span_rows;

/* --- a panel's share --------------------------------------------------------------------------------- */

/* 16 whole numbers at `low` and 16 at `high`: two of 16 bits in each lane. */
RZ_INLINE i32 whole_pairs(const uint8_t *low, const uint8_t *high, const int type)
{
    return type == RZ_U8 ? i32_load_pairs_u8(low, high) : i32_load_pairs_i8((const int8_t *)low, (const int8_t *)high);
}

RZ_INLINE i32 whole_at(const uint8_t *from, const int type)
{
    return type == RZ_U8 ? i32_load_u8(from) : i32_load_i8((const int8_t *)from);
}

/* Scales of `groups` groups from `first` on, an even number that begins with an even one, and their minimums, as the whole
 * numbers that they are. Two groups lie side by side: a piece has an even number of them. */
RZ_INLINE void take_whole_scales(const int type, const int minimums, const places *at, long first, int groups, span_slab *to)
{
    const ptrdiff_t least = at->minimums - at->scales;
    for (int i = 0; i < groups; i += 2) {
        const uint8_t *here = group_at(at, at->scales, 1, first + i);
        int32_t *scales = to->scales[i];
#pragma GCC unroll 4
        for (int side = 0; side < 2 * PANEL; side += LANES) { /* of one group, and of the next */
            const i32 scale = whole_at(here + side, type);
            i32_store(scales + side, SUMS_OF_16_BITS ? whole_pairs(here + side, here + side, type)
                                            : to->short_sums ? i32_pair(scale, i32_set1(0))
                                                             : scale);
        }
#pragma GCC unroll 2
        for (int side = 0; side < PANEL && minimums; side += LANES)
            i32_store(to->least[i / 2] + side, whole_pairs(here + least + side, here + least + PANEL + side, type));
    }
}

/* What scales each span. */
static void take_upper_scales(const rz_format *format, const places *at, span_slab *to)
{
    for (long i = 0; i * to->each < to->blocks; i++) {
        const long super = (to->first / to->each + i) * PANEL;
        for (int side = 0; side < PANEL; side += LANES) {
            f32_store(to->scale[i] + side, scales_at(at->supers, format->super_type, super + side));
            if (to->minimums)
                f32_store(to->minimum[i] + side,
                          f32_sub(f32_zero(), scales_at(at->super_minimums, format->super_type, super + side)));
        }
    }
}

/* Of groups, or parts of them, that are spans. */
static void take_group_scales(const rz_format *format, const places *at, span_slab *to)
{
    rz_unpack_scales(format, at, to->first, to->blocks, &to->of);
    for (long i = 0; i * to->each < to->blocks; i++) {
        memcpy(to->scale[i], to->of.scales[i], sizeof to->scale[i]);
        if (to->minimums)
            memcpy(to->minimum[i], to->of.minimums[i], sizeof to->minimum[i]);
    }
}

/* Scales of the blocks [first, first + blocks); codes are taken by what multiplies them. Asks for the scales that come. */
static void take_spans(const rz_format *format, const places *at, long first, long blocks, span_slab *to)
{
    to->first = first;
    to->blocks = blocks;
    for (long piece = (first + PIECE - 1) / PIECE * PIECE; piece < first + blocks; piece += PIECE)
        ask_for(block_at(at, format->bits, piece) + at->ahead - at->head, at->head);
    if (!has_whole_scales(format)) {
        take_group_scales(format, at, to);
        return;
    }
    const int groups = (int)(blocks * BLOCK / format->group);
    const long group = first * BLOCK / format->group;
    take_upper_scales(format, at, to);
    if (format->scale_type == RZ_U8 && to->minimums)
        take_whole_scales(RZ_U8, 1, at, group, groups, to);
    else if (format->scale_type == RZ_I8 && !to->minimums)
        take_whole_scales(RZ_I8, 0, at, group, groups, to);
    else
        take_whole_scales(format->scale_type, to->minimums, at, group, groups, to);
}

/* Codes as they are packed, with what zero points add to them. */
static void take_packed(const rz_format *format, const places *at, span_slab *to)
{
    to->of.codes = block_at(at, format->bits, to->first);
    to->of.head = at->head;
    to->of.ahead = at->ahead;
    if (format->minimums == RZ_ZEROS && format->bits < 8)
        rz_unpack_zeros(format, at, to->first, to->blocks, &to->of);
}

static void take_unpacked(const rz_format *format, const places *at, span_slab *to)
{
    rz_unpack_codes(format, at, to->first, to->blocks, &to->of);
    to->of.head = 0;
    to->of.ahead = 0;
}

/* --- products ------------------------------------------------------------------------------------------ */

/* sums[rows][32] += what span `span` comes to: `wholes`, and with `minimums` the rows' own sums of each two groups, or of
 * all. */
RZ_INLINE void add_span(const int rows, const int sides, const int minimums, const span_slab *from, long span, int side,
                        i32 (*wholes)[2], span_rows x, float *sums)
{
    const float *scales = from->scale[span], *under = from->minimum[span];
    f32 values[ROWS][2];
#pragma GCC unroll 2
    for (int i = 0; i < sides; i++) {
        const f32 scale = f32_load(scales + (side + i) * LANES);
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
            values[row][i] = f32_mul(f32_from_i32(wholes[row][i]), scale);
    }
    if (minimums) {
        i32 least[ROWS][2];
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
            least[row][0] = least[row][1] = i32_set1(from->pairs ? 0 : x.pairs[row]);
        for (int pair = 0; pair < from->pairs; pair++)
#pragma GCC unroll 2
            for (int i = 0; i < sides; i++) {
                const bytes two = bytes_load(from->least[span * from->pairs + pair] + (side + i) * LANES);
#pragma GCC unroll 6
                for (int row = 0; row < rows; row++)
                    least[row][i] =
                        i32_dot_shorts(least[row][i], two, bytes_repeat4(x.pairs + pair * x.apart + row));
            }
#pragma GCC unroll 2
        for (int i = 0; i < sides; i++) {
            const f32 minimum = f32_load(under + (side + i) * LANES);
#pragma GCC unroll 6
            for (int row = 0; row < rows; row++)
                values[row][i] = f32_fma(f32_from_i32(least[row][i]), minimum, values[row][i]);
        }
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < sides; i++) {
            float *to = sums + row * PANEL + (side + i) * LANES;
            f32_store(to, f32_fma(values[row][i], f32_set1(x.scales[row]), f32_load(to)));
        }
}

/* Subtracts what codes are too large by, where sums of 16 bits have no room for it. */
RZ_INLINE i32 subtract_offsets(const span_slab *from, int side, i32 whole, const int32_t *starts, long apart, long first,
                               int groups)
{
    static const int32_t one = 1; /* and a zero, of 16 bits */
    for (long group = first; group < first + groups; group++) {
        const i32 scale = i32_dot_shorts(i32_set1(0), bytes_load(from->scales[group] + side * LANES), bytes_repeat4(&one));
        whole = i32_add(whole, i32_mul(scale, i32_set1(starts[group * apart])));
    }
    return whole;
}

/* Whether sums of 16 columns of codes as they are packed have at most 16 bits: they are multiplied by scales as such. */
RZ_INLINE int sums_are_short(const int bits, const int grouping)
{
    return grouping == BY_HALVED_BLOCKS || (!SUMS_OF_16_BITS && grouping == BY_HALVES && bits <= 4);
}

/* wholes[rows] += those of the columns of one block, or half a block, `half`. */
RZ_INLINE void add_group(const int rows, const int sides, const int bits, const int zeros, const int grouping,
                         const span_slab *from, int side, const uint8_t *codes, const amends *amend, long block, int half,
                         span_rows x, i32 (*wholes)[2])
{
    static const int32_t nothing;
    const int halves = grouping == BY_HALVES || grouping == BY_HALVED_BLOCKS, first = half * QUADS / 2;
    const int end = halves ? first + QUADS / 2 : QUADS;
    const long group = grouping == BY_HALVES ? block * 2 + half : block;
    const int8_t *here = x.codes + block * BLOCK;
    i32 dots[ROWS][2];
    bytes scales[2];
#define ADD_QUADS(into, by, start, step) \
    add_quads(rows, sides, bits, zeros, into, codes, side, amend, from->of.ahead, here, x.stride, first, end, by, start, step)
    if (grouping == BY_SPANS && rows > FEWEST) {
        ADD_QUADS(wholes, NULL, NULL, 0);
        return;
    }
#pragma GCC unroll 2
    for (int i = 0; i < sides && grouping != BY_SPANS; i++)
        scales[i] = bytes_load(from->scales[group] + (side + i) * LANES);
    if (SUMS_OF_16_BITS && grouping != BY_SPANS) {
        ADD_QUADS(wholes, scales, from->wide_starts ? &nothing : x.starts + group * x.apart, from->wide_starts ? 0 : 1);
        return;
    }
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
        dots[row][0] = dots[row][1] = i32_set1(
            grouping == BY_SPANS || grouping == BY_HALVED_BLOCKS ? 0 : x.starts[group * x.apart + row]);
    ADD_QUADS(dots, NULL, NULL, 0);
#undef ADD_QUADS
#pragma GCC unroll 6
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int i = 0; i < sides; i++) {
            if (grouping == BY_SPANS) /* few rows: one product need not wait for all before it */
                wholes[row][i] = i32_add(wholes[row][i], dots[row][i]);
            else if (sums_are_short(bits, grouping))
                wholes[row][i] = i32_dot_shorts(wholes[row][i], bytes_of_i32(dots[row][i]), scales[i]);
            else
                wholes[row][i] =
                    i32_add(wholes[row][i], i32_mul(dots[row][i], i32_load(from->scales[group] + (side + i) * LANES)));
        }
}

/* sums[rows][32] += those of `sides` sides. */
RZ_INLINE void multiply_span_sides(const int rows, const int sides, const int bits, const int zeros, const int grouping,
                                   const span_slab *from, int side, span_rows x, float *sums)
{
    const int halves = grouping == BY_HALVES || grouping == BY_HALVED_BLOCKS ? 2 : 1;
    const uint8_t *codes = from->of.codes;
    amends amend;
    for (long span = 0, block = 0; block < from->blocks; span++) {
        const long end = block + from->each < from->blocks ? block + from->each : from->blocks;
        i32 wholes[ROWS][2];
        if (zeros) {
            const uint8_t *added = from->of.added[span];
            amend = (amends){ .more = { bytes_load(added), bytes_load(added + LINE_BYTES) } };
        }
#pragma GCC unroll 6
        for (int row = 0; row < rows; row++)
            wholes[row][0] = wholes[row][1] = i32_set1(grouping == BY_SPANS ? x.starts[span * x.apart + row] : 0);
        while (block < end) {
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++)
                add_group(rows, sides, bits, zeros, grouping, from, side, codes, &amend, block, half, x, wholes);
            codes += block_bytes(bits);
            if ((from->first + ++block) % PIECE == 0)
                codes += from->of.head;
        }
        if (SUMS_OF_16_BITS && grouping != BY_SPANS && from->wide_starts)
            for (int row = 0; row < rows; row++)
                for (int i = 0; i < sides; i++)
                    wholes[row][i] = subtract_offsets(from, side + i, wholes[row][i], x.starts + row, x.apart,
                                              span * from->each * halves, (int)from->each * halves);
        add_span(rows, sides, from->minimums, from, span, side, wholes, x, sums);
        x.scales += x.apart;
        x.pairs += (from->pairs ? from->pairs : 1) * x.apart;
    }
}

typedef void (*span_function)(const span_slab *, span_rows, float *);

#define SPAN_OF(rows, bits, zeros, grouping) \
    static __attribute__((noinline)) void span_##rows##_##bits##_##zeros##_##grouping(const span_slab *from, span_rows x, \
                                                                                     float *sums) \
    { \
        if (rows <= WHOLE) { \
            multiply_span_sides(rows, 2, bits, zeros, grouping, from, 0, x, sums); \
            return; \
        } \
        for (int side = 0; side < 2; side++) \
            multiply_span_sides(rows, 1, bits, zeros, grouping, from, side, x, sums); \
    }
#define SPANS_OF_FEW(bits, zeros, grouping) SPAN_OF(1, bits, zeros, grouping) SPAN_OF(2, bits, zeros, grouping)
#if VECTORS >= 32
#define SPANS_OF_MORE(bits, zeros, grouping) \
    SPAN_OF(3, bits, zeros, grouping) SPAN_OF(4, bits, zeros, grouping) SPAN_OF(5, bits, zeros, grouping) \
    SPAN_OF(6, bits, zeros, grouping)
#define MORE_SPANS(bits, zeros, grouping) \
    span_3_##bits##_##zeros##_##grouping, span_4_##bits##_##zeros##_##grouping, span_5_##bits##_##zeros##_##grouping, \
        span_6_##bits##_##zeros##_##grouping
#else
#define SPANS_OF_MORE(bits, zeros, grouping) SPAN_OF(3, bits, zeros, grouping) SPAN_OF(4, bits, zeros, grouping)
#define MORE_SPANS(bits, zeros, grouping) span_3_##bits##_##zeros##_##grouping, span_4_##bits##_##zeros##_##grouping
#endif
#define FEW_SPANS(bits, zeros, grouping) NULL, span_1_##bits##_##zeros##_##grouping, span_2_##bits##_##zeros##_##grouping

/* Of unpacked codes: see unpacked_width. */
#if SUMS_OF_16_BITS
#define UNPACKED_SPANS(make) \
    make(8, 0, BY_HALVES) make(8, 0, BY_BLOCKS) make(8, 0, BY_SPANS) make(14, 0, BY_HALVES) make(14, 0, BY_BLOCKS) \
    make(14, 0, BY_SPANS) make(15, 0, BY_BLOCKS) make(15, 0, BY_SPANS) make(16, 0, BY_HALVES)
#elif FASTER_BELOW_128
#define UNPACKED_SPANS(make) \
    make(8, 0, BY_HALVES) make(8, 0, BY_BLOCKS) make(8, 0, BY_SPANS) make(7, 0, BY_HALVES) make(7, 0, BY_BLOCKS) \
    make(7, 0, BY_SPANS)
#else
#define UNPACKED_SPANS(make) make(8, 0, BY_HALVES) make(8, 0, BY_BLOCKS) make(8, 0, BY_SPANS)
#endif
/* Of 4 bits that stand for themselves: see sums_are_short. */
#if SUMS_OF_16_BITS
#define HALVED_BLOCKS(make)
#else
#define HALVED_BLOCKS(make) make(4, 0, BY_HALVED_BLOCKS)
#endif
/* Few rows read codes of every format as they are packed. */
#define PACKED_SPANS(make, grouping) \
    make(2, 0, grouping) make(3, 0, grouping) make(4, 0, grouping) make(5, 0, grouping) make(6, 0, grouping)
/* More rows, where there are registers for their sums, those of the formats that files have: the units that do not
 * multiply unpack meanwhile. */
#if VECTORS >= 32
#define SPANS_OF_FILES(make) \
    make(2, 0, BY_HALVES) make(3, 0, BY_HALVES) make(4, 0, BY_BLOCKS) HALVED_BLOCKS(make) make(5, 0, BY_BLOCKS) \
    make(6, 0, BY_HALVES) make(4, 0, BY_SPANS) make(4, 1, BY_SPANS)
#else
#define SPANS_OF_FILES(make)
#endif

PACKED_SPANS(SPANS_OF_FEW, BY_HALVES) PACKED_SPANS(SPANS_OF_FEW, BY_BLOCKS) PACKED_SPANS(SPANS_OF_FEW, BY_SPANS)
SPANS_OF_FEW(4, 1, BY_SPANS) HALVED_BLOCKS(SPANS_OF_FEW) SPANS_OF_FILES(SPANS_OF_MORE)
UNPACKED_SPANS(SPANS_OF_FEW) UNPACKED_SPANS(SPANS_OF_MORE)

#define FEW_SPANS_AT(bits, zeros, grouping) [zeros][grouping][bits] = { FEW_SPANS(bits, zeros, grouping) },
#define MORE_SPANS_AT(bits, zeros, grouping) [zeros][grouping][bits] = { MORE_SPANS(bits, zeros, grouping) },

/* [zeros][grouping][bits][rows]: up to 2 rows; [rows - 3]: more. NULL: codes are unpacked first. */
static const span_function FEW_ROWS_OF_SPANS[2][4][WIDEST + 1][FEWEST + 1] = {
    PACKED_SPANS(FEW_SPANS_AT, BY_HALVES) PACKED_SPANS(FEW_SPANS_AT, BY_BLOCKS) PACKED_SPANS(FEW_SPANS_AT, BY_SPANS)
    FEW_SPANS_AT(4, 1, BY_SPANS) HALVED_BLOCKS(FEW_SPANS_AT) UNPACKED_SPANS(FEW_SPANS_AT)
};
static const span_function MORE_ROWS_OF_SPANS[2][4][WIDEST + 1][ROWS - FEWEST] = {
    SPANS_OF_FILES(MORE_SPANS_AT) UNPACKED_SPANS(MORE_SPANS_AT)
};

/* How codes are multiplied that are packed, or unpacked. */
RZ_INLINE int span_grouping(const rz_format *format, int packed)
{
    if (!has_whole_scales(format))
        return BY_SPANS;
    if (format->group == BLOCK / 2)
        return BY_HALVES;
    return packed && !SUMS_OF_16_BITS && format->bits == 4 && format->offset == 0 ? BY_HALVED_BLOCKS : BY_BLOCKS;
}

/* The functions of some rows. */
typedef struct {
    const span_function *few, *more;
} span_tiles;

/* What multiplies codes of `bits`; `more` is NULL where more than FEWEST rows have none. */
RZ_INLINE span_tiles span_tiles_of(int grouping, int zeros, int bits)
{
    const span_function *few = FEW_ROWS_OF_SPANS[zeros][grouping][bits], *more = MORE_ROWS_OF_SPANS[zeros][grouping][bits];
    return (span_tiles){ few[1] ? few : NULL, more[0] ? more : NULL };
}

/* What is the same for all spans. */
static void describe_spans(const rz_format *format, span_slab *to)
{
    to->minimums = has_minimums(format);
    to->pairs = has_whole_scales(format) ? (groups_of_span(format) + 1) / 2 : 0;
    to->wide_starts = !starts_are_shorts(format);
    to->short_sums = 0;
    to->each = span_of(format) / BLOCK;
}

/* Of whole spans. */
static long blocks_at_once(const rz_format *format)
{
    return LONGEST_SPAN / span_of(format) * span_of(format) / BLOCK;
}

/* Rows from `first` on, from the first column of span `span` on. */
static span_rows rows_of_spans(const rz_format *format, const rz_rounded *x, long first, long span)
{
    const int groups = groups_of_span(format);
    return (span_rows){ x->codes + first * x->stride + span * span_of(format), x->scales + span * x->rows + first,
                        x->starts + span * groups * x->rows + first,
                        x->pairs + span * ((groups + 1) / 2) * x->rows + first, x->stride, x->rows };
}

/* The rows from row `row` of these on. */
RZ_INLINE span_rows rows_from(span_rows x, long row)
{
    x.codes += row * x.stride;
    x.scales += row;
    x.starts += row;
    x.pairs += row;
    return x;
}

#if defined(__AMX_INT8__)
#include "levels/spans_amx.h"
#endif

static void multiply_slab_of_spans(span_tiles tiles, span_slab *from, span_rows x, long rows, float *sums)
{
    for (long row = 0, left = (rows + ROWS - 1) / ROWS; left; left--) {
        const long count = (rows - row + left - 1) / left;
        span_rows some = rows_from(x, row);
#if SUMS_OF_16_BITS
        int8_t wide[ROWS * SHORTS_ROW];
        if (from->bits == 8) {
            widen_rows(wide, some.codes, x.stride, count, from->blocks * BLOCK);
            some.codes = wide;
        }
#endif
        (count <= FEWEST ? tiles.few[count] : tiles.more[count - FEWEST - 1])(from, some, sums + row * PANEL);
        row += count;
        from->of.ahead = 0;
    }
}

/* Of up to ROWS rows each, by codes as they are packed or unpacked. */
static void multiply_spans(const rz_format *format, const places *at, const rz_rounded *x, long first, long rows, float *sums)
{
    const long blocks = blocks_of(format), most = blocks_at_once(format);
    const int zeros = format->minimums == RZ_ZEROS && format->bits < 8, packed = span_grouping(format, 1);
    span_tiles tiles = { 0 };
    int bits = format->bits;
    if (!format->has_table)
        tiles = span_tiles_of(packed, zeros, bits);
    const int in_place = rows <= FEWEST ? tiles.few != NULL : tiles.few && tiles.more;
    if (!in_place) {
        bits = unpacked_width(unpacked_most(format));
        tiles = span_tiles_of(span_grouping(format, 0), 0, bits);
        if (!tiles.few)
            tiles = span_tiles_of(span_grouping(format, 0), 0, bits = 8);
    }
    span_slab here; /* of which little is used */
    describe_spans(format, &here);
    here.bits = has_whole_scales(format) ? 0 : bits;
    here.short_sums = in_place && sums_are_short(format->bits, packed);
    for (long block = 0; block < blocks; block += most) {
        take_spans(format, at, block, blocks - block < most ? blocks - block : most, &here);
        (in_place ? take_packed : take_unpacked)(format, at, &here);
        multiply_slab_of_spans(tiles, &here, rows_of_spans(format, x, first, block / here.each), rows, sums);
    }
}

void rz_spans_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const rz_rounded *x, long first,
                    long rows, float *sums)
{
    places at = places_of(format, panel);
    at.ahead = coming ? coming - panel : 0;
    memset(sums, 0, (size_t)rows * PANEL * sizeof *sums);
#if defined(__AMX_INT8__)
    if (rows >= (has_whole_scales(format) ? FEWEST_FOR_FACTORS : ROWS_OF_TILE)) {
        multiply_spans_in_tiles(format, &at, x, first, rows, sums);
        return;
    }
#endif
    multiply_spans(format, &at, x, first, rows, sums);
}
