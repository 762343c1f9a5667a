/* test_runner_parallel.c: runners created, run and destroyed by many threads concurrently. No call runs another
 * thread's or a destroyed runner, each is destroyed exactly once, and the only error is that a runner is gone.
 * Also runs under ThreadSanitizer. */
#include <pthread.h>
#include <sched.h>
#include <stdlib.h>

#include "check.h"
#include "support_runner.h"
#include "support_runner_layer.h"

enum { PLACES = 5, THREADS = 6, TURNS = 3000 };

/* Handles that all threads use; a runner's number is the index of its place. They are exchanged with relaxed
 * atomics, so that only the registry makes a runner's memory visible. */
static _Atomic int64_t places[PLACES];

static int64_t at_place(int place) { return atomic_load_explicit(&places[place], memory_order_relaxed); }

static int64_t put_at_place(int place, int64_t handle) {
    return atomic_exchange_explicit(&places[place], handle, memory_order_relaxed);
}

struct worker {
    uint32_t random;
    int index;
    int runs;
    int gone;
    int created;
    const char *wrong;
    pthread_barrier_t *start;
};

static uint32_t next_random(struct worker *worker) {
    worker->random = worker->random * 1664525u + 1013904223u;
    return worker->random >> 8;
}

static void start_all(struct worker *workers, int count, void *(*run)(void *)) {
    pthread_t thread[THREADS];
    pthread_barrier_t start;
    CHECK_EQ_INT(pthread_barrier_init(&start, NULL, (unsigned)count), 0);
    for (int i = 0; i < count; ++i) {
        workers[i] = (struct worker){.random = 12345u + (uint32_t)i, .index = i, .start = &start};
        CHECK_EQ_INT(pthread_create(&thread[i], NULL, run, &workers[i]), 0);
    }
    for (int i = 0; i < count; ++i) {
        CHECK_EQ_INT(pthread_join(thread[i], NULL), 0);
        if (workers[i].wrong != NULL) {
            CHECK_FAIL("thread %d: %s", i, workers[i].wrong);
        }
    }
    (void)pthread_barrier_destroy(&start);
}

/* Whether a race may cause this error. */
static int is_gone(const struct opaq_error *error) {
    return strstr(error->text, "is gone: it was destroyed") != NULL;
}

/* ---- runners of each thread ---- */

static struct test_runner_counts counts;

static void yield(void *argument) {
    (void)argument;
    (void)sched_yield();
}

/* The state is freed with the runner, so that AddressSanitizer detects a later run. */
static void destroy_and_free(void *state) {
    test_runner_functions.destroy(state);
    free(state);
}

static int64_t create_number(int place) {
    struct opaq_runner_functions functions = test_runner_functions;
    struct opaq_runner_info info = test_runner_info(OPAQ_RUNNER_LINEAR);
    struct test_runner *state = calloc(1, sizeof *state);
    int64_t handle = 0;
    functions.destroy = destroy_and_free;
    if (state == NULL) {
        return 0;
    }
    *state = (struct test_runner){.number = (float)place,
                                  .alive = RUNNER_ALIVE,
                                  .counts = &counts,
                                  .inside = yield,
                                  .workspace_bytes = 64};
    return opaq_runner_register(&info, &functions, state, &handle, NULL) == OPAQ_OK ? handle : 0;
}

static void run_place(struct worker *worker, int place) {
    struct opaq_error error = {OPAQ_OK, ""};
    float output[8][RUNNER_IN];
    const int64_t handle = at_place(place);
    if (handle == 0) {
        return;
    }
    memset(output, 0, sizeof output);
    if (test_runner_run(OPAQ_RUNNER_LINEAR, handle, output, &error) != OPAQ_OK) {
        worker->gone += is_gone(&error);
        worker->wrong = is_gone(&error) ? worker->wrong : "an error that is not that a runner is gone";
        return;
    }
    ++worker->runs;
    const float *numbers = &output[0][0];
    for (int i = 0; i < 8 * RUNNER_OUT; ++i) {
        if (numbers[i] != (float)place) {
            worker->wrong = "a runner of another thread";
        }
    }
}

