/* Rounds of keys that are all kept as codes of int8: see attention.h.
 *
 * NUMBERS_AT_ONCE queries at a time. While vectors make weights of their scores, tiles multiply what was there before:
 *
 *     keys with the next queries │ weights of these queries │ values with the weights of the last ones
 *     ...........................│..........................│.........................................  then their sums
 *
 * in quarters between the queries. What waits for a tile waits where vectors' work does, and all of a product would
 * fill that up.
 */
#include "attention_scratch.h"

#include <math.h>
#include <string.h>

enum { GROUPS = KEYS / LANES };

/* The codes of a round's keys or values. */
typedef struct {
    const int8_t *groups[GROUPS]; /* each of LANES lines that follow each other */
    float scales[KEYS];           /* behind the last one zeros */
    float largest; /* of the scales */
    float nothing; /* 0; NaN where a scale is no finite number */
} coded_lines;

/* `here` lines from `codes` on, which lie together: groups of them are read where they are, others are copied to `copies`
 * [KEYS][d]. */
static void place_lines(coded_lines *lines, int key, int here, const int8_t *codes, long d, float scale, int8_t *copies)
{
    lines->largest = scale > lines->largest ? scale : lines->largest;
    lines->nothing += 0.0f * scale;
    for (; here >= LANES && key % LANES == 0; key += LANES, here -= LANES, codes += LANES * d) {
        lines->groups[key / LANES] = codes;
        f32_store(lines->scales + key, f32_set1(scale));
    }
    if (!here)
        return;
    memcpy(copies + key * d, codes, (size_t)(here * d));
    for (int i = key; i < key + here; i++) {
        lines->groups[i / LANES] = copies + i / LANES * LANES * d;
        lines->scales[i] = scale;
    }
}

/* Where `count` keys from `first` on are, which are all kept as codes, and their values, or what is both: `lines`. */
static void find_codes(const rz_attention_shape *shape, const rz_cache *cache, const rz_attention_part *part, int first,
                       int count, rz_attention_memory *memory, coded_lines *lines)
{
    const int size = shape->block_size, planes = shape->lines * shape->kv_heads;
    const long d = shape->key_dim;
    const int32_t *table = part->table + first / size;
    int offset = first % size;
    for (int which = 0; which < shape->lines; which++) {
        lines[which].largest = lines[which].nothing = 0.0f;
        for (int group = (count - 1) / LANES; group < GROUPS; group++)
            f32_store(lines[which].scales + group * LANES, f32_zero());
    }
    for (int key = 0; key < count; table++, offset = 0) {
        const int here = size - offset < count - key ? size - offset : count - key;
        long plane = (*table - cache->num_writable) * planes + part->kv_head;
        for (int which = 0; which < shape->lines; which++, plane += shape->kv_heads)
            place_lines(&lines[which], key, here, (const int8_t *)cache->codes + (plane * size + offset) * d, d,
                        cache->scales[plane], (int8_t *)memory->decoded[which]);
        key += here;
    }
}

/* What of a round is multiplied, and where: groups of its keys, as columns, and of its values, as lines. */
typedef struct {
    const int8_t *keys[QUARTERS], *values[QUARTERS];
    long values_ahead; /* from COLUMNS values of a group to the next */
    int count;         /* behind the last one the first stands again */
} round_groups;

_Static_assert((int)GROUPS == (int)QUARTERS, "a round's keys are the columns of a product");

/* Values as the cache keeps them, side by side. */
static void gather_values(const rz_attention_shape *shape, const coded_lines *values, int count, int8_t *packed)
{
    for (int column = 0; column < shape->value_dim; column += COLUMNS, packed += GROUPS * GROUP_COLUMNS)
        for (int group = 0; group < count; group++)
            memcpy(packed + group * GROUP_COLUMNS, values->groups[group] + column * LANES, GROUP_COLUMNS);
}

static void pack_values_of(const rz_attention_shape *shape, const coded_lines *values, int count, int8_t *packed,
                           rz_upcoming *ahead)
{
    for (int column = 0; column < shape->value_dim; column += COLUMNS, packed += GROUPS * GROUP_COLUMNS)
        for (int group = 0; group < count; group++) {
            pull(ahead, 16);
            rz_pack_as_lines(packed + group * GROUP_COLUMNS, values->groups[group], column, shape->value_dim);
        }
}

