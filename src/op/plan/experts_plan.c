/* op/plan/experts_plan.c: a plan of an MLP or a mixture from its text. Specification: docs/experts.md. */
#include "op/plan/parsed_plan.h"

#include <assert.h>
#include <string.h>

#include "backend/grouped.h"
#include "base/float_bits.h"
#include "base/try.h"
#include "format/decimal.h"
#include "op/plan/plan_words.h"
#include "opaq/status.h"

/* In the order of enum opaq_activation: the name, and the default parameters. A limit of 0 must be given; -1:
 * none. */
static const struct {
    const char *name;
    float limit, alpha, beta;
} activations[OPAQ_ACTIVATION_COUNT] = {
    {"silu", -1, 1, 0},
    {"silu_clamp", 0, 1, 0},
    {"swiglu_oai", 7, 1.702f, 1},
    {"swiglu_oai_packed", 7, 1.702f, 1},
    {"silu_step", 0, 1, 0},
    {"gelu", -1, 1, 0},
    {"gelu_tanh", -1, 1, 0},
    {"relu2", -1, 1, 0},
    {"silu_no_mul", -1, 1, 0},
    {"gelu_no_mul", -1, 1, 0},
    {"gelu_tanh_no_mul", -1, 1, 0},
    {"relu2_no_mul", -1, 1, 0},
};

const char *opaq_activation_name(enum opaq_activation activation) {
    return (unsigned)activation < OPAQ_ACTIVATION_COUNT ? activations[activation].name : NULL;
}

int opaq_activation_is_gated(enum opaq_activation activation) { return activation_is_gated(activation); }

static bool has_alpha(int32_t activation) {
    return activation >= OPAQ_SILU_CLAMP && activation <= OPAQ_SWIGLU_OAI_PACKED;
}

static enum opaq_status read_number(const struct plan_word *word, float *number, struct opaq_error *error) {
    const bool is_negative = word->value_length > 0 && word->value[0] == '-';
    const size_t first = is_negative ? 1 : 0;
    if (!decimal_parse(word->value + first, word->value_length - first, number)) {
        return word_refuse(word, "expected a number such as 7 or 1.702", error);
    }
    *number = is_negative ? -*number : *number;
    return OPAQ_OK;
}

/* Sets parameters that the plan does not give, which are NaN, to the activation's defaults. */
static enum opaq_status read_activation(const struct plan_word *word, struct opaq_experts_plan *plan,
                                        struct opaq_error *error) {
    for (int32_t i = 0; i < OPAQ_ACTIVATION_COUNT; ++i) {
        if (word_value_is(word, activations[i].name)) {
            plan->activation = i;
            return OPAQ_OK;
        }
    }
    return word_refuse(word,
                       "expected silu, silu_clamp, swiglu_oai, swiglu_oai_packed, silu_step, gelu, gelu_tanh, "
                       "relu2, silu_no_mul, gelu_no_mul, gelu_tanh_no_mul or relu2_no_mul",
                       error);
}

static struct opaq_form *form_field(const struct plan_word *word, struct opaq_experts_plan *plan) {
    const struct {
        const char *name;
        struct opaq_form *form;
    } fields[] = {{"x", &plan->x},
                  {"h", &plan->h},
                  {"w", &plan->w},
                  {"dy", &plan->dy},
                  {"gate_up_given", &plan->gate_up_given},
                  {"down_given", &plan->down_given}};
    for (size_t i = 0; i < sizeof fields / sizeof fields[0]; ++i) {
        if (word_is(word, fields[i].name)) {
            return fields[i].form;
        }
    }
    return NULL;
}

static enum opaq_status read_word(const struct plan_word *word, void *read, struct opaq_error *error) {
    struct opaq_experts_plan *plan = read;
    assert(plan != NULL); /* for the static analyzer */
    struct opaq_form *form = word->value == NULL ? NULL : form_field(word, plan);
    if (form != NULL) {
        return word_read_form(word, form, error);
    }
    if (word->value != NULL && word_is(word, "act")) {
        return read_activation(word, plan, error);
    }
    float *const number = word_is(word, "limit")   ? &plan->limit
                          : word_is(word, "alpha") ? &plan->alpha
                          : word_is(word, "beta")  ? &plan->beta
                                                   : NULL;
    if (word->value != NULL && number != NULL) {
        return read_number(word, number, error);
    }
    if (word->value != NULL && word_is(word, "grad")) {
        return word_read_letters(word, "xrgdbc", &plan->gradients, error);
    }
    if (word->value != NULL && word_is(word, "experts")) {
        return word_read_integer(word, 1, INT32_MAX, &plan->experts, error);
    }
    if (word->value != NULL && word_is(word, "first")) {
        return word_read_integer(word, 0, INT32_MAX, &plan->first, error);
    }
    if (word->value != NULL && word_is(word, "weights") && word_value_is(word, "input")) {
        plan->weights_on_input = 1;
        return OPAQ_OK;
    }
    if (word->value != NULL && word_is(word, "precision")) {
        return word_read_precision(word, &plan->precision, error);
    }
    if (word->value != NULL && word_is(word, "order")) {
        return word_read_order(word, &plan->order, error);
    }
    if (word->value != NULL && word_is(word, "backward")) {
        return word_read_backward(word, &plan->backward, error);
    }
    return word_refuse(word,
                       "unknown; expected act=, limit=, alpha=, beta=, x=, h=, w=, dy=, gate_up_given=, "
                       "down_given=, grad=, backward=, precision=, order=, experts=, first= or weights=input",
                       error);
}

