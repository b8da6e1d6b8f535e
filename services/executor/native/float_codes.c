/* See float_codes.h. */
#include "float_codes.h"

#include "gemm.h"
#include "quantized_layout.h"

enum {
    SPAN = 256,                                /* columns that are unpacked together, and summed before they are scaled */
    PAIR = 2 * PANEL,                          /* values of a line, unpacked */
    FEW_ROWS = VECTORS >= 32 ? 4 : 1,          /* that are multiplied as codes are unpacked */
};

/* The two bytes of each value. Of e4m3 the upper one by the sign and three bits of the exponent, the lower one by the
 * rest; `first_*`: what denormals and zeros, codes below 8, differ from that in. */
typedef struct {
    bytes low, high, first_low, first_high;
    bytes words; /* the table of 16 twice */
} decoding;

/* Bits of bf16. */
static int e4m3_below_8(int code)
{
    const union { float value; uint32_t bits; } both = { .value = (float)code / 512 };
    return (int)(both.bits >> 16);
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
    return (decoding){ bytes_repeat16(low), bytes_repeat16(high), bytes_repeat16(first_low), bytes_repeat16(first_high),
                       bytes_load(words) };
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

/* Unpacks a line: of 8 bits one pair of inputs, of 4 bits two. */
RZ_INLINE void unpack_line(const int bits, const decoding *by, const uint8_t *line, bf16 *to)
{
    const bytes codes = bytes_load(line);
    if (bits == 4) {
        unpack_nibbles(by, codes, to);
        return;
    }
    const bytes rest = bytes_and(codes, bytes_set1(127)), low = bytes_and(bytes_left(codes, 4), bytes_set1(0xf0));
    const bytes high = bytes_look_up(by->high, bytes_and(bytes_right(codes, 4), bytes_set1(15)));
    bytes_store_zipped(to, bytes_xor(low, bytes_look_up_first(by->first_low, rest)),
                       bytes_xor(high, bytes_look_up_first(by->first_high, rest)));
}

/* Where the line of the columns from `column` on lies. */
RZ_INLINE const uint8_t *line_at(const int bits, const places *at, long column)
{
    return block_at(at, bits, column / BLOCK) + column % BLOCK * bits / 16 * LINE_BYTES;
}

/* Unpacks that line, and asks for what the next panel has in its place. */
RZ_INLINE void take_line(const int bits, const decoding *by, const places *at, long column, bf16 *to)
{
    const uint8_t *line = line_at(bits, at, column), *coming = line + at->ahead;
    __builtin_prefetch(coming, 0, 2);
    if (column % (PIECE * BLOCK) == 0)
        for (size_t byte = 0; byte < at->head; byte += LINE_BYTES)
            __builtin_prefetch(coming - at->head + byte, 0, 2);
    unpack_line(bits, by, line, to);
}

/* sums += part * the scales of the group of `column`. */
RZ_INLINE void add_scaled(const rz_format *format, const places *at, long column, long rows, const float *part,
                          float *sums)
{
    const long group = format->group ? column / format->group : 0;
    const uint8_t *scales = group_at(at, at->scales, type_bytes(format->scale_type), group);
    for (int side = 0; side < PANEL; side += LANES) {
        const f32 scale = scales_at(scales, format->scale_type, side);
        for (long i = side; i < rows * PANEL; i += PANEL)
            f32_store(sums + i, f32_fma(f32_load(part + i), scale, f32_load(sums + i)));
    }
}

#if !defined(__AMX_BF16__)
/* part[rows][32] of the columns [first, end), as rz_tile sums them; `x` begins with the first. */
RZ_INLINE void multiply_few(const int rows, const int bits, const decoding *by, const places *at, const operand *x,
                            long ldx, long first, long end, float *part)
{
    wide sums[FEW_ROWS][PANEL / WIDTH];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL / WIDTH; v++)
            sums[row][v] = wide_zero();
    for (long column = first; column < end; column += 16 / bits) {
        _Alignas(64) bf16 line[2 * PAIR];
        take_line(bits, by, at, column, line);
#pragma GCC unroll 2
        for (int pair = 0; pair < 8 / bits; pair++, x += 2)
#pragma GCC unroll 2
            for (int turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 8
                for (int v = 0; v < PANEL / WIDTH; v++) {
                    const wide weights = weights_of(line + pair * PAIR + v * 2 * WIDTH, turn);
#pragma GCC unroll 4
                    for (int row = 0; row < rows; row++)
                        sums[row][v] = multiply_add(sums[row][v], operand_of(x + row * ldx, turn), weights);
                }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < PANEL / WIDTH; v++)
            wide_store(part + row * PANEL + v * WIDTH, sums[row][v]);
}

typedef void (*few_function)(const decoding *, const places *, const operand *, long, long, long, float *);

#define FEW_OF(n, bits) \
    static __attribute__((noinline)) void few_##n##_##bits(const decoding *by, const places *at, const operand *x, \
                                                           long ldx, long first, long end, float *part) \
    { \
        multiply_few(n, bits, by, at, x, ldx, first, end, part); \
    }
