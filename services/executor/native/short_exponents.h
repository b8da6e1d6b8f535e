/* bf16 weights in twelve bits each, with nothing lost: the exponents of most weights are few, so codes of four bits are
 * enough for them. (Source of the idea: Zhang et al., "70% Size, 100% Accuracy: Lossless LLM Compression for Efficient GPU
 * Inference via Dynamic-Length Float", https://arxiv.org/abs/2504.11651, whose codes have as many bits as they need.)
 *
 *     panel     head: the 16 most frequent exponents | patches | lines, of four inputs by 32 outputs each
 *     line      of 128 weights: sign and fraction, a byte each | their codes, 64 bytes: nibble i of word j is weight 32i + j
 *     patch     a weight with another exponent: its number in the panel, and above it that exponent
 *
 * Weights of a line are two pairs of inputs, in the order of gemm.h. A panel has room for a patch every 512 weights (trained
 * ones need one every 50,000); one that needs more is not kept so. One row, and with 32 registers as many as a tile has,
 * multiply what was just unpacked; more of them have it kept in the first cache, a span of columns at a time. Sums are
 * those of gemm.h to the bit.
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
