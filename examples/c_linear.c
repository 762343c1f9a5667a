/* c_linear.c: a linear layer and its gradients through the operator table: the program queries the outputs,
 * allocates them, and runs the operator. The call quantizes the weight to MXFP8 and x to NVFP4. Build it with
 *     cc -std=c11 c_linear.c $(pkg-config --cflags --libs opaq) */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

enum { M = 40, K = 64, N = 96 };

static size_t tensor_bytes(const struct opaq_tensor *tensor) {
    size_t bytes = tensor->dtype == OPAQ_DTYPE_U8 ? 1 : tensor->dtype == OPAQ_DTYPE_I64 ? 8 : 4;
    for (int i = 0; i < tensor->rank; ++i) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}

/* Allocates the outputs and the workspace, and runs. */
static enum opaq_status run(const char *name, const struct opaq_value *values, struct opaq_outputs *outputs,
                            struct opaq_error *error) {
    const struct opaq_op *op = opaq_op_find(name);
    struct opaq_span workspace = {NULL, 0};
    enum opaq_status status = opaq_op_outputs(op, values, outputs, error);
    if (status == OPAQ_OK) {
        status = opaq_op_workspace(op, values, &workspace.bytes, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    for (int i = 0; i < outputs->count; ++i) {
        outputs->tensor[i].data = malloc(tensor_bytes(&outputs->tensor[i]) + 1);
    }
    workspace.data = aligned_alloc(64, (workspace.bytes + 63) / 64 * 64 + 64);
    status = opaq_op_run(op, values, outputs, workspace, NULL, error);
    free(workspace.data);
    printf("%-16s %d tensors, %zu bytes of workspace\n", name, outputs->count, workspace.bytes);
    return status;
}

static struct opaq_tensor matrix(float *data, int64_t rows, int64_t columns) {
    return (struct opaq_tensor){
        .data = data, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {rows, columns}, .strides = {columns, 1}};
}

int main(void) {
    static float x_data[M * K];
    static float w_data[N * K];
    static float dy_data[M * N];
    for (int i = 0; i < N * K; ++i) {
        x_data[i % (M * K)] = (float)(i % 13) - 6.0f;
        w_data[i] = (float)(i % 7) - 3.0f;
    }
    for (int i = 0; i < M * N; ++i) {
        dy_data[i] = (float)(i % 5) - 2.0f;
    }
    const struct opaq_tensor x = matrix(x_data, M, K);
    const struct opaq_tensor w = matrix(w_data, N, K);
    const struct opaq_tensor dy = matrix(dy_data, M, N);
    const int64_t x_shape[2] = {M, K};
    const int64_t w_shape[2] = {N, K};
    const char *plan = "x=nvfp4 w=mxfp8 dy=mxfp8.e5m2 grad=xw";
    const struct opaq_value plan_value = {.text = plan, .count = (int64_t)strlen(plan)};
    struct opaq_value forward[OPAQ_OP_ARGUMENT_LIMIT] = {{.tensors = &x, .count = 1},
                                                         {.tensors = &w, .count = 1},
                                                         {0} /* no bias */,
                                                         {.sizes = x_shape, .count = 2},
                                                         {.sizes = w_shape, .count = 2},
                                                         {.integer = OPAQ_DTYPE_F32},
                                                         plan_value};
    struct opaq_outputs y;
    struct opaq_outputs gradients;
    struct opaq_error error;
    if (run("linear_forward", forward, &y, &error) != OPAQ_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    /* the outputs by rows: y, the columnwise copy of x, that of w */
    struct opaq_value backward[OPAQ_OP_ARGUMENT_LIMIT] = {
        {.tensors = &dy, .count = 1},
        {.tensors = &y.tensor[y.first[1]], .count = y.first[2] - y.first[1]},
        {.tensors = &y.tensor[y.first[2]], .count = y.first[3] - y.first[2]},
        {.sizes = x_shape, .count = 2},
        {.sizes = w_shape, .count = 2},
        {.integer = OPAQ_DTYPE_F32},
        {.integer = OPAQ_DTYPE_F32},
        plan_value};
    if (run("linear_backward", backward, &gradients, &error) != OPAQ_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    double exact = 0.0;
    for (int k = 0; k < K; ++k) {
        exact += (double)x_data[k] * (double)w_data[k];
    }
    printf("y[0][0] = %g (without quantization %g), dx[0][0] = %g, dw[0][0] = %g\n",
           (double)((float *)y.tensor[0].data)[0], exact, (double)((float *)gradients.tensor[0].data)[0],
           (double)((float *)gradients.tensor[1].data)[0]);
    for (int i = 0; i < y.count; ++i) {
        free(y.tensor[i].data);
    }
    for (int i = 0; i < gradients.count; ++i) {
        free(gradients.tensor[i].data);
    }
    return 0;
}
