/* Low-rank adapters of a step's rows, each row by its own: y = W x + B (A x).
 *
 * Rows are grouped by the slot that holds their adapter. A product with a linear that is adapted has two more parts:
 *
 *     shrink   t = A x of a group of rows, before the linear's panels are multiplied, as tasks of the same stage
 *     expand   the sums of a panel += B t, by the thread that has them in its first cache, before anything is done with them
 *
 *     threads   | shrink | shrink | panel, expand, end | panel, expand, end | ...   no barrier between them
 *
 * A of all modules that are joined in a linear (queries, keys, values) is one matrix; t has its columns end to end. How
 * A, B and t lie, and what they are rounded to: low_rank.h. A row is summed in one order, whatever rows are beside it.
 *
 * Source: Punica, https://arxiv.org/abs/2310.18547, section 4 (shrink and expand of grouped rows).
 */
#ifndef RZ_ADAPTERS_H
#define RZ_ADAPTERS_H

#include "state.h"

/* What adapters add to one product, as one thread sees it. */
typedef struct {
    const rz_adapted *adapted;
    const rz_adapter_rows *rows;
    operand *shrunk;       /* [rows of the product, stride] */
    long stride;
    const int32_t *tokens; /* [rows]: of the step, whose they are; NULL: one after the other */
    long copy;             /* which of the linear's experts or heads */
    long origin, outputs;  /* its first output, and how many it has of this format */
    const bf16 *x;         /* of the rows that are shrunk, `x_stride` apart */
    long x_stride, inputs;
    atomic_long *done;     /* shrinks of this step, of all threads; NULL: all that are needed are done */
    long due;              /* how many must be, before any row is expanded */
} rz_expansion;

/* Whether some row of the step at hand may get something from an adapter in products with `linear`. */
RZ_INLINE int rz_is_adapted(const rz_decoder *decoder, const rz_linear *linear)
{
    return decoder->adapter_rows && linear->adapted;
}

/* Groups the step's rows, and those of its tail. 0 when there is no memory. By the caller's thread, before all others. */
int rz_plan_adapters(rz_decoder *decoder, const rz_step *step);
void rz_free_adapters(rz_decoder *decoder);

/* Of a product with `linear`, of `copies` experts or heads, with rows in the workspace that `rz_plan_adapters` made. */
rz_expansion rz_expansion_of(rz_decoder *decoder, const rz_linear *linear, const bf16 *x, long x_stride);

/* Shrinks of the step's rows that are tasks of a stage, before any that expands: how many there are. Called by each
 * thread once per stage. */
long rz_shrinks(rz_decoder *decoder, int thread, rz_expansion *to);
/* `next`: of the shrinks of this stage, that which this thread needs next; -1: none. */
void rz_shrink(const rz_expansion *of, long task, long next);

/* The same of one group's rows [first, first + rows) alone, of which row i is read at `from`[i], or one after the other. */
void rz_shrink_rows(const rz_expansion *of, long first, long rows, const int32_t *from);

/* Adds to `sums` [rows][PANEL] of the product's rows from `first` on, and of the linear's outputs from `column` on.
 * `coming`: the column that this thread needs next, of any expert or head; -1: none. Waits for shrinks that other threads are at. */
void rz_expand(const rz_expansion *of, long first, long rows, long column, long coming, float *sums);

#endif
