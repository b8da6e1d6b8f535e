/* See recurrent.h. */
#include "recurrent.h"

#include <string.h>

enum {
    RUN_ROWS = 16,    /* rows of one convolution task: a value is read once for the rows that see it */
    STRIP = 2,        /* vectors of a row of a state that a chunk's tokens go through together */
    STRIP_ROWS = 16,  /* rows of a state, where rows are what does not meet */
    MOST_TAPS = 4,
    MOST_WINDOW = 8,
    MOST_KEY_DIM = 256,
};

typedef struct {
    rz_decoder *decoder;
    const rz_recurrent *layer;
    const float *projected; /* [tokens, width] */
    long width, channels, inner;
    bf16 *out;
    long strips, tasks; /* of a head's state; that share them, for each sequence and head */
} recurrence;

long rz_recurrent_channels(const rz_recurrent *layer)
{
    const long keys = (long)layer->groups * layer->key_dim, values = (long)layer->heads * layer->value_dim;
    return layer->kind == RZ_SHORT ? values : 2 * keys + values;
}

long rz_recurrent_inner(const rz_recurrent *layer)
{
    return (long)layer->heads * layer->value_dim;
}

long rz_recurrent_projected(const rz_recurrent *layer)
{
    const long inner = rz_recurrent_inner(layer);
    if (layer->kind == RZ_SHORT)
        return 3 * inner;
    return rz_recurrent_channels(layer) + inner + layer->heads * (layer->kind == RZ_DELTA ? 2L : 1L);
}

/* --- states ------------------------------------------------------------------------------------------ */

static bf16 *window_of(const rz_recurrent *layer, long slot)
{
    return (bf16 *)((char *)layer->window + slot * layer->slot_stride);
}

/* Of one head. */
static float *state_of(const rz_recurrent *layer, long slot, long head)
{
    const long size = (long)layer->key_dim * layer->value_dim;
    return (float *)((char *)layer->state + slot * layer->slot_stride) + head * size;
}

static int begins(const recurrence *job, const rz_run *run)
{
    return job->decoder->step->positions[run->first] == 0;
}

/* Whether the state behind a row goes to further slots. */
RZ_INLINE int is_copied(const recurrence *job, long row)
{
    const int32_t *copies = job->decoder->space.recurrent.copies;
    return copies[row] < copies[row + 1];
}

/* --- convolution ------------------------------------------------------------------------------------- */

/* As the window keeps it. */
RZ_INLINE f32 rounded(f32 value)
{
    bf16 held[LANES];
    f32_store_bf16(held, value);
    return f32_load_bf16(held);
}

/* What is convolved: 16 channels of a row of the projection. */
RZ_INLINE f32 convolved(const recurrence *job, long row, long channel)
{
    const float *from = job->projected + row * job->width + channel;
    f32 value = f32_load(from);
    if (job->layer->kind == RZ_SHORT)
        value = f32_mul(value, f32_load(from + 2 * job->channels));
    return rounded(value);
}

/* 16 channels of a window, row by row: in the window a channel's rows follow each other. */
typedef bf16 window_rows[MOST_WINDOW][LANES];

RZ_INLINE void split_rows(const bf16 *window, long length, window_rows rows)
{
    for (long i = 0; i < length; i++)
        for (long lane = 0; lane < LANES; lane++)
            rows[i][lane] = window[lane * length + i];
}

RZ_INLINE void join_rows(bf16 *window, long length, const window_rows rows)
{
    for (long lane = 0; lane < LANES; lane++)
        for (long i = 0; i < length; i++)
            window[lane * length + i] = rows[i][lane];
}

/* The rows of a run's window, of 16 channels: zeros where it begins. */
static void read_window(const recurrence *job, const rz_run *run, long channel, window_rows rows)
{
    const long length = job->layer->window_length;
    const bf16 *window = window_of(job->layer, job->decoder->step->state_slots[run->sequence]) + channel * length;
    if (begins(job, run))
        memset(rows, 0, sizeof(window_rows));
    else if (length == 3) /* the usual ones, which compilers then know how to move */
        split_rows(window, 3, rows);
    else if (length == 2)
        split_rows(window, 2, rows);
    else
        split_rows(window, length, rows);
}

