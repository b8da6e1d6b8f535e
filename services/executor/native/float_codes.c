/* See float_codes.h. */
#include "float_codes.h"

#include "gemm.h"
#include "quantized_layout.h"

enum {
    SPAN = RZ_FLOAT_SPAN,             /* columns that are summed before they are scaled */
#if defined(__AMX_BF16__)
    SUMS_STAY = 1, MANY_SPANS = 8,    /* whether a row's only group is summed whole; spans that are then unpacked together */
#else
    SUMS_STAY = 0, MANY_SPANS = 1,
#endif
    PAIR = 2 * PANEL,                 /* values of a line, unpacked */
    FEW_ROWS = VECTORS >= 32 ? 8 : 1, /* that are multiplied as codes are unpacked */
    TURNS_OF_FEW = VECTORS < 32 ? 1 : TURNS == 2 ? 2 : 12, /* so often a group is, before it is worth unpacking it for tiles */
};

/* How lines are unpacked: of 4 bits; of 8, in parts; of 8, where tables of 128 bytes are looked up. */
enum { OF_NIBBLES, OF_HALVES, OF_TABLES, WAYS };

/* The two bytes of each value. Of e4m3 the upper one by the sign and three bits of the exponent, the lower one by the
 * rest; `first_*`: what denormals and zeros, codes below 8, differ from that in. */
typedef struct {
    bytes low, high, first_low, first_high;
    bytes words;                         /* the table of 16 twice */
    bytes whole_low[2], whole_high[2]; /* of the codes below 128 */
} decoding;

/* Bits of bf16. */
static int e4m3_below_8(int code)
{
    const union { float value; uint32_t bits; } both = { .value = (float)code / 512 };
    return (int)(both.bits >> 16);
}

#define EIGHT(n) n, n + 1, n + 2, n + 3, n + 4, n + 5, n + 6, n + 7
static const uint8_t BELOW_128[128] = { EIGHT(0), EIGHT(8), EIGHT(16), EIGHT(24), EIGHT(32), EIGHT(40), EIGHT(48),
                                        EIGHT(56), EIGHT(64), EIGHT(72), EIGHT(80), EIGHT(88), EIGHT(96), EIGHT(104),
                                        EIGHT(112), EIGHT(120) };

/* The bytes of e4m3. */
RZ_INLINE void halves_of(const decoding *by, bytes codes, bytes *low, bytes *high)
{
    const bytes rest = bytes_and(codes, bytes_set1(127)), exponent = bytes_and(bytes_right(codes, 4), bytes_set1(15));
    *low = bytes_xor(bytes_and(bytes_left(codes, 4), bytes_set1(0xf0)), bytes_look_up_first(by->first_low, rest));
    *high = bytes_xor(bytes_look_up(by->high, exponent), bytes_look_up_first(by->first_high, rest));
}

static decoding decoding_of(const rz_format *format)
{
    uint8_t low[16], high[16], first_low[16] = { 0 }, first_high[16] = { 0 };
    for (int i = 0; i < 16; i++) {
        low[i] = (uint8_t)format->float_table[i];
        high[i] = (uint8_t)(format->float_table[i] >> 8);
        if (format->floats != RZ_E4M3)
            continue;
        high[i] = (uint8_t)((i & 8) << 4 | (60 + (i & 7))); /* the exponent's bias is 120 less, and its last bit is below */
        first_low[i] = (uint8_t)(i < 8 ? e4m3_below_8(i) ^ i << 4 : 0);
        first_high[i] = (uint8_t)(i < 8 ? e4m3_below_8(i) >> 8 ^ 60 : 0);
    }
    uint16_t words[32];
    memcpy(words, format->float_table, sizeof words / 2);
    memcpy(words + 16, format->float_table, sizeof words / 2);
    decoding made = { .low = bytes_repeat16(low), .high = bytes_repeat16(high), .first_low = bytes_repeat16(first_low),
                      .first_high = bytes_repeat16(first_high), .words = bytes_load(words) };
    for (int i = 0; i < 2; i++)
        halves_of(&made, bytes_load(BELOW_128 + i * LINE_BYTES), &made.whole_low[i], &made.whole_high[i]);
    return made;
}

static int way_of(const rz_format *format)
{
    return format->bits == 4 ? OF_NIBBLES : has_whole_look_ups() ? OF_TABLES : OF_HALVES;
}

