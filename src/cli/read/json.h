/* cli/read/json.h: JSON from outside, read with suspicion. Numbers stay the text they were, so that what is written again is
 * what was read. */
#ifndef OPAQ_CLI_READ_JSON_H
#define OPAQ_CLI_READ_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <yyjson.h>

#include "opaq/status.h"

#define JSON_DEPTH_LIMIT 64

/* Refuses what is no JSON or no UTF-8, a nesting deeper than the limit, and a key that an object has twice. `file` is
 * for the messages. The document is released with yyjson_doc_free. */
enum opaq_status json_read(const char *bytes, size_t count, const char *file, yyjson_doc **document,
                           struct opaq_error *error);

/* A number without sign, fraction and exponent that fits; false for anything else. */
bool json_natural(yyjson_val *value, uint64_t *number);

/* The value of a key if it is a text, else NULL. The text of a number or a text of `value` itself. One with a zero in it
 * is none. */
const char *json_member_text(yyjson_val *object, const char *key);
const char *json_text(yyjson_val *value);

/* Whether a text can be shown and compared as it is: no control characters, and not empty. */
bool json_is_clean(yyjson_val *value);

#endif
