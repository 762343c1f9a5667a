/* fuzz_linear.h: arguments that fit a linear operator: a plan joined from words, and every tensor that it
 * requires. Depends on fuzz_call.h. */
#ifndef FUZZ_LINEAR_H
#define FUZZ_LINEAR_H

#include "fuzz_call.h"

/* Nearly every possible plan. */
static inline void take_plan(struct input *input, char *text) {
    static const char *const specs[] = {"fp8",
                                        "fp8.e5m2+both",
                                        "fp8+delayed",
                                        "fp8+sr+columnwise",
                                        "fp8row+both",
                                        "fp8blk1",
                                        "fp8blk2",
                                        "fp8blk1+both",
                                        "mxfp8",
                                        "mxfp8+both+2d",
                                        "mxfp8+columnwise",
                                        "mxfp4+both+sr",
                                        "mxfp4+2d",
                                        "nvfp4",
                                        "nvfp4+both+rht",
                                        "nvfp4+both+rht+sr",
                                        "nvfp4+both+rowscaled",
                                        "nvfp4+2d+both",
                                        "nvfp4+both+4over6",
                                        "mxfp8+both+swizzle",
                                        "nvfp4+columnwise+rht+swizzle",
                                        "fp8.e5m2+delayed"};
    static const char *const names[] = {"x=", "w=", "dy=", "x_given=", "w_given=", "dy_given=", "y=", "dx="};
    static const char *const gradients[] = {"", "x", "w", "xw", "b", "xb", "wb", "xwb"};
    static const char *const saves[] = {"", "x", "w", "xw"};
    const int count = (int)(sizeof specs / sizeof specs[0]);
    text[0] = '\0';
    for (int i = 0; i < 5; ++i) { /* x, w, dy: plain, quantized here, or quantized before; y, dx: plain or
                                   * quantized here */
        const uint8_t kind = take(input);
        const char *spec = specs[take(input) % count];
        if (i < 3 && kind % 8 < 6) {
            add_word(text, names[kind % 8 < 4 ? i : i + 3], spec);
        } else if (i >= 3 && kind % 4 == 0) {
            add_word(text, names[i + 3], spec);
        }
    }
    const uint8_t grad = take(input);
    const uint8_t rest = take(input);
    if (grad % 8 != 0) {
        add_word(text, "grad=", gradients[grad % 8]);
    }
    if (grad / 32 % 4 != 0 && grad / 8 % 4 == 0) {
        add_word(text, "save=", saves[grad / 32 % 4]);
    }
    if (rest % 4 > 1) {
        add_word(text, "backward=", rest % 4 == 2 ? "high_precision" : "dequantized");
    }
    if (rest / 4 % 4 > 1) {
        add_word(text, "main_grad=", rest / 4 % 4 == 2 ? "add" : "set");
    }
    if (rest / 16 % 4 == 0) {
        add_word(text, "cache", "");
    }
    if (rest / 64 == 0) {
        add_word(text, "bias_later reduce", "");
    }
}

/* The backward's argument for x (output 1 of the forward) or w (output 2). */
static inline struct opaq_form kept_form(const struct call *call, int plan_index, const struct opaq_form *given,
                                         int output, int is_plain) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {{NULL, NULL, NULL, 0, 0}};
    const struct opaq_op *op = opaq_op_find("linear_forward");
    struct opaq_form form = {.kind = OPAQ_FORM_ABSENT};
    values[argument_of(op, "plan")] = call->value[plan_index];
    (void)opaq_op_form(op, values, output, &form, NULL);
    return form.kind == OPAQ_FORM_QUANTIZED && !is_plain ? form : *given;
}

static inline void put_floats(struct input *input, struct call *call, const struct opaq_op *op,
                              const char *name, int64_t rows, int64_t count) {
    const int64_t shape[2] = {rows, count};
    const int index = argument_of(op, name);
    if (index >= 0) {
        forget(call, index);
        put_tensor(input, call, index, 0, OPAQ_DTYPE_F32, rows == 0 ? &count : shape, rows == 0 ? 1 : 2);
    }
}

