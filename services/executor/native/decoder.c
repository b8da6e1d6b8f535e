/* See decoder.h. Each stage is a set of tasks (threads.h); forward() puts them in order. */
#include "decoder.h"

#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "adapters.h"
#include "attention_stages.h"
#include "experts.h"
#include "gemm.h"
#include "largest.h"
#include "latent.h"
#include "products.h"
#include "quantized.h"
#include "recurrent.h"
#include "residual.h"
#include "sparse.h"
#include "tail.h"

enum { SHARES_OF_THREAD = 8 /* of the rows of a stage: who is held up leaves few of them behind */ };

int64_t rz_now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

static void run_stage(rz_decoder *decoder, int thread, int part, long tasks, long together, rz_task task, void *argument)
{
    const int64_t began = thread ? 0 : rz_now();
    rz_stage(decoder->threads, thread, tasks, together, task, argument);
    if (!thread)
        decoder->spent[part] += rz_now() - began;
}

void rz_run_stage(rz_decoder *decoder, int thread, int part, long tasks, rz_task task, void *argument)
{
    run_stage(decoder, thread, part, tasks, 1, task, argument);
}

void rz_run_rows(rz_decoder *decoder, int thread, int part, long rows, rz_task task, void *argument)
{
    const long shares = (long)rz_threads_count(decoder->threads) * SHARES_OF_THREAD;
    run_stage(decoder, thread, part, rows, rows > shares ? rows / shares : 1, task, argument);
}

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
    rz_stage(decoder->threads, thread, 0, 1, NULL, NULL);
    if (!thread)
        decoder->spent[RZ_SUM] += rz_now() - began;
    return !atomic_load(&decoder->failed);
}

/* What a block adds goes straight into the residual, or into delta where a sum or a norm comes between. */
static int is_direct(const rz_model *model, const float *after)
{
    return !model->ring && !after;
}

/* A block's last product, of `x`, whose rows are `stride` apart; `weights` of its rows, or NULL. */
static void end_block(rz_decoder *decoder, int thread, int part, const rz_linear *linear, const bf16 *x, long stride,
                      const float *after, const float *weights)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    const int direct = is_direct(model, after);
    rz_multiply(decoder, thread, part, (rz_product){
        .linear = linear, .x = x, .rows = decoder->step->tokens, .stride = stride, .end = direct ? ADD : STORE,
        .out = direct ? space->residual : space->delta, .scale = direct ? model->residual_scale : 1.0f,
        .weights = weights });
}

/* Experts that are normed apart from what is beside them. */
typedef struct {
    rz_decoder *decoder;
    const rz_experts *experts;
} apart;

static void clear_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const rz_decoder *decoder = argument;
    const size_t hidden = (size_t)decoder->model.hidden;
    memset(decoder->space.delta + (size_t)token * hidden, 0, hidden * sizeof(float));
}

/* Multiplies the normed rows by gate and up; what becomes of them is where end_block takes it. */
static void activate(rz_decoder *decoder, int thread, const rz_linear *gate_up)
{
    rz_multiply(decoder, thread, RZ_GATE_UP, (rz_product){
        .linear = gate_up, .x = decoder->space.normed, .rows = decoder->step->tokens, .end = ACTIVATE,
        .out = decoder->space.activated, .activation = &decoder->model });
}

/* What experts add, behind delta: see rz_experts. */
static float *beside_delta(const rz_decoder *decoder)
{
    return decoder->space.delta + (long)decoder->step->tokens * decoder->model.hidden;
}

static void clear_beside_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const size_t hidden = (size_t)((const rz_decoder *)argument)->model.hidden;
    memset(beside_delta(argument) + (size_t)token * hidden, 0, hidden * sizeof(float));
}

static void join_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const apart *job = argument;
    const rz_decoder *decoder = job->decoder;
    const long hidden = decoder->model.hidden;
    float *to = decoder->space.delta + token * hidden;
    const float *experts = beside_delta(decoder) + token * hidden;
    const float of_dense = rms_scale(to, hidden, decoder->model.eps);
    const float of_experts = rms_scale(experts, hidden, decoder->model.eps);
    for (long i = 0; i < hidden; i++)
        to[i] = to[i] * of_dense * job->experts->after_beside_norm[i]
            + experts[i] * of_experts * job->experts->after_norm[i];
}

