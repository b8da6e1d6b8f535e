/* See adapters.h. */
#include "adapters.h"

#include <sched.h>
#include <stdlib.h>

#include "gemm.h"

enum {
    SHRUNK_AT_ONCE = VECTORS / 8, /* rows whose sums are in registers */
    CHAINS = 4,                   /* sums of one value, added up in the end: products need not wait for each other */
    BLOCK_PAIR = 2 * LANES,       /* bf16 of a pair of inputs of a block */
    WIDES = LANES / WIDTH,
    WIDENED_PAIRS = 64,           /* as in gemm.c */
    SHRINK_AHEAD = 16 * BLOCK_PAIR,
    ROWS_OF_SHRINK = 96,
    SPINS_FOR_SHRINKS = 1 << 10,
    DUE_APART = 8,                /* counts of threads are in cache lines of their own */
};

/* --- shrink ------------------------------------------------------------------------------------------ */

/* Sums [CHAINS][LANES] of each row by some pairs of one block. */
RZ_INLINE void shrink_pairs(const int rows, const operand *const *x, const bf16 *a, long pairs, float *sums, int add)
{
    wide held[SHRUNK_AT_ONCE][CHAINS][WIDES];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDES; v++)
                held[row][chain][v] = add ? wide_load(sums + (row * CHAINS + chain) * LANES + v * WIDTH) : wide_zero();
    for (long pair = 0; pair < pairs; pair += CHAINS) {
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++) {
            if (pair + chain >= pairs)
                continue;
            __builtin_prefetch(a + SHRINK_AHEAD);
#pragma GCC unroll 2
            for (int turn = 0; turn < TURNS; turn++) {
                wide weights[WIDES];
#pragma GCC unroll 4
                for (int v = 0; v < WIDES; v++)
                    weights[v] = weights_of(a + v * 2 * WIDTH, turn);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    wide one = operand_of(x[row] + 2 * (pair + chain), turn);
#pragma GCC unroll 4
                    for (int v = 0; v < WIDES; v++)
                        held[row][chain][v] = multiply_add(held[row][chain][v], one, weights[v]);
                }
            }
            a += BLOCK_PAIR;
        }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 4
        for (int chain = 0; chain < CHAINS; chain++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDES; v++)
                wide_store(sums + (row * CHAINS + chain) * LANES + v * WIDTH, held[row][chain][v]);
}

typedef void (*shrink_function)(const operand *const *, const bf16 *, long, float *, int);

#define SHRINK_OF(n) \
    static __attribute__((noinline)) void shrink_##n(const operand *const *x, const bf16 *a, long pairs, float *sums, int add) \
    { \
        shrink_pairs(n, x, a, pairs, sums, add); \
    }

SHRINK_OF(1)
#if VECTORS >= 32
SHRINK_OF(2) SHRINK_OF(3) SHRINK_OF(4)
#endif

static const shrink_function SHRINKS[SHRUNK_AT_ONCE + 1] = {
    NULL, shrink_1,
#if VECTORS >= 32
    shrink_2, shrink_3, shrink_4,
#endif
};

/* As the other product reads it. */
RZ_INLINE void store_operands(operand *to, f32 value)
{
    bf16 rounded_values[LANES];
    f32_store_bf16(rounded_values, value);
    for (int i = 0; i < LANES; i++)
        to[i] = TURNS == 1 ? (operand)rounded_values[i] : (operand)bf16_to_float(rounded_values[i]);
}

