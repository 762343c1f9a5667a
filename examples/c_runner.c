/* c_runner.c: runners. A linear layer is prepared once, its weight quantized to NVFP4, and runs by its handle;
 * then a runner that the program defines is run through the same operator. Build it with
 *     cc -std=c11 c_runner.c $(pkg-config --cflags --libs opaq) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

enum { M = 4, K = 64, N = 32 };

static struct opaq_tensor matrix(float *data, int64_t rows, int64_t columns) {
    return (struct opaq_tensor){
        .data = data, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {rows, columns}, .strides = {columns, 1}};
}

/* Runs a runner of this kind: scratch memory, and the call. */
static enum opaq_status run(int64_t handle, const struct opaq_tensor *x, const struct opaq_tensor *y,
                            struct opaq_error *error) {
    struct opaq_span workspace = {NULL, 0};
    enum opaq_status status = opaq_runner_workspace(handle, x, 1, &workspace.bytes, error);
    if (status == OPAQ_OK) {
        workspace.data = aligned_alloc(64, (workspace.bytes + 63) / 64 * 64 + 64);
        status = opaq_runner_run(handle, x, 1, y, workspace, NULL, error);
        free(workspace.data);
    }
    return status;
}

static void print_info(int64_t handle) {
    struct opaq_runner_info info;
    if (opaq_runner_query(handle, &info, NULL) == OPAQ_OK) {
        printf("%lld features to %lld, %s, %zu bytes, %s\n", (long long)info.in_features,
               (long long)info.out_features, info.format, info.bytes, info.kernel);
    }
}

/* ---- a custom runner: the sum of a row, times a factor, in every column ---- */

struct summing {
    float factor;
};

static enum opaq_status summing_run(void *state, const struct opaq_runner_call *call,
                                    struct opaq_error *error) {
    const struct summing *summing = state;
    const struct opaq_tensor *x = &call->inputs[0];
    if (x->dtype != OPAQ_DTYPE_F32 || x->rank != 2 || x->strides[1] != 1) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "summing: expected a matrix of f32, rows contiguous");
    }
    const int64_t columns = call->output->shape[1];
    for (int64_t row = 0; row < x->shape[0]; ++row) {
        const float *values = (const float *)x->data + row * x->strides[0];
        float sum = 0.0f;
        for (int64_t i = 0; i < x->shape[1]; ++i) {
            sum += values[i];
        }
        for (int64_t i = 0; i < columns; ++i) {
            ((float *)call->output->data)[row * columns + i] = sum * summing->factor;
        }
    }
    return OPAQ_OK;
}

static const struct opaq_runner_functions summing_functions = {
    .abi = OPAQ_RUNNER_ABI, .run = summing_run, .destroy = free};

static int64_t register_summing(struct opaq_error *error) {
    const struct opaq_runner_info info = {.kind = OPAQ_RUNNER_LINEAR,
                                          .in_features = K,
                                          .out_features = N,
                                          .bytes = sizeof(struct summing),
                                          .format = "f32",
                                          .kernel = "summing"};
    struct summing *state = malloc(sizeof *state);
    int64_t handle = 0;
    if (state != NULL) {
        state->factor = 0.5f;
        if (opaq_runner_register(&info, &summing_functions, state, &handle, error) != OPAQ_OK) {
            free(state);
        }
    }
    return handle;
}

int main(void) {
    static float x_data[M * K];
    static float y_data[M * N];
    float *w_data = malloc(sizeof(float) * N * K);
    for (int i = 0; w_data != NULL && i < N * K; ++i) {
        x_data[i % (M * K)] = (float)(i % 13) - 6.0f;
        w_data[i] = (float)(i % 7) - 3.0f;
    }
    const struct opaq_tensor x = matrix(x_data, M, K);
    const struct opaq_tensor y = matrix(y_data, M, N);
    const struct opaq_tensor w = matrix(w_data, N, K);
    const int64_t w_shape[2] = {N, K};
    const char *plan = "x=mxfp8 w=nvfp4"; /* the weight is quantized when the runner is created */
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {{0}, /* x is an argument of each run */
                                                              {.tensors = &w, .count = 1},
                                                              {0}, /* no bias */
                                                              {.sizes = w_shape, .count = 2},
                                                              {.text = plan, .count = (int64_t)strlen(plan)}};
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t prepared = 0;
    enum opaq_status status = opaq_runner_create(opaq_op_find("linear"), values, NULL, &prepared, &error);
    free(w_data); /* the runner keeps a copy */
    const int64_t summing = register_summing(&error);
    const int64_t handles[2] = {prepared, summing};
    for (int i = 0; status == OPAQ_OK && i < 2; ++i) {
        print_info(handles[i]);
        status = run(handles[i], &x, &y, &error);
        printf("y[0] = %g, %g, %g, ...\n", (double)y_data[0], (double)y_data[1], (double)y_data[2]);
    }
    if (status != OPAQ_OK || opaq_runner_destroy(prepared, &error) != OPAQ_OK ||
        opaq_runner_destroy(summing, &error) != OPAQ_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    status = run(prepared, &x, &y, &error); /* an error message, not a crash or another runner */
    printf("%s\n%d runners left\n", error.text, opaq_runner_count());
    return status == OPAQ_ERROR_ARGUMENT && opaq_runner_count() == 0 ? 0 : 1;
}