static void write_window(const recurrence *job, long slot, long channel, const window_rows rows)
{
    const long length = job->layer->window_length;
    bf16 *window = window_of(job->layer, slot) + channel * length;
    if (length == 3)
        join_rows(window, 3, rows);
    else if (length == 2)
        join_rows(window, 2, rows);
    else
        join_rows(window, length, rows);
}

/* The 16 channels of the row `back` rows before `row`, of this step or earlier: then of `window`. */
RZ_INLINE f32 earlier(const recurrence *job, const rz_run *run, const window_rows window, long row, long channel,
                      long back)
{
    const long at = row - back;
    return at >= run->first ? convolved(job, at, channel)
                            : f32_load_bf16(window[job->layer->window_length - (run->first - at)]);
}

/* Rows [row, end) of one sequence, 16 channels. */
RZ_INLINE void convolve_channels(const recurrence *job, const rz_run *run, long row, long end, long channel)
{
    const rz_recurrent *layer = job->layer;
    const int taps = layer->taps;
    f32 weights[MOST_TAPS], seen[MOST_TAPS] = { f32_zero(), f32_zero(), f32_zero(), f32_zero() };
    const f32 bias = layer->bias ? f32_load(layer->bias + channel) : f32_zero();
    for (int i = 0; i < MOST_TAPS; i++) /* the last one is of the row itself; what is not there counts as 0 */
        weights[i] = i < MOST_TAPS - taps ? f32_zero() : f32_load(layer->weights + (i - MOST_TAPS + taps) * job->channels + channel);
    window_rows window;
    if (row - run->first < taps - 1)
        read_window(job, run, channel, window);
    for (int back = 1; back < taps; back++)
        seen[MOST_TAPS - back] = earlier(job, run, window, row, channel, back);
    for (; row < end; row++) {
        f32 sum = bias;
        for (int i = 0; i < MOST_TAPS - 1; i++) {
            seen[i] = seen[i + 1];
            sum = f32_fma(seen[i], weights[i], sum);
        }
        seen[MOST_TAPS - 1] = convolved(job, row, channel);
        sum = f32_fma(seen[MOST_TAPS - 1], weights[MOST_TAPS - 1], sum);
        if (layer->activated)
            sum = silu_f32(sum);
        f32_store(job->decoder->space.recurrent.mixed + row * job->channels + channel, sum);
    }
}

/* x / sqrt(sum of squares + 1e-6), times `scale`. */
static void normalize(float *x, long count, float scale)
{
    f32 sum = f32_zero();
    for (long i = 0; i < count; i += LANES)
        sum = f32_fma(f32_load(x + i), f32_load(x + i), sum);
    const f32 by = f32_set1(scale / sqrtf(f32_sum(sum) + 1e-6f));
    for (long i = 0; i < count; i += LANES)
        f32_store(x + i, f32_mul(f32_load(x + i), by));
}

static float softplus(float x)
{
    return x > 20.0f ? x : log1pf(expf(x));
}

/* What a row's scan multiplies with, per head: the decay of the state, and beta or the step. */
static void weigh_row(const recurrence *job, long row)
{
    const rz_recurrent *layer = job->layer;
    const long heads = layer->heads;
    const float *from = job->projected + row * job->width + job->channels + job->inner;
    float *decays = job->decoder->space.recurrent.gates + row * 2 * heads, *steps = decays + heads;
    for (long head = 0; head < heads; head++) {
        if (layer->kind == RZ_DELTA) {
            steps[head] = 1.0f / (1.0f + expf(-from[head]));
            decays[head] = expf(layer->rates[head] * softplus(from[heads + head] + layer->step_bias[head]));
        } else {
            const float step = softplus(from[head] + layer->step_bias[head]);
            steps[head] = fminf(fmaxf(step, layer->least_step), layer->most_step);
            decays[head] = expf(layer->rates[head] * steps[head]);
        }
    }
}

static void gate_short_row(const recurrence *job, long row)
{
    const float *gate = job->projected + row * job->width + job->channels;
    const float *mixed = job->decoder->space.recurrent.mixed + row * job->channels;
    for (long i = 0; i < job->channels; i += LANES)
        f32_store_bf16(job->out + row * job->inner + i, f32_mul(f32_load(gate + i), f32_load(mixed + i)));
}

