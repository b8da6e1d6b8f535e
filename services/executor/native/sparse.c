/* See sparse.h. */
#include "sparse.h"

#include <string.h>

#include "attention_stages.h"
#include "codec.h"
#include "digits.h"
#include "fetch.h"

enum {
    SCORED = 128,        /* blocks that one task scores */
    SCORED_AT_ONCE = 16, /* of them, for all heads: as many as the next ones' are asked for */
    QUERIES_AT_ONCE = 4,
    DIGIT = 11,          /* bits of a score's order that are told apart at once */
};

/* --- what a row reads -------------------------------------------------------------------------------- */

static long larger_of(long a, long b)
{
    return a > b ? a : b;
}

int rz_reads_some(const int32_t *choice, int block_size, int position, rz_choice *row)
{
    enum { KIND, THRESHOLD, SINKS, RECENT, BUDGET, SHARE, DENSE_LAYERS, MILLION = 1000000 };
    if (!choice[KIND] || position < choice[THRESHOLD])
        return 0;
    const long size = block_size, own = position / size;
    const long first = least((choice[SINKS] + size - 1) / size, own);
    const long newest = larger_of(0, (long)position - choice[RECENT] + 1) / size;
    const long recent = larger_of(first, least(own, newest));
    const long share = (long)position * choice[SHARE] / MILLION;
    const long wanted = choice[KIND] == RZ_WINDOW ? 0 : larger_of(choice[BUDGET], share);
    const long top = least(recent - first, (wanted + size - 1) / size);
    if (top == recent - first)
        return 0;
    row->first = (int)first;
    row->recent = (int)recent;
    row->top = (int)top;
    row->own = (int)own;
    row->length = (int)(first + top + own - recent + 1);
    row->dense_layers = choice[DENSE_LAYERS];
    return 1;
}

int rz_choices_are_sound(const int32_t *choices, long count)
{
    int good = 1;
    for (long i = 0; i < count * RZ_CHOICE_FIELDS; i++)
        good &= choices[i] >= 0;
    for (long i = 0; i < count; i++)
        good &= choices[i * RZ_CHOICE_FIELDS] <= RZ_WINDOW;
    return good;
}

/* --- summaries --------------------------------------------------------------------------------------- */

typedef struct {
    const rz_decoder *decoder;
    const rz_layer *layer;
    const rz_heads *heads;
    rz_cache cache;
} summarising;

/* Where the summaries of a block are: [2, kv_heads, key_dim]. */
static bf16 *summary_at(const rz_layer *layer, const rz_heads *heads, long block)
{
    const long values = 2L * heads->kv_heads * heads->key_dim;
    return block < layer->num_writable ? (bf16 *)layer->summaries + block * values
                                  : (bf16 *)layer->quantized_summaries + (block - layer->num_writable) * values;
}

/* 2 * LANES values from `column` on of token `token` of a plane of `size` keys, over its scale. */
RZ_INLINE void load_key(const rz_cache *cache, int is_quantized, long plane, int size, int d, int token, int column,
                        f32 *first, f32 *second)
{
    const long at = (plane * size + token) * d + column;
    if (is_quantized && cache->in_groups) {
        const int8_t *group = (const int8_t *)cache->codes + (plane * size + token / LANES * LANES) * d;
        int8_t key[2 * LANES];
        unpack_line_of_columns(key, group, token % LANES, column, 2 * LANES);
        codec_load(cache->codec, key, first, second);
    } else if (is_quantized && cache->codec != RZ_CODEC_NONE) {
        codec_load(cache->codec, (const uint8_t *)cache->codes + at, first, second);
    } else {
        const bf16 *from = is_quantized ? cache->codes : cache->writable;
        *first = f32_load_bf16(from + at);
        *second = f32_load_bf16(from + at + LANES);
    }
}

static void summarise_head(const summarising *job, long block, int head)
{
    const rz_cache *cache = &job->cache;
    const rz_heads *heads = job->heads;
    const int d = heads->key_dim, size = job->decoder->model.block_size, is_quantized = block >= cache->num_writable;
    const long plane = (is_quantized ? block - cache->num_writable : block) * heads->lines * heads->kv_heads + head;
    float scale = 1.0f;
    if (is_quantized && cache->codec != RZ_CODEC_NONE)
        scale = cache->scales[plane] * codec_unit(cache->codec);
    bf16 *mean = summary_at(job->layer, heads, block) + (long)head * d, *deviation = mean + (long)heads->kv_heads * d;
    const f32 share = f32_set1(1.0f / (float)size), unit = f32_set1(scale);
    for (int i = 0; i < d; i += 2 * LANES) {
        f32 sums[2] = { f32_zero(), f32_zero() }, squares[2] = { f32_zero(), f32_zero() }, key[2];
        float roots[2 * LANES];
        for (int token = 0; token < size; token++) {
            load_key(cache, is_quantized, plane, size, d, token, i, &key[0], &key[1]);
            for (int half = 0; half < 2; half++)
                sums[half] = f32_add(sums[half], key[half]);
        }
        for (int half = 0; half < 2; half++)
            sums[half] = f32_mul(sums[half], share);
        for (int token = 0; token < size; token++) {
            load_key(cache, is_quantized, plane, size, d, token, i, &key[0], &key[1]);
            for (int half = 0; half < 2; half++) {
                const f32 apart = f32_sub(key[half], sums[half]);
                squares[half] = f32_fma(apart, apart, squares[half]);
            }
        }
        for (int half = 0; half < 2; half++)
            f32_store(roots + half * LANES, f32_mul(squares[half], share));
        for (int at = 0; at < 2 * LANES; at++)
            roots[at] = sqrtf(roots[at]);
        for (int half = 0; half < 2; half++) {
            f32_store_bf16(mean + i + half * LANES, f32_mul(sums[half], unit));
            f32_store_bf16(deviation + i + half * LANES, f32_mul(f32_load(roots + half * LANES), unit));
        }
    }
}

