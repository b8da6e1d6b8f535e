/* See low_rank.h. */
#include "low_rank.h"

#include "state.h"

enum {
    CHAINS = 4,                  /* sums of one value, added up in the end: products need not wait for each other */
    BLOCK_PAIR = 2 * LANES,      /* values of a pair of inputs of a block */
    WIDES = LANES / WIDTH,
    GROUPS_AHEAD = 2,            /* that are asked for: what comes from memory is late otherwise */
    GROUP_PAIRS = 64,            /* of one scale; as many are widened at once, as in gemm.c */
    SCALES = LANES * sizeof(bf16),
    COLUMNS_OF_QUAD = 4,
    QUADS_OF_COLUMNS = LANES / COLUMNS_OF_QUAD,
    OFFSET = 128,                /* of the codes of B */
    CACHE_LINE = 64,
};

/* 16 columns of t, rounded: they lie where the same 16 are without codes. */
typedef struct {
    int8_t codes[LANES];
    int16_t starts[QUADS_OF_COLUMNS]; /* what a sum of products with one quad begins with over OFFSET, for B's */
    int32_t start;                    /* with all of them */
    float scale;
} rounded_columns;

_Static_assert(sizeof(rounded_columns) <= LANES * sizeof(bf16), "rounded columns fit where they are as operands");

size_t rz_shrink_bytes(const rz_low_rank *low, long inputs)
{
    const size_t pairs = (size_t)(inputs + 1) / 2;
    return low->coded ? pairs * BLOCK_PAIR + (pairs + GROUP_PAIRS - 1) / GROUP_PAIRS * SCALES
                      : pairs * BLOCK_PAIR * sizeof(bf16);
}

size_t rz_expand_bytes(const rz_low_rank *low, long pairs)
{
    return (size_t)pairs * BLOCK_PAIR * (low->coded ? 1 : sizeof(bf16)) + (low->coded ? SCALES : 0);
}

/* --- shrink ------------------------------------------------------------------------------------------ */

/* Sums [CHAINS][LANES] of each row by a group of pairs of one block; the same bytes from `ahead` on are asked for. */
RZ_INLINE void shrink_pairs(const int rows, const int coded, const operand *const *x, const uint8_t *a, const uint8_t *ahead,
                            long pairs, float *sums, int add)
{
    const long bytes = BLOCK_PAIR * (coded ? 1 : (long)sizeof(bf16));
    wide held[ROWS_TOGETHER][CHAINS][WIDES];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDES; v++)
                held[row][chain][v] = add ? wide_load(sums + (row * CHAINS + chain) * LANES + v * WIDTH) : wide_zero();
    for (long pair = 0; pair < pairs; pair += CHAINS) {
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++) {
            if (pair + chain >= pairs)
                continue;
            if (!coded || chain % 2 == 0)
                __builtin_prefetch(ahead + (pair + chain) * bytes);
#pragma GCC unroll 2
            for (int turn = 0; turn < TURNS; turn++) {
                wide weights[WIDES];
#pragma GCC unroll 4
                for (int v = 0; v < WIDES; v++)
                    weights[v] = coded ? weights_of_codes((const int8_t *)a + v * 2 * WIDTH, turn)
                                       : weights_of((const bf16 *)a + v * 2 * WIDTH, turn);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    wide one = operand_of(x[row] + 2 * (pair + chain), turn);
#pragma GCC unroll 4
                    for (int v = 0; v < WIDES; v++)
                        held[row][chain][v] = multiply_add(held[row][chain][v], one, weights[v]);
                }
            }
            a += bytes;
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDES; v++)
                wide_store(sums + (row * CHAINS + chain) * LANES + v * WIDTH, held[row][chain][v]);
}

typedef void (*shrink_function)(const operand *const *, const uint8_t *, const uint8_t *, long, float *, int);

#define SHRINK_AS(n, coded, name) \
    static __attribute__((noinline)) void name(const operand *const *x, const uint8_t *a, const uint8_t *ahead, long pairs, \
                                               float *sums, int add) \
    { \
        shrink_pairs(n, coded, x, a, ahead, pairs, sums, add); \
    }
#define SHRINK_OF(n) SHRINK_AS(n, 0, shrink_##n) SHRINK_AS(n, 1, shrink_codes_##n)

SHRINK_OF(1)
#if VECTORS >= 32
SHRINK_OF(2) SHRINK_OF(3) SHRINK_OF(4)
#endif

/* [coded][rows] */
static const shrink_function SHRINKS[2][ROWS_TOGETHER + 1] = {
#if VECTORS >= 32
    { NULL, shrink_1, shrink_2, shrink_3, shrink_4 },
    { NULL, shrink_codes_1, shrink_codes_2, shrink_codes_3, shrink_codes_4 },
#else
    { NULL, shrink_1 }, { NULL, shrink_codes_1 },
#endif
};

