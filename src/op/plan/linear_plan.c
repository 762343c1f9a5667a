/* op/plan/linear_plan.c: a plan's text, and which copies a plan keeps. Specification: docs/linear.md. */
#include "op/plan/parsed_plan.h"

#include <assert.h>
#include <string.h>

#include "base/try.h"
#include "op/plan/plan_words.h"
#include "opaq/status.h"

/* ---- text ---- */

/* The quantizer fields by their words. */
static struct opaq_form *form_field(const struct plan_word *word, struct opaq_linear_plan *plan) {
    const struct {
        const char *name;
        struct opaq_form *form;
    } fields[] = {{"x", &plan->x},
                  {"w", &plan->w},
                  {"dy", &plan->dy},
                  {"y", &plan->y},
                  {"dx", &plan->dx},
                  {"x_given", &plan->x_given},
                  {"w_given", &plan->w_given},
                  {"dy_given", &plan->dy_given}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; ++i) {
        if (word_is(word, fields[i].name)) {
            return fields[i].form;
        }
    }
    return NULL;
}

static enum opaq_status read_history(const struct plan_word *word, int32_t *algorithm,
                                     struct opaq_error *error) {
    *algorithm = word_value_is(word, "most_recent") ? OPAQ_AMAX_MOST_RECENT : OPAQ_AMAX_MAX;
    return *algorithm == OPAQ_AMAX_MOST_RECENT || word_value_is(word, "max")
               ? OPAQ_OK
               : word_refuse(word, "expected max or most_recent", error);
}

static enum opaq_status read_word(const struct plan_word *word, void *read, struct opaq_error *error) {
    struct opaq_linear_plan *plan = read;
    assert(plan != NULL); /* for the static analyzer */
    struct opaq_form *form = form_field(word, plan);
    const bool has_value = word->value != NULL;
    if (form != NULL && has_value) {
        return word_read_form(word, form, error);
    }
    if (word_is(word, "grad") && has_value) {
        return word_read_letters(word, "xwb", &plan->gradients, error);
    }
    if (word_is(word, "save") && has_value) {
        return word_read_letters(word, "xw", &plan->saved, error);
    }
    if (word_is(word, "backward") && has_value) {
        return word_read_backward(word, &plan->backward, error);
    }
    if (word_is(word, "precision") && has_value) {
        return word_read_precision(word, &plan->precision, error);
    }
    if (word_is(word, "order") && has_value) {
        return word_read_order(word, &plan->order, error);
    }
    if (word_is(word, "history") && has_value) {
        return read_history(word, &plan->algorithm, error);
    }
    if (word_is(word, "margin") && has_value) {
        int64_t margin;
        const enum opaq_status status = word_read_integer(word, -64, 64, &margin, error);
        plan->margin = (int32_t)margin;
        return status;
    }
    static const char *const options[] = {"cache", "bias_later", "main_grad=add", "main_grad=set", "reduce"};
    for (int i = 0; i < 5; ++i) {
        if (word->length == strlen(options[i]) && memcmp(word->text, options[i], word->length) == 0) {
            plan->options |= 1 << i;
            return OPAQ_OK;
        }
    }
    return word_refuse(
        word,
        "unknown; expected x=, w=, dy=, y=, dx=, x_given=, w_given=, dy_given=, grad=, save=, backward=, "
        "precision=, order=, history=, margin=, cache, bias_later, main_grad=add, main_grad=set or reduce",
        error);
}

/* Delayed scales of one direction must have one element. */
static enum opaq_status check_elements(const char *name, const struct opaq_form *form, int element,
                                       struct opaq_error *error) {
    if (!has_option(form, OPAQ_DELAYED) || form->spec.element == element) {
        return OPAQ_OK;
    }
    return opaq_fail(error, OPAQ_ERROR_TEXT,
                     "plan: \"%s=\" is delayed with the element %s, but another one in that direction with %s",
                     name, opaq_element_info((enum opaq_element)form->spec.element)->name,
                     opaq_element_info((enum opaq_element)element)->name);
}