static void *use_numbers(void *argument) {
    struct worker *worker = argument;
    (void)pthread_barrier_wait(worker->start);
    for (int turn = 0; turn < TURNS; ++turn) {
        const uint32_t random = next_random(worker);
        const int place = (int)(random % PLACES);
        if (random / PLACES % 8 == 0) { /* a new one at its index */
            const int64_t made = create_number(place);
            worker->wrong = made == 0 ? "a runner was refused" : worker->wrong;
            const int64_t old = put_at_place(place, made);
            ++worker->created;
            if (old != 0 && opaq_runner_destroy(old, NULL) != OPAQ_OK) {
                worker->wrong = "a runner was gone before it was destroyed";
            }
        } else if (random / PLACES % 8 == 1) {
            struct opaq_runner_info info;
            struct opaq_error error = {OPAQ_OK, ""};
            const int64_t handle = at_place(place);
            if (handle != 0 && opaq_runner_query(handle, &info, &error) != OPAQ_OK && !is_gone(&error)) {
                worker->wrong = "a query's error is not that a runner is gone";
            }
        } else {
            run_place(worker, place);
        }
    }
    return NULL;
}

static void creators_runners_and_destroyers(void) {
    struct worker workers[THREADS];
    int runs = 0;
    int gone = 0;
    int created = 0;
    start_all(workers, THREADS, use_numbers);
    for (int i = 0; i < THREADS; ++i) {
        runs += workers[i].runs;
        gone += workers[i].gone;
        created += workers[i].created;
    }
    for (int i = 0; i < PLACES; ++i) {
        const int64_t last = put_at_place(i, 0);
        CHECK(last == 0 || opaq_runner_destroy(last, NULL) == OPAQ_OK);
    }
    CHECK_EQ_INT(opaq_runner_count(), 0);
    CHECK_EQ_INT(atomic_load(&counts.destroys), created);
    CHECK_EQ_INT(atomic_load(&counts.runs), runs);
    CHECK_EQ_INT(atomic_load(&counts.dead_runs), 0);
    printf("  %d runners, %d runs, %d came too late\n", created, runs, gone);
}

/* ---- one handle, many destroyers ---- */

static _Atomic int64_t contested;
static atomic_int destroyed;

static void *destroy_contested(void *argument) {
    struct worker *worker = argument;
    for (int turn = 0; turn < 300; ++turn) {
        (void)pthread_barrier_wait(worker->start);
        if (worker->index == 0) {
            atomic_store(&contested, create_number(0));
        }
        (void)pthread_barrier_wait(worker->start);
        struct opaq_error error = {OPAQ_OK, ""};
        if (opaq_runner_destroy(atomic_load(&contested), &error) == OPAQ_OK) {
            atomic_fetch_add(&destroyed, 1);
        } else if (!is_gone(&error)) {
            worker->wrong = "the error is not that the runner is gone";
        }
    }
    return NULL;
}

static void one_destroyer_wins(void) {
    struct worker workers[THREADS];
    const int before = atomic_load(&counts.destroys);
    start_all(workers, THREADS, destroy_contested);
    CHECK_EQ_INT(atomic_load(&destroyed), 300);
    CHECK_EQ_INT(atomic_load(&counts.destroys) - before, 300);
    CHECK_EQ_INT(opaq_runner_count(), 0);
}

/* ---- destroyed during a run ---- */

static atomic_int is_inside;
static atomic_int may_leave;

static void wait_inside(void *argument) {
    (void)argument;
    atomic_store(&is_inside, 1);
    while (!atomic_load(&may_leave)) {
        (void)sched_yield();
    }
}

struct long_run {
    int64_t handle;
    enum opaq_status status;
    float output[8][RUNNER_IN];
};

static void *run_long(void *argument) {
    struct long_run *run = argument;
    run->status = test_runner_run(OPAQ_RUNNER_LINEAR, run->handle, run->output, NULL);
    return NULL;
}

