/* format/decimal.c: decimal text without the locale.
 *
 * strtof and snprintf round correctly but use the locale's decimal point and the thread's rounding mode. So a
 * number is handed to strtof without a point, as digits and an exponent ("1.5e-12" as "15e-13"), the point in
 * snprintf's output is skipped, and both run in the library's floating-point environment. */
#include "format/decimal.h"

#include <errno.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>

#include "base/float_bits.h"
#include "base/fp_environment.h"

enum { INPUT_LIMIT = 40 };

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static float read_scaled(const char *digits, int exponent) {
    char buffer[INPUT_LIMIT + 16];
    const int saved_errno = errno;
    (void)snprintf(buffer, sizeof buffer, "%se%d", digits, exponent);
    const uint64_t saved = fp_environment_enter();
    const float value = strtof(buffer, NULL);
    fp_environment_leave(saved);
    errno = saved_errno;
    return value;
}

bool decimal_parse(const char *text, size_t length, float *value) {
    char digits[INPUT_LIMIT + 1];
    size_t count = 0;
    size_t i = 0;
    int exponent = 0;
    if (length > INPUT_LIMIT) {
        return false;
    }
    while (i < length && is_digit(text[i])) {
        digits[count++] = text[i++];
    }
    if (count == 0) {
        return false;
    }
    if (i < length && text[i] == '.') {
        const size_t first = ++i;
        while (i < length && is_digit(text[i])) {
            digits[count++] = text[i++];
            --exponent;
        }
        if (i == first) {
            return false;
        }
    }
    if (i < length && text[i] == 'e') {
        const bool negative = ++i < length && text[i] == '-';
        i += negative;
        const size_t first = i;
        int written = 0;
        while (i < length && is_digit(text[i])) {
            written = written < 10000 ? written * 10 + (text[i] - '0') : written;
            ++i;
        }
        if (i == first) {
            return false;
        }
        exponent += negative ? -written : written;
    }
    digits[count] = '\0';
    const float read = i == length ? read_scaled(digits, exponent) : float_nan();
    if (!float_is_finite(read)) {
        return false;
    }
    *value = read;
    return true;
}

void decimal_print(float value, char text[DECIMAL_TEXT_BYTES]) {
    char scientific[48];
    char digits[16];
    int exponent = 0;
    size_t count = 0;
    for (int precision = 0; precision <= 8; ++precision) {
        const uint64_t saved = fp_environment_enter();
        (void)snprintf(scientific, sizeof scientific, "%.*e", precision, (double)value);
        fp_environment_leave(saved);
        const char *p = scientific;
        count = 0;
        for (; *p != 'e'; ++p) {
            if (is_digit(*p) && count < sizeof digits - 1) {
                digits[count++] = *p;
            }
        }
        digits[count] = '\0';
        exponent = (int)strtol(p + 1, NULL, 10);
        if (float_to_bits(read_scaled(digits, exponent - precision)) == float_to_bits(value)) {
            break;
        }
    }
    const char *point = count > 1 ? "." : "";
    if (exponent == 0) {
        (void)snprintf(text, DECIMAL_TEXT_BYTES, "%c%s%s", digits[0], point, digits + 1);
    } else {
        (void)snprintf(text, DECIMAL_TEXT_BYTES, "%c%s%se%d", digits[0], point, digits + 1, exponent);
    }
}
