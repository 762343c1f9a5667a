/* runner/bound_runner.c: creates a runner from a call of the operator linear, mlp or moe. The description of the call is
 * in one block of host memory, its tensors in one of device memory. */
#include <assert.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"
#include "op/handle/runner_registry.h"
#include "op/table/op_tensor.h"
#include "runner/bound_runner.h"
#include "runner/bound_weights.h"

/* The operators that can be bound, and the number of leading arguments that are activations. */
struct binding {
    const char *op;
    enum opaq_runner_kind kind;
    int activations;
};
static const struct binding bindings[] = {
    {"linear", OPAQ_RUNNER_LINEAR, 1}, {"mlp", OPAQ_RUNNER_MLP, 1}, {"moe", OPAQ_RUNNER_MOE, 3}};
enum { BINDING_COUNT = sizeof bindings / sizeof bindings[0], ACTIVATION_LIMIT = 3 };

/* ---- checking ---- */

/* The dtype of activations that matches the bound tensors: that of the first 16-bit float. */
static int32_t activation_dtype(const struct opaq_op *op, const struct opaq_value *values, int activations) {
    for (int i = activations; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        const bool has_tensor = kind <= OPAQ_ARGUMENT_TENSOR_LIST && values[i].tensors != NULL &&
                                (kind != OPAQ_ARGUMENT_TENSOR_LIST || values[i].count > 0);
        if (has_tensor && dtype_bytes(values[i].tensors->dtype) == 2) {
            return values[i].tensors->dtype;
        }
    }
    return OPAQ_DTYPE_BF16;
}

/* The device of a call: that of the first bound tensor. */
static struct opaq_device device_of(const struct binding *binding, const struct opaq_op *op,
                                    const struct opaq_value *values) {
    for (int i = binding->activations; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        if (kind <= OPAQ_ARGUMENT_TENSOR_LIST && values[i].tensors != NULL && values[i].count > 0) {
            return values[i].tensors->device;
        }
    }
    return (struct opaq_device){OPAQ_DEVICE_CPU, 0};
}

/* Whether a call with one row of activations would be accepted. Measuring follows no address, so the activations'
 * memory only has to be somewhere. */
