/* See attention.h. */
#include "attention.h"

#include <math.h>
#include <string.h>

#include "attention_few.h"
#include "codec.h"
#include "gemm.h"

size_t rz_attention_scratch(void)
{
    return (sizeof(rz_attention_memory) + 63) / 64 * 64;
}

/* --- reading blocks ---------------------------------------------------------------------------------- */

RZ_INLINE void decode(int codec, const uint8_t *codes, int d, bf16 *row)
{
    for (int i = 0; i < d; i += 2 * LANES) {
        f32 first, second;
        codec_load(codec, codes + i, &first, &second);
        f32_store_two_bf16(row + i, first, second);
    }
}

/* Rows of a part that read the keys of a round alike. */
typedef struct {
    int first, end;
    int home;  /* place in the block table of the block that they are in; -1: read as all others */
    long own;  /* that block, as it is written */
} row_run;

/* The rows from `row` on: all, while the round lies before the blocks that they are in; else those of one block. */
static row_run run_of(const rz_attention_shape *shape, const rz_cache *cache, const rz_attention_part *part, int row,
                      int first)
{
    const int size = shape->block_size, home = (part->position + row) / size;
    if (cache->codec == RZ_CODEC_NONE || first + KEYS <= home * size)
        return (row_run){ row, part->rows, -1, 0 };
    const int border = (home + 1) * size - part->position;
    return (row_run){ row, border < part->rows ? border : part->rows, home, part->slots[row] / size };
}

/* As `decode`, of `count` rows of groups: of keys (which = 0) or values. */
static void decode_groups(int codec, const int8_t *codes, int which, int count, int d, bf16 *rows)
{
    for (; count > 0; count -= LANES, codes += LANES * d, rows += LANES * d) {
        int8_t lines[LANES * MAX_KEY_DIM];
        if (which)
            rz_unpack_lines(lines, codes, d);
        else
            rz_unpack_columns(lines, codes, d);
        for (int i = 0; i < LANES && i < count; i++)
            decode(codec, (const uint8_t *)lines + i * d, d, rows + i * d);
    }
}

/* How many keys of the round from `first` on, and behind `first`, are kept as codes of int8: all of a round that lies before
 * the rows' block, and those before it of the round that it is in. */
static int coded_keys(const rz_attention_shape *shape, const rz_cache *cache, const rz_attention_part *part,
                      const row_run *run, int first)
{
    const int size = shape->block_size, end = run->home < 0 ? first + KEYS : run->home * size;
    if (!codec_is_integer(cache->codec) || end <= first)
        return 0;
    for (int key = first; key < end; key += size - key % size)
        if (part->table[key / size] < cache->num_writable)
            return 0;
    return end - first;
}

/* Row pointers of `count` keys from `first` on, of keys (which = 0) or values (1), and their `scales` [KEYS]. Returns whether
 * these are not all 1: of what is kept as bf16 they are. */
static int find_rows(const rz_attention_shape *shape, const rz_cache *cache, const rz_attention_part *part,
                     const row_run *run, int first, int count, int which, rz_attention_memory *scratch, float *scales,
                     const bf16 **rows)
{
    const int size = shape->block_size, d = shape->key_dim, planes = shape->lines * shape->kv_heads;
    int scaled = 0;
    for (int key = 0; key < count;) {
        int block_index = (first + key) / size, offset = (first + key) % size;
        long block = block_index == run->home ? run->own : part->table[block_index];
        int here = size - offset < count - key ? size - offset : count - key;
        long head = which * shape->kv_heads + part->kv_head;
        float scale = 1.0f;
        if (block < cache->num_writable) {
            const bf16 *at = cache->writable + ((block * planes + head) * size + offset) * d;
            for (int i = 0; i < here; i++)
                rows[key + i] = at + (long)i * d;
        } else {
            long plane = (block - cache->num_writable) * planes + head;
            long at = (plane * size + offset) * d;
            if (cache->codec != RZ_CODEC_NONE) {
                scale = cache->scales[plane] * codec_unit(cache->codec);
                scaled = 1;
            }
            if (cache->in_groups)
                decode_groups(cache->codec, (const int8_t *)cache->codes + at, which, here, d,
                              scratch->decoded[which] + key * d);
            for (int i = 0; i < here; i++) {
                bf16 *row = scratch->decoded[which] + (key + i) * d;
                if (cache->codec == RZ_CODEC_NONE)
                    row = (bf16 *)cache->codes + at + (long)i * d;
                else if (!cache->in_groups)
                    decode(cache->codec, (const uint8_t *)cache->codes + at + (long)i * d, d, row);
                rows[key + i] = row;
            }
        }
        for (int i = 0; i < here; i++)
            scales[key + i] = scale;
        key += here;
    }
    for (int key = count; key < KEYS; key++) {
        rows[key] = scratch->zeros;
        scales[key] = 0.0f;
    }
    return scaled;
}

