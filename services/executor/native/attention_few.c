/* See attention_few.h. */
#include "attention_few.h"

#if defined(__AMX_BF16__)
#include "levels/few_amx.h"
#endif

void rz_place_few(bf16 *columns, const bf16 *queries, long stride, int rows, int heads, int d)
{
    memset(columns, 0, (size_t)d * FEW_QUERIES * sizeof(bf16));
    for (int query = 0; query < rows * heads; query++) {
        const bf16 *from = queries + query / heads * stride + query % heads * d;
        for (int i = 0; i < d; i += 2)
            memcpy(columns + i * FEW_QUERIES + query * 2, from + i, 2 * sizeof(bf16));
    }
}

void rz_score_few(const bf16 *columns, int first, int count, const bf16 *const *rows, int keys, int d, float *scores,
                  rz_attention_memory *memory, rz_upcoming *ahead)
{
#if defined(__AMX_BF16__)
    score_in_tiles(columns, first, count, rows, keys, d, scores, memory, ahead);
#else
    (void)columns, (void)first, (void)count, (void)rows, (void)keys, (void)d, (void)scores, (void)memory, (void)ahead;
#endif
}

enum {
    FEW_VECTORS = VECTORS == 32 ? 2 : 1, /* of values, whose sums are in registers */
    KEYS_OF_SUM = PAIRS_APART ? PANEL : KEYS,
};

typedef f32 few_sums[FEW_QUERIES][FEW_VECTORS][1 + PAIRS_APART];

RZ_INLINE void begin_sums_of_few(const int count, const float *sums, int width, few_sums to)
{
#pragma GCC unroll 4
    for (int query = 0; query < count; query++)
#pragma GCC unroll 2
        for (int v = 0; v < FEW_VECTORS; v++) {
            to[query][v][0] = PAIRS_APART ? f32_zero() : f32_load(sums + query * width + v * LANES);
            to[query][v][PAIRS_APART] = PAIRS_APART ? f32_zero() : to[query][v][0];
        }
}

/* One key's values from `values` on; `which` of its pair. */
RZ_INLINE void add_key(const int count, const int which, const float *weights, const bf16 *values, few_sums to)
{
    f32 these[FEW_VECTORS];
#pragma GCC unroll 2
    for (int v = 0; v < FEW_VECTORS; v++)
        these[v] = f32_load_bf16(values + v * LANES);
#pragma GCC unroll 4
    for (int query = 0; query < count; query++) {
        const f32 weight = f32_set1(weights[query * KEYS]);
#pragma GCC unroll 2
        for (int v = 0; v < FEW_VECTORS; v++)
            to[query][v][which & PAIRS_APART] = f32_fma(weight, these[v], to[query][v][which & PAIRS_APART]);
    }
}

RZ_INLINE void end_sums_of_few(const int count, const few_sums from, float *sums, int width)
{
#pragma GCC unroll 4
    for (int query = 0; query < count; query++)
#pragma GCC unroll 2
        for (int v = 0; v < FEW_VECTORS; v++) {
            float *to = sums + query * width + v * LANES;
            if (PAIRS_APART)
                f32_store(to, f32_add(f32_load(to), f32_add(from[query][v][0], from[query][v][PAIRS_APART])));
            else /* as the zeros behind the last key do, which make +0 of -0 */
                f32_store(to, f32_add(from[query][v][0], f32_zero()));
        }
}

/* FEW_VECTORS vectors of values from `column` on, of `count` queries. */
RZ_INLINE void add_block(const int count, const float *weights, const bf16 *const *rows, int keys, int column, float *sums,
                         int width, rz_upcoming *ahead)
{
    few_sums added;
    for (int begin = 0; begin < keys; begin += KEYS_OF_SUM) {
        const int end = begin + KEYS_OF_SUM < keys ? begin + KEYS_OF_SUM : keys;
        int key = begin;
        begin_sums_of_few(count, sums, width, added);
        for (; key + 2 <= end; key += 2) {
            pull(ahead, FEW_VECTORS);
            add_key(count, 0, weights + key, rows[key] + column, added);
            add_key(count, 1, weights + key + 1, rows[key + 1] + column, added);
        }
        if (key < end)
            add_key(count, 0, weights + key, rows[key] + column, added);
        end_sums_of_few(count, added, sums, width);
    }
}

void rz_add_few(const float *weights, int count, const bf16 *const *rows, int keys, int value_dim, float *sums, int width,
                rz_upcoming *ahead)
{
    for (int column = 0; column < value_dim; column += FEW_VECTORS * LANES, sums += FEW_VECTORS * LANES) {
        if (count == 1)
            add_block(1, weights, rows, keys, column, sums, width, ahead);
        else if (count == 2)
            add_block(2, weights, rows, keys, column, sums, width, ahead);
        else if (count == 3)
            add_block(3, weights, rows, keys, column, sums, width, ahead);
        else
            add_block(4, weights, rows, keys, column, sums, width, ahead);
    }
}