FEW_OF(1, 8) FEW_OF(1, 4)
#if MOST_AT_ONCE > 6
FEW_OF(2, 8) FEW_OF(3, 8) FEW_OF(4, 8) FEW_OF(2, 4) FEW_OF(3, 4) FEW_OF(4, 4)
#endif

/* [of 8 bits][rows] */
static const few_function FEW_TILES[2][FEW_ROWS + 1] = {
#if MOST_AT_ONCE > 6
    { NULL, few_1_4, few_2_4, few_3_4, few_4_4 }, { NULL, few_1_8, few_2_8, few_3_8, few_4_8 },
#else
    { NULL, few_1_4 }, { NULL, few_1_8 },
#endif
};

static void few_rows(const rz_format *format, const decoding *by, const places *at, const bf16 *x, long stride,
                     long rows, long first, long end, float *part)
{
    if (TURNS == 1) {
        FEW_TILES[format->bits == 8][rows](by, at, (const operand *)x + first, stride, first, end, part);
        return;
    }
    operand inputs[FEW_ROWS * SPAN];
    for (long row = 0; row < rows; row++)
        for (long i = 0; i < end - first; i++)
            inputs[row * SPAN + i] = (operand)bf16_to_float(x[row * stride + first + i]);
    FEW_TILES[format->bits == 8][rows](by, at, inputs, SPAN, first, end, part);
}
#endif

static void unpack_span(const int bits, const decoding *by, const places *at, long first, long end, bf16 *to)
{
    if (bits == 8)
        for (long column = first; column < end; column += 2, to += PAIR)
            take_line(8, by, at, column, to);
    else
        for (long column = first; column < end; column += 4, to += 2 * PAIR)
            take_line(4, by, at, column, to);
}

void rz_float_codes_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const bf16 *x,
                          long stride, long rows, float *sums)
{
    places at = places_of(format, panel);
    at.ahead = coming ? coming - panel : 0;
    const long columns = format->columns;
    const long together = format->group && format->group < SPAN ? format->group : SPAN;
    const decoding by = decoding_of(format);
    float part[TILE_ROWS * PANEL];
    memset(sums, 0, (size_t)(rows * PANEL) * sizeof *sums);
#if !defined(__AMX_BF16__)
    if (rows <= FEW_ROWS) {
        for (long first = 0; first < columns; first += together) {
            const long end = first + together < columns ? first + together : columns;
            few_rows(format, &by, &at, x, stride, rows, first, end, part);
            add_scaled(format, &at, first, rows, part, sums);
        }
        return;
    }
#endif
    for (long begin = 0; begin < columns; begin += SPAN) {
        _Alignas(64) bf16 span[SPAN * PANEL];
        const long last = begin + SPAN < columns ? begin + SPAN : columns;
        unpack_span(format->bits, &by, &at, begin, last, span);
        for (long row = 0, tiles = (rows + TILE_ROWS - 1) / TILE_ROWS; tiles; tiles--) {
            const long here = (rows - row + tiles - 1) / tiles;
            for (long first = begin; first < last; first += together) {
                const long end = first + together < last ? first + together : last;
                rz_tile((int)here, x + row * stride + first, stride, span + (first - begin) * PANEL, (end - first) / 2,
                        part, PANEL, 0, NULL);
                add_scaled(format, &at, first, here, part, sums + row * PANEL);
            }
            row += here;
        }
    }
}

void rz_float_codes_row(float *row, const rz_format *format, const uint8_t *panel, long output)
{
    const places at = places_of(format, panel);
    const decoding by = decoding_of(format);
    const size_t bytes = type_bytes(format->scale_type);
    float scales[LANES] = { 0 };
    const long together = 16 / format->bits;
    bf16 line[2 * PAIR];
    for (long column = 0; column < format->columns; column++) {
        const long group = format->group ? column / format->group : 0;
        if (column == 0 || (format->group && column % format->group == 0))
            f32_store(scales, scales_at(group_at(&at, at.scales, bytes, group), format->scale_type,
                                        output / LANES * LANES));
        if (column % together == 0)
            unpack_line(format->bits, &by, line_at(format->bits, &at, column), line);
        row[column] = bf16_to_float(line[column % together / 2 * PAIR + output * 2 + column % 2]) * scales[output % LANES];
    }
}