static enum opaq_status check_call(const struct binding *binding, const struct opaq_op *op,
                                   const struct opaq_value *values, struct opaq_device device,
                                   struct opaq_error *error) {
    static _Alignas(64) char somewhere[64];
    struct opaq_value probe[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor activations[ACTIVATION_LIMIT];
    int64_t features = 1;
    size_t bytes;
    for (int i = op->argument_count - 1; i >= 0; --i) { /* the first shape determines it */
        if (op->argument[i].kind == OPAQ_ARGUMENT_SIZES && values[i].count > 0 && values[i].sizes != NULL) {
            features = values[i].sizes[values[i].count - 1];
        }
    }
    memcpy(probe, values, (size_t)op->argument_count * sizeof *probe);
    for (int i = 0; i < binding->activations; ++i) {
        const int64_t size = i == 0 ? features : 1;
        activations[i] =
            (struct opaq_tensor){.data = somewhere,
                                 .dtype = i == 0   ? activation_dtype(op, values, binding->activations)
                                          : i == 1 ? OPAQ_DTYPE_F32
                                                   : OPAQ_DTYPE_I32,
                                 .rank = 2,
                                 .device = device,
                                 .shape = {1, size},
                                 .strides = {size, 1}};
        probe[i] = (struct opaq_value){.tensors = &activations[i], .count = 1};
    }
    return opaq_op_workspace(op, probe, &bytes, error);
}

/* ---- binding ---- */

static const void *keep(struct arena *host, const void *from, size_t bytes) {
    void *kept = arena_take(host, bytes);
    if (kept != NULL && bytes > 0) {
        memcpy(kept, from, bytes);
    }
    return kept;
}

/* Copies a call's values: descriptions to `host`, tensors' data to the arena of `work`; or measures both. */
static enum opaq_status bind(struct work *work, struct arena *host, const struct op_row *row, int activations,
                             const struct opaq_value *values, const struct bound_layer *layer,
                             struct bound *bound, struct opaq_error *error) {
    const struct opaq_op *op = &row->op;
    int weight = 0;
    for (int i = activations; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        struct opaq_value *value = &bound->values[i];
        struct opaq_tensor tensors[OPAQ_BUFFER_LIMIT];
        int count = 0;
        *value = values[i];
        if (i == layer->argument) {
            value->count = (int64_t)layer->length;
            value->text = keep(host, layer->text, layer->length + 1);
        } else if (kind == OPAQ_ARGUMENT_SIZES) {
            value->sizes = keep(host, values[i].sizes, (size_t)values[i].count * sizeof *value->sizes);
        } else if (kind == OPAQ_ARGUMENT_TENSOR_LIST) {
            TRY(bound_weight_copy(work, &layer->weight[weight++], tensors, &count, error));
            value->count = count;
        } else if (kind < OPAQ_ARGUMENT_TENSOR_LIST && values[i].tensors != NULL) {
            TRY_AS(op->argument[i].name, error, bound_tensor_copy(work, values[i].tensors, tensors, error));
            count = 1;
        }
        if (count > 0) {
            value->tensors = keep(host, tensors, (size_t)count * sizeof *tensors);
        }
    }
    return OPAQ_OK;
}

/* The kernel of the first product for activations of that dtype. */
static const char *kernel_of(const struct bound *bound, const struct bound_layer *layer, int32_t dtype) {
    const bool is_linear = bound->row->plan_kind == PLAN_LINEAR;
    const struct opaq_form *weight = &layer->weight[0].kept;
    const struct opaq_form *x = is_linear ? &bound->plan.linear.x : &bound->plan.experts.x;
    const int32_t precision = is_linear ? bound->plan.linear.precision : bound->plan.experts.precision;
    const char *name = opaq_device_linear_kernel(bound->device, is_quantized(weight) ? &weight->spec : NULL,
                                                 is_quantized(x) ? &x->spec : NULL, (enum opaq_element)dtype,
                                                 (enum opaq_precision)precision);
    return name == NULL ? "" : name;
}

static enum opaq_status describe(const struct binding *binding, const struct bound_layer *layer,
                                 const struct bound *bound, int32_t dtype, size_t bytes,
                                 struct opaq_runner_info *info, struct opaq_error *error) {
    const struct opaq_value *first = layer->weight[0].shape;
    const struct opaq_value *last = layer->weight[layer->weight_count - 1].shape;
    char text[2][OPAQ_SPEC_TEXT_BYTES] = {"", ""};
    memset(info, 0, sizeof *info);
    info->kind = (int32_t)binding->kind;
    info->in_features = first->sizes[first->count - 1];
    info->out_features = last->sizes[last->count - 2];
    info->experts = binding->kind == OPAQ_RUNNER_MOE ? first->sizes[0] : 0;
    info->bytes = bytes;
    (void)snprintf(info->kernel, sizeof info->kernel, "%s", kernel_of(bound, layer, dtype));
    for (int i = 0; i < layer->weight_count; ++i) {
        const struct opaq_value *shape = layer->weight[i].shape;
        int64_t elements = 0; /* too many are possible where there are no experts, which is refused later */
        (void)checked_multiply(shape->sizes[shape->count - 2], shape->sizes[shape->count - 1], &elements);
        info->multiplications += elements;
        TRY(bound_weight_format(&layer->weight[i], text[i], sizeof text[i], error));
    }
    const bool differ = layer->weight_count == 2 && strcmp(text[0], text[1]) != 0;
    (void)snprintf(info->format, sizeof info->format, "%s%s%s", text[0], differ ? " " : "",
                   differ ? text[1] : "");
    return OPAQ_OK;
}

/* Fills a block of host memory, whose size was measured, and device memory. */
static enum opaq_status fill(struct work *work, struct arena *host, const struct binding *binding,
                             const struct opaq_value *values, const struct bound_layer *layer,
                             struct bound *bound, struct opaq_error *error) {
    TRY(bind(work, host, bound->row, binding->activations, values, layer, bound, error));
    TRY(check_call(binding, &bound->row->op, bound->values, bound->device, error));
    return op_plan_resolve(bound->row, bound->values, &bound->plan, error);
}

/* Allocates and fills; releases everything after an error. */
static enum opaq_status prepare(const struct binding *binding, const struct op_row *row,
                                const struct opaq_value *values, const struct bound_layer *layer,
                                const struct opaq_execution *execution, size_t *bytes, struct bound **made,
                                struct opaq_error *error) {
    struct work work = {.execution = execution, .is_measuring = true};
    struct arena host = {.memory = NULL};
    struct bound measured = {0};
    TRY(backend_of(execution->device, &work.backend, error));
    (void)arena_take(&host, sizeof measured);
    TRY(bind(&work, &host, row, binding->activations, values, layer, &measured, error));
    *bytes = host.used + work.arena.used;
    void *block = NULL;
    if (work.arena.used > (size_t)OPAQ_SIZE_LIMIT || posix_memalign(&block, 64, host.used) != 0) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory for a %s runner of %zu bytes", row->op.name,
                         *bytes);
    }
    host = (struct arena){.memory = block};
    struct bound *bound = arena_take(&host, sizeof *bound);
    *bound = (struct bound){
        .row = row, .backend = work.backend, .device = execution->device, .activations = binding->activations};
    enum opaq_status status = work.backend->allocate(bound->device, work.arena.used, &bound->memory, error);
    if (status == OPAQ_OK) {
        work.arena = (struct arena){.memory = bound->memory};
        work.is_measuring = false;
        status = fill(&work, &host, binding, values, layer, bound, error);
    }
    if (status != OPAQ_OK) {
        bound_destroy(bound);
        return status;
    }
    *made = bound;
    return OPAQ_OK;
}

