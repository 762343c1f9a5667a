/* fuzz_op.c: the operator table with hostile arguments: any text, shapes, dtypes, strides, lists; and with
 * arguments that are valid except for one. libFuzzer; fuzz_run.h has the expectations. */
#include "fuzz_arguments.h"
#include "fuzz_linear.h"
#include "fuzz_run.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

/* Usually replaces the list by a valid one: text is argument 1, and the shape the first sizes argument. */
static void fit_list(struct input *input, const struct opaq_op *op, struct call *call) {
    struct opaq_spec spec;
    for (int i = 0; i < op->argument_count; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_SIZES) {
            forget(call, 0);
            if (opaq_spec_parse(call->text[1], (size_t)call->value[1].count, &spec, NULL) == OPAQ_OK) {
                put_buffers(input, call, 0, &spec, call->sizes[i], (int)call->value[i].count);
            }
            return;
        }
    }
}

/* The state, if the plan has one. */
static void fit_update(struct input *input, const struct opaq_op *op, struct call *call) {
    const int64_t count = take(input) % 2 + 2;
    take_plan(input, call->text[0]);
    call->value[0].count = (int64_t)strlen(call->text[0]);
    put_floats(input, call, op, "scale", 0, count);
    put_floats(input, call, op, "amax_history", take(input) % 5 + 1, count);
}

/* Arbitrary arguments, or arguments that are valid except for one. */
static void take_call(struct input *input, const struct opaq_op *op, struct call *call) {
    const uint8_t kind = take(input);
    const int is_linear = strncmp(op->name, "linear", 6) == 0 && argument_of(op, "plan") >= 0;
    for (int i = 0; i < op->argument_count && (!is_linear || kind % 8 == 0); ++i) {
        take_argument(input, op, i, call);
    }
    if (kind % 8 == 0) {
        return;
    }
    if (is_linear) {
        fit_linear(input, op, call);
    } else if (strcmp(op->name, "delayed_update") == 0) {
        fit_update(input, op, call);
    } else if (op->argument[0].kind == OPAQ_ARGUMENT_TENSOR_LIST) {
        fit_list(input, op, call);
    }
    const int invalid = kind / 16 % OPAQ_OP_ARGUMENT_LIMIT;
    if (kind / 8 % 2 == 1 && invalid < op->argument_count) {
        take_argument(input, op, invalid, call);
    }
}

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    struct input input = {data, size};
    static struct call call;
    memset(&call, 0, sizeof call);
    const struct opaq_op *op = opaq_op_at(take(&input) % 32 % opaq_op_count());
    take_call(&input, op, &call);
    run_call(op, &call);
    for (int i = 0; i < OPAQ_OP_ARGUMENT_LIMIT; ++i) {
        forget(&call, i);
    }
    return 0;
}
