/* cpu/gemm/neon/packed_exact_neon.c: 4-bit weights times float32 rows (exact) with NEON.
 *
 * As a float32, an e2m1 value has nonzero bits in its two upper bytes only. Two byte tables give these bytes,
 * zip joins them to words, and shll widens the words to floats. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define IS_FLOAT 1

enum { FEW_SUMS = 12, SWEEP_SUMS = 16 };

typedef float number;

static inline const number *numbers_of(const struct packed_rows *x) { return x->f32; }

/* Each column's 4 rows. */
struct quad {
    float32x4_t column[4];
};

static inline float32x4_t widen(uint16x4_t upper) { return vreinterpretq_f32_u32(vshll_n_u16(upper, 16)); }

static inline struct quad quad_decode(uint8x16_t codes) {
    static const uint8_t upper_bytes[16] = {0, 0x3F, 0x3F, 0x3F, 0x40, 0x40, 0x40, 0x40,
                                            0, 0xBF, 0xBF, 0xBF, 0xC0, 0xC0, 0xC0, 0xC0};
    static const uint8_t lower_bytes[16] = {0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0,
                                            0, 0, 0x80, 0xC0, 0, 0x40, 0x80, 0xC0};
    static const uint8_t column_by_column[16] = {0, 4, 8, 12, 1, 5, 9, 13, 2, 6, 10, 14, 3, 7, 11, 15};
    const uint8x16_t turned = vqtbl1q_u8(codes, vld1q_u8(column_by_column));
    const uint8x16_t upper = vqtbl1q_u8(vld1q_u8(upper_bytes), turned);
    const uint8x16_t lower = vqtbl1q_u8(vld1q_u8(lower_bytes), turned);
    const uint16x8_t first = vreinterpretq_u16_u8(vzip1q_u8(lower, upper));
    const uint16x8_t last = vreinterpretq_u16_u8(vzip2q_u8(lower, upper));
    return (struct quad){{widen(vget_low_u16(first)), widen(vget_high_u16(first)), widen(vget_low_u16(last)),
                          widen(vget_high_u16(last))}};
}

struct factor {
    float32x4_t column;
};

static inline struct factor factor_load(const number *x) { return (struct factor){vld1q_f32(x)}; }

struct sum {
    float32x4_t lane;
};

static inline struct sum sum_zero(void) { return (struct sum){vdupq_n_f32(0.0f)}; }

static inline struct sum sum_add(struct sum sum, const struct quad *quad, struct factor factor) {
    sum.lane = vfmaq_laneq_f32(sum.lane, quad->column[0], factor.column, 0);
    sum.lane = vfmaq_laneq_f32(sum.lane, quad->column[1], factor.column, 1);
    sum.lane = vfmaq_laneq_f32(sum.lane, quad->column[2], factor.column, 2);
    sum.lane = vfmaq_laneq_f32(sum.lane, quad->column[3], factor.column, 3);
    return sum;
}

static inline float32x4_t sum_value(struct sum sum) { return sum.lane; }

#include "cpu/gemm/neon/packed_neon.h"

const struct packed_table packed_table_neon_exact = {
    .name = "neon",
    .features = OPAQ_CPU_NEON,
    .kernel = {[PACKED_NVFP4] = {[PACKED_EXACT] = KERNEL(nvfp4, exact, neon)},
               [PACKED_MXFP4] = {[PACKED_EXACT] = KERNEL(mxfp4, exact, neon)}}};
#endif