/* One head of a block that the step has filled and compressed. */
static void summarise_pair_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const summarising *job = argument;
    const int heads = job->heads->kv_heads;
    summarise_head(job, job->decoder->step->compressions[task / heads * 2 + 1], (int)(task % heads));
}

/* Where nothing is compressed: the block of a token that is its last. */
static void summarise_token_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const summarising *job = argument;
    const rz_step *step = job->decoder->step;
    const int size = job->decoder->model.block_size;
    if (step->positions[token] % size == size - 1)
        for (int head = 0; head < job->heads->kv_heads; head++)
            summarise_head(job, step->slots[token] / size, head);
}

void rz_summarise(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    const rz_step *step = decoder->step;
    summarising job = { decoder, layer, &decoder->model.heads[layer->heads], rz_cache_of(layer) };
    if (!layer->summaries)
        return;
    if (!decoder->model.num_quantized)
        rz_run_stage(decoder, thread, RZ_PLACE, step->tokens, summarise_token_task, &job);
    else if (step->num_compressions)
        rz_run_stage(decoder, thread, RZ_PLACE, step->num_compressions * job.heads->kv_heads, summarise_pair_task,
                     &job);
}

/* --- scores ------------------------------------------------------------------------------------------ */

typedef struct {
    const rz_decoder *decoder;
    const rz_layer *layer;
    const rz_heads *heads;
    const rz_attention_plan *plan;
    long first;  /* of the plan's choices, those that are scored at once */
    long pieces; /* of the blocks of each */
    int place;   /* of the layer */
} choosing;

static float *scores_of(const choosing *job, long choice, int head)
{
    return job->plan->scores + ((choice - job->first) * job->heads->kv_heads + head) * job->plan->most_between;
}

/* The highest score of `count` queries, a number that the compiler knows: their values are `d` apart, and so are their
 * absolute ones. */
RZ_INLINE float highest_score(int count, const float *queries, const float *absolute, int d, const bf16 *mean,
                              const bf16 *deviation)
{
    f32 near[QUERIES_AT_ONCE], apart[QUERIES_AT_ONCE];
    for (int query = 0; query < count; query++)
        near[query] = apart[query] = f32_zero();
    for (int i = 0; i < d; i += LANES) {
        const f32 middle = f32_load_bf16(mean + i), spread = f32_load_bf16(deviation + i);
        for (int query = 0; query < count; query++) {
            near[query] = f32_fma(f32_load(queries + query * d + i), middle, near[query]);
            apart[query] = f32_fma(f32_load(absolute + query * d + i), spread, apart[query]);
        }
    }
    float highest = -INFINITY;
    for (int query = 0; query < count; query++)
        highest = fmaxf(highest, f32_sum(f32_add(near[query], apart[query])));
    return highest;
}

static float score_block(const float *queries, const float *absolute, int count, int d, const bf16 *mean,
                         const bf16 *deviation)
{
    float highest = -INFINITY;
    int query = 0;
    for (; query + QUERIES_AT_ONCE <= count; query += QUERIES_AT_ONCE)
        highest = fmaxf(highest, highest_score(QUERIES_AT_ONCE, queries + query * d, absolute + query * d, d, mean,
                                               deviation));
    for (; query < count; query++)
        highest = fmaxf(highest, highest_score(1, queries + query * d, absolute + query * d, d, mean, deviation));
    return highest;
}

/* A row's queries as float32, and behind them their absolute values times RZ_DEVIATIONS: [2, q_heads, key_dim]. */
static const float *spread_queries(const choosing *job, long row, int thread)
{
    const rz_workspace *space = &job->decoder->space;
    const long values = (long)job->heads->q_heads * job->heads->key_dim;
    float *queries = (float *)(space->scratch + space->scratch_piece * (size_t)thread);
    const bf16 *from = space->queries + row * values;
    for (long i = 0; i < values; i += LANES) {
        const f32 value = f32_load_bf16(from + i);
        f32_store(queries + i, value);
        f32_store(queries + values + i, f32_mul(f32_abs(value), f32_set1(RZ_DEVIATIONS)));
    }
    return queries;
}