static void finish_row(const recurrence *job, long row)
{
    const rz_recurrent *layer = job->layer;
    if (layer->kind == RZ_SHORT) {
        gate_short_row(job, row);
        return;
    }
    weigh_row(job, row);
    if (layer->kind != RZ_DELTA)
        return;
    float *queries = job->decoder->space.recurrent.mixed + row * job->channels;
    float *keys = queries + (long)layer->groups * layer->key_dim;
    for (long group = 0; group < layer->groups; group++) {
        normalize(queries + group * layer->key_dim, layer->key_dim, 1.0f / sqrtf((float)layer->key_dim));
        normalize(keys + group * layer->key_dim, layer->key_dim, 1.0f);
    }
}

static void convolve_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const recurrence *job = argument;
    const rz_recurrent_space *plan = &job->decoder->space.recurrent;
    const rz_piece *piece = &plan->pieces[task];
    const rz_run *run = &plan->runs[piece->run];
    for (long channel = 0; channel < job->channels; channel += LANES)
        convolve_channels(job, run, piece->first, piece->first + piece->rows, channel);
    for (long row = piece->first; row < piece->first + piece->rows; row++)
        finish_row(job, row);
}

/* The window behind `row` goes to `slot`. The old one may be there. */
static void keep_window(const recurrence *job, const rz_run *run, long row, long slot)
{
    const long length = job->layer->window_length;
    for (long channel = 0; channel < job->channels; channel += LANES) {
        window_rows before, now;
        if (row - run->first < length - 1)
            read_window(job, run, channel, before);
        for (long i = 0; i < length; i++)
            f32_store_bf16(now[i], earlier(job, run, before, row, channel, length - 1 - i));
        write_window(job, slot, channel, now);
    }
}

/* Of a sequence: copies first, because they read the window that the last one replaces. */
static void window_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const recurrence *job = argument;
    const rz_recurrent_space *plan = &job->decoder->space.recurrent;
    const rz_run *run = &plan->runs[task];
    const long end = run->first + run->rows;
    for (long row = run->first; row < end; row++)
        for (long i = plan->copies[row]; i < plan->copies[row + 1]; i++)
            keep_window(job, run, row, plan->copy_slots[i]);
    keep_window(job, run, end - 1, job->decoder->step->state_slots[run->sequence]);
}

/* --- the gated delta rule ---------------------------------------------------------------------------- */

/* Some columns of a head's state, and the rows of a sequence that they go through. */
typedef struct {
    float *state; /* [key dim], `stride` apart */
    long stride;
    const float *queries, *keys; /* of the first row; rows are `channels` apart */
    float *values;               /* likewise; what comes out takes their place */
    const float *gates;          /* decays of the rows; rows are 2 heads apart */
    long rows, channels, heads, key_dim;
} columns;

/* What the state says of a key. */
RZ_INLINE void recall(const columns *at, int width, f32 *memory)
{
    for (int w = 0; w < width; w++)
        memory[w] = f32_zero();
    for (long i = 0; i < at->key_dim; i++) {
        const f32 key = f32_set1(at->keys[i]);
        for (int w = 0; w < width; w++)
            memory[w] = f32_fma(f32_load(at->state + i * at->stride + w * LANES), key, memory[w]);
    }
}

/* One row; `memory` is what the state says of its key, and, if `more`, becomes what the new one says of the next key. */
RZ_INLINE void delta_row(const columns *at, int width, long row, int more, f32 *memory)
{
    const float *queries = at->queries + row * at->channels, *keys = at->keys + row * at->channels;
    const float *next = keys + at->channels, *gates = at->gates + row * 2 * at->heads;
    float *values = at->values + row * at->channels;
    const f32 decay = f32_set1(gates[0]), minus = f32_set1(-gates[0]), beta = f32_set1(gates[at->heads]);
    f32 change[8], out[8];
    for (int w = 0; w < width; w++) {
        change[w] = f32_mul(f32_fma(minus, memory[w], f32_load(values + w * LANES)), beta);
        out[w] = memory[w] = f32_zero();
    }
    for (long i = 0; i < at->key_dim; i++) {
        const f32 key = f32_set1(keys[i]), query = f32_set1(queries[i]);
        float *state = at->state + i * at->stride;
        for (int w = 0; w < width; w++) {
            const f32 value = f32_fma(key, change[w], f32_mul(f32_load(state + w * LANES), decay));
            f32_store(state + w * LANES, value);
            out[w] = f32_fma(value, query, out[w]);
            if (more)
                memory[w] = f32_fma(value, f32_set1(next[i]), memory[w]);
        }
    }
    for (int w = 0; w < width; w++)
        f32_store(values + w * LANES, out[w]);
}

