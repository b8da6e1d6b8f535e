/* See attention_stages.h. */
#include "attention_stages.h"

#include <string.h>

#include "codec.h"
#include "fetch.h"
#include "latent.h"
#include "residual.h"
#include "sparse.h"
#include "tail.h"

typedef struct {
    rz_decoder *decoder;
    const rz_layer *layer;
    const rz_heads *heads;
    const rz_attention_plan *plan;
    rz_attention_shape shape;
    rz_cache cache;
    int place; /* of the layer, if rows choose in it; else -1 */
    rz_attention_round done; /* the ends of the rounds before */
} attention;

rz_cache rz_cache_of(const rz_layer *layer)
{
    return (rz_cache){ layer->writable, layer->codes, layer->scales, layer->num_writable, (int)layer->codec,
                       (int)layer->in_groups };
}

/* Values of a projected row: queries, keys and values, and gates of what is attended where there are any. */
static long projected_width(const rz_heads *heads, const rz_layer *layer)
{
    const long keys = layer->reads_only ? 0 : (long)heads->kv_heads * heads->key_dim;
    const long values = layer->reads_only || layer->keys_are_values ? 0 : (long)heads->kv_heads * heads->value_dim;
    return (long)heads->q_heads * (heads->key_dim + (layer->gated ? heads->value_dim : 0)) + keys + values;
}

/* The sums of squares of the heads that this rank counts, of queries and of keys: [tokens, 2]. */
static void square_heads_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const rz_decoder *decoder = job->decoder;
    const rz_heads *heads = job->heads;
    const int d = heads->key_dim;
    const float *x = decoder->space.qkv + token * projected_width(heads, job->layer);
    for (int which = 0; which < 2; which++, x += heads->q_heads * d) {
        const rz_span counted = heads->counted[which];
        f32 sum = f32_zero();
        for (int i = counted.first * d; i < (counted.first + counted.count) * d; i += LANES)
            sum = f32_fma(f32_load(x + i), f32_load(x + i), sum);
        decoder->space.delta[token * 2 + which] = f32_sum(sum);
    }
}

/* Norms a head of a token: `which` 0: of queries, 1: of keys. */
static void norm_head(const attention *job, const float *weight, long token, int which, int head, float *x)
{
    const rz_model *model = &job->decoder->model;
    const int d = job->heads->key_dim;
    float scale;
    if (model->wide_norms) {
        const float squares = job->decoder->space.delta[token * 2 + which];
        weight += head * d;
        scale = 1.0f / sqrtf(squares / (float)(job->heads->all[which] * d) + model->eps);
    } else {
        scale = rms_scale(x, d, model->eps);
    }
    for (int i = 0; i < d; i++)
        x[i] *= scale * weight[i];
}

void rz_rotate(const rz_decoder *decoder, int set, long token, float *restrict x)
{
    const rz_model *model = &decoder->model;
    const rz_workspace *space = &decoder->space;
    const float *cosines = space->rotations + (set * space->tokens + token) * space->most_rotary;
    const int half = model->rotary_dim[set] / 2;
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

/* A head's query or key of one token: it is normed and turned. */
static void finish_key(const attention *job, long token, int which, int head, float *x)
{
    const rz_model *model = &job->decoder->model;
    const int set = job->layer->rotary;
    const float *weight = which ? job->layer->key_norm : job->layer->query_norm;
    if (weight && !model->norms_turned)
        norm_head(job, weight, token, which, head, x);
    if (set >= 0)
        rz_rotate(job->decoder, set, token, x);
    if (weight && model->norms_turned)
        norm_head(job, weight, token, which, head, x);
}

/* Where plane `plane` of the block of a token's slot has the token. */
static bf16 *line_of(const attention *job, long slot, long plane)
{
    const rz_heads *heads = job->heads;
    const long size = job->decoder->model.block_size, planes = (long)heads->lines * heads->kv_heads;
    return (bf16 *)job->layer->writable + ((slot / size * planes + plane) * size + slot % size) * heads->key_dim;
}

/* One token: its heads are normed and turned, its keys and values go to the cache. */
static void place_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const rz_decoder *decoder = job->decoder;
    const rz_heads *heads = job->heads;
    const rz_layer *layer = job->layer;
    const int d = heads->key_dim;
    const long slot = decoder->step->slots[token];
    float *x = decoder->space.qkv + token * projected_width(heads, layer);
    for (int head = 0; head < heads->q_heads; head++, x += d) {
        finish_key(job, token, 0, head, x);
        to_bf16(decoder->space.queries + (token * heads->q_heads + head) * d, x, d);
    }
    if (layer->reads_only)
        return;
    const float *value = layer->keys_are_values ? x : x + heads->kv_heads * d; /* before the keys are turned */
    for (int head = 0; head < heads->kv_heads; head++, value += heads->value_dim) {
        float own[MAX_VALUE_DIM];
        const float scale = layer->norms_values ? rms_scale(value, heads->value_dim, decoder->model.eps) : 1.0f;
        for (int i = 0; i < heads->value_dim; i++)
            own[i] = value[i] * scale;
        to_bf16(line_of(job, slot, heads->kv_heads + head), own, heads->value_dim);
    }
    for (int head = 0; head < heads->kv_heads; head++, x += d) {
        finish_key(job, token, 1, head, x);
        to_bf16(line_of(job, slot, head), x, d);
    }
}

