/* What a thread holds while it works on a part, and the kinds of rounds that read and write it. */
#ifndef RZ_ATTENTION_SCRATCH_H
#define RZ_ATTENTION_SCRATCH_H

#include "attention.h"
#include "digits.h"

#define LOG2_E 1.44269504f

enum {
    FEW_QUERIES = 4, /* that are not worth packing keys and values for */
    AT_ONCE_REDUCED = 4, /* vectors that are reduced to their largest values or sums together */
};

/* Rows are as wide as the model's keys and values are, and follow each other: further apart, they would take the same
 * few sets of the caches. Where rows are read or written by vectors or by fours, there are more than TILE_QUERIES. */
typedef struct {
    bf16 keys[KEYS * MAX_KEY_DIM];              /* [KEYS / PANEL][key_dim / 2][PANEL][2]: packed, pairs of d by keys */
    bf16 values[MAX_VALUE_DIM * KEYS];          /* [value_dim / PANEL][KEYS / 2][PANEL][2]: packed, pairs of keys by d */
    bf16 decoded[2][KEYS * MAX_KEY_DIM];        /* [KEYS][key_dim]: compressed keys and values as bf16 */
    operand queries[TILE_QUERIES * MAX_KEY_DIM]; /* [rows * heads][key_dim] */
    operand weights[TILE_QUERIES][KEYS];
    float scores[TILE_QUERIES][KEYS];           /* of few queries, the weights too */
    float sums[TILE_QUERIES * MAX_VALUE_DIM];   /* [rows * heads][rz_sum_width] */
    float scales[MOST_TOGETHER][2][KEYS];       /* of the keys and values of each KV head */
    bf16 columns[MOST_TOGETHER][FEW_QUERIES * MAX_KEY_DIM]; /* few queries of each KV head (attention_few.h) */
    float largest[TILE_QUERIES + LANES], total[TILE_QUERIES + LANES];
    float peaks[TILE_QUERIES + LANES], keep[TILE_QUERIES + LANES]; /* a round's largest score; of the sums so far */
    bf16 zeros[MAX_KEY_DIM];
    /* Of rounds of codes of int8; the queries' numbers are read as whole vectors. */
    uint8_t numbers[(TILE_QUERIES + LANES) * 2 * MAX_KEY_DIM]; /* [rows * heads][2][key_dim]: queries as digits */
    uint8_t digits[2][NUMBERS_AT_ONCE][2][KEYS];               /* weights, of these queries and of the last */
    int8_t packed_keys[KEYS * MAX_KEY_DIM], packed_values[KEYS * MAX_VALUE_DIM];
    digit_sums products[2], gains[MAX_VALUE_DIM / COLUMNS]; /* of keys; of weights with values */
    float units[TILE_QUERIES + LANES];               /* of `numbers`, and their surplus */
    int32_t surplus[TILE_QUERIES];
    float added[TILE_QUERIES + LANES], share_units[TILE_QUERIES + LANES]; /* a round's sums of weights; of its sums */
    uint8_t turned[TILE_QUERIES]; /* whether a query's sums have the order of rz_pack_as_lines */
} rz_attention_memory;

/* The distance of the sums of two queries: those of COLUMNS values are turned together. */
RZ_INLINE int rz_sum_width(const rz_attention_shape *shape)
{
    return (shape->value_dim + COLUMNS - 1) / COLUMNS * COLUMNS;
}

/* What a part is for one of its KV heads, and the first of its queries. */
typedef struct {
    rz_attention_part part;
    int first_query;
} head_part;

/* The row of a query. */
RZ_INLINE int row_of(const head_part *head, int query)
{
    return (query - head->first_query) / head->part.heads;
}

/* Keys [first, first + count), KEYS at most, all kept as codes of int8, for queries [begin, end) of a KV head, which see all
 * of them but for what a window leaves out. */
void rz_attend_codes(const rz_attention_shape *shape, const rz_cache *cache, const head_part *head, int begin, int end,
                     int first, int count, rz_attention_memory *memory, rz_upcoming *ahead);

/* Brings the sums of queries [begin, end) into the order that is asked for. */
void rz_turn_sums(const rz_attention_shape *shape, rz_attention_memory *memory, int begin, int end, int turned);

#endif
