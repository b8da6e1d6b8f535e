/* The forward pass of a decoder-only transformer over a step plan, in one call.
 *
 * Covers layers of one shape, whatever the model is called:
 *
 *     x ─┬─ norm ─ qkv ─ (norm per head) ─ rotary ─ attention ─ output ─ (norm) ─ + ─┬─ norm ─ gate·up ─ down ─ (norm) ─ + ─
 *        └───────────────────────────────────────────────────────────────────────────┘ └──────────────────────────────────┘
 *
 * with RMS norms, bf16 weights and activations, a float32 residual stream and float32 sums. What is in brackets is
 * optional, and the norm before a block where there is one behind it; gate·up and down may be a mixture of experts. A
 * layer may keep a recurrent state in place of qkv, rotary and attention (recurrent.h), or one line for all heads
 * (latent.h). Models of other shapes run through PyTorch (lowering.py decides).
 *
 * Every pointer is the caller's and stays valid as long as the decoder. All sizes are this rank's share.
 */
#ifndef RZ_DECODER_H
#define RZ_DECODER_H

#include <stdint.h>

#include "sampling.h"
#include "shared_memory.h"

enum { RZ_F32, RZ_F16, RZ_BF16, RZ_U8, RZ_I8 }; /* types of scales */
enum { RZ_NO_MINIMUMS, RZ_MINIMUMS, RZ_ZEROS };
enum { RZ_NO_FLOATS, RZ_E4M3, RZ_FLOAT_TABLE, RZ_SHORT_EXPONENTS };

