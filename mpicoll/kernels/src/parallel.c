/* A pool of threads, which all calls of the process share. Idle threads sleep. */

#include "kernels.h"

#include <pthread.h>
#include <signal.h>
#include <time.h>

enum { CHECK_INTERVAL_NS = 50000000 };

static struct {
    pthread_mutex_t lock;
    pthread_cond_t begun, ended;
    uint32_t threads; /* in the pool */
    int is_busy;
    void (*function)(void *argument, uint32_t part);
    void *argument;
    uint32_t parts, next, running; /* of the current call: all, the next one, those not finished */
} pool = {.lock = PTHREAD_MUTEX_INITIALIZER,
          .begun = PTHREAD_COND_INITIALIZER,
          .ended = PTHREAD_COND_INITIALIZER};

/* Runs the next part. The caller holds the lock. */
static void run_next(void)
{
    const uint32_t part = pool.next++;
    pthread_mutex_unlock(&pool.lock);
    pool.function(pool.argument, part);
    pthread_mutex_lock(&pool.lock);
    if (!--pool.running)
        pthread_cond_signal(&pool.ended);
}

static void *run_thread(void *unused)
{
    pthread_mutex_lock(&pool.lock);
    for (;;) {
        while (pool.next == pool.parts)
            pthread_cond_wait(&pool.begun, &pool.lock);
        run_next();
    }
    return unused;
}

/* A forked child has no threads of its parent. */
static void reset(void)
{
    pthread_mutex_init(&pool.lock, NULL);
    pthread_cond_init(&pool.begun, NULL);
    pthread_cond_init(&pool.ended, NULL);
    pool.threads = pool.parts = pool.next = pool.running = 0;
    pool.is_busy = 0;
}

/* Starts threads up to a number, as far as the system permits. They handle no signals. */
static void start_threads(uint32_t count)
{
    static int prepared;
    sigset_t all, before;
    pthread_t thread;

    if (pool.threads >= count)
        return;
    if (!prepared)
        prepared = !pthread_atfork(NULL, NULL, reset);
    sigfillset(&all);
    pthread_sigmask(SIG_SETMASK, &all, &before);
    while (prepared && pool.threads < count && !pthread_create(&thread, NULL, run_thread, NULL)) {
        pthread_detach(thread);
        pool.threads++;
    }
    pthread_sigmask(SIG_SETMASK, &before, NULL);
}

void mpicoll_run_parts(void (*function)(void *argument, uint32_t part), void *argument,
                       uint32_t parts, void (*check)(void *argument))
{
    struct timespec until;

    pthread_mutex_lock(&pool.lock);
    if (pool.is_busy) {
        pthread_mutex_unlock(&pool.lock);
        for (uint32_t part = 0; part < parts; part++)
            function(argument, part);
        return;
    }
    pool.is_busy = 1;
    start_threads(parts - 1);
    pool.function = function, pool.argument = argument;
    pool.next = 0, pool.parts = pool.running = parts;
    pthread_cond_broadcast(&pool.begun);
    while (pool.next < pool.parts)
        run_next();
    while (pool.running) {
        clock_gettime(CLOCK_REALTIME, &until);
        until.tv_nsec += CHECK_INTERVAL_NS;
        until.tv_sec += until.tv_nsec / 1000000000;
        until.tv_nsec %= 1000000000;
        if (pthread_cond_timedwait(&pool.ended, &pool.lock, &until)) {
            pthread_mutex_unlock(&pool.lock);
            check(argument);
            pthread_mutex_lock(&pool.lock);
        }
    }
    pool.next = pool.parts = 0;
    pool.is_busy = 0;
    pthread_mutex_unlock(&pool.lock);
}
