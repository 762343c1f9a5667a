/* runner/bound_call.c: the calls of a runner that was made from a call: the same one with new activations, and the
 * operators that compute its gradients. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/try.h"
#include "op/table/op_describe.h"
#include "op/table/op_tensor.h"
#include "runner/bound_runner.h"

/* A call of an operator with the runner's weights. */
struct inner_call {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT];
    struct opaq_outputs outputs;
    struct op_call call;
};

static void set_row(struct inner_call *inner, const struct op_row *row) {
    inner->call.row = row;
    inner->call.op = &row->op;
}

/* The bound values with the activations `inputs`, of which there may be none. */
static void own_values(const struct bound *bound, const struct opaq_tensor *inputs, int count,
                       struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT]) {
    memcpy(values, bound->values, sizeof bound->values);
    for (int i = 0; i < count; ++i) {
        values[i] = (struct opaq_value){.tensors = &inputs[i], .count = 1};
    }
}

static enum opaq_status begin(const struct bound *bound, const struct opaq_runner_call *outer,
                              struct inner_call *inner, struct opaq_error *error) {
    if (!is_on_device(&outer->inputs[0], bound->device)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "the activations are on another device than the runner");
    }
    inner->call = (struct op_call){.values = inner->values,
                                   .plan = bound->plan,
                                   .protos = inner->protos,
                                   .outputs = &inner->outputs,
                                   .device = bound->device,
                                   .execution = *outer->execution};
    inner->call.work = (struct work){.backend = bound->backend, .execution = &inner->call.execution};
    return OPAQ_OK;
}

/* ---- the call itself ---- */

static enum opaq_status compute_output(const struct bound *bound, const struct opaq_runner_call *outer,
                                       struct inner_call *inner, struct opaq_error *error) {
    const struct opaq_tensor *output = outer->output;
    own_values(bound, outer->inputs, bound->activations, inner->values);
    set_row(inner, bound->row);
    inner->outputs.count = 1;
    inner->outputs.first[0] = 0;
    inner->outputs.first[1] = 1;
    inner->outputs.tensor[0] = *output;
    TRY(opaq_proto_make(output->shape, output->rank, (enum opaq_element)output->dtype, NULL, output->device,
                        &inner->protos[0], error));
    return bound->row->run(&inner->call, error);
}

/* ---- gradients ---- */

/* An argument that the bound operator does not have. Those that are not named are absent, or of absent outputs. */
static struct opaq_value value_of(const char *name, const struct opaq_runner_call *outer,
                                  const struct opaq_tensor *h) {
    const struct opaq_tensor *dx = outer->output;
    return strcmp(name, "dy") == 0        ? (struct opaq_value){.tensors = outer->inputs, .count = 1}
           : strcmp(name, "h") == 0       ? (struct opaq_value){.tensors = h, .count = 1}
           : strcmp(name, "x_shape") == 0 ? (struct opaq_value){.sizes = dx->shape, .count = dx->rank}
                                          : (struct opaq_value){.integer = dx->dtype}; /* x_dtype */
}

/* Makes the call of an operator that trains, which has the bound operator's arguments under the same names, with the
 * activations behind dy, and describes its outputs. */
static enum opaq_status describe(const struct bound *bound, const struct opaq_runner_call *outer,
                                 const char *suffix, const struct opaq_tensor *h, struct inner_call *inner,
                                 struct opaq_error *error) {
    struct opaq_value own[OPAQ_OP_ARGUMENT_LIMIT];
    const struct op_call named = {.op = &bound->row->op, .values = own};
    char row[32];
    memset(&inner->outputs, 0, sizeof inner->outputs); /* for the static analyzer */
    (void)snprintf(row, sizeof row, "%s_%s", bound->row->op.name, suffix);
    set_row(inner, op_row_of(opaq_op_find(row)));
    own_values(bound, outer->inputs + 1, outer->input_count - 1, own);
    for (int i = 0; i < inner->call.op->argument_count; ++i) {
        const char *name = inner->call.op->argument[i].name;
        const struct opaq_value *value = op_argument(&named, name);
        inner->values[i] = value != NULL ? *value : value_of(name, outer, h);
    }
    return op_describe(&inner->call, inner->protos, &inner->outputs, error);
}