enum { ROUNDS_AHEAD = 2 /* one is over before its memory comes */ };

/* The first key that any row of the part sees, at the beginning of a round. */
static int first_of(const rz_attention_shape *shape, const rz_attention_part *part)
{
    int oldest = shape->window ? part->position - shape->window + 1 : 0;
    return oldest > part->first_key ? oldest - oldest % KEYS : part->first_key;
}

/* The end of the keys that some row of the part sees. */
static int last_of(const rz_attention_part *part)
{
    int newest = part->position + part->rows;
    return part->last_key < newest ? part->last_key : newest;
}

static void look_ahead(const rz_attention_shape *shape, const rz_cache *cache, const rz_attention_part *part, int first,
                       int last, rz_upcoming *ahead)
{
    const int size = shape->block_size;
    const long values = (long)size * shape->key_dim;
    ahead->count = ahead->next = 0;
    ahead->at = 0;
    ahead->bytes = values * part->kv_heads * (long)sizeof(bf16);
    if (last > first + KEYS)
        last = first + KEYS;
    const int32_t *table = part->table + first / size;
    for (int key = first - first % size; key < last; key += size, table++) {
        long block = *table, value_bytes = sizeof(bf16);
        const int compressed = block >= cache->num_writable && cache->codec != RZ_CODEC_NONE;
        const char *base = (const char *)cache->writable;
        if (block >= cache->num_writable) {
            block -= cache->num_writable;
            base = cache->codes;
            value_bytes = cache->codec == RZ_CODEC_NONE ? 2 : 1;
            ahead->bytes = values * part->kv_heads * value_bytes;
        }
        for (int which = 0; which < shape->lines; which++) {
            const long plane = (block * shape->lines + which) * shape->kv_heads + part->kv_head;
            ahead->planes[ahead->count++] = base + plane * values * value_bytes;
            if (compressed)
                __builtin_prefetch(cache->scales + plane);
        }
    }
}

/* Of `count` keys; the scores of those behind them are nobody's. */
static void pack_keys(int d, int panels, int count, const bf16 *const *rows, rz_attention_memory *scratch, rz_upcoming *ahead)
{
    for (int group = 0; group < panels * 2 && group * LANES < count; group++) {
        int32_t *panel = (int32_t *)(scratch->keys + group / 2 * d * PANEL) + group % 2 * LANES;
        for (int column = 0; column < d; column += 2 * LANES) {
            pull(ahead, 16);
            transpose_pairs(rows + group * LANES, column, panel + column / 2 * PANEL, PANEL);
        }
    }
}

static void pack_values(int d, int keys, const bf16 *const *rows, rz_attention_memory *scratch, rz_upcoming *ahead)
{
    for (int key = 0; key < keys; key += 2) {
        for (int column = 0; column < d; column += PANEL) {
            pull(ahead, 2);
            interleave_rows(rows[key] + column, rows[key + 1] + column, scratch->values + column * KEYS + key * PANEL);
        }
    }
}

/* --- scores and weights ------------------------------------------------------------------------------ */

/* What scores are multiplied with, in base 2. */
RZ_INLINE float factor_of(const rz_attention_shape *shape)
{
    return shape->scale * LOG2_E;
}

