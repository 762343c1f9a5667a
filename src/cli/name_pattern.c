/* cli/name_pattern.c: see name_pattern.h. */
#include "cli/name_pattern.h"

#include <fnmatch.h>
#include <stdlib.h>
#include <string.h>

#include "cli/cli_memory.h"

static const char regular[] = "re:";

enum opaq_status patterns_add(struct name_patterns *patterns, const char *text, struct opaq_error *error) {
    struct name_pattern pattern = {.text = text};
    pattern.is_regular = strncmp(text, regular, strlen(regular)) == 0;
    if (pattern.is_regular) {
        struct text anchored = {0};
        text_print(&anchored, "^(%s)", text + strlen(regular));
        const int code = regcomp(&pattern.expression, text_get(&anchored), REG_EXTENDED | REG_NOSUB);
        text_free(&anchored);
        if (code != 0) {
            char why[128];
            regerror(code, &pattern.expression, why, sizeof why);
            return opaq_fail(error, OPAQ_ERROR_TEXT, "the pattern \"%s\" is no regular expression: %s", text,
                             why);
        }
    }
    patterns->items = realloc_array(patterns->items, patterns->count + 1, sizeof *patterns->items);
    patterns->items[patterns->count++] = pattern;
    return OPAQ_OK;
}

bool patterns_match(const struct name_patterns *patterns, const char *name) {
    for (size_t i = 0; i < patterns->count; ++i) {
        const struct name_pattern *const pattern = &patterns->items[i];
        const bool matches = pattern->is_regular ? regexec(&pattern->expression, name, 0, NULL, 0) == 0
                                                 : fnmatch(pattern->text, name, 0) == 0;
        if (matches) {
            return true;
        }
    }
    return false;
}

void patterns_free(struct name_patterns *patterns) {
    for (size_t i = 0; i < patterns->count; ++i) {
        if (patterns->items[i].is_regular) {
            regfree(&patterns->items[i].expression);
        }
    }
    free(patterns->items);
    *patterns = (struct name_patterns){NULL, 0};
}
