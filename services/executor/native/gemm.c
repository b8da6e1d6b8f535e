/* See gemm.h. */
#include "gemm.h"

#if defined(__AMX_BF16__)
#include "levels/tile_amx.h"
#else

/* `rows` rows by `vectors` vectors of a panel, whose sums stay in registers. Every row is summed in the same order,
 * however many rows there are: what a row comes to does not depend on its neighbours. */
RZ_INLINE void block(const int rows, const int vectors, const operand *x, long ldx, const bf16 *panel, long pairs,
                     float *c, long ldc, int add, const char *ahead, long step)
{
    wide sums[TILE_ROWS][PANEL / WIDTH];
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            sums[row][v] = add ? wide_load(c + row * ldc + v * WIDTH) : wide_zero();
    for (long pair = 0; pair < pairs; pair++) {
#pragma GCC unroll 2
        for (int line = 0; line < vectors * WIDTH / LANES; line++)
            __builtin_prefetch(ahead + 64 * line, 0, 2);
        ahead += step;
#pragma GCC unroll 2
        for (int turn = 0; turn < TURNS; turn++) {
            wide weights[PANEL / WIDTH];
#pragma GCC unroll 8
            for (int v = 0; v < vectors; v++)
                weights[v] = weights_of(panel + v * 2 * WIDTH, turn);
#pragma GCC unroll 12
            for (int row = 0; row < rows; row++) {
                wide one = operand_of(x + row * ldx, turn);
#pragma GCC unroll 8
                for (int v = 0; v < vectors; v++)
                    sums[row][v] = multiply_add(sums[row][v], one, weights[v]);
            }
        }
        x += 2;
        panel += 2 * PANEL;
    }
#pragma GCC unroll 12
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 8
        for (int v = 0; v < vectors; v++)
            wide_store(c + row * ldc + v * WIDTH, sums[row][v]);
}

typedef void (*block_function)(const operand *, long, const bf16 *, long, float *, long, int, const char *, long);

/* Few rows take a panel at once, and read it as it lies in memory; more of them half a panel. */
#define BLOCK_OF(n) \
    static __attribute__((noinline)) void block_##n(const operand *x, long ldx, const bf16 *panel, long pairs, \
                                                    float *c, long ldc, int add, const char *ahead, long step) \
    { \
        if (n <= WHOLE_AT_ONCE) { \
            block(n, PANEL / WIDTH, x, ldx, panel, pairs, c, ldc, add, ahead, step); \
            return; \
        } \
        for (int half = 0; half < PANEL; half += PANEL / 2) \
            block(n, PANEL / 2 / WIDTH, x, ldx, panel + 2 * half, pairs, c + half, ldc, add, ahead + 4 * half, step); \
    }

BLOCK_OF(1) BLOCK_OF(2) BLOCK_OF(3) BLOCK_OF(4) BLOCK_OF(5) BLOCK_OF(6)
#if MOST_AT_ONCE > 6
BLOCK_OF(7) BLOCK_OF(8) BLOCK_OF(9) BLOCK_OF(10) BLOCK_OF(11) BLOCK_OF(12)
#endif

static const block_function BLOCKS[MOST_AT_ONCE + 1] = {
    NULL, block_1, block_2, block_3, block_4, block_5, block_6,
#if MOST_AT_ONCE > 6
    block_7, block_8, block_9, block_10, block_11, block_12,
#endif
};

static void tile(int rows, const operand *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
                 const char *ahead, long step, rz_sums_end end)
{
    (void)end;
    int count = (rows + MOST_AT_ONCE - 1) / MOST_AT_ONCE;
    for (int done = 0; count; count--) {
        int here = (rows - done + count - 1) / count;
        BLOCKS[here](x + done * ldx, ldx, panel, pairs, c + done * ldc, ldc, add, ahead, step);
        done += here;
    }
}

static void tiles(int rows, const operand *x, long ldx, const bf16 *panel, int panels, long step, long pairs, float *c,
                  long ldc, int add)
{
    for (int i = 0; i < panels; i++)
        tile(rows, x, ldx, panel + i * step, pairs, c + i * PANEL, ldc, add, (const char *)x, 0, (rz_sums_end){ 0 });
}
#endif

