/* Products of rounded activations with weights whose groups share more than their inputs: exact over a whole span.
 *
 *     sum over spans of  x scale * (scale * whole + minimum * least)
 *
 *     two levels of scales    whole = sum over groups of s[g] * (codes[g] . x[g])    least = sum over groups of m[g] * sum x[g]
 *     groups of 64 and more   whole = codes . x                                      least = sum x
 *
 * A span is what an upper scale covers (256 columns of llama.cpp's K formats and its IQ4_XS), or a group of 64, or 128
 * columns of a larger one. Its activations share one scale. `whole` and `least` are integers, below 2^31, and so the same in
 * any order: tiles of bytes have the bits that dot products of lanes have. Where there are tiles, rows enough take codes
 * times s[g], below 2^15, as two bytes each: tiles multiply both, and nothing is scaled before the span has ended.
 */
#ifndef RZ_SPANS_H
#define RZ_SPANS_H

#include "quantized_layout.h"

enum {
    LONGEST_SPAN = 256, /* columns; all are multiples of 64 */
    SPANS_AT_ONCE = 4,
    SPAN_GROUPS = LONGEST_SPAN / 16, /* of whole numbers as scales, of spans at once */
};

/* Whether groups' scales are whole numbers that are multiplied as such. */
RZ_INLINE int has_whole_scales(const rz_format *format)
{
    const long span = (long)format->per * format->group;
    return format->per && format->group && format->group <= BLOCK && format->bits < 8
        && (format->scale_type == RZ_U8 || format->scale_type == RZ_I8) && span % (2 * BLOCK) == 0 && span <= LONGEST_SPAN;
}

/* Columns of a span; 0: `format` is multiplied by blocks of 32 columns (quantized.c). */
RZ_INLINE long span_of(const rz_format *format)
{
    if (has_whole_scales(format))
        return (long)format->per * format->group;
    return format->floats || (format->group && format->group <= BLOCK) ? 0 : blocks_together(format) * BLOCK;
}

/* Groups of a span that have scales, and of which the row's own sums are kept. */
RZ_INLINE int groups_of_span(const rz_format *format)
{
    return has_whole_scales(format) ? format->per : 1;
}

/* Whether what codes are too large by is subtracted from sums of 16 bits, which have room for it (add_quads). */
RZ_INLINE int starts_are_shorts(const rz_format *format)
{
    const int offset = unpacked_offset(format);
    return SUMS_OF_16_BITS && has_whole_scales(format) && !format->has_table && (format->bits < 6 || format->group == BLOCK / 2)
        && offset * 127 * format->group / 2 <= INT16_MAX;
}

/* As rz_quantized_panel, of a format that has spans. */
void rz_spans_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const rz_rounded *x, long first,
                    long rows, float *sums);

#endif
