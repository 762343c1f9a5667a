/* cli/config_ignore.c: see config_ignore.h. */
#include "cli/config_ignore.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"

enum { LONGEST_ENTRY = 1000, MOST_REPETITIONS = 10 };

/* Each repetition of a repetition doubles what the C library's compiler does: "a****" would never end. */
static bool is_costly(const char *python) {
    int repetitions = 0;
    for (const char *at = python; *at != '\0'; ++at) {
        repetitions += strchr("*+?", *at) != NULL;
        if (strchr("*+?", *at) != NULL && at[1] != '\0' && strchr("*+?", at[1]) != NULL) {
            return true;
        }
    }
    return repetitions > MOST_REPETITIONS;
}

/* Python's notation in POSIX's, as far as configurations use it. False for what is costly or different: nothing is then
 * known. */
static bool translate(const char *python, struct text *posix) {
    text_add(posix, "^(", 2); /* re.match holds at the start only */
    if (strchr(python, '{') != NULL || is_costly(python)) {
        return false;
    }
    for (; *python != '\0'; ++python) {
        if (strncmp(python, "(?:", 3) == 0) {
            text_add(posix, "(", 1);
            python += 2;
        } else if (strncmp(python, "(?", 2) == 0 || strncmp(python, "*?", 2) == 0 ||
                   strncmp(python, "+?", 2) == 0) {
            return false;
        } else if (*python != '\\') {
            text_add(posix, python, 1);
        } else {
            ++python;
            if (*python == 'd') {
                text_print(posix, "[0-9]");
            } else if (*python == 'w') {
                text_print(posix, "[A-Za-z0-9_]");
            } else if (*python != '\0' && strchr(".^$*+?()[]|\\-/", *python) != NULL) {
                text_print(posix, "\\%c", *python);
            } else {
                return false;
            }
        }
    }
    text_add(posix, ")", 1);
    return true;
}

static bool compile(const char *python, regex_t *expression) {
    struct text posix = {0};
    const bool is_compiled =
        translate(python, &posix) && regcomp(expression, text_get(&posix), REG_EXTENDED | REG_NOSUB) == 0;
    text_free(&posix);
    return is_compiled;
}

static void add_entry(struct ignore_list *list, const char *text) {
    static const char mark[] = "re:";
    struct ignore_entry entry = {.text = text, .is_regular = strncmp(text, mark, strlen(mark)) == 0};
    if (entry.is_regular && !compile(text + strlen(mark), &entry.expression)) {
        return;
    }
    list->entries = realloc_array(list->entries, list->count + 1, sizeof *list->entries);
    list->entries[list->count++] = entry;
}

void ignore_list_make(yyjson_val *quantization, struct ignore_list *list) {
    static const char *const keys[] = {"ignore", "exclude_modules", "modules_to_not_convert"};
    *list = (struct ignore_list){NULL, 0};
    for (size_t k = 0; k < sizeof keys / sizeof keys[0]; ++k) {
        size_t index = 0;
        size_t count = 0;
        yyjson_val *entry = NULL;
        yyjson_val *const entries = yyjson_obj_get(quantization, keys[k]);
        if (entries == NULL) { /* the loop is undefined for it */
            continue;
        }
        yyjson_arr_foreach(entries, index, count, entry) {
            if (yyjson_is_str(entry) && yyjson_get_len(entry) <= LONGEST_ENTRY) {
                add_entry(list, yyjson_get_str(entry));
            }
        }
    }
}

void ignore_list_free(struct ignore_list *list) {
    for (size_t i = 0; i < list->count; ++i) {
        if (list->entries[i].is_regular) {
            regfree(&list->entries[i].expression);
        }
    }
    free(list->entries);
    *list = (struct ignore_list){NULL, 0};
}

const char *ignore_list_find(const struct ignore_list *list, const char *module) {
    for (size_t i = 0; i < list->count; ++i) {
        const struct ignore_entry *const entry = &list->entries[i];
        const bool matches = entry->is_regular ? regexec(&entry->expression, module, 0, NULL, 0) == 0
                             : strchr(entry->text, '*') != NULL ? fnmatch(entry->text, module, 0) == 0
                                                                : strcmp(entry->text, module) == 0;
        if (matches) {
            return entry->text;
        }
    }
    return NULL;
}
