/* See products.h. */
#include "products.h"

#include "gemm.h"
#include "largest.h"
#include "quantized.h"

enum { ROWS_OF_TASK = 96 /* rows of a task: they stay in the second cache for a panel */ };

/* One of the linears whose outputs follow each other. */
typedef struct {
    const rz_product *job;
    const rz_linear *linear;
    long before, outputs; /* of the linears before it, and of all */
    rz_rounded rounded;   /* the activations, where it is quantized */
} segment;

RZ_INLINE f32 with_bias(const rz_linear *linear, const float *sums, long column)
{
    f32 value = f32_load(sums);
    return linear->bias ? f32_add(value, f32_load(linear->bias + column)) : value;
}

static void end_activate(const rz_product *job, const float *sums, long row, long column)
{
    f32 gate = with_bias(job->linear, sums, column), up = with_bias(job->linear, sums + LANES, column + LANES);
    gate = job->activation == RZ_SILU ? silu_f32(gate) : gelu_tanh_f32(gate);
    f32_store_bf16((bf16 *)job->out + row * (job->linear->outputs / 2) + column / 2, f32_mul(gate, up));
}

/* `before`: what is added to; zeros where nothing is. */
RZ_INLINE f32 scaled(const segment *part, const float *sums, long column, lanes some, f32 before)
{
    const rz_product *job = part->job;
    f32 value = f32_load(sums), scale = f32_set1(job->scale);
    if (part->linear->bias)
        value = f32_add(value, f32_load_some(some, part->linear->bias + column));
    value = job->end == ADD ? f32_fma(value, scale, before) : f32_mul(value, scale);
    if (job->cap > 0) {
        f32 cap = f32_set1(job->cap);
        value = f32_mul(cap, tanh_f32(f32_div(value, cap)));
    }
    return value;
}

static void end_float(const segment *part, const float *sums, long row, long column)
{
    const rz_product *job = part->job;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        lanes some = lanes_first(part->linear->outputs - column);
        float *to = (float *)job->out + row * part->outputs + part->before + column;
        f32 before = job->end == ADD ? f32_load_some(some, to) : f32_zero();
        f32_store_some(some, to, scaled(part, sums, column, some, before));
    }
}

static void end_largest(const segment *part, const float *sums, long row, long column, int thread)
{
    rz_best *best = (rz_best *)part->job->out + thread * part->job->rows + row;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        lanes some = lanes_first(part->linear->outputs - column);
        rz_best_add(best, scaled(part, sums, column, some, f32_zero()), some, column);
    }
}

/* What is done with the sums of `rows` rows from `row` on. */
static void end_rows(const segment *part, const float *sums, long row, long rows, long column, int thread)
{
    for (long i = 0; i < rows; i++, sums += PANEL) {
        if (part->job->end == ACTIVATE)
            end_activate(part->job, sums, row + i, column);
        else if (part->job->end == LARGEST)
            end_largest(part, sums, row + i, column, thread);
        else
            end_float(part, sums, row + i, column);
    }
}

RZ_INLINE long stride_of(const rz_product *job)
{
    return job->stride ? job->stride : job->linear->inputs;
}

static long pieces_of(const rz_product *job)
{
    return (job->rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
}

static void product_task(void *argument, long task, long next, int thread)
{
    const segment *part = argument;
    const rz_product *job = part->job;
    const long stride = stride_of(job), pairs = (part->linear->inputs + 1) / 2, pieces = pieces_of(job);
    const long panels = (part->linear->outputs + PANEL - 1) / PANEL;
    const long panel = task / pieces, first = task % pieces * ROWS_OF_TASK;
    const long last = least(first + ROWS_OF_TASK, job->rows);
    const bf16 *weights = (const bf16 *)part->linear->packed + panel * pairs * 2 * PANEL;
    const bf16 *coming = (const bf16 *)part->linear->packed + next / pieces * pairs * 2 * PANEL;
    float sums[TILE_ROWS * PANEL];
    long tiles = (last - first + TILE_ROWS - 1) / TILE_ROWS;
    rz_ahead ahead = rz_look_ahead(next / pieces == panel || next / pieces >= panels ? NULL : coming, tiles);
    for (long row = first; tiles; tiles--) {
        int here = (int)((last - row + tiles - 1) / tiles);
        rz_tile(here, job->x + row * stride, stride, weights, pairs, sums, PANEL, 0, &ahead);
        end_rows(part, sums, row, here, panel * PANEL, thread);
        row += here;
    }
}

static void quantized_task(void *argument, long task, long next, int thread)
{
    const segment *part = argument;
    const rz_linear *linear = part->linear;
    const long pieces = pieces_of(part->job), panel = task / pieces, first = task % pieces * ROWS_OF_TASK;
    const long rows = least(ROWS_OF_TASK, part->job->rows - first), panels = (linear->outputs + PANEL - 1) / PANEL;
    const uint8_t *packed = linear->packed;
    const size_t bytes = rz_quantized_panel_bytes(&linear->format);
    const int more = next / pieces != panel && next / pieces < panels;
    float sums[ROWS_OF_TASK * PANEL];
    rz_quantized_panel(&linear->format, packed + (size_t)panel * bytes,
                       more ? packed + (size_t)(next / pieces) * bytes : NULL, &part->rounded, first, rows, sums);
    end_rows(part, sums, first, rows, panel * PANEL, thread);
}

static void round_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    const segment *part = argument;
    const bf16 *x = part->job->x + row * stride_of(part->job);
    rz_round_row(&part->rounded, &part->linear->format, row, x, part->linear->inputs);
}

void rz_multiply(rz_decoder *decoder, int thread, int booked, rz_product job)
{
    for (long row = 0; job.end == LARGEST && row < job.rows; row++)
        ((rz_best *)job.out)[thread * job.rows + row] = rz_best_none(); /* this thread's own */
    segment part = { .job = &job };
    for (const rz_linear *linear = job.linear; linear; linear = linear->next)
        part.outputs += linear->outputs;
    for (const rz_linear *linear = job.linear; linear; linear = linear->next) {
        const long tasks = (linear->outputs + PANEL - 1) / PANEL * pieces_of(&job);
        part.linear = linear;
        if (linear->format.bits) {
            part.rounded = rz_rounded_in(decoder->space.rounded, &linear->format, job.rows);
            rz_run_stage(decoder, thread, booked, job.rows, round_task, &part);
        }
        rz_run_stage(decoder, thread, booked, tasks, linear->format.bits ? quantized_task : product_task, &part);
        part.before += linear->outputs;
    }
}

size_t rz_rounded_row(const rz_linear *linear)
{
    size_t most = 0;
    for (; linear; linear = linear->next) {
        const size_t bytes = linear->format.bits ? rz_rounded_bytes(linear->format.columns) : 0;
        most = bytes > most ? bytes : most;
    }
    return most;
}