RZ_INLINE void delta_rows(const columns *at, int width)
{
    f32 memory[8];
    recall(at, width, memory);
    for (long row = 0; row + 1 < at->rows; row++)
        delta_row(at, width, row, 1, memory);
    delta_row(at, width, at->rows - 1, 0, memory);
}

/* One token: the state is read once to recall, and once more, from the second cache, to change it where it lies. */
static void delta_once(columns at, long left)
{
    const int most = VECTORS >= 32 ? 8 : 4;
    for (; left >= most; left -= most, at.state += most * LANES, at.values += most * LANES)
        delta_rows(&at, most);
    for (; left; left--, at.state += LANES, at.values += LANES)
        delta_rows(&at, 1);
}

static void copy_columns(float *to, long to_stride, const float *from, long from_stride, long rows, long count)
{
    for (long i = 0; i < rows; i++)
        memcpy(to + i * to_stride, from + i * from_stride, (size_t)count * sizeof *to);
}

/* The rows of a chunk by `width` vectors of the state, from `column` on. */
RZ_INLINE void delta_strip(const recurrence *job, const rz_run *run, long head, columns at, long column, int width)
{
    const rz_recurrent *layer = job->layer;
    const rz_recurrent_space *plan = &job->decoder->space.recurrent;
    const long value_dim = layer->value_dim, count = width * LANES;
    float held[MOST_KEY_DIM * STRIP * LANES] __attribute__((aligned(64)));
    if (begins(job, run))
        memset(held, 0, (size_t)(at.key_dim * count) * sizeof *held);
    else
        copy_columns(held, count, at.state + column, value_dim, at.key_dim, count);
    float *state = at.state + column;
    at.state = held;
    at.stride = count;
    at.values += column;
    for (long row = run->first, end = run->first + run->rows; row < end;) {
        long last = row;
        while (last + 1 < end && !is_copied(job, last))
            last++;
        at.rows = last + 1 - row;
        delta_rows(&at, width);
        at.queries += at.rows * at.channels;
        at.keys += at.rows * at.channels;
        at.values += at.rows * at.channels;
        at.gates += at.rows * 2 * at.heads;
        row += at.rows;
        for (long i = plan->copies[last]; i < plan->copies[last + 1]; i++)
            copy_columns(state_of(layer, plan->copy_slots[i], head) + column, value_dim, held, count, at.key_dim, count);
    }
    copy_columns(state, value_dim, held, count, at.key_dim, count);
}

static void delta_task(const recurrence *job, const rz_run *run, long head, long strip)
{
    const rz_recurrent *layer = job->layer;
    const rz_step *step = job->decoder->step;
    const rz_workspace *space = &job->decoder->space;
    const long group = head / (layer->heads / layer->groups), keys = (long)layer->groups * layer->key_dim;
    float *mixed = space->recurrent.mixed + run->first * job->channels;
    columns at = {
        .state = state_of(layer, step->state_slots[run->sequence], head),
        .stride = layer->value_dim,
        .queries = mixed + group * layer->key_dim,
        .keys = mixed + keys + group * layer->key_dim,
        .values = mixed + 2 * keys + head * layer->value_dim,
        .gates = space->recurrent.gates + run->first * 2 * layer->heads + head,
        .rows = run->rows,
        .channels = job->channels,
        .heads = layer->heads,
        .key_dim = layer->key_dim,
    };
    const long vectors = layer->value_dim / LANES;
    if (run->rows == 1 && !begins(job, run) && !is_copied(job, run->first)) {
        if (!strip)
            delta_once(at, vectors);
        return;
    }
    if ((strip + 1) * STRIP <= vectors)
        delta_strip(job, run, head, at, strip * STRIP * LANES, STRIP);
    else if (strip * STRIP < vectors)
        delta_strip(job, run, head, at, strip * STRIP * LANES, 1);
}

/* --- Mamba 2 ----------------------------------------------------------------------------------------- */