/* How a quantized weight is packed: see quantized.h. */
typedef struct {
    int32_t bits;    /* 2, 3, 4, 5, 6 or 8, or 12 with RZ_SHORT_EXPONENTS; 0: the weight is bf16, and nothing below counts */
    int32_t columns; /* of codes: the inputs, or what the permutation makes of them */
    int32_t group;   /* columns of a scale: 16, 32, 64, 128, 256 or 512; 0: all */
    int32_t per;     /* groups of a scale of scales; 0: there are none */
    int32_t scale_type, super_type;
    int32_t minimums; /* minimums have the type of scales, zero points are RZ_U8 */
    int32_t offset;   /* that codes have; nothing where there is a table */
    int32_t has_table;
    int8_t table[16];
    int32_t floats;           /* what codes stand for, where it is bf16: see float_codes.h; or bf16 itself: short_exponents.h */
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

/* What one adapter adds to a linear, or to one of its experts or heads: B (A x), see adapters.h and low_rank.h. */
enum { RZ_MODULES = 4 /* that are joined in a linear, at most */ };
typedef struct {
    const void *shrink;             /* A of all modules: blocks of 16 of `columns` */
    const void *expand[RZ_MODULES]; /* B of each: blocks of 16 of its outputs, see low_rank.h */
    int32_t columns;                /* between A and B, a multiple of 16; 0: nothing is added */
    int32_t first[RZ_MODULES];      /* where those of a module begin, an even number */
    int32_t pairs[RZ_MODULES];      /* half of how many there are; 0: nothing is added to its outputs */
    int32_t coded;                  /* 1: factors are codes of 8 bits; 0: bf16 */
} rz_low_rank;

/* Which of a module's blocks of B some outputs take. */
typedef struct {
    int32_t module, block;
} rz_adapted_block;

/* What adapters add to a linear. */
typedef struct {
    const int32_t *first; /* [16 outputs each, whole panels, of one expert or head, and one more]: in `blocks` */
    const rz_adapted_block *blocks;
    const rz_low_rank *const *slots; /* [slots of adapters]: [experts or heads]; NULL: nothing */
} rz_adapted;

typedef struct rz_linear {
    const void *packed; /* see gemm.h; where it is quantized, quantized.h */
    const float *bias;  /* [outputs] or NULL */
    int32_t outputs, inputs;
    rz_format format;
    const struct rz_linear *next; /* the outputs behind these, of another format; or NULL */
    const rz_adapted *adapted;    /* or NULL */
} rz_linear;

enum { RZ_SOFTMAX, RZ_SIGMOID };
enum { RZ_MOST_EXPERTS = 1024 };

/* A mixture of experts: each row goes to `chosen` of them, and what they make of it is added, times their weights. */
typedef struct {
    rz_linear router;        /* bf16; outputs: experts, or twice as many: of each also what its weights have beyond bf16 */
    rz_linear gate_up, down; /* of all experts, one after the other, each as a layer's; whole panels each */
    rz_linear shared_gate;   /* bf16, one output: what the sigmoid of weights the shared expert; packed NULL: 1 */
    const float *correction; /* [experts]: added to scores to choose by, not to weights; or NULL */
    const float *scales;     /* [experts]: what the weights of each are multiplied with in the end; or NULL */
    /* [hidden], all or none. Norms of the residual for the router and for the experts, which the feed-forward beside
     * them has a norm of its own for; norms of what the experts add, and of what is beside them. */
    const float *router_norm, *norm, *after_norm, *after_beside_norm;
    int32_t count, chosen;
    int32_t scores;        /* what makes scores of the router's outputs */
    int32_t normalised;    /* the weights of a row add up to 1 */
    int32_t groups, top_groups; /* experts are chosen from the best so many groups, by the sum of their two best */
    int32_t group_scores;       /* 2; or 1: by its best alone */
    float scale;           /* of the weights */
    int32_t streamed;      /* gate_up and down are in a mapped file: the system is asked for those that were chosen */
} rz_experts;

enum { RZ_DELTA, RZ_SCAN, RZ_SHORT };

/* What keeps a state per sequence in place of keys and values: see recurrent.h. Dimensions are multiples of 16. */
typedef struct {
    int32_t kind;
    int32_t heads, value_dim;         /* of the state; RZ_SHORT: one head, all channels */
    int32_t groups, key_dim;          /* that share queries and keys, or B and C */
    int32_t first_output;             /* of the heads, the first that `output` multiplies */
    int32_t taps, activated;          /* of the convolution, 2 to 4; whether SiLU follows it */
    int32_t window_length;            /* rows that a window has, the last one last; taps - 1 or more, up to 8 */
    int32_t gate_first;               /* the gate is multiplied in before the norm */
    int32_t norms, norm_columns;      /* of a whole row, and the columns of each: it may be several ranks' */
    int32_t norm_first, shares_norm;  /* which column of a row is this rank's first; whether the ranks sum squares */
    float eps, least_step, most_step;
    const float *weights;             /* [taps][channels]: the oldest row's first */
    const float *bias;                /* [channels] or NULL */
    const float *rates, *step_bias;   /* [heads]: -exp(A), what is added to a step before its softplus */
    const float *skips;               /* [heads] or NULL */
    const float *norm;                /* [heads * value_dim], or NULL: there is only the gate */
    void *window;                     /* bf16 [channels][window_length], of slot 0 */
    void *state;                      /* float32 [heads][key_dim][value_dim]; RZ_SCAN: [heads][value_dim][key_dim] */
    int64_t slot_stride;              /* bytes */
} rz_recurrent;

/* What makes queries and values where all heads attend to one line of a token: see latent.h. Dimensions are multiples
 * of 32. */
typedef struct {
    rz_linear query_b;      /* of normed query latents; packed NULL: qkv has the queries themselves */
    rz_linear keys, values; /* bf16, of all heads, one after the other: [rank, plain] and [value_dim, rank] of each */
    const float *query_norm, *norm; /* [query_rank], [rank] */
    int32_t query_rank;     /* 0: there is no query_b */
    int32_t plain, rotated; /* of a head's query: what is not turned, and what is */
    int32_t rank;           /* of a line, what comes before its rotated values */
    int32_t value_dim;      /* of a head's output */
    int32_t pairs;          /* what is turned comes in pairs (0, 1), (2, 3), ... and is kept in halves */
    int32_t position_span;  /* queries grow by position_growth * log(1 + position / span), rounded down; 0: they do not */
    float position_growth;
    float query_eps, eps;   /* of the norms */
} rz_latent;

typedef struct {
    const float *attention_norm, *feed_forward_norm;             /* [hidden]; NULL: rows are taken as they are */
    const float *after_attention_norm, *after_feed_forward_norm; /* [hidden] or NULL */
    const float *query_norm, *key_norm; /* [key_dim], with `wide_norms` [heads * key_dim]; or NULL */
    const float *sinks;                 /* [q heads], times log2(e), or NULL: scores of what has no value */
    rz_linear qkv;     /* outputs: q heads, k heads, v heads, with `gated` a gate for each q head; or `recurrent`'s,
                        * or `latent`'s: queries or their latents, then the line */
    rz_linear output;  /* outputs: hidden; inputs: some of the q heads' values, see first_output */
    rz_linear gate_up; /* outputs: gate 0-15, up 0-15, gate 16-31, up 16-31, ... */
    rz_linear down;    /* outputs: hidden */
    rz_linear input_gate, input_projection; /* of what the layer adds of its input (rz_inputs); packed NULL: nothing */
    const float *after_input_norm;          /* [hidden]: norm of that */
    const rz_experts *experts; /* or NULL; gate_up and down are then the shared expert's, packed NULL: there is none */
    const rz_recurrent *recurrent; /* in place of attention; or NULL */
    const rz_latent *latent;   /* or NULL */
    int32_t heads;     /* which of the model's */
    int32_t reads_only;      /* another layer has stored what it attends to: qkv are queries alone */
    int32_t keys_are_values; /* as they are projected; qkv has no values of their own */
    int32_t norms_values;    /* without a weight */
    int32_t gated;     /* what is attended is multiplied by the sigmoid of a gate */
    int32_t rotary;    /* index of the frequencies; -1: none */
    int32_t window;    /* tokens that are seen back; 0: all */
    float scale;       /* what the residual is multiplied with behind the layer */
    /* the layer's share of the KV cache, see rz_cache */
    void *writable;
    const void *codes;
    const float *scales;
    int64_t num_writable;
    int64_t codec;
    int64_t in_groups;
    /* [blocks, 2, kv_heads, key_dim]: mean and deviation of each block's keys, see sparse.h; NULL: there are none */
    void *summaries, *quantized_summaries;
    int64_t chooses; /* rows may read some of the blocks before them only */
    /* [num_quantized, kv_heads], where `codes` are in a mapped file: the step that has asked for them last, see fetch.h;
     * or NULL */
    uint8_t *asked;
} rz_layer;

/* A KV head that this rank and one of its neighbours hold: which of them attends is decided row by row
 * (attention_plan.c), and its outputs are brought to both. */
typedef struct {
    int32_t kv_head;     /* among this rank's */
    int32_t slot;        /* among all shared heads of the ring */
    int32_t is_first;    /* of the two ranks */
    int32_t first_share; /* what the first one computes, in parts of `ranks` */
} rz_shared_head;

typedef struct {
    int32_t first, count;
} rz_span;

/* How the heads of some layers are split, and what their keys and values look like. */
typedef struct {
    int32_t q_heads, kv_heads;
    int32_t lines;              /* of a token in a block: 2, keys and values, or 1, which is both */
    int32_t key_dim, value_dim; /* of a head */
    int32_t first_output;       /* of the q heads, the first that `output` multiplies */
    int32_t shared_in_ring;     /* KV heads that two ranks hold */
    int32_t shared_here;        /* how many of them this rank holds */
    rz_shared_head shared[2];
    rz_span counted[2]; /* of this rank's q and KV heads those that no other rank counts, for wide norms */
    int32_t all[2];     /* q and KV heads of the ring */
} rz_heads;

enum { RZ_HEADS = 2 };

/* Inputs of each layer: a token's row of a table, and a projection of its embedding.
 *
 *     (norm of each layer's (projection of the embedding * projection_scale) + row * table_scale) * scale
 *
 * A layer adds of it, behind its feed-forward: norm(projection(activation(gate(x)) * input)). */
typedef struct {
    int32_t width;        /* of a layer's; 0: there are none */
    rz_linear table;      /* one output per token, those of the embedding; inputs: layers * width. bf16: not packed */
    rz_linear projection; /* outputs: layers * width */
    const float *norm;    /* [width] */
    float table_scale, projection_scale, scale;
} rz_inputs;

enum { RZ_SILU = 0, RZ_GELU_TANH = 1, RZ_SWIGLU_CLAMPED = 2 };

enum { RZ_ROTARIES = 2 };

/* How far a step is, for whoever reads weights ahead of it (cpu/weight_streaming.py). */
typedef struct {
    _Atomic int64_t layer; /* that is computed; behind the last one: how many there are */
    int32_t doorbell;      /* an eventfd that is rung when it changes */
} rz_place;

typedef struct {
    int32_t layers, hidden, intermediate, block_size;
    int32_t activation;
    int32_t num_heads;          /* of `heads` */
    int32_t rotary_dim[RZ_ROTARIES]; /* how much of a key each set of frequencies turns */
    int32_t rotary_interleaved; /* pairs (0, 1), (2, 3), ... instead of halves */
    int32_t num_writable, num_quantized;  /* blocks of the KV cache */
    int32_t num_states;         /* slots of recurrent states; 0: no layer has one */
    int32_t embedding_split;    /* the ranks hold different rows of it: they are summed */
    int32_t vocab_first;        /* token of the first row of the embedding */
    int32_t rows_in_embedding;  /* rows that this rank holds */
    int32_t ranks;
    rz_heads heads[RZ_HEADS];
    int32_t wide_norms;         /* queries and keys are normed over all heads of the ring at once */
    int32_t norms_turned;       /* queries and keys are normed behind the rotation */
    float swiglu_alpha, swiglu_limit;
    float eps, attention_scale, attention_cap, embedding_scale, residual_scale, logit_scale, logit_cap;
    const float *frequencies[RZ_ROTARIES]; /* [rotary_dim / 2 of the set] radians per position */
    float rotary_scale[RZ_ROTARIES];       /* of cosines and sines */
    const rz_layer *layer;
    const float *final_norm;
    rz_linear embedding; /* packed like a linear layer: one output per token */
    rz_inputs inputs;
    rz_linear head;
    rz_ring *ring;           /* with a lane for every thread; NULL: a ring of one */
    int64_t ring_timeout_ns; /* that one wait may take */
    rz_place *place;         /* or NULL: nobody reads ahead */
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
    const int32_t *taps;       /* [num_taps]: layers whose inputs are handed over, of all rows; as many as there are
                                * layers: what comes behind the last norm */
    float *tapped;             /* [tokens][num_taps][hidden] */
    int64_t num_taps;
    const int32_t *compressions; /* [num_compressions][2], (writable id, quantized id): the blocks that this step fills,
                                  * compressed in each layer behind its writes and before it attends */
    int64_t num_compressions;
    const int32_t *state_slots;     /* [sequences], where layers are recurrent: where each one's states are */
    const int32_t *state_snapshots; /* [num_snapshots][2], (row, slot): the states behind that row go there, too */
    int64_t num_states, num_snapshots;
    const int32_t *adapters; /* [num_adapters: none, or sequences]: the slot of each one's adapter; -1: it has none */
    int64_t num_adapters;
    int64_t adapter_slots;   /* that every `rz_adapted` has */
    int64_t shrunk_columns;  /* of any adapter in them, at most */
    const int32_t *sparse;   /* [num_sparse: none, or sequences][7]: which blocks their rows read, see sparse.h */
    int64_t num_sparse;
    const _Atomic int64_t *restored; /* layers, from the first on, whose blocks are all there: it grows, and each layer
                                      * waits for its own; NULL: all are */
    int64_t fetch;           /* the step's number among those that ask for blocks ahead, 1 to 255 and then 1 again; 0: all
                              * blocks are in memory */
} rz_step;

/* Bytes of linear, layer, model, step, codes, experts, recurrent, latent, adapted and low rank. Whoever fills them asks whether theirs are these. */
void rz_sizes(int64_t *sizes);

/* The levels of instructions (levels/) that this processor runs, by name, the best first, each with a space behind it,
 * to `names` [RZ_LEVEL_NAMES]. What computes is there once for each level, its functions named after it. */
enum { RZ_LEVEL_NAMES = 64 };
void rz_levels(char *names);

typedef struct rz_decoder rz_decoder;

/* What a step's time is spent on. */
enum {
    RZ_EMBED, RZ_NORM, RZ_QKV, RZ_PLACE, RZ_ATTEND, RZ_OUTPUT, RZ_GATE_UP, RZ_DOWN, RZ_HEAD, RZ_SUM, RZ_CONVOLVE,
    RZ_RECUR, RZ_INPUT, RZ_PARTS,
};

enum { RZ_OK = 0, RZ_NO_MEMORY = 1, RZ_RING_LOST = 2, RZ_BAD_PLAN = 3 /* names what does not exist */ };

/* NULL when there is no memory. `model` is copied; what it points to is not. `cpus` [threads]: the cores to keep
 * the threads on; NULL: any. */
rz_decoder *rz_decoder_new(const rz_model *model, int threads, const int *cpus);
/* One that computes on the threads of `other`, while that one does not, and is freed before it. */
rz_decoder *rz_decoder_beside(const rz_model *model, const rz_decoder *other);
void rz_decoder_free(rz_decoder *decoder);

/* Computes one step. Returns RZ_OK or what went wrong. One caller at a time. */
int rz_decoder_forward(rz_decoder *decoder, const rz_step *step);

/* out [rows, outputs] float32 of `rows` rows of bf16 `x`, by `linear` alone, of any model. RZ_OK or RZ_NO_MEMORY. One
 * caller at a time. */
int rz_decoder_multiply(rz_decoder *decoder, const rz_linear *linear, const void *x, int rows, float *out);

/* What `layer` alone, of any model, makes of `projected` [tokens, what it projects]: bf16 `out` [tokens, heads *
 * value_dim], and the states of the step's sequences. RZ_OK, RZ_NO_MEMORY or RZ_RING_LOST. One caller at a time. */
int rz_decoder_recur(rz_decoder *decoder, const rz_recurrent *layer, const rz_step *step, const float *projected,
                     void *out);

/* Nanoseconds that the steps so far have spent on each part, in `spent` [RZ_PARTS]. */
void rz_decoder_spent(const rz_decoder *decoder, int64_t *spent);

/* The largest logit of each of `rows` rows, `width` apart, and its index: NaN is larger than all. */
void rz_decoder_largest(rz_decoder *decoder, const float *logits, int rows, int width, float *values, int64_t *indices);

/* What sampling.h says: how many candidates there are, then which; and draws. RZ_OK or RZ_NO_MEMORY. One caller at a
 * time. */
int rz_decoder_find_candidates(rz_decoder *decoder, const rz_candidates *job);
int rz_decoder_take_candidates(rz_decoder *decoder, const rz_candidates *job);
int rz_decoder_draw(rz_decoder *decoder, const rz_draws *job);

#endif
