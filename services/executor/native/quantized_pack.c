/* Packing of quantized weights: see quantized.h. */
#include <string.h>

#include "quantized_layout.h"
#include "short_exponents.h"

size_t rz_quantized_panel_bytes(const rz_format *format)
{
    if (format->floats == RZ_SHORT_EXPONENTS)
        return rz_short_exponents_panel_bytes(format->columns);
    const places at = places_of(format, NULL);
    const size_t blocks = (size_t)blocks_of(format), pieces = (blocks + PIECE - 1) / PIECE;
    /* The first head is before the codes already. */
    return (size_t)(at.codes - (const uint8_t *)NULL) + (pieces - 1) * at.head + blocks * block_bytes(format->bits);
}

static int is_served_as_floats(const rz_format *format)
{
    /* Lines are whole: what would fill them up need not stand for 0. */
    return format->bits == (format->floats == RZ_E4M3 ? 8 : 4) && format->columns % 4 == 0 && !format->per
        && !format->minimums && !format->has_table && !format->permutation;
}

static int is_served(const rz_format *format)
{
    const int bits = format->bits, group = format->group;
    return bits >= 2 && bits <= 8 && bits != 7 && format->columns > 0 && format->per >= 0
        && (group == 0 || (group >= BLOCK / 2 && group <= WIDEST_GROUP && (group & (group - 1)) == 0))
        && (group <= BLOCK || format->columns % group == 0) && (!format->has_table || bits <= 4)
        && !(format->has_table && format->minimums == RZ_ZEROS) && !(format->per && format->minimums == RZ_ZEROS)
        && (!format->floats || is_served_as_floats(format));
}

size_t rz_quantized_bytes(const rz_format *format, long outputs)
{
    return is_served(format) ? (size_t)(outputs + PANEL - 1) / PANEL * rz_quantized_panel_bytes(format) : 0;
}

/* The bytes of a quad: four columns from `column` on of the 16 outputs from `output` on; 0 where there are none. */
static void quad_of(uint8_t *to, const rz_codes *weight, long columns, long output, long column)
{
    memset(to, 0, LINE_BYTES);
    const long left = columns - column, width = left < 4 ? (left < 0 ? 0 : left) : 4;
    for (long row = 0; row < LANES && output + row < weight->outputs; row++)
        memcpy(to + row * 4, weight->codes + (output + row) * weight->code_stride + column, (size_t)width);
}

static void pack_block(uint8_t *to, int bits, const rz_codes *weight, long columns, long output, long column)
{
    const int low = bits >= 4 ? 4 : 2;
    memset(to, 0, block_bytes(bits));
    for (int quad = 0; quad < QUADS; quad++)
        for (int side = 0; side < 2; side++) {
            uint8_t codes[LINE_BYTES];
            quad_of(codes, weight, columns, output + side * LANES, column + quad * 4);
            if (bits == 8) {
                memcpy(to + (quad * 2 + side) * LINE_BYTES, codes, LINE_BYTES);
                continue;
            }
            uint8_t *first = to + (low == 4 ? quad : quad / 2) * LINE_BYTES;
            uint8_t *more = to + ((low == 4 ? QUADS : QUADS / 2) + (bits == 6 ? quad / 2 : quad / 4)) * LINE_BYTES;
            const int at = low == 4 ? side * 4 : (quad % 2 * 2 + side) * 2;
            const int then = bits == 6 ? (quad % 2 * 2 + side) * 2 : quad % 4 * 2 + side;
            for (int i = 0; i < LINE_BYTES; i++) {
                first[i] |= (uint8_t)((codes[i] & ((1 << low) - 1)) << at);
                if (bits > low)
                    more[i] |= (uint8_t)((codes[i] >> low & ((1 << (bits - low)) - 1)) << then);
            }
        }
}

/* Lines of pairs: see float_codes.h. */
static void pack_float_block(uint8_t *to, int bits, const rz_codes *weight, long columns, long output, long column)
{
    memset(to, 0, block_bytes(bits));
    for (long row = 0; row < PANEL && output + row < weight->outputs; row++) {
        const uint8_t *codes = weight->codes + (output + row) * weight->code_stride;
        const long side = row / LANES, lane = row % LANES, quarters = lane / 4 * 16 + side * 8 + lane % 4 * 2;
        for (long i = 0; i < BLOCK && column + i < columns; i++) {
            if (bits == 8)
                to[i / 2 * LINE_BYTES + quarters + i % 2] = codes[column + i];
            else
                to[i / 4 * LINE_BYTES + (lane * 2 + i % 2) * 2 + i / 2 % 2] |= (uint8_t)((codes[column + i] & 15) << side * 4);
        }
    }
}

/* Group `group` of scales or minimums: 32 of them, from [outputs][groups]. */
static void pack_scales(const uint8_t *to, const void *from, size_t bytes, long stride, long group, long output,
                        long outputs)
{
    for (long row = 0; from && row < PANEL && output + row < outputs; row++)
        memcpy((uint8_t *)to + (size_t)row * bytes,
               (const uint8_t *)from + (size_t)((output + row) * stride + group) * bytes, bytes);
}

void rz_quantized_pack(uint8_t *packed, const rz_format *format, const rz_codes *weight, long first, long end)
{
    const size_t bytes = rz_quantized_panel_bytes(format);
    const long groups = format->group ? format->columns / format->group : 1, all = weight->outputs;
    const long supers = format->per ? groups / format->per : 0, blocks = blocks_of(format);
    const size_t scale = type_bytes(format->scale_type), super = type_bytes(format->super_type);
    for (long panel = first; panel < end; panel++) {
        uint8_t *to = memset(packed + (size_t)panel * bytes, 0, bytes);
        const places at = places_of(format, to);
        const long output = panel * PANEL;
        const size_t least = type_bytes(at.minimum_type);
        for (long group = 0; group < groups; group++) {
            pack_scales(group_at(&at, at.scales, scale, group), weight->scales, scale, weight->scale_stride, group,
                        output, all);
            pack_scales(group_at(&at, at.minimums, least, group), weight->minimums, least, weight->minimum_stride, group,
                        output, all);
        }
        for (long i = 0; i < supers; i++) {
            const size_t there = (size_t)i * PANEL * super;
            pack_scales(at.supers + there, weight->supers, super, weight->super_stride, i, output, all);
            pack_scales(at.super_minimums + there, weight->super_minimums, super, weight->super_minimum_stride, i,
                        output, all);
        }
        for (long block = 0; block < blocks; block++)
            (format->floats ? pack_float_block : pack_block)((uint8_t *)block_at(&at, format->bits, block),
                                                             format->bits, weight, format->columns, output,
                                                             block * BLOCK);
    }
}
