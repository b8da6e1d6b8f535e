/* Sums and gathers between the ranks of one host, through memory that all of them have mapped.
 *
 *   area     | header | lane 0                                          | lane 1 | ...
 *   lane     | arrived of rank 0 | arrived of rank 1 | ... | staging of rank 0 | staging of rank 1 | ...
 *   staging  | even pieces | odd pieces |
 *
 * An operation is cut into pieces of at most `piece_bytes`. For piece number p each rank writes its
 * contribution into its own staging, half p % 2, publishes `arrived = p + 1`, waits until every rank has
 * published as much, and reads the others' contributions. A rank that writes piece p + 2 over piece p has
 * seen every rank arrive at p + 1, and they had all read piece p before: one barrier per piece is enough.
 *
 * Lanes are independent of each other. A rank whose threads call together uses one lane per thread, and
 * thread t of every rank meets only thread t of the others.
 *
 * Every rank calls the same operations with the same sizes in the same order on each lane. Sums are formed
 * in float32 in the order of the ranks, so that the result has the same bits on every rank.
 */
#ifndef RZ_SHARED_MEMORY_H
#define RZ_SHARED_MEMORY_H

#include <stddef.h>
#include <stdint.h>

#ifdef __cplusplus
extern "C" {
#endif

enum {
    RZ_RING_OK = 0,
    RZ_RING_ABORTED = -1, /* some rank has given the ring up */
    RZ_RING_TIMEOUT = -2, /* a rank did not come within the time */
    RZ_RING_GONE = -3,    /* the process of a rank has ended */
    RZ_RING_MISUSE = -4   /* a thread without a lane, or an area of another shape */
};

/* After any error the ring is aborted on every rank, and stays so. */

typedef struct rz_ring rz_ring;

/* Bytes of the area of a ring. */
size_t rz_ring_area_bytes(int ranks, int lanes, size_t piece_bytes);

/* This rank's handle on `area`, which is aligned to 64 bytes, was zero when the first rank opened it, and
 * stays mapped until `rz_ring_close`. `piece_bytes` is a multiple of 64. NULL: no memory, or misuse. */
rz_ring *rz_ring_open(void *area, int rank, int ranks, int lanes, size_t piece_bytes);

/* Descriptors (pidfd_open) of the other ranks' processes: their end is noticed while waiting. The caller
 * keeps them open. At most one per rank. */
void rz_ring_watch(rz_ring *ring, const int *pidfds, int count);

/* Has this rank show what it does on lane 0, to whoever reads `words` meanwhile, in this order: operations begun,
 * operations finished, kind and bytes of the last one, when it began (nanoseconds, monotonic); then, after each
 * operation, rz_ring_busy_ns and rz_ring_waited_ns. The words stay where they are until `rz_ring_close`. */
enum { RZ_RING_SHOWN = 7 };
enum { RZ_RING_SUM = 1, RZ_RING_GATHER = 2, RZ_RING_BARRIER = 3 };
void rz_ring_show(rz_ring *ring, int64_t *words);

void rz_ring_close(rz_ring *ring);

/* Makes every operation of every rank, those under way included, return RZ_RING_ABORTED. */
void rz_ring_abort(rz_ring *ring);

/* Sums `values` [count] over the ranks, in place, on lane 0. bf16 is summed in float32 and rounded once,
 * to nearest even. `timeout_ns` bounds each wait. */
int rz_ring_sum_f32(rz_ring *ring, float *values, size_t count, int64_t timeout_ns);
int rz_ring_sum_bf16(rz_ring *ring, uint16_t *values, size_t count, int64_t timeout_ns);

/* The same, called by `threads` threads of every rank at once (as many on each): thread t sums
 * [rz_ring_part(count, t, threads), rz_ring_part(count, t + 1, threads)) on lane t. The caller sees to it
 * that the part's values are written before, and that threads wait for each other before they read parts
 * that are not their own. */
int rz_ring_sum_f32_part(
    rz_ring *ring, float *values, size_t count, int thread, int threads, int64_t timeout_ns);

/* First element of a thread's part: parts begin at multiples of 16 elements. */
size_t rz_ring_part(size_t count, int thread, int threads);

/* Brings `mine` of every rank to whoever wants it, on lane 0. `bytes` [ranks]: length of each rank's; the
 * same on every rank. `parts` [ranks]: where each goes (a rank's own may be `mine`); NULL as a whole on
 * ranks that want nothing. */
int rz_ring_gather(
    rz_ring *ring, const void *mine, const size_t *bytes, void *const *parts, int64_t timeout_ns);

/* Returns once every rank has called it. */
int rz_ring_barrier(rz_ring *ring, int64_t timeout_ns);

/* Nanoseconds that this rank has spent in operations of `lane`, and how much of that it waited. */
int64_t rz_ring_busy_ns(const rz_ring *ring, int lane);
int64_t rz_ring_waited_ns(const rz_ring *ring, int lane);

#ifdef __cplusplus
}
#endif
#endif
