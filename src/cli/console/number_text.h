/* cli/console/number_text.h: numbers and shapes as people read them; sizes and times are in units.h. */
#ifndef OPAQ_CLI_CONSOLE_NUMBER_TEXT_H
#define OPAQ_CLI_CONSOLE_NUMBER_TEXT_H

#include <stdint.h>

#include "cli/cli_memory.h"

#define NUMBER_TEXT_BYTES 32

/* Each writes into `text` and returns it, so that it can stand among the arguments of printf. */

/* "8,030,261,248". */
const char *number_count(uint64_t count, char text[NUMBER_TEXT_BYTES]);

/* Bits per element with three digits after the point, "-" without elements. */
const char *number_bits(uint64_t bytes, uint64_t elements, char text[NUMBER_TEXT_BYTES]);

/* "20.41", "inf", "nan". */
const char *number_decibels(double decibels, char text[NUMBER_TEXT_BYTES]);

/* Adds "[4096, 128]". */
void number_shape(const int64_t *shape, int rank, struct text *text);

#endif