static void a_runner_lives_until_its_run_ends(void) {
    struct test_runner_counts mine = {0};
    struct test_runner state = {.number = 9, .counts = &mine, .inside = wait_inside};
    struct long_run run = {.handle = test_runner_register(OPAQ_RUNNER_LINEAR, &state)};
    struct opaq_error error = {OPAQ_OK, ""};
    pthread_t thread;
    CHECK_EQ_INT(pthread_create(&thread, NULL, run_long, &run), 0);
    while (!atomic_load(&is_inside)) {
        (void)sched_yield();
    }
    CHECK_EQ_INT(opaq_runner_destroy(run.handle, NULL), OPAQ_OK); /* does not wait */
    CHECK_EQ_INT(atomic_load(&mine.destroys), 0);
    CHECK_EQ_INT(opaq_runner_count(), 0);
    CHECK_EQ_INT(opaq_runner_destroy(run.handle, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(is_gone(&error));
    struct test_runner_counts others = {0};
    struct test_runner other = {.counts = &others}; /* its slot is not reused meanwhile */
    const int64_t second = test_runner_register(OPAQ_RUNNER_LINEAR, &other);
    CHECK((second & 65535) != (run.handle & 65535));
    atomic_store(&may_leave, 1);
    CHECK_EQ_INT(pthread_join(thread, NULL), 0);
    CHECK_EQ_INT(run.status, OPAQ_OK);
    CHECK(run.output[0][0] == 9);
    CHECK_EQ_INT(atomic_load(&mine.destroys), 1);
    CHECK_EQ_INT(atomic_load(&mine.dead_runs), 0);
    CHECK_EQ_INT(opaq_runner_destroy(second, NULL), OPAQ_OK);
}

/* ---- prepared runners ---- */

static struct runner_layer layers[3];
static struct runner_inputs *inputs;
static struct op_result expected[3];

static int64_t create_prepared(int kind) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    int64_t handle = 0;
    runner_values(&layers[kind], NULL, values);
    (void)opaq_runner_create(runner_op((enum opaq_runner_kind)kind), values, NULL, &handle, NULL);
    return handle;
}

static void *use_prepared(void *argument) {
    struct worker *worker = argument;
    (void)pthread_barrier_wait(worker->start);
    for (int turn = 0; turn < 40; ++turn) {
        const uint32_t random = next_random(worker);
        const int kind = (int)(random % 3);
        if (random / 3 % 3 == 0) {
            const int64_t made = create_prepared(kind);
            const int64_t old = put_at_place(kind, made);
            worker->wrong = made == 0 ? "a runner was refused" : worker->wrong;
            ++worker->created;
            (void)(old != 0 && opaq_runner_destroy(old, NULL));
            continue;
        }
        struct op_result got;
        struct opaq_error error = {OPAQ_OK, ""};
        const int64_t handle = at_place(kind);
        if (runner_run((enum opaq_runner_kind)kind, handle, inputs, NULL, &got, &error) == OPAQ_OK) {
            ++worker->runs;
            worker->wrong = op_result_difference(&got, &expected[kind], 0) < 0 ? worker->wrong : "other bytes";
            op_result_free(&got);
        } else if (!is_gone(&error)) {
            worker->wrong = "an error that is not that a runner is gone";
        }
    }
    return NULL;
}

static void prepared_runners_too(void) {
    struct worker workers[THREADS];
    int runs = 0;
    int created = 3;
    inputs = runner_inputs_make(OPAQ_BF16);
    for (int k = 0; k < 3; ++k) {
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        layers[k] = runner_layer_make((enum opaq_runner_kind)k, OPAQ_BF16, "",
                                      k == 0 ? "x=mxfp8 w=nvfp4+rowscaled" : "act=silu x=mxfp8 w=mxfp4");
        runner_values(&layers[k], inputs, values);
        CHECK_EQ_INT(op_call(runner_op((enum opaq_runner_kind)k)->name, values, NULL, &expected[k], NULL),
                     OPAQ_OK);
        (void)put_at_place(k, create_prepared(k));
    }
    start_all(workers, THREADS, use_prepared);
    for (int i = 0; i < THREADS; ++i) {
        runs += workers[i].runs;
        created += workers[i].created;
    }
    for (int k = 0; k < 3; ++k) {
        CHECK_EQ_INT(opaq_runner_destroy(put_at_place(k, 0), NULL), OPAQ_OK);
        op_result_free(&expected[k]);
        runner_layer_free(&layers[k]);
    }
    runner_inputs_free(inputs);
    CHECK_EQ_INT(opaq_runner_count(), 0);
    printf("  %d runners, %d runs\n", created, runs);
}

static const struct test_case tests[] = {TEST(creators_runners_and_destroyers), TEST(one_destroyer_wins),
                                         TEST(a_runner_lives_until_its_run_ends), TEST(prepared_runners_too)};
TEST_MAIN(tests)
