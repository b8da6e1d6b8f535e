/* Rows of packed weights as plain numbers, for embeddings and for products of other libraries: see quantized.h.
 *
 * A panel is unpacked a span of columns at a time, which stays in the first cache while its rows are written:
 *
 *     codes of 32 outputs ──slab──▶ transposed ──▶ row by row: (code - offset) * scale + minimum ──▶ bf16 or float32
 */
#include <string.h>

#include "float_codes.h"
#include "gemm.h"
#include "quantized_layout.h"
#include "short_exponents.h"
#include "state.h"

enum { SPAN_BLOCKS = PIECE, SPAN_COLUMNS = SPAN_BLOCKS * BLOCK };

/* Where rows go. */
typedef struct {
    char *rows;
    int is_float;
    long stride;
} destination;

static void store_row(const destination *to, long row, long column, const float *values, long count)
{
    const long at = row * to->stride + column;
    if (to->is_float) {
        memcpy((float *)to->rows + at, values, (size_t)count * sizeof *values);
        return;
    }
    bf16 *into = (bf16 *)to->rows + at;
    long i = 0;
    for (; i + LANES <= count; i += LANES)
        f32_store_bf16(into + i, f32_load(values + i));
    if (i < count) {
        float rest[LANES] = { 0 };
        bf16 last[LANES];
        memcpy(rest, values + i, (size_t)(count - i) * sizeof *rest);
        f32_store_bf16(last, f32_load(rest));
        memcpy(into + i, last, (size_t)(count - i) * sizeof *last);
    }
}

static void store_bf16_row(const destination *to, long row, long column, const bf16 *values, long count)
{
    const long at = row * to->stride + column;
    if (!to->is_float) {
        memcpy((bf16 *)to->rows + at, values, (size_t)count * sizeof *values);
        return;
    }
    float *into = (float *)to->rows + at;
    for (long i = 0; i < count; i += LANES)
        f32_store_some(lanes_first(count - i), into + i, f32_load_bf16(values + i));
}

/* Codes of `blocks` blocks by outputs, [32][SPAN_COLUMNS], of the sides [first, end) of a panel. A quad of a side is a
 * line of 16 lanes; 16 lines, transposed, are 64 columns of each of 16 outputs. */
static void codes_by_outputs(const uint8_t *quads, long blocks, long first, long end, uint8_t *codes)
{
    for (long column = 0; column < blocks * BLOCK; column += LINE_BYTES) {
        const long quad = column / 4, last = blocks * QUADS - 1;
        for (long side = first; side < end; side++) {
            const bf16 *lines[LANES]; /* four codes are moved as two pairs; behind an odd block, its last line */
            for (long i = 0; i < LANES; i++)
                lines[i] = (const bf16 *)(quads + ((quad + i < last ? quad + i : last) * 2 + side) * LINE_BYTES);
            transpose_pairs(lines, 0, (int32_t *)(codes + side * LANES * SPAN_COLUMNS + column), SPAN_COLUMNS / 4);
        }
    }
}

/* Whole blocks of output `lane` of the panel that `from` was unpacked of; `codes`: that output's. */
static void row_of_slab(const rz_format *format, const slab *from, long lane, const uint8_t *codes, long blocks,
                        float *values)
{
    const long together = format->group == BLOCK / 2 ? BLOCK / 2 : blocks_together(format) * BLOCK;
    const long columns = blocks * BLOCK;
    const i32 offset = i32_set1(unpacked_offset(format));
    for (long column = 0, group = 0; column < columns; group++) {
        const long end = column + together < columns ? column + together : columns;
        const f32 scale = f32_set1(from->scales[group][lane]);
        const f32 least = has_minimums(format) ? f32_set1(from->minimums[group][lane]) : f32_zero();
        for (; column < end; column += LANES) {
            const f32 code = f32_from_i32(i32_sub(i32_load_u8(codes + column), offset));
            f32_store(values + column, f32_fma(code, scale, least));
        }
    }
}

static long output_of(long row, long first, long run, long step)
{
    return first + row / run * step + row % run;
}

