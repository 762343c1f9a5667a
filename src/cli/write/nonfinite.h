/* cli/write/nonfinite.h: NaNs and infinities among weights. One of them spoils the block that shares its scale, so quantizing
 * refuses them or counts them. */
#ifndef OPAQ_CLI_WRITE_NONFINITE_H
#define OPAQ_CLI_WRITE_NONFINITE_H

#include "opaq/opaq.h"

/* How many elements of plain, contiguous rows are NaN or infinite. If any, *first is the index of the first in row-major
 * order and *kind says what it is: "NaN", "+infinity" or "-infinity". */
uint64_t nonfinite_count(const struct opaq_view *rows, int64_t *first, const char **kind);

/* Makes them zero. */
void nonfinite_clear(const struct opaq_view *rows);

#endif
