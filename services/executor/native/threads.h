/* The threads of one rank, which run one function together.
 *
 * Inside it, work is cut into stages. A stage is a number of tasks; whoever is free takes the next one, and
 * none passes the end of the stage before all tasks are done:
 *
 *     thread 0   task 0 | task 2 | task 3 |·····|  next stage
 *     thread 1   task 1 ············| task 4    |  next stage
 *
 * Tasks are taken, not dealt, because threads are held up: cores are shared with other processes.
 */
#ifndef RZ_THREADS_H
#define RZ_THREADS_H

#include <stddef.h>

typedef struct rz_threads rz_threads;

typedef void (*rz_body)(void *argument, int thread);
/* `next`: the task that this thread takes after `task`; the number of tasks or more where there is none. */
typedef void (*rz_task)(void *argument, long task, long next, int thread);

/* `count` threads, the caller among them; NULL when the system gives none. */
rz_threads *rz_threads_new(int count);

/* Keeps thread i on core `cpus`[i] while it works: for a machine that these threads fill, where two of them on
 * one core while another process has the other would halve their speed. The caller is free between runs. */
void rz_threads_pin(rz_threads *threads, const int *cpus);
void rz_threads_free(rz_threads *threads);
int rz_threads_count(const rz_threads *threads);

/* Runs `body` on every thread; returns when all have. One caller at a time. */
void rz_threads_run(rz_threads *threads, rz_body body, void *argument);

/* Called inside `body` by every thread alike: runs tasks 0 to `tasks` - 1, each once. A thread takes `together` of them at a
 * time: to take one costs a fifth of a microsecond where threads meet at it, as long as some tasks. */
void rz_stage(rz_threads *threads, int thread, long tasks, long together, rz_task task, void *argument);

#endif