/* Finds a round's groups, or packs what is no group in the cache. */
static void find_groups(const rz_attention_shape *shape, const rz_cache *cache, const coded_lines *keys,
                        const coded_lines *values, rz_attention_memory *memory, rz_upcoming *ahead, round_groups *found)
{
    const int d = shape->key_dim, padded = (d + COLUMNS - 1) / COLUMNS * COLUMNS;
    const int copied = !cache->in_groups || rz_has_digit_tiles();
    for (int group = 0; group < found->count; group++) {
        found->keys[group] = keys->groups[group];
        found->values[group] = copied ? memory->packed_values + group * GROUP_COLUMNS : values->groups[group];
        if (!cache->in_groups) {
            int8_t *packed = memory->packed_keys + (long)group * LANES * padded;
            for (int line = 0; line < d; line += COLUMNS)
                pull(ahead, 16);
            rz_pack_as_columns(packed, keys->groups[group], d);
            found->keys[group] = packed;
        }
    }
    for (int group = found->count; group < GROUPS; group++) {
        found->keys[group] = found->keys[0];
        found->values[group] = found->values[0];
    }
    found->values_ahead = copied ? GROUPS * GROUP_COLUMNS : GROUP_COLUMNS;
    if (!cache->in_groups)
        pack_values_of(shape, values, found->count, memory->packed_values, ahead);
    else if (copied)
        gather_values(shape, values, found->count, memory->packed_values);
}

/* Products of one query become scores of `count` keys, of which the first `unseen` have none. Returns the largest of
 * LANES. */
RZ_INLINE f32 scale_products(const rz_attention_shape *shape, const int count, const int32_t products[2][COLUMNS],
                             const float *scales, number_row query, int unseen, float *scores)
{
    static const int32_t numbers[LANES] = { 0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15 };
    const f32 factor = f32_set1(query.unit * shape->scale * LOG2_E), nothing = f32_set1(-INFINITY);
    const i32 surplus = i32_set1(query.surplus);
    f32 peak = nothing;
    for (int i = 0; i * LANES < count; i++) {
        const i32 product = i32_sub(digit_sum(products, i), surplus);
        f32 value = f32_mul(f32_mul(f32_from_i32(product), f32_load(scales + i * LANES)), factor);
        if (shape->soft_cap > 0) {
            const f32 capped = tanh_f32(f32_mul(value, f32_set1(1.0f / (LOG2_E * shape->soft_cap))));
            value = f32_mul(capped, f32_set1(shape->soft_cap * LOG2_E));
        }
        if (unseen > i * LANES)
            value = f32_select(i32_greater(i32_set1(unseen - i * LANES), i32_load(numbers)), nothing, value);
        if (count < (i + 1) * LANES)
            value = f32_select(i32_greater(i32_load(numbers), i32_set1(count - 1 - i * LANES)), nothing, value);
        f32_store(scores + i * LANES, value);
        peak = f32_max(peak, value);
    }
    return peak;
}

/* Scores of `count` keys become weights of the largest one, `peak`, as digits: times `shares` [KEYS]. Returns their sums of
 * LANES. */
RZ_INLINE f32 weigh_scores_as_digits(const float *scores, const int count, float peak, const float *shares,
                                     uint8_t digits[2][KEYS])
{
    const f32 base = f32_set1(peak);
    f32 total = f32_zero();
    i32 numbers[GROUPS];
#pragma GCC unroll 4
    for (int i = 0; i < GROUPS; i++) {
        numbers[i] = i32_set1(0);
        if (i * LANES >= count)
            continue;
        const f32 weight = exp2_nonpositive_f32(f32_sub(f32_load(scores + i * LANES), base));
        total = f32_add(total, weight);
        numbers[i] = i32_from_f32(f32_mul(weight, f32_load(shares + i * LANES)));
    }
    store_sevens(digits[0], digits[1], numbers);
    return total;
}

/* What is multiplied while weights are made. */
typedef struct {
    digit_product products[1 + MAX_VALUE_DIM / COLUMNS];
    int count, done; /* products; quarters of them */
    waiting_quarter last;
    rz_upcoming *ahead; /* what products ask for, or NULL */
} asked_products;