/* Words that contradict each other. */
static enum opaq_status check_plan(const struct opaq_linear_plan *plan, struct opaq_error *error) {
    const bool both_x = is_quantized(&plan->x) && is_quantized(&plan->x_given);
    const bool both_w = is_quantized(&plan->w) && is_quantized(&plan->w_given);
    const bool both_dy = is_quantized(&plan->dy) && is_quantized(&plan->dy_given);
    if (both_x || both_w || both_dy) {
        const char *name = both_x ? "x" : both_w ? "w" : "dy";
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: \"%s=\" does not go with \"%s_given=\"", name, name);
    }
    if ((plan->options & OPAQ_LINEAR_CACHE) && !is_quantized(&plan->w)) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: \"cache\" does not go without \"w=\"");
    }
    const bool delayed_x = (plan->saved & OPAQ_GRADIENT_X) && has_option(&plan->x, OPAQ_DELAYED);
    const bool delayed_w = (plan->saved & OPAQ_GRADIENT_W) && has_option(&plan->w, OPAQ_DELAYED);
    if (delayed_x || delayed_w) {
        return opaq_fail(
            error, OPAQ_ERROR_TEXT,
            "plan: \"save=%s\" does not go with delayed scaling, whose scale may have changed when "
            "%s is quantized again",
            delayed_x ? "x" : "w", delayed_x ? "x" : "w");
    }
    TRY(check_elements("w", &plan->w, plan_forward_element(plan), error));
    TRY(check_elements("y", &plan->y, plan_forward_element(plan), error));
    return check_elements("dx", &plan->dx, plan_backward_element(plan), error);
}

enum opaq_status opaq_linear_plan_parse(const char *text, size_t length, struct opaq_linear_plan *plan,
                                        struct opaq_error *error) {
    struct opaq_linear_plan read;
    memset(&read, 0, sizeof read);
    struct opaq_form *const forms[] = {&read.x,  &read.w,       &read.dy,      &read.y,
                                       &read.dx, &read.x_given, &read.w_given, &read.dy_given};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; ++i) {
        forms[i]->kind = OPAQ_FORM_PLAIN;
    }
    TRY(plan_read_words(text, length, OPAQ_LINEAR_PLAN_TEXT_BYTES, plan == NULL ? NULL : &read, read_word,
                        error));
    TRY(check_plan(&read, error));
    *plan = read;
    return OPAQ_OK;
}

static enum opaq_status parse(const char *text, size_t length, void *plan, struct opaq_error *error) {
    return opaq_linear_plan_parse(text, length, plan, error);
}

static struct text_table table;

enum opaq_status plan_of_value(const struct opaq_value *text, struct opaq_linear_plan *plan,
                               struct opaq_error *error) {
    return plan_find_or_parse(&table, text, sizeof *plan, parse, plan, error);
}

static enum opaq_status check_delayed_rules(const struct opaq_linear_plan *plan, struct opaq_error *error) {
    const struct opaq_form *const forms[] = {&plan->x, &plan->w, &plan->y, &plan->dy, &plan->dx};
    static const char *const names[] = {"x", "w", "y", "dy", "dx"};
    for (int i = 0; i < 5; ++i) {
        if (has_option(forms[i], OPAQ_DELAYED) && forms[i]->spec.rule != OPAQ_RULE_TE) {
            return opaq_fail(
                error, OPAQ_ERROR_TEXT,
                "plan: \"%s=\" is delayed under the rule %s, whose scale is a divisor, but delayed "
                "scaling computes factors",
                names[i], opaq_rule_name((enum opaq_rule)forms[i]->spec.rule));
        }
    }
    return OPAQ_OK;
}

enum opaq_status plan_of_training(const struct opaq_value *text, struct opaq_linear_plan *plan,
                                  struct opaq_error *error) {
    TRY(plan_of_value(text, plan, error));
    return check_delayed_rules(plan, error);
}

/* ---- saved forms ---- */

static const struct opaq_form absent = {.kind = OPAQ_FORM_ABSENT};
static const struct opaq_form plain = {.kind = OPAQ_FORM_PLAIN};

/* For an operand that is quantized here: the copy that the backward reads. */
static struct opaq_form saved_copy(const struct opaq_linear_plan *plan, const struct opaq_form *form,
                                   enum opaq_gradient operand) {
    if (!is_quantized(form) || (plan->saved & (int)operand) || plan->backward == OPAQ_BACKWARD_HIGH_PRECISION) {
        return absent;
    }
    return form_with_usage(form, plan->backward == OPAQ_BACKWARD_DEQUANTIZED ? OPAQ_ROWWISE : OPAQ_COLUMNWISE);
}

struct opaq_form plan_x_saved(const struct opaq_linear_plan *plan) {
    return plan->gradients & OPAQ_GRADIENT_W ? saved_copy(plan, &plan->x, OPAQ_GRADIENT_X) : absent;
}

