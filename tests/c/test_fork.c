/* test_fork.c: a child that is forked while other threads intern texts, register runners and use a pool can do
 * the same: no lock stays held by a thread that does not exist in the child. A child that hangs is killed after
 * some seconds.
 *
 * qemu's user-mode emulation (7.2) aborts in a child that creates a thread after a fork beside other threads,
 * also in a program without opaq, because it still lists the parent's threads (plugins/core.c,
 * qemu_plugin_vcpu_init_hook). If can_create_threads_after_fork detects this, children create no pool and run
 * the other checks. */
#include <pthread.h>
#include <signal.h>
#include <stdatomic.h>
#include <stdbool.h>
#include <stdlib.h>
#include <sys/wait.h>
#include <time.h>
#include <unistd.h>

#include "check.h"
#include "opaq/opaq.h"

enum { CHILDREN = 300, CHILD_SECONDS = 10 };

static atomic_int stop;
static atomic_int failures;

static enum opaq_status run_nothing(void *state, const struct opaq_runner_call *call,
                                    struct opaq_error *error) {
    (void)state, (void)call, (void)error;
    return OPAQ_OK;
}

static int intern(int number) {
    const struct opaq_spec *spec = NULL;
    char text[64];
    const int length = snprintf(text, sizeof text, "fp8+eps=%d.5", number % 20000);
    return opaq_spec_intern(text, (size_t)length, &spec, NULL) == OPAQ_OK && spec != NULL;
}

static int register_runner(void) {
    const struct opaq_runner_info info = {.in_features = 4, .out_features = 4};
    const struct opaq_runner_functions functions = {.abi = OPAQ_RUNNER_ABI, .run = run_nothing};
    int64_t handle;
    return opaq_runner_register(&info, &functions, NULL, &handle, NULL) == OPAQ_OK &&
           opaq_runner_destroy(handle, NULL) == OPAQ_OK;
}

static void add_range(void *argument, int64_t begin, int64_t end) {
    (void)atomic_fetch_add((atomic_long *)argument, end - begin);
}

static int use_pool(struct opaq_pool *pool) {
    atomic_long sum = 0;
    const struct opaq_body body = {add_range, &sum};
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    parallel.run(parallel.context, 64, &body);
    return atomic_load(&sum) == 64;
}

static void *intern_and_register(void *argument) {
    (void)argument;
    for (int i = 0; !atomic_load(&stop); ++i) {
        atomic_fetch_add(&failures, !intern(i) + !register_runner());
    }
    return NULL;
}

static void *run_on_pool(void *argument) {
    while (!atomic_load(&stop)) {
        atomic_fetch_add(&failures, !use_pool(argument));
    }
    return NULL;
}

static void *wait_for_stop(void *argument) {
    const struct timespec millisecond = {0, 1000000};
    while (!atomic_load(&stop)) {
        (void)nanosleep(&millisecond, NULL);
    }
    return argument;
}

/* Whether a child that is forked beside a thread can create a thread, without using opaq. */
static bool can_create_threads_after_fork(void) {
    pthread_t thread;
    int status = 0;
    atomic_store(&stop, 0);
    if (pthread_create(&thread, NULL, wait_for_stop, NULL) != 0) {
        return false;
    }
    const pid_t child = fork();
    if (child == 0) {
        pthread_t own;
        atomic_store(&stop, 1);
        _exit(pthread_create(&own, NULL, wait_for_stop, NULL) != 0 || pthread_join(own, NULL) != 0);
    }
    const bool is_fine = child > 0 && waitpid(child, &status, 0) == child && status == 0;
    atomic_store(&stop, 1);
    (void)pthread_join(thread, NULL);
    return is_fine;
}

/* The checks in the child; its exit status counts the steps that passed. */
static int child_work(struct opaq_pool *pool, bool creates, int number) {
    struct opaq_pool *own = NULL;
    (void)alarm(CHILD_SECONDS);
    if (!intern(20000 - 1 - number) || !intern(number)) {
        return 2;
    }
    if (!register_runner()) {
        return 3;
    }
    if (pool != NULL && !use_pool(pool)) {
        return 4;
    }
    opaq_pool_destroy(pool);
    if (creates && (opaq_pool_create(2, &own, NULL) != OPAQ_OK || !use_pool(own))) {
        return 5;
    }
    opaq_pool_destroy(own);
    return 0;
}

static void fork_children(void *(*work)(void *), struct opaq_pool *pool, bool creates) {
    pthread_t thread;
    atomic_store(&stop, 0);
    atomic_store(&failures, 0);
    CHECK_EQ_INT(pthread_create(&thread, NULL, work, pool), 0);
    int hung = 0;
    int wrong = 0;
    for (int i = 0; i < CHILDREN; ++i) {
        int status = 0;
        const pid_t child = fork();
        if (child == 0) {
            _exit(child_work(pool, creates, i));
        }
        if (!CHECK(child > 0 && waitpid(child, &status, 0) == child)) {
            break;
        }
        const bool is_hung = WIFSIGNALED(status) && WTERMSIG(status) == SIGALRM;
        hung += is_hung;
        wrong += !is_hung && status != 0;
        if (hung == 1) {
            break; /* each one takes seconds */
        }
    }
    atomic_store(&stop, 1);
    CHECK_EQ_INT(pthread_join(thread, NULL), 0);
    CHECK_EQ_INT(hung, 0);
    CHECK_EQ_INT(wrong, 0);
    CHECK_EQ_INT(atomic_load(&failures), 0);
}

static void while_a_thread_interns(void) { fork_children(intern_and_register, NULL, false); }

static void while_a_thread_uses_a_pool(void) {
    struct opaq_pool *pool = NULL;
    const bool creates = can_create_threads_after_fork();
    if (!creates) {
        (void)printf("note: children cannot create threads here, so they create no pool\n");
    }
    CHECK_EQ_INT(opaq_pool_create(3, &pool, NULL), OPAQ_OK);
    fork_children(run_on_pool, pool, creates);
    opaq_pool_destroy(pool);
}

static const struct test_case tests[] = {TEST(while_a_thread_interns), TEST(while_a_thread_uses_a_pool)};
TEST_MAIN(tests)