/* `rows` <= SHRUNK_AT_ONCE rows by one block of 16 columns. */
static void shrink_block(int rows, const bf16 *const *x, const bf16 *a, long pairs, operand *const *to)
{
    float sums[SHRUNK_AT_ONCE * CHAINS * LANES] __attribute__((aligned(64)));
    if (TURNS == 1) {
        SHRINKS[rows]((const operand *const *)x, a, pairs, sums, 0);
    } else {
        operand inputs[SHRUNK_AT_ONCE][2 * WIDENED_PAIRS];
        const operand *from[SHRUNK_AT_ONCE];
        for (long pair = 0; pair < pairs; pair += WIDENED_PAIRS) {
            const long here = least(WIDENED_PAIRS, pairs - pair);
            for (int row = 0; row < rows; row++) {
                from[row] = inputs[row];
                for (long i = 0; i < 2 * here; i++)
                    inputs[row][i] = (operand)bf16_to_float(x[row][2 * pair + i]);
            }
            SHRINKS[rows](from, a + pair * BLOCK_PAIR, here, sums, pair > 0);
        }
    }
    for (int row = 0; row < rows; row++) {
        const float *own = sums + row * CHAINS * LANES;
        const f32 first = f32_add(f32_load(own), f32_load(own + LANES));
        const f32 second = f32_add(f32_load(own + 2 * LANES), f32_load(own + 3 * LANES));
        store_operands(to[row], f32_add(first, second));
    }
}

/* Some rows of one adapter by its blocks [block, end); `rows`: of the product, `from`: of x. */
static void shrink_some(const rz_expansion *of, const rz_low_rank *low, int count, const long *rows, const long *from,
                        long block_first, long block_end)
{
    const long pairs = (of->inputs + 1) / 2;
    const bf16 *x[SHRUNK_AT_ONCE], *a = low->shrink;
    operand *to[SHRUNK_AT_ONCE];
    for (long column = block_first; column < block_end; column++) {
        for (int i = 0; i < count; i++) {
            x[i] = of->x + from[i] * of->x_stride;
            to[i] = of->shrunk + rows[i] * of->stride + column * LANES;
        }
        shrink_block(count, x, a + column * pairs * BLOCK_PAIR, pairs, to);
    }
}

/* What the adapter in `slot` adds to the linear; NULL: nothing. */
RZ_INLINE const rz_low_rank *low_rank_of(const rz_expansion *of, long slot)
{
    const rz_low_rank *found = of->adapted->slots[slot];
    return found && found[of->copy].columns ? found + of->copy : NULL;
}

static long pieces_of_group(const rz_slot_rows *group)
{
    return (group->rows + ROWS_OF_SHRINK - 1) / ROWS_OF_SHRINK;
}

static long shrinks_of_group(const rz_expansion *of, const rz_slot_rows *group)
{
    const rz_low_rank *low = low_rank_of(of, group->slot);
    return low ? pieces_of_group(group) * (low->columns / LANES) : 0;
}

long rz_shrinks(rz_decoder *decoder, int thread, rz_expansion *to)
{
    long count = 0;
    for (long i = 0; i < to->rows->count; i++)
        count += shrinks_of_group(to, to->rows->groups + i);
    long *due = decoder->shrinks_due + (long)thread * DUE_APART;
    to->done = &decoder->shrinks_done;
    to->due = *due += count;
    return count;
}

/* A piece of one group's rows by one block of its adapter's columns. */
void rz_shrink(const rz_expansion *of, long task)
{
    const rz_slot_rows *group = of->rows->groups;
    for (long here; task >= (here = shrinks_of_group(of, group)); group++)
        task -= here;
    const rz_low_rank *low = low_rank_of(of, group->slot);
    const long blocks_here = low->columns / LANES, column = task % blocks_here;
    const long begin = group->first + task / blocks_here * ROWS_OF_SHRINK;
    const long end = least(begin + ROWS_OF_SHRINK, group->first + group->rows);
    for (long row = begin; row < end; row += SHRUNK_AT_ONCE) {
        const int count = (int)least(SHRUNK_AT_ONCE, end - row);
        long rows[SHRUNK_AT_ONCE];
        for (int i = 0; i < count; i++)
            rows[i] = of->rows->order[row + i];
        shrink_some(of, low, count, rows, rows, column, column + 1);
    }
    atomic_fetch_add_explicit(of->done, 1, memory_order_release);
}

RZ_INLINE long slot_of(const rz_expansion *of, long row)
{
    return of->rows->slots[of->tokens ? of->tokens[row] : row];
}

/* Rows from `row` on, before `end`, that have the same adapter: at most as many as registers have room for. */
RZ_INLINE int same_adapter(const rz_expansion *of, long row, long end, long slot)
{
    int count = 1;
    while (count < SHRUNK_AT_ONCE && row + count < end && slot_of(of, row + count) == slot)
        count++;
    return count;
}

