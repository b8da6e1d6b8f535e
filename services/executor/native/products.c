/* See products.h. */
#include "products.h"

#include "gemm.h"

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

static void end_float(const rz_product *job, const float *sums, long row, long column)
{
    long columns = job->linear->outputs;
    __m512 scale = _mm512_set1_ps(job->scale);
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        __mmask16 lanes = lanes_left(column, columns);
        if (!lanes)
            return;
        float *to = (float *)job->out + row * columns + column;
        __m512 value = _mm512_loadu_ps(sums);
        if (job->linear->bias)
            value = _mm512_add_ps(value, _mm512_maskz_loadu_ps(lanes, job->linear->bias + column));
        if (job->end == ADD)
            value = _mm512_fmadd_ps(value, scale, _mm512_maskz_loadu_ps(lanes, to));
        else
            value = _mm512_mul_ps(value, scale);
        if (job->cap > 0) {
            __m512 cap = _mm512_set1_ps(job->cap);
            value = _mm512_mul_ps(cap, tanh_ps(_mm512_div_ps(value, cap)));
        }
        _mm512_mask_storeu_ps(to, lanes, value);
    }
}

static void product_task(void *argument, long task, long next, int thread)
{
    (void)thread;
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
            else
                end_float(job, sums + i * PANEL, row + i, panel * PANEL);
        }
        row += here;
    }
}

void rz_multiply(rz_decoder *decoder, int thread, int part, rz_product job)
{
    long panels = (job.linear->outputs + PANEL - 1) / PANEL, pieces = (job.rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
    rz_run_stage(decoder, thread, part, panels * pieces, product_task, &job);
}
