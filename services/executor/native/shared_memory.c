/* See shared_memory.h. */
#define _GNU_SOURCE
#include "shared_memory.h"

#include <poll.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#define LINE 64
#define CHUNK 1024         /* elements that are summed at once: their float32 sums stay in the first cache */
#define SPIN_NS 30000      /* spin this long: most waits are shorter than a turn through the scheduler */
#define YIELD_NS 1000000   /* then let others on the core run, this long; then sleep */
#define SLEEP_NS 100000    /* a turn of sleep */
#define SPINS 64           /* pauses between two looks at the clock */

typedef struct {
    _Alignas(LINE) _Atomic uint64_t value;
} word;

typedef struct {
    word shape;   /* ranks, lanes and piece size of the first rank to come, to notice a mistake */
    word aborted;
} header;

typedef struct {
    _Alignas(LINE) uint64_t pieces; /* done so far, the same on every rank */
    int64_t busy_ns;
    int64_t waited_ns;
} lane_state;

struct rz_ring {
    unsigned char *area;
    int rank, ranks, lanes;
    size_t piece_bytes;
    struct pollfd *watched;
    int watched_count;
    _Atomic int64_t *shown; /* RZ_RING_SHOWN words, or NULL */
    lane_state lane[];
};

static int64_t now_ns(void)
{
    struct timespec time;
    clock_gettime(CLOCK_MONOTONIC, &time);
    return (int64_t)time.tv_sec * 1000000000 + time.tv_nsec;
}

static inline void relax(void)
{
#if defined(__x86_64__) || defined(__i386__)
    __builtin_ia32_pause();
#elif defined(__aarch64__)
    __asm__ volatile("isb");
#endif
}

/* --- the area ------------------------------------------------------------------------------------------ */

static size_t lane_bytes(int ranks, size_t piece_bytes)
{
    return (size_t)ranks * (sizeof(word) + 2 * piece_bytes);
}

size_t rz_ring_area_bytes(int ranks, int lanes, size_t piece_bytes)
{
    return sizeof(header) + (size_t)lanes * lane_bytes(ranks, piece_bytes);
}

static header *head(const rz_ring *ring)
{
    return (header *)ring->area;
}

static unsigned char *lane_start(const rz_ring *ring, int lane)
{
    return ring->area + sizeof(header) + (size_t)lane * lane_bytes(ring->ranks, ring->piece_bytes);
}

static _Atomic uint64_t *arrived(const rz_ring *ring, int lane, int rank)
{
    return &((word *)lane_start(ring, lane))[rank].value;
}

static unsigned char *staging(const rz_ring *ring, int lane, int rank)
{
    size_t half = ring->lane[lane].pieces & 1;
    return lane_start(ring, lane) + (size_t)ring->ranks * sizeof(word)
           + (2 * (size_t)rank + half) * ring->piece_bytes;
}

rz_ring *rz_ring_open(void *area, int rank, int ranks, int lanes, size_t piece_bytes)
{
    if (ranks < 1 || ranks > 0xffff || rank < 0 || rank >= ranks || lanes < 1 || lanes > 0xffff
        || piece_bytes == 0 || piece_bytes % LINE || piece_bytes > UINT32_MAX || (uintptr_t)area % LINE)
        return NULL;
    uint64_t shape = (uint64_t)ranks << 48 | (uint64_t)lanes << 32 | piece_bytes;
    uint64_t found = 0;
    if (!atomic_compare_exchange_strong(&((header *)area)->shape.value, &found, shape) && found != shape)
        return NULL;
    rz_ring *ring = aligned_alloc(LINE, sizeof(rz_ring) + (size_t)lanes * sizeof(lane_state));
    if (ring == NULL)
        return NULL;
    memset(ring, 0, sizeof(rz_ring) + (size_t)lanes * sizeof(lane_state));
    ring->area = area;
    ring->rank = rank;
    ring->ranks = ranks;
    ring->lanes = lanes;
    ring->piece_bytes = piece_bytes;
    ring->watched = calloc((size_t)ranks, sizeof(struct pollfd));
    if (ring->watched == NULL) {
        free(ring);
        return NULL;
    }
    return ring;
}

