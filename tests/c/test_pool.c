/* test_pool.c: the thread pool covers every range exactly once, for any caller and nesting. Also runs under
 * ThreadSanitizer. */
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "opaq/opaq.h"

static struct opaq_pool *pool_of(int threads) {
    struct opaq_pool *pool = NULL;
    struct opaq_error error;
    if (opaq_pool_create(threads, &pool, &error) != OPAQ_OK) {
        printf("  %s\n", error.text);
        exit(1);
    }
    return pool;
}

/* Number of visits of each index. Plain ints: two concurrent visits are a race that ThreadSanitizer reports. */
struct coverage {
    int64_t count;
    int *visits;
    atomic_int pieces;
    atomic_int bad_pieces;
};

static void visit(void *argument, int64_t begin, int64_t end) {
    struct coverage *coverage = argument;
    atomic_fetch_add(&coverage->pieces, 1);
    if (begin < 0 || begin >= end || end > coverage->count) {
        atomic_fetch_add(&coverage->bad_pieces, 1);
        return;
    }
    for (int64_t i = begin; i < end; ++i) {
        ++coverage->visits[i];
    }
}

/* 1 if [0, count) was covered exactly once. */
static int covers(const struct opaq_parallel *parallel, int64_t count) {
    struct coverage coverage = {.count = count, .visits = calloc((size_t)count + 1, sizeof(int))};
    const struct opaq_body body = {visit, &coverage};
    int wrong = coverage.visits == NULL;
    parallel->run(parallel->context, count, &body);
    for (int64_t i = 0; !wrong && i < count; ++i) {
        wrong = coverage.visits[i] != 1;
    }
    wrong |= atomic_load(&coverage.bad_pieces) != 0 || (count == 0 && atomic_load(&coverage.pieces) != 0);
    free(coverage.visits);
    return !wrong;
}

static const int64_t counts[] = {0,  1,  2,  3,  4,   5,   7,   8,    12,   13,
                                 31, 32, 33, 64, 100, 127, 128, 1000, 4097, 20000};

static void every_index_once(void) {
    static const int threads[] = {1, 2, 3, 4, 7, 16, 0};
    for (size_t t = 0; t < sizeof threads / sizeof threads[0]; ++t) {
        struct opaq_pool *pool = pool_of(threads[t]);
        const struct opaq_parallel parallel = opaq_pool_parallel(pool);
        CHECK(threads[t] == 0 ? opaq_pool_threads(pool) >= 1 : opaq_pool_threads(pool) == threads[t]);
        for (size_t i = 0; i < sizeof counts / sizeof counts[0]; ++i) {
            for (int repeat = 0; repeat < 10; ++repeat) {
                if (!covers(&parallel, counts[i])) {
                    CHECK_FAIL("%d threads, count %lld", threads[t], (long long)counts[i]);
                }
            }
        }
        opaq_pool_destroy(pool);
    }
}

/* Small runs in quick succession: a worker that wakes up late must not run the next run's job. */
static void many_short_runs(void) {
    struct opaq_pool *pool = pool_of(4);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    for (int i = 0; i < 3000; ++i) {
        CHECK(covers(&parallel, 2 + i % 7));
    }
    opaq_pool_destroy(pool);
}

/* ---- nested runs ---- */

struct nested {
    const struct opaq_parallel *inner;
    atomic_int failures;
    atomic_int calls;
};

static void run_inside(void *argument, int64_t begin, int64_t end) {
    struct nested *nested = argument;
    for (int64_t i = begin; i < end; ++i) {
        atomic_fetch_add(&nested->calls, 1);
        atomic_fetch_add(&nested->failures, !covers(nested->inner, 50 + i));
    }
}

static void nested_runs(void) {
    struct opaq_pool *pool = pool_of(3);
    struct opaq_pool *other = pool_of(2);
    const struct opaq_parallel outer = opaq_pool_parallel(pool);
    const struct opaq_parallel second = opaq_pool_parallel(other);
    const struct opaq_parallel *inner[2] = {&outer, &second}; /* the same pool, and another one */
    for (int i = 0; i < 2; ++i) {
        struct nested nested = {.inner = inner[i]};
        const struct opaq_body body = {run_inside, &nested};
        outer.run(outer.context, 40, &body);
        CHECK_EQ_INT(atomic_load(&nested.calls), 40);
        CHECK_EQ_INT(atomic_load(&nested.failures), 0);
    }
    opaq_pool_destroy(other);
    opaq_pool_destroy(pool);
}

