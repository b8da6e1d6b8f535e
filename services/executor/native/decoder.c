/* See decoder.h. Each stage below is a set of tasks (threads.h); forward() puts them in order. */
#include "vector.h"

#include "decoder.h"

#include <math.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "attention.h"
#include "codec.h"
#include "gemm.h"
#include "largest.h"
#include "threads.h"
#include "workspace.h"

enum {
    ROWS_OF_TASK = 96,  /* rows of a product's task: they stay in the second cache for a panel */
};

struct rz_decoder {
    rz_model model;
    rz_threads *threads;
    rz_workspace space;
    const rz_step *step;
    long parts, merges; /* attention parts, and rows to be merged from partial ones */
    atomic_int failed;
    int64_t spent[RZ_PARTS]; /* written by thread 0 */
};

static int64_t now(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return time.tv_sec * 1000000000LL + time.tv_nsec;
}

/* A stage, its time booked on `part`. */
static void run_stage(rz_decoder *decoder, int thread, int part, long tasks, rz_task task, void *argument)
{
    const int64_t began = thread ? 0 : now();
    rz_stage(decoder->threads, thread, tasks, task, argument);
    if (!thread)
        decoder->spent[part] += now() - began;
}

static long least(long a, long b)
{
    return a < b ? a : b;
}

/* --- products ---------------------------------------------------------------------------------------- */

typedef enum { STORE, ADD, ACTIVATE } product_end;

typedef struct {
    const rz_linear *linear;
    const bf16 *x;
    long rows;
    product_end end;
    void *out; /* STORE: float32 [rows, outputs]; ADD: float32, added to; ACTIVATE: bf16 [rows, outputs / 2] */
    float scale, cap;
    int activation;
} product;

RZ_INLINE __m512 with_bias(const product *job, const float *sums, long column)
{
    __m512 value = _mm512_loadu_ps(sums);
    return job->linear->bias ? _mm512_add_ps(value, _mm512_loadu_ps(job->linear->bias + column)) : value;
}

RZ_INLINE __mmask16 lanes_left(long column, long columns)
{
    long left = columns - column;
    return left >= LANES ? 0xffff : left <= 0 ? 0 : (__mmask16)((1u << left) - 1);
}

static void end_activate(const product *job, const float *sums, long row, long column)
{
    __m512 gate = with_bias(job, sums, column), up = with_bias(job, sums + LANES, column + LANES);
    gate = job->activation == RZ_SILU ? silu_ps(gate) : gelu_tanh_ps(gate);
    store_bf16((bf16 *)job->out + row * (job->linear->outputs / 2) + column / 2, _mm512_mul_ps(gate, up));
}

static void end_float(const product *job, const float *sums, long row, long column)
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
    const product *job = argument;
    const long inputs = job->linear->inputs, pairs = (inputs + 1) / 2;
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
        rz_tile(here, job->x + row * inputs, inputs, weights, pairs, sums, PANEL, 0, &ahead);
        for (int i = 0; i < here; i++) {
            if (job->end == ACTIVATE)
                end_activate(job, sums + i * PANEL, row + i, panel * PANEL);
            else
                end_float(job, sums + i * PANEL, row + i, panel * PANEL);
        }
        row += here;
    }
}