void rz_ring_watch(rz_ring *ring, const int *pidfds, int count)
{
    ring->watched_count = count < ring->ranks ? count : ring->ranks;
    for (int i = 0; i < ring->watched_count; i++)
        ring->watched[i] = (struct pollfd){.fd = pidfds[i], .events = POLLIN};
}

void rz_ring_show(rz_ring *ring, int64_t *words)
{
    ring->shown = (_Atomic int64_t *)words;
}

void rz_ring_close(rz_ring *ring)
{
    if (ring != NULL)
        free(ring->watched);
    free(ring);
}

void rz_ring_abort(rz_ring *ring)
{
    atomic_store_explicit(&head(ring)->aborted.value, 1, memory_order_release);
}

int64_t rz_ring_busy_ns(const rz_ring *ring, int lane)
{
    return ring->lane[lane].busy_ns;
}

int64_t rz_ring_waited_ns(const rz_ring *ring, int lane)
{
    return ring->lane[lane].waited_ns;
}

/* --- what is shown ------------------------------------------------------------------------------------- */

enum { BEGUN, FINISHED, KIND, BYTES, SINCE, BUSY, WAITED };

static void show(const rz_ring *ring, int word, int64_t value)
{
    atomic_store_explicit(&ring->shown[word], value, memory_order_relaxed);
}

/* An operation begins; returns when. */
static int64_t begin(const rz_ring *ring, int lane, int kind, size_t bytes)
{
    int64_t now = now_ns();
    if (lane == 0 && ring->shown != NULL) {
        show(ring, KIND, kind);
        show(ring, BYTES, (int64_t)bytes);
        show(ring, SINCE, now);
        int64_t begun = atomic_load_explicit(&ring->shown[BEGUN], memory_order_relaxed);
        atomic_store_explicit(&ring->shown[BEGUN], begun + 1, memory_order_release);
    }
    return now;
}

/* It is over. One that has failed stays shown as under way: the ring is lost in it. */
static int end(rz_ring *ring, int lane, int64_t began, int result)
{
    lane_state *state = &ring->lane[lane];
    state->busy_ns += now_ns() - began;
    if (lane == 0 && ring->shown != NULL && result == RZ_RING_OK) {
        show(ring, BUSY, state->busy_ns);
        show(ring, WAITED, state->waited_ns);
        show(ring, FINISHED, atomic_load_explicit(&ring->shown[BEGUN], memory_order_relaxed));
    }
    return result;
}

/* --- waiting ------------------------------------------------------------------------------------------- */

/* One turn of sleep. Says whether a watched process has ended. Threads poll copies: `revents` is written. */
static int sleep_watching(const rz_ring *ring)
{
    struct timespec turn = {.tv_nsec = SLEEP_NS};
    if (ring->watched_count == 0) {
        nanosleep(&turn, NULL);
        return 0;
    }
    struct pollfd watched[ring->watched_count];
    memcpy(watched, ring->watched, sizeof watched);
    return ppoll(watched, (nfds_t)ring->watched_count, &turn, NULL) > 0;
}

static int has_arrived(const _Atomic uint64_t *counter, uint64_t target)
{
    return atomic_load_explicit(counter, memory_order_acquire) >= target;
}

/* Waits until `rank` has published `target` pieces: spins, then yields, then sleeps. */
static int wait_for(const rz_ring *ring, int lane, int rank, uint64_t target, int64_t timeout_ns)
{
    const _Atomic uint64_t *counter = arrived(ring, lane, rank);
    int64_t began = 0;
    for (;;) {
        for (int spin = 0; spin < SPINS; spin++) {
            if (has_arrived(counter, target))
                return RZ_RING_OK;
            relax();
        }
        if (atomic_load_explicit(&head(ring)->aborted.value, memory_order_relaxed))
            return RZ_RING_ABORTED;
        int64_t now = now_ns();
        if (began == 0)
            began = now;
        int64_t waited = now - began;
        if (waited > timeout_ns)
            return RZ_RING_TIMEOUT;
        if (waited < SPIN_NS)
            continue;
        if (waited < YIELD_NS)
            sched_yield();
        else if (sleep_watching(ring))
            /* Its last piece may have been published just before it ended. */
            return has_arrived(counter, target) ? RZ_RING_OK : RZ_RING_GONE;
    }
}