RZ_INLINE f32 chains_of(const float *sums)
{
    const f32 first = f32_add(f32_load(sums), f32_load(sums + LANES));
    const f32 second = f32_add(f32_load(sums + 2 * LANES), f32_load(sums + 3 * LANES));
    return f32_add(first, second);
}

/* As B reads it. */
RZ_INLINE void store_operands(operand *to, f32 value)
{
    bf16 rounded_values[LANES];
    f32_store_bf16(rounded_values, value);
    for (int i = 0; i < LANES; i++)
        to[i] = TURNS == 1 ? (operand)rounded_values[i] : (operand)bf16_to_float(rounded_values[i]);
}

RZ_INLINE void store_rounded(operand *to, f32 value)
{
    rounded_columns *made = (void *)to;
    const float largest = f32_largest(f32_abs(value));
    f32_store_i8(made->codes, f32_mul(value, f32_set1(largest > 0 ? 127.0f / largest : 0.0f)));
    made->scale = largest / 127.0f;
    made->start = 0;
    for (int quad = 0; quad < QUADS_OF_COLUMNS; quad++) {
        const int8_t *codes = made->codes + quad * COLUMNS_OF_QUAD;
        made->starts[quad] = (int16_t)-(codes[0] + codes[1] + codes[2] + codes[3]);
        made->start += OFFSET * made->starts[quad];
    }
}

/* A group's inputs, as the products take them. */
RZ_INLINE void inputs_of(int rows, const bf16 *const *x, long first, long count, operand (*room)[2 * GROUP_PAIRS],
                         const operand **from)
{
    for (int row = 0; row < rows; row++) {
        from[row] = TURNS == 1 ? (const operand *)x[row] + first : room[row];
        for (long i = 0; TURNS > 1 && i < count; i++)
            room[row][i] = (operand)bf16_to_float(x[row][first + i]);
    }
}

void rz_shrink_block(const rz_low_rank *low, int rows, const bf16 *const *x, const uint8_t *a, const uint8_t *coming,
                     long inputs, operand *const *to)
{
    const long pairs = (inputs + 1) / 2, group_bytes = (long)rz_shrink_bytes(low, 2 * GROUP_PAIRS);
    float sums[ROWS_TOGETHER * CHAINS * LANES] __attribute__((aligned(64)));
    f32 totals[ROWS_TOGETHER];
    operand room[ROWS_TOGETHER][2 * GROUP_PAIRS];
    const operand *from[ROWS_TOGETHER];
    for (int row = 0; row < rows; row++)
        totals[row] = f32_zero();
    const uint8_t *rest = coming;
    for (long pair = 0; pair < pairs; pair += GROUP_PAIRS, a += group_bytes) {
        const long here = least(GROUP_PAIRS, pairs - pair);
        const uint8_t *ahead = a;
        if (pair + GROUPS_AHEAD * GROUP_PAIRS < pairs) {
            ahead += GROUPS_AHEAD * group_bytes;
        } else if (rest) {
            ahead = rest;
            rest += group_bytes;
        }
        inputs_of(rows, x, 2 * pair, 2 * here, room, from);
        if (!low->coded) {
            SHRINKS[0][rows](from, a, ahead, here, sums, pair > 0);
            continue;
        }
        SHRINKS[1][rows](from, a + SCALES, ahead, here, sums, 0);
        const f32 scales = f32_load_bf16((const bf16 *)a);
        for (int row = 0; row < rows; row++)
            totals[row] = f32_fma(chains_of(sums + row * CHAINS * LANES), scales, totals[row]);
    }
    for (int row = 0; row < rows; row++)
        if (low->coded)
            store_rounded(to[row], totals[row]);
        else
            store_operands(to[row], chains_of(sums + row * CHAINS * LANES));
}

/* --- expand ------------------------------------------------------------------------------------------ */

RZ_INLINE void expand_pairs(const int rows, const int halves, const rz_expanding *at)
{
    wide held[ROWS_TOGETHER][2][WIDES];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDES; v++)
                held[row][half][v] = wide_load(at->sums[row] + at->column[half] + v * WIDTH);
    for (long pair = 0; pair < at->pairs; pair++) {
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            __builtin_prefetch(at->ahead[half] + pair * BLOCK_PAIR * (long)sizeof(bf16));
#pragma GCC unroll 2
        for (int turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++) {
                const bf16 *b = (const bf16 *)at->b[half] + pair * BLOCK_PAIR;
                wide weights[WIDES];
#pragma GCC unroll 4
                for (int v = 0; v < WIDES; v++)
                    weights[v] = weights_of(b + v * 2 * WIDTH, turn);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    wide one = operand_of(at->t[row] + at->first[half] + 2 * pair, turn);
#pragma GCC unroll 4
                    for (int v = 0; v < WIDES; v++)
                        held[row][half][v] = multiply_add(held[row][half][v], one, weights[v]);
                }
            }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDES; v++)
                wide_store(at->sums[row] + at->column[half] + v * WIDTH, held[row][half][v]);
}

