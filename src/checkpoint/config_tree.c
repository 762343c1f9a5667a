/* checkpoint/config_tree.c: see config_tree.h. */
#include "checkpoint/config_tree.h"

#include <stdio.h>
#include <string.h>

#include "base/try.h"
#include "opaq/status.h"

static const char *const kind_names[] = {"null",     "a boolean", "an integer", "a number",
                                         "a string", "a list",    "an object",  "nothing that JSON has"};
enum { KIND_COUNT = sizeof kind_names / sizeof kind_names[0] };

static bool is_container(int32_t kind) { return kind == OPAQ_JSON_LIST || kind == OPAQ_JSON_OBJECT; }

enum opaq_status tree_check(const struct config_tree *tree, struct opaq_error *error) {
    if (tree->values == NULL || tree->count < 1 || tree->values[0].depth != 0) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "config_read: there are no values of depth 0");
    }
    int32_t kind_at[64] = {0}; /* kinds of the enclosing values, by depth */
    for (int64_t i = 0; i < tree->count; ++i) {
        const struct opaq_config_value *const value = &tree->values[i];
        const bool is_inside = i > 0 && value->depth >= 1 && value->depth < 64 &&
                               value->depth <= tree->values[i - 1].depth + 1 &&
                               is_container(kind_at[value->depth - 1]);
        const bool has_key = is_inside && kind_at[value->depth - 1] == OPAQ_JSON_OBJECT;
        const bool needs_text = value->kind == OPAQ_JSON_STRING || value->kind == OPAQ_JSON_NUMBER ||
                                value->kind == OPAQ_JSON_OTHER;
        if ((i > 0 && !is_inside) || value->kind < 0 || value->kind >= KIND_COUNT ||
            (has_key && value->key == NULL) || (needs_text && value->text == NULL)) {
            return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                             "config_read: value %lld of depth %d and kind %d does not belong there",
                             (long long)i, value->depth, value->kind);
        }
        kind_at[value->depth] = value->kind;
    }
    return OPAQ_OK;
}

int64_t tree_inside(const struct config_tree *tree, int64_t value) {
    const int64_t next = value + 1;
    return value >= 0 && next < tree->count && tree->values[next].depth > tree->values[value].depth ? next : -1;
}

int64_t tree_next(const struct config_tree *tree, int64_t value) {
    const int32_t depth = tree->values[value].depth;
    do {
        ++value;
    } while (value < tree->count && tree->values[value].depth > depth);
    return value < tree->count && tree->values[value].depth == depth ? value : -1;
}

int64_t tree_find(const struct config_tree *tree, int64_t object, const char *key) {
    int64_t found =
        object >= 0 && tree->values[object].kind == OPAQ_JSON_OBJECT ? tree_inside(tree, object) : -1;
    while (found >= 0 && strcmp(tree->values[found].key, key) != 0) {
        found = tree_next(tree, found);
    }
    return found;
}

static int32_t kind_of(const struct config_tree *tree, int64_t value) {
    return value < 0 ? OPAQ_JSON_NULL : tree->values[value].kind;
}

const char *tree_kind_name(const struct config_tree *tree, int64_t value) {
    return kind_names[kind_of(tree, value)];
}

enum opaq_status tree_expect(const struct config_tree *tree, int64_t field, enum opaq_json_kind kind,
                             struct opaq_error *error) {
    if (kind_of(tree, field) == OPAQ_JSON_NULL || kind_of(tree, field) == (int32_t)kind) {
        return OPAQ_OK;
    }
    char shown[SHOWN_BYTES];
    return opaq_fail(error, OPAQ_ERROR_TEXT, "the quantization_config's %.64s is %s, %s, expected %s",
                     tree->values[field].key, tree_show(tree, field, shown), tree_kind_name(tree, field),
                     kind_names[kind]);
}

enum opaq_status tree_field(const struct config_tree *tree, int64_t object, const char *key,
                            enum opaq_json_kind kind, int64_t *value, struct opaq_error *error) {
    const int64_t found = tree_find(tree, object, key);
    *value = kind_of(tree, found) == OPAQ_JSON_NULL ? -1 : found;
    return tree_expect(tree, *value, kind, error);
}

enum opaq_status tree_string(const struct config_tree *tree, int64_t object, const char *key,
                             const char **string, struct opaq_error *error) {
    int64_t value = -1;
    const enum opaq_status status = tree_field(tree, object, key, OPAQ_JSON_STRING, &value, error);
    *string = status != OPAQ_OK || value < 0 ? NULL : tree->values[value].text;
    return status;
}

enum opaq_status tree_integer(const struct config_tree *tree, int64_t object, const char *key,
                              enum opaq_json_kind kind, int64_t absent, int64_t *integer,
                              struct opaq_error *error) {
    int64_t value = -1;
    const enum opaq_status status = tree_field(tree, object, key, kind, &value, error);
    *integer = status != OPAQ_OK || value < 0 ? absent : tree->values[value].integer;
    return status;
}

