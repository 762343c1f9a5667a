/* gemm/packed_fast_dotprod.c: 4-bit weights times int8 rows (fast, fast32, codes) with sdot, which does the four products
 * of int8 of a row at once; compiled with -march=armv8.2-a+dotprod. */
#include "gemm/packed_tables.h"
#include "opaq/cpu.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define IS_FLOAT 0

enum { FEW_SUMS = 12, SWEEP_SUMS = 16 };

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

/* The columns, for each row. */
struct factor {
    int8x16_t columns;
};

static inline struct factor factor_load(const number *x) {
    int32_t four;
    __builtin_memcpy(&four, x, sizeof four);
    return (struct factor){vreinterpretq_s8_s32(vdupq_n_s32(four))};
}

struct sum {
    int32x4_t lane;
};

static inline struct sum sum_zero(void) { return (struct sum){vdupq_n_s32(0)}; }

static inline struct sum sum_add(struct sum sum, const struct quad *quad, struct factor factor) {
    return (struct sum){vdotq_s32(sum.lane, quad->value, factor.columns)};
}

/* Times 1/2. */
static inline float32x4_t sum_value(struct sum sum) { return vcvtq_n_f32_s32(sum.lane, 1); }

#include "gemm/packed_neon.h"

const struct packed_table packed_table_dotprod = {
    .name = "dotprod",
    .features = OPAQ_CPU_NEON | OPAQ_CPU_DOTPROD,
    .kernel = {[PACKED_NVFP4] = {[PACKED_FAST] = KERNEL(nvfp4, fast, dotprod),
                                 [PACKED_FAST32] = KERNEL(nvfp4, fast32, dotprod),
                                 [PACKED_CODES] = KERNEL(nvfp4, codes, dotprod)},
               [PACKED_MXFP4] = {[PACKED_FAST] = KERNEL(mxfp4, fast, dotprod),
                                 [PACKED_FAST32] = KERNEL(mxfp4, fast32, dotprod),
                                 [PACKED_CODES] = KERNEL(mxfp4, codes, dotprod)}}};
#endif
