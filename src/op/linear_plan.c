/* op/linear_plan.c: a plan's text, and which copies a plan keeps. Specification: docs/linear.md. */
#include "op/linear_plan.h"

#include <assert.h>
#include <string.h>

#include "base/text_table.h"
#include "op/op_tensor.h"
#include "opaq/status.h"

/* ---- text ---- */

struct word {
    const char *text;
    size_t length;
    size_t position;
    const char *value; /* after "=", or NULL */
    size_t value_length;
};

static bool is(const struct word *word, const char *key) {
    const size_t length = word->value == NULL ? word->length : (size_t)(word->value - word->text) - 1;
    return strlen(key) == length && memcmp(word->text, key, length) == 0;
}

static bool value_is(const struct word *word, const char *value) {
    return word->value_length == strlen(value) && memcmp(word->value, value, word->value_length) == 0;
}

/* The word with everything printable, so that a message stays one readable line. */
static enum opaq_status refuse(const struct word *word, const char *expected, struct opaq_error *error) {
    char shown[104];
    const size_t length = word->length < sizeof shown - 4 ? word->length : sizeof shown - 4;
    for (size_t i = 0; i < length; ++i) {
        shown[i] = word->text[i] >= ' ' && word->text[i] <= '~' ? word->text[i] : '?';
    }
    memcpy(shown + length, length < word->length ? "..." : "", length < word->length ? 4 : 1);
    return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: \"%s\" at position %zu: %s", shown, word->position,
                     expected);
}

/* The quantizer fields by their words. */
static struct opaq_form *form_field(const struct word *word, struct opaq_linear_plan *plan) {
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
        if (is(word, fields[i].name)) {
            return fields[i].form;
        }
    }
    return NULL;
}

static enum opaq_status read_form(const struct word *word, struct opaq_form *form, struct opaq_error *error) {
    struct opaq_error reason;
    const struct opaq_value text = {.text = word->value, .count = (int64_t)word->value_length};
    const enum opaq_status status = spec_of_value(&text, &form->spec, &reason);
    form->kind = OPAQ_FORM_QUANTIZED;
    return status == OPAQ_OK ? OPAQ_OK : refuse(word, reason.text, error);
}

/* "xwb", each letter once: the bits of its gradients. */
static enum opaq_status read_letters(const struct word *word, const char *letters, int32_t *bits,
                                     struct opaq_error *error) {
    *bits = 0;
    for (size_t i = 0; i < word->value_length; ++i) {
        const char *found = strchr(letters, word->value[i]);
        const int32_t bit = found == NULL || *found == '\0' ? 0 : 1 << (found - letters);
        if (bit == 0 || (*bits & bit)) {
            return refuse(
                word, letters[2] ? "expected letters of xwb, each once" : "expected letters of xw, each once",
                error);
        }
        *bits |= bit;
    }
    return *bits != 0 ? OPAQ_OK : refuse(word, "expected at least one letter", error);
}

static enum opaq_status read_margin(const struct word *word, int32_t *margin, struct opaq_error *error) {
    const bool is_negative = word->value_length > 0 && word->value[0] == '-';
    const size_t first = is_negative ? 1 : 0;
    bool good = word->value_length > first && word->value_length <= first + 2;
    int32_t value = 0;
    for (size_t i = first; good && i < word->value_length; ++i) {
        good = word->value[i] >= '0' && word->value[i] <= '9';
        value = value * 10 + (word->value[i] - '0');
    }
    *margin = is_negative ? -value : value;
    return good && value <= 64 ? OPAQ_OK : refuse(word, "expected an integer from -64 to 64", error);
}

static enum opaq_status read_backward(const struct word *word, int32_t *backward, struct opaq_error *error) {
    *backward = value_is(word, "high_precision") ? OPAQ_BACKWARD_HIGH_PRECISION
                : value_is(word, "dequantized")  ? OPAQ_BACKWARD_DEQUANTIZED
                                                 : OPAQ_BACKWARD_QUANTIZED;
    return *backward != OPAQ_BACKWARD_QUANTIZED ? OPAQ_OK
                                                : refuse(word, "expected high_precision or dequantized", error);
}

static enum opaq_status read_history(const struct word *word, int32_t *algorithm, struct opaq_error *error) {
    *algorithm = value_is(word, "most_recent") ? OPAQ_AMAX_MOST_RECENT : OPAQ_AMAX_MAX;
    return *algorithm == OPAQ_AMAX_MOST_RECENT || value_is(word, "max")
               ? OPAQ_OK
               : refuse(word, "expected max or most_recent", error);
}

