/* format/decimal.h: a float32 as short decimal text and back, whatever the locale and rounding mode.
 * Depends on nothing. */
#ifndef OPAQ_FORMAT_DECIMAL_H
#define OPAQ_FORMAT_DECIMAL_H

#include <stdbool.h>
#include <stddef.h>

enum { DECIMAL_TEXT_BYTES = 24, DECIMAL_INPUT_LIMIT = 127 };

/* digits [ "." digits ] [ "e" [ "-" ] digits ], the whole of `text`; false if it is not that, is longer than
 * DECIMAL_INPUT_LIMIT, or is beyond the largest float. */
bool decimal_parse(const char *text, size_t length, float *value);

/* "2.5e-1", or "2.5" where the exponent is 0: the fewest digits that read back as `value`, which is finite and above
 * 0. */
void decimal_print(float value, char text[DECIMAL_TEXT_BYTES]);

#endif