/* One head's keys or values of a block that this step has filled. */
static void compress_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const rz_heads *heads = job->heads;
    const long planes = (long)heads->lines * heads->kv_heads;
    const int32_t *pair = job->decoder->step->compressions + task / planes * 2;
    rz_compress_plane(&job->cache, job->decoder->model.block_size, heads->key_dim, (int)(task % planes / heads->kv_heads),
                      pair[0] * planes + task % planes,
                      (pair[1] - job->cache.num_writable) * planes + task % planes);
}

/* The round's part `task`; NULL where it is none, or not computed in this layer. */
static const rz_attention_part *part_of_layer(const attention *job, long task)
{
    const rz_attention_part *part = &job->plan->parts[job->done.parts + task];
    if (job->done.parts + task >= job->plan->count)
        return NULL;
    return part->from_layer <= job->place && job->place < part->until_layer ? part : NULL;
}

static void attend_task(void *argument, long task, long next, int thread)
{
    const attention *job = argument;
    const rz_workspace *space = &job->decoder->space;
    const rz_attention_part *part = part_of_layer(job, task);
    if (!part)
        return;
    rz_attend(&job->shape, &job->cache, part, part_of_layer(job, next),
              space->scratch + space->scratch_piece * (size_t)thread);
    if (job->layer->asked) /* what a disk gives takes its time, and is progress */
        atomic_fetch_add_explicit(job->decoder->step->progress, 1, memory_order_relaxed);
}

/* The partial results of one tile: part after part, each [kv_heads * rows * heads][value_dim + 2]. */
static void merge_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const int d = job->heads->value_dim;
    const rz_attention_part *part = part_of_layer(job, job->plan->first_parts[job->done.merges + task] - job->done.parts);
    if (!part)
        return;
    const int queries = part->rows * part->heads;
    const long size = (long)part->kv_heads * queries * (d + 2);
    for (int head = 0; head < part->kv_heads; head++) {
        const rz_attention_part own = rz_part_of_head(&job->shape, part, head);
        const float *sinks = job->shape.sinks ? job->shape.sinks + own.first_head : NULL;
        for (int query = 0; query < queries; query++)
            rz_merge(own.partial + (long)query * (d + 2), part->parts, size, d, sinks ? sinks + query % part->heads : NULL,
                     own.out + query / part->heads * part->out_stride + query % part->heads * d);
    }
}

/* Round by round: what is merged makes room for the next one's partial results. */
static void attend_in_rounds(attention *job, int thread)
{
    const rz_attention_plan *plan = job->plan;
    for (long i = 0; i < plan->num_rounds; i++) {
        const rz_attention_round *round = &plan->rounds[i];
        rz_run_stage(job->decoder, thread, RZ_ATTEND, round->parts - job->done.parts, attend_task, job);
        if (round->merges > job->done.merges)
            rz_run_stage(job->decoder, thread, RZ_ATTEND, round->merges - job->done.merges, merge_task, job);
        job->done = *round;
    }
}

/* The values of one token for a shared head, in what is exchanged and among what this rank attends. */
typedef struct {
    float *exchanged;
    bf16 *attended;
    int width;
} shared_row;

static shared_row shared_row_of(const attention *job, long token, int index)
{
    const rz_heads *heads = job->heads;
    const rz_workspace *space = &job->decoder->space;
    const int width = heads->q_heads / heads->kv_heads * heads->value_dim;
    const rz_shared_head *head = &heads->shared[index];
    return (shared_row){
        space->exchanged + (token * heads->shared_in_ring + head->slot) * width,
        space->attended + (token * heads->kv_heads + head->kv_head) * width,
        width,
    };
}

/* Values of a token that are exchanged. */
static long exchanged_width(const rz_heads *heads)
{
    return (long)heads->shared_in_ring * (heads->q_heads / heads->kv_heads) * heads->value_dim;
}