static void multiply(rz_decoder *decoder, int thread, int part, product job)
{
    long panels = (job.linear->outputs + PANEL - 1) / PANEL, pieces = (job.rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
    run_stage(decoder, thread, part, panels * pieces, product_task, &job);
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
        rz_unpack_row(raw, model->embedding, row, hidden);
        for (long i = 0; i < hidden; i++)
            to[i] = bf16_to_float(raw[i]) * model->embedding_scale;
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

RZ_INLINE float rms_scale(const float *x, long count, float eps)
{
    __m512 sum = _mm512_setzero_ps();
    for (long i = 0; i < count; i += LANES) {
        __m512 value = _mm512_maskz_loadu_ps(lanes_left(i, count), x + i);
        sum = _mm512_fmadd_ps(value, value, sum);
    }
    return 1.0f / sqrtf(_mm512_reduce_add_ps(sum) / (float)count + eps);
}

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
    __m512 scale = _mm512_set1_ps(rms_scale(x, hidden, decoder->model.eps));
    bf16 *to = decoder->space.normed + task * hidden;
    for (long i = 0; i < hidden; i += LANES) {
        __mmask16 lanes = lanes_left(i, hidden);
        __m512 value = _mm512_mul_ps(_mm512_maskz_loadu_ps(lanes, x + i), scale);
        value = _mm512_mul_ps(value, _mm512_maskz_loadu_ps(lanes, job->weight + i));
        _mm256_mask_storeu_epi16(to + i, lanes, (__m256i)_mm512_cvtneps_pbh(value));
    }
}

/* --- attention --------------------------------------------------------------------------------------- */

typedef struct {
    rz_decoder *decoder;
    const rz_layer *layer;
    rz_attention_shape shape;
    rz_cache cache;
} attention;

static rz_cache cache_of(const rz_layer *layer)
{
    return (rz_cache){ layer->hot, layer->codes, layer->scales, layer->num_hot, (int)layer->codec };
}

static void norm_head(const float *weight, float eps, float *x, int d)
{
    float scale = rms_scale(x, d, eps);
    for (int i = 0; i < d; i++)
        x[i] *= scale * weight[i];
}

static void rotate(const rz_model *model, const float *cosines, float *restrict x)
{
    const int half = model->rotary_dim / 2;
    const float *sines = cosines + half;
    if (model->rotary_interleaved) {
        for (int i = 0; i < half; i++) {
            float a = x[2 * i], b = x[2 * i + 1];
            x[2 * i] = a * cosines[i] - b * sines[i];
            x[2 * i + 1] = b * cosines[i] + a * sines[i];
        }
        return;
    }
    for (int i = 0; i < half; i++) {
        float a = x[i], b = x[half + i];
        x[i] = a * cosines[i] - b * sines[i];
        x[half + i] = b * cosines[i] + a * sines[i];
    }
}

static void to_bf16(bf16 *to, const float *from, int count)
{
    for (int i = 0; i < count; i += LANES)
        store_bf16(to + i, _mm512_loadu_ps(from + i));
}

/* One token: its heads are normed and turned, its keys and values go to the cache. */
static void place_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const rz_decoder *decoder = job->decoder;
    const rz_model *model = &decoder->model;
    const rz_layer *layer = job->layer;
    const int d = model->head_dim, heads = model->q_heads + 2 * model->kv_heads, size = model->block_size;
    const long slot = decoder->step->slots[token], block = slot / size, offset = slot % size;
    float *x = decoder->space.qkv + token * heads * d;
    const float *cosines = layer->rotary < 0 ? NULL
        : decoder->space.rotations + (layer->rotary * decoder->space.tokens + token) * model->rotary_dim;
    for (int head = 0; head < heads; head++, x += d) {
        const int turned = head < model->q_heads + model->kv_heads;
        const float *weight = head < model->q_heads ? layer->query_norm : turned ? layer->key_norm : NULL;
        if (weight)
            norm_head(weight, model->eps, x, d);
        if (turned && cosines)
            rotate(model, cosines, x);
        if (head < model->q_heads)
            to_bf16(decoder->space.queries + (token * model->q_heads + head) * d, x, d);
        else /* keys, then values: the order of a block's planes */
            to_bf16((bf16 *)layer->hot + ((block * 2 * model->kv_heads + head - model->q_heads) * size + offset) * d, x, d);
    }
}

static void attend_task(void *argument, long task, long next, int thread)
{
    const attention *job = argument;
    const rz_workspace *space = &job->decoder->space;
    rz_attend(&job->shape, &job->cache, &space->parts[task], next < job->decoder->parts ? &space->parts[next] : NULL,
              space->scratch + space->scratch_piece * (size_t)thread);
}

/* The partial results of one tile: part after part, each [rows * group][head_dim + 2]. */
static void merge_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    rz_decoder *decoder = argument;
    const rz_model *model = &decoder->model;
    const int d = model->head_dim, group = model->q_heads / model->kv_heads;
    const rz_attention_part *part = &decoder->space.parts[decoder->space.merges[task]];
    const long size = (long)part->rows * group * (d + 2);
    for (int query = 0; query < part->rows * group; query++)
        rz_merge(part->partial + (long)query * (d + 2), part->parts, size, d,
                 part->out + query / group * part->out_stride + query % group * d);
}

static void attend(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    const rz_model *model = &decoder->model;
    attention job = {
        .decoder = decoder,
        .layer = layer,
        .shape = { model->kv_heads, model->q_heads / model->kv_heads, model->head_dim, model->block_size,
                   layer->window, model->attention_scale, model->attention_cap },
        .cache = cache_of(layer),
    };
    run_stage(decoder, thread, RZ_PLACE, decoder->step->tokens, place_task, &job);
    run_stage(decoder, thread, RZ_ATTEND, decoder->parts, attend_task, &job);
    if (decoder->merges)
        run_stage(decoder, thread, RZ_ATTEND, decoder->merges, merge_task, decoder);
}

/* --- the plan of a step's attention ------------------------------------------------------------------ */

static int parts_of(int keys)
{
    return (keys + SPLIT_KEYS - 1) / SPLIT_KEYS;
}

