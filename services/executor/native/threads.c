/* See threads.h. Threads spin for a moment and then sleep: a step follows the last one within a
 * millisecond or two under load, and nothing spins when there is no work. */
#define _GNU_SOURCE
#include "threads.h"

#include <pthread.h>
#include <sched.h>
#include <stdatomic.h>
#include <stdlib.h>

#if defined(__x86_64__)
#define relax() __builtin_ia32_pause()
#else
#define relax() ((void)0)
#endif

enum {
    LINE = 64,              /* bytes of a cache line */
    SPINS_IN_STAGE = 4000,  /* some tens of microseconds: then the core is given to others */
    SPINS_BETWEEN = 20000,  /* about 200 microseconds: then the thread sleeps */
};

struct rz_threads {
    int count;
    _Alignas(LINE) atomic_long next;  /* task of the stage to be taken next */
    _Alignas(LINE) atomic_int arrived;
    _Alignas(LINE) atomic_uint stage; /* stages that have ended */
    _Alignas(LINE) atomic_uint runs;  /* runs that have begun */
    atomic_int sleepers;
    atomic_int stopping;
    _Alignas(LINE) pthread_mutex_t mutex;
    pthread_cond_t wake;
    rz_body body;
    void *argument;
    pthread_t *workers;
    int pinned;
    int caller_cpu; /* where the caller works, if they are pinned */
};

typedef struct {
    rz_threads *threads;
    int thread;
} worker_start;

/* All threads arrive; the last one opens the next stage. */
static void meet(rz_threads *threads)
{
    unsigned now = atomic_load_explicit(&threads->stage, memory_order_relaxed);
    if (atomic_fetch_add_explicit(&threads->arrived, 1, memory_order_acq_rel) + 1 == threads->count) {
        atomic_store_explicit(&threads->arrived, 0, memory_order_relaxed);
        atomic_store_explicit(&threads->next, 0, memory_order_relaxed);
        atomic_store_explicit(&threads->stage, now + 1, memory_order_release);
        return;
    }
    for (int spins = 0; atomic_load_explicit(&threads->stage, memory_order_acquire) == now; spins++) {
        if (spins < SPINS_IN_STAGE)
            relax();
        else
            sched_yield();
    }
}

static long take(rz_threads *threads)
{
    return atomic_fetch_add_explicit(&threads->next, 1, memory_order_relaxed);
}

void rz_stage(rz_threads *threads, int thread, long tasks, long together, rz_task task, void *argument)
{
    if (threads->count == 1) {
        for (long i = 0; i < tasks; i++)
            task(argument, i, i + 1, thread);
        return;
    }
    long mine = take(threads) * together;
    while (mine < tasks) {
        const long next = take(threads) * together; /* ahead, so that its data can be asked for */
        const long end = mine + together < tasks ? mine + together : tasks;
        for (; mine < end; mine++)
            task(argument, mine, mine + 1 < end ? mine + 1 : next, thread);
        mine = next;
    }
    meet(threads);
}

static int wait_for_run(rz_threads *threads, unsigned seen)
{
    for (int spins = 0; spins < SPINS_BETWEEN; spins++) {
        if (atomic_load_explicit(&threads->runs, memory_order_acquire) != seen)
            return !atomic_load(&threads->stopping);
        relax();
    }
    pthread_mutex_lock(&threads->mutex);
    atomic_fetch_add(&threads->sleepers, 1);
    while (atomic_load(&threads->runs) == seen)
        pthread_cond_wait(&threads->wake, &threads->mutex);
    atomic_fetch_sub(&threads->sleepers, 1);
    pthread_mutex_unlock(&threads->mutex);
    return !atomic_load(&threads->stopping);
}

static void *work(void *start)
{
    worker_start me = *(worker_start *)start;
    free(start);
    unsigned seen = 0;
    while (wait_for_run(me.threads, seen)) {
        seen++;
        me.threads->body(me.threads->argument, me.thread);
        meet(me.threads);
    }
    return NULL;
}

static void begin_run(rz_threads *threads)
{
    atomic_fetch_add(&threads->runs, 1);
    if (atomic_load(&threads->sleepers)) {
        pthread_mutex_lock(&threads->mutex);
        pthread_cond_broadcast(&threads->wake);
        pthread_mutex_unlock(&threads->mutex);
    }
}

static void keep_on(pthread_t thread, int cpu)
{
    cpu_set_t one;
    CPU_ZERO(&one);
    CPU_SET((unsigned)cpu, &one);
    pthread_setaffinity_np(thread, sizeof one, &one); /* where it is refused, nothing but speed is lost */
}

void rz_threads_pin(rz_threads *threads, const int *cpus)
{
    for (int thread = 1; thread < threads->count; thread++)
        keep_on(threads->workers[thread], cpus[thread]);
    threads->caller_cpu = cpus[0];
    threads->pinned = 1;
}

static void run_together(rz_threads *threads, rz_body body, void *argument)
{
    if (threads->count == 1) {
        body(argument, 0);
        return;
    }
    threads->body = body;
    threads->argument = argument;
    begin_run(threads);
    body(argument, 0);
    meet(threads);
}

void rz_threads_run(rz_threads *threads, rz_body body, void *argument)
{
    cpu_set_t before;
    /* Threads that the caller starts take over where it may run: it must not stay on one core. */
    int pin = threads->pinned && !pthread_getaffinity_np(pthread_self(), sizeof before, &before);
    if (pin)
        keep_on(pthread_self(), threads->caller_cpu);
    run_together(threads, body, argument);
    if (pin)
        pthread_setaffinity_np(pthread_self(), sizeof before, &before);
}

int rz_threads_count(const rz_threads *threads)
{
    return threads->count;
}

rz_threads *rz_threads_new(int count)
{
    rz_threads *threads = aligned_alloc(LINE, (sizeof *threads + LINE - 1) / LINE * LINE);
    if (!threads)
        return NULL;
    *threads = (rz_threads){ .count = 1 };
    pthread_mutex_init(&threads->mutex, NULL);
    pthread_cond_init(&threads->wake, NULL);
    threads->workers = calloc((size_t)count, sizeof *threads->workers);
    threads->count = count;
    for (int thread = 1; thread < count; thread++) {
        worker_start *start = malloc(sizeof *start);
        if (start)
            *start = (worker_start){ threads, thread };
        if (!start || !threads->workers || pthread_create(&threads->workers[thread], NULL, work, start)) {
            free(start);
            threads->count = thread; /* those that came up; nobody has met yet */
            break;
        }
    }
    return threads;
}

void rz_threads_free(rz_threads *threads)
{
    if (!threads)
        return;
    atomic_store(&threads->stopping, 1);
    begin_run(threads);
    for (int thread = 1; thread < threads->count; thread++)
        pthread_join(threads->workers[thread], NULL);
    pthread_cond_destroy(&threads->wake);
    pthread_mutex_destroy(&threads->mutex);
    free(threads->workers);
    free(threads);
}
