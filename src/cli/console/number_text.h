/* cli/console/number_text.h: numbers, sizes, rates, times and shapes as people read them. Depends on libc. */
#ifndef OPAQ_CLI_CONSOLE_NUMBER_TEXT_H
#define OPAQ_CLI_CONSOLE_NUMBER_TEXT_H

#include <stdint.h>

#include "cli/cli_memory.h"

/* Returned by value, so that several can be arguments of one printf. */
struct number_text {
    char text[32];
};

/* "8,030,261,248" */
struct number_text count_text(uint64_t count);

/* Bits per element with three decimals; "-" without elements. */
struct number_text bits_text(uint64_t bytes, uint64_t elements);

/* "20.41", "inf", "-inf", "nan" */
struct number_text decibel_text(double decibels);

/* "17 bytes", "1.2 GB"; a kB has 1000 bytes. */
struct number_text size_text(uint64_t bytes);

/* "812 MB/s" */
struct number_text rate_text(double bytes_per_second);

/* "0.41 s", "42 s", "3 min 20 s", "1 h 05 min" */
struct number_text time_text(double seconds);

/* Adds "[4096, 128]". */
void shape_text_add(const int64_t *shape, int rank, struct text *text);

#endif
