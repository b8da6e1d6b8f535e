/* See products.h. */
#include "products.h"

#include "adapters.h"
#include "float_codes.h"
#include "gemm.h"
#include "largest.h"
#include "quantized.h"
#include "short_exponents.h"

/* One of the linears whose outputs follow each other, or an expert's share of one. */
typedef struct {
    const rz_product *job;
    const rz_linear *linear;
    long before, outputs; /* of the linears before it, and of all */
    long origin;          /* the linear's output that is the first here */
    rz_rounded rounded;   /* the activations, where it is quantized */
    operand *operands;    /* the activations, `apart` of each row, where they were widened for all panels; or NULL */
    long apart;
    const rz_expansion *added; /* by adapters; or NULL */
    long shrinks;         /* that are tasks of this one's stage */
    long together;        /* rows of a task */
} segment;

/* Some rows by one panel; `coming`: the panel that this thread needs next; -1: none, or the same. */
typedef struct {
    long panel, coming, first, rows;
} piece;

RZ_INLINE long panels_of(const rz_linear *linear)
{
    return whole_parts(linear->outputs, PANEL);
}

RZ_INLINE f32 with_bias(const rz_linear *linear, const float *sums, long column)
{
    f32 value = f32_load(sums);
    return linear->bias ? f32_add(value, f32_load(linear->bias + column)) : value;
}

/* min(x, limit), or NaN. */
RZ_INLINE f32 at_most(f32 x, f32 limit)
{
    return f32_select(f32_equal(x, x), f32_min(x, limit), x);
}

/* Source: OpenAI, "gpt-oss model card", https://arxiv.org/abs/2508.10925, section 2.1. */
RZ_INLINE f32 clamped_swiglu(const rz_model *model, f32 gate, f32 up)
{
    const f32 limit = f32_set1(model->swiglu_limit), alpha = f32_set1(model->swiglu_alpha), none = f32_zero();
    gate = at_most(gate, limit);
    up = f32_sub(none, at_most(f32_sub(none, at_most(up, limit)), limit));
    return f32_mul(f32_mul(gate, sigmoid_f32(f32_mul(gate, alpha))), f32_add(up, f32_set1(1.0f)));
}

RZ_INLINE f32 activated(const rz_model *model, f32 x)
{
    return model->activation == RZ_SILU ? silu_f32(x) : gelu_tanh_f32(x);
}

static void end_activate(const segment *part, const float *sums, long row, long column)
{
    const rz_product *job = part->job;
    f32 gate = with_bias(part->linear, sums, column), up = with_bias(part->linear, sums + LANES, column + LANES);
    const int clamped = job->activation->activation == RZ_SWIGLU_CLAMPED;
    const f32 value = clamped ? clamped_swiglu(job->activation, gate, up) : f32_mul(activated(job->activation, gate), up);
    f32_store_bf16((bf16 *)job->out + row * (part->outputs / 2) + (column - part->origin) / 2, value);
}

static void end_gate(const segment *part, const float *sums, long row, long column)
{
    const rz_product *job = part->job;
    bf16 *to = (bf16 *)job->out + row * part->outputs;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        lanes some = lanes_first(part->outputs - column);
        f32 by = f32_load_some(some, job->by + row * job->by_stride + column);
        f32_store_some_bf16(some, to + column, f32_mul(activated(job->activation, with_bias(part->linear, sums, column)), by));
    }
}

/* `before`: what is added to; zeros where nothing is. */
RZ_INLINE f32 scaled(const segment *part, const float *sums, long row, long column, lanes some, f32 before)
{
    const rz_product *job = part->job;
    f32 value = f32_load(sums), scale = f32_set1(job->weights ? job->scale * job->weights[row] : job->scale);
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
    float *into = (float *)job->out + (job->to ? job->to[row] : row) * part->outputs + part->before - part->origin;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        lanes some = lanes_first(part->linear->outputs - column);
        float *to = into + column;
        f32 before = job->end == ADD ? f32_load_some(some, to) : f32_zero();
        f32_store_some(some, to, scaled(part, sums, row, column, some, before));
    }
}

static void end_largest(const segment *part, const float *sums, long row, long column, int thread)
{
    rz_best *best = (rz_best *)part->job->out + thread * part->job->rows + row;
    for (int half = 0; half < 2; half++, column += LANES, sums += LANES) {
        lanes some = lanes_first(part->linear->outputs - column);
        rz_best_add(best, scaled(part, sums, row, column, some, f32_zero()), some, column);
    }
}

