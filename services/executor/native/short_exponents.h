/* bf16 weights in twelve bits each, with nothing lost: the exponents of most weights are few, so codes of four bits are
 * enough for them. (Source of the idea: Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression for Efficient GPU
 * Inference via Dynamic-Length Float", https://arxiv.org/abs/2504.11651, whose codes have as many bits as they need.)
 *
 *     panel     head: the 16 most frequent exponents | patches | lines, of four inputs by 32 outputs each
 *     line      sign and fraction of the first two inputs, 64 bytes | of the other two | codes: nibble p is for pair p
 *     byte      16q + 8h + 2j + k: input k of a pair, of output 16h + 4q + j (as in float_codes.h)
 *     patch     a weight with another exponent: its number in the panel, and in the lowest eight bits that exponent
 *
 * A panel has room for a patch every 512 weights (trained ones need far fewer), which are numbered in the order of gemm.h;
 * one that needs more is not kept so. Few rows multiply what was just unpacked; more of them have it kept in the second
 * cache, a span of columns at a time. Sums are those of gemm.h to the bit.
 */
#ifndef RZ_SHORT_EXPONENTS_H
#define RZ_SHORT_EXPONENTS_H

#include "decoder.h"
#include "vector.h"

/* Bytes of a packed panel of `columns` inputs; 0 where they are not served: a multiple of 4, below 2^19. */
size_t rz_short_exponents_panel_bytes(long columns);

/* Packs the panels [first, end) of bf16, packed as gemm.h has them, of `columns` inputs. 0 where one has no room for its
 * patches; what is written is of no use then. */
int rz_short_exponents_pack(uint8_t *to, const bf16 *packed, long columns, long first, long end);

/* Columns [first, end) of a panel, multiples of 4, as gemm.h has them. */
void rz_short_exponents_span(const uint8_t *panel, long columns, long first, long end, bf16 *to);

/* sums[rows][32] of a panel, from `rows` rows of operands (gemm.h), `stride` apart. `coming`: as for rz_quantized_panel. */
void rz_short_exponents_panel(const rz_format *format, const uint8_t *panel, const uint8_t *coming, const operand *x,
                              long stride, long rows, float *sums);

#endif
