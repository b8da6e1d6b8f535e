/* Attention over paged keys and values, one KV head at a time.
 *
 * A tile is some rows of one sequence with the query heads that share a KV head, where there are very many some of them:
 *
 *     queries [rows * heads, d]  x  keys [64, d]  ─▶  scores [rows * heads, 64]  ─▶  online softmax
 *                                                     weights [rows * heads, 64] x values [64, d] ─▶ out
 *
 * Rounds begin at multiples of 64 keys and parts at multiples of SPLIT_KEYS, whatever else is computed: what a row
 * comes to does not depend on its neighbours, nor on whether it is decoded or part of a prompt.
 *
 * Keys and values are read block by block, a row's own block as it was written (writable: bf16), earlier ones through
 * the block table as they are kept (quantized: codes and one scale per block and head). In the rounds in which some rows
 * are at home, those of one block are computed after those of another.
 *
 * int8 codes, those of a round that lie before the rows' own block, are multiplied as they are kept (digits.h), where they
 * lie in groups (kv_cache/code_groups.py) without packing them: queries and a round's weights become numbers of 14 bits,
 * sums of products are integers, and scales are applied to these. A weight is rounded to 1/32512 of the largest of them.
 * What else there is of a round is packed as bf16, which both codecs' codes are exact in, for rz_tile, and a scale is
 * applied once, to scores and to weights. For few queries it is not packed: attention_few.h.
 *
 *     position 150, blocks of 16     0 ............ 63 | 64 ........... 127 | 128 .. 143 | 144 .. 150
 *                                    codes             | codes              | codes      | as written
 *
 * Sources: Dao et al., "FlashAttention", https://arxiv.org/abs/2205.14135; Kwon et al., "PagedAttention",
 * https://arxiv.org/abs/2309.06180.
 */
#ifndef RZ_ATTENTION_H
#define RZ_ATTENTION_H

#include "vector.h"

enum {
    KEYS = 64,          /* keys of a round */
    SPLIT_KEYS = 512,   /* keys of a part: a multiple of KEYS */
    TILE_QUERIES = 96,  /* queries of a tile, at most: sums and what is packed for a round stay in the second cache */
    MAX_KEY_DIM = 576,   /* of queries and keys */
    MAX_VALUE_DIM = 512,
    MOST_TOGETHER = 16, /* KV heads of a part */
};

/* One layer's keys and values of this rank. Tensors are contiguous. `lines`: 2, keys and values, both as wide as keys
 * are; or 1, which is both: its first values are the value. */
typedef struct {
    bf16 *writable;      /* [num_writable, lines, kv_heads, block_size, key_dim] */
    const void *codes;   /* [num_quantized, lines, kv_heads, block_size, key_dim]: bytes, or bf16 without a codec */
    const float *scales; /* [num_quantized, lines, kv_heads]; NULL without a codec */
    long num_writable;
    int codec;           /* codec.h */
    int in_groups;       /* codes of int8 lie in groups of LANES tokens: keys as columns, values as lines (digits.h) */
} rz_cache;

typedef struct {
    int kv_heads, lines, key_dim, value_dim, block_size;
    int window;       /* a key is seen up to this many tokens back; 0: all */
    float scale;      /* of scores */
    float soft_cap;   /* cap * tanh(score / cap); 0: none */
    const float *sinks; /* [query heads], in base 2, or NULL: what takes weight and has no value */
} rz_attention_shape;

/* Part of the work: `rows` rows of a sequence, `heads` query heads of each of `kv_heads` KV heads, keys [first_key,
 * last_key). Queries are counted KV head by KV head, of these row by row. Of a block, what several heads keep lies
 * together: read in one round it comes from memory in runs that are long enough for its full rate. */
typedef struct {
    const int32_t *table; /* the sequence's block table */
    const int32_t *slots; /* [rows]: where each row's own key and value are, block * block size + offset */
    const bf16 *queries;  /* first row, first of its query heads; rows are q_stride apart */
    bf16 *out;            /* the same shape; NULL where the part is merged later */
    float *partial;       /* [kv_heads * rows * heads][value_dim + 2]: sums, largest score (base 2), sum of weights; or NULL */
    long q_stride, out_stride;
    int rows, kv_head;     /* kv_head: the first */
    int first_head, heads; /* query heads: the first, and of each KV head; of all no more than TILE_QUERIES */
    int position;         /* of the first row */
    int first_key, last_key; /* multiples of KEYS, but for the end */
    int parts;            /* of the same rows and heads, this one the first: to be merged; else 0 */
    int from_layer, until_layer; /* in which it is computed; layers in which no row chooses count as -1 */
    int kv_heads;          /* at most MOST_TOGETHER */
} rz_attention_part;

/* Those of its KV head `which`, as a part. */
RZ_INLINE rz_attention_part rz_part_of_head(const rz_attention_shape *shape, const rz_attention_part *part, int which)
{
    rz_attention_part own = *part;
    own.kv_heads = 1;
    own.kv_head += which;
    own.first_head += which * part->heads;
    own.queries += (long)which * part->heads * shape->key_dim;
    own.out = part->out ? part->out + (long)which * part->heads * shape->value_dim : NULL;
    own.partial = part->partial ? part->partial + (long)which * part->rows * part->heads * (shape->value_dim + 2) : NULL;
    return own;
}

/* Bytes of scratch memory that a thread needs, aligned to 64. */
size_t rz_attention_scratch(void);

/* `next`: the part that this thread works on after this one, or NULL: its first keys are asked for. */
void rz_attend(const rz_attention_shape *shape, const rz_cache *cache, const rz_attention_part *part,
               const rz_attention_part *next, void *scratch);

/* Merges `parts` partial results of one row and query head, `stride` floats apart, into out [value_dim]. A part that
 * has seen nothing changes no bit. `sink`: the head's, or NULL. */
void rz_merge(const float *partial, int parts, long stride, int value_dim, const float *sink, bf16 *out);

#endif