/* ---- concurrent callers ---- */

enum { CALLERS = 5 };

struct caller {
    const struct opaq_parallel *parallel;
    pthread_barrier_t *start;
    int failures;
};

static void *call_often(void *argument) {
    struct caller *caller = argument;
    (void)pthread_barrier_wait(caller->start);
    for (int i = 0; i < 200; ++i) {
        caller->failures += !covers(caller->parallel, 1 + i * 5);
    }
    return NULL;
}

static void several_callers_at_once(void) {
    struct opaq_pool *pool = pool_of(3);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    struct caller caller[CALLERS];
    pthread_t thread[CALLERS];
    pthread_barrier_t start;
    CHECK_EQ_INT(pthread_barrier_init(&start, NULL, CALLERS), 0);
    for (int i = 0; i < CALLERS; ++i) {
        caller[i] = (struct caller){&parallel, &start, 0};
        CHECK_EQ_INT(pthread_create(&thread[i], NULL, call_often, &caller[i]), 0);
    }
    for (int i = 0; i < CALLERS; ++i) {
        CHECK_EQ_INT(pthread_join(thread[i], NULL), 0);
        CHECK_EQ_INT(caller[i].failures, 0);
    }
    (void)pthread_barrier_destroy(&start);
    opaq_pool_destroy(pool);
}

/* ---- visibility of writes between caller and workers ---- */

static void square(void *argument, int64_t begin, int64_t end) {
    int64_t *values = argument;
    for (int64_t i = begin; i < end; ++i) {
        values[i] *= values[i];
    }
}

static void results_are_visible_after_the_run(void) {
    struct opaq_pool *pool = pool_of(4);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    enum { COUNT = 5000 };
    int64_t *values = malloc(COUNT * sizeof *values);
    const struct opaq_body body = {square, values};
    for (int repeat = 0; values != NULL && repeat < 20; ++repeat) {
        for (int64_t i = 0; i < COUNT; ++i) {
            values[i] = i + repeat;
        }
        parallel.run(parallel.context, COUNT, &body);
        for (int64_t i = 0; i < COUNT; ++i) {
            CHECK(values[i] == (i + repeat) * (i + repeat));
        }
    }
    free(values);
    opaq_pool_destroy(pool);
}

static void create_and_destroy(void) {
    for (int i = 0; i < 300; ++i) {
        struct opaq_pool *pool = pool_of(1 + i % 5);
        if (i % 3 == 0) { /* some are used, others never run a worker */
            const struct opaq_parallel parallel = opaq_pool_parallel(pool);
            CHECK(covers(&parallel, 17));
        }
        opaq_pool_destroy(pool);
    }
    opaq_pool_destroy(NULL);
}

static void bad_arguments(void) {
    struct opaq_pool *pool = NULL;
    struct opaq_error error;
    CHECK_EQ_INT(opaq_pool_create(2, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "pool_create") != NULL);
    CHECK_EQ_INT(opaq_pool_create(-1, &pool, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "-1") != NULL && strstr(error.text, "1024") != NULL);
    CHECK_EQ_INT(opaq_pool_create(1025, &pool, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "1025") != NULL);
    CHECK_EQ_INT(opaq_pool_create(1025, &pool, NULL), OPAQ_ERROR_ARGUMENT);
    CHECK(pool == NULL);
    CHECK_EQ_INT(opaq_pool_threads(NULL), 1);
    const struct opaq_parallel none = opaq_pool_parallel(NULL); /* runs on this thread */
    CHECK(covers(&none, 10));
    CHECK(covers(&none, 0));
}

static void negative_counts_do_nothing(void) {
    struct opaq_pool *pool = pool_of(3);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    struct coverage coverage = {.count = 0};
    const struct opaq_body body = {visit, &coverage};
    parallel.run(parallel.context, -5, &body);
    CHECK_EQ_INT(atomic_load(&coverage.pieces), 0);
    opaq_pool_destroy(pool);
}

static const struct test_case tests[] = {TEST(every_index_once),
                                         TEST(many_short_runs),
                                         TEST(nested_runs),
                                         TEST(several_callers_at_once),
                                         TEST(results_are_visible_after_the_run),
                                         TEST(create_and_destroy),
                                         TEST(bad_arguments),
                                         TEST(negative_counts_do_nothing)};
TEST_MAIN(tests)