static enum opaq_status create(const struct opaq_op *op, const struct opaq_value *values,
                               const struct opaq_execution *given, int64_t *handle, struct opaq_error *error) {
    if (op == NULL || values == NULL || handle == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is NULL",
                         op == NULL       ? "op"
                         : values == NULL ? "values"
                                          : "handle");
    }
    const struct op_row *row = op_row_of(op);
    const struct binding *binding = NULL;
    for (int i = 0; row != NULL && i < BINDING_COUNT; ++i) {
        binding = strcmp(bindings[i].op, op->name) == 0 ? &bindings[i] : binding;
    }
    if (binding == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "there are no runners of the operator %s, expected linear, mlp or moe",
                         row == NULL ? "given" : op->name);
    }
    const struct opaq_device device = device_of(binding, op, values);
    struct opaq_execution execution;
    struct bound_layer layer;
    struct opaq_runner_info info;
    struct bound *bound = NULL;
    size_t bytes = 0;
    TRY(check_call(binding, op, values, device, error));
    TRY(execution_of(given, device, &execution, error));
    TRY(bound_layer_make(op, values, &layer, error));
    TRY(prepare(binding, row, values, &layer, &execution, &bytes, &bound, error));
    assert(bound != NULL); /* for the static analyzer */
    const int32_t dtype = activation_dtype(op, values, binding->activations);
    enum opaq_status status = describe(binding, &layer, bound, dtype, bytes, &info, error);
    if (status == OPAQ_OK) {
        status = runner_register(&info, &bound_functions, &bound_backward_functions, bound, handle, error);
    }
    if (status != OPAQ_OK) {
        bound_destroy(bound);
    }
    return status;
}

enum opaq_status opaq_runner_create(const struct opaq_op *op, const struct opaq_value *values,
                                    const struct opaq_execution *execution, int64_t *handle,
                                    struct opaq_error *error) {
    TRY_AS("runner_create", error, create(op, values, execution, handle, error));
    return OPAQ_OK;
}
