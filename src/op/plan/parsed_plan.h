/* op/plan/parsed_plan.h: plans of text arguments, and the forms of saved tensors. Depends on opaq/linear.h and
 * opaq/experts.h. */
#ifndef OPAQ_OP_PLAN_PARSED_PLAN_H
#define OPAQ_OP_PLAN_PARSED_PLAN_H

#include <stdbool.h>

#include "opaq/experts.h"
#include "opaq/linear.h"

/* The plan of a text argument, of a linear layer or of an MLP or mixture, parsed once. Error texts do not name the
 * operation. */
enum opaq_status plan_of_value(const struct opaq_value *text, struct opaq_linear_plan *plan,
                               struct opaq_error *error);
enum opaq_status experts_plan_of_value(const struct opaq_value *text, struct opaq_experts_plan *plan,
                                       struct opaq_error *error);

/* The same for operators that train: delayed scaling has a state there, whose scales are factors, so rules
 * whose given scale is a divisor are rejected. */
enum opaq_status plan_of_training(const struct opaq_value *text, struct opaq_linear_plan *plan,
                                  struct opaq_error *error);

/* The forms that the forward returns for the backward; absent if the argument itself is used. */
struct opaq_form plan_x_saved(const struct opaq_linear_plan *plan);
struct opaq_form plan_w_saved(const struct opaq_linear_plan *plan);

/* The forms that the backward receives; absent if it needs none. */
struct opaq_form plan_x_kept(const struct opaq_linear_plan *plan);
struct opaq_form plan_w_kept(const struct opaq_linear_plan *plan);

/* How dy is quantized in the backward: plain or with the usages that the gradients need. */
struct opaq_form plan_dy(const struct opaq_linear_plan *plan);

/* The common element of the delayed ones among x, w and y (dy and dx); -1 if none is delayed. */
int plan_forward_element(const struct opaq_linear_plan *plan);
int plan_backward_element(const struct opaq_linear_plan *plan);

/* Whether the forward (backward) reads given scales, and whether it rounds stochastically. */
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
