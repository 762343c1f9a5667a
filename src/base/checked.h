/* base/checked.h: integer arithmetic with overflow checks. Depends on device.h. */
#ifndef OPAQ_BASE_CHECKED_H
#define OPAQ_BASE_CHECKED_H

#include <stdbool.h>
#include <stdint.h>

#include "base/device.h"

/* No tensor has more elements or bytes than this, so sums of a few of them never overflow. */
#define OPAQ_SIZE_LIMIT ((int64_t)1 << 62)

/* Both operands at least 0. False if the product exceeds OPAQ_SIZE_LIMIT. */
static inline bool checked_multiply(int64_t a, int64_t b, int64_t *product) {
    int64_t result;
    if (__builtin_mul_overflow(a, b, &result) || result > OPAQ_SIZE_LIMIT) {
        return false;
    }
    *product = result;
    return true;
}

OPAQ_DEVICE static inline int64_t ceil_div(int64_t a, int64_t b) { return a / b + (a % b != 0); }

OPAQ_DEVICE static inline int64_t round_up(int64_t a, int64_t b) { return ceil_div(a, b) * b; }

OPAQ_DEVICE static inline int64_t min_int64(int64_t a, int64_t b) { return a < b ? a : b; }

OPAQ_DEVICE static inline int64_t max_int64(int64_t a, int64_t b) { return a > b ? a : b; }

#endif
