/* support_runner_layer.c: arguments of linear, mlp and moe, for tests of runners. */
#include "support_runner_layer.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"

static struct opaq_tensor tensor_of(const struct tensor *memory, const int64_t *shape, int rank) {
    struct opaq_tensor tensor = op_tensors_of(memory).tensor[0];
    int64_t stride = 1;
    tensor.rank = rank;
    for (int i = rank - 1; i >= 0; --i) {
        tensor.shape[i] = shape[i];
        tensor.strides[i] = stride;
        stride *= shape[i];
    }
    return tensor;
}

static void quantize(const struct opaq_tensor *x, const char *text, struct op_result *result) {
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(x), op_text_value(text)};
    struct opaq_error error;
    if (op_call("quantize", values, NULL, result, &error) != OPAQ_OK) {
        printf("  %s\n", error.text);
        exit(1);
    }
}

struct runner_layer runner_layer_make(enum opaq_runner_kind kind, enum opaq_element dtype, const char *weights,
                                      const char *words) {
    static const char *const names[3][2] = {{"w", ""}, {"gate_up", "down"}, {"gate_up", "down"}};
    const int64_t sizes[3][2][2] = {{{RUNNER_N, RUNNER_H}, {0, 0}},
                                    {{2 * RUNNER_I, RUNNER_H}, {RUNNER_H, RUNNER_I}},
                                    {{2 * RUNNER_I, RUNNER_H}, {RUNNER_H, RUNNER_I}}};
    const int64_t experts = kind == OPAQ_RUNNER_MOE ? RUNNER_E : 1;
    const int first = kind == OPAQ_RUNNER_MOE ? 0 : 1;
    struct runner_layer layer;
    memset(&layer, 0, sizeof layer);
    layer.kind = kind;
    layer.weight_count = kind == OPAQ_RUNNER_LINEAR ? 1 : 2;
    (void)snprintf(layer.plan, sizeof layer.plan, "%s", words);
    for (int i = 0; i < layer.weight_count; ++i) {
        const int64_t rows = sizes[kind][i][0];
        const int64_t shape[3] = {experts, rows, sizes[kind][i][1]};
        memcpy(layer.shapes[i], shape + first, sizeof(int64_t) * (size_t)(3 - first));
        layer.plain[i] = tensor_make(experts * rows, shape[2], dtype, NULL);
        layer.bias[i] = tensor_make(experts, rows, dtype, NULL);
        tensor_fill(&layer.plain[i], FILL_NORMAL, 11 + (uint64_t)i);
        tensor_fill(&layer.bias[i], FILL_NORMAL, 21 + (uint64_t)i);
        for (int64_t e = 0; e < experts; ++e) { /* experts of different magnitude, so that each has another
                                                 * amax */
            for (int64_t r = 0; r < rows; ++r) {
                for (int64_t c = 0; c < shape[2]; ++c) {
                    const float value = tensor_get(&layer.plain[i], e * rows + r, c);
                    tensor_set(&layer.plain[i], e * rows + r, c, value * 0.1f * (float)(1 + 2 * e));
                }
            }
        }
        layer.tensors[i] = tensor_of(&layer.plain[i], shape + first, 3 - first);
        layer.bias_tensors[i] = tensor_of(&layer.bias[i], shape + first, 2 - first);
        layer.lists[i] = (struct op_tensors){.tensor = {layer.tensors[i]}, .count = 1};
        if (weights[0] != '\0') {
            const size_t length = strlen(layer.plan);
            quantize(&layer.tensors[i], weights, &layer.quantized[i]);
            layer.lists[i] = op_result_row(&layer.quantized[i], 0);
            (void)snprintf(layer.plan + length, sizeof layer.plan - length, "%s%s_given=%s", length ? " " : "",
                           names[kind][i], weights);
        }
    }
    return layer;
}

