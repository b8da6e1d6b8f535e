/* Products of bf16 activations with bf16 weights, summed in float32.
 *
 *     y[m][n] = sum over k of x[m][k] * w[n][k]
 *
 * Weights are packed once, in panels of 32 outputs; a panel holds pairs of inputs, the shape that processors'
 * dot-product instructions (vdpbf16ps, tdpbf16ps, bfdot) read, and the same at every level of instructions:
 *
 *     panel p   k 0,1 of outputs 32p .. 32p+31 | k 2,3 of outputs 32p .. 32p+31 | ...      4 bytes each
 *
 * One tile is up to TILE_ROWS rows of x by one panel; its sums stay in registers as long as they fit. Without such
 * an instruction bf16 is widened, which is a shift or a mask, and multiplied in float32: weights as they are loaded,
 * activations ahead, as what the level calls operands.
 */
#ifndef RZ_GEMM_H
#define RZ_GEMM_H

#include "vector.h"

enum {
    PANEL = 32,     /* outputs of a panel */
#if defined(__AMX_BF16__)
    TILE_ROWS = 32, /* rows of x of a tile, at most */
#else
    TILE_ROWS = 12,
#endif
};

/* The panel that a thread needs next comes from memory while it computes with this one: each tile asks for a
 * part of it. */
typedef struct {
    const char *next; /* what to ask for next; any readable address where there is nothing */
    long step;        /* bytes per pair of inputs; 0: nothing */
} rz_ahead;

/* Where a tile's sums go when they are done with, so that the lines are there by then: `rows` rows of `bytes`. Only AMX asks
 * for them: its tiles take no longer than lines need to come. */
typedef struct {
    const char *at;
    long stride, bytes, rows; /* rows 0: nobody knows */
} rz_sums_end;

/* For `tiles` tiles over one panel; `panel`: the one that comes, or NULL. */
rz_ahead rz_look_ahead(const bf16 *panel, long tiles);

/* c[rows][PANEL], row stride `ldc`, from `rows` <= TILE_ROWS rows of `x`, row stride `ldx`, both in elements.
 * `pairs`: k / 2. Adds to what is in c where `add` is set. `ahead` moves on by one tile; or NULL. */
void rz_tile(int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
             rz_ahead *ahead, rz_sums_end end);

/* The same of rows that are the level's operands. */
void rz_tile_operands(int rows, const operand *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
                      rz_ahead *ahead);

/* Any number of rows by `panels` panels, `step` values apart, whose sums lie side by side: c[rows][panels * PANEL]. */
void rz_tiles(int rows, const operand *x, long ldx, const bf16 *panel, int panels, long step, long pairs, float *c, long ldc,
              int add);

/* Values as operands: float32 where the two of a pair are multiplied in turns, else what they are. */
RZ_INLINE void widen(operand *to, const bf16 *x, long count)
{
    for (long i = 0; i < count; i++)
        to[i] = TURNS == 1 ? (operand)x[i] : (operand)bf16_to_float(x[i]);
}

/* Gives back what products have taken of this thread. Whatever calls them does so before it returns to other code, which
 * may use the same registers. */
void rz_end_products(void);

/* Bytes of `outputs` by `inputs` weights, packed; both are rounded up (to 32 and to 2), with zeros. */
size_t rz_packed_bytes(long outputs, long inputs);

/* Packs `rows` rows of `inputs` weights, row stride `stride` elements. Row i becomes output
 * first + (i / run) * step + i % run: so gate and up projections can alternate by 16. */
void rz_pack(bf16 *packed, const bf16 *weights, long rows, long inputs, long stride, long first, long run, long step);

/* Output `output` of packed weights as a row of `inputs` bf16: an embedding. */
void rz_unpack_row(bf16 *row, const bf16 *packed, long output, long inputs);

#endif