static enum opaq_status read_word(const struct word *word, struct opaq_linear_plan *plan,
                                  struct opaq_error *error) {
    assert(plan != NULL); /* which the analyzer doubts */
    struct opaq_form *form = form_field(word, plan);
    const bool has_value = word->value != NULL;
    if (form != NULL && has_value) {
        return read_form(word, form, error);
    }
    if (is(word, "grad") && has_value) {
        return read_letters(word, "xwb", &plan->gradients, error);
    }
    if (is(word, "save") && has_value) {
        return read_letters(word, "xw", &plan->saved, error);
    }
    if (is(word, "backward") && has_value) {
        return read_backward(word, &plan->backward, error);
    }
    if (is(word, "history") && has_value) {
        return read_history(word, &plan->algorithm, error);
    }
    if (is(word, "margin") && has_value) {
        return read_margin(word, &plan->margin, error);
    }
    static const char *const options[] = {"cache", "bias_later", "main_grad=add", "main_grad=set", "reduce"};
    for (int i = 0; i < 5; ++i) {
        if (word->length == strlen(options[i]) && memcmp(word->text, options[i], word->length) == 0) {
            plan->options |= 1 << i;
            return OPAQ_OK;
        }
    }
    return refuse(
        word,
        "unknown; expected x=, w=, dy=, y=, dx=, x_given=, w_given=, dy_given=, grad=, save=, backward=, "
        "history=, margin=, cache, bias_later, main_grad=add, main_grad=set or reduce",
        error);
}

/* Delayed scales of one direction aim at one range. */
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

/* Delayed scaling computes factors, and these rules take divisors. */
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

/* Words that say different things about the same. */
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
    enum opaq_status status = check_delayed_rules(plan, error);
    if (status == OPAQ_OK) {
        status = check_elements("w", &plan->w, plan_forward_element(plan), error);
    }
    if (status == OPAQ_OK) {
        status = check_elements("y", &plan->y, plan_forward_element(plan), error);
    }
    return status == OPAQ_OK ? check_elements("dx", &plan->dx, plan_backward_element(plan), error) : status;
}

/* The word at *position, and on to the next. */
static struct word next_word(const char *text, size_t length, size_t *position) {
    const char *space = memchr(text + *position, ' ', length - *position);
    struct word word = {.text = text + *position, .position = *position};
    word.length = space == NULL ? length - *position : (size_t)(space - word.text);
    const char *equals = word.length == 0 ? NULL : memchr(word.text, '=', word.length);
    if (equals != NULL) {
        word.value = equals + 1;
        word.value_length = word.length - (size_t)(word.value - word.text);
    }
    *position += word.length + 1;
    return word;
}

static bool came_before(const char *text, size_t length, const struct word *word) {
    size_t position = 0;
    while (position < word->position) {
        const struct word earlier = next_word(text, length, &position);
        const size_t key = earlier.value == NULL ? earlier.length : (size_t)(earlier.value - earlier.text);
        const size_t mine = word->value == NULL ? word->length : (size_t)(word->value - word->text);
        if (key == mine && memcmp(earlier.text, word->text, key) == 0) {
            return true;
        }
    }
    return false;
}

enum opaq_status opaq_linear_plan_parse(const char *text, size_t length, struct opaq_linear_plan *plan,
                                        struct opaq_error *error) {
    if (text == NULL || plan == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "plan: %s is NULL", text == NULL ? "text" : "plan");
    }
    if (length >= OPAQ_LINEAR_PLAN_TEXT_BYTES) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: the text has %zu characters, at most %d are allowed",
                         length, OPAQ_LINEAR_PLAN_TEXT_BYTES - 1);
    }
    struct opaq_linear_plan read;
    memset(&read, 0, sizeof read);
    struct opaq_form *const forms[] = {&read.x,  &read.w,       &read.dy,      &read.y,
                                       &read.dx, &read.x_given, &read.w_given, &read.dy_given};
    for (size_t i = 0; i < sizeof forms / sizeof forms[0]; ++i) {
        forms[i]->kind = OPAQ_FORM_PLAIN;
    }
    enum opaq_status status = OPAQ_OK;
    for (size_t position = 0; status == OPAQ_OK && length > 0 && position <= length;) {
        const struct word word = next_word(text, length, &position);
        status = word.length == 0                   ? refuse(&word, "expected a word", error)
                 : came_before(text, length, &word) ? refuse(&word, "came before", error)
                                                    : read_word(&word, &read, error);
    }
    if (status == OPAQ_OK) {
        status = check_plan(&read, error);
    }
    if (status == OPAQ_OK) {
        *plan = read;
    }
    return status;
}

enum opaq_status plan_of_value(const struct opaq_value *text, struct opaq_linear_plan *plan,
                               struct opaq_error *error) {
    static struct text_table table = {.mutex = PTHREAD_MUTEX_INITIALIZER};
    const size_t length = (size_t)text->count;
    const struct opaq_linear_plan *known = text_table_find(&table, text->text, length);
    if (known != NULL) {
        *plan = *known;
        return OPAQ_OK;
    }
    const enum opaq_status status = opaq_linear_plan_parse(text->text, length, plan, error);
    if (status == OPAQ_OK) { /* beyond the limit, or without memory, a text is parsed each time */
        pthread_mutex_lock(&table.mutex);
        if (table.count < OPAQ_INTERN_LIMIT && text_table_find(&table, text->text, length) == NULL) {
            (void)text_table_insert(&table, text->text, length, plan, sizeof *plan);
        }
        pthread_mutex_unlock(&table.mutex);
    }
    return status;
}

/* ---- what is kept ---- */

static const struct opaq_form absent = {.kind = OPAQ_FORM_ABSENT};
static const struct opaq_form plain = {.kind = OPAQ_FORM_PLAIN};

/* Of an operand that is quantized here: the copy that the backward reads. */
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