/* One feed-forward for all, of the normed rows, and beside it experts that have norms of their own. */
static int feed_apart(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    rz_workspace *space = &decoder->space;
    const rz_experts *experts = layer->experts;
    const long tokens = decoder->step->tokens, hidden = decoder->model.hidden;
    apart job = { decoder, experts };
    activate(decoder, thread, &layer->gate_up);
    end_block(decoder, thread, RZ_DOWN, &layer->down, space->activated, 0, layer->after_feed_forward_norm, NULL);
    rz_norm_rows(decoder, thread, experts->router_norm, RZ_NOTHING_LEFT);
    rz_choose_experts(decoder, thread, experts);
    rz_norm_rows(decoder, thread, experts->norm, RZ_NOTHING_LEFT);
    rz_run_rows(decoder, thread, RZ_DOWN, tokens, clear_beside_task, decoder);
    rz_run_experts(decoder, thread, experts, beside_delta(decoder), 1.0f);
    if (!rz_sum_over_ranks(decoder, thread, space->delta, 2 * hidden))
        return 0;
    rz_run_rows(decoder, thread, RZ_DOWN, tokens, join_task, &job);
    return 1;
}

/* Of the normed rows: one feed-forward for all, or experts, beside one for all or not. */
static int feed_forward(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    const float *after = layer->after_feed_forward_norm;
    const int direct = is_direct(model, after);
    if (layer->experts && layer->experts->norm)
        return feed_apart(decoder, thread, layer);
    if (layer->gate_up.packed) {
        const float *weights = rz_weigh_shared(decoder, thread, layer->experts);
        activate(decoder, thread, &layer->gate_up);
        end_block(decoder, thread, RZ_DOWN, &layer->down, space->activated, 0, after, weights);
    } else if (!direct) {
        rz_run_rows(decoder, thread, RZ_DOWN, decoder->step->tokens, clear_task, decoder);
    }
    if (layer->experts) {
        rz_choose_experts(decoder, thread, layer->experts);
        rz_run_experts(decoder, thread, layer->experts, direct ? space->residual : space->delta,
                       direct ? model->residual_scale : 1.0f);
    }
    return direct || rz_sum_over_ranks(decoder, thread, space->delta, model->hidden);
}

/* What mixes the tokens, of the normed rows, up to its last product. */
static int mix_rows(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    const float *after = layer->after_attention_norm;
    const rz_recurrent *recurrent = layer->recurrent;
    rz_multiply(decoder, thread, RZ_QKV, (rz_product){
        .linear = &layer->qkv, .x = space->normed, .rows = decoder->step->tokens, .end = STORE, .out = space->qkv,
        .scale = 1.0f });
    if (recurrent) {
        if (!rz_recur_rows(decoder, thread, recurrent, space->qkv, rz_recurrent_projected(recurrent), space->attended))
            return 0;
        end_block(decoder, thread, RZ_OUTPUT, &layer->output,
                  space->attended + (long)recurrent->first_output * recurrent->value_dim,
                  rz_recurrent_inner(recurrent), after, NULL);
        return 1;
    }
    if (!rz_attend_rows(decoder, thread, layer))
        return 0;
    if (!decoder->step->tokens)
        return 1;
    if (layer->latent) {
        end_block(decoder, thread, RZ_OUTPUT, &layer->output, rz_open_latents(decoder, thread, layer), 0, after, NULL);
        return 1;
    }
    const rz_heads *heads = &model->heads[layer->heads];
    end_block(decoder, thread, RZ_OUTPUT, &layer->output,
              space->attended + (long)heads->first_output * heads->value_dim, (long)heads->q_heads * heads->value_dim,
              after, NULL);
    return 1;
}

/* What a layer's last block leaves to do. */
static rz_pending behind_block(const rz_model *model, const float *after)
{
    return (rz_pending){ after, !is_direct(model, after), 1.0f };
}

static rz_pending behind_layer(const rz_model *model, const rz_layer *layer)
{
    const int takes_input = layer->input_gate.packed != NULL;
    rz_pending left = behind_block(model, takes_input ? layer->after_input_norm : layer->after_feed_forward_norm);
    left.adds |= takes_input;
    left.scale = layer->scale;
    return left;
}

