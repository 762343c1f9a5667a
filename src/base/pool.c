/* base/pool.c: a small pthread pool for C programs.
 *
 * The workers sleep on a condition variable. A run is published as one job; every thread, including the
 * caller's, takes shares of it until none is left. A run that finds the workers busy uses its calling thread
 * only. So does every run in a forked child, which has none of the threads and must not wait for them. */
#include <pthread.h>
#include <stdbool.h>
#include <stdlib.h>
#include <unistd.h>

#include "base/shares.h"
#include "opaq/parallel.h"
#include "opaq/status.h"

enum { THREAD_LIMIT = 1024 };

struct job {
    const struct opaq_body *body;
    struct shares shares;
};

struct opaq_pool {
    int threads;   /* workers + the caller */
    int workers;   /* workers started */
    pid_t process; /* the process that started them */
    pthread_t *worker;
    pthread_mutex_t run_mutex; /* held by the run that uses the workers */
    pthread_mutex_t mutex;     /* guards the following fields */
    pthread_cond_t wake;
    pthread_cond_t idle;
    struct job *job; /* NULL: no job */
    uint64_t generation;
    int busy; /* workers inside the job */
    bool stop;
};

static void work_on(struct job *job) {
    int64_t begin;
    int64_t end;
    while (shares_take(&job->shares, &begin, &end)) {
        job->body->call(job->body->argument, begin, end);
    }
}

static void *worker_main(void *argument) {
    struct opaq_pool *pool = argument;
    uint64_t seen = 0;
    pthread_mutex_lock(&pool->mutex);
    for (;;) {
        while (!pool->stop && (pool->job == NULL || pool->generation == seen)) {
            pthread_cond_wait(&pool->wake, &pool->mutex);
        }
        if (pool->stop) {
            break;
        }
        seen = pool->generation;
        struct job *job = pool->job;
        ++pool->busy;
        pthread_mutex_unlock(&pool->mutex);
        work_on(job);
        pthread_mutex_lock(&pool->mutex);
        if (--pool->busy == 0) {
            pthread_cond_signal(&pool->idle);
        }
    }
    pthread_mutex_unlock(&pool->mutex);
    return NULL;
}

static void pool_run(void *context, int64_t count, const struct opaq_body *body) {
    struct opaq_pool *pool = context;
    if (count <= 0) {
        return;
    }
    if (pool == NULL || count == 1 || pool->workers == 0 || getpid() != pool->process ||
        pthread_mutex_trylock(&pool->run_mutex) != 0) {
        body->call(body->argument, 0, count);
        return;
    }
    struct job job = {.body = body};
    shares_init(&job.shares, count, pool->threads);
    pthread_mutex_lock(&pool->mutex);
    pool->job = &job;
    ++pool->generation;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    work_on(&job);
    pthread_mutex_lock(&pool->mutex);
    pool->job = NULL; /* a worker that wakes up late finds no job and sleeps again */
    while (pool->busy > 0) {
        pthread_cond_wait(&pool->idle, &pool->mutex);
    }
    pthread_mutex_unlock(&pool->mutex);
    pthread_mutex_unlock(&pool->run_mutex);
}

static int processor_count(void) {
    const long online = sysconf(_SC_NPROCESSORS_ONLN);
    if (online < 1) {
        return 1;
    }
    return online > THREAD_LIMIT ? THREAD_LIMIT : (int)online;
}

void opaq_pool_destroy(struct opaq_pool *pool) {
    if (pool == NULL) {
        return;
    }
    if (getpid() !=
        pool->process) { /* in a forked child: a lock may be held by a thread that does not exist here */
        free(pool->worker);
        free(pool);
        return;
    }
    pthread_mutex_lock(&pool->mutex);
    pool->stop = true;
    pthread_cond_broadcast(&pool->wake);
    pthread_mutex_unlock(&pool->mutex);
    for (int i = 0; i < pool->workers; ++i) {
        pthread_join(pool->worker[i], NULL);
    }
    pthread_cond_destroy(&pool->idle);
    pthread_cond_destroy(&pool->wake);
    pthread_mutex_destroy(&pool->mutex);
    pthread_mutex_destroy(&pool->run_mutex);
    free(pool->worker);
    free(pool);
}

enum opaq_status opaq_pool_create(int threads, struct opaq_pool **pool, struct opaq_error *error) {
    if (pool == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "pool_create: pool is NULL");
    }
    if (threads < 0 || threads > THREAD_LIMIT) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "pool_create: threads is %d, expected 0 to %d", threads,
                         THREAD_LIMIT);
    }
    if (threads == 0) {
        threads = processor_count();
    }
    struct opaq_pool *made = calloc(1, sizeof *made);
    pthread_t *worker = calloc((size_t)threads, sizeof *worker);
    if (made == NULL || worker == NULL) {
        free(made);
        free(worker);
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "pool_create: no memory for a pool of %d threads", threads);
    }
    made->threads = threads;
    made->process = getpid();
    made->worker = worker;
    pthread_mutex_init(&made->run_mutex, NULL);
    pthread_mutex_init(&made->mutex, NULL);
    pthread_cond_init(&made->wake, NULL);
    pthread_cond_init(&made->idle, NULL);
    for (int i = 0; i + 1 < threads; ++i) {
        const int code = pthread_create(&worker[i], NULL, worker_main, made);
        if (code != 0) {
            opaq_pool_destroy(made);
            return opaq_fail(error, OPAQ_ERROR_SYSTEM,
                             "pool_create: thread %d of %d could not be started (error %d)", i + 2, threads,
                             code);
        }
        made->workers = i + 1;
    }
    *pool = made;
    return OPAQ_OK;
}

int opaq_pool_threads(const struct opaq_pool *pool) { return pool == NULL ? 1 : pool->threads; }

struct opaq_parallel opaq_pool_parallel(struct opaq_pool *pool) {
    return (struct opaq_parallel){pool_run, pool};
}
