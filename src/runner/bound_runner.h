/* runner/bound_runner.h: the state of a runner that was made from a call, and how it runs. Depends on op. */
#ifndef OPAQ_RUNNER_BOUND_RUNNER_H
#define OPAQ_RUNNER_BOUND_RUNNER_H

#include "op/table/op_table.h"
#include "opaq/runner.h"

/* The call of `row` without its activations, which are the first arguments. Data that the values point to follows in the
 * same block of host memory, except tensors' data. */
struct bound {
    const struct op_row *row;
    const struct backend *backend;
    struct opaq_device device;
    void *memory; /* of the tensors, on the device */
    union op_plan plan;
    int activations;
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
};

/* Their state is a struct bound. The first computes the row; the second its gradients, from inputs that begin with dy, as
 * the row's backward operator does from the same weights. */
extern const struct opaq_runner_functions bound_functions;
extern const struct opaq_runner_functions bound_backward_functions;

void bound_destroy(void *state);

#endif
