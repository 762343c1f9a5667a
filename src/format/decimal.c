/* format/decimal.c: decimal text independent of the locale.
 *
 * strtof and snprintf round correctly but use the locale's decimal point and the thread's rounding mode. So
 * strtof receives a number without a point, as digits and an exponent ("1.5e-12" as "15e-13"), the point in
 * snprintf's output is skipped, and both run with rounding to nearest. */
#include "format/decimal.h"

#include <errno.h>
#include <fenv.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/float_bits.h"
#include "base/fp_environment.h"

/* The library's floating-point environment, plus the rounding mode of the x87, which glibc uses. */
struct environment {
    uint64_t registers;
    int mode;
};

static struct environment enter(void) {
    const int mode = fegetround();
    (void)fesetround(FE_TONEAREST);
    return (struct environment){fp_environment_enter(), mode};
}

static void leave(struct environment saved) {
    fp_environment_leave(saved.registers);
    (void)fesetround(saved.mode);
}

static bool is_digit(char c) { return c >= '0' && c <= '9'; }

static float read_scaled(const char *digits, int exponent) {
    char buffer[DECIMAL_INPUT_LIMIT + 16];
    const int saved_errno = errno;
    (void)snprintf(buffer, sizeof buffer, "%se%d", digits, exponent);
    const struct environment saved = enter();
    const float value = strtof(buffer, NULL);
    leave(saved);
    errno = saved_errno;
    return value;
}

bool decimal_parse(const char *text, size_t length, float *value) {
    char digits[DECIMAL_INPUT_LIMIT + 1];
    size_t count = 0;
    size_t i = 0;
    int exponent = 0;
    if (length > DECIMAL_INPUT_LIMIT) {
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

/* The digits of value rounded to `precision` decimals in scientific form, and its exponent; up to 9 digits. */
static int round_to_digits(float value, int precision, char digits[16]) {
    char scientific[48];
    size_t count = 0;
    const struct environment saved = enter();
    (void)snprintf(scientific, sizeof scientific, "%.*e", precision, (double)value);
    leave(saved);
    const char *p = scientific;
    for (; *p != 'e'; ++p) {
        if (is_digit(*p) && count < 15) {
            digits[count++] = *p;
        }
    }
    digits[count] = '\0';
    return (int)strtol(p + 1, NULL, 10);
}

/* The next larger number with the same number of digits; false if there is none. */
static bool next_digits(char *digits) {
    for (size_t i = strlen(digits); i-- > 0;) {
        if (digits[i] != '9') {
            ++digits[i];
            return true;
        }
        digits[i] = '0';
    }
    return false;
}

/* Above a power of two the floats lie twice as far apart as below, so the nearest number of n digits may read back as
 * the float below while the next one up reads back right: both are tried. */
static int shortest_digits(float value, char digits[16]) {
    int exponent = 0;
    for (int precision = 0; precision <= 8; ++precision) {
        exponent = round_to_digits(value, precision, digits);
        for (int attempt = 0; attempt < 2; ++attempt) {
            if (float_to_bits(read_scaled(digits, exponent - precision)) == float_to_bits(value)) {
                return exponent;
            }
            if (!next_digits(digits)) {
                break;
            }
        }
    }
    return round_to_digits(value, 8, digits);
}

void decimal_print(float value, char text[DECIMAL_TEXT_BYTES]) {
    char digits[16];
    const int exponent = shortest_digits(value, digits);
    const char *point = digits[1] != '\0' ? "." : "";
    if (exponent == 0) {
        (void)snprintf(text, DECIMAL_TEXT_BYTES, "%c%s%s", digits[0], point, digits + 1);
    } else {
        (void)snprintf(text, DECIMAL_TEXT_BYTES, "%c%s%se%d", digits[0], point, digits + 1, exponent);
    }
}