/* Scores of one query, of the keys that it sees: [oldest, newest] of the round's first `used`. The largest is found. */
static void scale_scores(const rz_attention_shape *shape, const float *scales, rz_attention_memory *scratch, int query,
                         int oldest, int newest, int used)
{
    static const int32_t numbers[LANES] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    float *scores = scratch->scores[query];
    const f32 factor = f32_set1(factor_of(shape)), nothing = f32_set1(-INFINITY);
    f32 peak = nothing;
    for (int key = 0; key < used; key += LANES) {
        f32 value = f32_mul(f32_load(scores + key), f32_load(scales + key));
        if (shape->soft_cap > 0) {
            f32 capped = tanh_f32(f32_mul(value, f32_set1(shape->scale / shape->soft_cap)));
            value = f32_mul(capped, f32_set1(shape->soft_cap * LOG2_E));
        } else {
            value = f32_mul(value, factor);
        }
        if (key < oldest || key + LANES > newest + 1) {
            const i32 here = i32_load(numbers);
            const lanes unseen = lanes_or(i32_greater(here, i32_set1(newest - key)), i32_greater(i32_set1(oldest - key), here));
            value = f32_select(unseen, nothing, value);
        }
        f32_store(scores + key, value);
        peak = f32_max(peak, value);
    }
    scratch->peaks[query] = f32_largest(peak);
}

/* The largest scores so far of queries [begin, end), and what their sums so far are kept with. Where there was nothing to
 * see, 2^NaN is 0. */
static void raise_largest(rz_attention_memory *scratch, int begin, int end)
{
    for (int query = begin; query < end; query += LANES) {
        const lanes these = lanes_first(end - query);
        const f32 before = f32_load(scratch->largest + query);
        const f32 now = f32_max(f32_load(scratch->peaks + query), before);
        f32_store_some(these, scratch->largest + query, now);
        f32_store_some(these, scratch->keep + query, exp2_nonpositive_f32(f32_sub(before, now)));
    }
}

/* The largest scores of queries [begin, end), which see all KEYS keys and are multiplied with the factor alone: that is left
 * to weigh_scores. */
static void find_peaks(const rz_attention_shape *shape, rz_attention_memory *scratch, int begin, int end)
{
    const f32 factor = f32_set1(factor_of(shape));
    for (int query = begin; query < end; query += AT_ONCE_REDUCED) {
        f32 four[AT_ONCE_REDUCED];
#pragma GCC unroll 4
        for (int i = 0; i < AT_ONCE_REDUCED; i++) {
            const float *scores = scratch->scores[query + i < end ? query + i : query];
            four[i] = f32_max(f32_max(f32_load(scores), f32_load(scores + LANES)),
                              f32_max(f32_load(scores + 2 * LANES), f32_load(scores + 3 * LANES)));
        }
        f32_store_largest(scratch->peaks + query, four);
    }
    for (int query = begin; query < end; query += LANES)
        f32_store_some(lanes_first(end - query), scratch->peaks + query, f32_mul(f32_load(scratch->peaks + query), factor));
}

/* The scores of one query, times `factor`, become weights of the largest so far, times `scales` (NULL: 1); its sums are
 * scaled to that. */
RZ_INLINE void weigh_scores(const rz_attention_shape *shape, float factor, const float *scales, rz_attention_memory *scratch,
                            int query, const int used, const int few)
{
    float *scores = scratch->scores[query];
    const f32 base = f32_set1(scratch->largest[query]), times = f32_set1(factor);
    f32 total = f32_zero();
#pragma GCC unroll 2
    for (int key = 0; key < used; key += 2 * LANES) {
        f32 shares[2];
#pragma GCC unroll 2
        for (int i = 0; i < 2; i++) {
            shares[i] = f32_zero();
            if (used == LANES && i)
                break;
            const f32 score = f32_rounded(f32_mul(f32_load(scores + key + i * LANES), times)); /* as scale_scores has it */
            const f32 weight = exp2_nonpositive_f32(f32_sub(score, base));
            total = f32_add(total, weight);
            shares[i] = scales ? f32_mul(weight, f32_load(scales + key + i * LANES)) : weight;
        }
        if (few) {
            f32_store(scores + key, f32_as_bf16(shares[0]));
            f32_store(scores + key + LANES, f32_as_bf16(shares[1]));
        } else {
            f32_store_two_operands(scratch->weights[query] + key, shares[0], shares[1]);
        }
    }
    const float keep = scratch->keep[query];
    float *sums = scratch->sums + query * rz_sum_width(shape);
    for (int i = 0; keep != 1.0f && i < shape->value_dim; i += LANES)
        f32_store(sums + i, f32_mul(f32_load(sums + i), f32_set1(keep)));
    scratch->total[query] = scratch->total[query] * keep + f32_sum(total);
}

