/* Candidates for sampling, and draws, from rows of logits: what each row needs by one or two passes over it, without
 * copies of it. A row's result depends on nothing but the row and what is asked of it.
 *
 *     k largest   the k-th largest of the blocks' largest is no larger than the k-th largest of all: what is below it
 *                 is passed over, and the rest, some times k, is searched exactly
 *     near ones   from how far below the largest the nucleus can reach, of six distances the first that holds its share
 *     a draw      sums of blocks, then the block in which the running sum passes the target
 */
#ifndef RZ_SAMPLING_H
#define RZ_SAMPLING_H

#include <stdint.h>

/* What a row's sampler needs; `WANT` of sampling/candidates.py. */
typedef struct {
    int32_t count;     /* its so many largest logits (of a negative one the amount); 0: those near the largest */
    float temperature; /* of `total` */
    float margin;      /* near are those less than this below the largest */
    float share;       /* of the weight of all that the likeliest must hold; 1: no share is asked for */
} rz_want;

/* `RzCandidates` of cpu/sampling.py. Of what ties with the last of the k largest, all are candidates. */
typedef struct {
    const float *logits;  /* [.., width] */
    const int64_t *rows;  /* [count] of them */
    const rz_want *wants; /* [count] */
    const float *largest; /* [count]: the largest logit of all ranks, for rows that want those near it */
    int64_t width, count;
    int32_t alone; /* whether these are all logits of the vocabulary */
    /* Found by rz_decoder_find_candidates. */
    float *bounds;    /* [count]: candidates are at or above it */
    double *totals;   /* [count]: sum of exp((logit - largest) / temperature), where those near it are wanted */
    int64_t *lengths; /* [count]: how many candidates there are */
    /* Filled by rz_decoder_take_candidates, by ascending id. */
    const int64_t *starts; /* [count]: where a row's candidates begin */
    int64_t *ids;
    float *values;
} rz_candidates;

/* `RzDraw` of cpu/sampling.py: parameters of one row. */
typedef struct {
    double uniform; /* in [0, 1) */
    double total;   /* of which `top_p` is a share; 0: of what `top_k` leaves */
    double top_p;
    float temperature, min_p;
    int32_t top_k; /* 0: all */
} rz_draw;

/* `RzDraws` of cpu/sampling.py. */
typedef struct {
    const float *scores; /* [.., width]: logits, or minus infinity */
    const int64_t *rows; /* [count] of them */
    const rz_draw *of;   /* [count] */
    int64_t width, count;
    /* Of each row what stands in the place of some scores: `edits` [count, edited] at `places`; `width`: nowhere. */
    const int64_t *places;
    const float *edits;
    int64_t edited;
    const uint8_t *const *allowed; /* [count] of [width]: whether each may be drawn; null, all or of a row: all may */
    int64_t *columns;              /* [count]: what is drawn; -1 where nothing may be */
} rz_draws;

#endif
