/* op/plan/plan_words.c: parses the words of plans. */
#include "op/plan/plan_words.h"

#include <stdio.h>
#include <string.h>

#include "base/fork_lock.h"
#include "base/try.h"
#include "op/table/op_tensor.h"
#include "opaq/linear.h"
#include "opaq/status.h"

static size_t key_length(const struct plan_word *word) {
    return word->value == NULL ? word->length : (size_t)(word->value - word->text) - 1;
}

bool word_is(const struct plan_word *word, const char *key) {
    return strlen(key) == key_length(word) && memcmp(word->text, key, key_length(word)) == 0;
}

bool word_value_is(const struct plan_word *word, const char *value) {
    return word->value_length == strlen(value) && memcmp(word->value, value, word->value_length) == 0;
}

/* The word with unprintable characters replaced, so that a message is one readable line. */
enum opaq_status word_refuse(const struct plan_word *word, const char *expected, struct opaq_error *error) {
    char shown[104];
    const size_t length = word->length < sizeof shown - 4 ? word->length : sizeof shown - 4;
    for (size_t i = 0; i < length; ++i) {
        shown[i] = word->text[i] >= ' ' && word->text[i] <= '~' ? word->text[i] : '?';
    }
    memcpy(shown + length, length < word->length ? "..." : "", length < word->length ? 4 : 1);
    return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: \"%s\" at position %zu: %s", shown, word->position,
                     expected);
}

enum opaq_status word_read_form(const struct plan_word *word, struct opaq_form *form,
                                struct opaq_error *error) {
    struct opaq_error reason;
    const struct opaq_value text = {.text = word->value, .count = (int64_t)word->value_length};
    const enum opaq_status status = spec_of_value(&text, &form->spec, &reason);
    form->kind = OPAQ_FORM_QUANTIZED;
    return status == OPAQ_OK ? OPAQ_OK : word_refuse(word, reason.text, error);
}

enum opaq_status word_read_letters(const struct plan_word *word, const char *letters, int32_t *bits,
                                   struct opaq_error *error) {
    *bits = 0;
    for (size_t i = 0; i < word->value_length; ++i) {
        const char *found = strchr(letters, word->value[i]);
        const int32_t bit = found == NULL || *found == '\0' ? 0 : 1 << (found - letters);
        if (bit == 0 || (*bits & bit)) {
            char expected[64];
            (void)snprintf(expected, sizeof expected, "expected letters of %s, each once", letters);
            return word_refuse(word, expected, error);
        }
        *bits |= bit;
    }
    return *bits != 0 ? OPAQ_OK : word_refuse(word, "expected at least one letter", error);
}

enum opaq_status word_read_integer(const struct plan_word *word, int64_t lowest, int64_t highest,
                                   int64_t *integer, struct opaq_error *error) {
    const bool is_negative = word->value_length > 0 && word->value[0] == '-';
    const size_t first = is_negative ? 1 : 0;
    bool good = word->value_length > first && word->value_length <= first + 10;
    int64_t value = 0;
    for (size_t i = first; good && i < word->value_length; ++i) {
        good = word->value[i] >= '0' && word->value[i] <= '9';
        value = value * 10 + (word->value[i] - '0');
    }
    *integer = is_negative ? -value : value;
    if (!good || *integer < lowest || *integer > highest) {
        char expected[80];
        (void)snprintf(expected, sizeof expected, "expected an integer from %lld to %lld", (long long)lowest,
                       (long long)highest);
        return word_refuse(word, expected, error);
    }
    return OPAQ_OK;
}

enum opaq_status word_read_backward(const struct plan_word *word, int32_t *backward, struct opaq_error *error) {
    *backward = word_value_is(word, "high_precision") ? OPAQ_BACKWARD_HIGH_PRECISION
                : word_value_is(word, "dequantized")  ? OPAQ_BACKWARD_DEQUANTIZED
                                                      : OPAQ_BACKWARD_QUANTIZED;
    return *backward != OPAQ_BACKWARD_QUANTIZED
               ? OPAQ_OK
               : word_refuse(word, "expected high_precision or dequantized", error);
}

enum opaq_status word_read_precision(const struct plan_word *word, int32_t *precision,
                                     struct opaq_error *error) {
    static const char *const names[] = {"exact", "near", "fast", "fast32"}; /* enum opaq_precision */
    for (int32_t i = 0; i < 4; ++i) {
        if (word_value_is(word, names[i])) {
            *precision = i;
            return OPAQ_OK;
        }
    }
    return word_refuse(word, "expected exact, near, fast or fast32", error);
}

enum opaq_status word_read_order(const struct plan_word *word, int32_t *order, struct opaq_error *error) {
    *order = word_value_is(word, "any") ? OPAQ_ORDER_ANY : OPAQ_ORDER_FIXED;
    return *order == OPAQ_ORDER_ANY || word_value_is(word, "fixed")
               ? OPAQ_OK
               : word_refuse(word, "expected fixed or any", error);
}

/* Reads the word at *position and advances to the next. */
static struct plan_word next_word(const char *text, size_t length, size_t *position) {
    const char *space = memchr(text + *position, ' ', length - *position);
    struct plan_word word = {.text = text + *position, .position = *position};
    word.length = space == NULL ? length - *position : (size_t)(space - word.text);
    const char *equals = word.length == 0 ? NULL : memchr(word.text, '=', word.length);
    if (equals != NULL) {
        word.value = equals + 1;
        word.value_length = word.length - (size_t)(word.value - word.text);
    }
    *position += word.length + 1;
    return word;
}

static bool came_before(const char *text, size_t length, const struct plan_word *word) {
    for (size_t position = 0; position < word->position;) {
        const struct plan_word earlier = next_word(text, length, &position);
        const bool same_kind = (earlier.value == NULL) == (word->value == NULL);
        if (same_kind && key_length(&earlier) == key_length(word) &&
            memcmp(earlier.text, word->text, key_length(word)) == 0) {
            return true;
        }
    }
    return false;
}

enum opaq_status plan_read_words(const char *text, size_t length, size_t limit, void *plan,
                                 enum opaq_status (*read)(const struct plan_word *word, void *plan,
                                                          struct opaq_error *error),
                                 struct opaq_error *error) {
    if (text == NULL || plan == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "plan: %s is NULL", text == NULL ? "text" : "plan");
    }
    if (length >= limit) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: the text has %zu characters, at most %zu are allowed",
                         length, limit - 1);
    }
    for (size_t position = 0; length > 0 && position <= length;) {
        const struct plan_word word = next_word(text, length, &position);
        TRY(word.length == 0                   ? word_refuse(&word, "expected a word", error)
            : came_before(text, length, &word) ? word_refuse(&word, "came before", error)
                                               : read(&word, plan, error));
    }
    return OPAQ_OK;
}

enum opaq_status plan_find_or_parse(struct text_table *table, const struct opaq_value *text, size_t bytes,
                                    enum opaq_status (*parse)(const char *text, size_t length, void *plan,
                                                              struct opaq_error *error),
                                    void *plan, struct opaq_error *error) {
    const size_t length = (size_t)text->count;
    const void *known = text_table_find(table, text->text, length);
    if (known != NULL) {
        memcpy(plan, known, bytes);
        return OPAQ_OK;
    }
    TRY(parse(text->text, length, plan, error));
    fork_lock(); /* beyond the limit, or out of memory, a text is parsed each time */
    if (table->count < OPAQ_INTERN_LIMIT && text_table_find(table, text->text, length) == NULL) {
        (void)text_table_insert(table, text->text, length, plan, bytes);
    }
    fork_unlock();
    return OPAQ_OK;
}