enum opaq_status tree_strings(const struct config_tree *tree, int64_t object, const char *key, int64_t *list,
                              struct opaq_error *error) {
    TRY(tree_field(tree, object, key, OPAQ_JSON_LIST, list, error));
    for (int64_t i = tree_inside(tree, *list); i >= 0; i = tree_next(tree, i)) {
        if (kind_of(tree, i) != OPAQ_JSON_STRING) {
            char shown[SHOWN_BYTES];
            return opaq_fail(error, OPAQ_ERROR_TEXT,
                             "the quantization_config's %s has %s, %s, expected a list of strings", key,
                             tree_show(tree, i, shown), tree_kind_name(tree, i));
        }
    }
    return OPAQ_OK;
}

bool tree_holds(const struct config_tree *tree, int64_t value) {
    switch (kind_of(tree, value)) {
    case OPAQ_JSON_NULL:
        return false;
    case OPAQ_JSON_BOOLEAN:
    case OPAQ_JSON_INTEGER:
        return tree->values[value].integer != 0;
    case OPAQ_JSON_STRING:
        return tree->values[value].text[0] != '\0';
    case OPAQ_JSON_LIST:
    case OPAQ_JSON_OBJECT:
        return tree_inside(tree, value) >= 0;
    default:
        return true;
    }
}

bool tree_is_pair(const struct config_tree *tree, int64_t list, int64_t first, int64_t second) {
    const int64_t a = tree_inside(tree, list);
    const int64_t b = a < 0 ? -1 : tree_next(tree, a);
    return b >= 0 && tree_next(tree, b) < 0 && kind_of(tree, a) == OPAQ_JSON_INTEGER &&
           kind_of(tree, b) == OPAQ_JSON_INTEGER && tree->values[a].integer == first &&
           tree->values[b].integer == second;
}

/* ---- showing ---- */

struct shown {
    char *text;
    size_t used; /* length of the complete text, which may exceed the buffer */
};

static void add(struct shown *shown, const char *text) {
    const size_t room = shown->used < SHOWN_BYTES ? SHOWN_BYTES - shown->used : 0;
    if (room > 0) {
        (void)snprintf(shown->text + shown->used, room, "%s", text);
    }
    shown->used += strlen(text);
}

static void show_scalar(const struct opaq_config_value *value, struct shown *shown) {
    char number[24];
    switch (value->kind) {
    case OPAQ_JSON_NULL:
        add(shown, "null");
        break;
    case OPAQ_JSON_BOOLEAN:
        add(shown, value->integer ? "true" : "false");
        break;
    case OPAQ_JSON_INTEGER:
        (void)snprintf(number, sizeof number, "%lld", (long long)value->integer);
        add(shown, number);
        break;
    case OPAQ_JSON_STRING:
        add(shown, "\"");
        add(shown, value->text);
        add(shown, "\"");
        break;
    default:
        add(shown, value->text);
    }
}

/* A value and its members as JSON, without recursion: a bracket closes where the depth decreases. */
const char *tree_show(const struct config_tree *tree, int64_t value, char text[SHOWN_BYTES]) {
    static const struct opaq_config_value absent = {.kind = OPAQ_JSON_NULL};
    char closing[64];
    struct shown shown = {text, 0};
    const int32_t outer = value < 0 ? 0 : tree->values[value].depth;
    int32_t depth = outer;
    int64_t at = value;
    bool is_first = true;
    text[0] = '\0';
    if (value < 0) {
        show_scalar(&absent, &shown);
        return text;
    }
    do {
        const struct opaq_config_value *const one = &tree->values[at];
        for (; depth > one->depth; --depth) {
            add(&shown, (const char[]){closing[depth - 1], '\0'});
            is_first = false;
        }
        add(&shown, is_first ? "" : ", ");
        if (one->key != NULL && at != value) {
            add(&shown, "\"");
            add(&shown, one->key);
            add(&shown, "\": ");
        }
        is_first = is_container(one->kind);
        if (is_first) {
            add(&shown, one->kind == OPAQ_JSON_LIST ? "[" : "{");
            closing[depth++] = one->kind == OPAQ_JSON_LIST ? ']' : '}';
        } else {
            show_scalar(one, &shown);
        }
        ++at;
    } while (at < tree->count && tree->values[at].depth > outer && shown.used < SHOWN_BYTES);
    for (; depth > outer; --depth) {
        add(&shown, (const char[]){closing[depth - 1], '\0'});
    }
    if (shown.used >= SHOWN_BYTES) {
        memcpy(text + SHOWN_BYTES - 4, "...", 4);
    }
    return text;
}
