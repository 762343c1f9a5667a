/* cli/read/json.h: reads untrusted JSON. Numbers are kept as text, so that writing them again gives what was read. */
#ifndef OPAQ_CLI_READ_JSON_H
#define OPAQ_CLI_READ_JSON_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <yyjson.h>

#include "opaq/status.h"

#define JSON_DEPTH_LIMIT 64

/* Fails on invalid JSON or UTF-8, on nesting deeper than the limit, and on duplicate keys. `file` is for messages. The
 * document is released with yyjson_doc_free. */
enum opaq_status json_read(const char *bytes, size_t count, const char *file, yyjson_doc **document,
                           struct opaq_error *error);

/* A number without sign, fraction and exponent that fits in 64 bits; false for anything else. */
bool json_natural(yyjson_val *value, uint64_t *number);

/* The value of a key if it is a string, else NULL; the text of a string or number. NULL if it contains a zero byte. */
const char *json_member_text(yyjson_val *object, const char *key);
const char *json_text(yyjson_val *value);

/* Whether a string is not empty and has no control characters. */
bool json_is_clean(yyjson_val *value);

#endif
