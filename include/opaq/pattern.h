/* opaq/pattern.h: lists of patterns for module names, as used in checkpoint configurations ("ignore",
 * "exclude_modules", "modules_to_not_convert") and by --ignore. Depends on status.h.
 *
 * A pattern is a glob of the whole name (* matches any text, ? one character, [a-z] and [!a-z] one of a set),
 * or "re:" followed by a regular expression that matches from the start of the name, as Python's re.match.
 * Supported are literals, ., sets, \d \w \s \D \W \S, ^ $ \A \Z \b \B, groups, |, the repetitions * + ? {m,n}
 * and their lazy forms, and look-ahead; rejected are back-references, look-behind, flags and possessive
 * repetition. \d, \w and \s are ASCII-only. Matching takes at most the pattern's size times the name's length. */
#ifndef OPAQ_PATTERN_H
#define OPAQ_PATTERN_H

#include <stdint.h>

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct opaq_patterns;

/* Creates an empty list. opaq_patterns_destroy releases it; NULL is allowed. */
OPAQ_API enum opaq_status opaq_patterns_create(struct opaq_patterns **patterns, struct opaq_error *error);
OPAQ_API void opaq_patterns_destroy(struct opaq_patterns *patterns);

/* Appends a pattern; the text is copied. At most 4096 bytes, 100 nested groups and 4096 states. */
OPAQ_API enum opaq_status opaq_patterns_add(struct opaq_patterns *patterns, const char *text,
                                            struct opaq_error *error);

/* The index of the first pattern that matches; -1 if none does. Names longer than 4096 bytes match none. Safe
 * from any thread as long as no pattern is being added. */
OPAQ_API int64_t opaq_patterns_find(const struct opaq_patterns *patterns, const char *name);

#ifdef __cplusplus
}
#endif

#endif