/* Adds the parts of one tile, for all KV heads; returns the partial results that they need, in floats. */
static long plan_tile(rz_decoder *decoder, const int32_t *table, int rows, long row, int position, long partial)
{
    const rz_model *model = &decoder->model;
    const int d = model->head_dim, group = model->q_heads / model->kv_heads, keys = position + rows;
    const long width = (long)model->q_heads * d, size = (long)rows * group * (d + 2);
    const int parts = parts_of(keys);
    long used = 0;
    for (int head = 0; head < model->kv_heads; head++) {
        const long column = (long)head * group * d;
        if (parts > 1)
            decoder->space.merges[decoder->merges++] = decoder->parts;
        for (int part = 0; part < parts; part++) {
            decoder->space.parts[decoder->parts++] = (rz_attention_part){
                .table = table,
                .queries = decoder->space.queries + row * width + column,
                .out = decoder->space.attended + row * width + column,
                .partial = parts > 1 ? decoder->space.partial + partial + used : NULL,
                .q_stride = width,
                .out_stride = width,
                .rows = rows,
                .kv_head = head,
                .position = position,
                .first_key = part * SPLIT_KEYS,
                .last_key = (int)least((part + 1L) * SPLIT_KEYS, keys),
                .parts = part ? 0 : parts,
            };
            used += parts > 1 ? size : 0;
        }
    }
    return used;
}

/* Room for the parts of this step's attention. 0 when there is no memory. */
static int reserve_parts(rz_decoder *decoder, int tile)
{
    const rz_model *model = &decoder->model;
    const rz_step *step = decoder->step;
    long parts = 0, floats = 0;
    for (int i = 0; i < step->sequences; i++) {
        const long tiles = (step->query_lens[i] + tile - 1) / tile, each = parts_of(step->context_lens[i]);
        parts += model->kv_heads * tiles * each;
        if (each > 1)
            floats += (long)model->q_heads * step->query_lens[i] * each * (model->head_dim + 2);
    }
    return rz_workspace_reserve(&decoder->space, model, step->tokens, parts, floats);
}

/* Lists the parts of all attention of this step, the longest first as far as that costs nothing: the last
 * rows of prompts first. 0 when there is no memory. */
static int plan_attention(rz_decoder *decoder)
{
    const rz_model *model = &decoder->model;
    const rz_step *step = decoder->step;
    const int group = model->q_heads / model->kv_heads;
    const int tile = group < TILE_QUERIES ? TILE_QUERIES / group : 1;
    if (!reserve_parts(decoder, tile))
        return 0;
    decoder->parts = decoder->merges = 0;
    const int32_t *table = step->block_tables;
    long row = 0, partial = 0;
    for (int i = 0; i < step->sequences; i++) {
        int length = step->query_lens[i], context = step->context_lens[i], begin = context - length;
        for (int first = (length - 1) / tile * tile; first >= 0; first -= tile)
            partial += plan_tile(decoder, table, (int)least(tile, length - first), row + first, begin + first, partial);
        row += length;
        table += (context + model->block_size - 1) / model->block_size;
    }
    return 1;
}

/* --- the step ---------------------------------------------------------------------------------------- */

static int sum_over_ranks(rz_decoder *decoder, int thread, float *values)
{
    const rz_model *model = &decoder->model;
    if (!model->ring)
        return 1;
    size_t count = (size_t)decoder->step->tokens * (size_t)model->hidden;
    const int threads = rz_threads_count(decoder->threads);
    const int64_t began = thread ? 0 : now();
    if (rz_ring_sum_f32_part(model->ring, values, count, thread, threads, model->ring_timeout_ns))
        atomic_store(&decoder->failed, 1);
    rz_stage(decoder->threads, thread, 0, NULL, NULL);
    if (!thread)
        decoder->spent[RZ_SUM] += now() - began;
    return !atomic_load(&decoder->failed);
}

/* A block's last product: straight into the residual, or into delta where a sum or a norm comes between. */
static int end_block(rz_decoder *decoder, int thread, int part, const rz_linear *linear, const bf16 *x,
                     const float *after)
{
    rz_workspace *space = &decoder->space;
    const int direct = !decoder->model.ring && !after;
    multiply(decoder, thread, part, (product){
        .linear = linear, .x = x, .rows = decoder->step->tokens, .end = direct ? ADD : STORE,
        .out = direct ? space->residual : space->delta, .scale = direct ? decoder->model.residual_scale : 1.0f });
    return direct || sum_over_ranks(decoder, thread, space->delta);
}