_Static_assert(2 * KEYS <= PLANES_OF_ROUND, "a round has room for its planes");
_Static_assert(KEYS == 2 * PANEL, "a round's keys are one panel or two");

/* Rows of a part that read alike the keys of a round, [first, first + count): for each of some of its KV heads. */
typedef struct {
    const rz_attention_shape *shape;
    const rz_cache *cache;
    const row_run *run;
    int first, count, used; /* used: LANES, PANEL or KEYS */
    int queries, few;       /* of a KV head; whether they are few */
} key_round;

/* The first query of a KV head in the round. */
RZ_INLINE int first_in_round(const key_round *round, const head_part *head)
{
    return head->first_query + round->run->first * head->part.heads;
}

/* Scores of a KV head's queries in the round become weights. `scales`: of values; or NULL. */
static void soften(const key_round *round, const head_part *head, float factor, const float *scales,
                   rz_attention_memory *scratch)
{
    const int begin = first_in_round(round, head), end = begin + round->queries;
    for (int query = begin; query < end; query++)
        if (round->few)
            weigh_scores(round->shape, factor, scales, scratch, query, round->used, 1);
        else if (round->used == LANES)
            weigh_scores(round->shape, factor, scales, scratch, query, LANES, 0);
        else if (round->used == PANEL)
            weigh_scores(round->shape, factor, scales, scratch, query, PANEL, 0);
        else if (scales)
            weigh_scores(round->shape, factor, scales, scratch, query, KEYS, 0);
        else
            weigh_scores(round->shape, factor, NULL, scratch, query, KEYS, 0);
}

/* The sum of weights with that of a head's sink. */
RZ_INLINE float with_sink(float total, float largest, const float *sink)
{
    return sink ? total + exp2f(*sink - largest) : total;
}

static void finish(const rz_attention_shape *shape, const head_part *head, const rz_attention_memory *memory)
{
    const rz_attention_part *part = &head->part;
    const int d = shape->value_dim;
    for (int query = 0; query < part->rows * part->heads; query++) {
        const int at = head->first_query + query;
        const float *sums = memory->sums + at * rz_sum_width(shape);
        if (part->partial) {
            float *to = part->partial + (long)query * (d + 2);
            memcpy(to, sums, (size_t)d * sizeof(float));
            to[d] = memory->largest[at];
            to[d + 1] = memory->total[at];
            continue;
        }
        bf16 *out = part->out + query / part->heads * part->out_stride + query % part->heads * d;
        const float *sink = shape->sinks ? shape->sinks + part->first_head + query % part->heads : NULL;
        const float total = with_sink(memory->total[at], memory->largest[at], sink);
        f32 share = f32_set1(total > 0 ? 1.0f / total : 0.0f);
        for (int i = 0; i < d; i += LANES)
            f32_store_bf16(out + i, f32_mul(f32_load(sums + i), share));
    }
}

/* Scores of a KV head's queries in the round; `rows`: where its keys are found. Returns whether these have scales. */
static int score_keys(const key_round *round, const head_part *head, int which, const bf16 **rows,
                      rz_attention_memory *scratch, rz_upcoming *ahead)
{
    const rz_attention_part *part = &head->part;
    const int d = round->shape->key_dim, begin = first_in_round(round, head);
    const int scaled = find_rows(round->shape, round->cache, part, round->run, round->first, round->count, 0, scratch,
                                 scratch->scales[which][0], rows);
    if (rz_scores_few(part->rows * part->heads)) {
        rz_score_few(scratch->columns[which], round->run->first * part->heads, round->queries, rows, round->count, d,
                     scratch->scores[begin], scratch, ahead);
        return scaled;
    }
    const int panels = (round->used + PANEL - 1) / PANEL;
    pack_keys(d, panels, round->count, rows, scratch, ahead);
    rz_tiles(round->queries, scratch->queries + begin * d, d, scratch->keys, panels, (long)PANEL * d, d / 2,
             scratch->scores[begin], KEYS, 0);
    return scaled;
}

/* Whether all rows of a round see all KEYS keys. */
static int sees_all(const key_round *round, const head_part *head)
{
    const int window = round->shape->window, oldest = head->part.position + round->run->first - round->first;
    const int newest = head->part.position + round->run->end - 1 - round->first;
    return round->count == KEYS && oldest >= KEYS - 1 && (!window || newest < window);
}