/* Computes h again, as the forward operator for training returns it, into memory of the arena. */
static enum opaq_status compute_hidden(const struct bound *bound, const struct opaq_runner_call *outer,
                                       struct inner_call *inner, struct opaq_tensor *h,
                                       struct opaq_error *error) {
    struct arena *arena = &inner->call.work.arena;
    TRY(describe(bound, outer, "forward", NULL, inner, error));
    struct opaq_tensor *output = &inner->outputs.tensor[1]; /* after y */
    output->data = arena_take_array(arena, tensor_elements(output), (size_t)dtype_bytes(output->dtype));
    *h = *output;
    if (inner->call.work.is_measuring) {
        h->data = outer->inputs[1].data; /* x's: no address is followed, but it has to be somewhere */
    }
    const size_t used = arena->used;
    TRY(run_experts_hidden(&inner->call, error));
    arena->used = used;
    return OPAQ_OK;
}

/* Gradients pass the quantization of activations unchanged. */
static enum opaq_status compute_gradients(const struct bound *bound, const struct opaq_runner_call *outer,
                                          struct inner_call *inner, struct opaq_error *error) {
    union op_plan *plan = &inner->call.plan;
    struct opaq_tensor h = {.data = NULL};
    if (bound->row->plan_kind == PLAN_LINEAR) {
        plan->linear = (struct opaq_linear_plan){.w_given = plan->linear.w_given, .gradients = OPAQ_GRADIENT_X};
    } else {
        TRY(compute_hidden(bound, outer, inner, &h, error));
        plan->experts.x.kind = plan->experts.h.kind = OPAQ_FORM_PLAIN;
        plan->experts.gradients = OPAQ_EXPERTS_X | (outer->input_count > 2 ? OPAQ_EXPERTS_ROUTER : 0);
    }
    TRY(describe(bound, outer, "backward", &h, inner, error));
    for (int i = 0; i < inner->outputs.count; ++i) {
        inner->outputs.tensor[i].data = outer->output[i].data;
    }
    return inner->call.row->run(&inner->call, error);
}

/* ---- functions ---- */

typedef enum opaq_status computation(const struct bound *bound, const struct opaq_runner_call *outer,
                                     struct inner_call *inner, struct opaq_error *error);

/* Runs in the call's workspace, or measures it where `bytes` is not NULL. */
static enum opaq_status call_bound(const struct bound *bound, const struct opaq_runner_call *outer,
                                   computation *compute, size_t *bytes, struct opaq_error *error) {
    struct inner_call inner;
    struct work *work = &inner.call.work;
    TRY(begin(bound, outer, &inner, error));
    work->is_measuring = bytes != NULL;
    if (!work->is_measuring) {
        work->arena = (struct arena){.memory = outer->workspace.data, .bytes = outer->workspace.bytes};
    }
    TRY_AS(inner.call.op->name, error, compute(bound, outer, &inner, error));
    if (bytes != NULL) {
        *bytes = work->arena.most;
    }
    return OPAQ_OK;
}

static enum opaq_status forward_workspace(void *state, const struct opaq_runner_call *call, size_t *bytes,
                                          struct opaq_error *error) {
    return call_bound(state, call, compute_output, bytes, error);
}

static enum opaq_status forward_run(void *state, const struct opaq_runner_call *call,
                                    struct opaq_error *error) {
    return call_bound(state, call, compute_output, NULL, error);
}

static enum opaq_status backward_workspace(void *state, const struct opaq_runner_call *call, size_t *bytes,
                                           struct opaq_error *error) {
    return call_bound(state, call, compute_gradients, bytes, error);
}

static enum opaq_status backward_run(void *state, const struct opaq_runner_call *call,
                                     struct opaq_error *error) {
    return call_bound(state, call, compute_gradients, NULL, error);
}

void bound_destroy(void *state) {
    struct bound *bound = state;
    if (bound->memory != NULL) {
        bound->backend->release(bound->device, bound->memory);
    }
    free(bound);
}

const struct opaq_runner_functions bound_functions = {OPAQ_RUNNER_ABI, forward_workspace, forward_run,
                                                      bound_destroy};
const struct opaq_runner_functions bound_backward_functions = {OPAQ_RUNNER_ABI, backward_workspace,
                                                               backward_run, NULL};
