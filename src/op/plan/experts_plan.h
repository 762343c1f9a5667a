/* op/plan/experts_plan.h: a plan of an MLP or a mixture from its text. Depends on opaq/experts.h. */
#ifndef OPAQ_OP_PLAN_EXPERTS_PLAN_H
#define OPAQ_OP_PLAN_EXPERTS_PLAN_H

#include <stdbool.h>

#include "opaq/experts.h"

/* The plan of a text argument, parsed once. Error texts do not name the operation. */
enum opaq_status experts_plan_of_value(const struct opaq_value *text, struct opaq_experts_plan *plan,
                                       struct opaq_error *error);

#endif