static int run_layer(rz_decoder *decoder, int thread, const rz_layer *layer, const rz_layer *before)
{
    rz_workspace *space = &decoder->space;
    const rz_model *model = &decoder->model;
    const long tokens = decoder->step->tokens;
    const float *after = before ? before->after_feed_forward_norm : NULL;
    norm first = { decoder, layer->attention_norm, after, before && (model->ring || after), NULL };
    run_stage(decoder, thread, RZ_NORM, tokens, norm_task, &first);
    multiply(decoder, thread, RZ_QKV, (product){
        .linear = &layer->qkv, .x = space->normed, .rows = tokens, .end = STORE, .out = space->qkv, .scale = 1.0f });
    attend(decoder, thread, layer);
    if (!end_block(decoder, thread, RZ_OUTPUT, &layer->output, space->attended, layer->after_attention_norm))
        return 0;
    after = layer->after_attention_norm;
    norm second = { decoder, layer->feed_forward_norm, after, model->ring || after, NULL };
    run_stage(decoder, thread, RZ_NORM, tokens, norm_task, &second);
    multiply(decoder, thread, RZ_GATE_UP, (product){
        .linear = &layer->gate_up, .x = space->normed, .rows = tokens, .end = ACTIVATE, .out = space->activated,
        .activation = model->activation });
    return end_block(decoder, thread, RZ_DOWN, &layer->down, space->activated, layer->after_feed_forward_norm);
}

static void forward(void *argument, int thread)
{
    rz_decoder *decoder = argument;
    const rz_model *model = &decoder->model;
    const rz_step *step = decoder->step;
    run_stage(decoder, thread, RZ_EMBED, step->tokens, embed_task, decoder);
    if (model->embedding_split && !sum_over_ranks(decoder, thread, decoder->space.residual))
        return;
    for (int i = 0; i < model->layers; i++) {
        if (!run_layer(decoder, thread, &model->layer[i], i ? &model->layer[i - 1] : NULL))
            return;
        if (thread == 0)
            step->on_layer();
    }
    const float *after = model->layer[model->layers - 1].after_feed_forward_norm;
    norm last = { decoder, model->final_norm, after, model->ring || after, step->sample_rows };
    run_stage(decoder, thread, RZ_NORM, step->sampled, norm_task, &last);
    multiply(decoder, thread, RZ_HEAD, (product){
        .linear = &model->head, .x = decoder->space.normed, .rows = step->sampled, .end = STORE, .out = step->logits,
        .scale = model->logit_scale, .cap = model->logit_cap });
}

/* Whether `count` values lie in [0, end). */
static int within(const int32_t *values, long count, long end)
{
    int good = 1;
    for (long i = 0; i < count; i++)
        good &= (uint32_t)values[i] < (uint32_t)end;
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
        && within(step->block_tables, blocks, (long)model->num_hot + model->num_cold)
        && within(step->sample_rows, step->sampled, step->tokens);
}

int rz_decoder_forward(rz_decoder *decoder, const rz_step *step)
{
    if (!is_sound(&decoder->model, step))
        return RZ_BAD_PLAN;
    decoder->step = step;
    atomic_store(&decoder->failed, 0);
    /* Twice: the parts hold addresses of what the first call may move. */
    if (!rz_workspace_reserve(&decoder->space, &decoder->model, step->tokens, 0, 0) || !plan_attention(decoder))
        return RZ_NO_MEMORY;
    rz_threads_run(decoder->threads, forward, decoder);
    return atomic_load(&decoder->failed) ? RZ_RING_LOST : RZ_OK;
}

typedef struct {
    rz_decoder *decoder;
    const int32_t *pairs;
    int count;
} compression;

static void compress_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const compression *job = argument;
    const rz_model *model = &job->decoder->model;
    const rz_cache cache = cache_of(&model->layer[task / job->count]);
    const int32_t *pair = job->pairs + task % job->count * 2;
    rz_compress_block(&cache, model->kv_heads, model->block_size, model->head_dim, pair[0], pair[1]);
}

static void compress(void *argument, int thread)
{
    compression *job = argument;
    rz_stage(job->decoder->threads, thread, (long)job->count * job->decoder->model.layers, compress_task, job);
}

void rz_decoder_compress(rz_decoder *decoder, const int32_t *pairs, int count)
{
    compression job = { decoder, pairs, count };
    rz_threads_run(decoder->threads, compress, &job);
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

rz_decoder *rz_decoder_new(const rz_model *model, int threads)
{
    rz_decoder *decoder = calloc(1, sizeof *decoder);
    if (!decoder)
        return NULL;
    decoder->model = *model;
    decoder->threads = rz_threads_new(threads);
    if (!decoder->threads || !rz_workspace_new(&decoder->space, model, threads)) {
        rz_decoder_free(decoder);
        return NULL;
    }
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
