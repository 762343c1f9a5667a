/* fuzz_plan.c: any bytes as a plan's text, or words joined to one. An error is one printable line; an accepted
 * plan is the same in any order of its words, and its forms and outputs are consistent. libFuzzer; the first
 * byte chooses. */
#include "fuzz_words.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int has(const struct opaq_form *form, enum opaq_option option) {
    return is_quantized(form) && (form->spec.options & (unsigned)option) != 0;
}

/* Whether quantizers are equal except for their usages. */
static int same_but_usage(const struct opaq_form *a, const struct opaq_form *b) {
    struct opaq_spec spec = a->spec;
    spec.usage = b->spec.usage;
    return is_quantized(a) && is_quantized(b) && opaq_spec_equal(&spec, &b->spec);
}

static int same_plan(const struct opaq_linear_plan *a, const struct opaq_linear_plan *b) {
    return same_form(&a->x, &b->x) && same_form(&a->w, &b->w) && same_form(&a->dy, &b->dy) &&
           same_form(&a->y, &b->y) && same_form(&a->dx, &b->dx) && same_form(&a->x_given, &b->x_given) &&
           same_form(&a->w_given, &b->w_given) && same_form(&a->dy_given, &b->dy_given) &&
           a->gradients == b->gradients && a->saved == b->saved && a->backward == b->backward &&
           a->options == b->options && a->margin == b->margin && a->algorithm == b->algorithm &&
           a->precision == b->precision && a->order == b->order;
}

/* The words from the last to the first make the same plan. */
static void expect_any_order(const char *text, size_t length, const struct opaq_linear_plan *plan) {
    char reversed[OPAQ_LINEAR_PLAN_TEXT_BYTES];
    struct opaq_linear_plan same;
    reverse_words(text, length, reversed);
    expect(opaq_linear_plan_parse(reversed, length, &same, NULL) == OPAQ_OK && same_plan(plan, &same));
}

static void values_make(const struct opaq_op *op, const char *text, size_t length, struct opaq_value *values) {
    static const struct opaq_tensor any = {.dtype = OPAQ_DTYPE_BF16};
    static const int64_t x_shape[3] = {3, 5, 20};
    static const int64_t w_shape[2] = {7, 20};
    memset(values, 0, OPAQ_OP_ARGUMENT_LIMIT * sizeof *values);
    for (int i = 0; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        if (kind == OPAQ_ARGUMENT_TENSOR_LIST) {
            values[i] = (struct opaq_value){.tensors = &any, .count = 1};
        } else if (kind == OPAQ_ARGUMENT_SIZES) {
            const int is_x = op->argument[i].name[0] == 'x';
            values[i] = (struct opaq_value){.sizes = is_x ? x_shape : w_shape, .count = is_x ? 3 : 2};
        } else if (kind == OPAQ_ARGUMENT_DTYPE) {
            values[i].integer = OPAQ_DTYPE_BF16;
        } else if (kind == OPAQ_ARGUMENT_TEXT) {
            values[i] = (struct opaq_value){.text = text, .count = (int64_t)length};
        }
    }
}

/* All forms of an operator, and the number of their tensors. */
static void expect_forms(const struct opaq_op *op, const struct opaq_value *values, struct opaq_form *forms) {
    struct opaq_outputs outputs;
    struct opaq_error error;
    expect(opaq_op_outputs(op, values, &outputs, &error) == OPAQ_OK);
    for (int i = 0; i < op->output_count; ++i) {
        expect(opaq_op_form(op, values, i, &forms[i], &error) == OPAQ_OK);
        expect(!is_quantized(&forms[i]) || opaq_spec_check(&forms[i].spec, &error) == OPAQ_OK);
        struct opaq_proto proto = {.rank = 1, .dtype = OPAQ_F32, .is_quantized = is_quantized(&forms[i])};
        proto.spec = forms[i].spec;
        const int count = forms[i].kind == OPAQ_FORM_ABSENT ? 0 : opaq_proto_buffer_count(&proto);
        const int places = opaq_op_changes(op) ? op->output[i].slots : count;
        expect(count <= places && outputs.first[i + 1] - outputs.first[i] == places);
    }
    expect(outputs.first[op->output_count] == outputs.count);
}