void rz_end_products(void)
{
#if defined(__AMX_BF16__)
    tiles_release();
    shaped_for = 0;
#endif
}

rz_ahead rz_look_ahead(const bf16 *panel, long tiles)
{
    return (rz_ahead){ (const char *)panel, panel ? 2 * PANEL * (long)sizeof(bf16) / tiles : 0 };
}

void rz_tile_operands(int rows, const operand *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
                      rz_ahead *ahead)
{
    const long step = ahead ? ahead->step : 0;
    tile(rows, x, ldx, panel, pairs, c, ldc, add, step ? ahead->next : (const char *)x, step, (rz_sums_end){ 0 });
    if (step)
        ahead->next += step * pairs;
}

void rz_tiles(int rows, const operand *x, long ldx, const bf16 *panel, int panels, long step, long pairs, float *c, long ldc,
              int add)
{
    tiles(rows, x, ldx, panel, panels, step, pairs, c, ldc, add);
}

void rz_tile(int rows, const bf16 *x, long ldx, const bf16 *panel, long pairs, float *c, long ldc, int add,
             rz_ahead *ahead, rz_sums_end end)
{
    enum { PAIRS_AT_ONCE = 64 /* whose inputs are widened at once: they stay in the first cache */ };
    operand inputs[TILE_ROWS * 2 * PAIRS_AT_ONCE];
    const long step = ahead ? ahead->step : 0;
    const char *next = step ? ahead->next : (const char *)x;
    if (TURNS == 1)
        tile(rows, (const operand *)x, ldx, panel, pairs, c, ldc, add, next, step, end);
    for (long pair = 0; TURNS == 2 && pair < pairs; pair += PAIRS_AT_ONCE) {
        const long here = pairs - pair < PAIRS_AT_ONCE ? pairs - pair : PAIRS_AT_ONCE;
        for (int row = 0; row < rows; row++)
            widen(inputs + row * 2 * PAIRS_AT_ONCE, x + row * ldx + 2 * pair, 2 * here);
        tile(rows, inputs, 2 * PAIRS_AT_ONCE, panel + pair * 2 * PANEL, here, c, ldc, add || pair, next + pair * step, step,
             end);
    }
    if (step)
        ahead->next += step * pairs;
}

size_t rz_packed_bytes(long outputs, long inputs)
{
    size_t panels = (size_t)(outputs + PANEL - 1) / PANEL, pairs = (size_t)(inputs + 1) / 2;
    return panels * pairs * 2 * PANEL * sizeof(bf16);
}

RZ_INLINE bf16 *place(bf16 *packed, long output, long pairs)
{
    return packed + output / PANEL * pairs * 2 * PANEL + output % PANEL * 2;
}

/* 16 rows that become neighbours, a vector at a time; returns the inputs that are done. */
static long pack_vectors(bf16 *to, const bf16 *weights, long inputs, long stride)
{
    const bf16 *rows[LANES];
    for (int row = 0; row < LANES; row++)
        rows[row] = weights + row * stride;
    long k = 0;
    for (; k + 2 * LANES <= inputs; k += 2 * LANES)
        transpose_pairs(rows, (int)k, (int32_t *)to + k / 2 * PANEL, PANEL);
    return k;
}

void rz_pack(bf16 *packed, const bf16 *weights, long rows, long inputs, long stride, long first, long run, long step)
{
    const long pairs = (inputs + 1) / 2;
    for (long row = 0; row < rows;) {
        const long output = first + row / run * step + row % run;
        const long together = row % run + LANES <= run && row + LANES <= rows && output % LANES == 0 ? LANES : 1;
        bf16 *to = place(packed, output, pairs);
        const bf16 *from = weights + row * stride;
        const long done = together == LANES ? pack_vectors(to, from, inputs, stride) : 0;
        for (long i = 0; i < together; i++)
            for (long k = done; k < inputs; k++)
                to[i * 2 + k / 2 * 2 * PANEL + k % 2] = from[i * stride + k];
        row += together;
    }
}

void rz_unpack_row(bf16 *row, const bf16 *packed, long output, long inputs)
{
    long pairs = (inputs + 1) / 2;
    const bf16 *from = place((bf16 *)packed, output, pairs);
    for (long k = 0; k < inputs; k++)
        row[k] = from[k / 2 * 2 * PANEL + k % 2];
}
