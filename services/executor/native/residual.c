/* See residual.h. */
#include "residual.h"

#include <string.h>

#include "gemm.h"
#include "products.h"
#include "quantized.h"

typedef struct {
    rz_decoder *decoder;
    const float *weight;     /* of the norm; [hidden]; NULL: there is none */
    rz_pending first;
    const int32_t *rows;     /* of the residual that are wanted; NULL: all */
} norm;

static void add_delta(const rz_decoder *decoder, const float *after, float *x, const float *delta)
{
    const long hidden = decoder->model.hidden;
    float scale = decoder->model.residual_scale;
    if (after)
        scale *= rms_scale(delta, hidden, decoder->model.eps);
    for (long i = 0; i < hidden; i++)
        x[i] += delta[i] * scale * (after ? after[i] : 1.0f);
}

static void settle(const rz_decoder *decoder, const rz_pending *first, long token)
{
    const long hidden = decoder->model.hidden;
    float *x = decoder->space.residual + token * hidden;
    if (first->adds)
        add_delta(decoder, first->after, x, decoder->space.delta + token * hidden);
    for (long i = 0; first->scale != 1.0f && i < hidden; i++)
        x[i] *= first->scale;
}

static void norm_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const norm *job = argument;
    const rz_decoder *decoder = job->decoder;
    const long hidden = decoder->model.hidden, token = job->rows ? job->rows[task] : task;
    const float *x = decoder->space.residual + token * hidden;
    settle(decoder, &job->first, token);
    f32 scale = f32_set1(job->weight ? rms_scale(x, hidden, decoder->model.eps) : 1.0f);
    bf16 *to = decoder->space.normed + task * hidden;
    for (long i = 0; i < hidden; i += LANES) {
        lanes some = lanes_first(hidden - i);
        f32 value = f32_mul(f32_load_some(some, x + i), scale);
        if (job->weight)
            value = f32_mul(value, f32_load_some(some, job->weight + i));
        f32_store_some_bf16(some, to + i, value);
    }
}

/* The sum of a pool's rows behind the last norm, in float32. */
static void pool_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const norm *job = argument;
    const rz_decoder *decoder = job->decoder;
    const rz_step *step = decoder->step;
    const long hidden = decoder->model.hidden;
    float *to = step->pooled + task * hidden;
    memset(to, 0, (size_t)hidden * sizeof *to);
    for (long token = step->pools[task * 2]; token < step->pools[task * 2 + 1]; token++) {
        const float *x = decoder->space.residual + token * hidden;
        settle(decoder, &job->first, token);
        const float scale = rms_scale(x, hidden, decoder->model.eps);
        for (long i = 0; i < hidden; i++)
            to[i] += x[i] * scale * job->weight[i];
    }
}

void rz_norm_rows(rz_decoder *decoder, int thread, const float *weight, rz_pending first)
{
    norm job = { decoder, weight, first, NULL };
    rz_run_rows(decoder, thread, RZ_NORM, decoder->step->tokens, norm_task, &job);
}

typedef struct {
    const rz_decoder *decoder;
    rz_pending first;
    const float *weight; /* of the norm; [hidden]; NULL: there is none */
    float *to;           /* of the first row */
} tap;

static void tap_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const tap *job = argument;
    const long hidden = job->decoder->model.hidden;
    const float *x = job->decoder->space.residual + token * hidden;
    float *to = job->to + token * job->decoder->step->num_taps * hidden;
    settle(job->decoder, &job->first, token);
    if (!job->weight) {
        memcpy(to, x, (size_t)hidden * sizeof *to);
        return;
    }
    const float scale = rms_scale(x, hidden, job->decoder->model.eps);
    for (long i = 0; i < hidden; i++)
        to[i] = x[i] * scale * job->weight[i];
}

rz_pending rz_tap_rows(rz_decoder *decoder, int thread, int layer, const float *weight, rz_pending first)
{
    const rz_step *step = decoder->step;
    for (long i = 0; i < step->num_taps; i++) {
        if (step->taps[i] != layer)
            continue;
        tap job = { decoder, first, weight, step->tapped + i * decoder->model.hidden };
        rz_run_rows(decoder, thread, RZ_NORM, step->tokens, tap_task, &job);
        first = RZ_NOTHING_LEFT;
    }
    return first;
}

void rz_norm_sampled(rz_decoder *decoder, int thread, rz_pending first)
{
    const rz_step *step = decoder->step;
    first = rz_tap_rows(decoder, thread, decoder->model.layers, decoder->model.final_norm, first);
    norm last = { decoder, decoder->model.final_norm, first, step->sample_rows };
    if (step->num_pools)
        rz_run_stage(decoder, thread, RZ_NORM, (long)step->num_pools, pool_task, &last);
    rz_run_rows(decoder, thread, RZ_NORM, step->sampled, norm_task, &last);
}

typedef struct {
    rz_decoder *decoder;
    const rz_pending *left;
    const rz_step_rows *also;
} kept;

static void move_row(void *rows, size_t bytes, long to, long from)
{
    if (to != from)
        memcpy((unsigned char *)rows + (size_t)to * bytes, (unsigned char *)rows + (size_t)from * bytes, bytes);
}

