/* cli/write/nonfinite.c: see nonfinite.h. Works on the bits: an exponent of ones is an infinity or a NaN. */
#include "cli/write/nonfinite.h"

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

struct bits {
    uint32_t exponent; /* mask of the exponent's bits */
    uint32_t mantissa;
    uint32_t sign;
};

static struct bits bits_of(int dtype) {
    return dtype == OPAQ_F32   ? (struct bits){0x7f800000u, 0x007fffffu, 0x80000000u}
           : dtype == OPAQ_F16 ? (struct bits){0x7c00u, 0x03ffu, 0x8000u}
                               : (struct bits){0x7f80u, 0x007fu, 0x8000u}; /* bf16 */
}

/* Without a branch, so that it is vectorized; most weights have none, and this pass is then all the work. */
static bool has_any_16(const uint16_t *values, size_t count, uint16_t exponent) {
    unsigned found = 0;
    for (size_t i = 0; i < count; ++i) {
        found |= (values[i] & exponent) == exponent;
    }
    return found != 0;
}

static bool has_any_32(const uint32_t *values, size_t count, uint32_t exponent) {
    unsigned found = 0;
    for (size_t i = 0; i < count; ++i) {
        found |= (values[i] & exponent) == exponent;
    }
    return found != 0;
}

static size_t elements_of(const struct opaq_view *rows) {
    return (size_t)(rows->proto.shape[0] * rows->proto.shape[1]);
}

static bool has_any(const struct opaq_view *rows) {
    const uint32_t exponent = bits_of(rows->proto.dtype).exponent;
    return rows->proto.dtype == OPAQ_F32
               ? has_any_32(rows->buffer[0].data, elements_of(rows), exponent)
               : has_any_16(rows->buffer[0].data, elements_of(rows), (uint16_t)exponent);
}

static uint32_t value_at(const struct opaq_view *rows, size_t index) {
    const void *const data = rows->buffer[0].data;
    return rows->proto.dtype == OPAQ_F32 ? ((const uint32_t *)data)[index] : ((const uint16_t *)data)[index];
}

uint64_t nonfinite_count(const struct opaq_view *rows, int64_t *first, const char **kind) {
    const struct bits bits = bits_of(rows->proto.dtype);
    uint64_t count = 0;
    if (!has_any(rows)) {
        return 0;
    }
    for (size_t i = 0; i < elements_of(rows); ++i) {
        const uint32_t value = value_at(rows, i);
        if ((value & bits.exponent) == bits.exponent && count++ == 0) {
            *first = (int64_t)i;
            *kind = (value & bits.mantissa) != 0 ? "NaN" : (value & bits.sign) != 0 ? "-infinity" : "+infinity";
        }
    }
    return count;
}

void nonfinite_clear(const struct opaq_view *rows) {
    const uint32_t exponent = bits_of(rows->proto.dtype).exponent;
    for (size_t i = 0; i < elements_of(rows); ++i) {
        if ((value_at(rows, i) & exponent) != exponent) {
            continue;
        }
        if (rows->proto.dtype == OPAQ_F32) {
            ((uint32_t *)rows->buffer[0].data)[i] = 0;
        } else {
            ((uint16_t *)rows->buffer[0].data)[i] = 0;
        }
    }
}