/* The largest scores of a KV head's queries, with those of this round. Returns what scores are still to be multiplied with. */
static float raise_scores(const key_round *round, const head_part *head, int scaled, const float *scales,
                          rz_attention_memory *scratch)
{
    const rz_attention_shape *shape = round->shape;
    const int begin = first_in_round(round, head), end = begin + round->queries;
    if (!scaled && shape->soft_cap <= 0 && shape->scale > 0 && sees_all(round, head)) {
        find_peaks(shape, scratch, begin, end);
        raise_largest(scratch, begin, end);
        return factor_of(shape);
    }
    for (int query = begin; query < end; query++) {
        const int newest = head->part.position + row_of(head, query) - round->first;
        scale_scores(shape, scales, scratch, query, shape->window ? newest - shape->window + 1 : 0, newest, round->used);
    }
    raise_largest(scratch, begin, end);
    return 1.0f;
}

/* Weights of a KV head's queries, times values, are added to their sums. */
static void add_values(const key_round *round, const head_part *head, const bf16 *const *rows, rz_attention_memory *scratch,
                       rz_upcoming *ahead)
{
    const rz_attention_shape *shape = round->shape;
    const int begin = first_in_round(round, head), width = rz_sum_width(shape);
    float *sums = scratch->sums + begin * width;
    if (round->few) {
        rz_add_few(scratch->scores[begin], round->queries, rows, round->count, shape->value_dim, sums, width, ahead);
        return;
    }
    pack_values(shape->value_dim, round->used, rows, scratch, ahead);
    rz_tiles(round->queries, scratch->weights[begin], KEYS, scratch->values, shape->value_dim / PANEL, PANEL * KEYS,
             round->used / 2, sums, width, 1);
}

/* Where the values of a KV head are in the round; keys were found last. Returns their scales; NULL: they have none. */
static const float *find_values(const key_round *round, const head_part *head, int which, int scaled, const bf16 **rows,
                                rz_attention_memory *scratch)
{
    float *scales = scratch->scales[which][1];
    if (round->shape->lines == 2)
        scaled = find_rows(round->shape, round->cache, &head->part, round->run, round->first, round->count, 1, scratch, scales,
                           rows);
    else
        memcpy(scales, scratch->scales[which][0], sizeof scratch->scales[which][0]);
    return scaled || round->count < KEYS ? scales : NULL;
}

/* A round of the KV heads [from, end), step by step: what one waits for, another does not. */
static void attend_round(const key_round *round, const head_part *heads, int from, int end, rz_attention_memory *scratch,
                         rz_upcoming *ahead)
{
    const bf16 *rows[KEYS];
    int scaled[MOST_TOGETHER];
    float factors[MOST_TOGETHER];
    for (int i = from; i < end; i++)
        scaled[i] = score_keys(round, &heads[i], i, rows, scratch, ahead);
    for (int i = from; i < end; i++)
        factors[i] = raise_scores(round, &heads[i], scaled[i], scratch->scales[i][0], scratch);
    for (int i = from; i < end; i++) {
        const float *scales = find_values(round, &heads[i], i, scaled[i], rows, scratch);
        soften(round, &heads[i], factors[i], scales, scratch);
        add_values(round, &heads[i], rows, scratch, ahead);
    }
}

/* The queries of one KV head, and nothing that they have seen. */
static void begin_head(const rz_attention_shape *shape, const rz_cache *cache, const head_part *head, bf16 *columns,
                       rz_attention_memory *memory)
{
    const rz_attention_part *part = &head->part;
    const int d = shape->key_dim, width = rz_sum_width(shape), coded = codec_is_integer(cache->codec);
    if (rz_scores_few(part->rows * part->heads))
        rz_place_few(columns, part->queries, part->q_stride, part->rows, part->heads, d);
    for (int query = 0; query < part->rows * part->heads; query++) {
        const int at = head->first_query + query;
        const bf16 *from = part->queries + query / part->heads * part->q_stride + query % part->heads * d;
        widen(memory->queries + at * d, from, d);
        memset(memory->sums + at * width, 0, (size_t)width * sizeof(float));
        memory->turned[at] = (uint8_t)coded; /* zeros are so in any order */
        memory->largest[at] = -INFINITY;
        memory->total[at] = 0.0f;
        if (!coded)
            continue;
        const number_row numbers = rz_store_numbers(memory->numbers + at * 2 * d, d, from, d);
        memory->units[at] = numbers.unit;
        memory->surplus[at] = numbers.surplus;
    }
}

