/* The forward pass of a decoder-only transformer over a step plan, in one call.
 *
 * Covers layers of one shape, whatever the model is called:
 *
 *     x ─┬─ norm ─ qkv ─ (norm per head) ─ rotary ─ attention ─ output ─ (norm) ─ + ─┬─ norm ─ gate·up ─ down ─ (norm) ─ + ─
 *        └───────────────────────────────────────────────────────────────────────────┘ └──────────────────────────────────┘
 *
 * with RMS norms, bf16 weights and activations, a float32 residual stream and float32 sums. What is in brackets is
 * optional; gate·up and down may be a mixture of experts. Models of other shapes run through PyTorch (lowering.py decides).
 *
 * Every pointer is the caller's and stays valid as long as the decoder. All sizes are this rank's share.
 */
#ifndef RZ_DECODER_H
#define RZ_DECODER_H

#include <stdint.h>

#include "shared_memory.h"

enum { RZ_F32, RZ_F16, RZ_BF16, RZ_U8, RZ_I8 }; /* types of scales */
enum { RZ_NO_MINIMUMS, RZ_MINIMUMS, RZ_ZEROS };
enum { RZ_NO_FLOATS, RZ_E4M3, RZ_FLOAT_TABLE };

/* How a quantized weight is packed: see quantized.h. */
typedef struct {
    int32_t bits;    /* 2, 3, 4, 5, 6 or 8; 0: the weight is bf16, and nothing below counts */
    int32_t columns; /* of codes: the inputs, or what the permutation makes of them */
    int32_t group;   /* columns of a scale: 16, 32, 64, 128, 256 or 512; 0: all */
    int32_t per;     /* groups of a scale of scales; 0: there are none */
    int32_t scale_type, super_type;
    int32_t minimums; /* minimums have the type of scales, zero points are RZ_U8 */
    int32_t offset;   /* that codes have; nothing where there is a table */
    int32_t has_table;
    int8_t table[16];
    int32_t floats;           /* what codes of 4 or 8 bits stand for, where it is bf16: see float_codes.h */
    uint16_t float_table[16]; /* with RZ_FLOAT_TABLE */
    const int32_t *permutation; /* [columns]: the input of each; -1: none; or NULL */
} rz_format;

/* A weight as model/quantized.py has it; strides in elements. */
typedef struct {
    const uint8_t *codes; /* [outputs][columns] */
    const void *scales, *minimums; /* [outputs][groups]; minimums or zero points, or NULL */
    const void *supers, *super_minimums; /* [outputs][groups / per] or NULL */
    int64_t outputs, code_stride, scale_stride, minimum_stride, super_stride, super_minimum_stride;
} rz_codes;

typedef struct rz_linear {
    const void *packed; /* see gemm.h; where it is quantized, quantized.h */
    const float *bias;  /* [outputs] or NULL */
    int32_t outputs, inputs;
    rz_format format;
    const struct rz_linear *next; /* the outputs behind these, of another format; or NULL */
} rz_linear;

enum { RZ_SOFTMAX, RZ_SIGMOID };
enum { RZ_MOST_EXPERTS = 1024 };

/* A mixture of experts: each row goes to `chosen` of them, and what they make of it is added, times their weights. */
typedef struct {
    rz_linear router;        /* bf16; outputs: experts */
    rz_linear gate_up, down; /* of all experts, one after the other, each as a layer's; whole panels each */
    rz_linear shared_gate;   /* bf16, one output: what the sigmoid of weights the shared expert; packed NULL: 1 */
    const float *correction; /* [experts]: added to scores to choose by, not to weights; or NULL */
    int32_t count, chosen;
    int32_t scores;        /* what makes scores of the router's outputs */
    int32_t normalised;    /* the weights of a row add up to 1 */
    int32_t groups, among; /* experts are chosen from the best `among` of as many groups, by the sum of their two best */
    float scale;           /* of the weights */
} rz_experts;

typedef struct {
    const float *attention_norm, *feed_forward_norm;             /* [hidden] */
    const float *after_attention_norm, *after_feed_forward_norm; /* [hidden] or NULL */
    const float *query_norm, *key_norm;                          /* [head_dim] or NULL */
    rz_linear qkv;     /* outputs: q heads, k heads, v heads */
    rz_linear output;  /* outputs: hidden; inputs: some of the q heads' values, see first_output */
    rz_linear gate_up; /* outputs: gate 0-15, up 0-15, gate 16-31, up 16-31, ... */
    rz_linear down;    /* outputs: hidden */
    const rz_experts *experts; /* or NULL; gate_up and down are then the shared expert's, packed NULL: there is none */
    int32_t rotary;    /* index of the frequencies; -1: none */
    int32_t window;    /* tokens that are seen back; 0: all */
    /* the layer's share of the KV cache, see rz_cache */
    void *hot;
    const void *codes;
    const float *scales;
    int64_t num_hot;
    int64_t codec;
} rz_layer;

/* A KV head that this rank and one of its neighbours hold: which of them attends is decided row by row
 * (attention_stages.c), and its outputs are brought to both. */
