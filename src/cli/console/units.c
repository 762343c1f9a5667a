/* cli/console/units.c: see units.h. */
#include "cli/console/units.h"

#include <inttypes.h>
#include <stdio.h>

static struct unit_text scaled_text(double number, const char *ending) {
    static const char *const prefixes[] = {"", "k", "M", "G", "T", "P", "E"};
    size_t prefix = 0;
    while (number >= 999.5 && prefix + 1 < sizeof prefixes / sizeof prefixes[0]) {
        number /= 1000.0;
        ++prefix;
    }
    struct unit_text unit;
    (void)snprintf(unit.text, sizeof unit.text, "%.*f %s%s", number < 9.95 && prefix != 0 ? 1 : 0, number,
                   prefixes[prefix], ending);
    return unit;
}

struct unit_text size_text(uint64_t bytes) {
    if (bytes >= 1000) {
        return scaled_text((double)bytes, "B");
    }
    struct unit_text unit;
    (void)snprintf(unit.text, sizeof unit.text, "%" PRIu64 " byte%s", bytes, bytes == 1 ? "" : "s");
    return unit;
}

struct unit_text rate_text(double bytes_per_second) {
    return scaled_text(bytes_per_second > 0.0 ? bytes_per_second : 0.0, "B/s");
}

struct unit_text time_text(double seconds) {
    struct unit_text unit;
    const double limited = seconds > 0.0 ? (seconds < 1e12 ? seconds : 1e12) : 0.0;
    const int64_t whole = (int64_t)(limited + 0.5);
    if (limited < 0.995) {
        (void)snprintf(unit.text, sizeof unit.text, "%.2f s", limited);
    } else if (limited < 9.95) {
        (void)snprintf(unit.text, sizeof unit.text, "%.1f s", limited);
    } else if (whole < 60) {
        (void)snprintf(unit.text, sizeof unit.text, "%" PRId64 " s", whole);
    } else if (whole < 3600) {
        (void)snprintf(unit.text, sizeof unit.text, "%" PRId64 " min %02" PRId64 " s", whole / 60, whole % 60);
    } else {
        (void)snprintf(unit.text, sizeof unit.text, "%" PRId64 " h %02" PRId64 " min", whole / 3600,
                       whole % 3600 / 60);
    }
    return unit;
}