void runner_layer_free(struct runner_layer *layer) {
    for (int i = 0; i < layer->weight_count; ++i) {
        for (int t = 0; t < layer->quantized[i].outputs.count; ++t) {
            struct opaq_tensor *tensor = &layer->quantized[i].outputs.tensor[t];
            memset(tensor->data, 0xEE, op_tensor_bytes(tensor));
        }
        memset(layer->tensors[i].data, 0xEE, op_tensor_bytes(&layer->tensors[i]));
        memset(layer->bias_tensors[i].data, 0xEE, op_tensor_bytes(&layer->bias_tensors[i]));
        op_result_free(&layer->quantized[i]);
        tensor_free(&layer->plain[i]);
        tensor_free(&layer->bias[i]);
    }
    memset(layer, 0xEE, sizeof *layer);
}

struct runner_inputs *runner_inputs_make(enum opaq_element dtype) {
    const int64_t shape[2] = {RUNNER_ROWS, RUNNER_H};
    const int64_t choices[2] = {RUNNER_ROWS, RUNNER_K};
    struct runner_inputs *inputs = calloc(1, sizeof *inputs);
    if (inputs == NULL) {
        exit(1);
    }
    inputs->x = tensor_make(RUNNER_ROWS, RUNNER_H, dtype, NULL);
    tensor_fill(&inputs->x, FILL_NORMAL, 1);
    for (int r = 0; r < RUNNER_ROWS; ++r) {
        for (int k = 0; k < RUNNER_K; ++k) {
            inputs->weights[r][k] = 0.25f + 0.5f * (float)k;
            inputs->ids[r][k] = (r * 2 + k) % (RUNNER_E + 1) - 1; /* -1: no expert */
        }
    }
    inputs->tensors[0] = tensor_of(&inputs->x, shape, 2);
    for (int i = 1; i < 3; ++i) {
        inputs->tensors[i] = inputs->tensors[0];
        memcpy(inputs->tensors[i].shape, choices, sizeof choices);
        inputs->tensors[i].strides[0] = RUNNER_K;
    }
    inputs->tensors[1].dtype = OPAQ_DTYPE_F32;
    inputs->tensors[1].data = inputs->weights;
    inputs->tensors[2].dtype = OPAQ_DTYPE_I32;
    inputs->tensors[2].data = inputs->ids;
    return inputs;
}

void runner_inputs_free(struct runner_inputs *inputs) {
    tensor_free(&inputs->x);
    free(inputs);
}

const struct opaq_op *runner_op(enum opaq_runner_kind kind) {
    static const char *const names[] = {"linear", "mlp", "moe"};
    return opaq_op_find(names[kind]);
}

void runner_values(const struct runner_layer *layer, const struct runner_inputs *inputs,
                   struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT]) {
    const int activations = layer->kind == OPAQ_RUNNER_MOE ? 3 : 1;
    const int rank = layer->kind == OPAQ_RUNNER_MOE ? 3 : 2;
    int at = activations;
    memset(values, 0, OPAQ_OP_ARGUMENT_LIMIT * sizeof *values);
    for (int i = 0; inputs != NULL && i < activations; ++i) {
        values[i] = op_tensor_value(&inputs->tensors[i]);
    }
    for (int i = 0; i < layer->weight_count; ++i) {
        values[at++] = op_list_value(&layer->lists[i]);
    }
    for (int i = 0; i < layer->weight_count; ++i) {
        values[at++] = op_tensor_value(&layer->bias_tensors[i]);
    }
    for (int i = 0; i < layer->weight_count; ++i) {
        values[at++] = op_sizes_value(layer->shapes[i], rank);
    }
    values[at] = op_text_value(layer->plan);
}

enum opaq_status runner_run(enum opaq_runner_kind kind, int64_t handle, const struct runner_inputs *inputs,
                            const struct op_settings *settings, struct op_result *result,
                            struct opaq_error *error) {
    static const char *const names[] = {"linear_gemm", "mlp_gemm", "moe_gemm"};
    const int activations = kind == OPAQ_RUNNER_MOE ? 3 : 1;
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    memset(values, 0, sizeof values);
    for (int i = 0; i < activations; ++i) {
        values[i] = op_tensor_value(&inputs->tensors[i]);
    }
    values[activations].integer = handle;
    values[activations + 1].integer = kind == OPAQ_RUNNER_LINEAR ? RUNNER_N : RUNNER_H;
    return op_call(names[kind], values, settings, result, error);
}
