/* Which parts of a step's attention there are: see attention_stages.h.
 *
 * A tile's rows read all that is before them, or one row reads its own tables (sparse.h). Planned twice: once to count,
 * so that there is room, and then to be computed. Of a row that reads less in some layers both kinds of parts are
 * there, each with the layers that it is for.
 */
#include "attention_stages.h"

#include <limits.h>
#include <string.h>

#include "sparse.h"

/* Floats of partial results that a round has, but for what a single tile needs: a long prompt's would take gigabytes. */
enum { ROUND_PARTIALS = 8 << 20 };

typedef struct {
    const rz_decoder *decoder;
    const rz_step *step;
    const rz_heads *heads;
    rz_attention_plan *plan;
    int tile;     /* rows of one */
    int together; /* KV heads of a part, at most */
    int chooses;  /* rows may choose in some layer with these heads */
    int writes;   /* else it counts */
} planning;

/* Rows of one sequence that read alike. */
typedef struct {
    const int32_t *table;  /* of the first KV head */
    long table_stride;     /* between those of KV heads; 0: they have one */
    long row;              /* of the step, the first */
    int rows, position;    /* of the first, in the table */
    int from_layer, until_layer;
} attending_rows;

static int parts_of(int keys)
{
    return (int)whole_parts(keys, SPLIT_KEYS);
}

/* Gives a tile's attention for each shared head to one of its two ranks: to the first as long as it is not above
 * its share of the work so far. Both decide alike, from the plan alone. Notes what is this rank's, as bits. */
static void share_tile(const planning *job, int rows, long row, int keys)
{
    const rz_heads *heads = job->heads;
    rz_attention_plan *plan = job->plan;
    const long work = (long)rows * keys;
    int mine = 0;
    if (!job->writes)
        return;
    for (int i = 0; i < heads->shared_here; i++) {
        const rz_shared_head *head = &heads->shared[i];
        const int first = plan->first_work[i] * job->decoder->model.ranks <= plan->work * head->first_share;
        plan->first_work[i] += first ? work : 0;
        mine |= (first == head->is_first) << i;
    }
    plan->work += work;
    if (heads->shared_here)
        memset(plan->mine + row, mine, (size_t)rows);
}

/* Counting, all of them are. */
static int is_mine(const planning *job, long row, int kv_head)
{
    const rz_heads *heads = job->heads;
    for (int i = 0; i < heads->shared_here && job->writes; i++)
        if (heads->shared[i].kv_head == kv_head)
            return job->plan->mine[row] >> i & 1;
    return 1;
}

/* Tiles that the query heads of a KV head are dealt to. */
static int tiles_of_group(const rz_heads *heads)
{
    return (heads->q_heads / heads->kv_heads + TILE_QUERIES - 1) / TILE_QUERIES;
}

static void end_attention_round(const planning *job)
{
    rz_attention_plan *plan = job->plan;
    if (job->writes)
        plan->rounds[plan->num_rounds] = (rz_attention_round){ plan->count, plan->merges };
    plan->num_rounds++;
    plan->last_partial = plan->partial;
    plan->partial = 0;
}

/* Room in the round for the partial results of `rows` rows with `parts` parts. */
static void make_room(const planning *job, long rows, int parts)
{
    rz_attention_plan *plan = job->plan;
    const long needed = parts > 1 ? rows * job->heads->q_heads * parts * (job->heads->value_dim + 2) : 0;
    if (plan->partial && plan->partial + needed > ROUND_PARTIALS)
        end_attention_round(job);
    if (needed > plan->most_partial)
        plan->most_partial = needed;
}

/* KV heads that parts have together, at most: as many as leave each thread some parts to take; 0 is as 1. Two ranks that
 * share a head decide head by head. */
static int heads_together(const rz_decoder *decoder, const rz_step *step, const rz_heads *heads, int tile)
{
    enum { PARTS_OF_A_THREAD = 8 };
    long parts = 0;
    for (int i = 0; i < step->sequences; i++)
        parts += parts_of(step->context_lens[i]) * whole_parts(step->query_lens[i], tile);
    const long some = parts * heads->kv_heads / (PARTS_OF_A_THREAD * rz_threads_count(decoder->threads));
    return heads->shared_here ? 1 : (int)least(least(some, MOST_TOGETHER), heads->kv_heads);
}