/* The rules of docs/linear.md about the outputs. */
static void expect_consistent(const struct opaq_linear_plan *plan, const char *text, size_t length) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_form forward[OPAQ_OP_RESULT_LIMIT] = {{.kind = -1}};
    struct opaq_form backward[OPAQ_OP_RESULT_LIMIT] = {{.kind = -1}};
    struct opaq_form changing[OPAQ_OP_RESULT_LIMIT] = {{.kind = -1}};
    const struct opaq_op *op = opaq_op_find("linear_forward");
    values_make(op, text, length, values);
    expect_forms(op, values, forward);
    op = opaq_op_find("linear_backward");
    values_make(op, text, length, values);
    expect_forms(op, values, backward);
    expect_forms(opaq_op_find("linear_backward_changing"), values, changing);
    const int wants_x = (plan->gradients & OPAQ_GRADIENT_X) != 0;
    const int wants_w = (plan->gradients & OPAQ_GRADIENT_W) != 0;
    const int fills = (plan->options & (OPAQ_LINEAR_ADD | OPAQ_LINEAR_SET)) != 0;
    const int delayed =
        has(&plan->x, OPAQ_DELAYED) || has(&plan->w, OPAQ_DELAYED) || has(&plan->y, OPAQ_DELAYED);
    expect(forward[0].kind == plan->y.kind &&
           (!is_quantized(&plan->y) || same_but_usage(&forward[0], &plan->y)));
    expect(forward[1].kind == OPAQ_FORM_ABSENT || (wants_w && same_but_usage(&forward[1], &plan->x)));
    expect(forward[2].kind == OPAQ_FORM_ABSENT || same_but_usage(&forward[2], &plan->w));
    expect((plan->options & OPAQ_LINEAR_CACHE) == 0 ||
           (is_quantized(&forward[2]) && (forward[2].spec.usage & OPAQ_ROWWISE) != 0));
    expect((forward[3].kind == OPAQ_FORM_PLAIN) == (delayed && plan->gradients != 0));
    expect(forward[4].kind == OPAQ_FORM_PLAIN ||
           (!has(&plan->x, OPAQ_STOCHASTIC) && !has(&plan->w, OPAQ_STOCHASTIC) &&
            !has(&plan->y, OPAQ_STOCHASTIC)));
    expect((backward[0].kind != OPAQ_FORM_ABSENT) == wants_x);
    expect((backward[1].kind == OPAQ_FORM_PLAIN) == (wants_w && !fills) && !is_quantized(&backward[1]));
    expect((backward[2].kind == OPAQ_FORM_PLAIN) == ((plan->gradients & OPAQ_GRADIENT_BIAS) != 0));
    expect(!wants_x || is_quantized(&backward[0]) == is_quantized(&plan->dx));
    for (int i = 0; i < 3; ++i) {
        expect(same_form(&backward[i], &changing[i]));
    }
}

static void fuzz_text(const char *text, size_t length) {
    struct opaq_linear_plan plan;
    struct opaq_linear_plan again;
    struct opaq_error error;
    const enum opaq_status status = opaq_linear_plan_parse(text, length, &plan, &error);
    expect(opaq_linear_plan_parse(text, length, &again, NULL) == status);
    if (status == OPAQ_OK) {
        expect(same_plan(&plan, &again));
        expect_any_order(text, length, &plan);
        expect_consistent(&plan, text, length);
        return;
    }
    expect(status == OPAQ_ERROR_TEXT);
    expect_refusal(status, &error, "plan: ");
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_form form;
    const struct opaq_op *op = opaq_op_find("linear_forward");
    values_make(op, text, length, values);
    expect(opaq_op_form(op, values, 0, &form, &error) == status);
    expect_refusal(status, &error, "linear_forward: plan: ");
}

/* Mostly valid words, so that complete plans result. */
static const char *const words[] = {"x=fp8",
                                    "x=fp8+delayed",
                                    "x=nvfp4+rht",
                                    "x=mxfp4+sr",
                                    "x=",
                                    "x_given=mxfp8",
                                    "x_given=nvfp4+both",
                                    "w=fp8",
                                    "w=fp8.e5m2+delayed",
                                    "w=fp8+delayed",
                                    "w=nvfp4+2d",
                                    "w=mxfp8+both",
                                    "w_given=fp8row",
                                    "w_given=mxfp8+both",
                                    "dy=fp8.e5m2",
                                    "dy=fp8.e5m2+delayed",
                                    "dy=nvfp4+rht+sr",
                                    "dy_given=mxfp8",
                                    "y=fp8",
                                    "y=fp8+delayed+columnwise",
                                    "y=nvfp4+both+sr",
                                    "dx=fp8.e5m2",
                                    "dx=fp8+delayed",
                                    "dx=mxfp4+sr+columnwise",
                                    "grad=xwb",
                                    "grad=x",
                                    "grad=w",
                                    "grad=bx",
                                    "grad=",
                                    "save=x",
                                    "save=w",
                                    "save=xw",
                                    "save=b",
                                    "backward=high_precision",
                                    "backward=dequantized",
                                    "backward=no",
                                    "cache",
                                    "bias_later",
                                    "main_grad=add",
                                    "main_grad=set",
                                    "reduce",
                                    "history=max",
                                    "history=most_recent",
                                    "margin=3",
                                    "margin=-64",
                                    "margin=65",
                                    "nothing",
                                    ""};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t length = 0;
    char *text = text_of_input(data, size, words, sizeof words / sizeof words[0], &length);
    if (text != NULL) {
        fuzz_text(text, length);
        free(text);
    }
    return 0;
}
