/* See decoder.h. Each stage is a set of tasks (threads.h); forward() puts them in order. */
#include "decoder.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attention_stages.h"
#include "experts.h"
#include "gemm.h"
#include "largest.h"
#include "products.h"
#include "quantized.h"
#include "state.h"

int64_t rz_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

void rz_run_stage(rz_decoder *decoder, int thread, int part, long tasks, rz_task task, void *argument)
{
    const int64_t began = thread ? 0 : rz_now();
    rz_stage(decoder->threads, thread, tasks, task, argument);
    if (!thread)
        decoder->spent[part] += rz_now() - began;
}

/* --- embedding, norms -------------------------------------------------------------------------------- */

/* What turns this token's position into an angle, for every set of frequencies. */
static void rotate_by_position(const rz_decoder *decoder, long token)
{
    const rz_model *model = &decoder->model;
    const long half = model->rotary_dim / 2;
    const float position = (float)decoder->step->positions[token];
    for (int set = 0; set < RZ_ROTARIES; set++) {
        if (!model->frequencies[set])
            continue;
        float *cosines = decoder->space.rotations + (set * decoder->space.tokens + token) * model->rotary_dim;
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

typedef struct {
    rz_decoder *decoder;
    const float *weight;     /* of the norm; [hidden] */
    const float *after;      /* norm of what is added first; or NULL */
    int adds;                /* delta is added to the residual first */
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

static void norm_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const norm *job = argument;
    const rz_decoder *decoder = job->decoder;
    const long hidden = decoder->model.hidden, token = job->rows ? job->rows[task] : task;
    float *x = decoder->space.residual + token * hidden;
    if (job->adds)
        add_delta(decoder, job->after, x, decoder->space.delta + token * hidden);
    f32 scale = f32_set1(rms_scale(x, hidden, decoder->model.eps));
    bf16 *to = decoder->space.normed + task * hidden;
    for (long i = 0; i < hidden; i += LANES) {
        lanes some = lanes_first(hidden - i);
        f32 value = f32_mul(f32_load_some(some, x + i), scale);
        f32_store_some_bf16(some, to + i, f32_mul(value, f32_load_some(some, job->weight + i)));
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
        float *x = decoder->space.residual + token * hidden;
        if (job->adds)
            add_delta(decoder, job->after, x, decoder->space.delta + token * hidden);
        const float scale = rms_scale(x, hidden, decoder->model.eps);
        for (long i = 0; i < hidden; i++)
            to[i] += x[i] * scale * job->weight[i];
    }
}

/* --- the step ---------------------------------------------------------------------------------------- */

int rz_sum_over_ranks(rz_decoder *decoder, int thread, float *values, long width)
{
    const rz_model *model = &decoder->model;
    if (!model->ring)
        return 1;
    size_t count = (size_t)decoder->step->tokens * (size_t)width;
    const int threads = rz_threads_count(decoder->threads);
    const int64_t began = thread ? 0 : rz_now();
    if (rz_ring_sum_f32_part(model->ring, values, count, thread, threads, model->ring_timeout_ns))
        atomic_store(&decoder->failed, 1);
    rz_stage(decoder->threads, thread, 0, NULL, NULL);
    if (!thread)
        decoder->spent[RZ_SUM] += rz_now() - began;
    return !atomic_load(&decoder->failed);
}

/* What a block adds goes straight into the residual, or into delta where a sum or a norm comes between. */
static int is_direct(const rz_model *model, const float *after)
{
    return !model->ring && !after;
}

/* A block's last product, of `x`; `weights` of its rows, or NULL. */
static void end_block(rz_decoder *decoder, int thread, int part, const rz_linear *linear, const bf16 *x,
                      const float *after, const float *weights)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    const int direct = is_direct(model, after);
    const long stride = part == RZ_OUTPUT ? (long)model->q_heads * model->head_dim : 0;
    rz_multiply(decoder, thread, part, (rz_product){
        .linear = linear, .x = x, .rows = decoder->step->tokens, .stride = stride, .end = direct ? ADD : STORE,
        .out = direct ? space->residual : space->delta, .scale = direct ? model->residual_scale : 1.0f,
        .weights = weights });
}

static void clear_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const rz_decoder *decoder = argument;
    const size_t hidden = (size_t)decoder->model.hidden;
    memset(decoder->space.delta + (size_t)token * hidden, 0, hidden * sizeof(float));
}

