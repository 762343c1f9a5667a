/* format/swizzle.c: the 128x4 scale layout that GEMM hardware reads, and its inverse. */
#include "format/swizzle.h"

#include <stddef.h>

#include "base/checked.h"
#include "base/try.h"
#include "opaq/format.h"
#include "opaq/status.h"

static enum opaq_status check(const char *operation, const uint8_t *from, int64_t rows, int64_t columns,
                              const uint8_t *to, struct opaq_error *error) {
    int64_t bytes;
    if (rows < 0 || columns < 0 || rows % SWIZZLE_ROWS != 0 || columns % SWIZZLE_COLUMNS != 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%s: the scale matrix is %lld x %lld, expected multiples of %d and %d", operation,
                         (long long)rows, (long long)columns, SWIZZLE_ROWS, SWIZZLE_COLUMNS);
    }
    if (!checked_multiply(rows, columns, &bytes)) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW, "%s: %lld x %lld bytes do not fit", operation,
                         (long long)rows, (long long)columns);
    }
    if (bytes > 0 && (from == NULL || to == NULL || from == to)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: needs two different buffers of %lld bytes, got %s",
                         operation, (long long)bytes,
                         from == to && from != NULL ? "the same one twice" : "NULL");
    }
    return OPAQ_OK;
}

enum opaq_status opaq_scale_swizzle(const uint8_t *plain, int64_t rows, int64_t columns, uint8_t *swizzled,
                                    struct opaq_error *error) {
    TRY(check("scale_swizzle", plain, rows, columns, swizzled, error));
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            swizzled[swizzle_offset(r, c, columns)] = plain[r * columns + c];
        }
    }
    return OPAQ_OK;
}

enum opaq_status opaq_scale_unswizzle(const uint8_t *swizzled, int64_t rows, int64_t columns, uint8_t *plain,
                                      struct opaq_error *error) {
    TRY(check("scale_unswizzle", swizzled, rows, columns, plain, error));
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            plain[r * columns + c] = swizzled[swizzle_offset(r, c, columns)];
        }
    }
    return OPAQ_OK;
}