/* Adds what a layer makes of its input, which all ranks compute alike: up to the norm behind it. */
static void take_input(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    const long tokens = decoder->step->tokens;
    rz_norm_rows(decoder, thread, NULL, behind_block(model, layer->after_feed_forward_norm));
    rz_multiply(decoder, thread, RZ_INPUT, (rz_product){
        .linear = &layer->input_gate, .x = space->normed, .rows = tokens, .end = GATE, .out = space->activated,
        .activation = model, .by = space->inputs + (layer - model->layer) * model->inputs.width,
        .by_stride = rz_inputs_row(model) });
    rz_multiply(decoder, thread, RZ_INPUT, (rz_product){
        .linear = &layer->input_projection, .x = space->activated, .rows = tokens, .end = STORE, .out = space->delta,
        .scale = 1.0f });
}

static int run_layer(rz_decoder *decoder, int thread, const rz_layer *layer, rz_pending left)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    rz_norm_rows(decoder, thread, layer->attention_norm, left);
    if (!mix_rows(decoder, thread, layer))
        return 0;
    if (!decoder->step->tokens)
        return 1;
    left = behind_block(model, layer->after_attention_norm);
    if (left.adds && !rz_sum_over_ranks(decoder, thread, space->delta, model->hidden))
        return 0;
    rz_norm_rows(decoder, thread, layer->feed_forward_norm, left);
    if (!feed_forward(decoder, thread, layer))
        return 0;
    if (layer->input_gate.packed)
        take_input(decoder, thread, layer);
    return 1;
}

/* The largest logits, from what each thread has found. */
static void choose_best(const rz_decoder *decoder)
{
    const rz_step *step = decoder->step;
    const int threads = rz_threads_count(decoder->threads);
    for (int row = 0; row < step->sampled; row++)
        step->indices[row] = rz_best_of(decoder->space.bests + row, threads, step->sampled, &step->values[row]);
}

/* Tells whoever reads weights ahead that `layer` comes, and what is before it is over. */
static void enter_layer(const rz_model *model, int layer)
{
    const uint64_t ring = 1;
    if (!model->place)
        return;
    atomic_store_explicit(&model->place->layer, layer, memory_order_release);
    (void)!write(model->place->doorbell, &ring, sizeof ring);
}

/* Sleeps: whoever brings the blocks needs the cores. */
static void wait_for_blocks(const rz_step *step, int layer)
{
    const struct timespec moment = { 0, 20000 };
    while (step->restored && atomic_load_explicit(step->restored, memory_order_acquire) <= layer)
        nanosleep(&moment, NULL);
}

static void run_step(rz_decoder *decoder, int thread)
{
    const rz_model *model = &decoder->model;
    const rz_step *step = decoder->step;
    if (!rz_embed_rows(decoder, thread))
        return;
    rz_pending left = RZ_NOTHING_LEFT;
    for (int i = 0; i < model->layers; i++) {
        if (thread == 0)
            enter_layer(model, i);
        if (decoder->tail.there && !decoder->tail.within && i == decoder->tail.from) {
            rz_keep_rows(decoder, thread, left, (rz_step_rows[2]){ { NULL, 0 } });
            left = RZ_NOTHING_LEFT;
        }
        left = rz_tap_rows(decoder, thread, i, NULL, left);
        wait_for_blocks(step, i);
        if (decoder->step->tokens && !run_layer(decoder, thread, &model->layer[i], left))
            return;
        left = behind_layer(model, &model->layer[i]);
        if (thread == 0)
            atomic_fetch_add_explicit(step->progress, 1, memory_order_relaxed);
    }
    if (thread == 0)
        enter_layer(model, model->layers);
    rz_norm_sampled(decoder, thread, left);
    rz_multiply(decoder, thread, RZ_HEAD, (rz_product){
        .linear = &model->head, .x = decoder->space.normed, .rows = step->sampled,
        .end = step->logits ? STORE : LARGEST, .out = step->logits ? (void *)step->logits : decoder->space.bests,
        .scale = model->logit_scale, .cap = model->logit_cap });
    if (thread == 0 && !step->logits)
        choose_best(decoder);
}

