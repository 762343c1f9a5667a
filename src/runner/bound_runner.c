/* runner/bound_runner.c: a runner from a call of the operator linear, mlp or moe: the same call again and again, with
 * new activations. Everything else of it lies in one block of memory. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/checked.h"
#include "op/plan/experts_plan.h"
#include "op/table/op_tensor.h"
#include "opaq/runner.h"
#include "opaq/status.h"
#include "runner/bound_weights.h"

static const char operation[] = "runner_create";

/* Which operators can be bound, and how many of their arguments, the first ones, are activations. */
struct binding {
    const char *op;
    enum opaq_runner_kind kind;
    int activations;
    bool (*is_kept)(const struct opaq_value *plan);
};
static const struct binding bindings[] = {{"linear", OPAQ_RUNNER_LINEAR, 1, plan_is_kept},
                                          {"mlp", OPAQ_RUNNER_MLP, 1, experts_plan_is_kept},
                                          {"moe", OPAQ_RUNNER_MOE, 3, experts_plan_is_kept}};
enum { BINDING_COUNT = sizeof bindings / sizeof bindings[0], ACTIVATION_LIMIT = 3 };

/* The state; what the values point to follows in the same block. */
struct bound {
    const struct opaq_op *op;
    int activations;
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
};

/* ---- running ---- */

/* The operator's own call: its values, the activations among them, and one output. */
struct bound_call {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT];
    struct opaq_outputs outputs;
    struct opaq_call call;
};

static enum opaq_status make_call(const struct bound *bound, const struct opaq_runner_call *outer,
                                  struct bound_call *inner, struct opaq_error *error) {
    const struct opaq_tensor *output = outer->output;
    memcpy(inner->values, bound->values, sizeof inner->values);
    for (int i = 0; i < bound->activations; ++i) {
        inner->values[i] = (struct opaq_value){.tensors = &outer->inputs[i], .count = 1};
    }
    inner->outputs.count = 1;
    inner->outputs.first[0] = 0;
    inner->outputs.first[1] = 1;
    inner->outputs.tensor[0] = *output;
    inner->call = (struct opaq_call){bound->op,       inner->values,    inner->protos,
                                     &inner->outputs, outer->workspace, outer->parallel};
    return opaq_proto_make(output->shape, output->rank, (enum opaq_element)output->dtype, NULL, output->device,
                           &inner->protos[0], error);
}

static enum opaq_status bound_workspace(void *state, const struct opaq_runner_call *call, size_t *bytes,
                                        struct opaq_error *error) {
    const struct bound *bound = state;
    struct bound_call inner;
    const enum opaq_status status = make_call(bound, call, &inner, error);
    return status == OPAQ_OK && bound->op->workspace != NULL ? bound->op->workspace(&inner.call, bytes, error)
                                                             : status;
}

static enum opaq_status bound_run(void *state, const struct opaq_runner_call *call, struct opaq_error *error) {
    const struct bound *bound = state;
    struct bound_call inner;
    const enum opaq_status status = make_call(bound, call, &inner, error);
    return status == OPAQ_OK ? bound->op->run(&inner.call, error) : status;
}

static const struct opaq_runner_functions bound_functions = {OPAQ_RUNNER_ABI, bound_workspace, bound_run, free};

/* ---- checking ---- */

/* The dtype of activations that the bound tensors go with: that of the first 16-bit float. */
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

/* Whether a call with one row of activations would be accepted. Measuring reads no tensor's contents, so the
 * activations' memory only has to be somewhere. It also parses the texts, which are found without a lock later. */
static enum opaq_status check_call(const struct binding *binding, const struct opaq_op *op,
                                   const struct opaq_value *values, struct opaq_error *error) {
    static _Alignas(64) char somewhere[64];
    struct opaq_value probe[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor activations[ACTIVATION_LIMIT];
    struct opaq_error reason;
    int64_t features = 1;
    size_t bytes;
    for (int i = op->argument_count - 1; i >= 0; --i) { /* the first of the shapes counts */
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
                                 .shape = {1, size},
                                 .strides = {size, 1}};
        probe[i] = (struct opaq_value){.tensors = &activations[i], .count = 1};
    }
    const enum opaq_status status = opaq_op_workspace(op, probe, &bytes, &reason);
    return status == OPAQ_OK ? OPAQ_OK : opaq_fail(error, status, "%s: %s", operation, reason.text);
}

