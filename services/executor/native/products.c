/* See products.h. */
#include "products.h"

#include "gemm.h"
#include "largest.h"

enum { ROWS_OF_TASK = 96 /* rows of a task: they stay in the second cache for a panel */ };

RZ_INLINE __m512 with_bias(const rz_product *job, const float *sums, long column)
{
    __m512 value = _mm512_loadu_ps(sums);
    return job->linear->bias ? _mm512_add_ps(value, _mm512_loadu_ps(job->linear->bias + column)) : value;
}

static void end_activate(const rz_product *job, const float *sums, long row, long column)
{
    __m512 gate = with_bias(job, sums, column), up = with_bias(job, sums + LANES, column + LANES);
    gate = job->activation == RZ_SILU ? silu_ps(gate) : gelu_tanh_ps(gate);
    store_bf16((bf16 *)job->out + row * (job->linear->outputs / 2) + column / 2, _mm512_mul_ps(gate, up));
}

/* `before`: what is added to; zeros where nothing is. */
RZ_INLINE __m512 scaled(const rz_product *job, const float *sums, long column, __mmask16 lanes, __m512 before)
{
    __m512 value = _mm512_loadu_ps(sums), scale = _mm512_set1_ps(job->scale);
    if (job->linear->bias)
        value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, job->linear->bias + column));
    value = job->end == ADD ? _mm512_fmadd_ps(value, scale, before) : _mm512_mul_ps(value, scale);
    if (job->cap > 0) {
        __m512 cap = _mm512_set1_ps(job->cap);
        value = _mm512_mul_ps(cap, tanh_ps(_mm512_div_ps(value, cap)));
    }
    return value;
}

static void end_float(const rz_product *job, const float *sums, long row, long column)
{
    const long columns = job->linear->outputs;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        __mmask16 lanes = lanes_left(column, columns);
        float *to = (float *)job->out + row * columns + column;
        __m512 before = job->end == ADD ? _mm512_maskz_loadu_ps(lanes, to) : _mm512_setzero_ps();
        _mm512_mask_storeu_ps(to, lanes, scaled(job, sums, column, lanes, before));
    }
}

static void end_largest(const rz_product *job, const float *sums, long row, long column, int thread)
{
    rz_best *best = (rz_best *)job->out + thread * job->rows + row;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        __mmask16 lanes = lanes_left(column, job->linear->outputs);
        rz_best_add(best, scaled(job, sums, column, lanes, _mm512_setzero_ps()), lanes, column);
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
