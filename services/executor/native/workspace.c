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

int rz_workspace_new(rz_workspace *space, const rz_model *model, int threads)
{
    *space = (rz_workspace){ 0 };
    space->scratch_piece = rz_attention_scratch(model->head_dim);
    return renew(&space->scratch, space->scratch_piece * (size_t)threads);
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

void rz_workspace_free(rz_workspace *space)
{
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
