/* cpu/gemm/neon/packed_fast_dotprod.c: 4-bit weights times int8 rows (fast, fast32, codes) with sdot, which does the
 * four products of int8 of a row at once; compiled with -march=armv8.2-a+dotprod. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__aarch64__)
#include "cpu/gemm/neon/packed_int8_neon.h"

enum { FEW_SUMS = 12, SWEEP_SUMS = 16 };

/* The columns, for each row. */
struct factor {
    int8x16_t columns;
};

static inline struct factor factor_load(const number *x) {
    return (struct factor){vreinterpretq_s8_s32(vdupq_n_s32(four_columns(x)))};
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

#include "cpu/gemm/neon/packed_neon.h"

const struct packed_table packed_table_dotprod = {
    .name = "dotprod",
    .features = OPAQ_CPU_NEON | OPAQ_CPU_DOTPROD,
    .kernel = {[PACKED_NVFP4] = INT8_KERNELS(nvfp4, dotprod), [PACKED_MXFP4] = INT8_KERNELS(mxfp4, dotprod)}};
#endif
