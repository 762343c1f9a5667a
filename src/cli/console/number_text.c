/* cli/console/number_text.c: see number_text.h. */
#include "cli/console/number_text.h"

#include <inttypes.h>
#include <math.h>
#include <stdio.h>

struct number_text count_text(uint64_t count) {
    char digits[24];
    struct number_text number;
    const int length = snprintf(digits, sizeof digits, "%" PRIu64, count);
    size_t at = 0;
    for (int i = 0; i < length; ++i) {
        if (i != 0 && (length - i) % 3 == 0) {
            number.text[at++] = ',';
        }
        number.text[at++] = digits[i];
    }
    number.text[at] = '\0';
    return number;
}

struct number_text bits_text(uint64_t bytes, uint64_t elements) {
    struct number_text number = {"-"};
    if (elements != 0) {
        (void)snprintf(number.text, sizeof number.text, "%.3f", (double)bytes * 8 / (double)elements);
    }
    return number;
}

struct number_text decibel_text(double decibels) {
    struct number_text number;
    if (isfinite(decibels)) {
        (void)snprintf(number.text, sizeof number.text, "%.2f", decibels);
    } else {
        (void)snprintf(number.text, sizeof number.text, "%s",
                       isnan(decibels) ? "nan"
                       : decibels > 0  ? "inf"
                                       : "-inf");
    }
    return number;
}

static struct number_text scaled_text(double value, const char *unit) {
    static const char *const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
    size_t prefix = 0;
    while (value >= 999.5 && prefix + 1 < sizeof prefixes / sizeof prefixes[0]) {
        value /= 1000.0;
        ++prefix;
    }
    struct number_text number;
    (void)snprintf(number.text, sizeof number.text, "%.*f %s%s", value < 9.95 && prefix != 0 ? 1 : 0, value,
                   prefixes[prefix], unit);
    return number;
}

struct number_text size_text(uint64_t bytes) {
    if (bytes >= 1000) {
        return scaled_text((double)bytes, "B");
    }
    struct number_text number;
    (void)snprintf(number.text, sizeof number.text, "%" PRIu64 " byte%s", bytes, bytes == 1 ? "" : "s");
    return number;
}

struct number_text rate_text(double bytes_per_second) {
    return scaled_text(bytes_per_second > 0.0 ? bytes_per_second : 0.0, "B/s");
}

struct number_text time_text(double seconds) {
    struct number_text number;
    const double limited = seconds > 0.0 ? (seconds < 1e12 ? seconds : 1e12) : 0.0;
    const int64_t whole = (int64_t)(limited + 0.5);
    if (limited < 0.995) {
        (void)snprintf(number.text, sizeof number.text, "%.2f s", limited);
    } else if (limited < 9.95) {
        (void)snprintf(number.text, sizeof number.text, "%.1f s", limited);
    } else if (whole < 60) {
        (void)snprintf(number.text, sizeof number.text, "%" PRId64 " s", whole);
    } else if (whole < 3600) {
        (void)snprintf(number.text, sizeof number.text, "%" PRId64 " min %02" PRId64 " s", whole / 60,
                       whole % 60);
    } else {
        (void)snprintf(number.text, sizeof number.text, "%" PRId64 " h %02" PRId64 " min", whole / 3600,
                       whole % 3600 / 60);
    }
    return number;
}

void shape_text_add(const int64_t *shape, int rank, struct text *text) {
    text_print(text, "[");
    for (int i = 0; i < rank; ++i) {
        text_print(text, "%s%" PRId64, i == 0 ? "" : ", ", shape[i]);
    }
    text_print(text, "]");
}
