/* cli/read/name_pattern.c: see name_pattern.h. */
#include "cli/read/name_pattern.h"

#include <stddef.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"
#include "cli/cli_try.h"

enum opaq_status patterns_add(struct name_patterns *patterns, const char *text, struct opaq_error *error) {
    if (patterns->list == NULL) {
        CLI_TRY(opaq_patterns_create(&patterns->list, error));
    }
    CLI_TRY(opaq_patterns_add(patterns->list, text, error));
    ++patterns->count;
    return OPAQ_OK;
}

bool patterns_match(const struct name_patterns *patterns, const char *name) {
    return patterns->list != NULL && opaq_patterns_find(patterns->list, name) >= 0;
}

void patterns_free(struct name_patterns *patterns) {
    opaq_patterns_destroy(patterns->list);
    *patterns = (struct name_patterns){NULL, 0};
}

/* ---- lists of a quantization_config ---- */

static void add_entry(struct ignore_list *list, const char *text) {
    const size_t number = (size_t)list->patterns.count;
    struct opaq_error error;
    if (patterns_add(&list->patterns, text, &error) == OPAQ_OK) {
        list->texts = grow_array(list->texts, number, &list->capacity, sizeof *list->texts);
        list->texts[number] = text;
    } else if (list->refused.status == OPAQ_OK) {
        list->refused = error;
    }
}

void ignore_list_make(yyjson_val *quantization, struct ignore_list *list) {
    static const char *const keys[] = {"ignore", "exclude_modules", "modules_to_not_convert"};
    *list = (struct ignore_list){.refused = {OPAQ_OK, ""}};
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; ++k) {
        size_t index = 0;
        size_t count = 0;
        yyjson_val *entry = NULL;
        yyjson_val *const entries = yyjson_obj_get(quantization, keys[k]);
        if (entries == NULL) { /* yyjson_arr_foreach does not accept NULL */
            continue;
        }
        yyjson_arr_foreach(entries, index, count, entry) {
            if (yyjson_is_str(entry) && strlen(yyjson_get_str(entry)) == yyjson_get_len(entry)) {
                add_entry(list, yyjson_get_str(entry));
            }
        }
    }
}

void ignore_list_free(struct ignore_list *list) {
    patterns_free(&list->patterns);
    free(list->texts);
    *list = (struct ignore_list){.refused = {OPAQ_OK, ""}};
}

const char *ignore_list_find(const struct ignore_list *list, const char *module) {
    const int64_t found = list->patterns.list == NULL ? -1 : opaq_patterns_find(list->patterns.list, module);
    return found < 0 ? NULL : list->texts[found];
}
