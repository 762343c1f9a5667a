/* cli/read/name_pattern.c: see name_pattern.h. */
#include "cli/read/name_pattern.h"

#include <stddef.h>

enum opaq_status patterns_add(struct name_patterns *patterns, const char *text, struct opaq_error *error) {
    enum opaq_status status = patterns->list == NULL ? opaq_patterns_create(&patterns->list, error) : OPAQ_OK;
    if (status == OPAQ_OK) {
        status = opaq_patterns_add(patterns->list, text, error);
    }
    patterns->count += status == OPAQ_OK;
    return status;
}

bool patterns_match(const struct name_patterns *patterns, const char *name) {
    return patterns->list != NULL && opaq_patterns_find(patterns->list, name) >= 0;
}

void patterns_free(struct name_patterns *patterns) {
    opaq_patterns_destroy(patterns->list);
    *patterns = (struct name_patterns){NULL, 0};
}
