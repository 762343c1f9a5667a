/* cli/name_pattern.h: which modules are meant. A pattern is a module's name, a glob of it (* and ?), or "re:" and a
 * regular expression that matches from the name's beginning, as compressed-tensors reads them. */
#ifndef OPAQ_CLI_NAME_PATTERN_H
#define OPAQ_CLI_NAME_PATTERN_H

#include <regex.h>
#include <stdbool.h>
#include <stddef.h>

#include "opaq/status.h"

struct name_pattern {
    const char *text;
    bool is_regular; /* an expression */
    regex_t expression;
};

struct name_patterns {
    struct name_pattern *items;
    size_t count;
};

/* Adds one; the text is kept by the caller. */
enum opaq_status patterns_add(struct name_patterns *patterns, const char *text, struct opaq_error *error);
bool patterns_match(const struct name_patterns *patterns, const char *name);
void patterns_free(struct name_patterns *patterns);

#endif
