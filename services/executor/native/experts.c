/* See experts.h. A row's experts, their weights and the order in which they are added follow from the row alone. */
#include "experts.h"

#include <string.h>
#include <sys/mman.h>
#include <unistd.h>

#include "quantized.h"

/* --- routing ----------------------------------------------------------------------------------------- */

typedef struct {
    rz_decoder *decoder;
    const rz_experts *experts;
} routed;

static void softmax(float *scores, long count)
{
    float most = scores[0], sum = 0;
    for (long i = 1; i < count; i++)
        most = scores[i] > most ? scores[i] : most;
    for (long i = 0; i < count; i++)
        sum += scores[i] = expf(scores[i] - most);
    for (long i = 0; i < count; i++)
        scores[i] /= sum;
}

static float sigmoid(float value)
{
    return 1.0f / (1.0f + expf(-value));
}

/* The largest that is not taken, of those that tie the first; where none is a number, the first that is not taken. */
static long best_of(const float *scores, const unsigned char *taken, long count)
{
    long best = 0;
    while (best + 1 < count && taken[best])
        best++;
    for (long i = best + 1; i < count; i++)
        if (!taken[i] && scores[i] > scores[best])
            best = i;
    return best;
}

/* What a group of experts counts: its two best, or its best or only one. */
static float weight_of_group(const float *scores, long size, int counted)
{
    float first = -INFINITY, second = -INFINITY;
    for (long i = 0; i < size; i++) {
        if (scores[i] > first) {
            second = first;
            first = scores[i];
        } else if (scores[i] > second) {
            second = scores[i];
        }
    }
    return size > 1 && counted > 1 ? first + second : first;
}

/* Takes all experts but those of the best groups. */
static void take_groups(const rz_experts *experts, const float *scores, unsigned char *taken)
{
    const long size = experts->count / experts->groups;
    float weights[RZ_MOST_EXPERTS];
    unsigned char kept[RZ_MOST_EXPERTS] = { 0 };
    for (long i = 0; i < experts->groups; i++)
        weights[i] = weight_of_group(scores + i * size, size, experts->group_scores);
    for (long i = 0; i < experts->top_groups; i++)
        kept[best_of(weights, kept, experts->groups)] = 1;
    for (long i = 0; i < experts->groups * size; i++)
        taken[i] = !kept[i / size];
}

static void choose_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const routed *job = argument;
    const rz_experts *experts = job->experts;
    rz_routing *space = &job->decoder->space.routing;
    float *scores = space->scores + token * experts->router.outputs, by[RZ_MOST_EXPERTS], sum = 0;
    int32_t *to = space->experts + token * experts->chosen;
    float *weights = space->chosen_weights + token * experts->chosen;
    unsigned char taken[RZ_MOST_EXPERTS] = { 0 };
    for (long i = 0; i < experts->router.outputs - experts->count; i++)
        scores[i] += scores[experts->count + i];
    if (experts->scores == RZ_SOFTMAX)
        softmax(scores, experts->count);
    for (long i = 0; i < experts->count; i++) {
        if (experts->scores == RZ_SIGMOID)
            scores[i] = sigmoid(scores[i]);
        by[i] = scores[i] + (experts->correction ? experts->correction[i] : 0);
    }
    if (experts->top_groups < experts->groups)
        take_groups(experts, by, taken);
    for (long i = 0; i < experts->chosen; i++) {
        to[i] = (int32_t)best_of(by, taken, experts->count);
        taken[to[i]] = 1;
        sum += weights[i] = scores[to[i]];
    }
    const float scale = experts->normalised ? experts->scale / (sum + 1e-20f) : experts->scale;
    for (long i = 0; i < experts->chosen; i++)
        weights[i] *= scale * (experts->scales ? experts->scales[to[i]] : 1.0f);
}

/* Rows by experts, those of one in the order of tokens. */
static void group_task(void *argument, long task, long next, int thread)
{
    (void)task, (void)next, (void)thread;
    const routed *job = argument;
    const rz_experts *experts = job->experts;
    rz_routing *space = &job->decoder->space.routing;
    const long rows = job->decoder->step->tokens * experts->chosen;
    int32_t *ends = space->ends;
    memset(ends, 0, (size_t)experts->count * sizeof *ends);
    for (long i = 0; i < rows; i++)
        ends[space->experts[i]]++;
    long first = 0, pieces = 0;
    space->count = 0;
    for (int32_t expert = 0; expert < experts->count; expert++) {
        const int32_t here = ends[expert];
        if (here) {
            space->groups[space->count++] = (rz_group){ expert, (int32_t)first, here, pieces };
            pieces += rz_pieces_of(here);
        }
        ends[expert] = (int32_t)first;
        first += here;
    }
    for (long i = 0; i < rows; i++) {
        const int32_t at = ends[space->experts[i]]++;
        space->tokens[at] = (int32_t)(i / experts->chosen);
        space->weights[at] = space->chosen_weights[i];
    }
}

