/* test_linear_forms.c: the outputs of the linear operators for a plan, plain or quantized with a usage, and
 * that the tensors that opaq_op_outputs describes are those of the forms' prototypes. */
#include "check.h"
#include "support_op.h"
#include "support_spec.h"

enum { FORWARD_OUTPUTS = 5, BACKWARD_OUTPUTS = 3 };

/* "-": absent; "": plain; else the quantizer's canonical text. */
struct forms_case {
    const char *plan;
    const char *forward[FORWARD_OUTPUTS];   /* y, x_saved, w_saved, amax, random */
    const char *backward[BACKWARD_OUTPUTS]; /* dx, dw, dbias */
};

static const struct forms_case cases[] = {
    {"", {"", "-", "-", "-", "-"}, {"-", "-", "-"}},
    {"grad=xwb", {"", "-", "-", "-", "-"}, {"", "", ""}},
    {"grad=b", {"", "-", "-", "-", "-"}, {"-", "-", ""}},
    {"x=fp8 w=fp8", {"", "-", "-", "-", "-"}, {"-", "-", "-"}},
    {"x=fp8 w=fp8 dy=fp8.e5m2 grad=xwb", {"", "fp8+columnwise", "fp8+columnwise", "-", "-"}, {"", "", ""}},
    {"x=fp8 w=fp8 dy=fp8.e5m2 grad=x", {"", "-", "fp8+columnwise", "-", "-"}, {"", "-", "-"}},
    {"x=fp8 w=fp8 dy=fp8.e5m2 grad=wb", {"", "fp8+columnwise", "-", "-", "-"}, {"-", "", ""}},
    {"x=fp8 w=fp8 grad=b", {"", "-", "-", "-", "-"}, {"-", "-", ""}},
    {"x=mxfp8+both w=mxfp8+columnwise grad=xw",
     {"", "mxfp8+columnwise", "mxfp8+columnwise", "-", "-"},
     {"", "", "-"}},
    {"x=mxfp8 w=mxfp8 grad=xw save=x", {"", "-", "mxfp8+columnwise", "-", "-"}, {"", "", "-"}},
    {"x=mxfp8 w=mxfp8 grad=xw save=w", {"", "mxfp8+columnwise", "-", "-", "-"}, {"", "", "-"}},
    {"x=mxfp8 w=mxfp8 grad=xw save=xw", {"", "-", "-", "-", "-"}, {"", "", "-"}},
    {"x=mxfp8 w=mxfp8 grad=xw backward=high_precision", {"", "-", "-", "-", "-"}, {"", "", "-"}},
    {"x=mxfp8 w=mxfp8 grad=xw backward=dequantized", {"", "mxfp8", "mxfp8", "-", "-"}, {"", "", "-"}},
    {"x=mxfp8 w=mxfp8 grad=xw backward=dequantized save=x", {"", "-", "mxfp8", "-", "-"}, {"", "", "-"}},
    {"w=mxfp8 cache", {"", "-", "mxfp8", "-", "-"}, {"-", "-", "-"}},
    {"w=mxfp8 cache grad=w", {"", "-", "mxfp8", "-", "-"}, {"-", "", "-"}},
    {"x=mxfp8 w=mxfp8+columnwise cache grad=x", {"", "-", "mxfp8+both", "-", "-"}, {"", "-", "-"}},
    {"w=mxfp8 cache grad=x save=w", {"", "-", "mxfp8+both", "-", "-"}, {"", "-", "-"}},
    {"w=mxfp8 cache grad=x backward=dequantized", {"", "-", "mxfp8", "-", "-"}, {"", "-", "-"}},
    {"w=mxfp8 cache grad=x backward=high_precision", {"", "-", "mxfp8", "-", "-"}, {"", "-", "-"}},
    {"x_given=nvfp4+both w_given=nvfp4 dy_given=mxfp8 grad=xwb", {"", "-", "-", "-", "-"}, {"", "", ""}},
    {"x=fp8 w_given=fp8+both grad=xw", {"", "fp8+columnwise", "-", "-", "-"}, {"", "", "-"}},
    {"y=fp8+both", {"fp8", "-", "-", "-", "-"}, {"-", "-", "-"}},
    {"y=nvfp4+columnwise dx=mxfp4+columnwise grad=x", {"nvfp4", "-", "-", "-", "-"}, {"mxfp4", "-", "-"}},
    {"dx=mxfp4 grad=w", {"", "-", "-", "-", "-"}, {"-", "", "-"}},
    {"bias_later grad=b", {"", "-", "-", "-", "-"}, {"-", "-", ""}},
    {"grad=xwb main_grad=add", {"", "-", "-", "-", "-"}, {"", "-", ""}},
    {"grad=w main_grad=set", {"", "-", "-", "-", "-"}, {"-", "-", "-"}},
    {"grad=x main_grad=add", {"", "-", "-", "-", "-"}, {"", "-", "-"}},
    /* an amax is returned if a backward records it */
    {"x=fp8+delayed w=fp8+delayed", {"", "-", "-", "-", "-"}, {"-", "-", "-"}},
    {"x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed grad=xw",
     {"", "fp8+columnwise+delayed", "fp8+columnwise+delayed", "", "-"},
     {"", "", "-"}},
    {"y=fp8+delayed grad=b", {"fp8+delayed", "-", "-", "", "-"}, {"-", "-", ""}},
    {"dy=fp8+delayed grad=x", {"", "-", "-", "-", "-"}, {"", "-", "-"}},
    /* random numbers are drawn if a tensor is rounded stochastically, in the forward or in the backward */
    {"x=nvfp4+sr", {"", "-", "-", "-", ""}, {"-", "-", "-"}},
    {"w=nvfp4+sr", {"", "-", "-", "-", ""}, {"-", "-", "-"}},
    {"y=fp8+sr", {"fp8+sr", "-", "-", "-", ""}, {"-", "-", "-"}},
    {"dy=nvfp4+sr grad=x", {"", "-", "-", "-", ""}, {"", "-", "-"}},
    {"dy=nvfp4+sr grad=b", {"", "-", "-", "-", "-"}, {"-", "-", ""}},
    {"dy=nvfp4+sr", {"", "-", "-", "-", "-"}, {"-", "-", "-"}},
    {"dy=nvfp4+sr grad=x backward=dequantized", {"", "-", "-", "-", "-"}, {"", "-", "-"}},
    {"dx=fp8+sr grad=x", {"", "-", "-", "-", ""}, {"fp8+sr", "-", "-"}},
    {"dx=fp8+sr grad=w", {"", "-", "-", "-", "-"}, {"-", "", "-"}},
    {"x=nvfp4+rht w=nvfp4+2d dy=nvfp4+rht+sr grad=xwb",
     {"", "nvfp4+columnwise+rht", "nvfp4+columnwise+2d", "-", ""},
     {"", "", ""}},
    {"x=nvfp4+rowscaled w=nvfp4+4over6=mse dy=fp8blk1 grad=xwb y=fp8row",
     {"fp8row", "nvfp4+columnwise+rowscaled", "nvfp4+columnwise+4over6=mse", "-", "-"},
     {"", "", ""}},
};
enum { CASES = sizeof cases / sizeof cases[0] };

