/* See workspace.h. */
#include "workspace.h"

#include <stdlib.h>

#include "latent.h"
#include "recurrent.h"

enum { LINE = 64 };

/* Fresh memory in place of `old`, whose content goes. */
static int renew(void *old, size_t bytes)
{
    void **pointer = old;
    free(*pointer);
    *pointer = aligned_alloc(LINE, (bytes + LINE - 1) / LINE * LINE + LINE);
    return *pointer != NULL;
}

static long larger(long a, long b)
{
    return a > b ? a : b;
}

static long outputs_of(const rz_linear *linear)
{
    long outputs = 0;
    for (; linear; linear = linear->next)
        outputs += linear->outputs;
    return outputs;
}

void rz_workspace_measure(rz_workspace *space, const rz_recurrent *layer)
{
    rz_recurrent_space *own = &space->recurrent;
    const long channels = rz_recurrent_channels(layer);
    if (channels > own->most_channels || layer->heads > own->most_heads || layer->norms > own->most_norms)
        own->tokens = 0; /* what there is may be too small */
    own->most_channels = larger(own->most_channels, channels);
    own->most_heads = larger(own->most_heads, layer->heads);
    own->most_norms = larger(own->most_norms, layer->norms);
}

/* Notes what the layers need. */
static void measure(rz_workspace *space, const rz_model *model)
{
    rz_routing *routing = &space->routing;
    space->deltas = 1;
    for (int i = 0; i < model->num_heads; i++) {
        const rz_heads *heads = &model->heads[i];
        const long values = (long)heads->q_heads * heads->value_dim;
        space->most_queries = larger(space->most_queries, (long)heads->q_heads * heads->key_dim);
        space->most_attended = larger(space->most_attended, values);
        space->most_exchanged = larger(space->most_exchanged, heads->shared_in_ring * values / heads->kv_heads);
    }
    for (int set = 0; set < RZ_ROTARIES; set++)
        space->most_rotary = larger(space->most_rotary, model->rotary_dim[set]);
    for (int i = 0; i < model->layers; i++) {
        const rz_layer *layer = &model->layer[i];
        const rz_experts *experts = layer->experts;
        space->most_projected = larger(space->most_projected, outputs_of(&layer->qkv));
        if (layer->recurrent) {
            space->most_attended = larger(space->most_attended, rz_recurrent_inner(layer->recurrent));
            rz_workspace_measure(space, layer->recurrent);
        }
        if (layer->latent) {
            const rz_heads *heads = &model->heads[layer->heads];
            space->most_projected = larger(space->most_projected, rz_latent_projected(layer->latent));
            space->most_queries = larger(space->most_queries, rz_latent_queries(layer->latent, heads));
            space->most_attended = larger(space->most_attended, rz_latent_attended(layer->latent, heads));
        }
        if (!experts)
            continue;
        space->deltas = experts->norm ? 2 : space->deltas;
        routing->most_experts = larger(routing->most_experts, experts->router.outputs);
        routing->most_chosen = larger(routing->most_chosen, experts->chosen);
        routing->most_width = larger(routing->most_width, experts->down.inputs);
    }
}

int rz_workspace_new(rz_workspace *space, const rz_model *model, int threads)
{
    *space = (rz_workspace){ 0 };
    measure(space, model);
    space->scratch_piece = rz_attention_scratch();
    if (space->scratch_piece < (size_t)rz_inputs_row(model) * sizeof(float)) /* a row of a table is unpacked there */
        space->scratch_piece = ((size_t)rz_inputs_row(model) * sizeof(float) + LINE - 1) / LINE * LINE;
    const size_t scoring = 2 * (size_t)space->most_queries * sizeof(float); /* sparse.c */
    if (space->scratch_piece < scoring)
        space->scratch_piece = (scoring + LINE - 1) / LINE * LINE;
    return renew(&space->scratch, space->scratch_piece * (size_t)threads);
}

static int reserve_routing(rz_routing *space, const rz_model *model, long tokens)
{
    const long rows = tokens * space->most_chosen;
    if (rows <= space->rows)
        return 1;
    const size_t n = (size_t)rows, all = (size_t)tokens, experts = (size_t)space->most_experts;
    int there = renew(&space->scores, all * experts * sizeof(float));
    there &= renew(&space->experts, n * sizeof(int32_t));
    there &= renew(&space->chosen_weights, n * sizeof(float));
    there &= renew(&space->shared, all * sizeof(float));
    there &= renew(&space->tokens, n * sizeof(int32_t));
    there &= renew(&space->weights, n * sizeof(float));
    there &= renew(&space->ends, experts * sizeof(int32_t));
    there &= renew(&space->groups, experts * sizeof(rz_group));
    there &= renew(&space->gathered, n * (size_t)model->hidden * sizeof(bf16));
    there &= renew(&space->activated, n * (size_t)space->most_width * sizeof(bf16));
    space->rows = there ? rows : 0;
    return there;
}

int rz_workspace_reserve_recurrent(rz_workspace *space, long tokens, long copies)
{
    rz_recurrent_space *own = &space->recurrent;
    if (copies > own->most_copies) {
        own->most_copies = renew(&own->copy_slots, (size_t)copies * sizeof *own->copy_slots) ? copies : 0;
        if (!own->most_copies)
            return 0;
    }
    if (own->copies && tokens <= own->tokens)
        return 1;
    const size_t n = (size_t)tokens;
    int there = renew(&own->runs, n * sizeof *own->runs);
    there &= renew(&own->pieces, n * sizeof *own->pieces);
    there &= renew(&own->copies, (n + 2) * sizeof *own->copies);
    there &= renew(&own->mixed, n * (size_t)own->most_channels * sizeof(float));
    there &= renew(&own->gates, n * 2 * (size_t)own->most_heads * sizeof(float));
    there &= renew(&own->squares, n * (size_t)own->most_norms * sizeof(float));
    own->tokens = there ? tokens : 0;
    return there;
}