/* Of the normed rows: one feed-forward for all, or experts, beside one for all or not. */
static int feed_forward(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    const float *after = layer->after_feed_forward_norm;
    const int direct = is_direct(model, after);
    if (layer->gate_up.packed) {
        const float *weights = rz_weigh_shared(decoder, thread, layer->experts);
        rz_multiply(decoder, thread, RZ_GATE_UP, (rz_product){
            .linear = &layer->gate_up, .x = space->normed, .rows = decoder->step->tokens, .end = ACTIVATE,
            .out = space->activated, .activation = model->activation });
        end_block(decoder, thread, RZ_DOWN, &layer->down, space->activated, after, weights);
    } else if (!direct) {
        rz_run_stage(decoder, thread, RZ_DOWN, decoder->step->tokens, clear_task, decoder);
    }
    if (layer->experts)
        rz_run_experts(decoder, thread, layer->experts, direct ? space->residual : space->delta,
                       direct ? model->residual_scale : 1.0f);
    return direct || rz_sum_over_ranks(decoder, thread, space->delta, model->hidden);
}

static int run_layer(rz_decoder *decoder, int thread, const rz_layer *layer, const rz_layer *before)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    const long tokens = decoder->step->tokens;
    const float *after = before ? before->after_feed_forward_norm : NULL;
    norm first = { decoder, layer->attention_norm, after, before && (model->ring || after), NULL };
    rz_run_stage(decoder, thread, RZ_NORM, tokens, norm_task, &first);
    rz_multiply(decoder, thread, RZ_QKV, (rz_product){
        .linear = &layer->qkv, .x = space->normed, .rows = tokens, .end = STORE, .out = space->qkv, .scale = 1.0f });
    if (!rz_attend_rows(decoder, thread, layer))
        return 0;
    const bf16 *attended = space->attended + (long)model->first_output * model->head_dim;
    after = layer->after_attention_norm;
    end_block(decoder, thread, RZ_OUTPUT, &layer->output, attended, after, NULL);
    if (!is_direct(model, after) && !rz_sum_over_ranks(decoder, thread, space->delta, model->hidden))
        return 0;
    norm second = { decoder, layer->feed_forward_norm, after, model->ring || after, NULL };
    rz_run_stage(decoder, thread, RZ_NORM, tokens, norm_task, &second);
    return feed_forward(decoder, thread, layer);
}

/* The largest logits, from what each thread has found. */
static void choose_best(const rz_decoder *decoder)
{
    const rz_step *step = decoder->step;
    const int threads = rz_threads_count(decoder->threads);
    for (int row = 0; row < step->sampled; row++)
        step->indices[row] = rz_best_of(decoder->space.bests + row, threads, step->sampled, &step->values[row]);
}

static void forward(void *argument, int thread)
{
    rz_decoder *decoder = argument;
    const rz_model *model = &decoder->model;
    const rz_step *step = decoder->step;
    rz_run_stage(decoder, thread, RZ_EMBED, step->tokens, embed_task, decoder);
    if (model->embedding_split && !rz_sum_over_ranks(decoder, thread, decoder->space.residual, model->hidden))
        return;
    for (int i = 0; i < model->layers; i++) {
        if (!run_layer(decoder, thread, &model->layer[i], i ? &model->layer[i - 1] : NULL))
            return;
        if (thread == 0)
            atomic_fetch_add_explicit(step->progress, 1, memory_order_relaxed);
    }
    const float *after = model->layer[model->layers - 1].after_feed_forward_norm;
    norm last = { decoder, model->final_norm, after, model->ring || after, step->sample_rows };
    if (step->num_pools)
        rz_run_stage(decoder, thread, RZ_NORM, (long)step->num_pools, pool_task, &last);
    rz_run_stage(decoder, thread, RZ_NORM, step->sampled, norm_task, &last);
    rz_multiply(decoder, thread, RZ_HEAD, (rz_product){
        .linear = &model->head, .x = decoder->space.normed, .rows = step->sampled,
        .end = step->logits ? STORE : LARGEST, .out = step->logits ? (void *)step->logits : decoder->space.bests,
        .scale = model->logit_scale, .cap = model->logit_cap });
    if (thread == 0 && !step->logits)
        choose_best(decoder);
}

/* Whether `count` values lie in [0, end). */
static int within(const int32_t *values, long count, long end)
{
    int good = 1;
    for (long i = 0; i < count; i++)
        good &= (uint32_t)values[i] < (uint32_t)end;
    return good;
}

/* Whether every pool is a range of the step's rows. */
static int pools_exist(const rz_step *step)
{
    int good = 1;
    for (long i = 0; i < step->num_pools; i++) {
        const int32_t first = step->pools[i * 2], end = step->pools[i * 2 + 1];
        good &= 0 <= first && first < end && end <= step->tokens;
    }
    return good;
}

/* Whether every compression is from a hot block to a cold one. */
static int pairs_exist(const rz_model *model, const rz_step *step)
{
    int good = 1;
    for (long i = 0; i < step->num_compressions; i++) {
        const int32_t *pair = step->compressions + i * 2;
        good &= (uint32_t)pair[0] < (uint32_t)model->num_hot;
        good &= pair[1] >= model->num_hot && pair[1] < model->num_hot + model->num_cold;
    }
    return good;
}