static const char *const operators[] = {"linear_forward", "linear_backward", "linear_backward_changing"};

static const char *expected_form(const struct forms_case *one, int op, int output) {
    return op == 0 ? one->forward[output] : one->backward[output];
}

/* The only value that a form depends on: the plan's text. */
static void text_only(int op, const char *plan, struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT]) {
    memset(values, 0, OPAQ_OP_ARGUMENT_LIMIT * sizeof *values);
    values[op == 0 ? 6 : 7] = op_text_value(plan);
}

static void forms_follow_from_the_plan(void) {
    for (int i = 0; i < CASES; ++i) {
        for (int op = 0; op < 3; ++op) {
            const struct opaq_op *row = opaq_op_find(operators[op]);
            struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
            text_only(op, cases[i].plan, values);
            for (int output = 0; output < row->output_count; ++output) {
                struct opaq_form form;
                struct opaq_error error = {OPAQ_OK, ""};
                const char *wanted = expected_form(&cases[i], op, output);
                memset(&form, 0x5A, sizeof form);
                CHECK_EQ_INT(opaq_op_form(row, values, output, &form, &error), OPAQ_OK);
                CHECK_EQ_STR(error.text, "");
                const char *found = form.kind == OPAQ_FORM_ABSENT  ? "-"
                                    : form.kind == OPAQ_FORM_PLAIN ? ""
                                                                   : spec_text(&form.spec).text;
                if (strcmp(found, wanted) != 0) {
                    CHECK_FAIL("\"%s\": %s of %s is \"%s\", expected \"%s\"", cases[i].plan,
                               row->output[output].name, row->name, found, wanted);
                }
            }
        }
    }
}

