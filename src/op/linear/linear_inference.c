/* op/linear/linear_inference.c: the operator linear: x w^T + bias, nothing saved; and the names of its kernels. */
#include "base/try.h"
#include "op/linear/linear_parts.h"
#include "op/table/op_tensor.h"

/* the arguments of the row */
enum { X, W, BIAS, W_SHAPE, PLAN, INPUT_SCALE };

static enum opaq_status check_plan(const struct opaq_linear_plan *plan, struct opaq_error *error) {
    if (plan->gradients || plan->saved || plan->options || plan->backward || plan->margin || plan->algorithm ||
        is_quantized(&plan->y) || is_quantized(&plan->dy) || is_quantized(&plan->dx) ||
        is_quantized(&plan->x_given) || is_quantized(&plan->dy_given)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "the plan has words beside x=, w= and w_given=, which linear_forward takes");
    }
    if (plan_forward_is_stochastic(plan)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "the plan rounds stochastically (sr), for which linear_forward takes random numbers");
    }
    if (has_option(&plan->w, OPAQ_DELAYED)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "w= takes a scale (delayed), which a weight that is quantized here has not");
    }
    return OPAQ_OK;
}

enum opaq_status run_linear(struct op_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const struct opaq_tensor *tensor = values[X].tensors;
    struct weight_stack weight;
    struct opaq_view x;
    struct opaq_view bias;
    bool has_bias = false;
    const float *given = NULL;
    TRY(check_plan(plan, error));
    TRY(view_of_tensor("x", tensor, &x, error));
    TRY(read_stack(call, "w", &values[W], &values[W_SHAPE], 2, &plan->w_given, tensor->dtype, &weight, error));
    TRY(read_stack_bias(call, "bias", &values[BIAS], &weight, tensor->dtype, &bias, &has_bias, error));
    TRY(floats_of_tensor("input_scale", &values[INPUT_SCALE], 1, call->device, &given, error));
    if (opaq_proto_columns(&x.proto) != weight.columns) {
        char text[160];
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "x of shape %s has %lld features, expected the %lld of w",
                         shape_text(tensor, text, sizeof text), (long long)opaq_proto_columns(&x.proto),
                         (long long)weight.columns);
    }
    TRY(check_given_scale("input_scale", "x", &plan->x, given, error));
    TRY(check_stack(&weight, error));
    const struct operand_form x_form = forward_form(&plan->x, given, NULL, STREAM_X);
    const struct operand_form w_form = forward_form(&plan->w, NULL, NULL, STREAM_W);
    const struct opaq_view y = op_plain_output(call, 0);
    struct operand a;
    struct operand b;
    TRY(operand_make(&call->work, &x, &x_form, &a, error));
    TRY(operand_make(&call->work, &weight.view, &w_form, &b, error));
    return multiply(call, &a, &b, &y, has_bias ? &bias : NULL, plan, false, error);
}

const char *opaq_device_linear_kernel(struct opaq_device device, const struct opaq_spec *w,
                                      const struct opaq_spec *x, enum opaq_element x_dtype,
                                      enum opaq_precision precision) {
    const struct backend *backend;
    if (backend_of(device, &backend, NULL) != OPAQ_OK || (w != NULL && opaq_spec_check(w, NULL) != OPAQ_OK) ||
        (x != NULL && opaq_spec_check(x, NULL) != OPAQ_OK) || (unsigned)precision > OPAQ_PRECISION_FAST32) {
        return NULL;
    }
    return backend->product_kernel(w, x, x_dtype, (int32_t)precision);
}

const char *opaq_linear_kernel(const struct opaq_spec *w, const struct opaq_spec *x, enum opaq_element x_dtype,
                               enum opaq_precision precision) {
    return opaq_device_linear_kernel((struct opaq_device){OPAQ_DEVICE_CPU, 0}, w, x, x_dtype, precision);
}