/* What a sum of products with some quads begins with. */
RZ_INLINE int32_t start_of(const rounded_columns *t, const int quads, long quad)
{
    if (quads == QUADS_OF_COLUMNS)
        return t->start;
    return OFFSET * (t->starts[quad] + (quads > 1 ? t->starts[quad + 1] : 0));
}

/* Adds `quads` quads of rounded columns, from column `first` of each half on, by as many of B. */
RZ_INLINE void expand_quads(const int rows, const int halves, const int quads, const rz_expanding *at, long column,
                            f32 (*totals)[2])
{
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        const long first = at->first[half] + column, quad = first % LANES / COLUMNS_OF_QUAD;
        const uint8_t *b = at->b[half] + SCALES + column * LANES;
        const rounded_columns *t[ROWS_TOGETHER];
        i32 dots[ROWS_TOGETHER];
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            t[row] = (const void *)(at->t[row] + first / LANES * LANES);
            dots[row] = i32_set1(start_of(t[row], quads, quad));
        }
#pragma GCC unroll 4
        for (int i = 0; i < quads; i++) {
            const bytes codes = bytes_load_once(b + i * COLUMNS_OF_QUAD * LANES);
#pragma GCC unroll 4
            for (int row = 0; row < rows; row++)
                dots[row] = i32_dot_u8(dots[row], codes, bytes_repeat4(t[row]->codes + (quad + i) * COLUMNS_OF_QUAD));
        }
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++)
            totals[row][half] = f32_fma(f32_from_i32(dots[row]), f32_set1(t[row]->scale), totals[row][half]);
    }
}

RZ_INLINE void expand_codes(const int rows, const int halves, const rz_expanding *at)
{
    f32 totals[ROWS_TOGETHER][2];
    const long columns = 2 * at->pairs, bytes = SCALES + columns * LANES;
    for (long i = 0; i < bytes; i += CACHE_LINE)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            __builtin_prefetch(at->ahead[half] + i);
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
        totals[row][0] = totals[row][1] = f32_zero();
    if (columns == COLUMNS_OF_QUAD)
        expand_quads(rows, halves, 1, at, 0, totals);
    else if (columns == 2 * COLUMNS_OF_QUAD)
        expand_quads(rows, halves, 2, at, 0, totals);
    else
        for (long column = 0; column < columns; column += LANES)
            expand_quads(rows, halves, QUADS_OF_COLUMNS, at, column, totals);
#pragma GCC unroll 2
    for (int half = 0; half < halves; half++) {
        const f32 scales = f32_load_bf16((const bf16 *)at->b[half]);
#pragma GCC unroll 4
        for (int row = 0; row < rows; row++) {
            float *sums = at->sums[row] + at->column[half];
            f32_store(sums, f32_fma(totals[row][half], scales, f32_load(sums)));
        }
    }
}

typedef void (*expand_function)(const rz_expanding *);

#define EXPAND_AS(kind, n, halves) \
    static __attribute__((noinline)) void kind##_##n##_##halves(const rz_expanding *at) { kind(n, halves, at); }
#define EXPAND_OF(n) \
    EXPAND_AS(expand_pairs, n, 1) EXPAND_AS(expand_pairs, n, 2) EXPAND_AS(expand_codes, n, 1) EXPAND_AS(expand_codes, n, 2)
#define EXPANDS_OF(n) \
    { { expand_pairs_##n##_1, expand_pairs_##n##_2 }, { expand_codes_##n##_1, expand_codes_##n##_2 } }

EXPAND_OF(1)
#if VECTORS >= 32
EXPAND_OF(2) EXPAND_OF(3) EXPAND_OF(4)
#endif

/* [rows][coded][halves - 1] */
static const expand_function EXPANDS[ROWS_TOGETHER + 1][2][2] = {
    [1] = EXPANDS_OF(1),
#if VECTORS >= 32
    [2] = EXPANDS_OF(2), [3] = EXPANDS_OF(3), [4] = EXPANDS_OF(4),
#endif
};

void rz_expand_blocks(const rz_low_rank *low, int rows, const rz_expanding *at)
{
    EXPANDS[rows][low->coded][at->halves - 1](at);
}