enum { SCORES = 4 << 20 /* that are there at once, where one row has no more */ };

/* For the rows that choose blocks. */
static int reserve_choices(rz_attention_plan *plan, int kv_heads)
{
    int there = 1;
    if (plan->num_choices > plan->choice_room) {
        plan->choice_room = plan->num_choices * 2;
        there &= renew(&plan->choices, (size_t)plan->choice_room * sizeof *plan->choices);
        plan->choice_room *= there;
    }
    if (plan->num_chosen > plan->chosen_room) {
        const int got = renew(&plan->chosen, (size_t)plan->num_chosen * 2 * sizeof *plan->chosen);
        plan->chosen_room = got ? plan->num_chosen * 2 : 0;
        there &= got;
    }
    const long row = plan->most_between * kv_heads;
    plan->scored_at_once = larger(1, row ? SCORES / row : plan->num_choices);
    const long scores = row * (plan->scored_at_once < plan->num_choices ? plan->scored_at_once : plan->num_choices);
    if (scores > plan->score_room) {
        const int got = renew(&plan->scores, (size_t)scores * sizeof *plan->scores);
        plan->score_room = got ? scores : 0;
        there &= got;
    }
    return there;
}

int rz_workspace_reserve_attention(rz_attention_plan *plan, long tokens, int kv_heads)
{
    int there = !plan->num_choices || reserve_choices(plan, kv_heads);
    if (plan->count <= plan->room && tokens <= plan->tokens)
        return there;
    plan->room = plan->count * 2;
    plan->tokens = tokens * 2;
    there &= renew(&plan->parts, (size_t)plan->room * sizeof *plan->parts);
    there &= renew(&plan->first_parts, (size_t)plan->room * sizeof *plan->first_parts);
    there &= renew(&plan->rounds, (size_t)plan->room * sizeof *plan->rounds);
    there &= renew(&plan->mine, (size_t)plan->tokens);
    plan->room *= there;
    plan->tokens *= there;
    return there;
}

void rz_workspace_free_attention(rz_attention_plan *plan)
{
    free(plan->parts);
    free(plan->first_parts);
    free(plan->rounds);
    free(plan->choices);
    free(plan->chosen);
    free(plan->scores);
    free(plan->mine);
}

int rz_workspace_reserve(rz_workspace *space, const rz_model *model, long tokens, long partial)
{
    int there = 1;
    if (partial > space->partial_room) {
        space->partial_room = partial * 2;
        there &= renew(&space->partial, (size_t)space->partial_room * sizeof *space->partial);
        space->partial_room *= there;
    }
    if (tokens > space->tokens) {
        size_t n = (size_t)tokens;
        there &= renew(&space->residual, n * (size_t)model->hidden * sizeof(float));
        there &= renew(&space->delta, n * (size_t)(space->deltas * model->hidden) * sizeof(float));
        there &= renew(&space->inputs, n * (size_t)rz_inputs_row(model) * sizeof(float));
        there &= renew(&space->normed, n * (size_t)model->hidden * sizeof(bf16));
        there &= renew(&space->qkv, n * (size_t)space->most_projected * sizeof(float));
        there &= renew(&space->queries, n * (size_t)space->most_queries * sizeof(bf16));
        there &= renew(&space->attended, n * (size_t)space->most_attended * sizeof(bf16));
        there &= renew(&space->activated, n * (size_t)model->intermediate * sizeof(bf16));
        there &= renew(&space->exchanged, n * (size_t)space->most_exchanged * sizeof(float));
        there &= reserve_routing(&space->routing, model, tokens);
        there &= renew(&space->rotations, RZ_ROTARIES * n * (size_t)space->most_rotary * sizeof(float));
        space->tokens = there ? tokens : 0;
    }
    return there;
}

int rz_workspace_reserve_bests(rz_workspace *space, long bests)
{
    if (bests <= space->bests_room)
        return 1;
    int there = renew(&space->bests, (size_t)bests * 2 * sizeof *space->bests);
    space->bests_room = there ? bests * 2 : 0;
    return there;
}

int rz_workspace_reserve_prepared(rz_workspace *space, size_t bytes)
{
    if (bytes <= space->prepared_room)
        return 1;
    int there = renew(&space->prepared, bytes);
    space->prepared_room = there ? bytes : 0;
    return there;
}

static void free_routing(rz_routing *space)
{
    free(space->scores);
    free(space->experts);
    free(space->chosen_weights);
    free(space->shared);
    free(space->tokens);
    free(space->weights);
    free(space->ends);
    free(space->groups);
    free(space->gathered);
    free(space->activated);
}

static void free_recurrent(rz_recurrent_space *space)
{
    free(space->runs);
    free(space->pieces);
    free(space->copies);
    free(space->copy_slots);
    free(space->mixed);
    free(space->gates);
    free(space->squares);
}

void rz_workspace_free(rz_workspace *space)
{
    free_routing(&space->routing);
    free_recurrent(&space->recurrent);
    free(space->prepared);
    free(space->bests);
    free(space->residual);
    free(space->delta);
    free(space->normed);
    free(space->qkv);
    free(space->queries);
    free(space->attended);
    free(space->activated);
    free(space->inputs);
    free(space->exchanged);
    free(space->rotations);
    free(space->partial);
    free(space->scratch);
}