struct opaq_form plan_w_saved(const struct opaq_linear_plan *plan) {
    const bool is_needed = (plan->gradients & OPAQ_GRADIENT_X) != 0;
    if (plan->options & OPAQ_LINEAR_CACHE) {
        const bool both = is_needed && plan->backward == OPAQ_BACKWARD_QUANTIZED;
        return form_with_usage(&plan->w, both ? OPAQ_BOTH : OPAQ_ROWWISE);
    }
    return is_needed ? saved_copy(plan, &plan->w, OPAQ_GRADIENT_W) : absent;
}

struct opaq_form plan_x_kept(const struct opaq_linear_plan *plan) {
    const struct opaq_form saved = plan_x_saved(plan);
    if ((plan->gradients & OPAQ_GRADIENT_W) == 0) {
        return absent;
    }
    return is_quantized(&plan->x_given) ? plan->x_given : is_quantized(&saved) ? saved : plain;
}

struct opaq_form plan_w_kept(const struct opaq_linear_plan *plan) {
    const struct opaq_form saved = plan_w_saved(plan);
    const bool serves = is_quantized(&saved) && plan->backward != OPAQ_BACKWARD_HIGH_PRECISION;
    if ((plan->gradients & OPAQ_GRADIENT_X) == 0) {
        return absent;
    }
    return is_quantized(&plan->w_given) ? plan->w_given : serves ? saved : plain;
}

struct opaq_form plan_dy(const struct opaq_linear_plan *plan) {
    const int usage = (plan->gradients & OPAQ_GRADIENT_X ? OPAQ_ROWWISE : 0) |
                      (plan->gradients & OPAQ_GRADIENT_W ? OPAQ_COLUMNWISE : 0);
    const bool here = is_quantized(&plan->dy) && plan->backward == OPAQ_BACKWARD_QUANTIZED && usage != 0;
    return here ? form_with_usage(&plan->dy, usage) : plain;
}

/* ---- delayed and stochastic ---- */

static int element_of(const struct opaq_form *const forms[], int count) {
    for (int i = 0; i < count; ++i) {
        if (has_option(forms[i], OPAQ_DELAYED)) {
            return forms[i]->spec.element;
        }
    }
    return -1;
}

int plan_forward_element(const struct opaq_linear_plan *plan) {
    const struct opaq_form *const forms[] = {&plan->x, &plan->w, &plan->y, &plan->x_given, &plan->w_given};
    return element_of(forms, 5);
}

int plan_backward_element(const struct opaq_linear_plan *plan) {
    const struct opaq_form *const forms[] = {&plan->dy, &plan->dx, &plan->dy_given};
    return element_of(forms, 3);
}

bool plan_forward_is_delayed(const struct opaq_linear_plan *plan) {
    return has_option(&plan->x, OPAQ_DELAYED) || has_option(&plan->w, OPAQ_DELAYED) ||
           has_option(&plan->y, OPAQ_DELAYED);
}

bool plan_backward_is_delayed(const struct opaq_linear_plan *plan) {
    const struct opaq_form dy = plan_dy(plan);
    return has_option(&dy, OPAQ_DELAYED) ||
           ((plan->gradients & OPAQ_GRADIENT_X) && has_option(&plan->dx, OPAQ_DELAYED));
}

bool plan_forward_is_stochastic(const struct opaq_linear_plan *plan) {
    return has_option(&plan->x, OPAQ_STOCHASTIC) || has_option(&plan->w, OPAQ_STOCHASTIC) ||
           has_option(&plan->y, OPAQ_STOCHASTIC);
}

bool plan_backward_is_stochastic(const struct opaq_linear_plan *plan) {
    const struct opaq_form dy = plan_dy(plan);
    const struct opaq_form x = plan_x_kept(plan);
    const struct opaq_form w = plan_w_kept(plan);
    const bool quantizes = plan->backward != OPAQ_BACKWARD_HIGH_PRECISION;
    const bool again_x = quantizes && x.kind == OPAQ_FORM_PLAIN && has_option(&plan->x, OPAQ_STOCHASTIC);
    const bool again_w = quantizes && w.kind == OPAQ_FORM_PLAIN && has_option(&plan->w, OPAQ_STOCHASTIC);
    return has_option(&dy, OPAQ_STOCHASTIC) || again_x || again_w ||
           ((plan->gradients & OPAQ_GRADIENT_X) && has_option(&plan->dx, OPAQ_STOCHASTIC));
}