static void offer_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const long width = exchanged_width(job->heads);
    memset(job->decoder->space.exchanged + token * width, 0, (size_t)width * sizeof(float));
    for (int i = 0; i < job->heads->shared_here; i++) {
        shared_row row = shared_row_of(job, token, i);
        if (job->plan->mine[token] >> i & 1)
            for (int at = 0; at < row.width; at += LANES)
                f32_store(row.exchanged + at, f32_load_bf16(row.attended + at));
    }
}

static void accept_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    for (int i = 0; i < job->heads->shared_here; i++) {
        shared_row row = shared_row_of(job, token, i);
        to_bf16(row.attended, row.exchanged, row.width);
    }
}

/* Both ranks of a shared head get its outputs of all rows: a row's own and zeros add up to the same bits, whoever
 * has computed it. */
static int exchange_shared(attention *job, int thread)
{
    rz_decoder *decoder = job->decoder;
    const long tokens = decoder->step->tokens;
    if (!job->heads->shared_in_ring)
        return 1;
    rz_run_rows(decoder, thread, RZ_SUM, tokens, offer_task, job);
    if (!rz_sum_over_ranks(decoder, thread, decoder->space.exchanged, exchanged_width(job->heads)))
        return 0;
    rz_run_rows(decoder, thread, RZ_SUM, tokens, accept_task, job);
    return 1;
}

static void gate_heads_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const rz_decoder *decoder = job->decoder;
    const rz_heads *heads = job->heads;
    const long values = (long)heads->q_heads * heads->value_dim, width = projected_width(heads, job->layer);
    const float *gate = decoder->space.qkv + (token + 1) * width - values;
    bf16 *attended = decoder->space.attended + token * values;
    for (long i = 0; i < values; i += LANES)
        f32_store_bf16(attended + i, f32_mul(f32_load_bf16(attended + i), sigmoid_f32(f32_load(gate + i))));
}

/* Goes on with the rows of the step's tail: their queries, and what they are gated by. */
static void leave_rows(attention *job, int thread)
{
    rz_decoder *decoder = job->decoder;
    const rz_heads *heads = job->heads;
    const rz_workspace *space = &decoder->space;
    const size_t gates = job->layer->gated ? (size_t)projected_width(heads, job->layer) * sizeof(float) : 0;
    const rz_step_rows own[2] = {
        { space->queries, (size_t)heads->q_heads * (size_t)heads->key_dim * sizeof(bf16) },
        { space->qkv, gates },
    };
    rz_keep_rows(decoder, thread, RZ_NOTHING_LEFT, own);
    job->plan = &decoder->attention[job->layer->heads];
}

int rz_attend_rows(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    const rz_model *model = &decoder->model;
    const rz_heads *heads = &model->heads[layer->heads];
    const rz_attention_plan *plan = &decoder->attention[layer->heads];
    attention job = {
        .decoder = decoder,
        .layer = layer,
        .heads = heads,
        .plan = plan,
        .shape = { heads->kv_heads, heads->lines, heads->key_dim, heads->value_dim, model->block_size,
                   layer->window, model->attention_scale, model->attention_cap, layer->sinks },
        .cache = rz_cache_of(layer),
        .place = layer->chooses ? (int)(layer - model->layer) : -1,
    };
    rz_fetch_ahead(decoder, thread, layer);
    if (model->wide_norms && layer->query_norm) { /* delta is free: what it held is in the residual */
        rz_run_rows(decoder, thread, RZ_PLACE, decoder->step->tokens, square_heads_task, &job);
        if (!rz_sum_over_ranks(decoder, thread, decoder->space.delta, 2))
            return 0;
    }
    if (layer->latent)
        rz_place_latents(decoder, thread, layer);
    else
        rz_run_rows(decoder, thread, RZ_PLACE, decoder->step->tokens, place_task, &job);
    if (decoder->step->num_compressions && !layer->reads_only)
        rz_run_stage(decoder, thread, RZ_PLACE, decoder->step->num_compressions * heads->lines * heads->kv_heads,
                     compress_task, &job);
    if (layer->chooses) {
        rz_summarise(decoder, thread, layer);
        rz_choose_blocks(decoder, thread, layer, plan);
    }
    if (rz_leaves_rows(decoder, layer))
        leave_rows(&job, thread);
    if (!decoder->step->tokens)
        return 1;
    attend_in_rounds(&job, thread);
    if (!exchange_shared(&job, thread))
        return 0;
    if (layer->gated)
        rz_run_rows(decoder, thread, RZ_ATTEND, decoder->step->tokens, gate_heads_task, &job);
    return 1;
}
