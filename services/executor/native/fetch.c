/* See fetch.h. */
#include "fetch.h"

#include <sys/mman.h>
#include <unistd.h>

#include "codec.h"
#include "sparse.h"

enum {
    TABLE_PIECE = 512,       /* blocks of a table that one task looks at */
    FETCH_PAGE = 4096,       /* bytes: what is that near is asked for together */
    FETCH_MOST = 128 << 10,  /* bytes: of more than a device's read-ahead only the first are read */
};

typedef struct {
    const rz_decoder *decoder;
    const rz_layer *layer; /* that is asked for */
    const rz_heads *heads;
    size_t plane;          /* bytes of one head's keys or values in a block */
} fetching;

/* Bytes that are asked for together. */
typedef struct {
    uintptr_t begin, end;
} fetched_span;

static void ask_for_span(const fetched_span *span)
{
    const uintptr_t page = (uintptr_t)sysconf(_SC_PAGESIZE);
    for (uintptr_t at = span->begin / page * page; at < span->end; at += FETCH_MOST)
        (void)madvise((void *)at, least((long)(span->end - at), FETCH_MOST), MADV_WILLNEED);
}

/* Adds bytes to a span, or asks for it and begins another one. */
static void extend_span(fetched_span *span, uintptr_t begin, size_t size)
{
    const uintptr_t page = begin / FETCH_PAGE * FETCH_PAGE;
    if (page < span->begin || page > span->end) {
        ask_for_span(span);
        *span = (fetched_span){ page, page };
    }
    if (begin + size > span->end)
        span->end = begin + size;
}

static fetching fetching_of(const rz_decoder *decoder, const rz_layer *layer)
{
    const rz_heads *heads = &decoder->model.heads[layer->heads];
    const size_t width = layer->codec == RZ_CODEC_NONE ? sizeof(bf16) : 1;
    return (fetching){ decoder, layer, heads, (size_t)decoder->model.block_size * heads->key_dim * width };
}

static uintptr_t plane_of(const fetching *job, long quantized, int line, int head)
{
    const long planes = (quantized * job->heads->lines + line) * job->heads->kv_heads + head;
    return (uintptr_t)job->layer->codes + (size_t)planes * job->plane;
}

static uint8_t *asked_of(const fetching *job, long quantized, int head)
{
    return job->layer->asked + quantized * job->heads->kv_heads + head;
}

static uint8_t step_before(int64_t fetch)
{
    return (uint8_t)(fetch == 1 ? 255 : fetch - 1);
}

static void fetch_block(const fetching *job, long quantized, fetched_span *span)
{
    extend_span(span, plane_of(job, quantized, 0, 0), job->plane * (size_t)(job->heads->lines * job->heads->kv_heads));
}

/* Of the heads that have read it one step before. */
static void fetch_heads(const fetching *job, long quantized, uint8_t before, fetched_span *span)
{
    for (int line = 0; line < job->heads->lines; line++)
        for (int head = 0; head < job->heads->kv_heads; head++)
            if (__atomic_load_n(asked_of(job, quantized, head), __ATOMIC_RELAXED) == before)
                extend_span(span, plane_of(job, quantized, line, head), job->plane);
}

void rz_fetch_chosen(const rz_decoder *decoder, const rz_layer *layer, const int32_t *table, long count, int head)
{
    const int64_t fetch = decoder->step->fetch;
    if (!fetch || !layer->asked)
        return;
    const fetching job = fetching_of(decoder, layer);
    for (int line = 0; line < job.heads->lines; line++) {
        fetched_span span = { 0, 0 };
        for (long i = 0; i < count; i++) {
            const long quantized = table[i] - layer->num_writable;
            if (quantized < 0)
                continue;
            const uint8_t asked = __atomic_load_n(asked_of(&job, quantized, head), __ATOMIC_RELAXED);
            if (asked != fetch && asked != step_before(fetch))
                extend_span(&span, plane_of(&job, quantized, line, head), job.plane);
        }
        ask_for_span(&span);
    }
    for (long i = 0; i < count; i++)
        if (table[i] >= layer->num_writable)
            __atomic_store_n(asked_of(&job, table[i] - layer->num_writable, head), (uint8_t)fetch, __ATOMIC_RELAXED);
}

/* Whether rows of a sequence, the first at `position`, choose what they read in the layer. */
static int foretold(const fetching *job, long sequence, int position)
{
    const rz_step *step = job->decoder->step;
    const rz_model *model = &job->decoder->model;
    rz_choice choice;
    return job->layer->chooses && step->num_sparse
        && rz_reads_some(step->sparse + sequence * RZ_CHOICE_FIELDS, model->block_size, position, &choice)
        && job->layer - model->layer >= choice.dense_layers;
}

/* One piece of the tables of the step's sequences; the last task: the blocks that the step fills. */
static void fetch_task(void *argument, long task, long next, int thread)
{
    (void)next, (void)thread;
    const fetching *job = argument;
    const rz_step *step = job->decoder->step;
    const long size = job->decoder->model.block_size;
    const int32_t *table = step->block_tables;
    fetched_span span = { 0, 0 };
    for (long i = 0; i < step->sequences; i++) {
        const long context = step->context_lens[i], begin = context - step->query_lens[i];
        const long blocks = (context + size - 1) / size, pieces = (blocks + TABLE_PIECE - 1) / TABLE_PIECE;
        if (task >= pieces) {
            task -= pieces, table += blocks;
            continue;
        }
        const long seen = job->layer->window && begin > job->layer->window ? (begin - job->layer->window) / size : 0;
        const int chooses = foretold(job, i, (int)begin);
        for (long at = task * TABLE_PIECE; at < least((task + 1) * TABLE_PIECE, blocks); at++) {
            const long quantized = table[at] - job->layer->num_writable;
            if (quantized >= 0 && at >= seen && chooses)
                fetch_heads(job, quantized, step_before(step->fetch), &span);
            else if (quantized >= 0 && at >= seen)
                fetch_block(job, quantized, &span);
        }
        ask_for_span(&span);
        return;
    }
    for (long i = 0; i < step->num_compressions; i++)
        fetch_block(job, step->compressions[2 * i + 1] - job->layer->num_writable, &span);
    ask_for_span(&span);
}

static void fetch_layer(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    const rz_step *step = decoder->step;
    const long size = decoder->model.block_size;
    fetching job = fetching_of(decoder, layer);
    long tasks = 1;
    for (long i = 0; i < step->sequences; i++)
        tasks += ((step->context_lens[i] + size - 1) / size + TABLE_PIECE - 1) / TABLE_PIECE;
    rz_run_stage(decoder, thread, RZ_ATTEND, tasks, fetch_task, &job);
}

void rz_fetch_ahead(rz_decoder *decoder, int thread, const rz_layer *layer)
{
    const rz_layer *first = decoder->model.layer, *end = first + decoder->model.layers, *coming = layer + 1;
    if (!decoder->step->fetch || !layer->asked)
        return;
    while (!first->asked)
        first++;
    while (coming < end && !coming->asked)
        coming++;
    if (layer == first)
        fetch_layer(decoder, thread, layer);
    if (coming < end)
        fetch_layer(decoder, thread, coming);
}
