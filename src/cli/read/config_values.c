/* cli/read/config_values.c: see config_values.h. */
#include "cli/read/config_values.h"

#include <stdbool.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"

enum { DEEPEST = 60 }; /* deeper values are dropped; no field that opaq reads is that deep */

struct value_list {
    struct opaq_config_value *values;
    size_t count;
    size_t capacity;
};

/* A string that contains a zero byte becomes U+FFFD, which equals no name. */
static const char *string_of(yyjson_val *value) {
    const char *const text = yyjson_get_str(value);
    return strlen(text) == yyjson_get_len(value) ? text : "\xEF\xBF\xBD";
}

/* False for a fraction, an exponent, or more than 18 digits, which may overflow an int64. */
static bool integer_of(const char *text, size_t length, int64_t *integer) {
    const size_t first = length > 0 && text[0] == '-' ? 1 : 0;
    int64_t value = 0;
    if (length == first || length - first > 18) {
        return false;
    }
    for (size_t i = first; i < length; ++i) {
        if (text[i] < '0' || text[i] > '9') {
            return false;
        }
        value = value * 10 + (text[i] - '0');
    }
    *integer = first ? -value : value;
    return true;
}

static void add_value(struct value_list *list, yyjson_val *key, yyjson_val *value, int32_t depth) {
    struct opaq_config_value made = {.depth = depth, .key = key == NULL ? NULL : string_of(key)};
    if (yyjson_is_bool(value)) {
        made.kind = OPAQ_JSON_BOOLEAN;
        made.integer = yyjson_get_bool(value);
    } else if (yyjson_is_raw(value)) { /* a number as text (json.h), not zero-terminated */
        made.kind = integer_of(yyjson_get_raw(value), yyjson_get_len(value), &made.integer) ? OPAQ_JSON_INTEGER
                                                                                            : OPAQ_JSON_NUMBER;
        made.text = "a number";
    } else if (yyjson_is_str(value)) {
        made.kind = OPAQ_JSON_STRING;
        made.text = string_of(value);
    } else {
        made.kind = yyjson_is_arr(value)   ? OPAQ_JSON_LIST
                    : yyjson_is_obj(value) ? OPAQ_JSON_OBJECT
                                           : OPAQ_JSON_NULL;
    }
    list->values = grow_array(list->values, list->count, &list->capacity, sizeof *list->values);
    list->values[list->count++] = made;
}

static void add_all(struct value_list *list, yyjson_val *key, yyjson_val *value, int32_t depth) {
    size_t index = 0;
    size_t count = 0;
    yyjson_val *name = NULL;
    yyjson_val *child = NULL;
    add_value(list, key, value, depth);
    if (depth == DEEPEST) {
        return;
    }
    if (yyjson_is_arr(value)) {
        yyjson_arr_foreach(value, index, count, child) { add_all(list, NULL, child, depth + 1); }
    } else if (yyjson_is_obj(value)) {
        yyjson_obj_foreach(value, index, count, name, child) { add_all(list, name, child, depth + 1); }
    }
}

struct opaq_config *config_of_json(yyjson_val *quantization) {
    struct value_list list = {NULL, 0, 0};
    struct opaq_config *config = NULL;
    if (quantization == NULL) {
        return NULL;
    }
    add_all(&list, NULL, quantization, 0);
    (void)opaq_config_read(list.values, (int64_t)list.count, &config, NULL);
    free(list.values);
    return config;
}

int layout_of_config(yyjson_val *quantization) {
    struct value_list list = {NULL, 0, 0};
    if (quantization == NULL) {
        return -1;
    }
    add_all(&list, NULL, quantization, 0);
    const int layout = opaq_config_layout(list.values, (int64_t)list.count);
    free(list.values);
    return layout;
}
