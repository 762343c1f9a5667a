/* cli/read/name_pattern.h: which modules are meant, by patterns of opaq/pattern.h. */
#ifndef OPAQ_CLI_READ_NAME_PATTERN_H
#define OPAQ_CLI_READ_NAME_PATTERN_H

#include <stdbool.h>

#include "opaq/pattern.h"

struct name_patterns {
    struct opaq_patterns *list; /* NULL: none */
    int64_t count;
};

enum opaq_status patterns_add(struct name_patterns *patterns, const char *text, struct opaq_error *error);
bool patterns_match(const struct name_patterns *patterns, const char *name);
void patterns_free(struct name_patterns *patterns);

#endif