/* Delayed scaling's arguments, if the plan has it. */
static inline void fit_state(struct input *input, const struct opaq_op *op, const struct opaq_linear_plan *plan,
                             struct call *call) {
    const struct opaq_form *forms[] = {&plan->x, &plan->w, &plan->y};
    const int64_t length = take(input) % 5 + 1;
    int is_delayed = 0;
    for (int i = 0; i < 3; ++i) {
        is_delayed |= forms[i]->kind == OPAQ_FORM_QUANTIZED && (forms[i]->spec.options & OPAQ_DELAYED) != 0;
    }
    if (is_delayed) {
        put_floats(input, call, op, "scale", 0, 3);
        put_floats(input, call, op, "amax", 0, 3);
    }
    put_floats(input, call, op, "scale_fwd", 0, 3);
    put_floats(input, call, op, "amax_history_fwd", length, 3);
    put_floats(input, call, op, "scale_bwd", 0, 2);
    put_floats(input, call, op, "amax_history_bwd", length, 2);
}

/* Replaces every argument by a valid one. */
static inline void fit_linear(struct input *input, const struct opaq_op *op, struct call *call) {
    static const int32_t dtypes[] = {OPAQ_DTYPE_BF16, OPAQ_DTYPE_F32, OPAQ_DTYPE_F16, OPAQ_DTYPE_BF16};
    const int64_t k = take_small(input);
    const int64_t w_shape[2] = {take_small(input), k};
    const int64_t outer = take(input) % 3;
    const int64_t whole[3] = {outer, take_small(input), k};
    const int rank = take(input) % 3 + 1;
    const int64_t *x_shape = whole + 3 - rank;
    const int64_t y_shape[3] = {x_shape[0], rank == 3 ? x_shape[1] : w_shape[0], w_shape[0]};
    const int64_t vector_shape[1] = {w_shape[0]};
    const uint8_t choice = take(input);
    const int32_t dtype = dtypes[choice % 4];
    const int32_t w_dtype = choice / 4 % 4 == 0 ? OPAQ_DTYPE_F32 : dtype;
    const int plan_index = argument_of(op, "plan");
    const int is_backward = argument_of(op, "dy") >= 0;
    struct opaq_linear_plan plan;
    take_plan(input, call->text[plan_index]);
    call->value[plan_index] =
        (struct opaq_value){.text = call->text[plan_index], .count = (int64_t)strlen(call->text[plan_index])};
    for (int i = 0; i < op->argument_count; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_DTYPE) {
            call->value[i].integer = op->argument[i].name[0] == 'w' ? w_dtype : dtype;
        } else if (op->argument[i].kind == OPAQ_ARGUMENT_SIZES) {
            const int is_x = op->argument[i].name[0] == 'x';
            memcpy(call->sizes[i], is_x ? x_shape : w_shape, (size_t)(is_x ? rank : 2) * sizeof *x_shape);
            call->value[i] = (struct opaq_value){.sizes = call->sizes[i], .count = is_x ? rank : 2};
        } else if (i != plan_index && op->argument[i].kind != OPAQ_ARGUMENT_TENSOR_LIST) {
            forget(call, i);
        }
    }
    if (opaq_linear_plan_parse(call->text[plan_index], strlen(call->text[plan_index]), &plan, NULL) !=
        OPAQ_OK) {
        return;
    }
    struct opaq_form x = plan.x_given;
    struct opaq_form w = plan.w_given;
    if (is_backward) {
        x = kept_form(call, plan_index, &plan.x_given, 1, 0);
        w = kept_form(call, plan_index, &plan.w_given, 2, plan.backward == OPAQ_BACKWARD_HIGH_PRECISION);
        put_form(input, call, argument_of(op, "dy"), &plan.dy_given, dtype, rank == 1 ? vector_shape : y_shape,
                 rank);
        const int random = argument_of(op, "random");
        const int64_t two = 2;
        put_tensor(input, call, random, 0, OPAQ_DTYPE_I64, &two, 1);
    } else if (choice / 16 % 2 == 0) {
        put_tensor(input, call, argument_of(op, "bias"), 0, w_dtype, vector_shape, 1);
    }
    put_form(input, call, argument_of(op, "x"), &x, dtype, x_shape, rank);
    put_form(input, call, argument_of(op, "w"), &w, w_dtype, w_shape, 2);
    if (argument_of(op, "main_grad") >= 0 && (plan.options & (OPAQ_LINEAR_ADD | OPAQ_LINEAR_SET)) != 0) {
        put_tensor(input, call, argument_of(op, "main_grad"), 0, dtypes[choice / 64], w_shape, 2);
    }
    fit_state(input, op, &plan, call);
}

#endif
