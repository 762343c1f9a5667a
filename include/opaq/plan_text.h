/* opaq/plan_text.h: plans as texts: reading and exchanging single words. Depends on status.h. Words: docs/linear.md and
 * docs/experts.md.
 *
 * A plan that is made by opaq_plan_set is canonical: its words stand in one order, quantizers in their canonical text, and
 * words that say what holds without them are left out. Equal plans have equal texts. */
#ifndef OPAQ_PLAN_TEXT_H
#define OPAQ_PLAN_TEXT_H

#include <stddef.h>

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Longer than every plan that an operator takes, the terminator included. */
#define OPAQ_PLAN_TEXT_BYTES 1024

/* `plan` with the word `key` set to `value`, replaced if it is there; NULL takes it out. The value of a word that has none
 * ("cache") is not looked at. Values are checked by the operator that gets the plan. `made` may be `plan`. */
OPAQ_API enum opaq_status opaq_plan_set(const char *plan, const char *key, const char *value, char *made,
                                        size_t capacity, struct opaq_error *error);

/* The value of a word, "" if it is not there; of a word that has none, its key. */
OPAQ_API enum opaq_status opaq_plan_get(const char *plan, const char *key, char *value, size_t capacity,
                                        struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
