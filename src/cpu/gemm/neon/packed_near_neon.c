/* cpu/gemm/neon/packed_near_neon.c: 4-bit weights times int16 rows (near) with NEON: smlal multiplies int16 and adds
 * in int32. The weights' values times 2 are within -12 to 12, so 32 columns make at most 32 * 12 * 32767 < 2^24: sums
 * are exact in int32, and as floats. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define IS_FLOAT 0

enum { FEW_SUMS = 12, SWEEP_SUMS = 16 };

typedef int16_t number;

static inline const number *numbers_of(const struct packed_rows *x) { return x->q16; }

/* Values times 2: 4 rows of columns 0 and 1, and of 2 and 3. */
struct quad {
    int16x8_t first;
    int16x8_t last;
};

static inline struct quad quad_decode(uint8x16_t codes) {
    static const int8_t twice_values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    static const uint8_t column_by_column[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t turned = vqtbl1q_u8(codes, vld1q_u8(column_by_column));
    const int8x16_t values = vqtbl1q_s8(vld1q_s8(twice_values), turned);
    return (struct quad){vmovl_s8(vget_low_s8(values)), vmovl_high_s8(values)};
}

struct factor {
    int16x4_t column;
};

static inline struct factor factor_load(const number *x) { return (struct factor){vld1_s16(x)}; }

struct sum {
    int32x4_t lane;
};

static inline struct sum sum_zero(void) { return (struct sum){vdupq_n_s32(0)}; }

static inline struct sum sum_add(struct sum sum, const struct quad *quad, struct factor factor) {
    sum.lane = vmlal_lane_s16(sum.lane, vget_low_s16(quad->first), factor.column, 0);
    sum.lane = vmlal_high_lane_s16(sum.lane, quad->first, factor.column, 1);
    sum.lane = vmlal_lane_s16(sum.lane, vget_low_s16(quad->last), factor.column, 2);
    sum.lane = vmlal_high_lane_s16(sum.lane, quad->last, factor.column, 3);
    return sum;
}

/* Times 1/2. */
static inline float32x4_t sum_value(struct sum sum) { return vcvtq_n_f32_s32(sum.lane, 1); }

#include "cpu/gemm/neon/packed_neon.h"

const struct packed_table packed_table_neon_near = {
    .name = "neon",
    .features = OPAQ_CPU_NEON,
    .kernel = {[PACKED_NVFP4] = {[PACKED_NEAR] = KERNEL(nvfp4, near, neon)},
               [PACKED_MXFP4] = {[PACKED_NEAR] = KERNEL(mxfp4, near, neon)}}};
#endif