static void end_round(const segment *part, const float *sums, long row, long column)
{
    bf16 *to = (bf16 *)part->job->out + row * part->job->out_stride + column - part->origin;
    f32_store_two_bf16(to, f32_load(sums), f32_load(sums + LANES));
}

/* What is done with the sums of `rows` rows from `row` on. */
static void end_rows(const segment *part, const float *sums, long row, long rows, long column, int thread)
{
    for (long i = 0; i < rows; i++, sums += PANEL) {
        if (part->job->end == ACTIVATE)
            end_activate(part, sums, row + i, column);
        else if (part->job->end == GATE)
            end_gate(part, sums, row + i, column);
        else if (part->job->end == LARGEST)
            end_largest(part, sums, row + i, column, thread);
        else if (part->job->end == ROUND)
            end_round(part, sums, row + i, column);
        else
            end_float(part, sums, row + i, column);
    }
}

/* Where the sums of `rows` rows from `row` on go, where that is worth asking for: what is rounded to bf16 takes few lines,
 * and other work. */
static rz_sums_end end_of(const segment *part, long row, long rows, long column)
{
    const rz_product *job = part->job;
    if ((job->end != STORE && job->end != ADD) || job->to)
        return (rz_sums_end){ 0 };
    const float *out = (const float *)job->out + row * part->outputs + part->before + column - part->origin;
    const long width = (long)sizeof(float);
    return (rz_sums_end){ (const char *)out, part->outputs * width, PANEL * width, rows };
}

RZ_INLINE long stride_of(const rz_product *job)
{
    return job->stride ? job->stride : job->linear->inputs;
}

/* What adapters add to the sums of a piece. */
static void expand_rows(const segment *part, piece at, float *sums)
{
    rz_expand(part->added, at.first, at.rows, at.panel * PANEL, at.coming < 0 ? -1 : at.coming * PANEL, sums);
}

/* Widened rows by one panel, some inputs of all rows after the other: their weights stay in the second cache. */
static void multiply_widened(const segment *part, piece at, const bf16 *weights, rz_ahead *ahead, float *sums)
{
    enum { PAIRS_AT_ONCE = 512 };
    const long pairs = (part->linear->inputs + 1) / 2;
    for (long pair = 0; pair < pairs; pair += PAIRS_AT_ONCE) {
        const operand *x = part->operands + at.first * part->apart + 2 * pair;
        const long count = least(PAIRS_AT_ONCE, pairs - pair);
        for (long row = 0, tiles = whole_parts(at.rows, TILE_ROWS); tiles; tiles--) {
            const long here = whole_parts(at.rows - row, tiles);
            rz_tile_operands((int)here, x + row * part->apart, part->apart, weights + pair * 2 * PANEL, count,
                             sums + row * PANEL, PANEL, pair > 0, ahead);
            row += here;
        }
    }
}

static void multiply_bf16(const segment *part, piece at, int thread)
{
    const rz_product *job = part->job;
    const long stride = stride_of(job), pairs = (part->linear->inputs + 1) / 2;
    const bf16 *panels = part->linear->packed, *weights = panels + at.panel * pairs * 2 * PANEL;
    float sums[ROWS_OF_TASK * PANEL], *to = sums;
    long tiles = whole_parts(at.rows, TILE_ROWS);
    rz_ahead ahead = rz_look_ahead(at.coming < 0 ? NULL : panels + at.coming * pairs * 2 * PANEL, tiles);
    const int together = part->added || part->operands; /* whether all rows are ended at once */
    if (part->operands)
        multiply_widened(part, at, weights, &ahead, sums);
    else
        for (long row = at.first, last = at.first + at.rows; tiles; tiles--) {
            const long here = whole_parts(last - row, tiles);
            rz_tile((int)here, job->x + row * stride, stride, weights, pairs, to, PANEL, 0, &ahead,
                    end_of(part, row, here, at.panel * PANEL));
            row += here;
            if (together)
                to += here * PANEL;
            else
                end_rows(part, sums, row - here, here, at.panel * PANEL, thread);
        }
    if (!together)
        return;
    if (part->added)
        expand_rows(part, at, sums);
    end_rows(part, sums, at.first, at.rows, at.panel * PANEL, thread);
}

