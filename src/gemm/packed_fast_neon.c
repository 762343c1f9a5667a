/* gemm/packed_fast_neon.c: 4-bit weights times int8 rows (fast, fast32, codes) with NEON as every AArch64 has it: smlal
 * multiplies int8 and adds in int16. The weights' values times 2 are within -12 to 12, and a lane gets 8 products at most,
 * for 32 columns: 8 * 12 * 128 < 2^15. Then four lanes are added for each row. */
#include "gemm/packed_tables.h"
#include "opaq/cpu.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define IS_FLOAT 0

enum { FEW_SUMS = 6, SWEEP_SUMS = 8 }; /* of two registers each */

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

/* The columns twice: for two rows. */
struct factor {
    int8x8_t columns;
};

static inline struct factor factor_load(const number *x) {
    int32_t four;
    __builtin_memcpy(&four, x, sizeof four);
    return (struct factor){vreinterpret_s8_s32(vdup_n_s32(four))};
}

/* Of the four columns of a quad by themselves: rows 0 and 1, and 2 and 3. */
struct sum {
    int16x8_t first;
    int16x8_t last;
};

static inline struct sum sum_zero(void) { return (struct sum){vdupq_n_s16(0), vdupq_n_s16(0)}; }

static inline struct sum sum_add(struct sum sum, const struct quad *quad, struct factor factor) {
    sum.first = vmlal_s8(sum.first, vget_low_s8(quad->value), factor.columns);
    sum.last = vmlal_s8(sum.last, vget_high_s8(quad->value), factor.columns);
    return sum;
}

/* Times 1/2. */
static inline float32x4_t sum_value(struct sum sum) {
    return vcvtq_n_f32_s32(vpaddq_s32(vpaddlq_s16(sum.first), vpaddlq_s16(sum.last)), 1);
}

#include "gemm/packed_neon.h"

const struct packed_table packed_table_neon_fast = {
    .name = "neon",
    .features = OPAQ_CPU_NEON,
    .kernel = {[PACKED_NVFP4] = {[PACKED_FAST] = KERNEL(nvfp4, fast, neon),
                                 [PACKED_FAST32] = KERNEL(nvfp4, fast32, neon),
                                 [PACKED_CODES] = KERNEL(nvfp4, codes, neon)},
               [PACKED_MXFP4] = {[PACKED_FAST] = KERNEL(mxfp4, fast, neon),
                                 [PACKED_FAST32] = KERNEL(mxfp4, fast32, neon),
                                 [PACKED_CODES] = KERNEL(mxfp4, codes, neon)}}};
#endif
