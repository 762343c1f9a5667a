/* cli/read/name_pattern.h: sets of modules, given by patterns of opaq/pattern.h: those of an option, and the modules
 * that a quantization_config excludes. */
#ifndef OPAQ_CLI_READ_NAME_PATTERN_H
#define OPAQ_CLI_READ_NAME_PATTERN_H

#include <stdbool.h>
#include <stddef.h>
#include <yyjson.h>

#include "opaq/pattern.h"

struct name_patterns {
    struct opaq_patterns *list; /* NULL: none */
    int64_t count;
};

enum opaq_status patterns_add(struct name_patterns *patterns, const char *text, struct opaq_error *error);
bool patterns_match(const struct name_patterns *patterns, const char *name);
void patterns_free(struct name_patterns *patterns);

struct ignore_list {
    struct name_patterns patterns;
    const char **texts; /* the patterns, in memory of the configuration */
    size_t capacity;
    struct opaq_error
        refused; /* error of the first entry that is not a pattern and was skipped; OPAQ_OK if none was */
};

/* Entries of the configuration's lists (ignore, exclude_modules, modules_to_not_convert), patterns of opaq/pattern.h. */
void ignore_list_make(yyjson_val *quantization, struct ignore_list *list);
void ignore_list_free(struct ignore_list *list);

/* The entry that matches a module; NULL if none does. */
const char *ignore_list_find(const struct ignore_list *list, const char *module);

#endif
