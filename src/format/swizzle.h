/* format/swizzle.h: the position of a scale in 128x4 tiles. Depends on base. */
#ifndef OPAQ_FORMAT_SWIZZLE_H
#define OPAQ_FORMAT_SWIZZLE_H

#include <stdint.h>

#include "base/device.h"

enum { SWIZZLE_ROWS = 128, SWIZZLE_COLUMNS = 4 };

/* `columns`: of the whole matrix, a multiple of 4. */
OPAQ_DEVICE static inline int64_t swizzle_offset(int64_t row, int64_t column, int64_t columns) {
    const int64_t tile = row / SWIZZLE_ROWS * (columns / SWIZZLE_COLUMNS) + column / SWIZZLE_COLUMNS;
    return tile * (SWIZZLE_ROWS * SWIZZLE_COLUMNS) + row % 32 * 16 + row % SWIZZLE_ROWS / 32 * 4 +
           column % SWIZZLE_COLUMNS;
}

#endif
