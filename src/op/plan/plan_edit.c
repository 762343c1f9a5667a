/* op/plan/plan_edit.c: reads and replaces single words of a plan's text. Depends on opaq/plan_text.h,
 * opaq/spec.h. */
#include "opaq/plan_text.h"

#include <stdbool.h>
#include <stdio.h>
#include <string.h>

#include "base/try.h"
#include "opaq/spec.h"
#include "opaq/status.h"

enum word_kind { QUANTIZER, VALUE, FLAG };

/* All words of all plans, in the order of a canonical text. */
static const struct plan_key {
    const char *name;
    enum word_kind kind;
    const char *default_value; /* value if the word is absent; NULL if there is none */
} keys[] = {
    {"act", VALUE, NULL},
    {"limit", VALUE, NULL},
    {"alpha", VALUE, NULL},
    {"beta", VALUE, NULL},
    {"x", QUANTIZER, NULL},
    {"h", QUANTIZER, NULL},
    {"w", QUANTIZER, NULL},
    {"dy", QUANTIZER, NULL},
    {"y", QUANTIZER, NULL},
    {"dx", QUANTIZER, NULL},
    {"x_given", QUANTIZER, NULL},
    {"w_given", QUANTIZER, NULL},
    {"dy_given", QUANTIZER, NULL},
    {"gate_up_given", QUANTIZER, NULL},
    {"down_given", QUANTIZER, NULL},
    {"grad", VALUE, NULL},
    {"save", VALUE, NULL},
    {"backward", VALUE, NULL},
    {"cache", FLAG, NULL},
    {"bias_later", FLAG, NULL},
    {"main_grad", VALUE, NULL},
    {"history", VALUE, "max"},
    {"margin", VALUE, "0"},
    {"reduce", FLAG, NULL},
    {"precision", VALUE, "exact"},
    {"order", VALUE, "fixed"},
    {"experts", VALUE, NULL},
    {"first", VALUE, "0"},
    {"weights", VALUE, NULL},
};
enum { KEY_COUNT = sizeof keys / sizeof keys[0] };

/* The words of a plan by key: each value's start and length. */
struct plan_words {
    const char *value[KEY_COUNT]; /* NULL if the word is absent */
    size_t length[KEY_COUNT];
};

static int find_key(const char *name, size_t length) {
    for (int i = 0; i < KEY_COUNT; ++i) {
        if (strlen(keys[i].name) == length && memcmp(keys[i].name, name, length) == 0) {
            return i;
        }
    }
    return -1;
}

static enum opaq_status split(const char *plan, struct plan_words *words, struct opaq_error *error) {
    memset(words, 0, sizeof *words);
    for (const char *at = plan; *at != '\0';) {
        const size_t length = strcspn(at, " ");
        const char *const equals = memchr(at, '=', length);
        const size_t name = equals == NULL ? length : (size_t)(equals - at);
        const int key = find_key(at, name);
        if (key < 0 || (keys[key].kind == FLAG) != (equals == NULL) || words->value[key] != NULL) {
            return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: \"%.*s\" at position %zu: %s",
                             (int)(length < 64 ? length : 64), at, (size_t)(at - plan),
                             length == 0                             ? "expected a word"
                             : key >= 0 && words->value[key] != NULL ? "came before"
                             : key >= 0 && keys[key].kind == FLAG    ? "takes no value"
                             : key >= 0                              ? "expected a value"
                                                                     : "unknown");
        }
        words->value[key] = equals == NULL ? at : equals + 1;
        words->length[key] = equals == NULL ? length : length - name - 1;
        at += length;
        if (*at == ' ' && *++at == '\0') {
            return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: the text ends in a space");
        }
    }
    return OPAQ_OK;
}

/* The key's number and the plan's words. */
static enum opaq_status read_plan(const char *operation, const char *plan, const char *key, const void *made,
                                  int *number, struct plan_words *words, struct opaq_error *error) {
    if (plan == NULL || key == NULL || made == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is NULL", operation,
                         plan == NULL  ? "plan"
                         : key == NULL ? "key"
                                       : "the buffer");
    }
    if (strlen(plan) >= OPAQ_PLAN_TEXT_BYTES) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: the text has %zu characters, at most %d are allowed",
                         strlen(plan), OPAQ_PLAN_TEXT_BYTES - 1);
    }
    *number = find_key(key, strlen(key));
    if (*number < 0) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: there is no word \"%.64s\"", key);
    }
    return split(plan, words, error);
}

/* Appends a word to the canonical text; false if it does not fit. */
static bool append(const struct plan_key *key, const char *value, size_t length, char *text, size_t *used) {
    char canonical[OPAQ_SPEC_TEXT_BYTES];
    struct opaq_spec spec;
    if (key->default_value != NULL && strlen(key->default_value) == length &&
        memcmp(key->default_value, value, length) == 0) {
        return true;
    }
    if (key->kind == QUANTIZER && opaq_spec_parse(value, length, &spec, NULL) == OPAQ_OK &&
        opaq_spec_print(&spec, canonical, sizeof canonical, NULL) == OPAQ_OK) {
        value = canonical;
        length = strlen(canonical);
    }
    const size_t room = OPAQ_PLAN_TEXT_BYTES - *used;
    const int written = key->kind == FLAG ? snprintf(text + *used, room, "%s%s", *used ? " " : "", key->name)
                                          : snprintf(text + *used, room, "%s%s=%.*s", *used ? " " : "",
                                                     key->name, (int)length, value);
    const bool fits = written >= 0 && (size_t)written < room;
    *used += fits ? (size_t)written : 0;
    return fits;
}

static enum opaq_status copy_out(const char *operation, const char *text, size_t length, char *buffer,
                                 size_t capacity, struct opaq_error *error) {
    if (capacity <= length) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: the text needs %zu bytes, the buffer has %zu",
                         operation, length + 1, capacity);
    }
    memcpy(buffer, text, length);
    buffer[length] = '\0';
    return OPAQ_OK;
}

enum opaq_status opaq_plan_set(const char *plan, const char *key, const char *value, char *made,
                               size_t capacity, struct opaq_error *error) {
    struct plan_words words = {{NULL}, {0}};
    char text[OPAQ_PLAN_TEXT_BYTES] = "";
    size_t used = 0;
    int number = 0;
    TRY(read_plan("plan_set", plan, key, made, &number, &words, error));
    const size_t length = value == NULL ? 0 : strlen(value);
    if (value != NULL && keys[number].kind != FLAG &&
        (length == 0 || length >= OPAQ_PLAN_TEXT_BYTES || strchr(value, ' ') != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_TEXT,
                         "plan: \"%s=\": expected a value without spaces, got \"%.64s\"", key, value);
    }
    words.value[number] = value;
    words.length[number] = length;
    for (int i = 0; i < KEY_COUNT; ++i) {
        if (words.value[i] != NULL && !append(&keys[i], words.value[i], words.length[i], text, &used)) {
            return opaq_fail(error, OPAQ_ERROR_TEXT, "plan: the text has more than %d characters",
                             OPAQ_PLAN_TEXT_BYTES - 1);
        }
    }
    return copy_out("plan_set", text, used, made, capacity, error);
}

enum opaq_status opaq_plan_get(const char *plan, const char *key, char *value, size_t capacity,
                               struct opaq_error *error) {
    struct plan_words words = {{NULL}, {0}};
    int number = 0;
    TRY(read_plan("plan_get", plan, key, value, &number, &words, error));
    const char *const found = words.value[number];
    return copy_out("plan_get", found == NULL ? "" : found, found == NULL ? 0 : words.length[number], value,
                    capacity, error);
}