/* Publishes this rank's piece and waits for the others'. An error ends the ring for everybody. */
static int meet(rz_ring *ring, int lane, int64_t timeout_ns)
{
    uint64_t target = ring->lane[lane].pieces + 1;
    if (atomic_load_explicit(&head(ring)->aborted.value, memory_order_relaxed))
        return RZ_RING_ABORTED;
    atomic_store_explicit(arrived(ring, lane, ring->rank), target, memory_order_release);
    int64_t began = now_ns();
    int result = RZ_RING_OK;
    for (int rank = 0; rank < ring->ranks && result == RZ_RING_OK; rank++)
        if (rank != ring->rank)
            result = wait_for(ring, lane, rank, target, timeout_ns);
    ring->lane[lane].waited_ns += now_ns() - began;
    if (result != RZ_RING_OK)
        rz_ring_abort(ring);
    return result;
}

/* --- sums ---------------------------------------------------------------------------------------------- */

static inline __attribute__((always_inline)) float from_bf16(uint16_t value)
{
    uint32_t bits = (uint32_t)value << 16;
    float result;
    memcpy(&result, &bits, sizeof result);
    return result;
}

/* To nearest even; NaN stays NaN. */
static inline __attribute__((always_inline)) uint16_t to_bf16(float value)
{
    uint32_t bits;
    memcpy(&bits, &value, sizeof bits);
    uint32_t rounded = (bits + 0x7fff + (bits >> 16 & 1)) >> 16;
    return (uint16_t)((bits & 0x7fffffff) > 0x7f800000 ? bits >> 16 | 0x40 : rounded);
}

/* out[i] = parts[0][i] + parts[1][i] + ..., in this order. `out` may be one of the parts. */
#define SUM(name, type, load, store, attributes)                                                           \
    attributes static void name(type *out, const void *const *parts, int count, size_t elements)           \
    {                                                                                                      \
        for (size_t start = 0; start < elements; start += CHUNK) {                                         \
            size_t length = elements - start < CHUNK ? elements - start : CHUNK;                           \
            float sums[CHUNK];                                                                             \
            const type *first = (const type *)parts[0] + start;                                            \
            for (size_t i = 0; i < length; i++)                                                            \
                sums[i] = load(first[i]);                                                                  \
            for (int part = 1; part < count; part++) {                                                     \
                const type *next = (const type *)parts[part] + start;                                      \
                for (size_t i = 0; i < length; i++)                                                        \
                    sums[i] += load(next[i]);                                                              \
            }                                                                                              \
            for (size_t i = 0; i < length; i++)                                                            \
                out[start + i] = store(sums[i]);                                                           \
        }                                                                                                  \
    }

#define PLAIN(value) (value)
SUM(sum_f32_any, float, PLAIN, PLAIN, )
SUM(sum_bf16_any, uint16_t, from_bf16, to_bf16, )
#if defined(__x86_64__)
#define WIDE __attribute__((target("avx512f,avx512bw,avx512vl,prefer-vector-width=512")))
#define HALF __attribute__((target("avx2")))
SUM(sum_f32_avx512, float, PLAIN, PLAIN, WIDE)
SUM(sum_bf16_avx512, uint16_t, from_bf16, to_bf16, WIDE)
SUM(sum_f32_avx2, float, PLAIN, PLAIN, HALF)
SUM(sum_bf16_avx2, uint16_t, from_bf16, to_bf16, HALF)
#endif

static void sum_f32(float *out, const void *const *parts, int count, size_t elements)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
        sum_f32_avx512(out, parts, count, elements);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        sum_f32_avx2(out, parts, count, elements);
        return;
    }
#endif
    sum_f32_any(out, parts, count, elements);
}

static void sum_bf16(uint16_t *out, const void *const *parts, int count, size_t elements)
{
#if defined(__x86_64__)
    if (__builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl")) {
        sum_bf16_avx512(out, parts, count, elements);
        return;
    }
    if (__builtin_cpu_supports("avx2")) {
        sum_bf16_avx2(out, parts, count, elements);
        return;
    }
#endif
    sum_bf16_any(out, parts, count, elements);
}