/* KV heads of the next parts of a tile, of those from `kv_head` on. */
static int heads_of_parts(const planning *job, const attending_rows *tile, int kv_head)
{
    const rz_heads *heads = job->heads;
    const int queries = tile->rows * (heads->q_heads / heads->kv_heads);
    const long together = tile->table_stride ? 1 : least(job->together, TILE_QUERIES / queries);
    return together < 1 ? 1 : (int)least(together, heads->kv_heads - kv_head);
}

/* The parts of the query heads [begin, end) of each of `kv_heads` KV heads. */
static void add_parts(const planning *job, const attending_rows *tile, int kv_head, int kv_heads, int begin, int end)
{
    rz_attention_plan *plan = job->plan;
    const rz_heads *heads = job->heads;
    const rz_workspace *space = &job->decoder->space;
    const int group = heads->q_heads / heads->kv_heads, keys = tile->position + tile->rows, parts = parts_of(keys);
    const long queries = (long)heads->q_heads * heads->key_dim, values = (long)heads->q_heads * heads->value_dim;
    const long column = (long)kv_head * group + begin;
    const long size = parts > 1 ? (long)tile->rows * kv_heads * (end - begin) * (heads->value_dim + 2) : 0;
    if (!job->writes) {
        plan->count += parts;
        plan->merges += parts > 1;
        plan->partial += parts * size;
        return;
    }
    if (parts > 1)
        plan->first_parts[plan->merges++] = plan->count;
    for (int part = 0; part < parts; part++, plan->partial += size)
        plan->parts[plan->count++] = (rz_attention_part){
            .table = tile->table + kv_head * tile->table_stride,
            .slots = job->step->slots + tile->row,
            .queries = space->queries + tile->row * queries + column * heads->key_dim,
            .out = space->attended + tile->row * values + column * heads->value_dim,
            .partial = parts > 1 ? space->partial + plan->partial : NULL,
            .q_stride = queries,
            .out_stride = values,
            .rows = tile->rows,
            .kv_head = kv_head,
            .first_head = (int)column,
            .heads = end - begin,
            .position = tile->position,
            .first_key = part * SPLIT_KEYS,
            .last_key = (int)least((part + 1L) * SPLIT_KEYS, keys),
            .parts = part ? 0 : parts,
            .from_layer = tile->from_layer,
            .until_layer = tile->until_layer,
            .kv_heads = kv_heads,
        };
}

/* The parts of some rows, for all heads that this rank attends for. */
static void add_tile(const planning *job, const attending_rows *tile)
{
    const rz_heads *heads = job->heads;
    const int group = heads->q_heads / heads->kv_heads, tiles = tiles_of_group(heads);
    make_room(job, tile->rows, parts_of(tile->position + tile->rows));
    for (int head = 0, count; head < heads->kv_heads; head += count) {
        count = heads_of_parts(job, tile, head);
        for (int at = 0; at < tiles && is_mine(job, tile->row, head); at++)
            add_parts(job, tile, head, count, group * at / tiles, group * (at + 1) / tiles);
    }
}

/* A row that reads its own tables, once these are filled. */
static void add_choice(const planning *job, const int32_t *table, long row, int position, rz_choice choice)
{
    rz_attention_plan *plan = job->plan;
    const int size = job->decoder->model.block_size;
    choice.table = table;
    choice.row = row;
    choice.chosen = job->writes ? plan->chosen + plan->num_chosen : NULL;
    if (job->writes)
        plan->choices[plan->num_choices] = choice;
    if (choice.top && choice.recent - choice.first > plan->most_between)
        plan->most_between = choice.recent - choice.first;
    plan->num_choices++;
    plan->num_chosen += (long)choice.length * job->heads->kv_heads;
    add_tile(job, &(attending_rows){ choice.chosen, choice.length, row, 1, (choice.length - 1) * size + position % size,
                                     choice.dense_layers, INT_MAX });
}

/* Rows of a sequence from the step's row `row` on, the first at `position`: those that read all, and those that do not
 * in some layers, which are a tile of their own in the others. */
