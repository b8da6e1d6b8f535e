/* Products of bf16 activations with codes that stand for bf16 values: e4m3, or any table of 16 values (NF4).
 *
 *     value[o][i] = s[o][g] * T(code[o][i])        g = i / group     (model/quantized.py)
 *
 * Nothing is rounded but float32's sums: T(code) is a bf16 number, and scales multiply the sum of a group. A group is
 * summed in parts of 256 columns; by AMX a row's only one is summed whole. Scales, pieces and blocks lie as quantized.h has
 * them. A line of 64 bytes is unpacked into pairs of inputs of 32 outputs, which lie as in gemm.h, by instructions that keep
 * to quarters of a vector or to words:
 *
 *     8 bits   byte 16q + 8h + 2j + k      input k of a pair, of output 16h + 4q + j
 *     4 bits   word 2j + k, nibble 2p + h  input k of pair p, of output 16h + j
 *
 * A block of 8 bits has 16 lines, of 4 bits 8. With 32 registers, rows multiply what was just unpacked, eight of them at a
 * time, up to 96, or 16 where bf16 is multiplied as float32. More rows, and more than one with 16 registers, have a span
 * of columns unpacked into the first cache, for the tiles of gemm.h. A row's sums are in the same order either way.
 */
#ifndef RZ_FLOAT_CODES_H
#define RZ_FLOAT_CODES_H

#include "decoder.h"
#include "vector.h"

/* sums[rows][32] of a panel, from `rows` rows of operands (gemm.h), `stride` apart. `coming`: as for rz_quantized_panel. */
void rz_float_codes_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const operand *x,
                          long stride, long rows, float *sums);

enum { RZ_FLOAT_SPAN = 256 /* columns that are unpacked together */ };

/* Columns [first, end) of the outputs `lanes` of a panel: values[rows][RZ_FLOAT_SPAN]. `first` is a multiple of
 * RZ_FLOAT_SPAN, and so many columns are unpacked at most. */
void rz_float_codes_span(const rz_format *format, const uint8_t *panel, long first, long end, const long *lanes,
                         long rows, float *values);

#endif
