/* See products.h. */
#include "products.h"

#include "gemm.h"
#include "largest.h"

enum { ROWS_OF_TASK = 96 /* rows of a task: they stay in the second cache for a panel */ };

RZ_INLINE f32 with_bias(const rz_product *job, const float *sums, long column)
{
    f32 value = f32_load(sums);
    return job->linear->bias ? f32_add(value, f32_load(job->linear->bias + column)) : value;
}

static void end_activate(const rz_product *job, const float *sums, long row, long column)
{
    f32 gate = with_bias(job, sums, column), up = with_bias(job, sums + LANES, column + LANES);
    gate = job->activation == RZ_SILU ? silu_f32(gate) : gelu_tanh_f32(gate);
    f32_store_bf16((bf16 *)job->out + row * (job->linear->outputs / 2) + column / 2, f32_mul(gate, up));
}

/* `before`: what is added to; zeros where nothing is. */
RZ_INLINE f32 scaled(const rz_product *job, const float *sums, long column, lanes some, f32 before)
{
    f32 value = f32_load(sums), scale = f32_set1(job->scale);
    if (job->linear->bias)
        value = f32_add(value, f32_load_some(some, job->linear->bias + column));
    value = job->end == ADD ? f32_fma(value, scale, before) : f32_mul(value, scale);
    if (job->cap > 0) {
        f32 cap = f32_set1(job->cap);
        value = f32_mul(cap, tanh_f32(f32_div(value, cap)));
    }
    return value;
}

static void end_float(const rz_product *job, const float *sums, long row, long column)
{
    const long columns = job->linear->outputs;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        lanes some = lanes_first(columns - column);
        float *to = (float *)job->out + row * columns + column;
        f32 before = job->end == ADD ? f32_load_some(some, to) : f32_zero();
        f32_store_some(some, to, scaled(job, sums, column, some, before));
    }
}

static void end_largest(const rz_product *job, const float *sums, long row, long column, int thread)
{
    rz_best *best = (rz_best *)job->out + thread * job->rows + row;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        lanes some = lanes_first(job->linear->outputs - column);
        rz_best_add(best, scaled(job, sums, column, some, f32_zero()), some, column);
    }
}

static void product_task(void *argument, long task, long next, int thread)
{
    const rz_product *job = argument;
    const long inputs = job->linear->inputs, stride = job->stride ? job->stride : inputs, pairs = (inputs + 1) / 2;
    const long pieces = (job->rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
    const long panels = (job->linear->outputs + PANEL - 1) / PANEL;
    const long panel = task / pieces, first = task % pieces * ROWS_OF_TASK;
    const long last = least(first + ROWS_OF_TASK, job->rows);
    const bf16 *weights = (const bf16 *)job->linear->packed + panel * pairs * 2 * PANEL;
    const bf16 *coming = (const bf16 *)job->linear->packed + next / pieces * pairs * 2 * PANEL;
    float sums[TILE_ROWS * PANEL];
    long tiles = (last - first + TILE_ROWS - 1) / TILE_ROWS;
    rz_ahead ahead = rz_look_ahead(next / pieces == panel || next / pieces >= panels ? NULL : coming, tiles);
    for (long row = first; tiles; tiles--) {
        int here = (int)((last - row + tiles - 1) / tiles);
        rz_tile(here, job->x + row * stride, stride, weights, pairs, sums, PANEL, 0, &ahead);
        for (int i = 0; i < here; i++) {
            if (job->end == ACTIVATE)
                end_activate(job, sums + i * PANEL, row + i, panel * PANEL);
            else if (job->end == LARGEST)
                end_largest(job, sums + i * PANEL, row + i, panel * PANEL, thread);
            else
                end_float(job, sums + i * PANEL, row + i, panel * PANEL);
        }
        row += here;
    }
}

void rz_multiply(rz_decoder *decoder, int thread, int part, rz_product job)
{
    for (long row = 0; job.end == LARGEST && row < job.rows; row++)
        ((rz_best *)job.out)[thread * job.rows + row] = rz_best_none(); /* this thread's own */
    long panels = (job.linear->outputs + PANEL - 1) / PANEL, pieces = (job.rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
    rz_run_stage(decoder, thread, part, panels * pieces, product_task, &job);
}
