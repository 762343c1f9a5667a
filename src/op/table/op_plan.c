/* op/table/op_plan.c: resolves the text arguments of a call, once, and reads arguments that most operators
 * have. */
#include <string.h>

#include "base/try.h"
#include "op/plan/parsed_plan.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"

enum opaq_status op_plan_resolve(const struct op_row *row, const struct opaq_value *values, union op_plan *plan,
                                 struct opaq_error *error) {
    const struct opaq_value *text = &values[row->plan_argument];
    switch (row->plan_kind) {
    case PLAN_NONE:
        return OPAQ_OK;
    case PLAN_SPECS:
        TRY(spec_of_value(text + 1, &plan->spec[1], error));
        return spec_of_value(text, &plan->spec[0], error);
    case PLAN_SPEC:
        return spec_of_value(text, &plan->spec[0], error);
    case PLAN_LINEAR:
        return plan_of_value(text, &plan->linear, error);
    case PLAN_TRAINING:
        return plan_of_training(text, &plan->linear, error);
    case PLAN_EXPERTS:
        break;
    }
    return experts_plan_of_value(text, &plan->experts, error);
}

const struct opaq_value *op_argument(const struct op_call *call, const char *name) {
    for (int i = 0; i < call->op->argument_count; ++i) {
        if (strcmp(call->op->argument[i].name, name) == 0) {
            return &call->values[i];
        }
    }
    return NULL;
}

struct opaq_view op_plain_output(const struct op_call *call, int output) {
    struct opaq_view view = {.proto = call->protos[output]};
    view.row_stride = opaq_proto_columns(&view.proto);
    view.buffer[0].data = call->outputs->tensor[call->outputs->first[output]].data;
    (void)opaq_proto_bytes(&view.proto, &view.buffer[0].bytes, NULL); /* of a valid prototype */
    return view;
}
