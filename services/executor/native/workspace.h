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
    float *scores;      /* [tokens, outputs of the router] */
    int32_t *experts;   /* [tokens, chosen], the best first */
    float *chosen_weights; /* [tokens, chosen] */
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

/* A sequence's rows of a step, and some of them that are convolved together. */
typedef struct {
    long sequence, first, rows;
} rz_run;

typedef struct {
    long run, first, rows;
} rz_piece;

/* Rows that recurrent layers compute in one step. */
typedef struct {
    long tokens;  /* that there is room for */
    rz_run *runs; /* [count]: of the sequences, in their order */
    rz_piece *pieces;
    long count, num_pieces;
    int32_t *copies;      /* [tokens + 1]: of a row, those of `copy_slots` from this one up to the next row's */
    int32_t *copy_slots;  /* where states behind rows go beside their own slots */
    long most_copies;     /* that there is room for */
    float *mixed;   /* [tokens, channels]: what was convolved, then what the scan makes of it */
    float *gates;   /* [tokens, 2, heads]: decays, then betas or steps */
    float *squares; /* [tokens, norms] */
    long most_channels, most_heads, most_norms; /* of all layers */
} rz_recurrent_space;

/* A row that reads some of the blocks before it only: see sparse.h. */
typedef struct {
    const int32_t *table; /* the sequence's block table */
    int32_t *chosen;      /* [kv_heads, length]: the row's own tables, of the layer at hand */
    long row;             /* of the step */
    int first, recent;    /* places in the table: [0, first) and [recent, own] are read */
    int top;              /* how many of [first, recent) are, those that score best; fewer than there are */
    int own, length;
    int dense_layers;     /* first ones, in which all is read */
} rz_choice;

/* Parts that are computed before their partial results are merged, and make room for others. */
typedef struct {
    long parts, merges; /* the ends of both */
} rz_attention_round;

/* A step's attention in layers whose heads are alike. */
typedef struct {
    rz_attention_part *parts;
    long *first_parts;   /* [merges]: of what is to be merged */
    rz_attention_round *rounds;
    long room;           /* of the three */
    long count, merges, num_rounds;
    long partial;        /* floats of partial results in the round that is planned, */
    long last_partial;   /* in the one before, */
    long most_partial;   /* and of one tile, at most */
    rz_choice *choices;
    long num_choices, choice_room;
    int32_t *chosen;     /* their tables */
    long num_chosen, chosen_room;
    float *scores;       /* [scored_at_once, kv_heads, most_between] */
    long score_room, scored_at_once, most_between;
    long tokens;         /* that `mine` has room for */
    unsigned char *mine; /* [tokens]: bit i: this rank attends for its shared head i */
    long work, first_work[2]; /* in rows times keys: planned, and for the first rank of each shared head */
} rz_attention_plan;

typedef struct {
    long tokens;      /* that there is room for */
    float *residual;  /* [tokens, hidden] */
    float *delta;     /* [tokens, hidden]: what a block adds to it, where a sum or a norm comes between; behind it as
                       * much again, where experts are normed apart from what is beside them */
    bf16 *normed;     /* [tokens, hidden] */
    float *qkv;       /* [tokens, most_projected] */
    bf16 *queries;    /* [tokens, most_queries] */
    bf16 *attended;   /* [tokens, most_attended] */
    bf16 *activated;  /* [tokens, intermediate] */
    float *inputs;    /* [tokens, layers * width]: see rz_inputs */
    float *rotations; /* [RZ_ROTARIES, tokens, most_rotary]: cosines, then sines */
    float *exchanged; /* [tokens, shared heads of the ring, group * d]: their outputs, on their way between ranks */
    float *partial;   /* of one layer's attention */
    long partial_room;
    rz_best *bests; /* [threads, sampled]: see LARGEST of products.h */
    long bests_room;
    void *prepared; /* activations as products take them: see prepare_rows in products.c */
    size_t prepared_room;
    unsigned char *scratch; /* one piece per thread */
    size_t scratch_piece;
    rz_routing routing;
    rz_recurrent_space recurrent;
    long deltas;      /* of `delta`, in hidden sizes of a row */
    long most_projected, most_queries, most_attended, most_exchanged, most_rotary; /* values of a row, of all layers */
} rz_workspace;

/* Values of a row of `inputs`. */
RZ_INLINE long rz_inputs_row(const rz_model *model)
{
    return (long)model->layers * model->inputs.width;
}

/* 0 when there is no memory. */
int rz_workspace_new(rz_workspace *space, const rz_model *model, int threads);
int rz_workspace_reserve(rz_workspace *space, const rz_model *model, long tokens, long partial);
/* For as many parts, choices and tables as the plan says. */
int rz_workspace_reserve_attention(rz_attention_plan *plan, long tokens, int kv_heads);
void rz_workspace_free_attention(rz_attention_plan *plan);
int rz_workspace_reserve_recurrent(rz_workspace *space, long tokens, long copies);
/* Notes what a recurrent layer needs. */
void rz_workspace_measure(rz_workspace *space, const rz_recurrent *layer);
int rz_workspace_reserve_bests(rz_workspace *space, long bests);
int rz_workspace_reserve_prepared(rz_workspace *space, size_t bytes);
void rz_workspace_free(rz_workspace *space);

#endif
