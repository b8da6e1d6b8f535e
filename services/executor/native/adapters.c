/* See adapters.h. */
#include "adapters.h"

#include <sched.h>
#include <stdlib.h>

#include "gemm.h"
#include "low_rank.h"
#include "products.h"

enum {
    SPINS_FOR_SHRINKS = 1 << 10,
    DUE_APART = 8, /* counts of threads are in cache lines of their own */
};

/* --- shrink ------------------------------------------------------------------------------------------ */

/* Some rows of one adapter by its blocks [block, end); `rows`: of the product, `from`: of x. */
static void shrink_some(const rz_expansion *of, const rz_low_rank *low, int count, const long *rows, const long *from,
                        long block, long end, const uint8_t *coming)
{
    const long bytes = (long)rz_shrink_bytes(low, of->inputs);
    const bf16 *x[ROWS_TOGETHER];
    operand *to[ROWS_TOGETHER];
    for (; block < end; block++) {
        const uint8_t *a = (const uint8_t *)low->shrink + block * bytes;
        for (int i = 0; i < count; i++) {
            x[i] = of->x + from[i] * of->x_stride;
            to[i] = of->shrunk + rows[i] * of->stride + block * LANES;
        }
        rz_shrink_block(low, count, x, a, block + 1 < end ? a + bytes : coming, of->inputs, to);
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
    return (group->rows + ROWS_OF_TASK - 1) / ROWS_OF_TASK;
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

/* The group of a task, and its number there. */
static const rz_slot_rows *group_of_shrink(const rz_expansion *of, long *task)
{
    const rz_slot_rows *group = of->rows->groups;
    for (long here; *task >= (here = shrinks_of_group(of, group)); group++)
        *task -= here;
    return group;
}

/* The block of A that a task reads. */
static const uint8_t *block_of_shrink(const rz_expansion *of, long task)
{
    const rz_low_rank *low = low_rank_of(of, group_of_shrink(of, &task)->slot);
    return (const uint8_t *)low->shrink + task % (low->columns / LANES) * (long)rz_shrink_bytes(low, of->inputs);
}

/* A piece of one group's rows by one block of its adapter's columns. */
void rz_shrink(const rz_expansion *of, long task, long next)
{
    const rz_slot_rows *group = group_of_shrink(of, &task);
    const rz_low_rank *low = low_rank_of(of, group->slot);
    const uint8_t *coming = next < 0 ? NULL : block_of_shrink(of, next);
    const long blocks_here = low->columns / LANES, column = task % blocks_here;
    const long begin = group->first + task / blocks_here * ROWS_OF_TASK;
    const long end = least(begin + ROWS_OF_TASK, group->first + group->rows);
    for (long row = begin; row < end; row += ROWS_TOGETHER) {
        const int count = (int)least(ROWS_TOGETHER, end - row);
        long rows[ROWS_TOGETHER];
        for (int i = 0; i < count; i++)
            rows[i] = of->rows->order[row + i];
        shrink_some(of, low, count, rows, rows, column, column + 1, coming);
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
    while (count < ROWS_TOGETHER && row + count < end && slot_of(of, row + count) == slot)
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
        long to[ROWS_TOGETHER], read[ROWS_TOGETHER];
        for (int i = 0; i < count; i++) {
            to[i] = row + i;
            read[i] = from ? from[row + i] : row + i;
        }
        shrink_some(of, low, count, to, read, 0, low->columns / LANES, NULL);
    }
}

/* --- expand ------------------------------------------------------------------------------------------ */

/* Some entries of a panel, at most one of each half: at `at`, and what comes at `coming`, or NULL. */
typedef struct {
    const rz_adapted_block *at[2], *coming[2];
    int half[2], count;
} panel_entries;

/* B of an entry's block; NULL: the adapter adds nothing to its module. */
RZ_INLINE const uint8_t *block_of(const rz_low_rank *low, const rz_adapted_block *entry)
{
    const long pairs = low->pairs[entry->module];
    return pairs ? (const uint8_t *)low->expand[entry->module] + entry->block * (long)rz_expand_bytes(low, pairs) : NULL;
}

/* `count` rows of one adapter: `rows` of the product, whose sums begin with those of `first`. */
static void expand_some(const rz_expansion *of, const rz_low_rank *low, int count, const int32_t *rows, long first,
                        const panel_entries *entries, float *sums)
{
    rz_expanding blocks = { .halves = 0 };
    for (int i = 0; i < count; i++) {
        blocks.t[i] = of->shrunk + rows[i] * of->stride;
        blocks.sums[i] = sums + (rows[i] - first) * PANEL;
    }
    for (int i = 0; i < entries->count; i++) {
        const rz_adapted_block *entry = entries->at[i];
        const uint8_t *b = block_of(low, entry), *next;
        if (!b)
            continue;
        const long pairs = low->pairs[entry->module];
        if (blocks.halves && pairs != blocks.pairs) { /* of another rank */
            rz_expand_blocks(low, count, &blocks);
            blocks.halves = 0;
        }
        next = entries->coming[i] ? block_of(low, entries->coming[i]) : NULL;
        blocks.first[blocks.halves] = low->first[entry->module];
        blocks.b[blocks.halves] = b;
        blocks.ahead[blocks.halves] = (const char *)(next ? next : b);
        blocks.column[blocks.halves++] = entries->half[i] * LANES;
        blocks.pairs = pairs;
    }
    if (blocks.halves)
        rz_expand_blocks(low, count, &blocks);
}

static void await_shrinks(const rz_expansion *of)
{
    for (int spins = 0; atomic_load_explicit(of->done, memory_order_acquire) < of->due; spins++)
        if (spins >= SPINS_FOR_SHRINKS)
            sched_yield();
}

/* Rows of the product that follow each other: those of one adapter where they are neighbours. */
static void expand_neighbours(const rz_expansion *of, long first, long rows, const panel_entries *entries, float *sums)
{
    int count;
    for (long row = first, end = first + rows; row < end; row += count) {
        const long slot = slot_of(of, row);
        int32_t some[ROWS_TOGETHER];
        count = same_adapter(of, row, end, slot);
        for (int i = 0; i < count; i++)
            some[i] = (int32_t)(row + i);
        const rz_low_rank *low = slot < 0 ? NULL : low_rank_of(of, slot);
        if (low)
            expand_some(of, low, count, some, first, entries, sums);
    }
}

/* A piece of the step's rows, adapter by adapter: each block of B is read once. */
static void expand_batches(const rz_expansion *of, long first, const panel_entries *entries, float *sums)
{
    const int32_t *piece = of->rows->pieces + first / ROWS_OF_TASK;
    const rz_row_batch *batch = of->rows->batches + piece[0], *end = of->rows->batches + piece[1];
    for (; batch < end; batch++) {
        const rz_low_rank *low = low_rank_of(of, batch->slot);
        if (low)
            expand_some(of, low, batch->count, batch->rows, first, entries, sums);
    }
}

static void expand_panel(const rz_expansion *of, long first, long rows, const panel_entries *entries, float *sums)
{
    if (of->tokens)
        expand_neighbours(of, first, rows, entries, sums);
    else
        expand_batches(of, first, entries, sums);
}

void rz_expand(const rz_expansion *of, long first, long rows, long column, long coming, float *sums)
{
    const rz_adapted *adapted = of->adapted;
    const int32_t *begin = adapted->first + (column - of->origin) / LANES;
    const int is_here = coming >= of->origin && coming < of->origin + of->outputs;
    const int32_t *next = is_here ? adapted->first + (coming - of->origin) / LANES : NULL;
    panel_entries entries = { .count = 0 };
    if (of->done)
        await_shrinks(of);
    for (int half = 0; half < 2; half++)
        for (long i = begin[half]; i < begin[half + 1]; i++) {
            if (entries.count == 2 || (entries.count && entries.half[entries.count - 1] == half)) {
                expand_panel(of, first, rows, &entries, sums); /* two modules meet in it: one by one */
                entries.count = 0;
            }
            entries.half[entries.count] = half;
            entries.coming[entries.count] = next && next[half] < next[half + 1] ? adapted->blocks + next[half] : NULL;
            entries.at[entries.count++] = adapted->blocks + i;
        }
    if (entries.count)
        expand_panel(of, first, rows, &entries, sums);
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
    free(rows->batches);
    free(rows->pieces);
    rows->groups = malloc((size_t)needed * 2 * sizeof *rows->groups);
    rows->batches = malloc((size_t)needed * 2 * sizeof *rows->batches);
    rows->pieces = malloc((size_t)(needed * 2 + 2) * sizeof *rows->pieces);
    rows->room = rows->slots && rows->groups && rows->batches && rows->pieces ? needed * 2 : 0;
    return rows->room > 0;
}

/* The groups' rows by pieces. */
static void batch_rows(rz_adapter_rows *rows, long tokens)
{
    long count = 0, piece = 0;
    for (long first = 0; first < tokens; first += ROWS_OF_TASK) {
        rows->pieces[piece++] = (int32_t)count;
        for (long i = 0; i < rows->count; i++) {
            rz_slot_rows *group = rows->groups + i;
            rz_row_batch *open = NULL;
            for (; group->batched < group->rows; group->batched++) {
                const int32_t row = rows->order[group->first + group->batched];
                if (row >= first + ROWS_OF_TASK)
                    break;
                if (!open || open->count == ROWS_TOGETHER) {
                    open = rows->batches + count++;
                    *open = (rz_row_batch){ .slot = (int32_t)group->slot };
                }
                open->rows[open->count++] = row;
            }
        }
    }
    rows->pieces[piece] = (int32_t)count;
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
        rows->groups[rows->count++] = (rz_slot_rows){ slot, done, ends[slot], 0 };
        done += ends[slot];
        ends[slot] = (int32_t)(done - ends[slot]);
    }
    for (token = 0; token < step->tokens; token++)
        if (rows->slots[token] >= 0)
            rows->order[ends[rows->slots[token]]++] = (int32_t)token;
    batch_rows(rows, step->tokens);
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
    free(rows->batches);
    free(rows->pieces);
}

void rz_free_adapters(rz_decoder *decoder)
{
    free_rows(&decoder->whole_rows);
    free_rows(&decoder->tail.adapter_rows);
    free(decoder->shrunk);
    free(decoder->shrinks_due);
}
