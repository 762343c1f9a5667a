/* opaq/pattern.h: lists of patterns for the names of modules, as configurations of checkpoints have them ("ignore",
 * "exclude_modules", "modules_to_not_convert") and --ignore takes them. Depends on status.h.
 *
 * A pattern is a glob of the whole name (* is anything, ? one character, [a-z] and [!a-z] one of a set), or "re:" and a
 * regular expression that matches from the name's beginning, as Python's re.match. Expressions have literals, ., sets,
 * \d \w \s \D \W \S, ^ $ \A \Z \b \B, groups, |, the repetitions * + ? {m,n} and their lazy forms, and look-ahead. References,
 * look-behind, flags and possessive repetition are refused. \d, \w and \s mean ASCII. Time is at most proportional to
 * the pattern's size times the name's length. */
#ifndef OPAQ_PATTERN_H
#define OPAQ_PATTERN_H

#include <stdint.h>

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

struct opaq_patterns;

/* An empty list; opaq_patterns_destroy releases it, and allows NULL. */
OPAQ_API enum opaq_status opaq_patterns_create(struct opaq_patterns **patterns, struct opaq_error *error);
OPAQ_API void opaq_patterns_destroy(struct opaq_patterns *patterns);

/* Adds a pattern behind the others; the text is not kept. At most 4096 bytes, 100 nested groups and 4096 states. */
OPAQ_API enum opaq_status opaq_patterns_add(struct opaq_patterns *patterns, const char *text,
                                            struct opaq_error *error);

/* The number of the first pattern that matches, from 0 on; -1 if none does. Names of more than 4096 bytes match none.
 * From any thread, while no pattern is added. */
OPAQ_API int64_t opaq_patterns_find(const struct opaq_patterns *patterns, const char *name);

#ifdef __cplusplus
}
#endif

#endif
