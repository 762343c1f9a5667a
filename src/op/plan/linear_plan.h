/* op/plan/linear_plan.h: a plan from its text, and what follows from it. Depends on opaq/linear.h. */
#ifndef OPAQ_OP_PLAN_LINEAR_PLAN_H
#define OPAQ_OP_PLAN_LINEAR_PLAN_H

#include <stdbool.h>

#include "opaq/linear.h"

/* The plan that a text argument stands for, parsed once. The error names no operation. */
enum opaq_status plan_of_value(const struct opaq_value *text, struct opaq_linear_plan *plan,
                               struct opaq_error *error);

/* The same for operators that train: what is delayed has a state, whose scales are factors, so the rules whose given
 * scale is a divisor are refused. */
enum opaq_status plan_of_training(const struct opaq_value *text, struct opaq_linear_plan *plan,
                                  struct opaq_error *error);

/* What the forward returns for the backward; absent where the argument itself serves. */
struct opaq_form plan_x_saved(const struct opaq_linear_plan *plan);
struct opaq_form plan_w_saved(const struct opaq_linear_plan *plan);

/* What the backward is given; absent where it needs none. */
struct opaq_form plan_x_kept(const struct opaq_linear_plan *plan);
struct opaq_form plan_w_kept(const struct opaq_linear_plan *plan);

/* How dy is quantized in the backward: plain or with the usages that the gradients need. */
struct opaq_form plan_dy(const struct opaq_linear_plan *plan);

/* The element of what is delayed among x, w and y (dy and dx), which is one for all of them; -1 if nothing is. */
int plan_forward_element(const struct opaq_linear_plan *plan);
int plan_backward_element(const struct opaq_linear_plan *plan);

/* Whether the forward (backward) reads scales that are given, and whether one of them rounds stochastically. */
bool plan_forward_is_delayed(const struct opaq_linear_plan *plan);
bool plan_backward_is_delayed(const struct opaq_linear_plan *plan);
bool plan_forward_is_stochastic(const struct opaq_linear_plan *plan);
bool plan_backward_is_stochastic(const struct opaq_linear_plan *plan);

static inline bool is_quantized(const struct opaq_form *form) { return form->kind == OPAQ_FORM_QUANTIZED; }

static inline bool has_option(const struct opaq_form *form, enum opaq_option option) {
    return is_quantized(form) && (form->spec.options & (unsigned)option) != 0;
}

static inline struct opaq_form form_with_usage(const struct opaq_form *form, int usage) {
    struct opaq_form made = *form;
    made.spec.usage = (uint8_t)usage;
    return made;
}

#endif