/* A plan that names blocks or rows that do not exist would write over other memory. */
static int is_sound(const rz_model *model, const rz_step *step)
{
    long blocks = 0, rows = 0;
    for (int i = 0; i < step->sequences; i++) {
        if (step->query_lens[i] < 1 || step->context_lens[i] < step->query_lens[i])
            return 0;
        rows += step->query_lens[i];
        blocks += (step->context_lens[i] + model->block_size - 1) / model->block_size;
    }
    return rows == step->tokens && blocks == step->table_blocks
        && within(step->slots, step->tokens, (long)model->num_hot * model->block_size)
        && within(step->block_tables, blocks, (long)model->num_hot + model->num_cold) && pairs_exist(model, step)
        && within(step->sample_rows, step->sampled, step->tokens) && pools_exist(step);
}

int rz_decoder_forward(rz_decoder *decoder, const rz_step *step)
{
    if (!is_sound(&decoder->model, step))
        return RZ_BAD_PLAN;
    decoder->step = step;
    atomic_store(&decoder->failed, 0);
    /* Twice: the parts hold addresses of what the first call may move. */
    if (!rz_workspace_reserve(&decoder->space, &decoder->model, step->tokens, 0, 0) || !rz_plan_attention(decoder))
        return RZ_NO_MEMORY;
    if (!rz_workspace_reserve_bests(&decoder->space, (long)step->sampled * rz_threads_count(decoder->threads)))
        return RZ_NO_MEMORY;
    if (!rz_workspace_reserve_rounded(&decoder->space, decoder->rounded_row * (size_t)step->tokens))
        return RZ_NO_MEMORY;
    rz_threads_run(decoder->threads, forward, decoder);
    return atomic_load(&decoder->failed) ? RZ_RING_LOST : RZ_OK;
}

typedef struct {
    rz_decoder *decoder;
    rz_product product;
} multiplication;

static void multiply_alone(void *argument, int thread)
{
    const multiplication *job = argument;
    rz_multiply(job->decoder, thread, RZ_HEAD, job->product);
}

int rz_decoder_multiply(rz_decoder *decoder, const rz_linear *linear, const void *x, int rows, float *out)
{
    if (!rz_workspace_reserve_rounded(&decoder->space, rz_rounded_row(linear) * (size_t)rows))
        return RZ_NO_MEMORY;
    multiplication job = { decoder, { .linear = linear, .x = x, .rows = rows, .end = STORE, .out = out, .scale = 1 } };
    rz_threads_run(decoder->threads, multiply_alone, &job);
    return RZ_OK;
}

void rz_decoder_spent(const rz_decoder *decoder, int64_t *spent)
{
    memcpy(spent, decoder->spent, sizeof decoder->spent);
}

typedef struct {
    rz_threads *threads;
    const float *logits;
    int rows, width;
    float *values;
    int64_t *indices;
} search;

static void search_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    const search *job = argument;
    const float *logits = job->logits + row * job->width;
    job->indices[row] = rz_largest(logits, job->width);
    job->values[row] = logits[job->indices[row]];
}

static void search_rows(void *argument, int thread)
{
    search *job = argument;
    rz_stage(job->threads, thread, job->rows, search_task, job);
}

void rz_decoder_largest(rz_decoder *decoder, const float *logits, int rows, int width, float *values, int64_t *indices)
{
    search job = { decoder->threads, logits, rows, width, values, indices };
    rz_threads_run(decoder->threads, search_rows, &job);
}

/* Of the widest quantized linear. */
static size_t rounded_row_of(const rz_model *model)
{
    size_t most = rz_rounded_row(&model->head);
    for (int i = 0; i < model->layers; i++) {
        const rz_layer *layer = &model->layer[i];
        const rz_linear *linears[] = { &layer->qkv, &layer->output, &layer->gate_up, &layer->down };
        for (int j = 0; j < 4; j++) {
            const size_t bytes = rz_rounded_row(linears[j]);
            most = bytes > most ? bytes : most;
        }
        const size_t bytes = rz_experts_rounded(layer->experts);
        most = bytes > most ? bytes : most;
    }
    return most;
}

rz_decoder *rz_decoder_new(const rz_model *model, int threads, const int *cpus)
{
    rz_decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder)
        return NULL;
    decoder->model = *model;
    decoder->rounded_row = rounded_row_of(model);
    decoder->threads = rz_threads_new(threads);
    if (!decoder->threads || !rz_workspace_new(&decoder->space, model, threads)) {
        rz_decoder_free(decoder);
        return NULL;
    }
    if (cpus)
        rz_threads_pin(decoder->threads, cpus);
    return decoder;
}

void rz_decoder_free(rz_decoder *decoder)
{
    if (!decoder)
        return;
    rz_threads_free(decoder->threads);
    rz_workspace_free(&decoder->space);
    free(decoder);
}