#if defined(LOOKS_UP_WORDS)
/* Two pairs of a table of 16: nibble i of word j is value 32i + j. */
RZ_INLINE void unpack_nibbles(const decoding *by, bytes codes, bf16 *to)
{
#pragma GCC unroll 4
    for (int i = 0; i < 4; i++)
        bytes_store(to + i * 2 * LANES, bytes_look_up_words(by->words, i ? bytes_right(codes, 4 * i) : codes));
}
#else
RZ_INLINE void unpack_nibbles(const decoding *by, bytes codes, bf16 *to)
{
    for (int i = 0; i < 2; i++) {
        const bytes index = bytes_and(i ? bytes_right(codes, 4) : codes, bytes_set1(15));
        const bytes low = bytes_look_up(by->low, index), high = bytes_look_up(by->high, index);
        bytes_store(to + i * 2 * LANES, bytes_or(bytes_right(bytes_left(low, 8), 8), bytes_left(high, 8)));
        bytes_store(to + (i + 2) * 2 * LANES, bytes_or(bytes_right(low, 8), bytes_left(bytes_right(high, 8), 8)));
    }
}
#endif

#if defined(LOOKS_UP_WHOLE)
#pragma GCC push_options
#pragma GCC target("avx512vbmi")
#endif

/* Unpacks a line: of 8 bits one pair of inputs, of 4 bits two. */
RZ_INLINE void unpack_line(const int way, const decoding *by, const uint8_t *line, bf16 *to)
{
    const bytes codes = bytes_load(line);
    bytes low, high;
    if (way == OF_NIBBLES) {
        unpack_nibbles(by, codes, to);
        return;
    }
#if defined(LOOKS_UP_WHOLE)
    if (way == OF_TABLES) {
        low = bytes_look_up_whole(by->whole_low, codes);
        high = bytes_look_up_whole(by->whole_high, codes);
        high = bytes_or(high, bytes_and(codes, bytes_set1(128)));
    } else
#endif
        halves_of(by, codes, &low, &high);
    bytes_store(to, bytes_zip_low(low, high));
    bytes_store((char *)to + 64, bytes_zip_high(low, high));
}

RZ_INLINE int width_of(const int way)
{
    return way == OF_NIBBLES ? 4 : 8;
}

/* Asks for the same of the panel that comes, and for the scales of a piece that begins there. */
RZ_INLINE void ask_for_block(const places *at, const int way, const uint8_t *block, long column)
{
    const uint8_t *coming = block + at->ahead;
    for (size_t byte = 0; byte < block_bytes(width_of(way)); byte += LINE_BYTES)
        __builtin_prefetch(coming + byte, 0, 2);
    if (column % (PIECE * BLOCK) == 0)
        for (size_t byte = 0; byte < at->head; byte += LINE_BYTES)
            __builtin_prefetch(coming - at->head + byte, 0, 2);
}

/* The columns [first, end), from the beginning of a block on, as a panel of gemm.h. */
RZ_INLINE void unpack_blocks(const int way, const decoding *by, const places *at, long first, long end, bf16 *to)
{
    for (long column = first; column < end;) {
        const uint8_t *codes = block_at(at, width_of(way), column / BLOCK);
        const long last = column + BLOCK < end ? column + BLOCK : end;
        ask_for_block(at, way, codes, column);
        for (; column < last; column += 16 / width_of(way), codes += LINE_BYTES, to += 8 / width_of(way) * PAIR)
            unpack_line(way, by, codes, to);
    }
}

static __attribute__((noinline)) void unpack_span(const int way, const decoding *by, const places *at, long first,
                                                  long end, bf16 *to)
{
    if (way == OF_NIBBLES)
        unpack_blocks(OF_NIBBLES, by, at, first, end, to);
    else if (way == OF_HALVES)
        unpack_blocks(OF_HALVES, by, at, first, end, to);
#if defined(LOOKS_UP_WHOLE)
    else
        unpack_blocks(OF_TABLES, by, at, first, end, to);
#endif
}