static void keep_task(void *argument, long task, long next, int thread)
{
    (void)task, (void)next, (void)thread;
    const kept *job = argument;
    rz_decoder *decoder = job->decoder;
    rz_workspace *space = &decoder->space;
    const size_t rotation = (size_t)space->most_rotary * sizeof(float);
    for (long i = 0; i < decoder->tail.step.tokens; i++) {
        const long row = decoder->step->sample_rows[i];
        settle(decoder, job->left, row);
        move_row(space->residual, (size_t)decoder->model.hidden * sizeof(float), i, row);
        move_row(space->inputs, (size_t)rz_inputs_row(&decoder->model) * sizeof(float), i, row);
        for (int set = 0; set < RZ_ROTARIES; set++)
            move_row(space->rotations + set * space->tokens * space->most_rotary, rotation, i, row);
        for (int which = 0; which < 2; which++)
            move_row(job->also[which].first, job->also[which].bytes, i, row);
    }
    decoder->step = &decoder->tail.step;
    decoder->attention = decoder->tail.attention;
    if (decoder->adapter_rows)
        decoder->adapter_rows = &decoder->tail.adapter_rows;
}

void rz_keep_rows(rz_decoder *decoder, int thread, rz_pending left, const rz_step_rows *also)
{
    kept job = { decoder, &left, also };
    rz_run_stage(decoder, thread, RZ_NORM, 1, keep_task, &job);
}

/* --- what a step begins with ------------------------------------------------------------------------- */

/* What turns this token's position into an angle, for every set of frequencies. */
static void rotate_by_position(const rz_decoder *decoder, long token)
{
    const rz_model *model = &decoder->model;
    const float position = (float)decoder->step->positions[token];
    for (int set = 0; set < RZ_ROTARIES; set++) {
        if (!model->frequencies[set])
            continue;
        const long half = model->rotary_dim[set] / 2;
        float *cosines = decoder->space.rotations + (set * decoder->space.tokens + token) * decoder->space.most_rotary;
        for (long i = 0; i < half; i++) {
            float angle = position * model->frequencies[set][i];
            cosines[i] = cosf(angle) * model->rotary_scale[set];
            cosines[half + i] = sinf(angle) * model->rotary_scale[set];
        }
    }
}

static void embedding_row(const rz_linear *embedding, long row, float *to, bf16 *raw)
{
    if (embedding->format.bits) {
        rz_quantized_row(to, &embedding->format, embedding->packed, row);
        return;
    }
    rz_unpack_row(raw, embedding->packed, row, embedding->inputs);
    for (long i = 0; i < embedding->inputs; i++)
        to[i] = bf16_to_float(raw[i]);
}

static void embed_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    rz_decoder *decoder = argument;
    const rz_model *model = &decoder->model;
    const long hidden = model->hidden, row = decoder->step->token_ids[token] - model->vocab_first;
    float *to = decoder->space.residual + token * hidden;
    bf16 *raw = decoder->space.normed + token * hidden;
    if (row < 0 || row >= model->rows_in_embedding) {
        memset(to, 0, (size_t)hidden * sizeof *to); /* another rank has it */
    } else {
        embedding_row(&model->embedding, row, to, raw);
        for (long i = 0; i < hidden; i++)
            to[i] *= model->embedding_scale;
    }
    rotate_by_position(decoder, token);
}

/* A row of the table is added to a token's inputs. */
static void add_table_row(const rz_decoder *decoder, long row, float *to, int thread)
{
    const rz_inputs *inputs = &decoder->model.inputs;
    const long whole = rz_inputs_row(&decoder->model);
    const float scale = inputs->table_scale * inputs->scale;
    if (inputs->table.format.bits) {
        float *values = (float *)(decoder->space.scratch + decoder->space.scratch_piece * (size_t)thread);
        rz_quantized_row(values, &inputs->table.format, inputs->table.packed, row);
        for (long i = 0; i < whole; i++)
            to[i] += values[i] * scale;
        return;
    }
    const bf16 *values = (const bf16 *)inputs->table.packed + row * whole;
    for (long i = 0; i < whole; i++)
        to[i] += bf16_to_float(values[i]) * scale;
}

/* A token's row of the table, times its scale, is added to each layer's norm of what its embedding is projected to. A
 * rank that has no such row leaves zeros. */
static void input_task(void *argument, long token, long next, int thread)
{
    (void)next;
    const rz_decoder *decoder = argument;
    const rz_model *model = &decoder->model;
    const rz_inputs *inputs = &model->inputs;
    const long width = inputs->width, whole = rz_inputs_row(model);
    const long row = decoder->step->token_ids[token] - model->vocab_first;
    float *to = decoder->space.inputs + token * whole;
    if (row < 0 || row >= model->rows_in_embedding) {
        memset(to, 0, (size_t)whole * sizeof *to);
        return;
    }
    for (long layer = 0; layer < model->layers; layer++, to += width) {
        const float scale = rms_scale(to, width, model->eps) * inputs->scale;
        for (long i = 0; i < width; i++)
            to[i] *= scale * inputs->norm[i];
    }
    add_table_row(decoder, row, to - whole, thread);
}

static int make_inputs(rz_decoder *decoder, int thread)
{
    const rz_model *model = &decoder->model;
    const rz_inputs *inputs = &model->inputs;
    rz_norm_rows(decoder, thread, NULL, RZ_NOTHING_LEFT);
    rz_multiply(decoder, thread, RZ_INPUT, (rz_product){
        .linear = &inputs->projection, .x = decoder->space.normed, .rows = decoder->step->tokens, .end = STORE,
        .out = decoder->space.inputs, .scale = inputs->projection_scale });
    rz_run_stage(decoder, thread, RZ_INPUT, decoder->step->tokens, input_task, decoder);
    return !model->embedding_split || rz_sum_over_ranks(decoder, thread, decoder->space.inputs, rz_inputs_row(model));
}

int rz_embed_rows(rz_decoder *decoder, int thread)
{
    const rz_model *model = &decoder->model;
    rz_run_stage(decoder, thread, RZ_EMBED, decoder->step->tokens, embed_task, decoder);
    if (model->embedding_split && !rz_sum_over_ranks(decoder, thread, decoder->space.residual, model->hidden))
        return 0;
    return !model->inputs.width || make_inputs(decoder, thread);
}
