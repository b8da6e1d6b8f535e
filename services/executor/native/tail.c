/* See tail.h. What a row comes to does not depend on its neighbours, so nothing changes but the time. */
#include "tail.h"

#include <stdlib.h>
#include <string.h>

enum { WORTH = 4 /* rows that are moved for each that is left out, at most */ };

int rz_first_of_tail(const rz_model *model)
{
    int first = model->layers;
    while (first > 0 && model->layer[first - 1].reads_only)
        first--;
    return first;
}

/* Whether the layer before the tail's can go on with its rows. A recurrent one has its state from what all rows come to,
 * and the blocks that rows choose are planned for all. */
static int begins_within(const rz_tail *tail, const rz_model *model, const rz_step *step)
{
    const rz_layer *last = tail->from ? &model->layer[tail->from - 1] : NULL;
    return last && !last->recurrent && !(last->chooses && step->num_sparse);
}

int rz_leaves_rows(const rz_decoder *decoder, const rz_layer *layer)
{
    const rz_tail *tail = &decoder->tail;
    return tail->there && tail->within && layer == &decoder->model.layer[tail->from - 1];
}

static int is_worth_it(const rz_tail *tail, const rz_model *model, const rz_step *step)
{
    const int left_out = step->tokens - step->sampled;
    if ((tail->from == model->layers && !tail->within) || step->num_pools || step->num_taps)
        return 0;
    if (left_out <= 0 || step->sampled > left_out * WORTH)
        return 0;
    for (int i = 1; i < step->sampled; i++)
        if (step->sample_rows[i] <= step->sample_rows[i - 1])
            return 0; /* they are moved from the first on */
    return 1;
}

static long blocks_until(const rz_model *model, int tokens)
{
    return (tokens + model->block_size - 1) / model->block_size;
}

/* Each sampled row, a sequence of its own. */
static void fill(rz_tail *tail, const rz_model *model, const rz_step *step)
{
    const int count = step->sampled;
    int32_t *positions = tail->numbers, *slots = positions + count, *lengths = slots + count;
    int32_t *contexts = lengths + count, *rows = contexts + count, *tables = rows + count, *end = tables;
    const int32_t *table = step->block_tables;
    int first = 0, done = 0;
    for (int i = 0; i < step->sequences; i++) {
        for (; done < count && step->sample_rows[done] < first + step->query_lens[i]; done++) {
            const int row = step->sample_rows[done];
            positions[done] = step->positions[row];
            slots[done] = step->slots[row];
            lengths[done] = 1;
            contexts[done] = step->context_lens[i] - step->query_lens[i] + row - first + 1;
            rows[done] = done;
            const long blocks = blocks_until(model, contexts[done]);
            memcpy(end, table, (size_t)blocks * sizeof *end);
            end += blocks;
        }
        first += step->query_lens[i];
        table += blocks_until(model, step->context_lens[i]);
    }
    tail->step = *step;
    tail->step.tokens = tail->step.sequences = count;
    tail->step.positions = positions;
    tail->step.slots = slots;
    tail->step.query_lens = lengths;
    tail->step.context_lens = contexts;
    tail->step.sample_rows = rows;
    tail->step.block_tables = tables;
    tail->step.table_blocks = (int32_t)(end - tables);
    tail->step.num_compressions = 0;
    tail->step.num_sparse = 0; /* its layers read what others have stored, all of it */
}

int rz_make_tail(rz_decoder *decoder, const rz_step *step)
{
    rz_tail *tail = &decoder->tail;
    tail->within = begins_within(tail, &decoder->model, step);
    tail->there = is_worth_it(tail, &decoder->model, step);
    if (!tail->there)
        return 1;
    const long needed = step->sampled * (5L + step->table_blocks);
    if (needed > tail->room) {
        free(tail->numbers);
        tail->numbers = malloc((size_t)needed * 2 * sizeof *tail->numbers);
        tail->room = tail->numbers ? needed * 2 : 0;
        if (!tail->numbers)
            return 0;
    }
    fill(tail, &decoder->model, step);
    return 1;
}

void rz_free_tail(rz_tail *tail)
{
    free(tail->numbers);
    for (int i = 0; i < RZ_HEADS; i++)
        rz_workspace_free_attention(&tail->attention[i]);
}