#if !defined(__AMX_BF16__)
/* part[rows][32] of the columns [first, end), as rz_tile sums them; `x` begins with the first. */
RZ_INLINE void multiply_few(const int rows, const int way, const decoding *by, const places *at, const operand *x,
                            long ldx, long first, long end, float *part)
{
    wide sums[FEW_ROWS][PANEL / WIDTH];
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL / WIDTH; v++)
            sums[row][v] = wide_zero();
    for (long column = first; column < end;) {
        const uint8_t *block = block_at(at, width_of(way), column / BLOCK);
        const long last = column / BLOCK * BLOCK + BLOCK < end ? column / BLOCK * BLOCK + BLOCK : end;
        const uint8_t *codes = block + column % BLOCK * width_of(way) / 16 * LINE_BYTES;
        if (column % BLOCK == 0)
            ask_for_block(at, way, block, column);
        for (; column < last; column += 16 / width_of(way), codes += LINE_BYTES) {
            _Alignas(64) bf16 line[2 * PAIR];
            unpack_line(way, by, codes, line);
#pragma GCC unroll 2
            for (int pair = 0; pair < 8 / width_of(way); pair++, x += 2)
#pragma GCC unroll 2
                for (int turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 8
                    for (int v = 0; v < PANEL / WIDTH; v++) {
                        const wide weights = weights_of(line + pair * PAIR + v * 2 * WIDTH, turn);
#pragma GCC unroll 8
                        for (int row = 0; row < rows; row++)
                            sums[row][v] = multiply_add(sums[row][v], operand_of(x + row * ldx, turn), weights);
                    }
        }
    }
#pragma GCC unroll 8
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL / WIDTH; v++)
            wide_store(part + row * PANEL + v * WIDTH, sums[row][v]);
}

typedef void (*few_function)(const decoding *, const places *, const operand *, long, long, long, float *);

#define FEW_OF(n, way) \
    static __attribute__((noinline)) void few_##n##_##way(const decoding *by, const places *at, const operand *x, \
                                                          long ldx, long first, long end, float *part) \
    { \
        multiply_few(n, way, by, at, x, ldx, first, end, part); \
    }
#if defined(LOOKS_UP_WHOLE)
#define EVERY_WAY(n) FEW_OF(n, OF_NIBBLES) FEW_OF(n, OF_HALVES) FEW_OF(n, OF_TABLES)
#else
#define EVERY_WAY(n) FEW_OF(n, OF_NIBBLES) FEW_OF(n, OF_HALVES)
#endif
EVERY_WAY(1)
#if MOST_AT_ONCE > 6
EVERY_WAY(2) EVERY_WAY(3) EVERY_WAY(4) EVERY_WAY(5) EVERY_WAY(6) EVERY_WAY(7) EVERY_WAY(8)
#define FEW(way) \
    { NULL,          few_1_##way, few_2_##way, few_3_##way, few_4_##way, \
      few_5_##way, few_6_##way, few_7_##way, few_8_##way }
#else
#define FEW(way) { NULL, few_1_##way }
#endif

/* [way][rows] */
static const few_function FEW_TILES[WAYS][FEW_ROWS + 1] = {
    FEW(OF_NIBBLES), FEW(OF_HALVES),
#if defined(LOOKS_UP_WHOLE)
    FEW(OF_TABLES),
#endif
};

#endif

#if defined(LOOKS_UP_WHOLE)
#pragma GCC pop_options
#endif

/* Whether a row is summed as a whole, and then scaled. */
RZ_INLINE int sums_whole_rows(const rz_format *format)
{
    return SUMS_STAY && !format->group;
}

/* Columns that are summed before they are scaled. */
RZ_INLINE long columns_together(const rz_format *format)
{
    if (sums_whole_rows(format))
        return format->columns;
    return format->group && format->group < SPAN ? format->group : SPAN;
}

/* Sums of rows that are not yet scaled; of tiles they are while the next ones are multiplied. */
typedef struct {
    long column, rows; /* rows 0: there are none */
    const float *part;
    float *sums;
} waiting_part;

/* sums += part * the scales of the group of `column`. */
RZ_INLINE void add_scaled(const rz_format *format, const places *at, const waiting_part *of)
{
    const long group = format->group ? of->column / format->group : 0;
    const uint8_t *scales = group_at(at, at->scales, type_bytes(format->scale_type), group);
    for (int side = 0; side < PANEL; side += LANES) {
        const f32 scale = scales_at(scales, format->scale_type, side);
        for (long i = side; i < of->rows * PANEL; i += PANEL)
            f32_store(of->sums + i, f32_fma(f32_load(of->part + i), scale, f32_load(of->sums + i)));
    }
}

/* Adds the products of rows with the columns [begin, last), unpacked; those of whole rows are left to scale_sums. */
static void multiply_unpacked(const rz_format *format, const places *at, const bf16 *weights, long begin, long last,
                              const operand *x, long stride, long rows, float *sums)
{
    const int whole = sums_whole_rows(format);
    const long together = columns_together(format);
    float parts[2][TILE_ROWS * PANEL];
    waiting_part waiting = { 0 };
    int turn = 0;
    for (long row = 0, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles; tiles--) {
        const long here = (rows - row + tiles - 1) / tiles;
        for (long first = begin; first < last; first += together, turn = !turn) {
            const long end = first + together < last ? first + together : last;
            rz_tile_operands((int)here, x + row * stride + first, stride, weights + (first - begin) * PANEL,
                             (end - first) / 2, whole ? sums + row * PANEL : parts[turn], PANEL, whole && first, NULL);
            if (whole)
                continue;
            add_scaled(format, at, &waiting);
            waiting = (waiting_part){ first, here, parts[turn], sums + row * PANEL };
        }
        row += here;
    }
    add_scaled(format, at, &waiting);
}

static void scale_sums(const rz_format *format, const places *at, long rows, float *sums)
{
    for (int side = 0; side < PANEL; side += LANES) {
        const f32 scale = scales_at(at->scales, format->scale_type, side);
        for (long i = side; i < rows * PANEL; i += PANEL)
            f32_store(sums + i, f32_mul(f32_load(sums + i), scale));
    }
}

#if !defined(__AMX_BF16__)
/* Few rows multiply what was just unpacked. */
static void multiply_as_unpacked(const rz_format *format, const places *at, const decoding *by, const operand *x, long stride,
                                 long rows, float *sums)
{
    float part[FEW_ROWS * PANEL];
    places again = *at;
    again.ahead = 0;
    const long columns = format->columns, together = columns_together(format);
    for (long first = 0; first < columns; first += together) {
        const long end = first + together < columns ? first + together : columns;
        for (long row = 0, turns = (rows + FEW_ROWS - 1) / FEW_ROWS; turns; turns--) {
            const long here = (rows - row + turns - 1) / turns;
            FEW_TILES[way_of(format)][here](by, row ? &again : at, x + row * stride + first, stride, first, end, part);
            add_scaled(format, at, &(waiting_part){ first, here, part, sums + row * PANEL });
            row += here;
        }
    }
}
#endif

void rz_float_codes_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const operand *x,
                          long stride, long rows, float *sums)
{
    places at = places_of(format, panel);
    at.ahead = coming ? coming - panel : 0;
    const decoding by = decoding_of(format);
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof *sums);
#if !defined(__AMX_BF16__)
    if (rows <= FEW_ROWS * TURNS_OF_FEW) {
        multiply_as_unpacked(format, &at, &by, x, stride, rows, sums);
        return;
    }
