/* opaq/plan_text.h: reads and replaces single words of a plan's text. Depends on status.h. Words:
 * docs/linear.md and docs/experts.md.
 *
 * opaq_plan_set returns a canonical plan: words in a fixed order, quantizers in their canonical text, default
 * values omitted. Equal plans have equal texts. */
#ifndef OPAQ_PLAN_TEXT_H
#define OPAQ_PLAN_TEXT_H

#include <stddef.h>

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Longer than any valid plan, including the terminator. */
#define OPAQ_PLAN_TEXT_BYTES 1024

/* Writes to `made` the plan with the word `key` set to `value`; NULL removes the word. For a word without a
 * value ("cache") any non-NULL `value` sets it. Values are validated by the operator that receives the plan.
 * `made` may be `plan`. */
OPAQ_API enum opaq_status opaq_plan_set(const char *plan, const char *key, const char *value, char *made,
                                        size_t capacity, struct opaq_error *error);

/* The value of a word, "" if the plan does not have it; for a word without a value, its key. */
OPAQ_API enum opaq_status opaq_plan_get(const char *plan, const char *key, char *value, size_t capacity,
                                        struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
