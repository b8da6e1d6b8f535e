/* See attention_stages.h. */
#include "attention_stages.h"

#include <string.h>

#include "codec.h"
#include "latent.h"

typedef struct {
    rz_decoder *decoder;
    const rz_layer *layer;
    const rz_heads *heads;
    const rz_attention_plan *plan;
    rz_attention_shape shape;
    rz_cache cache;
} attention;

rz_cache rz_cache_of(const rz_layer *layer)
{
    return (rz_cache){ layer->hot, layer->codes, layer->scales, layer->num_hot, (int)layer->codec };
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
    return (bf16 *)job->layer->hot + ((slot / size * planes + plane) * size + slot % size) * heads->key_dim;
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
    rz_compress_plane(&job->cache, (long)job->decoder->model.block_size * heads->key_dim, pair[0] * planes + task % planes,
                      (pair[1] - job->cache.num_hot) * planes + task % planes);
}

static void attend_task(void *argument, long task, long next, int thread)
{
    const attention *job = argument;
    const rz_workspace *space = &job->decoder->space;
    const rz_attention_plan *plan = job->plan;
    rz_attend(&job->shape, &job->cache, &plan->parts[task], next < plan->count ? &plan->parts[next] : NULL,
              space->scratch + space->scratch_piece * (size_t)thread);
}

/* The partial results of one tile: part after part, each [rows * heads][value_dim + 2]. */
static void merge_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const int d = job->heads->value_dim;
    const rz_attention_part *part = &job->plan->parts[job->plan->first_parts[task]];
    const long size = (long)part->rows * part->heads * (d + 2);
    const float *sinks = job->shape.sinks ? job->shape.sinks + part->first_head : NULL;
    for (int query = 0; query < part->rows * part->heads; query++)
        rz_merge(part->partial + (long)query * (d + 2), part->parts, size, d, sinks ? sinks + query % part->heads : NULL,
                 part->out + query / part->heads * part->out_stride + query % part->heads * d);
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
    rz_run_stage(decoder, thread, RZ_SUM, tokens, offer_task, job);
    if (!rz_sum_over_ranks(decoder, thread, decoder->space.exchanged, exchanged_width(job->heads)))
        return 0;
    rz_run_stage(decoder, thread, RZ_SUM, tokens, accept_task, job);
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
    };
    if (model->wide_norms && layer->query_norm) { /* delta is free: what it held is in the residual */
        rz_run_stage(decoder, thread, RZ_PLACE, decoder->step->tokens, square_heads_task, &job);
        if (!rz_sum_over_ranks(decoder, thread, decoder->space.delta, 2))
            return 0;
    }
    if (layer->latent)
        rz_place_latents(decoder, thread, layer);
    else
        rz_run_stage(decoder, thread, RZ_PLACE, decoder->step->tokens, place_task, &job);
    if (decoder->step->num_compressions && !layer->reads_only)
        rz_run_stage(decoder, thread, RZ_PLACE, decoder->step->num_compressions * heads->lines * heads->kv_heads,
                     compress_task, &job);
    rz_run_stage(decoder, thread, RZ_ATTEND, plan->count, attend_task, &job);
    if (plan->merges)
        rz_run_stage(decoder, thread, RZ_ATTEND, plan->merges, merge_task, &job);
    if (!exchange_shared(&job, thread))
        return 0;
    if (layer->gated)
        rz_run_stage(decoder, thread, RZ_ATTEND, decoder->step->tokens, gate_heads_task, &job);
    return 1;
}

static int parts_of(int keys)
{
    return (keys + SPLIT_KEYS - 1) / SPLIT_KEYS;
}

/* Gives a tile's attention for each shared head to one of its two ranks: to the first as long as it is not above
 * its share of the work so far. Both decide alike, from the plan alone. Notes what is this rank's, as bits. */
static int share_tile(const rz_heads *heads, rz_attention_plan *plan, int ranks, int rows, long row, int keys)
{
    const long work = (long)rows * keys;
    int mine = 0;
    for (int i = 0; i < heads->shared_here; i++) {
        const rz_shared_head *head = &heads->shared[i];
        const int first = plan->first_work[i] * ranks <= plan->work * head->first_share;
        plan->first_work[i] += first ? work : 0;
        mine |= (first == head->is_first) << i;
    }
    plan->work += work;
    if (heads->shared_here)
        memset(plan->mine + row, mine, (size_t)rows);
    return mine;
}

static int is_mine(const rz_heads *heads, int mine, int kv_head)
{
    for (int i = 0; i < heads->shared_here; i++)
        if (heads->shared[i].kv_head == kv_head)
            return mine >> i & 1;
    return 1;
}

/* Tiles that the query heads of a KV head are dealt to. */
static int tiles_of_group(const rz_heads *heads)
{
    return (heads->q_heads / heads->kv_heads + TILE_QUERIES - 1) / TILE_QUERIES;
}