static void multiply_quantized(const segment *part, piece at, int thread)
{
    const rz_linear *linear = part->linear;
    const uint8_t *packed = linear->packed;
    const size_t bytes = rz_quantized_panel_bytes(&linear->format);
    float sums[MOST_ROUNDED_TOGETHER * PANEL];
    const uint8_t *here = packed + (size_t)at.panel * bytes;
    const uint8_t *coming = at.coming < 0 ? NULL : packed + (size_t)at.coming * bytes;
    if (rz_rounds(linear)) {
        rz_quantized_panel(&linear->format, here, coming, &part->rounded, at.first, at.rows, sums);
    } else {
        const long stride = TURNS == 1 ? stride_of(part->job) : part->apart;
        const operand *x = TURNS == 1 ? (const operand *)part->job->x : part->operands;
        const int shortened = linear->format.floats == RZ_SHORT_EXPONENTS;
        (shortened ? rz_short_exponents_panel : rz_float_codes_panel)(&linear->format, here, coming, x + at.first * stride,
                                                                      stride, at.rows, sums);
    }
    if (part->added)
        expand_rows(part, at, sums);
    end_rows(part, sums, at.first, at.rows, at.panel * PANEL, thread);
}

static void multiply_piece(const segment *part, piece at, int thread)
{
    if (part->linear->format.bits)
        multiply_quantized(part, at, thread);
    else
        multiply_bf16(part, at, thread);
}

/* How many rows of a product each task takes. */
static long rows_of_task(const rz_decoder *decoder, const segment *part)
{
    const rz_linear *linear = part->linear;
    const rz_format *format = &linear->format;
    const long rows = part->job->rows, row_bytes = linear->inputs * (rz_rounds(linear) ? 1 : (long)sizeof(bf16));
    long most = format->bits ? rz_most_together(format) : MOST_ROWS_OF_TASK;
    most = least(most, CACHE_OF_TASK / row_bytes);
    if (part->added || rows <= ROWS_OF_TASK || most <= ROWS_OF_TASK) /* adapters' rows are in pieces of that many */
        return ROWS_OF_TASK;
    const long shared = whole_parts((long)rz_threads_count(decoder->threads) * TASKS_OF_THREAD, panels_of(linear));
    const long pieces = whole_parts(rows, most), each = whole_parts(rows, pieces > shared ? pieces : shared);
    return each > ROWS_OF_TASK ? whole_parts(each, TILE_ROWS) * TILE_ROWS : ROWS_OF_TASK;
}

/* A piece of the rows by one panel after the other: the rows stay in the second cache, panels come from the third. */
static void product_task(void *argument, long task, long next, int thread)
{
    const segment *part = argument;
    const long rows = part->job->rows, together = part->together, panels = panels_of(part->linear);
    const long panel = task % panels, first = task / panels * together;
    const long coming = panels > 1 && next < panels * whole_parts(rows, together) ? next % panels : -1;
    multiply_piece(part, (piece){ panel, coming, first, least(together, rows - first) }, thread);
}

/* The same where rows have adapters: first they are shrunk. */
static void adapted_task(void *argument, long task, long next, int thread)
{
    const segment *part = argument;
    if (task < part->shrinks)
        rz_shrink(part->added, task, next < part->shrinks ? next : -1);
    else
        product_task(argument, task - part->shrinks, next - part->shrinks, thread);
}

static void round_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    const segment *part = argument;
    const long from = part->job->from ? part->job->from[row] : row;
    const bf16 *x = part->job->x + from * stride_of(part->job);
    rz_round_row(&part->rounded, &part->linear->format, row, x, part->linear->inputs);
}

static void widen_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    const segment *part = argument;
    const long inputs = part->linear->inputs;
    operand *to = part->operands + row * part->apart;
    widen(to, part->job->x + row * stride_of(part->job), inputs);
    to[inputs] = 0; /* of the last pair, where it is half a one */
}

/* Values of a widened row: a line more than there are, so that rows do not share the cache's places. */
RZ_INLINE long widened_row(const rz_linear *linear)
{
    return whole_parts(linear->inputs, LANES) * LANES + LANES;
}

RZ_INLINE size_t widened_bytes(const rz_linear *linear)
{
    return (size_t)widened_row(linear) * sizeof(operand);
}

/* Whether activations are widened ahead. Fewer rows by bf16 are one block, which waits for weights from memory. */
RZ_INLINE int are_widened(const rz_linear *linear, long rows)
{
    return TURNS == 2 && (linear->format.bits ? linear->format.floats : rows > MOST_AT_ONCE);
}

/* The activations as products take them: rounded for integers, widened for floats where there is room; there is for
 * codes, see rz_prepared_row. */
