/* cpu/gemm/neon/packed_int8_neon.h: what products of 4-bit weights with int8 rows have in common, with or without sdot.
 * The file that includes it then defines struct factor, struct sum and the rest that packed_neon.h needs. Depends on
 * packed.h. */
#ifndef OPAQ_CPU_GEMM_NEON_PACKED_INT8_NEON_H
#define OPAQ_CPU_GEMM_NEON_PACKED_INT8_NEON_H

#include <arm_neon.h>

#include "cpu/gemm/packed.h"

#define IS_FLOAT 0

typedef int8_t number;

static inline const number *numbers_of(const struct packed_rows *x) { return x->q8; }

/* Values times 2, row by row. */
struct quad {
    int8x16_t value;
};

static inline struct quad quad_decode(uint8x16_t codes) {
    static const int8_t twice_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    return (struct quad){vqtbl1q_s8(vld1q_s8(twice_values), codes)};
}

/* Four columns of x, as one number. */
static inline int32_t four_columns(const number *x) {
    int32_t four;
    __builtin_memcpy(&four, x, sizeof four);
    return four;
}

/* The kernels of a table. */
#define INT8_KERNELS(format, isa)                                                                 \
    {                                                                                             \
        [PACKED_FAST] = KERNEL(format, fast, isa), [PACKED_FAST32] = KERNEL(format, fast32, isa), \
        [PACKED_CODES] = KERNEL(format, codes, isa)                                               \
    }

#endif
