/* See attention_stages.h. */
#include "attention_stages.h"

#include <string.h>

#include "codec.h"

typedef struct {
    rz_decoder *decoder;
    const rz_layer *layer;
    rz_attention_shape shape;
    rz_cache cache;
} attention;

rz_cache rz_cache_of(const rz_layer *layer)
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
        f32_store_bf16(to + i, f32_load(from + i));
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

/* One head's keys or values of a block that this step has filled. */
static void compress_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const attention *job = argument;
    const rz_model *model = &job->decoder->model;
    const long planes = 2L * model->kv_heads;
    const int32_t *pair = job->decoder->step->compressions + task / planes * 2;
    rz_compress_plane(&job->cache, (long)model->block_size * model->head_dim, pair[0] * planes + task % planes,
                      (pair[1] - job->cache.num_hot) * planes + task % planes);
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

/* The values of one token for a shared head, in what is exchanged and among what this rank attends. */
typedef struct {
    float *exchanged;
    bf16 *attended;
    int width;
} shared_row;

static shared_row shared_row_of(const rz_decoder *decoder, long token, int index)
{
    const rz_model *model = &decoder->model;
    const int width = model->q_heads / model->kv_heads * model->head_dim;
    const rz_shared_head *head = &model->shared[index];
    return (shared_row){
        decoder->space.exchanged + (token * model->shared_in_ring + head->slot) * width,
        decoder->space.attended + (token * model->kv_heads + head->kv_head) * width,
        width,
    };
}

static void offer_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const rz_decoder *decoder = argument;
    const rz_model *model = &decoder->model;
    const long width = (long)model->shared_in_ring * (model->q_heads / model->kv_heads) * model->head_dim;
    memset(decoder->space.exchanged + token * width, 0, (size_t)width * sizeof(float));
    for (int i = 0; i < model->shared_here; i++) {
        shared_row row = shared_row_of(decoder, token, i);
        if (decoder->space.mine[token] >> i & 1)
            for (int at = 0; at < row.width; at += LANES)
                f32_store(row.exchanged + at, f32_load_bf16(row.attended + at));
    }
}

static void accept_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const rz_decoder *decoder = argument;
    for (int i = 0; i < decoder->model.shared_here; i++) {
        shared_row row = shared_row_of(decoder, token, i);
        to_bf16(row.attended, row.exchanged, row.width);
    }
}

/* Both ranks of a shared head get its outputs of all rows: a row's own and zeros add up to the same bits, whoever
 * has computed it. */
static int exchange_shared(rz_decoder *decoder, int thread)
{
    const rz_model *model = &decoder->model;
    const long tokens = decoder->step->tokens;
    if (!model->shared_in_ring)
        return 1;
    const long width = (long)model->shared_in_ring * (model->q_heads / model->kv_heads) * model->head_dim;
    rz_run_stage(decoder, thread, RZ_SUM, tokens, offer_task, decoder);
    if (!rz_sum_over_ranks(decoder, thread, decoder->space.exchanged, width))
        return 0;
    rz_run_stage(decoder, thread, RZ_SUM, tokens, accept_task, decoder);
    return 1;
}

int rz_attend_rows(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    const rz_model *model = &decoder->model;
    attention job = {
        .decoder = decoder,
        .layer = layer,
        .shape = { model->kv_heads, model->q_heads / model->kv_heads, model->head_dim, model->block_size,
                   layer->window, model->attention_scale, model->attention_cap },
        .cache = rz_cache_of(layer),
    };
    rz_run_stage(decoder, thread, RZ_PLACE, decoder->step->tokens, place_task, &job);
    if (decoder->step->num_compressions)
        rz_run_stage(decoder, thread, RZ_PLACE, decoder->step->num_compressions * 2L * model->kv_heads, compress_task,
                     &job);
    rz_run_stage(decoder, thread, RZ_ATTEND, decoder->parts, attend_task, &job);
    if (decoder->merges)
        rz_run_stage(decoder, thread, RZ_ATTEND, decoder->merges, merge_task, decoder);
    return exchange_shared(decoder, thread);
}

static int parts_of(int keys)
{
    return (keys + SPLIT_KEYS - 1) / SPLIT_KEYS;
}

