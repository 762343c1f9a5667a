/* support_runner.c: runners that tests register, and running by handle. */
#include "support_runner.h"

#include <string.h>

#include "check.h"

static enum opaq_status test_workspace(void *state, const struct opaq_runner_call *call, size_t *bytes,
                                       struct opaq_error *error) {
    (void)call;
    (void)error;
    *bytes = ((const struct test_runner *)state)->workspace_bytes;
    return OPAQ_OK;
}

static enum opaq_status test_run(void *state, const struct opaq_runner_call *call, struct opaq_error *error) {
    const struct test_runner *runner = state;
    float *output = call->output->data;
    atomic_fetch_add(&runner->counts->runs, 1);
    if (runner->inside != NULL) {
        runner->inside(runner->inside_argument);
    }
    if (runner->alive != RUNNER_ALIVE) {
        atomic_fetch_add(&runner->counts->dead_runs, 1);
    }
    if (runner->status != OPAQ_OK) {
        return opaq_fail(error, runner->status, "no number %g today", (double)runner->number);
    }
    memset(call->workspace.data, 0x3C, runner->workspace_bytes);
    for (int64_t i = 0; i < call->output->shape[0] * call->output->shape[1]; ++i) {
        output[i] = runner->number;
    }
    return OPAQ_OK;
}

static void test_destroy(void *state) {
    struct test_runner *runner = state;
    runner->alive = 0;
    atomic_fetch_add(&runner->counts->destroys, 1);
}

const struct opaq_runner_functions test_runner_functions = {OPAQ_RUNNER_ABI, test_workspace, test_run,
                                                            test_destroy};

struct opaq_runner_info test_runner_info(enum opaq_runner_kind kind) {
    struct opaq_runner_info info;
    memset(&info, 0, sizeof info);
    info.kind = (int32_t)kind;
    info.in_features = RUNNER_IN;
    info.out_features = kind == OPAQ_RUNNER_LINEAR ? RUNNER_OUT : RUNNER_IN;
    info.experts = kind == OPAQ_RUNNER_MOE ? RUNNER_EXPERTS : 0;
    info.bytes = sizeof(struct test_runner);
    (void)snprintf(info.format, sizeof info.format, "f32");
    (void)snprintf(info.kernel, sizeof info.kernel, "number");
    return info;
}

int64_t test_runner_register(enum opaq_runner_kind kind, struct test_runner *state) {
    const struct opaq_runner_info info = test_runner_info(kind);
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 0;
    state->alive = RUNNER_ALIVE;
    if (opaq_runner_register(&info, &test_runner_functions, state, &handle, &error) != OPAQ_OK) {
        CHECK_FAIL("%s", error.text);
        return 0;
    }
    return handle;
}

const char *test_runner_row(enum opaq_runner_kind kind) {
    static const char *const rows[] = {"linear_gemm", "mlp_gemm", "moe_gemm"};
    return rows[kind];
}

void test_runner_arguments(enum opaq_runner_kind kind, int64_t handle, int64_t rows,
                           struct test_runner_inputs *inputs) {
    const int count = kind == OPAQ_RUNNER_MOE ? 3 : 1;
    memset(inputs, 0, sizeof *inputs);
    inputs->tensors[0] = (struct opaq_tensor){.data = inputs->x,
                                              .dtype = OPAQ_DTYPE_F32,
                                              .rank = 2,
                                              .shape = {rows, RUNNER_IN},
                                              .strides = {RUNNER_IN, 1}};
    inputs->tensors[1] = (struct opaq_tensor){
        .data = inputs->weights, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {rows, 2}, .strides = {2, 1}};
    inputs->tensors[2] = (struct opaq_tensor){
        .data = inputs->ids, .dtype = OPAQ_DTYPE_I32, .rank = 2, .shape = {rows, 2}, .strides = {2, 1}};
    for (int i = 0; i < count; ++i) {
        inputs->values[i] = op_tensor_value(&inputs->tensors[i]);
    }
    inputs->values[count] = op_int_value(handle);
    inputs->values[count + 1] = op_int_value(kind == OPAQ_RUNNER_LINEAR ? RUNNER_OUT : RUNNER_IN);
}

enum opaq_status test_runner_run(enum opaq_runner_kind kind, int64_t handle, float output[8][RUNNER_IN],
                                 struct opaq_error *error) {
    const struct opaq_op *op = opaq_op_find(test_runner_row(kind));
    struct test_runner_inputs inputs;
    struct opaq_outputs outputs;
    _Alignas(64) char workspace[256];
    size_t bytes = 0;
    test_runner_arguments(kind, handle, 8, &inputs);
    enum opaq_status status = opaq_op_outputs(op, inputs.values, &outputs, error);
    if (status == OPAQ_OK) {
        status = opaq_op_workspace(op, inputs.values, &bytes, error);
    }
    outputs.tensor[0].data = output;
    return status == OPAQ_OK ? opaq_op_run(op, inputs.values, &outputs,
                                           (struct opaq_span){workspace, sizeof workspace}, NULL, error)
                             : status;
}