/* Tensors that can be copied. What they must look like, the operator's own check says. */
static enum opaq_status check_tensors(const struct binding *binding, const struct opaq_op *op,
                                      const struct opaq_value *values, struct opaq_error *error) {
    for (int i = binding->activations; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        const int64_t count = kind == OPAQ_ARGUMENT_TENSOR_LIST                               ? values[i].count
                              : kind < OPAQ_ARGUMENT_TENSOR_LIST && values[i].tensors != NULL ? 1
                                                                                              : 0;
        for (int64_t t = 0; t < count && values[i].tensors != NULL; ++t) {
            const struct opaq_tensor *tensor = &values[i].tensors[t];
            if (tensor->device.type != OPAQ_DEVICE_CPU) {
                return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                                 "%s: %s is on cuda:%d, this build works on the cpu", operation,
                                 op->argument[i].name, tensor->device.index);
            }
        }
    }
    return OPAQ_OK;
}

/* ---- binding ---- */

static const void *keep(struct scratch *memory, const void *from, size_t bytes) {
    void *kept = scratch_take(memory, bytes);
    if (kept != NULL && bytes > 0) {
        memcpy(kept, from, bytes);
    }
    return kept;
}

/* Copies a call's values into `memory`, or measures how much that takes. */
static enum opaq_status bind(const struct opaq_op *op, int activations, const struct opaq_value *values,
                             const struct bound_plan *plan, const struct opaq_parallel *parallel,
                             struct scratch *memory, struct bound *bound, struct opaq_error *error) {
    memset(bound, 0, sizeof *bound);
    bound->op = op;
    bound->activations = activations;
    enum opaq_status status = OPAQ_OK;
    int weight = 0;
    for (int i = activations; status == OPAQ_OK && i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        struct opaq_value *value = &bound->values[i];
        struct opaq_tensor tensors[OPAQ_BUFFER_LIMIT];
        int count = 0;
        *value = values[i];
        if (i == plan->argument) {
            value->count = (int64_t)plan->length;
            value->text = keep(memory, plan->text, plan->length + 1);
        } else if (kind == OPAQ_ARGUMENT_SIZES) {
            value->sizes = keep(memory, values[i].sizes, (size_t)values[i].count * sizeof *value->sizes);
        } else if (kind == OPAQ_ARGUMENT_TENSOR_LIST) {
            status = bound_weight_copy(&plan->weight[weight++], parallel, memory, tensors, &count, error);
            value->count = count;
        } else if (kind < OPAQ_ARGUMENT_TENSOR_LIST && values[i].tensors != NULL) {
            bound_tensor_copy(values[i].tensors, memory, tensors);
            count = 1;
        }
        if (count > 0) {
            value->tensors = keep(memory, tensors, (size_t)count * sizeof *tensors);
        }
    }
    return status;
}

/* The kernel of the first product, with activations of that dtype. */
static const char *kernel_of(const struct binding *binding, const struct bound_plan *plan, int32_t dtype) {
    struct opaq_linear_plan linear;
    struct opaq_experts_plan experts;
    const struct opaq_form *weight = &plan->weight[0].kept;
    const struct opaq_form *x = NULL;
    int32_t precision = OPAQ_PRECISION_EXACT;
    if (binding->kind == OPAQ_RUNNER_LINEAR &&
        opaq_linear_plan_parse(plan->text, plan->length, &linear, NULL) == OPAQ_OK) {
        x = &linear.x;
        precision = linear.precision;
    } else if (binding->kind != OPAQ_RUNNER_LINEAR &&
               opaq_experts_plan_parse(plan->text, plan->length, &experts, NULL) == OPAQ_OK) {
        x = &experts.x;
        precision = experts.precision;
    }
    const char *name = opaq_linear_kernel(is_quantized(weight) ? &weight->spec : NULL,
                                          x != NULL && is_quantized(x) ? &x->spec : NULL,
                                          (enum opaq_element)dtype, (enum opaq_precision)precision);
    return name == NULL ? "" : name;
}