void rz_shrink_rows(const rz_expansion *of, long first, long rows, const int32_t *from)
{
    int count;
    for (long row = first, end = first + rows; row < end; row += count) {
        const long slot = slot_of(of, row);
        count = same_adapter(of, row, end, slot);
        const rz_low_rank *low = slot < 0 ? NULL : low_rank_of(of, slot);
        if (!low)
            continue;
        long to[SHRUNK_AT_ONCE], read[SHRUNK_AT_ONCE];
        for (int i = 0; i < count; i++) {
            to[i] = row + i;
            read[i] = from ? from[row + i] : row + i;
        }
        shrink_some(of, low, count, to, read, 0, low->columns / LANES);
    }
}

/* --- expand ------------------------------------------------------------------------------------------ */

/* Blocks of one or two times 16 outputs, of as many pairs each; `ahead`: those that come, or readable addresses. */
typedef struct {
    const operand *x[2];  /* of the first row; rows are `stride` apart */
    const bf16 *b[2];
    const char *ahead[2];
    float *sums[2];       /* likewise; rows are PANEL apart */
    long stride, pairs;
} expansion_blocks;

RZ_INLINE void expand_pairs(const int rows, const int halves, const expansion_blocks *at)
{
    wide held[SHRUNK_AT_ONCE][2][WIDES];
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDES; v++)
                held[row][half][v] = wide_load(at->sums[half] + row * PANEL + v * WIDTH);
    for (long pair = 0; pair < at->pairs; pair++) {
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
            __builtin_prefetch(at->ahead[half] + pair * BLOCK_PAIR * (long)sizeof(bf16));
#pragma GCC unroll 2
        for (int turn = 0; turn < TURNS; turn++)
#pragma GCC unroll 2
            for (int half = 0; half < halves; half++) {
                wide weights[WIDES];
#pragma GCC unroll 4
                for (int v = 0; v < WIDES; v++)
                    weights[v] = weights_of(at->b[half] + pair * BLOCK_PAIR + v * 2 * WIDTH, turn);
#pragma GCC unroll 4
                for (int row = 0; row < rows; row++) {
                    wide one = operand_of(at->x[half] + row * at->stride + 2 * pair, turn);
#pragma GCC unroll 4
                    for (int v = 0; v < WIDES; v++)
                        held[row][half][v] = multiply_add(held[row][half][v], one, weights[v]);
                }
            }
    }
#pragma GCC unroll 4
    for (int row = 0; row < rows; row++)
#pragma GCC unroll 2
        for (int half = 0; half < halves; half++)
#pragma GCC unroll 4
            for (int v = 0; v < WIDES; v++)
                wide_store(at->sums[half] + row * PANEL + v * WIDTH, held[row][half][v]);
}

typedef void (*expand_function)(const expansion_blocks *);

#define EXPAND_OF(n) \
    static __attribute__((noinline)) void expand_##n##_1(const expansion_blocks *at) { expand_pairs(n, 1, at); } \
    static __attribute__((noinline)) void expand_##n##_2(const expansion_blocks *at) { expand_pairs(n, 2, at); }

EXPAND_OF(1)
#if VECTORS >= 32
EXPAND_OF(2) EXPAND_OF(3) EXPAND_OF(4)
#endif

static const expand_function EXPANDS[SHRUNK_AT_ONCE + 1][2] = {
    { NULL, NULL }, { expand_1_1, expand_1_2 },
#if VECTORS >= 32
    { expand_2_1, expand_2_2 }, { expand_3_1, expand_3_2 }, { expand_4_1, expand_4_2 },
#endif
};

/* B of an entry's block; NULL: the adapter adds nothing to its module. */
RZ_INLINE const bf16 *block_of(const rz_low_rank *low, const rz_adapted_block *entry)
{
    const long pairs = low->pairs[entry->module];
    return pairs ? (const bf16 *)low->expand[entry->module] + entry->block * pairs * BLOCK_PAIR : NULL;
}

