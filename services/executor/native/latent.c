/* See latent.h. Before attention, its output has room for the query latents, and then for the plain parts of queries;
 * behind it, its queries have room for what the heads put out. */
#include "latent.h"

#include "attention_stages.h"
#include "products.h"

typedef struct {
    rz_decoder *decoder;
    const rz_layer *layer;
    const rz_latent *latent;
    long heads, width; /* width: of a projected row */
} latents;

static latents latents_of(rz_decoder *decoder, const rz_layer *layer)
{
    const rz_latent *latent = layer->latent;
    const long heads = decoder->model.heads[layer->heads].q_heads;
    const long queries = latent->query_rank ? latent->query_rank : heads * (latent->plain + latent->rotated);
    return (latents){ decoder, layer, latent, heads, queries + latent->rank + latent->rotated };
}

/* Rotates the `rotated` values of a query or key of one token. */
static void turn(const latents *job, long token, float *x)
{
    const long half = job->latent->rotated / 2;
    if (job->latent->pairs) {
        float second[MAX_KEY_DIM / 2];
        for (long i = 0; i < half; i++) {
            second[i] = x[2 * i + 1];
            x[i] = x[2 * i];
        }
        memcpy(x + half, second, (size_t)half * sizeof *x);
    }
    if (job->layer->rotary >= 0)
        rz_rotate(job->decoder, job->layer->rotary, token, x);
}

static void norm_to_bf16(bf16 *to, float *x, long count, const float *weight, float eps)
{
    const float scale = rms_scale(x, count, eps);
    for (long i = 0; i < count; i++)
        x[i] *= scale * weight[i];
    to_bf16(to, x, count);
}

/* The queries of one token [heads, plain + rotated]: what is not turned apart from what is. */
static void split_queries(const latents *job, long token, float *x)
{
    const rz_latent *latent = job->latent;
    const rz_workspace *space = &job->decoder->space;
    const long plain = latent->plain, line = latent->rank + latent->rotated;
    float growth = 1.0f;
    if (latent->position_span)
        growth += latent->position_growth
            * logf(1.0f + (float)(job->decoder->step->positions[token] / latent->position_span));
    for (long head = 0; head < job->heads; head++, x += plain + latent->rotated) {
        const long at = token * job->heads + head;
        for (long i = 0; i < plain + latent->rotated; i++)
            x[i] *= growth;
        turn(job, token, x + plain);
        to_bf16(space->attended + at * plain, x, plain);
        to_bf16(space->queries + at * line + latent->rank, x + plain, latent->rotated);
    }
}

/* One token's line goes to the cache; its queries are split, or their latents normed. */
static void project_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const latents *job = argument;
    const rz_latent *latent = job->latent;
    const rz_decoder *decoder = job->decoder;
    const long rank = latent->rank, line = rank + latent->rotated;
    float *x = decoder->space.qkv + token * job->width, *own = x + job->width - line;
    bf16 *to = (bf16 *)job->layer->writable + decoder->step->slots[token] * line;
    norm_to_bf16(to, own, rank, latent->norm, latent->eps);
    turn(job, token, own + rank);
    to_bf16(to + rank, own + rank, latent->rotated);
    if (latent->query_rank)
        norm_to_bf16(decoder->space.attended + token * latent->query_rank, x, latent->query_rank, latent->query_norm,
                     latent->query_eps);
    else
        split_queries(job, token, x);
}

static void query_task(void *argument, long token, long next, int thread)
{
    (void)next, (void)thread;
    const latents *job = argument;
    split_queries(job, token, job->decoder->space.qkv + token * job->heads * (job->latent->plain + job->latent->rotated));
}

void rz_place_latents(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    latents job = latents_of(decoder, layer);
    const rz_latent *latent = layer->latent;
    const rz_workspace *space = &decoder->space;
    const long tokens = decoder->step->tokens, line = latent->rank + latent->rotated;
    rz_run_rows(decoder, thread, RZ_PLACE, tokens, project_task, &job);
    if (latent->query_rank) {
        rz_multiply(decoder, thread, RZ_QKV, (rz_product){
            .linear = &latent->query_b, .x = space->attended, .rows = tokens, .end = STORE, .out = space->qkv,
            .scale = 1.0f });
        rz_run_rows(decoder, thread, RZ_PLACE, tokens, query_task, &job);
    }
    rz_multiply_heads(decoder, thread, RZ_QKV, (rz_product){
        .linear = &latent->keys, .x = space->attended, .rows = tokens, .stride = job.heads * latent->plain, .end = ROUND,
        .out = space->queries, .out_stride = job.heads * line }, job.heads, latent->plain, line);
}

const bf16 *rz_open_latents(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    const latents job = latents_of(decoder, layer);
    const rz_latent *latent = layer->latent;
    const rz_workspace *space = &decoder->space;
    rz_multiply_heads(decoder, thread, RZ_OUTPUT, (rz_product){
        .linear = &latent->values, .x = space->attended, .rows = decoder->step->tokens,
        .stride = job.heads * latent->rank, .end = ROUND, .out = space->queries,
        .out_stride = job.heads * latent->value_dim }, job.heads, latent->rank, latent->value_dim);
    return space->queries;
}

long rz_latent_projected(const rz_latent *latent)
{
    return latent->query_rank ? latent->query_b.outputs : 0;
}

long rz_latent_queries(const rz_latent *latent, const rz_heads *heads)
{
    return (long)heads->q_heads * latent->value_dim;
}

long rz_latent_attended(const rz_latent *latent, const rz_heads *heads)
{
    const long plain = (long)heads->q_heads * latent->plain;
    return plain > latent->query_rank ? plain : latent->query_rank;
}