static void gather_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    const routed *job = argument;
    const size_t hidden = (size_t)job->decoder->model.hidden;
    const rz_routing *space = &job->decoder->space.routing;
    memcpy(space->gathered + (size_t)row * hidden,
           job->decoder->space.normed + (size_t)space->tokens[row] * hidden, hidden * sizeof(bf16));
}

static void shared_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    float *weights = argument;
    weights[token] = sigmoid(weights[token]);
}

const float *rz_weigh_shared(rz_decoder *decoder, int thread, const rz_experts *experts)
{
    if (!experts || !experts->shared_gate.packed)
        return NULL;
    float *weights = decoder->space.routing.shared;
    const long tokens = decoder->step->tokens;
    rz_multiply(decoder, thread, RZ_GATE_UP, (rz_product){
        .linear = &experts->shared_gate, .x = decoder->space.normed, .rows = tokens, .end = STORE, .out = weights,
        .scale = 1.0f });
    rz_run_rows(decoder, thread, RZ_GATE_UP, tokens, shared_task, weights);
    return weights;
}

/* Has the system read one expert's share of `linear` from its file, without waiting for it. */
static void ask_for_expert(const rz_linear *linear, long experts, long expert)
{
    enum { AT_ONCE = 128 << 10 /* bytes: of more than a device's read-ahead only the first are read */ };
    const size_t pairs = (size_t)(linear->inputs + 1) / 2;
    const size_t panel = linear->format.bits ? rz_quantized_panel_bytes(&linear->format) : pairs * 2 * PANEL * sizeof(bf16);
    const size_t size = (size_t)(linear->outputs / experts / PANEL) * panel;
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    const uintptr_t begin = (uintptr_t)linear->packed + (size_t)expert * size, end = begin + size;
    for (uintptr_t at = begin / page * page; at < end; at += AT_ONCE)
        (void)madvise((void *)at, end - at < AT_ONCE ? end - at : AT_ONCE, MADV_WILLNEED);
}

/* An expert that was chosen, where they are not in memory. It counts as progress: it takes what the disk takes. */
static void ask_task(void *argument, long group, long next, int thread)
{
    (void)next, (void)thread;
    const routed *job = argument;
    const rz_experts *experts = job->experts;
    const long expert = job->decoder->space.routing.groups[group].expert;
    ask_for_expert(&experts->gate_up, experts->count, expert);
    ask_for_expert(&experts->down, experts->count, expert);
    atomic_fetch_add_explicit(job->decoder->step->progress, 1, memory_order_relaxed);
}

void rz_choose_experts(rz_decoder *decoder, int thread, const rz_experts *experts)
{
    rz_routing *space = &decoder->space.routing;
    const long tokens = decoder->step->tokens;
    routed job = { decoder, experts };
    rz_multiply(decoder, thread, RZ_GATE_UP, (rz_product){
        .linear = &experts->router, .x = decoder->space.normed, .rows = tokens, .end = STORE, .out = space->scores,
        .scale = 1.0f });
    rz_run_stage(decoder, thread, RZ_GATE_UP, tokens, choose_task, &job);
    rz_run_stage(decoder, thread, RZ_GATE_UP, 1, group_task, &job);
    if (experts->streamed)
        rz_run_stage(decoder, thread, RZ_GATE_UP, space->count, ask_task, &job);
}

void rz_run_experts(rz_decoder *decoder, int thread, const rz_experts *experts, float *out, float scale)
{
    rz_routing *space = &decoder->space.routing;
    const long rows = (long)decoder->step->tokens * experts->chosen;
    routed job = { decoder, experts };
    const int gathers = !rz_rounds(&experts->gate_up);
    if (gathers)
        rz_run_rows(decoder, thread, RZ_GATE_UP, rows, gather_task, &job);
    rz_multiply_experts(decoder, thread, RZ_GATE_UP, (rz_product){
        .linear = &experts->gate_up, .x = gathers ? space->gathered : decoder->space.normed, .from = space->tokens,
        .rows = rows, .end = ACTIVATE, .out = space->activated, .activation = &decoder->model },
        experts->count, space->groups, space->count);
    rz_multiply_experts(decoder, thread, RZ_DOWN, (rz_product){
        .linear = &experts->down, .x = space->activated, .rows = rows, .end = ADD, .out = out, .to = space->tokens,
        .weights = space->weights, .scale = scale }, experts->count, space->groups, space->count);
}

size_t rz_experts_prepared(const rz_experts *experts)
{
    if (!experts)
        return 0;
    const size_t in = rz_prepared_row(&experts->gate_up), out = rz_prepared_row(&experts->down);
    const size_t of_chosen = (in > out ? in : out) * (size_t)experts->chosen;
    const size_t to_choose = rz_prepared_row(&experts->router), to_weigh = rz_prepared_row(&experts->shared_gate);
    const size_t of_all = to_choose > to_weigh ? to_choose : to_weigh;
    return of_chosen > of_all ? of_chosen : of_all;
}
