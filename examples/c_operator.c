/* c_operator.c: an operator from the table, called by its name as a framework calls it: query the outputs,
 * allocate, run. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

/* Bytes of a contiguous output. */
static size_t tensor_bytes(const struct opaq_tensor *tensor) {
    size_t bytes = tensor->dtype == OPAQ_DTYPE_U8 ? 1 : 4;
    for (int i = 0; i < tensor->rank; ++i) {
        bytes *= (size_t)tensor->shape[i];
    }
    return bytes;
}

int main(void) {
    enum { ROWS = 8, COLUMNS = 96 };
    static float x[ROWS][COLUMNS];
    for (int i = 0; i < ROWS * COLUMNS; ++i) {
        x[i / COLUMNS][i % COLUMNS] = (float)(i % 13) - 6.0f;
    }
    const struct opaq_tensor tensor = {.data = x,
                                       .dtype = OPAQ_DTYPE_F32,
                                       .rank = 2,
                                       .device = {OPAQ_DEVICE_CPU, 0},
                                       .shape = {ROWS, COLUMNS},
                                       .strides = {COLUMNS, 1}};
    const char *quantizer = "mxfp4+both";
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_outputs outputs;
    struct opaq_error error;
    char schema[OPAQ_OP_SCHEMA_BYTES];
    const struct opaq_op *op = opaq_op_find("quantize");
    memset(values, 0, sizeof values); /* an absent optional argument is zero */
    values[0].tensors = &tensor;
    values[0].count = 1;
    values[1].text = quantizer;
    values[1].count = (int64_t)strlen(quantizer);
    if (opaq_op_schema(op, schema, sizeof schema, &error) != OPAQ_OK ||
        opaq_op_outputs(op, values, &outputs, &error) != OPAQ_OK) {
        fprintf(stderr, "%s\n", error.text);
        return 1;
    }
    printf("%s\n", schema);
    for (int i = 0; i < outputs.count; ++i) {
        struct opaq_tensor *output = &outputs.tensor[i];
        printf("output %d: %lld x %lld\n", i, (long long)output->shape[0], (long long)output->shape[1]);
        output->data = malloc(tensor_bytes(output));
        if (output->data == NULL) {
            return 1;
        }
    }
    const enum opaq_status status =
        opaq_op_run(op, values, &outputs, (struct opaq_span){NULL, 0}, NULL, &error);
    printf("%s\n", status == OPAQ_OK ? "done" : error.text);
    for (int i = 0; i < outputs.count; ++i) {
        free(outputs.tensor[i].data);
    }
    return status == OPAQ_OK ? 0 : 1;
}