static void prepare_rows(rz_decoder *decoder, int thread, int booked, segment *part)
{
    const rz_linear *linear = part->linear;
    const long rows = part->job->rows;
    part->operands = NULL;
    if (rz_rounds(linear)) {
        part->rounded = rz_rounded_in(decoder->space.prepared, &linear->format, rows);
        rz_run_rows(decoder, thread, booked, rows, round_task, part);
    } else if (are_widened(linear, rows) && (size_t)rows * widened_bytes(linear) <= decoder->space.prepared_room) {
        part->operands = decoder->space.prepared;
        part->apart = widened_row(linear);
        rz_run_rows(decoder, thread, booked, rows, widen_task, part);
    }
}

void rz_multiply(rz_decoder *decoder, int thread, int booked, rz_product job)
{
    for (long row = 0; job.end == LARGEST && row < job.rows; row++)
        ((rz_best *)job.out)[thread * job.rows + row] = rz_best_none(); /* this thread's own */
    segment part = { .job = &job };
    for (const rz_linear *linear = job.linear; linear; linear = linear->next)
        part.outputs += linear->outputs;
    rz_expansion added;
    if (rz_is_adapted(decoder, job.linear)) {
        added = rz_expansion_of(decoder, job.linear, job.x, stride_of(&job));
        part.shrinks = rz_shrinks(decoder, thread, &added);
        part.added = part.shrinks ? &added : NULL;
    }
    for (const rz_linear *linear = job.linear; linear; linear = linear->next) {
        part.linear = linear;
        prepare_rows(decoder, thread, booked, &part);
        part.together = rows_of_task(decoder, &part);
        const long tasks = panels_of(linear) * whole_parts(job.rows, part.together);
        if (part.added) {
            added.adapted = linear->adapted;
            added.outputs = linear->outputs;
        }
        rz_run_stage(decoder, thread, booked, tasks + part.shrinks, part.shrinks ? adapted_task : product_task, &part);
        part.before += linear->outputs;
        part.shrinks = 0; /* they are done */
    }
}

/* --- heads ------------------------------------------------------------------------------------------- */

typedef struct {
    const rz_product *job;
    long heads, panels, step, out_step; /* panels: of a head */
    const rz_expansion *added;          /* by adapters; or NULL */
} shares;

/* The same of one head: its rows are shrunk apart. */
static rz_expansion added_to_head(const shares *all, long head)
{
    rz_expansion own = *all->added;
    own.copy = head;
    own.outputs = all->panels * PANEL;
    own.origin = head * own.outputs;
    own.x += head * all->step;
    own.shrunk += head * all->job->rows * own.stride;
    return own;
}

static void shrink_head_task(void *argument, long head, long next, int thread)
{
    (void)next, (void)thread;
    const shares *all = argument;
    const rz_expansion own = added_to_head(all, head);
    rz_shrink_rows(&own, 0, all->job->rows, NULL);
}

static void heads_task(void *argument, long task, long next, int thread)
{
    const shares *all = argument;
    const long panels = all->heads * all->panels, panel = task % panels, first = task / panels * ROWS_OF_TASK;
    const long head = panel / all->panels, rows = all->job->rows;
    rz_product own = *all->job;
    own.x += head * all->step;
    own.out = (bf16 *)own.out + head * all->out_step;
    rz_expansion added;
    if (all->added)
        added = added_to_head(all, head);
    const segment part = { .job = &own, .linear = own.linear, .origin = head * all->panels * PANEL,
                           .added = all->added ? &added : NULL };
    const long coming = panels > 1 && next < panels * rz_pieces_of(rows) ? next % panels : -1;
    multiply_bf16(&part, (piece){ panel, coming, first, least(ROWS_OF_TASK, rows - first) }, thread);
}

void rz_multiply_heads(rz_decoder *decoder, int thread, int booked, rz_product job, long heads, long step, long out_step)
{
    shares all = { &job, heads, job.linear->outputs / heads / PANEL, step, out_step, NULL };
    rz_expansion added;
    if (rz_is_adapted(decoder, job.linear)) {
        added = rz_expansion_of(decoder, job.linear, job.x, stride_of(&job));
        all.added = &added;
        rz_run_stage(decoder, thread, booked, heads, shrink_head_task, &all);
    }
    rz_run_stage(decoder, thread, booked, heads * all.panels * rz_pieces_of(job.rows), heads_task, (void *)&all);
}

/* --- experts ----------------------------------------------------------------------------------------- */

typedef struct {
    segment part;
    const rz_group *groups;
    long count, panels; /* of groups; of an expert */
    const rz_expansion *added; /* by adapters; or NULL */
} share;