/* Outputs `lanes` of a panel, to as many rows from `to_row` on. */
static void unpack_panel(const rz_format *format, const uint8_t *panel, const long *lanes, long rows, long to_row,
                         const destination *to)
{
    const places at = places_of(format, panel);
    const long blocks = blocks_of(format);
    slab here;
    _Alignas(LINE_BYTES) uint8_t codes[PANEL * SPAN_COLUMNS];
    for (long block = 0; block < blocks; block += SPAN_BLOCKS) {
        const long some = blocks - block < SPAN_BLOCKS ? blocks - block : SPAN_BLOCKS, column = block * BLOCK;
        const long left = format->columns - column, count = left < some * BLOCK ? left : some * BLOCK;
        rz_unpack_slab(format, &at, block, some, &here);
        codes_by_outputs(here.codes, some, lanes[0] / LANES, lanes[rows - 1] / LANES + 1, codes);
        for (long i = 0; i < rows; i++) {
            float own[SPAN_COLUMNS], *values = own;
            if (to->is_float && count == some * BLOCK)
                values = (float *)to->rows + (to_row + i) * to->stride + column;
            row_of_slab(format, &here, lanes[i], codes + lanes[i] * SPAN_COLUMNS, some, values);
            if (values == own)
                store_row(to, to_row + i, column, own, count);
        }
    }
}

/* As unpack_panel, of codes that stand for floats. */
static void unpack_float_panel(const rz_format *format, const uint8_t *panel, const long *lanes, long rows, long to_row,
                               const destination *to)
{
    float values[PANEL * RZ_FLOAT_SPAN];
    for (long first = 0; first < format->columns; first += RZ_FLOAT_SPAN) {
        const long left = format->columns - first, count = left < RZ_FLOAT_SPAN ? left : RZ_FLOAT_SPAN;
        rz_float_codes_span(format, panel, first, first + count, lanes, rows, values);
        for (long i = 0; i < rows; i++)
            store_row(to, to_row + i, first, values + i * RZ_FLOAT_SPAN, count);
    }
}

/* As unpack_panel, of bf16: [pairs of columns][PANEL][2], 16 lines of which, transposed, are 32 columns of 16 outputs. */
static void unpack_bf16_panel(const rz_format *format, const uint8_t *packed, long inputs, const long *lanes, long rows,
                              long to_row, const destination *to)
{
    enum { SPAN_PAIRS = SPAN_COLUMNS / 2 };
    _Alignas(LINE_BYTES) bf16 span[SPAN_COLUMNS * PANEL]; /* of short exponents */
    const long pairs = (inputs + 1) / 2;
    _Alignas(LINE_BYTES) int32_t outputs[PANEL * SPAN_PAIRS];
    for (long first = 0; first < pairs; first += SPAN_PAIRS) {
        const long some = pairs - first < SPAN_PAIRS ? pairs - first : SPAN_PAIRS, column = first * 2;
        const bf16 *panel = format->bits ? span : (const bf16 *)packed + column * PANEL;
        if (format->bits)
            rz_short_exponents_span(packed, inputs, column, column + some * 2, span);
        for (long pair = 0; pair < some; pair += LANES)
            for (long side = lanes[0] / LANES; side <= lanes[rows - 1] / LANES; side++) {
                const bf16 *lines[LANES]; /* behind the last pair, that one */
                for (long i = 0; i < LANES; i++)
                    lines[i] = panel + (least(pair + i, some - 1) * PANEL + side * LANES) * 2;
                transpose_pairs(lines, 0, outputs + side * LANES * SPAN_PAIRS + pair, SPAN_PAIRS);
            }
        const long count = least(inputs - column, some * 2);
        for (long i = 0; i < rows; i++)
            store_bf16_row(to, to_row + i, column, (const bf16 *)(outputs + lanes[i] * SPAN_PAIRS), count);
    }
}

void rz_unpack_rows(void *rows, int is_float, long stride, const rz_format *format, const uint8_t *packed, long inputs,
                    long first, long run, long step, long begin, long end)
{
    const destination to = { rows, is_float, stride };
    const size_t bytes = format->bits ? rz_quantized_panel_bytes(format) : rz_packed_bytes(PANEL, inputs);
    for (long row = begin; row < end;) {
        const long output = output_of(row, first, run, step), panel = output / PANEL;
        long lanes[PANEL], count = 0;
        while (row + count < end && output_of(row + count, first, run, step) / PANEL == panel) {
            lanes[count] = output_of(row + count, first, run, step) % PANEL;
            count++;
        }
        const uint8_t *from = packed + (size_t)panel * bytes;
        if (!format->bits || format->floats == RZ_SHORT_EXPONENTS)
            unpack_bf16_panel(format, from, inputs, lanes, count, row - begin, &to);
        else
            (format->floats ? unpack_float_panel : unpack_panel)(format, from, lanes, count, row - begin, &to);
        row += count;
    }
}

void rz_quantized_row(float *row, const rz_format *format, const uint8_t *packed, long output)
{
    rz_unpack_rows(row, 1, format->columns, format, packed, format->columns, output, 1, 1, 0, 1);
}
