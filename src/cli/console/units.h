/* cli/console/units.h: sizes, rates and times as people read them. Depends on libc. */
#ifndef OPAQ_CLI_CONSOLE_UNITS_H
#define OPAQ_CLI_CONSOLE_UNITS_H

#include <stdint.h>

/* By value, so that several stand in one printf. */
struct unit_text {
    char text[32];
};

/* "17 bytes", "1.2 GB"; a kB has 1000 bytes. */
struct unit_text size_text(uint64_t bytes);

/* "812 MB/s" */
struct unit_text rate_text(double bytes_per_second);

/* "0.41 s", "42 s", "3 min 20 s", "1 h 05 min" */
struct unit_text time_text(double seconds);

#endif
