/* See sampling.h. */
#include "sampling.h"

#include <math.h>
#include <stdlib.h>

#include "decoder.h"
#include "state.h"
#include "threads.h"
#include "vector.h"

enum {
    SCANNED = 64,   /* logits of which the largest tells whether any is a candidate */
    DISTANCES = 6,  /* from the largest logit, in temperatures, by STRIDE */
    STRIDE = 2,
    MOST_SUMS = 256, /* blocks of which a draw keeps sums */
    LEAST_SUMMED = 512,
};

/* Those at `first` and after it, minus infinity behind the end. */
static f32 scores_at(const float *scores, long first, long width)
{
    if (width - first >= LANES)
        return f32_load(scores + first);
    const lanes there = lanes_first(width - first);
    return f32_select(there, f32_load_some(there, scores + first), f32_set1(-INFINITY));
}

/* What is no number is passed over. */
static float largest_within(const float *scores, long first, long end)
{
    f32 most = f32_set1(-INFINITY);
    for (long i = first; i < end; i += LANES)
        most = f32_max(scores_at(scores, i, end), most);
    return f32_largest(most);
}

static long smaller(long a, long b)
{
    return a < b ? a : b;
}

/* The `k`th largest of `count` numbers, which it puts into another order; 1 <= k <= count. Hoare's selection. */
static float kth_largest(float *values, long count, long k)
{
    long low = 0, high = count - 1;
    while (low < high) {
        const float pivot = values[low + (high - low) / 2];
        long i = low, j = high;
        while (i <= j) {
            while (values[i] > pivot)
                i++;
            while (values[j] < pivot)
                j--;
            if (i <= j) {
                const float other = values[i];
                values[i++] = values[j];
                values[j--] = other;
            }
        }
        if (k - 1 <= j)
            high = j;
        else if (k - 1 >= i)
            low = i;
        else
            break;
    }
    return values[k - 1];
}

/* Puts what is at or above `bound` into `values`, and where it is into `ids` where there are any; returns how many. Both
 * have room for all of `width`. */
static long take_from(const float *scores, long width, float bound, int64_t *ids, float *values)
{
    long found = 0;
    for (long first = 0; first < width; first += SCANNED) {
        const long end = smaller(first + SCANNED, width);
        if (!(largest_within(scores, first, end) >= bound))
            continue;
        for (long i = first; i < end; i++)
            if (scores[i] >= bound) {
                if (ids)
                    ids[found] = i;
                values[found++] = scores[i];
            }
    }
    return found;
}

/* Below which none of the `k` largest are: the k-th largest of the blocks' largest. `room` for all of them. */
static float floor_of(const float *scores, long width, long k, float *room)
{
    const long block = 4 * k * SCANNED > width ? LANES : SCANNED;
    long blocks = 0;
    for (long first = 0; first < width; first += block)
        room[blocks++] = largest_within(scores, first, smaller(first + block, width));
    return k <= blocks ? kth_largest(room, blocks, k) : -INFINITY;
}

/* The `k`th largest, or minus infinity where fewer are numbers; `room` [width], of which the first `found` are those that
 * were looked at. */
static float bound_of(const float *scores, long width, long k, float *room, long *found)
{
    *found = take_from(scores, width, floor_of(scores, width, k, room), NULL, room);
    return *found < k ? -INFINITY : kth_largest(room, *found, k);
}

static int bound_largest(const rz_candidates *job, long row, const float *logits)
{
    const long k = smaller(labs((long)job->wants[row].count), job->width);
    float *room = malloc(sizeof *room * (size_t)job->width);
    if (!room)
        return 0;
    long found;
    job->bounds[row] = bound_of(logits, job->width, k, room, &found);
    job->lengths[row] = 0;
    for (long i = 0; i < found; i++)
        job->lengths[row] += room[i] >= job->bounds[row];
    free(room);
    return 1;
}

/* A sum of float32, and what its rounding has lost: as good as one of float64, with half as many registers. Knuth, The Art
 * of Computer Programming, volume 2, section 4.2.2, theorem B. */