/* Tiles add the products of as many keys as a panel has anyway. */
RZ_INLINE int used_keys(int count)
{
    return count <= LANES && !rz_has_digit_tiles() ? LANES : count <= PANEL ? PANEL : KEYS;
}

/* The round of keys from `first` on, for the KV heads of a part. */
static void attend_heads(const rz_attention_shape *shape, const rz_cache *cache, const rz_attention_part *part,
                         const head_part *heads, int first, rz_attention_memory *memory, rz_upcoming *ahead)
{
    const int last = last_of(part), until = first + KEYS < last ? first + KEYS : last;
    const int together = shape->lines == 2 ? part->kv_heads : 1; /* one line is read once for both */
    row_run run = { 0, 0, -1, 0 };
    while (run.end < part->rows) {
        run = run_of(shape, cache, part, run.end, first);
        const int seen = part->position + run.end; /* the end of the keys that any of the rows sees */
        const int queries = (run.end - run.first) * part->heads, coded = coded_keys(shape, cache, part, &run, first);
        const int count = (seen < until ? seen : until) - first - coded;
        const key_round round = { shape, cache, &run, first + coded, count, used_keys(count), queries,
                                  ADDS_FEW && queries <= FEW_QUERIES };
        for (int i = 0; i < part->kv_heads; i++) {
            const int begin = first_in_round(&round, &heads[i]);
            if (coded)
                rz_attend_codes(shape, cache, &heads[i], begin, begin + queries, first, coded, memory, ahead);
            if (count > 0)
                rz_turn_sums(shape, memory, begin, begin + queries, 0);
        }
        for (int i = 0; i < part->kv_heads && count > 0; i += together)
            attend_round(&round, heads, i, i + together, memory, ahead);
    }
}

void rz_attend(const rz_attention_shape *shape, const rz_cache *cache, const rz_attention_part *part,
               const rz_attention_part *next, void *scratch)
{
    rz_attention_memory *memory = scratch;
    const int queries = part->rows * part->heads;
    head_part heads[MOST_TOGETHER];
    for (int i = 0; i < part->kv_heads; i++) {
        heads[i] = (head_part){ rz_part_of_head(shape, part, i), i * queries };
        begin_head(shape, cache, &heads[i], memory->columns[i], memory);
    }
    memset(memory->zeros, 0, (size_t)shape->key_dim * sizeof(bf16));
    int first = first_of(shape, part);
    const int last = last_of(part);
    rz_upcoming ahead;
    look_ahead(shape, cache, part, first, last, &ahead);
    while (ahead.next < ahead.count)
        pull(&ahead, 16);
    for (; first < last; first += KEYS) {
        const int coming = first + ROUNDS_AHEAD * KEYS;
        if (coming < last)
            look_ahead(shape, cache, part, coming, last, &ahead);
        else if (next)
            look_ahead(shape, cache, next, first_of(shape, next) + (coming - last) / KEYS * KEYS, last_of(next), &ahead);
        attend_heads(shape, cache, part, heads, first, memory, &ahead);
    }
    rz_turn_sums(shape, memory, 0, part->kv_heads * queries, 0);
    for (int i = 0; i < part->kv_heads; i++)
        finish(shape, &heads[i], memory);
}

void rz_merge(const float *partial, int parts, long stride, int value_dim, const float *sink, bf16 *out)
{
    float largest = -INFINITY, total = 0.0f;
    for (int part = 0; part < parts; part++)
        largest = fmaxf(largest, partial[part * stride + value_dim]);
    for (int i = 0; i < value_dim; i += LANES) {
        f32 sum = f32_zero();
        total = 0.0f;
        for (int part = 0; part < parts; part++) {
            const float *from = partial + part * stride;
            float weight = from[value_dim] == -INFINITY ? 0.0f : exp2f(from[value_dim] - largest);
            sum = f32_fma(f32_load(from + i), f32_set1(weight), sum);
            total += from[value_dim + 1] * weight;
        }
        total = with_sink(total, largest, sink);
        f32_store_bf16(out + i, f32_mul(sum, f32_set1(total > 0 ? 1.0f / total : 0.0f)));
    }
}