static void bad_forms_are_named(void) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_form form;
    struct opaq_error error;
    const struct opaq_op *row = opaq_op_find("linear_forward");
    text_only(0, "x=fp8 x=fp8", values);
    CHECK_EQ_INT(opaq_op_form(row, values, 0, &form, &error), OPAQ_ERROR_TEXT);
    CHECK_EQ_STR(error.text, "linear_forward: plan: \"x=fp8\" at position 6: came before");
    for (int op = 0; op < 3; ++op) { /* a divisor, which delayed scaling cannot compute */
        text_only(op, "x=fp8 w=fp8+delayed+rule=modelopt", values);
        CHECK_EQ_INT(opaq_op_form(opaq_op_find(operators[op]), values, 0, &form, &error), OPAQ_ERROR_TEXT);
        CHECK(strstr(error.text, "plan: \"w=\" is delayed under the rule modelopt, whose scale is a divisor") !=
              NULL);
    }
    text_only(0, "x=fp8", values);
    CHECK_EQ_INT(opaq_op_form(row, values, 5, &form, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_STR(error.text, "linear_forward: output 5, expected 0 to 4");
    CHECK_EQ_INT(opaq_op_form(row, values, -1, &form, NULL), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_op_form(row, values, 0, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_op_form(NULL, values, 0, &form, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_op_form(row, NULL, 0, &form, &error), OPAQ_ERROR_ARGUMENT);
    values[6].text = NULL;
    CHECK_EQ_INT(opaq_op_form(row, values, 0, &form, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_STR(error.text, "linear_forward: plan is missing");
    values[6] = (struct opaq_value){.text = "x=fp8", .count = -1};
    CHECK_EQ_INT(opaq_op_form(row, values, 0, &form, &error), OPAQ_ERROR_ARGUMENT);
}

/* ---- tensors ---- */

/* The shape of an output, written from the definition of the operators. */
static int shape_of(int op, int output, const int64_t *x_shape, int rank, const int64_t *w_shape,
                    int64_t shape[OPAQ_RANK_LIMIT]) {
    const int64_t of_weight[] = {w_shape[0], w_shape[1]};
    memcpy(shape, x_shape, (size_t)rank * sizeof *shape);
    if (op == 0 && output == 0) { /* y */
        shape[rank - 1] = w_shape[0];
        return rank;
    }
    if (output == (op == 0 ? 2 : 1)) { /* w_saved, dw */
        memcpy(shape, of_weight, sizeof of_weight);
        return 2;
    }
    if (op == 0 && output >= 3) { /* amax, random */
        shape[0] = output == 3 ? 3 : 2;
        return 1;
    }
    if (op != 0 && output == 2) { /* dbias */
        shape[0] = w_shape[0];
        return 1;
    }
    return rank; /* x_saved, dx */
}

static int32_t dtype_of(int op, int output) {
    return op == 0 ? (output == 3 ? OPAQ_DTYPE_F32 : OPAQ_DTYPE_BF16)
                   : (output == 0 ? OPAQ_DTYPE_BF16 : OPAQ_DTYPE_F32);
}

static void check_tensor(const struct opaq_tensor *tensor, const struct opaq_buffer *buffer, const char *plan,
                         const char *name) {
    const int32_t dtype = buffer->entry_bytes == 1 ? OPAQ_DTYPE_U8 : (int32_t)buffer->element;
    if (tensor->data != NULL || tensor->dtype != dtype || tensor->rank != buffer->rank ||
        memcmp(tensor->shape, buffer->shape, (size_t)buffer->rank * sizeof(int64_t)) != 0 ||
        memcmp(tensor->strides, buffer->strides, (size_t)buffer->rank * sizeof(int64_t)) != 0) {
        CHECK_FAIL("\"%s\": %s is not like its prototype's %s", plan, name, buffer->name);
    }
}

/* Checks one output row and returns its number of tensors. */
static int check_row(int op, int output, const struct forms_case *one, const int64_t *x_shape, int rank,
                     const int64_t *w_shape, const struct opaq_tensor *tensors) {
    const char *form = expected_form(one, op, output);
    const char *name = opaq_op_find(operators[op])->output[output].name;
    struct opaq_spec spec;
    struct opaq_proto proto;
    int64_t shape[OPAQ_RANK_LIMIT];
    if (strcmp(form, "-") == 0) {
        return 0;
    }
    const int shape_rank = shape_of(op, output, x_shape, rank, w_shape, shape);
    if (op == 0 && output == 4) { /* int64, which prototypes do not support */
        CHECK(tensors->dtype == OPAQ_DTYPE_I64 && tensors->rank == 1 && tensors->shape[0] == 2 &&
              tensors->strides[0] == 1);
        return 1;
    }
    if (form[0] != '\0') {
        spec = spec_of(form);
    }
    CHECK_EQ_INT(opaq_proto_make(shape, shape_rank, (enum opaq_element)dtype_of(op, output),
                                 form[0] != '\0' ? &spec : NULL, tensor_cpu, &proto, NULL),
                 OPAQ_OK);
    const int count = opaq_proto_buffer_count(&proto);
    for (int i = 0; i < count; ++i) {
        struct opaq_buffer buffer;
        CHECK_EQ_INT(opaq_proto_buffer(&proto, i, &buffer, NULL), OPAQ_OK);
        if (op == 0 && output == 1 && form[0] != '\0') { /* x_saved: its entries in one dimension */
            buffer.shape[0] = (int64_t)(buffer.bytes / (size_t)buffer.entry_bytes);
            buffer.strides[0] = 1;
            buffer.rank = 1;
        }
        check_tensor(&tensors[i], &buffer, one->plan, name);
    }
    return count;
}

static void check_outputs(int op, const struct forms_case *one, const int64_t *x_shape, int rank,
                          const int64_t *w_shape) {
    static const int slots[BACKWARD_OUTPUTS] = {3, 1, 1};
    const struct opaq_op *row = opaq_op_find(operators[op]);
    const struct opaq_tensor any = {.dtype = OPAQ_DTYPE_BF16}; /* of outputs only the device is used */
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_outputs outputs;
    struct opaq_error error = {OPAQ_OK, ""};
    text_only(op, one->plan, values);
    values[0] = op_tensor_value(&any);
    values[1] = op_tensor_value(&any);
    values[3] = op_sizes_value(x_shape, rank);
    values[4] = op_sizes_value(w_shape, 2);
    values[5] = op_int_value(OPAQ_DTYPE_BF16);
    if (op > 0) {
        values[2] = op_tensor_value(&any);
        values[6] = op_int_value(OPAQ_DTYPE_F32);
    }
    CHECK_EQ_INT(opaq_op_outputs(row, values, &outputs, &error), OPAQ_OK);
    CHECK_EQ_STR(error.text, "");
    int place = 0;
    for (int output = 0; output < row->output_count; ++output) {
        CHECK_EQ_INT(outputs.first[output], place);
        const int used = check_row(op, output, one, x_shape, rank, w_shape, &outputs.tensor[place]);
        const int count = op == 2 ? slots[output] : used;
        for (int i = used; i < count; ++i) { /* unused outputs */
            const struct opaq_tensor *slot = &outputs.tensor[place + i];
            CHECK(slot->dtype == OPAQ_DTYPE_U8 && slot->rank == 1 && slot->shape[0] == 0);
        }
        place += count;
    }
    CHECK_EQ_INT(outputs.first[row->output_count], place);
    CHECK_EQ_INT(outputs.count, place);
}

static void outputs_agree_with_the_forms(void) {
    static const struct {
        int rank;
        int64_t x_shape[4];
        int64_t w_shape[2];
    } shapes[] = {{2, {37, 70}, {53, 70}},    {1, {64}, {32, 64}},    {4, {2, 3, 5, 16}, {1, 16}},
                  {2, {0, 20}, {7, 20}},      {3, {2, 3, 0}, {5, 0}}, {2, {4, 9}, {0, 9}},
                  {2, {128, 256}, {384, 256}}};
    for (int i = 0; i < CASES; ++i) {
        for (int op = 0; op < 3; ++op) {
            for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
                check_outputs(op, &cases[i], shapes[s].x_shape, shapes[s].rank, shapes[s].w_shape);
            }
        }
    }
}

/* One text more than the limit of kept texts still works. */
static void plans_beyond_the_limit_still_work(void) {
    const struct opaq_op *row = opaq_op_find("linear_backward");
    for (int i = 0; i <= OPAQ_INTERN_LIMIT; ++i) {
        char text[64];
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        struct opaq_form form;
        (void)snprintf(text, sizeof text, "grad=x dx=fp8row+eps=%d", i + 1);
        text_only(1, text, values);
        if (opaq_op_form(row, values, 0, &form, NULL) != OPAQ_OK || form.kind != OPAQ_FORM_QUANTIZED ||
            form.spec.epsilon != (float)(i + 1)) {
            CHECK_FAIL("\"%s\" is refused or another", text);
            break;
        }
    }
}

static const struct test_case tests[] = {TEST(forms_follow_from_the_plan), TEST(bad_forms_are_named),
                                         TEST(outputs_agree_with_the_forms),
                                         TEST(plans_beyond_the_limit_still_work)};
TEST_MAIN(tests)