typedef struct {
    f32 sum, lost;
} exact;

RZ_INLINE void exact_add(exact *to, f32 value)
{
    const f32 sum = f32_add(to->sum, value), added = f32_sub(sum, to->sum);
    to->lost = f32_add(to->lost, f32_add(f32_sub(to->sum, f32_sub(sum, added)), f32_sub(value, added)));
    to->sum = sum;
}

static double exact_sum(const exact *of)
{
    float sums[LANES], lost[LANES];
    f32_store(sums, of->sum);
    f32_store(lost, of->lost);
    double sum = 0;
    for (int i = 0; i < LANES; i++)
        sum += (double)sums[i] + (double)lost[i];
    return sum;
}

/* In temperatures, how far the scores at `first` are below the largest: 0 or less. */
RZ_INLINE f32 distance_at(const float *scores, long first, long width, float largest, float temperature)
{
    return f32_div(f32_sub(scores_at(scores, first, width), f32_set1(largest)), f32_set1(temperature));
}

/* The weight of all, and in `within` of those not farther from the largest than each of the distances. */
RZ_INLINE double weigh_all(const float *scores, long width, float largest, float temperature, float *within)
{
    exact all = { f32_zero(), f32_zero() };
    f32 near[DISTANCES];
    for (int i = 0; i < DISTANCES; i++)
        near[i] = f32_zero();
    for (long first = 0; first < width; first += LANES) {
        const f32 distance = distance_at(scores, first, width, largest, temperature), weights = exp_f32(distance);
        exact_add(&all, weights);
        for (int i = 0; within && i < DISTANCES; i++)
            near[i] = f32_add(near[i], f32_select(f32_above(distance, f32_set1(-(float)(i + 1) * STRIDE)), weights,
                                                  f32_zero()));
    }
    for (int i = 0; within && i < DISTANCES; i++)
        within[i] = f32_sum(near[i]);
    return exact_sum(&all);
}

/* At or above which the likeliest ones with `share` of the weight of all are, and none that is `margin` or more below the
 * largest; `total`: that weight. Sums in float32 of some thousand terms are off by less than 1 / 2^10 of them, and distances
 * by rounding. */
static float bound_by_share(const float *scores, long width, float largest, float temperature, double share, float margin,
                            double *total)
{
    float within[DISTANCES];
    *total = share < 1 ? weigh_all(scores, width, largest, temperature, within)
                       : weigh_all(scores, width, largest, temperature, NULL);
    for (int i = 0; share < 1 && i < DISTANCES; i++)
        if (within[i] >= share * *total * (1 + 1.0 / 512)) {
            margin = fminf(margin, temperature * STRIDE * ((float)(i + 1) + 1.0f / 64));
            break;
        }
    return largest - margin - fabsf(largest) / (1 << 20);
}

static void bound_near(const rz_candidates *job, long row, const float *logits)
{
    const rz_want *want = &job->wants[row];
    const double share = job->alone ? want->share : 1;
    const float bound = bound_by_share(logits, job->width, job->largest[row], want->temperature, share, want->margin,
                                       &job->totals[row]);
    job->bounds[row] = bound;
    job->lengths[row] = 0;
    for (long first = 0; first < job->width; first += SCANNED) {
        const long end = smaller(first + SCANNED, job->width);
        if (largest_within(logits, first, end) >= bound)
            for (long i = first; i < end; i++)
                job->lengths[row] += logits[i] >= bound;
    }
}

typedef struct {
    rz_threads *threads;
    long count;
    rz_task task;
    const void *of;
    int no_memory; /* set by any of the threads */
} by_rows;

static void run_rows(void *argument, int thread)
{
    by_rows *job = argument;
    rz_stage(job->threads, thread, job->count, 1, job->task, job);
}

/* Each row by one thread; one row by the caller alone, since to wake the others takes longer. */
static int each_row(rz_decoder *decoder, long count, rz_task task, const void *of)
{
    by_rows job = { decoder->threads, count, task, of, 0 };
    if (count == 1)
        task(&job, 0, 1, 0);
    else if (count)
        rz_threads_run(decoder->threads, run_rows, &job);
    return job.no_memory ? RZ_NO_MEMORY : RZ_OK;
}