#endif
    /* For several tiles of rows so many columns that sums stay in the tiles' registers. */
    const long columns = format->columns, together = sums_whole_rows(format) && rows > TILE_ROWS ? MANY_SPANS * SPAN : SPAN;
    for (long begin = 0; begin < columns; begin += together) {
        _Alignas(64) bf16 weights[MANY_SPANS * SPAN * PANEL];
        const long end = begin + together < columns ? begin + together : columns;
        unpack_span(way_of(format), &by, &at, begin, end, weights);
        multiply_unpacked(format, &at, weights, begin, end, x, stride, rows, sums);
    }
    if (sums_whole_rows(format))
        scale_sums(format, &at, rows, sums);
}

void rz_float_codes_span(const rz_format *format, const uint8_t *panel, long first, long end, const long *lanes,
                         long rows, float *values)
{
    const places at = places_of(format, panel);
    const decoding by = decoding_of(format);
    const size_t bytes = type_bytes(format->scale_type);
    _Alignas(64) bf16 span[SPAN * PANEL];
    float scales[PANEL] = { 0 };
    unpack_span(way_of(format), &by, &at, first, end, span);
    for (long column = first; column < end; column++) {
        if (column == first || (format->group && column % format->group == 0))
            for (int side = 0; side < PANEL; side += LANES)
                f32_store(scales + side, scales_at(group_at(&at, at.scales, bytes,
                                                            format->group ? column / format->group : 0),
                                                   format->scale_type, side));
        const bf16 *pair = span + (column - first) / 2 * PAIR + column % 2;
        for (long i = 0; i < rows; i++)
            values[i * RZ_FLOAT_SPAN + column - first] = bf16_to_float(pair[lanes[i] * 2]) * scales[lanes[i]];
    }
}