/* Sums `count` elements of `size` bytes on one lane, piece after piece. */
static int sum_on_lane(rz_ring *ring, int lane, void *values, size_t count, size_t size, int64_t timeout_ns)
{
    int64_t began = begin(ring, lane, RZ_RING_SUM, count * size);
    lane_state *state = &ring->lane[lane];
    const void *parts[ring->ranks];
    size_t most = ring->piece_bytes / size;
    int result = RZ_RING_OK;
    for (size_t start = 0; start < count && result == RZ_RING_OK; start += most) {
        size_t length = count - start < most ? count - start : most;
        void *mine = (char *)values + start * size;
        memcpy(staging(ring, lane, ring->rank), mine, length * size);
        result = meet(ring, lane, timeout_ns);
        if (result != RZ_RING_OK)
            break;
        for (int rank = 0; rank < ring->ranks; rank++)
            parts[rank] = rank == ring->rank ? mine : staging(ring, lane, rank);
        if (size == sizeof(float))
            sum_f32(mine, parts, ring->ranks, length);
        else
            sum_bf16(mine, parts, ring->ranks, length);
        state->pieces++;
    }
    return end(ring, lane, began, result);
}

int rz_ring_sum_f32(rz_ring *ring, float *values, size_t count, int64_t timeout_ns)
{
    return sum_on_lane(ring, 0, values, count, sizeof *values, timeout_ns);
}

int rz_ring_sum_bf16(rz_ring *ring, uint16_t *values, size_t count, int64_t timeout_ns)
{
    return sum_on_lane(ring, 0, values, count, sizeof *values, timeout_ns);
}

size_t rz_ring_part(size_t count, int thread, int threads)
{
    if (thread >= threads)
        return count;
    size_t lines = (count + 15) / 16;
    return lines * (size_t)thread / (size_t)threads * 16;
}

int rz_ring_sum_f32_part(
    rz_ring *ring, float *values, size_t count, int thread, int threads, int64_t timeout_ns)
{
    if (thread < 0 || thread >= threads || threads > ring->lanes)
        return RZ_RING_MISUSE;
    size_t start = rz_ring_part(count, thread, threads);
    size_t stop = rz_ring_part(count, thread + 1, threads);
    return sum_on_lane(ring, thread, values + start, stop - start, sizeof *values, timeout_ns);
}

/* --- gathers ------------------------------------------------------------------------------------------- */

static size_t piece_of(size_t bytes, size_t start, size_t most)
{
    size_t left = bytes > start ? bytes - start : 0;
    return left < most ? left : most;
}

int rz_ring_gather(
    rz_ring *ring, const void *mine, const size_t *bytes, void *const *parts, int64_t timeout_ns)
{
    int64_t began = begin(ring, 0, RZ_RING_GATHER, bytes[ring->rank]);
    lane_state *state = &ring->lane[0];
    size_t longest = 0;
    for (int rank = 0; rank < ring->ranks; rank++)
        longest = bytes[rank] > longest ? bytes[rank] : longest;
    int result = RZ_RING_OK;
    for (size_t start = 0; start < longest && result == RZ_RING_OK; start += ring->piece_bytes) {
        size_t own = piece_of(bytes[ring->rank], start, ring->piece_bytes);
        if (own)
            memcpy(staging(ring, 0, ring->rank), (const char *)mine + start, own);
        result = meet(ring, 0, timeout_ns);
        if (result != RZ_RING_OK)
            break;
        for (int rank = 0; parts != NULL && rank < ring->ranks; rank++) {
            size_t length = piece_of(bytes[rank], start, ring->piece_bytes);
            if (length && parts[rank] != mine)
                memcpy((char *)parts[rank] + start, staging(ring, 0, rank), length);
        }
        state->pieces++;
    }
    return end(ring, 0, began, result);
}

int rz_ring_barrier(rz_ring *ring, int64_t timeout_ns)
{
    int64_t began = begin(ring, 0, RZ_RING_BARRIER, 0);
    int result = meet(ring, 0, timeout_ns);
    if (result == RZ_RING_OK)
        ring->lane[0].pieces++;
    return end(ring, 0, began, result);
}