static void find_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    by_rows *by = argument;
    const rz_candidates *job = by->of;
    const float *logits = job->logits + job->rows[row] * job->width;
    if (!job->wants[row].count)
        bound_near(job, row, logits);
    else if (!bound_largest(job, row, logits))
        by->no_memory = 1;
}

int rz_decoder_find_candidates(rz_decoder *decoder, const rz_candidates *job)
{
    return each_row(decoder, job->count, find_task, job);
}

static void take_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    const rz_candidates *job = ((by_rows *)argument)->of;
    const float *logits = job->logits + job->rows[row] * job->width;
    take_from(logits, job->width, job->bounds[row], job->ids + job->starts[row], job->values + job->starts[row]);
}

int rz_decoder_take_candidates(rz_decoder *decoder, const rz_candidates *job)
{
    return each_row(decoder, job->count, take_task, job);
}

/* --- draws --- */

/* The last of `width` scores that has a weight, where a running sum has not passed its target for rounding; 0: none. */
static long last_with_weight(const float *scores, long width)
{
    while (width > 1 && scores[width - 1] == -INFINITY)
        width--;
    return width - 1;
}

/* From all of a row: block by block, and then within one. */
static long draw_from_all(const float *scores, long width, float largest, const rz_draw *of)
{
    const long most = (width + MOST_SUMS - 1) / MOST_SUMS, rounded = (most + LANES - 1) / LANES * LANES;
    const long block = rounded < LEAST_SUMMED ? LEAST_SUMMED : rounded;
    double weights[MOST_SUMS], total = 0, before = 0;
    long blocks = 0, chosen = 0;
    for (long begin = 0; begin < width; begin += block) {
        weights[blocks] = weigh_all(scores + begin, smaller(block, width - begin), largest, of->temperature, NULL);
        total += weights[blocks++];
    }
    const double target = of->uniform * total;
    while (chosen < blocks - 1 && before + weights[chosen] <= target)
        before += weights[chosen++];
    const long begin = chosen * block, end = smaller(begin + block, width);
    for (long i = begin; i < end; i += LANES) {
        float each[LANES];
        f32_store(each, exp_f32(distance_at(scores, i, end, largest, of->temperature)));
        for (long j = 0; j < LANES && i + j < end; j++)
            if ((before += (double)each[j]) > target)
                return i + j;
    }
    return last_with_weight(scores, end);
}

/* The weight of the least likely one in the smallest set of likeliest ones that weighs `target` or more. Puts `weights` into
 * another order. Arithmetic of the sums: double, in no particular order. */
static float nucleus_threshold(float *weights, long count, double target)
{
    long low = 0, high = count; /* the threshold is among these; all before `low` weigh more than they */
    double held = 0;            /* by all before `low` */
    float least = 0;
    while (low < high) {
        const float pivot = weights[low + (high - low) / 2];
        long above = low, equal = low; /* [low, above) > pivot, [above, equal) = pivot, [equal, i) < pivot */
        double of_above = 0;
        for (long i = low; i < high; i++) {
            const float value = weights[i];
            if (value < pivot)
                continue;
            weights[i] = weights[equal];
            if (value > pivot) {
                weights[equal++] = weights[above];
                weights[above++] = value;
                of_above += (double)value;
            } else {
                weights[equal++] = value;
            }
        }
        const double of_equal = (double)pivot * (double)(equal - above);
        if (above > low && held + of_above >= target) {
            high = above;
            continue;
        }
        least = pivot;
        held += of_above + of_equal;
        if (held >= target)
            break;
        low = equal;
    }
    return least;
}

static double weight_of(const float *weights, long count)
{
    double sum = 0;
    for (long i = 0; i < count; i++)
        sum += (double)weights[i];
    return sum;
}

static void drop_below(float *weights, long count, float threshold)
{
    for (long i = 0; i < count; i++)
        weights[i] = weights[i] < threshold ? 0 : weights[i];
}