/* Rows [first, end) of one head's state through one token; `values` becomes what comes out. */
RZ_INLINE void scan_row(float *state, long first, long end, long key_dim, float *values, const float *in,
                        const float *out, float decay, float step, float skip)
{
    const f32 decays = f32_set1(decay);
    for (long i = first; i < end; i++) {
        float *row = state + i * key_dim;
        const f32 value = f32_set1(step * values[i]);
        f32 sum = f32_zero();
        for (long j = 0; j < key_dim; j += LANES) {
            const f32 next = f32_fma(f32_load(in + j), value, f32_mul(f32_load(row + j), decays));
            f32_store(row + j, next);
            sum = f32_fma(next, f32_load(out + j), sum);
        }
        values[i] = fmaf(skip, values[i], f32_sum(sum));
    }
}

static void keep_rows(const recurrence *job, long row, const float *state, long head, long first, long end)
{
    const rz_recurrent_space *plan = &job->decoder->space.recurrent;
    const long key_dim = job->layer->key_dim;
    for (long i = plan->copies[row]; i < plan->copies[row + 1]; i++)
        memcpy(state_of(job->layer, plan->copy_slots[i], head) + first * key_dim, state + first * key_dim,
               (size_t)((end - first) * key_dim) * sizeof *state);
}

static void scan_task(const recurrence *job, const rz_run *run, long head, long strip)
{
    const rz_recurrent *layer = job->layer;
    const rz_workspace *space = &job->decoder->space;
    const long group = head / (layer->heads / layer->groups), key_dim = layer->key_dim;
    const long first = strip * STRIP_ROWS, end = least(first + STRIP_ROWS, layer->value_dim);
    float *state = state_of(layer, job->decoder->step->state_slots[run->sequence], head);
    if (first >= end)
        return;
    if (begins(job, run))
        memset(state + first * key_dim, 0, (size_t)((end - first) * key_dim) * sizeof *state);
    for (long row = run->first; row < run->first + run->rows; row++) {
        float *values = space->recurrent.mixed + row * job->channels;
        const float *in = values + job->inner + group * key_dim, *out = in + layer->groups * key_dim;
        const float *gates = space->recurrent.gates + row * 2 * layer->heads + head;
        scan_row(state, first, end, key_dim, values + head * layer->value_dim, in, out, gates[0], gates[layer->heads],
                 layer->skips ? layer->skips[head] : 0.0f);
        keep_rows(job, row, state, head, first, end);
    }
}

/* Windows are written beside: nothing of the scan reads them. */
static void state_task(void *argument, long task, long next, int thread)
{
    const recurrence *job = argument;
    const rz_recurrent_space *plan = &job->decoder->space.recurrent;
    const long heads = job->layer->heads, each = heads * job->tasks;
    if (task >= plan->count * each) {
        window_task(argument, task - plan->count * each, next, thread);
        return;
    }
    const rz_run *run = &plan->runs[task / each];
    const long head = task % each / job->tasks;
    for (long strip = task % job->tasks; strip < job->strips; strip += job->tasks)
        if (job->layer->kind == RZ_DELTA)
            delta_task(job, run, head, strip);
        else
            scan_task(job, run, head, strip);
}

/* --- norm and gate ----------------------------------------------------------------------------------- */

static float *scanned_of(const recurrence *job, long row)
{
    const long keys = job->layer->kind == RZ_DELTA ? 2L * job->layer->groups * job->layer->key_dim : 0;
    return job->decoder->space.recurrent.mixed + row * job->channels + keys;
}

/* The first column behind `column` that another norm is for. */
static long norm_end(const recurrence *job, long column)
{
    const long size = job->layer->norm_columns, at = column + job->layer->norm_first;
    return least((at / size + 1) * size - job->layer->norm_first, job->inner);
}

/* Gates a row where the gate comes first, and sums its squares, of each norm. */
static void square_row(const recurrence *job, long row)
{
    const rz_recurrent *layer = job->layer;
    float *x = scanned_of(job, row), *squares = job->decoder->space.recurrent.squares + row * layer->norms;
    const float *gate = job->projected + row * job->width + job->channels;
    memset(squares, 0, (size_t)layer->norms * sizeof *squares);
    for (long i = 0; i < job->inner;) {
        const long norm = (i + layer->norm_first) / layer->norm_columns, end = norm_end(job, i);
        f32 sum = f32_zero();
        for (; i < end; i += LANES) {
            f32 value = f32_load(x + i);
            if (layer->gate_first)
                f32_store(x + i, value = f32_mul(value, silu_f32(f32_load(gate + i))));
            sum = f32_fma(value, value, sum);
        }
        squares[norm] = f32_sum(sum);
    }
}