/* Checks the given parameters against those that the activation has. */
static enum opaq_status settle_numbers(struct opaq_experts_plan *plan, struct opaq_error *error) {
    const char *name = activations[plan->activation].name;
    const bool has_limit = activations[plan->activation].limit >= 0;
    const bool has_factors = has_alpha(plan->activation);
    if (!float_is_nan(plan->limit) && (!has_limit || !(plan->limit > 0))) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: limit=%g does not go with act=%s%s",
                         (double)plan->limit, name, has_limit ? ", which needs one above 0" : "");
    }
    if ((!float_is_nan(plan->alpha) || !float_is_nan(plan->beta)) && !has_factors) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: alpha= and beta= do not go with act=%s", name);
    }
    plan->limit = float_is_nan(plan->limit) ? activations[plan->activation].limit : plan->limit;
    plan->alpha = float_is_nan(plan->alpha) ? activations[plan->activation].alpha : plan->alpha;
    plan->beta = float_is_nan(plan->beta) ? activations[plan->activation].beta : plan->beta;
    return plan->limit != 0.0f
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_TEXT, "plan: act=%s does not go without limit=", name);
}

static enum opaq_status check_plan(const struct opaq_experts_plan *plan, struct opaq_error *error) {
    const bool is_given = is_quantized(&plan->gate_up_given) || is_quantized(&plan->down_given);
    if (is_quantized(&plan->w) && is_given) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: \"w=\" does not go with \"%s=\"",
                         is_quantized(&plan->gate_up_given) ? "gate_up_given" : "down_given");
    }
    if (is_given && (plan->gradients & (OPAQ_EXPERTS_GATE_UP | OPAQ_EXPERTS_DOWN))) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: weights that come quantized have no gradient (g, d)");
    }
    if (has_option(&plan->w, OPAQ_DELAYED) || has_option(&plan->dy, OPAQ_DELAYED) ||
        (plan->gradients && (has_option(&plan->x, OPAQ_DELAYED) || has_option(&plan->h, OPAQ_DELAYED)))) {
        return opaq_fail(
            error, OPAQ_ERROR_UNSUPPORTED,
            "plan: delayed scaling goes with scales that are given for x and h, without gradients");
    }
    if (plan->experts != 0 && plan->first >= plan->experts) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: first=%lld does not go with experts=%lld",
                         (long long)plan->first, (long long)plan->experts);
    }
    return OPAQ_OK;
}

enum opaq_status opaq_experts_plan_parse(const char *text, size_t length, struct opaq_experts_plan *plan,
                                         struct opaq_error *error) {
    struct opaq_experts_plan read;
    memset(&read, 0, sizeof read);
    struct opaq_form *const forms[] = {&read.x,         &read.h, &read.w, &read.dy, &read.gate_up_given,
                                       &read.down_given};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; ++i) {
        forms[i]->kind = OPAQ_FORM_PLAIN;
    }
    read.limit = read.alpha = read.beta = float_nan();
    TRY(plan_read_words(text, length, OPAQ_EXPERTS_PLAN_TEXT_BYTES, plan == NULL ? NULL : &read, read_word,
                        error));
    TRY(settle_numbers(&read, error));
    TRY(check_plan(&read, error));
    *plan = read;
    return OPAQ_OK;
}

static enum opaq_status parse(const char *text, size_t length, void *plan, struct opaq_error *error) {
    return opaq_experts_plan_parse(text, length, plan, error);
}

static struct text_table table;

enum opaq_status experts_plan_of_value(const struct opaq_value *text, struct opaq_experts_plan *plan,
                                       struct opaq_error *error) {
    return plan_find_or_parse(&table, text, sizeof *plan, parse, plan, error);
}