/* Gives a tile's attention for each shared head to one of its two ranks: to the first as long as it is not above
 * its share of the work so far. Both decide alike, from the plan alone. Notes what is this rank's, as bits. */
static int share_tile(rz_decoder *decoder, int rows, long row, int keys)
{
    const rz_model *model = &decoder->model;
    const long work = (long)rows * keys;
    int mine = 0;
    for (int i = 0; i < model->shared_here; i++) {
        const rz_shared_head *head = &model->shared[i];
        const int first = decoder->first_work[i] * model->ranks <= decoder->work * head->first_share;
        decoder->first_work[i] += first ? work : 0;
        mine |= (first == head->is_first) << i;
    }
    decoder->work += work;
    if (model->shared_here)
        memset(decoder->space.mine + row, mine, (size_t)rows);
    return mine;
}

static int is_mine(const rz_model *model, int mine, int kv_head)
{
    for (int i = 0; i < model->shared_here; i++)
        if (model->shared[i].kv_head == kv_head)
            return mine >> i & 1;
    return 1;
}

/* Adds the parts of one tile, for all KV heads; returns the partial results that they need, in floats. */
static long plan_tile(rz_decoder *decoder, const int32_t *table, int rows, long row, int position, long partial)
{
    const rz_model *model = &decoder->model;
    const int d = model->head_dim, group = model->q_heads / model->kv_heads, keys = position + rows;
    const long width = (long)model->q_heads * d, size = (long)rows * group * (d + 2);
    const int parts = parts_of(keys);
    long used = 0;
    const int mine = share_tile(decoder, rows, row, keys);
    for (int head = 0; head < model->kv_heads; head++) {
        const long column = (long)head * group * d;
        if (!is_mine(model, mine, head))
            continue;
        if (parts > 1)
            decoder->space.merges[decoder->merges++] = decoder->parts;
        for (int part = 0; part < parts; part++) {
            decoder->space.parts[decoder->parts++] = (rz_attention_part){
                .table = table,
                .slots = decoder->step->slots + row,
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

/* Rows that a sequence's first tile is short of: of several, each ends at a multiple of `tile`, so that few of them
 * have rows of two blocks. */
static int lead_of(int tile, int length, int begin)
{
    return length > tile ? begin % tile : 0;
}

/* Room for the parts of this step's attention. 0 when there is no memory. */
static int reserve_parts(rz_decoder *decoder, int tile)
{
    const rz_model *model = &decoder->model;
    const rz_step *step = decoder->step;
    long parts = 0, floats = 0;
    for (int i = 0; i < step->sequences; i++) {
        const int length = step->query_lens[i], lead = lead_of(tile, length, step->context_lens[i] - length);
        const long tiles = (length + lead + tile - 1) / tile, each = parts_of(step->context_lens[i]);
        parts += model->kv_heads * tiles * each;
        if (each > 1)
            floats += (long)model->q_heads * step->query_lens[i] * each * (model->head_dim + 2);
    }
    return rz_workspace_reserve(&decoder->space, model, step->tokens, parts, floats);
}

/* Lists the parts of all attention of this step, the longest first as far as that costs nothing: the last
 * rows of prompts first. 0 when there is no memory. */
int rz_plan_attention(rz_decoder *decoder)
{
    const rz_model *model = &decoder->model;
    const rz_step *step = decoder->step;
    const int group = model->q_heads / model->kv_heads;
    const int tile = group < TILE_QUERIES ? TILE_QUERIES / group : 1;
    if (!reserve_parts(decoder, tile))
        return 0;
    decoder->parts = decoder->merges = 0;
    decoder->work = decoder->first_work[0] = decoder->first_work[1] = 0;
    const int32_t *table = step->block_tables;
    long row = 0, partial = 0;
    for (int i = 0; i < step->sequences; i++) {
        int length = step->query_lens[i], context = step->context_lens[i], begin = context - length;
        const int lead = lead_of(tile, length, begin);
        for (int start = (length + lead - 1) / tile * tile - lead; start > -tile; start -= tile) {
            const int first = start > 0 ? start : 0, rows = (int)least(start + tile, length) - first;
            partial += plan_tile(decoder, table, rows, row + first, begin + first, partial);
        }
        row += length;
        table += (context + model->block_size - 1) / model->block_size;
    }
    return 1;
}