static void plan_rows(const planning *job, const int32_t *table, const int32_t *choice, long row, int position, int rows)
{
    const int size = job->decoder->model.block_size;
    while (rows) {
        rz_choice own;
        const int chooses = choice && rz_reads_some(choice, size, position, &own);
        int alike = choice ? 1 : rows;
        while (alike < rows && rz_reads_some(choice, size, position + alike, &own) == chooses)
            alike++;
        share_tile(job, alike, row, position + alike);
        add_tile(job, &(attending_rows){ table, 0, row, alike, position, -1, chooses ? own.dense_layers : INT_MAX });
        for (int i = 0; chooses && i < alike; i++) {
            rz_reads_some(choice, size, position + i, &own);
            add_choice(job, table, row + i, position + i, own);
        }
        row += alike, position += alike, rows -= alike;
    }
}

/* Rows that a sequence's first tile is short of: of several, each ends at a multiple of `tile`, so that few of them
 * have rows of two blocks. */
static int lead_of(int tile, int length, int begin)
{
    return length > tile ? begin % tile : 0;
}

static int tile_of(const rz_heads *heads)
{
    const int group = heads->q_heads / heads->kv_heads;
    return group < TILE_QUERIES ? TILE_QUERIES / group : 1;
}

/* Lists the parts of this step's attention in layers with these heads, the longest first as far as that costs nothing:
 * the last rows of prompts first. */
static void plan_heads(const planning *job)
{
    const rz_step *step = job->step;
    rz_attention_plan *plan = job->plan;
    plan->count = plan->merges = plan->num_rounds = 0;
    plan->partial = plan->last_partial = plan->most_partial = 0;
    plan->num_choices = plan->num_chosen = plan->most_between = 0;
    plan->work = plan->first_work[0] = plan->first_work[1] = 0;
    const int32_t *table = step->block_tables;
    long row = 0;
    for (int i = 0; i < step->sequences; i++) {
        const int length = step->query_lens[i], context = step->context_lens[i], begin = context - length;
        const int32_t *choice = step->num_sparse && job->chooses ? step->sparse + i * RZ_CHOICE_FIELDS : NULL;
        const int tile = job->tile, lead = lead_of(tile, length, begin);
        for (int start = (length + lead - 1) / tile * tile - lead; start > -tile; start -= tile) {
            const int first = start > 0 ? start : 0, rows = (int)least(start + tile, length) - first;
            plan_rows(job, table, choice, row + first, begin + first, rows);
        }
        row += length;
        table += (context + job->decoder->model.block_size - 1) / job->decoder->model.block_size;
    }
    if (plan->count)
        end_attention_round(job);
}

static planning planning_of(const rz_decoder *decoder, const rz_step *step, rz_attention_plan *plans, int heads)
{
    const rz_model *model = &decoder->model;
    const int tile = tile_of(&model->heads[heads]);
    planning job = { decoder, step, &model->heads[heads], &plans[heads], tile,
                     heads_together(decoder, step, &model->heads[heads], tile), 0, 0 };
    for (int i = 0; i < model->layers; i++)
        job.chooses |= model->layer[i].heads == heads && model->layer[i].chooses;
    return job;
}

int rz_reserve_attention(rz_decoder *decoder, const rz_step *step, rz_attention_plan *plans)
{
    for (int i = 0; i < decoder->model.num_heads; i++) {
        const planning job = planning_of(decoder, step, plans, i);
        plan_heads(&job);
        const long round = job.plan->num_rounds > 1 ? ROUND_PARTIALS : job.plan->last_partial;
        const long partial = round > job.plan->most_partial ? round : job.plan->most_partial;
        if (!rz_workspace_reserve_attention(job.plan, step->tokens, job.heads->kv_heads)
            || !rz_workspace_reserve(&decoder->space, &decoder->model, step->tokens, partial))
            return 0;
    }
    return 1;
}

void rz_plan_attention(rz_decoder *decoder, const rz_step *step, rz_attention_plan *plans)
{
    for (int i = 0; i < decoder->model.num_heads; i++) {
        planning job = planning_of(decoder, step, plans, i);
        job.writes = 1;
        plan_heads(&job);
    }
}
