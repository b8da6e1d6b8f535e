/* Products of activations rounded to int8 with weights of 2 to 8 bits, summed exactly within a group of inputs.
 *
 *     value[o][i] = s[o][g] * (T(code[o][i]) - zero[o][g]) - m[o][g]        g = i / group     (model/quantized.py)
 *
 * Packed, a panel of 32 outputs has its codes in blocks of 32 columns, four of which make a piece. What a vector holds
 * is a quad: four columns of 16 outputs, a 32-bit lane for each output, as the dot-product instruction (vpdpbusd) reads it.
 * A block has 8 quads of the panel's left 16 outputs and 8 of the right ones, in planes of bits:
 *
 *     8 bits      left quad 0 | right quad 0 | left quad 1 | ...                                        1,024 bytes
 *     low 4       quad i: left in the low four bits of each byte, right in the high ones                  512
 *     2 more      quads 2i, 2i + 1: left, right, left, right, two bits of each byte for each              256
 *     1 more      quads 4i .. 4i + 3, likewise, one bit for each                                          128
 *
 *     2 bits: the second plane; 3: the second and third; 4: the first; 5: first and third; 6: first and second
 *
 * A piece begins with its scales [groups][32], then its minimums or zero points [groups][32]; where a group is larger
 * than a piece, they are ahead of all pieces. A panel begins with what multiplies scales, then what multiplies minimums
 * [groups / per][32]. So a panel is read as it lies in memory.
 *
 * A slab of columns is multiplied by all rows of the task while it is in the first cache. Codes are taken apart in
 * registers, by the vector units that do not multiply; those with a table, and other rare ones, are first unpacked to 8
 * bits for many rows, and so are all where registers are few. AVX2 has no such instruction: it sums products in 16 bits,
 * of as many quads as fit (8 with codes of 4 bits, 4 with 5, 2 with 6), before it widens them; codes of 8 bits are
 * multiplied as 16 bits, or, where whole numbers scale them, as two of 4. A row's sums are in the same order either way,
 * so its bits do not depend on the others. What comes from memory is the packed form, and is asked for one panel ahead.
 */
#ifndef RZ_QUANTIZED_H
#define RZ_QUANTIZED_H

#include "decoder.h"
#include "vector.h"

enum { BLOCK = 32 /* columns, which share a scale of the activations unless a span does (spans.h) */ };

/* Activations of some rows, rounded for one linear layer. What is kept of each row lies side by side for all rows. */
typedef struct {
    long rows;
    long stride;     /* of a row's codes: whole blocks, and a line more, so that rows do not share the cache's places */
    int8_t *codes;   /* [rows][stride] */
    float *scales;   /* [columns / 32][rows]; of spans as many as there are */
    int32_t *starts; /* [columns / 16][rows]: what a sum begins with, for the offset of the weight's codes; by half
                      * blocks where groups have 16 columns, else by blocks */
    float *sums;     /* [columns / 16][rows]: of the values, by groups */
    int32_t *pairs;  /* in their place, of spans: sums of two groups' codes, 16 bits each, or of all codes */
} rz_rounded;

/* Bytes of `columns` activations, rounded. */
size_t rz_rounded_bytes(long columns);

/* Where `rows` rows of activations for `format` lie in `memory`. */
rz_rounded rz_rounded_in(void *memory, const rz_format *format, long rows);

/* Rounds one row `x` [inputs] to row `row` of `to`. */
void rz_round_row(const rz_rounded *to, const rz_format *format, long row, const bf16 *x, long inputs);

enum { MOST_ROUNDED_TOGETHER = 256 /* rows by a panel: their sums stay in the first cache */ };

/* How many rows a panel is best multiplied with at once, where tiles do it: codes times scales are made once for all of
 * them, codes of 8 bits are many bytes, and those of groups of 64 or more are unpacked once. Others gain less than their
 * sums cost. */
long rz_most_together(const rz_format *format);

/* sums[rows][32] of a panel, from `rows` rows of `x` from `first` on, at most MOST_ROUNDED_TOGETHER. `coming`: the panel
 * that this thread needs next, or NULL: its bytes are asked for from memory meanwhile. */
void rz_quantized_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const rz_rounded *x,
                        long first, long rows, float *sums);

/* Bytes of a packed panel. */
size_t rz_quantized_panel_bytes(const rz_format *format);

/* Bytes of `outputs` outputs, packed; 0 where `format` is none that is served. */
size_t rz_quantized_bytes(const rz_format *format, long outputs);

/* Packs the panels [first, end), as many as `weight` has. */
void rz_quantized_pack(uint8_t *packed, const rz_format *format, const rz_codes *weight, long first, long end);

enum { RZ_SYMMETRIC, RZ_SIGNED, RZ_WITH_MINIMUMS, RZ_WITH_ZEROS, RZ_OF_E4M3 };

/* Quantizes the rows [first, end) of `from`, `columns` values of `type` (floats), `stride` apart, into `to`, whose parts
 * are written: codes of `bits` bits in groups of `group`, a multiple of 16, at most 512.
 *
 *     RZ_SYMMETRIC      a float16 for each group, codes of 8 bits; where one group is the row, a float32, any width
 *     RZ_SIGNED         8 bits with their sign (6 with codes of 3) for each group, a float16 for `per` of them
 *     RZ_WITH_MINIMUMS  scales and minimums of 6 bits (4 with codes of 2), two float16
 *     RZ_WITH_ZEROS     a float16 and a zero point for each group
 *     RZ_OF_E4M3        a float32, where one group is the row, any width; 8 bits, as rz_encode rounds them
 *
 * Scales are searched for: of several near the one that spans the values, that with the least squared error. */
void rz_quantize(const rz_codes *to, int kind, int bits, long columns, long group, int per, const void *from, int type,
                 long stride, long first, long end);

/* Rows [begin, end) of a part of a packed weight, `stride` values apart from `rows` on, as bf16 or, with `is_float`, as
 * float32. Row i is output first + i / run * step + i % run, as rz_pack laid it, of `inputs` inputs; where they are
 * permuted, of as many columns in their order. A format without bits is bf16, packed as gemm.h has it. */
void rz_unpack_rows(void *rows, int is_float, long stride, const rz_format *format, const uint8_t *packed, long inputs,
                    long first, long run, long step, long begin, long end);

/* Output `output` of a packed weight as a row of float32 [columns]; the permutation is not applied. */
void rz_quantized_row(float *row, const rz_format *format, const uint8_t *packed, long output);

#endif