/* Some rows of one adapter by the entries of one panel's halves: at `entry`, and what comes at `coming`, or NULL. */
static void expand_entries(const rz_expansion *of, const rz_low_rank *low, long row, int count, const int *at_half,
                           const rz_adapted_block *const *entry, const rz_adapted_block *const *coming, int entries,
                           float *sums)
{
    expansion_blocks blocks_at = { .stride = of->stride };
    int there = 0;
    for (int i = 0; i < entries; i++) {
        const bf16 *b = block_of(low, entry[i]);
        if (!b)
            continue;
        const long pairs = low->pairs[entry[i]->module];
        if (there && pairs != blocks_at.pairs) { /* of another rank */
            EXPANDS[count][there - 1](&blocks_at);
            there = 0;
        }
        const bf16 *next = coming[i] ? block_of(low, coming[i]) : NULL;
        blocks_at.x[there] = of->shrunk + row * of->stride + low->first[entry[i]->module];
        blocks_at.b[there] = b;
        blocks_at.ahead[there] = (const char *)(next ? next : b);
        blocks_at.sums[there] = sums + at_half[i] * LANES;
        blocks_at.pairs = pairs;
        there++;
    }
    if (there)
        EXPANDS[count][there - 1](&blocks_at);
}

static void await_shrinks(const rz_expansion *of)
{
    for (int spins = 0; atomic_load_explicit(of->done, memory_order_acquire) < of->due; spins++)
        if (spins >= SPINS_FOR_SHRINKS)
            sched_yield();
}

/* All rows by some entries of a panel, at most one of each half. */
static void expand_panel(const rz_expansion *of, long first, long rows, const int *at_half,
                         const rz_adapted_block *const *entry, const rz_adapted_block *const *coming, int entries, float *sums)
{
    int count;
    for (long row = first, end = first + rows; row < end; row += count) {
        const long slot = slot_of(of, row);
        count = same_adapter(of, row, end, slot);
        const rz_low_rank *low = slot < 0 ? NULL : low_rank_of(of, slot);
        if (low)
            expand_entries(of, low, row, count, at_half, entry, coming, entries, sums + (row - first) * PANEL);
    }
}

void rz_expand(const rz_expansion *of, long first, long rows, long column, long coming, float *sums)
{
    const rz_adapted *adapted = of->adapted;
    const int32_t *begin = adapted->first + (column - of->origin) / LANES;
    const int is_here = coming >= of->origin && coming < of->origin + of->outputs;
    const int32_t *next = is_here ? adapted->first + (coming - of->origin) / LANES : NULL;
    const rz_adapted_block *entry[2], *then[2];
    int at_half[2], entries = 0;
    if (of->done)
        await_shrinks(of);
    for (int half = 0; half < 2; half++)
        for (long i = begin[half]; i < begin[half + 1]; i++) {
            if (entries == 2 || (entries && at_half[entries - 1] == half)) { /* two modules meet in it: one by one */
                expand_panel(of, first, rows, at_half, entry, then, entries, sums);
                entries = 0;
            }
            at_half[entries] = half;
            entry[entries] = adapted->blocks + i;
            then[entries++] = next && next[half] < next[half + 1] ? adapted->blocks + next[half] : NULL;
        }
    if (entries)
        expand_panel(of, first, rows, at_half, entry, then, entries, sums);
}

/* --- a step's rows ----------------------------------------------------------------------------------- */

rz_expansion rz_expansion_of(rz_decoder *decoder, const rz_linear *linear, const bf16 *x, long x_stride)
{
    return (rz_expansion){ .adapted = linear->adapted, .rows = decoder->adapter_rows, .shrunk = decoder->shrunk,
                           .stride = decoder->shrunk_stride, .x = x, .x_stride = x_stride, .inputs = linear->inputs };
}

static int reserve_rows(rz_adapter_rows *rows, long tokens, long slots)
{
    const long needed = 2 * tokens + slots;
    if (needed <= rows->room)
        return 1;
    free(rows->slots);
    free(rows->groups);
    rows->slots = malloc((size_t)needed * 2 * sizeof *rows->slots);
    rows->groups = malloc((size_t)needed * 2 * sizeof *rows->groups);
    rows->room = rows->slots && rows->groups ? needed * 2 : 0;
    return rows->room > 0;
}