static void norm_row(const recurrence *job, long row)
{
    const rz_recurrent *layer = job->layer;
    const float *x = scanned_of(job, row), *squares = job->decoder->space.recurrent.squares + row * layer->norms;
    const float *gate = job->projected + row * job->width + job->channels;
    for (long i = 0; i < job->inner;) {
        const long norm = (i + layer->norm_first) / layer->norm_columns, end = norm_end(job, i);
        const f32 scale = f32_set1(1.0f / sqrtf(squares[norm] / (float)layer->norm_columns + layer->eps));
        for (; i < end; i += LANES) {
            f32 value = f32_load(x + i);
            if (layer->norm)
                value = f32_mul(f32_mul(value, scale), f32_load(layer->norm + i));
            if (!layer->gate_first)
                value = f32_mul(value, silu_f32(f32_load(gate + i)));
            f32_store_bf16(job->out + row * job->inner + i, value);
        }
    }
}

static void square_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    square_row(argument, row);
}

static void norm_alone_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    norm_row(argument, row);
}

static void gate_task(void *argument, long row, long next, int thread)
{
    square_task(argument, row, next, thread);
    norm_alone_task(argument, row, next, thread);
}

int rz_recur_rows(rz_decoder *decoder, int thread, const rz_recurrent *layer, const float *projected, long width,
                  bf16 *out)
{
    const rz_recurrent_space *plan = &decoder->space.recurrent;
    const long tokens = decoder->step->tokens, vectors = layer->value_dim / LANES;
    recurrence job = {
        .decoder = decoder, .layer = layer, .projected = projected, .width = width, .out = out,
        .channels = rz_recurrent_channels(layer), .inner = rz_recurrent_inner(layer),
    };
    job.strips = layer->kind == RZ_DELTA ? (vectors + STRIP - 1) / STRIP : vectors * LANES / STRIP_ROWS;
    job.tasks = tokens > plan->count ? job.strips : 1;
    rz_run_stage(decoder, thread, RZ_CONVOLVE, plan->num_pieces, convolve_task, &job);
    if (layer->kind == RZ_SHORT) {
        rz_run_stage(decoder, thread, RZ_CONVOLVE, plan->count, window_task, &job);
        return 1;
    }
    rz_run_stage(decoder, thread, RZ_RECUR, plan->count * (layer->heads * job.tasks + 1), state_task, &job);
    if (!layer->shares_norm) {
        rz_run_rows(decoder, thread, RZ_RECUR, tokens, gate_task, &job);
        return 1;
    }
    rz_run_rows(decoder, thread, RZ_RECUR, tokens, square_task, &job);
    if (!rz_sum_over_ranks(decoder, thread, decoder->space.recurrent.squares, layer->norms))
        return 0;
    rz_run_rows(decoder, thread, RZ_RECUR, tokens, norm_alone_task, &job);
    return 1;
}

/* Orders the step's copies of states by the rows that they are behind. */
static void plan_copies(rz_recurrent_space *plan, const rz_step *step)
{
    int32_t *next = plan->copies + 1; /* behind the counting, where the next copy of a row goes */
    memset(plan->copies, 0, (size_t)(step->tokens + 2) * sizeof *plan->copies);
    for (long i = 0; i < step->num_snapshots; i++)
        next[step->state_snapshots[i * 2] + 1]++;
    for (long row = 0; row < step->tokens; row++)
        next[row + 1] += next[row];
    for (long i = 0; i < step->num_snapshots; i++)
        plan->copy_slots[next[step->state_snapshots[i * 2]]++] = step->state_snapshots[i * 2 + 1];
}

int rz_plan_recurrent(rz_decoder *decoder)
{
    const rz_step *step = decoder->step;
    if (!rz_workspace_reserve_recurrent(&decoder->space, step->tokens, step->num_snapshots))
        return 0;
    plan_copies(&decoder->space.recurrent, step);
    rz_recurrent_space *plan = &decoder->space.recurrent;
    plan->count = plan->num_pieces = 0;
    long row = 0;
    for (long i = 0; i < step->sequences; i++) {
        const long rows = step->query_lens[i];
        for (long done = 0; done < rows; done += RUN_ROWS)
            plan->pieces[plan->num_pieces++] = (rz_piece){ plan->count, row + done, least(RUN_ROWS, rows - done) };
        plan->runs[plan->count++] = (rz_run){ i, row, rows };
        row += rows;
    }
    return 1;
}