static void multiply_until(asked_products *asked, int quarters)
{
    for (; asked->done < quarters; asked->done++)
        rz_multiply_quarter(&asked->products[asked->done / QUARTERS], asked->done % QUARTERS, &asked->last);
}

/* Queries that are computed at once, and where. */
typedef struct {
    int query, count, turn;
} some_queries;

/* Those behind `end` are none. */
static some_queries queries_from(int query, int end, int turn)
{
    const int left = end - query;
    return (some_queries){ query, left < 0 ? 0 : left < NUMBERS_AT_ONCE ? left : NUMBERS_AT_ONCE, turn };
}

static void ask_for_keys(const rz_attention_shape *shape, const round_groups *groups, rz_attention_memory *memory,
                         const some_queries *queries, asked_products *asked)
{
    const int d = shape->key_dim;
    if (queries->count)
        asked->products[asked->count++] = (digit_product){
            queries->count, d / 4, memory->numbers + queries->query * 2 * d, d, groups->keys, groups->count, 0,
            &memory->products[queries->turn], asked->ahead };
}

static void ask_for_values(const rz_attention_shape *shape, const round_groups *groups, rz_attention_memory *memory,
                           const some_queries *queries, asked_products *asked)
{
    for (int i = 0; queries->count && i * COLUMNS < shape->value_dim; i++)
        asked->products[asked->count++] = (digit_product){
            queries->count, 0, memory->digits[queries->turn][0][0], KEYS, groups->values, groups->count,
            i * groups->values_ahead, &memory->gains[i], asked->ahead };
}

/* Products of some queries with `count` keys become weights, as digits. Where nothing was packed, what comes is asked for
 * here: `lines` twice for each query. */
RZ_INLINE void soften_products(const rz_attention_shape *shape, const head_part *head, int first, const int count,
                               const some_queries *queries, const float *scales, const float *shares,
                               rz_attention_memory *memory, rz_upcoming *ahead, int lines, asked_products *asked)
{
    const digit_sums *products = &memory->products[queries->turn];
    const int all = asked->count * QUARTERS;
    for (int at = 0; at < queries->count; at += AT_ONCE_REDUCED) {
        const int left = queries->count - at, here = left < AT_ONCE_REDUCED ? left : AT_ONCE_REDUCED;
        const int these = queries->query + at;
        f32 four[AT_ONCE_REDUCED];
        for (int i = 0; i < here; i++) {
            const int oldest = shape->window ? head->part.position + row_of(head, these + i) - shape->window + 1 - first : 0;
            const number_row query = { memory->units[these + i], memory->surplus[these + i] };
            four[i] = scale_products(shape, count, products->of[at + i], scales, query, oldest, memory->scores[at + i]);
            pull(ahead, lines);
        }
        for (int i = here; i < AT_ONCE_REDUCED; i++)
            four[i] = four[0];
        f32_store_largest(memory->peaks + these, four);
        for (int i = 0; i < here; i++) {
            four[i] = weigh_scores_as_digits(memory->scores[at + i], count, memory->peaks[these + i], shares,
                                             memory->digits[queries->turn][at + i]);
            pull(ahead, lines);
            multiply_until(asked, all * (at + i + 1) / NUMBERS_AT_ONCE);
        }
        f32_store_sums(memory->added + these, four);
    }
    multiply_until(asked, all);
    rz_end_quarters(&asked->last);
}

/* What the sums of some queries so far are kept with, and what a round's are added with, whose weights are of `unit`.
 * Where there was nothing to see, 2^NaN is 0. */
static void join_rounds(rz_attention_memory *memory, const some_queries *queries, float unit)
{
    const int query = queries->query;
    const lanes these = lanes_first(queries->count);
    const f32 before = f32_load(memory->largest + query), peak = f32_load(memory->peaks + query);
    const f32 now = f32_max(before, peak);
    const f32 keep = exp2_nonpositive_f32(f32_sub(before, now)), share = exp2_nonpositive_f32(f32_sub(peak, now));
    const f32 total = f32_fma(f32_load(memory->total + query), keep, f32_mul(f32_load(memory->added + query), share));
    const f32 nothing = f32_mul(f32_load(memory->units + query), f32_zero());
    f32_store_some(these, memory->largest + query, now);
    f32_store_some(these, memory->total + query, total);
    f32_store_some(these, memory->keep + query, keep);
    f32_store_some(these, memory->share_units + query, f32_fma(share, f32_set1(unit), nothing));
}

