/* cli/console/number_text.c: see number_text.h. */
#include "cli/console/number_text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

const char *number_count(uint64_t count, char text[NUMBER_TEXT_BYTES]) {
    char digits[NUMBER_TEXT_BYTES];
    const int length = snprintf(digits, sizeof digits, "%" PRIu64, count);
    size_t at = 0;
    for (int i = 0; i < length; ++i) {
        if (i != 0 && (length - i) % 3 == 0) {
            text[at++] = ',';
        }
        text[at++] = digits[i];
    }
    text[at] = '\0';
    return text;
}

const char *number_bits(uint64_t bytes, uint64_t elements, char text[NUMBER_TEXT_BYTES]) {
    if (elements == 0) {
        snprintf(text, NUMBER_TEXT_BYTES, "-");
    } else {
        snprintf(text, NUMBER_TEXT_BYTES, "%.3f", (double)bytes * 8 / (double)elements);
    }
    return text;
}

const char *number_decibels(double decibels, char text[NUMBER_TEXT_BYTES]) {
    if (isfinite(decibels)) {
        snprintf(text, NUMBER_TEXT_BYTES, "%.2f", decibels);
    } else {
        snprintf(text, NUMBER_TEXT_BYTES, "%s", isnan(decibels) ? "nan" : decibels > 0 ? "inf" : "-inf");
    }
    return text;
}

void number_shape(const int64_t *shape, int rank, struct text *text) {
    text_print(text, "[");
    for (int i = 0; i < rank; ++i) {
        text_print(text, "%s%" PRId64, i == 0 ? "" : ", ", shape[i]);
    }
    text_print(text, "]");
}
