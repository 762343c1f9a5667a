/* support_runner.h: runners that tests register, and running by handle. Depends on opaq/runner.h and
 * support_op.h. */
#ifndef SUPPORT_RUNNER_H
#define SUPPORT_RUNNER_H

#include <stdatomic.h>

#include "opaq/runner.h"
#include "support_op.h"

enum { RUNNER_IN = 6, RUNNER_OUT = 5, RUNNER_EXPERTS = 4, RUNNER_ALIVE = 0x5A11FE };

/* A runner that writes `number` into its output, of f32. */
struct test_runner {
    float number;
    int alive;               /* RUNNER_ALIVE until it is destroyed */
    enum opaq_status status; /* the result of its run */
    size_t workspace_bytes;
    struct test_runner_counts *counts;
    void (*inside)(void *); /* called during a run, or NULL */
    void *inside_argument;
};

/* Counters that several runners share. */
struct test_runner_counts {
    atomic_int runs;
    atomic_int destroys;
    atomic_int dead_runs; /* runs of destroyed runners */
};

extern const struct opaq_runner_functions test_runner_functions;

/* The description of a test runner of a kind. */
struct opaq_runner_info test_runner_info(enum opaq_runner_kind kind);

/* Registers a runner; a failed check and 0 on an error. The caller owns the state until it is destroyed. */
int64_t test_runner_register(enum opaq_runner_kind kind, struct test_runner *state);

/* x[rows, RUNNER_IN] of zeros and the other inputs of the operator of a kind. */
struct test_runner_inputs {
    float x[8][RUNNER_IN];
    float weights[8][2];
    int32_t ids[8][2];
    struct opaq_tensor tensors[3];
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
};
void test_runner_arguments(enum opaq_runner_kind kind, int64_t handle, int64_t rows,
                           struct test_runner_inputs *inputs);

/* "linear_gemm" */
const char *test_runner_row(enum opaq_runner_kind kind);

/* Runs the row of a kind in memory on the stack; the output has RUNNER_OUT numbers per row. */
enum opaq_status test_runner_run(enum opaq_runner_kind kind, int64_t handle, float output[8][RUNNER_IN],
                                 struct opaq_error *error);

#endif