/* The rows of `step`, whose sequences have the adapters in these slots, by adapter; those of one in their order. */
static void group_rows(rz_adapter_rows *rows, const rz_step *step, const int32_t *adapters)
{
    int32_t *ends;
    long token = 0, done = 0;
    rows->order = rows->slots + step->tokens;
    ends = rows->order + step->tokens;
    memset(ends, 0, (size_t)step->adapter_slots * sizeof *ends);
    for (int i = 0; i < step->sequences; i++)
        for (int j = 0; j < step->query_lens[i]; j++, token++) {
            rows->slots[token] = adapters[i];
            if (adapters[i] >= 0)
                ends[adapters[i]]++;
        }
    rows->count = 0;
    for (long slot = 0; slot < step->adapter_slots; slot++) {
        if (!ends[slot])
            continue;
        rows->groups[rows->count++] = (rz_slot_rows){ slot, done, ends[slot] };
        done += ends[slot];
        ends[slot] = (int32_t)(done - ends[slot]);
    }
    for (token = 0; token < step->tokens; token++)
        if (rows->slots[token] >= 0)
            rows->order[ends[rows->slots[token]]++] = (int32_t)token;
}

/* Each row that the tail keeps has the adapter of its sequence. */
static int group_tail(rz_decoder *decoder, const rz_step *step)
{
    rz_tail *tail = &decoder->tail;
    const int32_t *slots = decoder->whole_rows.slots;
    if (!tail->there)
        return 1;
    if (!reserve_rows(&tail->adapter_rows, 2L * step->sampled, (long)step->adapter_slots))
        return 0;
    /* Behind what group_rows fills. */
    int32_t *own = tail->adapter_rows.slots + 2L * step->sampled + step->adapter_slots;
    for (int i = 0; i < step->sampled; i++)
        own[i] = slots[step->sample_rows[i]];
    group_rows(&tail->adapter_rows, &tail->step, own);
    return 1;
}

/* Products of the widest kind: a token goes to so many experts, or has so many heads. */
static long shrunk_rows_of_token(const rz_decoder *decoder)
{
    const rz_model *model = &decoder->model;
    long most = decoder->space.routing.most_chosen;
    for (int i = 0; i < model->num_heads; i++)
        if (model->heads[i].lines == 1 && model->heads[i].q_heads > most)
            most = model->heads[i].q_heads;
    return most > 1 ? most : 1;
}

int rz_plan_adapters(rz_decoder *decoder, const rz_step *step)
{
    decoder->adapter_rows = NULL;
    if (!step->num_adapters)
        return 1;
    if (!reserve_rows(&decoder->whole_rows, step->tokens, (long)step->adapter_slots))
        return 0;
    group_rows(&decoder->whole_rows, step, step->adapters);
    if (!group_tail(decoder, step))
        return 0;
    const size_t row = (size_t)step->shrunk_columns * sizeof(operand);
    const size_t needed = row * (size_t)(step->tokens * shrunk_rows_of_token(decoder));
    if (needed > decoder->shrunk_room) {
        free(decoder->shrunk);
        decoder->shrunk = malloc(needed * 2);
        decoder->shrunk_room = decoder->shrunk ? needed * 2 : 0;
        if (!decoder->shrunk)
            return 0;
    }
    const int threads = rz_threads_count(decoder->threads);
    if (!decoder->shrinks_due)
        decoder->shrinks_due = malloc((size_t)threads * DUE_APART * sizeof *decoder->shrinks_due);
    if (!decoder->shrinks_due)
        return 0;
    memset(decoder->shrinks_due, 0, (size_t)threads * DUE_APART * sizeof *decoder->shrinks_due);
    atomic_store(&decoder->shrinks_done, 0);
    decoder->shrunk_stride = (long)step->shrunk_columns;
    decoder->adapter_rows = &decoder->whole_rows;
    return 1;
}

static void free_rows(rz_adapter_rows *rows)
{
    free(rows->slots);
    free(rows->groups);
}

void rz_free_adapters(rz_decoder *decoder)
{
    free_rows(&decoder->whole_rows);
    free_rows(&decoder->tail.adapter_rows);
    free(decoder->shrunk);
    free(decoder->shrinks_due);
}