typedef struct {
    int32_t kv_head;     /* among this rank's */
    int32_t slot;        /* among all shared heads of the ring */
    int32_t is_first;    /* of the two ranks */
    int32_t first_share; /* what the first one computes, in parts of `ranks` */
} rz_shared_head;

enum { RZ_SILU = 0, RZ_GELU_TANH = 1 };

enum { RZ_ROTARIES = 2 };

typedef struct {
    int32_t layers, hidden, intermediate, q_heads, kv_heads, head_dim, block_size;
    int32_t activation;
    int32_t rotary_dim;         /* of head_dim */
    int32_t rotary_interleaved; /* pairs (0, 1), (2, 3), ... instead of halves */
    int32_t num_hot, num_cold;  /* blocks of the KV cache */
    int32_t embedding_split;    /* the ranks hold different rows of it: they are summed */
    int32_t vocab_first;        /* token of the first row of the embedding */
    int32_t rows_in_embedding;  /* rows that this rank holds */
    int32_t first_output;       /* of the q heads, the first that `output` multiplies */
    int32_t ranks;
    int32_t shared_in_ring;     /* KV heads that two ranks hold */
    int32_t shared_here;        /* how many of them this rank holds */
    rz_shared_head shared[2];
    float eps, attention_scale, attention_cap, embedding_scale, residual_scale, logit_scale, logit_cap;
    const float *frequencies[RZ_ROTARIES]; /* [rotary_dim / 2] radians per position */
    float rotary_scale[RZ_ROTARIES];       /* of cosines and sines */
    const rz_layer *layer;
    const float *final_norm;
    rz_linear embedding; /* packed like a linear layer: one output per token */
    rz_linear head;
    rz_ring *ring;           /* with a lane for every thread; NULL: a ring of one */
    int64_t ring_timeout_ns; /* that one wait may take */
} rz_model;

/* Arrays as in a StepPlan (core/step_plan.py). */
typedef struct {
    int32_t tokens, sequences, sampled, table_blocks;
    const int32_t *token_ids, *positions, *slots, *query_lens, *context_lens, *block_tables, *sample_rows;
    float *logits;             /* [sampled, head.outputs]; NULL: only the largest are wanted: */
    float *values;             /* [sampled] */
    int64_t *indices;          /* [sampled] */
    _Atomic int64_t *progress; /* grows by one with each layer; the caller's thread alone writes it */
    const int32_t *pools;      /* [num_pools][2]: first and end of rows that are summed up behind the last norm; none
                                * is in two pools, and none is sampled */
    float *pooled;             /* [num_pools][hidden] */
    int64_t num_pools;
    const int32_t *compressions; /* [num_compressions][2], (hot id, cold id): the blocks that this step fills, compressed
                                  * in each layer behind its writes and before it attends */
    int64_t num_compressions;
} rz_step;

/* Bytes of linear, layer, model, step, codes and experts. Whoever fills them asks whether theirs are these. */
void rz_sizes(int64_t *sizes);

/* The levels of instructions (levels/) that this processor runs, by name, the best first, each with a space behind it,
 * to `names` [RZ_LEVEL_NAMES]. What computes is there once for each level, its functions named after it. */
enum { RZ_LEVEL_NAMES = 64 };
void rz_levels(char *names);

typedef struct rz_decoder rz_decoder;

/* What a step's time is spent on. */
enum {
    RZ_EMBED, RZ_NORM, RZ_QKV, RZ_PLACE, RZ_ATTEND, RZ_OUTPUT, RZ_GATE_UP, RZ_DOWN, RZ_HEAD, RZ_SUM, RZ_PARTS,
};

enum { RZ_OK = 0, RZ_NO_MEMORY = 1, RZ_RING_LOST = 2, RZ_BAD_PLAN = 3 /* names what does not exist */ };

/* NULL when there is no memory. `model` is copied; what it points to is not. `cpus` [threads]: the cores to keep
 * the threads on; NULL: any. */
rz_decoder *rz_decoder_new(const rz_model *model, int threads, const int *cpus);
void rz_decoder_free(rz_decoder *decoder);

/* Computes one step. Returns RZ_OK or what went wrong. One caller at a time. */
int rz_decoder_forward(rz_decoder *decoder, const rz_step *step);

/* out [rows, outputs] float32 of `rows` rows of bf16 `x`, by `linear` alone, of any model. RZ_OK or RZ_NO_MEMORY. One
 * caller at a time. */
int rz_decoder_multiply(rz_decoder *decoder, const rz_linear *linear, const void *x, int rows, float *out);

/* Nanoseconds that the steps so far have spent on each part, in `spent` [RZ_PARTS]. */
void rz_decoder_spent(const rz_decoder *decoder, int64_t *spent);

/* The largest logit of each of `rows` rows, `width` apart, and its index: NaN is larger than all. */
void rz_decoder_largest(rz_decoder *decoder, const float *logits, int rows, int width, float *values, int64_t *indices);

#endif