/* An expert's share; `added`: room for what adapters add to it. */
static segment part_of(const share *all, const rz_group *group, rz_expansion *added)
{
    segment part = all->part;
    part.origin = group->expert * part.outputs;
    if (!all->added)
        return part;
    *added = *all->added;
    added->copy = group->expert;
    added->origin = part.origin;
    added->outputs = part.outputs;
    part.added = added;
    return part;
}

/* The group of a task, and its panel in the linear. */
static const rz_group *group_of(const share *all, long task, long *panel)
{
    long low = 0, high = all->count; /* of low <= task < of high */
    while (high - low > 1) {
        const long middle = (low + high) / 2;
        if (all->groups[middle].first_piece * all->panels <= task)
            low = middle;
        else
            high = middle;
    }
    const rz_group *group = all->groups + low;
    *panel = group->expert * all->panels + (task - group->first_piece * all->panels) / rz_pieces_of(group->rows);
    return group;
}

static long activate_tasks(const share *all)
{
    const rz_group *last = all->groups + all->count - 1;
    return all->panels * (last->first_piece + rz_pieces_of(last->rows));
}

/* Some rows of one group by one panel: no other task writes what it does. */
static void activate_task(void *argument, long task, long next, int thread)
{
    const share *all = argument;
    long panel, coming;
    const rz_group *group = group_of(all, task, &panel);
    rz_expansion added;
    const segment part = part_of(all, group, &added);
    const long done = (task - group->first_piece * all->panels) % rz_pieces_of(group->rows) * ROWS_OF_TASK;
    if (next < activate_tasks(all))
        group_of(all, next, &coming);
    else
        coming = panel;
    multiply_piece(&part, (piece){ panel, coming == panel ? -1 : coming, group->first + done,
                                   least(ROWS_OF_TASK, group->rows - done) }, thread);
}

/* A panel of all groups, one after the other: what comes to a row is added in one order, by one thread. */
static void add_task(void *argument, long task, long next, int thread)
{
    const share *all = argument;
    for (long i = 0; i < all->count; i++) {
        const rz_group *group = all->groups + i;
        rz_expansion added;
        const segment part = part_of(all, group, &added);
        const long panel = group->expert * all->panels + task;
        long coming = next < all->panels ? all->groups[0].expert * all->panels + next : -1;
        if (i + 1 < all->count)
            coming = group[1].expert * all->panels + task;
        for (long done = 0; done < group->rows; done += ROWS_OF_TASK) {
            const long rows = least(ROWS_OF_TASK, group->rows - done);
            const int ends = done + rows == group->rows;
            multiply_piece(&part, (piece){ panel, ends ? coming : -1, group->first + done, rows }, thread);
        }
    }
}

/* Some rows of one group are shrunk. */
static void shrink_expert_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const share *all = argument;
    const rz_group *group = all->groups;
    while (task >= group->first_piece + rz_pieces_of(group->rows))
        group++;
    rz_expansion own;
    (void)part_of(all, group, &own);
    const long done = (task - group->first_piece) * ROWS_OF_TASK;
    const rz_product *job = all->part.job;
    rz_shrink_rows(&own, group->first + done, least(ROWS_OF_TASK, group->rows - done),
                   rz_rounds(job->linear) ? job->from : NULL);
}

void rz_multiply_experts(rz_decoder *decoder, int thread, int booked, rz_product job, long experts, rz_group *groups,
                         long count)
{
    share all = { .part = { .job = &job, .linear = job.linear, .outputs = job.linear->outputs / experts },
                  .groups = groups, .count = count };
    all.panels = all.part.outputs / PANEL;
    rz_expansion added;
    if (rz_is_adapted(decoder, job.linear)) {
        added = rz_expansion_of(decoder, job.linear, job.x, stride_of(&job));
        added.tokens = decoder->space.routing.tokens;
        all.added = &added;
        rz_run_stage(decoder, thread, booked, activate_tasks(&all) / all.panels, shrink_expert_task, &all);
    }
    prepare_rows(decoder, thread, booked, &all.part);
    if (job.end == ADD)
        rz_run_stage(decoder, thread, booked, all.panels, add_task, &all);
    else
        rz_run_stage(decoder, thread, booked, activate_tasks(&all), activate_task, &all);
}

size_t rz_prepared_row(const rz_linear *linear)
{
    size_t most = 0;
    for (; linear; linear = linear->next) {
        size_t bytes = rz_rounds(linear) ? rz_rounded_bytes(linear->format.columns) : 0;
        if (are_widened(linear, MOST_AT_ONCE + 1))
            bytes = widened_bytes(linear);
        most = bytes > most ? bytes : most;
    }
    return most;
}