static void forward(void *argument, int thread)
{
    run_step(argument, thread);
    rz_end_products();
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

/* Whether every tap is at a layer, or behind the last one. */
static int taps_exist(const rz_model *model, const rz_step *step)
{
    return within(step->taps, step->num_taps, (long)model->layers + 1);
}

/* Whether every compression is from a writable block to a quantized one. */
static int pairs_exist(const rz_model *model, const rz_step *step)
{
    int good = 1;
    for (long i = 0; i < step->num_compressions; i++) {
        const int32_t *pair = step->compressions + i * 2;
        good &= (uint32_t)pair[0] < (uint32_t)model->num_writable;
        good &= pair[1] >= model->num_writable && pair[1] < model->num_writable + model->num_quantized;
    }
    return good;
}

/* Whether every sequence has a slot, where there are any, and snapshots are of rows and go to slots. */
static int slots_exist(const rz_model *model, const rz_step *step)
{
    if (!model->num_states)
        return 1; /* nothing reads them */
    int good = step->num_states == step->sequences && within(step->state_slots, step->num_states, model->num_states);
    for (long i = 0; i < step->num_snapshots; i++) {
        good &= (uint32_t)step->state_snapshots[i * 2] < (uint32_t)step->tokens;
        good &= (uint32_t)step->state_snapshots[i * 2 + 1] < (uint32_t)model->num_states;
    }
    return good;
}

/* Whether every sequence's adapter has a slot, where any has one. */
static int adapters_exist(const rz_step *step)
{
    int good = !step->num_adapters || step->num_adapters == step->sequences;
    for (long i = 0; good && i < step->num_adapters; i++)
        good = step->adapters[i] >= -1 && step->adapters[i] < step->adapter_slots;
    return good;
}

/* Whether every sequence has a choice, where any has one, and there are summaries where one asks for them. */
static int choices_exist(const rz_model *model, const rz_step *step)
{
    if (!step->num_sparse)
        return 1;
    int good = step->num_sparse == step->sequences && rz_choices_are_sound(step->sparse, step->num_sparse);
    for (long i = 0; good && i < step->num_sparse; i++)
        for (int layer = 0; step->sparse[i * RZ_CHOICE_FIELDS] == RZ_PAGES && layer < model->layers; layer++)
            good &= !model->layer[layer].chooses || model->layer[layer].summaries != NULL;
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
        && within(step->slots, step->tokens, (long)model->num_writable * model->block_size)
        && within(step->block_tables, blocks, (long)model->num_writable + model->num_quantized)
        && pairs_exist(model, step) && within(step->sample_rows, step->sampled, step->tokens) && pools_exist(step)
        && taps_exist(model, step) && slots_exist(model, step) && adapters_exist(step) && choices_exist(model, step);
}

/* Of the step and of its tail. */
static int plan_attention(rz_decoder *decoder, const rz_step *step)
{
    const rz_tail *tail = &decoder->tail;
    decoder->attention = decoder->whole;
    if (!rz_make_tail(decoder, step) || !rz_reserve_attention(decoder, step, decoder->whole))
        return 0;
    if (tail->there && !rz_reserve_attention(decoder, &tail->step, decoder->tail.attention))
        return 0;
    rz_plan_attention(decoder, step, decoder->whole);
    if (tail->there)
        rz_plan_attention(decoder, &tail->step, decoder->tail.attention);
    return 1;
}

int rz_decoder_forward(rz_decoder *decoder, const rz_step *step)
{
    if (!is_sound(&decoder->model, step))
        return RZ_BAD_PLAN;
    decoder->step = step;
    atomic_store(&decoder->failed, 0);
    if (!rz_workspace_reserve(&decoder->space, &decoder->model, step->tokens, 0) || !plan_attention(decoder, step))
        return RZ_NO_MEMORY;
    if (decoder->model.num_states && !rz_plan_recurrent(decoder))
        return RZ_NO_MEMORY;
    if (!rz_workspace_reserve_bests(&decoder->space, (long)step->sampled * rz_threads_count(decoder->threads)))
        return RZ_NO_MEMORY;
    if (!rz_workspace_reserve_prepared(&decoder->space, decoder->prepared_row * (size_t)step->tokens))
        return RZ_NO_MEMORY;
    if (!rz_plan_adapters(decoder, step))
        return RZ_NO_MEMORY;
    rz_threads_run(decoder->threads, forward, decoder);
    decoder->adapter_rows = NULL;
    return atomic_load(&decoder->failed) ? RZ_RING_LOST : RZ_OK;
}

typedef struct {
    rz_decoder *decoder;
    const rz_recurrent *layer;
    const float *projected;
    bf16 *out;
} recurrence_alone;

static void recur_alone(void *argument, int thread)
{
    const recurrence_alone *job = argument;
    rz_recur_rows(job->decoder, thread, job->layer, job->projected, rz_recurrent_projected(job->layer), job->out);
    rz_end_products();
}

int rz_decoder_recur(rz_decoder *decoder, const rz_recurrent *layer, const rz_step *step, const float *projected,
                     void *out)
{
    decoder->step = step;
    atomic_store(&decoder->failed, 0);
    rz_workspace_measure(&decoder->space, layer);
    if (!rz_plan_recurrent(decoder))
        return RZ_NO_MEMORY;
    rz_threads_run(decoder->threads, recur_alone, &(recurrence_alone){ decoder, layer, projected, out });
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
    rz_end_products();
}

int rz_decoder_multiply(rz_decoder *decoder, const rz_linear *linear, const void *x, int rows, float *out)
{
    if (!rz_workspace_reserve_prepared(&decoder->space, rz_prepared_row(linear) * (size_t)rows))
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
    rz_stage(job->threads, thread, job->rows, 1, search_task, job);
}

void rz_decoder_largest(rz_decoder *decoder, const float *logits, int rows, int width, float *values, int64_t *indices)
{
    search job = { decoder->threads, logits, rows, width, values, indices };
    rz_threads_run(decoder->threads, search_rows, &job);
}

/* Of the linear that takes most. */
static size_t prepared_row_of(const rz_model *model)
{
    size_t most = rz_prepared_row(&model->head);
    const size_t of_inputs = rz_prepared_row(&model->inputs.projection);
    most = of_inputs > most ? of_inputs : most;
    for (int i = 0; i < model->layers; i++) {
        const rz_layer *layer = &model->layer[i];
        const rz_linear *linears[] = { &layer->qkv, &layer->output, &layer->gate_up, &layer->down, &layer->input_gate,
                                       &layer->input_projection };
        for (int j = 0; j < 6; j++) {
            const size_t bytes = rz_prepared_row(linears[j]);
            most = bytes > most ? bytes : most;
        }
        const size_t of_experts = rz_experts_prepared(layer->experts);
        const size_t of_queries = layer->latent ? rz_prepared_row(&layer->latent->query_b) : 0;
        most = of_experts > most ? of_experts : most;
        most = of_queries > most ? of_queries : most;
    }
    return most;
}

/* `threads`: what it computes on, freed with it unless they are `borrowed`, also where it cannot be made. */
static rz_decoder *new_on(rz_threads *threads, int borrowed, const rz_model *model)
{
    rz_decoder *decoder = threads ? calloc(1, sizeof *decoder) : NULL;
    if (!decoder) {
        if (!borrowed)
            rz_threads_free(threads);
        return NULL;
    }
    decoder->model = *model;
    decoder->threads = threads;
    decoder->borrowed = borrowed;
    decoder->prepared_row = prepared_row_of(model);
    decoder->tail.from = rz_first_of_tail(model);
    if (!rz_workspace_new(&decoder->space, model, rz_threads_count(threads))) {
        rz_decoder_free(decoder);
        return NULL;
    }
    return decoder;
}

rz_decoder *rz_decoder_new(const rz_model *model, int threads, const int *cpus)
{
    rz_decoder *decoder = new_on(rz_threads_new(threads), 0, model);
    if (decoder && cpus)
        rz_threads_pin(decoder->threads, cpus);
    return decoder;
}

rz_decoder *rz_decoder_beside(const rz_model *model, const rz_decoder *other)
{
    return new_on(other->threads, 1, model);
}

void rz_decoder_free(rz_decoder *decoder)
{
    if (!decoder)
        return;
    if (!decoder->borrowed)
        rz_threads_free(decoder->threads);
    rz_workspace_free(&decoder->space);
    for (int i = 0; i < RZ_HEADS; i++)
        rz_workspace_free_attention(&decoder->whole[i]);
    rz_free_tail(&decoder->tail);
    rz_free_adapters(decoder);
    free(decoder);
}