/* What `draw_from_some` works on, [width] each. */
typedef struct {
    int64_t *ids;
    float *weights, *room;
} draw_space;

/* Puts the scores that may be drawn into the space, by ascending id; `whole`: what `top_p` is a share of. */
static long take_some(const float *scores, long width, float largest, const rz_draw *of, draw_space *space, double *whole)
{
    float bound;
    long found;
    *whole = 0;
    if (of->top_k > 0 && of->top_k < width) {
        bound = bound_of(scores, width, of->top_k, space->room, &found);
    } else {
        const float margin = of->min_p > 0 ? of->temperature * (logf(1 / of->min_p) + 0.5f) : INFINITY;
        bound = bound_by_share(scores, width, largest, of->temperature, of->total > 0 ? 1 : of->top_p, margin, whole);
    }
    if (of->total > 0)
        *whole = of->total;
    return take_from(scores, width, bound, space->ids, space->weights);
}

/* From those that the parameters leave. */
static long draw_from_some(const float *scores, long width, float largest, const rz_draw *of, draw_space *space)
{
    double whole, before = 0;
    const long count = take_some(scores, width, largest, of, space, &whole);
    float *weights = space->weights;
    for (long i = 0; i < count; i += LANES)
        f32_store_some(lanes_first(count - i), weights + i,
                       exp_f32(distance_at(weights, i, count, largest, of->temperature)));
    if (of->top_p < 1) {
        memcpy(space->room, weights, sizeof *weights * (size_t)count);
        const double target = of->top_p * (whole > 0 ? whole : weight_of(weights, count));
        drop_below(weights, count, nucleus_threshold(space->room, count, target));
    }
    if (of->min_p > 0)
        drop_below(weights, count, of->min_p * largest_within(weights, 0, count));
    const double target = of->uniform * weight_of(weights, count);
    long last = 0;
    for (long i = 0; i < count; i++)
        if (weights[i] > 0) {
            last = space->ids[i];
            if ((before += (double)weights[i]) > target)
                break;
        }
    return last;
}

/* A row with what stands in the place of some of its scores, and minus infinity for what may not be drawn, in `to`. */
static const float *changed_row(const rz_draws *job, long row, const uint8_t *allowed, const float *scores, float *to)
{
    memcpy(to, scores, sizeof *to * (size_t)job->width);
    for (long i = row * job->edited; i < (row + 1) * job->edited; i++)
        if (job->places[i] < job->width)
            to[job->places[i]] = job->edits[i];
    for (long i = 0; allowed && i < job->width; i++)
        to[i] = allowed[i] ? to[i] : -INFINITY;
    return to;
}

static void draw_task(void *argument, long row, long next, int thread)
{
    (void)next, (void)thread;
    by_rows *by = argument;
    const rz_draws *job = by->of;
    const rz_draw *of = &job->of[row];
    const float *scores = job->scores + job->rows[row] * job->width;
    const uint8_t *allowed = job->allowed ? job->allowed[row] : NULL;
    const int from_all = !(of->top_k > 0 && of->top_k < job->width) && of->top_p >= 1 && of->min_p <= 0;
    const int changed = job->edited || allowed;
    const size_t width = (size_t)job->width;
    int64_t *ids = from_all && !changed ? NULL : malloc((sizeof *ids + 3 * sizeof(float)) * width);
    if (!ids && (!from_all || changed)) {
        by->no_memory = 1;
        return;
    }
    float *room = (float *)(ids + width);
    if (changed)
        scores = changed_row(job, row, allowed, scores, room + 2 * width);
    const float largest = largest_within(scores, 0, job->width);
    draw_space space = { ids, room, room + width };
    if (largest == -INFINITY)
        job->columns[row] = -1;
    else
        job->columns[row] = from_all ? draw_from_all(scores, job->width, largest, of)
                                     : draw_from_some(scores, job->width, largest, of, &space);
    free(ids);
}

int rz_decoder_draw(rz_decoder *decoder, const rz_draws *job)
{
    return each_row(decoder, job->count, draw_task, job);
}