static void ask_for_summary(const bf16 *summary, long values)
{
    for (long i = 0; i < values; i += 32)
        __builtin_prefetch(summary + i, 0, 2);
}

/* Some blocks of one row, for all KV heads: a block's summaries lie together. */
static void score_task(void *argument, long task, long next, int thread)
{
    (void)next;
    const choosing *job = argument;
    const rz_heads *heads = job->heads;
    const long at = job->first + task / job->pieces;
    const rz_choice *choice = &job->plan->choices[at];
    const int begin = (int)(task % job->pieces) * SCORED, between = choice->recent - choice->first;
    const int end = (int)least(begin + SCORED, between);
    if (!choice->top || job->place < choice->dense_layers || begin >= end)
        return;
    const int d = heads->key_dim, group = heads->q_heads / heads->kv_heads;
    const float *queries = spread_queries(job, choice->row, thread);
    const float *absolute = queries + (long)heads->q_heads * d;
    const int32_t *table = choice->table + choice->first;
    for (int some = begin; some < end; some += SCORED_AT_ONCE) {
        const int last = (int)least(some + SCORED_AT_ONCE, end), ahead = (int)least(last + SCORED_AT_ONCE, between);
        for (int head = 0; head < heads->kv_heads; head++) {
            const long first = (long)head * group * d;
            float *scores = scores_of(job, at, head);
            for (int block = some; block < last; block++) {
                const bf16 *mean = summary_at(job->layer, heads, table[block]) + (long)head * d;
                if (block + SCORED_AT_ONCE < ahead) {
                    const bf16 *coming = summary_at(job->layer, heads, table[block + SCORED_AT_ONCE]) + (long)head * d;
                    ask_for_summary(coming, d);
                    ask_for_summary(coming + (long)heads->kv_heads * d, d);
                }
                scores[block] = score_block(queries + first, absolute + first, group, d, mean,
                                            mean + (long)heads->kv_heads * d);
            }
        }
    }
}

/* --- the best ---------------------------------------------------------------------------------------- */

/* A number that grows as the score does. */
static uint32_t order_of(float score)
{
    uint32_t bits;
    memcpy(&bits, &score, sizeof bits);
    return bits ^ (bits >> 31 ? 0xffffffffu : 0x80000000u);
}

/* The order of the `wanted`-th highest of `count` scores, from 1; how many that are just as high are among these goes
 * to `ties`. */
static uint32_t least_chosen(const float *scores, int count, int wanted, int *ties)
{
    uint32_t found = 0, known = 0;
    for (int shift = 32; shift > 0;) {
        const int bits = shift < DIGIT ? shift : DIGIT;
        const uint32_t digits = (1u << bits) - 1;
        int counts[1 << DIGIT] = { 0 };
        shift -= bits;
        for (int i = 0; i < count; i++) {
            const uint32_t order = order_of(scores[i]);
            if ((order & known) == found)
                counts[order >> shift & digits]++;
        }
        uint32_t digit = digits;
        for (; wanted > counts[digit]; digit--)
            wanted -= counts[digit];
        found |= digit << shift;
        known |= digits << shift;
    }
    *ties = wanted;
    return found;
}

/* The table of one row and KV head. */
static void gather_table_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const choosing *job = argument;
    const int kv_heads = job->heads->kv_heads, head = (int)(task % kv_heads);
    const long at = job->first + task / kv_heads;
    const rz_choice *choice = &job->plan->choices[at];
    if (job->place < choice->dense_layers)
        return;
    const int32_t *table = choice->table;
    int32_t *to = choice->chosen + (long)head * choice->length;
    const int between = choice->recent - choice->first;
    for (int i = 0; i < choice->first; i++)
        *to++ = table[i];
    if (choice->top) {
        const float *scores = scores_of(job, at, head);
        int ties;
        const uint32_t lowest = least_chosen(scores, between, choice->top, &ties);
        for (int i = 0; i < between; i++) {
            const uint32_t order = order_of(scores[i]);
            if (order > lowest || (order == lowest && ties-- > 0))
                *to++ = table[choice->first + i];
        }
    }
    for (int i = choice->recent; i <= choice->own; i++)
        *to++ = table[i];
    rz_fetch_chosen(job->decoder, job->layer, choice->chosen + (long)head * choice->length, choice->length, head);
}

void rz_choose_blocks(rz_decoder *decoder, int thread, const rz_layer *layer, const rz_attention_plan *plan)
{
    const rz_heads *heads = &decoder->model.heads[layer->heads];
    choosing job = { decoder, layer, heads, plan, 0, (plan->most_between + SCORED - 1) / SCORED,
                     (int)(layer - decoder->model.layer) };
    for (; job.first < plan->num_choices; job.first += plan->scored_at_once) {
        const long count = least(plan->scored_at_once, plan->num_choices - job.first);
        if (job.pieces)
            rz_run_stage(decoder, thread, RZ_ATTEND, count * job.pieces, score_task, &job);
        rz_run_stage(decoder, thread, RZ_ATTEND, count * heads->kv_heads, gather_table_task, &job);
    }
}
