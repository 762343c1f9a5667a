/* op/quantize/delayed_operator.c: the operator delayed_update: delayed scaling's history after the amaxes were reduced
 * over ranks. */
#include "base/try.h"
#include "op/plan/parsed_plan.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"

enum { PLAN, SCALE, HISTORY };

enum opaq_status run_delayed_update(struct op_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_linear_plan *plan = &call->plan.linear;
    const struct opaq_tensor *scale = values[SCALE].tensors;
    const struct opaq_tensor *history = values[HISTORY].tensors;
    const float *floats;
    char got[2][160];
    if (scale == NULL || history == NULL || scale->rank != 1 || history->rank != 2 ||
        (scale->shape[0] != 3 && scale->shape[0] != 2) || history->shape[1] != scale->shape[0] ||
        history->shape[0] < 1 || tensor_elements(history) < 0) {
        return opaq_fail(
            error, OPAQ_ERROR_SHAPE,
            "scale is %s, amax_history %s; expected [3] (the forward's) or [2] (the backward's) and "
            "[length,3] or [length,2]",
            scale == NULL ? "missing" : shape_text(scale, got[0], sizeof got[0]),
            history == NULL ? "missing" : shape_text(history, got[1], sizeof got[1]));
    }
    const int64_t count = scale->shape[0];
    const int element = count == 3 ? plan_forward_element(plan) : plan_backward_element(plan);
    if (element < 0) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "nothing in the plan's %s is delayed",
                         count == 3 ? "forward" : "backward");
    }
    TRY(floats_of_tensor("scale", &values[SCALE], count, call->device, &floats, error));
    TRY(floats_of_tensor("amax_history", &values[HISTORY], tensor_elements(history), call->device, &floats,
                         error));
    const struct opaq_delayed_state state = {history->data, scale->data, history->shape[0], count};
    const struct delayed_rule rule = {(enum opaq_element)element, plan->margin,
                                      (enum opaq_amax_algorithm)plan->algorithm, true};
    return call->work.backend->delayed_update(&state, NULL, NULL, &rule, &call->execution, error);
}
