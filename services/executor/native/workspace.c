/* See workspace.h. */
#include "workspace.h"

#include <stdlib.h>

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

/* Notes what the layers need. */
static void measure(rz_routing *routing, const rz_model *model)
{
    for (int i = 0; i < model->layers; i++) {
        const rz_experts *experts = model->layer[i].experts;
        if (!experts)
            continue;
        routing->most_experts = larger(routing->most_experts, experts->count);
        routing->most_chosen = larger(routing->most_chosen, experts->chosen);
        routing->most_width = larger(routing->most_width, experts->down.inputs);
    }
}

int rz_workspace_new(rz_workspace *space, const rz_model *model, int threads)
{
    *space = (rz_workspace){ 0 };
    measure(&space->routing, model);
    space->scratch_piece = rz_attention_scratch(model->head_dim);
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
    there &= renew(&space->chances, n * sizeof(float));
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

int rz_workspace_reserve(rz_workspace *space, const rz_model *model, long tokens, long parts, long partial)
{
    int there = 1;
    if (parts > space->parts_room) {
        space->parts_room = parts * 2;
        there &= renew(&space->parts, (size_t)space->parts_room * sizeof *space->parts);
        there &= renew(&space->merges, (size_t)space->parts_room * sizeof *space->merges);
        space->parts_room *= there;
    }
    if (partial > space->partial_room) {
        space->partial_room = partial * 2;
        there &= renew(&space->partial, (size_t)space->partial_room * sizeof *space->partial);
        space->partial_room *= there;
    }
    if (tokens > space->tokens) {
        size_t n = (size_t)tokens, d = (size_t)model->head_dim, q = (size_t)model->q_heads * d;
        there &= renew(&space->residual, n * (size_t)model->hidden * sizeof(float));
        there &= renew(&space->delta, n * (size_t)model->hidden * sizeof(float));
        there &= renew(&space->normed, n * (size_t)model->hidden * sizeof(bf16));
        there &= renew(&space->qkv, n * (q + 2 * (size_t)model->kv_heads * d) * sizeof(float));
        there &= renew(&space->queries, n * q * sizeof(bf16));
        there &= renew(&space->attended, n * q * sizeof(bf16));
        there &= renew(&space->activated, n * (size_t)model->intermediate * sizeof(bf16));
        if (model->shared_in_ring) {
            size_t group = q / (size_t)model->kv_heads;
            there &= renew(&space->exchanged, n * (size_t)model->shared_in_ring * group * sizeof(float));
            there &= renew(&space->mine, n);
        }
        there &= reserve_routing(&space->routing, model, tokens);
        there &= renew(&space->rotations, RZ_ROTARIES * n * (size_t)model->rotary_dim * sizeof(float));
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

int rz_workspace_reserve_rounded(rz_workspace *space, size_t bytes)
{
    if (bytes <= space->rounded_room)
        return 1;
    int there = renew(&space->rounded, bytes);
    space->rounded_room = there ? bytes : 0;
    return there;
}

static void free_routing(rz_routing *space)
{
    free(space->scores);
    free(space->experts);
    free(space->chances);
    free(space->shared);
    free(space->tokens);
    free(space->weights);
    free(space->ends);
    free(space->groups);
    free(space->gathered);
    free(space->activated);
}

void rz_workspace_free(rz_workspace *space)
{
    free_routing(&space->routing);
    free(space->rounded);
    free(space->bests);
    free(space->residual);
    free(space->delta);
    free(space->normed);
    free(space->qkv);
    free(space->queries);
    free(space->attended);
    free(space->activated);
    free(space->exchanged);
    free(space->mine);
    free(space->rotations);
    free(space->parts);
    free(space->merges);
    free(space->partial);
    free(space->scratch);
}
