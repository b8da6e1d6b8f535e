/* Memory of a forward pass, kept between steps and grown as batches grow. */
#ifndef RZ_WORKSPACE_H
#define RZ_WORKSPACE_H

#include "attention.h"
#include "decoder.h"
#include "largest.h"

/* Some rows that one expert multiplies. */
typedef struct {
    int32_t expert, first, rows;
    long first_piece; /* pieces of the groups before it */
} rz_group;

/* Rows that experts compute in one step, memory for which is kept between steps: tokens times the experts of each. */
typedef struct {
    long rows;          /* that there is room for */
    float *scores;      /* [tokens, experts] */
    int32_t *experts;   /* [tokens, chosen], the best first */
    float *chances;     /* [tokens, chosen]: their weights */
    float *shared;      /* [tokens]: the shared expert's weight */
    int32_t *tokens;    /* [rows], by experts: whose row it is */
    float *weights;     /* [rows], likewise */
    int32_t *ends;      /* [experts] */
    rz_group *groups;   /* [experts]: of those that were chosen */
    long count;         /* of them */
    bf16 *gathered;     /* [rows, hidden], by experts */
    bf16 *activated;    /* [rows, width] */
    long most_experts, most_chosen, most_width; /* of all layers */
} rz_routing;

typedef struct {
    long tokens;      /* that there is room for */
    float *residual;  /* [tokens, hidden] */
    float *delta;     /* [tokens, hidden]: what a block adds to it, where a sum or a norm comes between */
    bf16 *normed;     /* [tokens, hidden] */
    float *qkv;       /* [tokens, (q + 2 kv heads) * d] */
    bf16 *queries;    /* [tokens, q heads * d] */
    bf16 *attended;   /* [tokens, q heads * d] */
    bf16 *activated;  /* [tokens, intermediate] */
    float *rotations; /* [RZ_ROTARIES, tokens, rotary_dim]: cosines, then sines */
    float *exchanged; /* [tokens, shared heads of the ring, group * d]: their outputs, on their way between ranks */
    unsigned char *mine; /* [tokens]: bit i: this rank attends for its shared head i */
    rz_attention_part *parts;
    long *merges;     /* [merges]: first parts of what is to be merged */
    long parts_room;
    float *partial;
    long partial_room;
    rz_best *bests; /* [threads, sampled]: see LARGEST of products.h */
    long bests_room;
    void *rounded; /* activations for a quantized linear: see quantized.h */
    size_t rounded_room;
    unsigned char *scratch; /* one piece per thread */
    size_t scratch_piece;
    rz_routing routing;
} rz_workspace;

/* 0 when there is no memory. */
int rz_workspace_new(rz_workspace *space, const rz_model *model, int threads);
int rz_workspace_reserve(rz_workspace *space, const rz_model *model, long tokens, long parts, long partial);
int rz_workspace_reserve_bests(rz_workspace *space, long bests);
int rz_workspace_reserve_rounded(rz_workspace *space, size_t bytes);
void rz_workspace_free(rz_workspace *space);

#endif
