/* cli/write/nonfinite.h: NaNs and infinities in weights. One of them makes the whole block that shares its scale
 * useless, so quantizing rejects or counts them. */
#ifndef OPAQ_CLI_WRITE_NONFINITE_H
#define OPAQ_CLI_WRITE_NONFINITE_H

#include "opaq/opaq.h"

/* Number of elements of plain, contiguous rows that are NaN or infinite. If any, *first is the index of the first in
 * row-major order and *kind is its type: "NaN", "+infinity" or "-infinity". */
uint64_t nonfinite_count(const struct opaq_view *rows, int64_t *first, const char **kind);

/* Replaces them by zero. */
void nonfinite_clear(const struct opaq_view *rows);

#endif