/* Adds what some queries' weights have gained of values. */
static void add_gains(const rz_attention_shape *shape, rz_attention_memory *memory, const some_queries *queries)
{
    const int width = rz_sum_width(shape);
    for (int row = 0; row < queries->count; row++) {
        const int query = queries->query + row;
        const f32 keep = f32_set1(memory->keep[query]), unit = f32_set1(memory->share_units[query]);
        float *sums = memory->sums + query * width;
        for (int column = 0; column < width; column += LANES) {
            const f32 gain = f32_from_i32(digit_sum(memory->gains[column / COLUMNS].of[row], column % COLUMNS / LANES));
            f32_store(sums + column, f32_fma(gain, unit, f32_mul(f32_load(sums + column), keep)));
        }
    }
}

void rz_attend_codes(const rz_attention_shape *shape, const rz_cache *cache, const head_part *head, int begin, int end,
                     int first, int count, rz_attention_memory *memory, rz_upcoming *ahead)
{
    coded_lines lines[2];
    find_codes(shape, cache, &head->part, first, count, memory, lines);
    const coded_lines *keys = &lines[0], *values = &lines[shape->lines - 1];
    const float unit = values->largest / LARGEST_NUMBER + keys->nothing + values->nothing;
    float shares[KEYS];
    for (int key = 0; key < KEYS; key += LANES)
        f32_store(shares + key, f32_mul(f32_load(values->scales + key), f32_set1(LARGEST_NUMBER / values->largest)));
    round_groups groups = { .count = (int)whole_parts(count, LANES) };
    find_groups(shape, cache, keys, values, memory, ahead, &groups);
    rz_turn_sums(shape, memory, begin, end, 1);
    /* Few queries take little time between their products: loads would wait for what is asked for there at once. */
    const int few = end - begin <= (rz_has_digit_tiles() ? NUMBERS_AT_ONCE : FEWEST_FOR_DIGIT_TILES - 1);
    /* Keys and values of a round are 2 * key_dim lines, which are asked for twice for each query. */
    const int coming_lines = cache->in_groups && !few ? (int)whole_parts(shape->key_dim, end - begin) : 0;
    some_queries last = { 0, 0, 0 }, these = queries_from(begin, end, 0);
    asked_products asked = { .ahead = cache->in_groups && few ? ahead : NULL };
    ask_for_keys(shape, &groups, memory, &these, &asked);
    multiply_until(&asked, QUARTERS);
    rz_end_quarters(&asked.last);
    while (these.count || last.count) {
        const some_queries coming = queries_from(these.query + NUMBERS_AT_ONCE, end, !these.turn);
        asked.count = asked.done = 0;
        ask_for_keys(shape, &groups, memory, &coming, &asked);
        ask_for_values(shape, &groups, memory, &last, &asked);
        if (count == KEYS) /* most: with loops of a known length */
            soften_products(shape, head, first, KEYS, &these, keys->scales, shares, memory, ahead, coming_lines, &asked);
        else
            soften_products(shape, head, first, count, &these, keys->scales, shares, memory, ahead, coming_lines, &asked);
        add_gains(shape, memory, &last);
        join_rounds(memory, &these, unit);
        last = these;
        these = coming;
    }
}

void rz_turn_sums(const rz_attention_shape *shape, rz_attention_memory *memory, int begin, int end, int turned)
{
    const int width = rz_sum_width(shape);
    for (int query = begin; query < end; query++) {
        if (memory->turned[query] == turned)
            continue;
        memory->turned[query] = (uint8_t)turned;
        for (float *sums = memory->sums + query * width; sums < memory->sums + (query + 1) * width; sums += COLUMNS) {
            f32 four[QUARTERS];
            for (int i = 0; i < QUARTERS; i++)
                four[i] = f32_load(sums + i * LANES);
            transpose_quarters(four);
            for (int i = 0; i < QUARTERS; i++)
                f32_store(sums + i * LANES, four[i]);
        }
    }
}