static enum opaq_status describe(const struct binding *binding, const struct bound_plan *plan, int32_t dtype,
                                 size_t bytes, struct opaq_runner_info *info, struct opaq_error *error) {
    const struct opaq_value *first = plan->weight[0].shape;
    const struct opaq_value *last = plan->weight[plan->weight_count - 1].shape;
    char text[2][OPAQ_SPEC_TEXT_BYTES] = {"", ""};
    memset(info, 0, sizeof *info);
    info->kind = (int32_t)binding->kind;
    info->in_features = first->sizes[first->count - 1];
    info->out_features = last->sizes[last->count - 2];
    info->experts = binding->kind == OPAQ_RUNNER_MOE ? first->sizes[0] : 0;
    info->bytes = bytes;
    (void)snprintf(info->kernel, sizeof info->kernel, "%s", kernel_of(binding, plan, dtype));
    enum opaq_status status = OPAQ_OK;
    for (int i = 0; status == OPAQ_OK && i < plan->weight_count; ++i) {
        const struct opaq_value *shape = plan->weight[i].shape;
        info->multiplications += shape->sizes[shape->count - 2] * shape->sizes[shape->count - 1];
        status = bound_weight_format(&plan->weight[i], text[i], sizeof text[i], error);
    }
    const bool differ = plan->weight_count == 2 && strcmp(text[0], text[1]) != 0;
    (void)snprintf(info->format, sizeof info->format, "%s%s%s", text[0], differ ? " " : "",
                   differ ? text[1] : "");
    return status;
}

/* Memory for a runner, and the call in it; NULL with a status if that cannot be. */
static struct bound *prepare(const struct binding *binding, const struct opaq_op *op,
                             const struct opaq_value *values, const struct bound_plan *plan,
                             const struct opaq_parallel *parallel, size_t *bytes, enum opaq_status *status,
                             struct opaq_error *error) {
    struct scratch memory = {.memory = NULL};
    struct bound measured;
    void *block = NULL;
    (void)scratch_take(&memory, sizeof measured);
    *status = bind(op, binding->activations, values, plan, parallel, &memory, &measured, error);
    if (*status != OPAQ_OK) {
        return NULL;
    }
    *bytes = memory.used;
    if (memory.used > (size_t)OPAQ_SIZE_LIMIT || posix_memalign(&block, 64, memory.used) != 0) {
        *status = opaq_fail(error, OPAQ_ERROR_MEMORY, "%s: no memory for a %s runner of %zu bytes", operation,
                            op->name, memory.used);
        return NULL;
    }
    memory = (struct scratch){.memory = block};
    struct bound *bound = scratch_take(&memory, sizeof *bound);
    *status = bind(op, binding->activations, values, plan, parallel, &memory, bound, error);
    if (*status == OPAQ_OK) {
        *status = check_call(binding, op, bound->values, error);
    }
    if (*status == OPAQ_OK && !binding->is_kept(&bound->values[plan->argument])) {
        *status =
            opaq_fail(error, OPAQ_ERROR_MEMORY, "%s: no memory to keep the plan \"%s\", or %d are kept already",
                      operation, plan->text, OPAQ_INTERN_LIMIT);
    }
    if (*status != OPAQ_OK) {
        free(block);
        return NULL;
    }
    return bound;
}

enum opaq_status opaq_runner_create(const struct opaq_op *op, const struct opaq_value *values,
                                    const struct opaq_parallel *parallel, int64_t *handle,
                                    struct opaq_error *error) {
    if (op == NULL || values == NULL || handle == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is NULL", operation,
                         op == NULL       ? "op"
                         : values == NULL ? "values"
                                          : "handle");
    }
    const struct binding *binding = NULL;
    for (int i = 0; i < BINDING_COUNT; ++i) {
        binding = strcmp(bindings[i].op, op->name) == 0 ? &bindings[i] : binding;
    }
    if (binding == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: there are no runners of the operator %s, expected linear, mlp or moe", operation,
                         op->name);
    }
    struct bound_plan plan;
    struct opaq_runner_info info;
    struct opaq_error reason;
    size_t bytes = 0;
    enum opaq_status status = check_tensors(binding, op, values, error);
    if (status == OPAQ_OK) {
        status = check_call(binding, op, values, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    status = bound_plan_make(op, values, &plan, &reason);
    if (status != OPAQ_OK) {
        return opaq_fail(error, status, "%s: %s", operation, reason.text);
    }
    struct bound *bound = prepare(binding, op, values, &plan, parallel, &bytes, &status, error);
    if (bound == NULL) {
        return status;
    }
    status = describe(binding, &plan, activation_dtype(op, values, binding->activations), bytes, &info, error);
    if (status == OPAQ_OK) {
        status = opaq_runner_register(&info, &bound_functions, bound, handle, error);
    }
    if (status != OPAQ_OK) {
        free(bound);
    }
    return status;
}
