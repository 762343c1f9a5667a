/* cpu/gemm/neon/packed_fast_neon.c: 4-bit weights times int8 rows (fast, fast32, codes) with NEON as every AArch64 has
 * it: smlal multiplies int8 and adds in int16. The weights' values times 2 are within -12 to 12, and a lane gets 8
 * products at most, for 32 columns: 8 * 12 * 128 < 2^15. Then four lanes are added for each row. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__aarch64__)
#include "cpu/gemm/neon/packed_int8_neon.h"

enum { FEW_SUMS = 6, SWEEP_SUMS = 8 }; /* of two registers each */

/* The columns twice: for two rows. */
struct factor {
    int8x8_t columns;
};

static inline struct factor factor_load(const number *x) {
    return (struct factor){vreinterpret_s8_s32(vdup_n_s32(four_columns(x)))};
}

/* One sum for each of the four columns of a quad: of rows 0 and 1, and of 2 and 3. */
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

#include "cpu/gemm/neon/packed_neon.h"

const struct packed_table packed_table_neon_fast = {
    .name = "neon",
    .features = OPAQ_CPU_NEON,
    .kernel = {[PACKED_NVFP4] = INT8_KERNELS(nvfp4, neon), [PACKED_MXFP4] = INT8_KERNELS(mxfp4, neon)}};
#endif