/* Adds the parts of one tile of rows, for all heads; returns the partial results that they need, in floats. */
static long plan_tile(const rz_decoder *decoder, const rz_step *step, const rz_heads *heads, rz_attention_plan *plan, const int32_t *table,
                      int rows, long row, int position, long partial)
{
    const int group = heads->q_heads / heads->kv_heads, tiles = tiles_of_group(heads), keys = position + rows;
    const long queries = (long)heads->q_heads * heads->key_dim, values = (long)heads->q_heads * heads->value_dim;
    const int parts = parts_of(keys);
    long used = 0;
    const int mine = share_tile(heads, plan, decoder->model.ranks, rows, row, keys);
    for (int tile = 0; tile < heads->kv_heads * tiles; tile++) {
        const int head = tile / tiles, begin = group * (tile % tiles) / tiles, end = group * (tile % tiles + 1) / tiles;
        const long column = (long)head * group + begin, size = (long)rows * (end - begin) * (heads->value_dim + 2);
        if (!is_mine(heads, mine, head))
            continue;
        if (parts > 1)
            plan->first_parts[plan->merges++] = plan->count;
        for (int part = 0; part < parts; part++) {
            plan->parts[plan->count++] = (rz_attention_part){
                .table = table,
                .slots = step->slots + row,
                .queries = decoder->space.queries + row * queries + column * heads->key_dim,
                .out = decoder->space.attended + row * values + column * heads->value_dim,
                .partial = parts > 1 ? decoder->space.partial + partial + used : NULL,
                .q_stride = queries,
                .out_stride = values,
                .rows = rows,
                .kv_head = head,
                .first_head = (int)column,
                .heads = end - begin,
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

/* Rows that a sequence's first tile is short of: of several, each ends at a multiple of `tile`, so that few of them
 * have rows of two blocks. */
static int lead_of(int tile, int length, int begin)
{
    return length > tile ? begin % tile : 0;
}

/* Room for the parts of this step's attention. 0 when there is no memory. */
static int reserve_parts(rz_decoder *decoder, const rz_step *step, const rz_heads *heads, rz_attention_plan *plan,
                         int tile)
{
    long parts = 0, floats = 0;
    for (int i = 0; i < step->sequences; i++) {
        const int length = step->query_lens[i], lead = lead_of(tile, length, step->context_lens[i] - length);
        const long tiles = (length + lead + tile - 1) / tile, each = parts_of(step->context_lens[i]);
        parts += heads->kv_heads * tiles_of_group(heads) * tiles * each;
        if (each > 1)
            floats += (long)heads->q_heads * step->query_lens[i] * each * (heads->value_dim + 2);
    }
    return rz_workspace_reserve_attention(plan, step->tokens, parts)
        && rz_workspace_reserve(&decoder->space, &decoder->model, step->tokens, floats);
}

static int tile_of(const rz_heads *heads)
{
    const int group = heads->q_heads / heads->kv_heads;
    return group < TILE_QUERIES ? TILE_QUERIES / group : 1;
}

/* Lists the parts of this step's attention in layers with these heads, the longest first as far as that costs nothing:
 * the last rows of prompts first. */
static void plan_heads(rz_decoder *decoder, const rz_step *step, const rz_heads *heads, rz_attention_plan *plan)
{
    const int tile = tile_of(heads);
    plan->count = plan->merges = 0;
    plan->work = plan->first_work[0] = plan->first_work[1] = 0;
    const int32_t *table = step->block_tables;
    long row = 0, partial = 0;
    for (int i = 0; i < step->sequences; i++) {
        int length = step->query_lens[i], context = step->context_lens[i], begin = context - length;
        const int lead = lead_of(tile, length, begin);
        for (int start = (length + lead - 1) / tile * tile - lead; start > -tile; start -= tile) {
            const int first = start > 0 ? start : 0, rows = (int)least(start + tile, length) - first;
            partial += plan_tile(decoder, step, heads, plan, table, rows, row + first, begin + first, partial);
        }
        row += length;
        table += (context + decoder->model.block_size - 1) / decoder->model.block_size;
    }
}

int rz_reserve_attention(rz_decoder *decoder, const rz_step *step, rz_attention_plan *plans)
{
    const rz_model *model = &decoder->model;
    for (int i = 0; i < model->num_heads; i++)
        if (!reserve_parts(decoder, step, &model->heads[i], &plans[i], tile_of(&model->heads[i])))
            return 0;
    return 1;
}

void rz_plan_attention(rz_decoder *decoder, const rz_step *step, rz_attention_plan *plans)
{
    for (int i = 0; i < decoder->model.num_heads; i++)
        plan_heads(decoder, step, &decoder->model.heads[i], &plans[i]);
}
