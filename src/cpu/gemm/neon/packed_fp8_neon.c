/* cpu/gemm/neon/packed_fp8_neon.c: products with 8-bit tiles, 4 lanes, with NEON.
 *
 * Codes become half precision, which the processor converts: e5m2 is the upper byte of a half, e4m3 moved by a bit is
 * one of 2^-8 times the value. Both are exact, subnormals too. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__aarch64__)
#include <arm_neon.h>
#include <string.h>

enum {
    LANES = 4,
    DIRECT_SUMS = 20,
    DIRECT_BLOCKS = 2,
    DIRECT_TILES = 1,
    SWEEP_TOKENS = 10,
    PREPARED_BYTES = 0,
    E4M3_SHIFT = 8
};

struct vector {
    float32x4_t lane;
};

static inline struct vector vector_zero(void) { return (struct vector){vdupq_n_f32(0.0f)}; }

static inline struct vector vector_load(const float *from) { return (struct vector){vld1q_f32(from)}; }

static inline struct vector vector_load_any(const float *from) { return vector_load(from); }

static inline struct vector vector_broadcast(const float *from) { return (struct vector){vld1q_dup_f32(from)}; }

static inline void vector_store(float *to, struct vector a) { vst1q_f32(to, a.lane); }

static inline struct vector vector_multiply(struct vector a, struct vector b) {
    return (struct vector){vmulq_f32(a.lane, b.lane)};
}

static inline struct vector vector_fma(struct vector a, struct vector b, struct vector c) {
    return (struct vector){vfmaq_f32(c.lane, a.lane, b.lane)};
}

/* sum += a * *b */
static inline void vector_add_product(struct vector *sum, struct vector a, const float *b) {
    sum->lane = vfmaq_f32(sum->lane, a.lane, vld1q_dup_f32(b));
}

/* ---- decoding ---- */

/* A code in the upper byte of a half, moved by `move` bits, of which `kept` are kept. */
struct decoder {
    bool is_e5m2;
    int shift;
    int16x8_t move;
    int16x8_t kept;
};

static inline struct decoder decoder_make(bool is_e5m2) {
    return (struct decoder){is_e5m2, is_e5m2 ? 0 : E4M3_SHIFT, vdupq_n_s16(is_e5m2 ? 0 : -1),
                            vdupq_n_s16((int16_t)(is_e5m2 ? 0xFF00 : 0xBF80))};
}

/* Returns whether the e4m3 codes contain NaN, which is decoded as 480. */
static inline bool block_prepare(const struct decoder *decoder, const uint8_t *codes, uint8_t *scratch,
                                 const uint8_t **prepared) {
    const uint8x16_t sign = vdupq_n_u8(0x80);
    uint8x16_t largest = sign;
    (void)scratch;
    *prepared = codes;
    if (decoder->is_e5m2) {
        return false;
    }
    for (int i = 0; i < TILE8_BYTES; i += 16) {
        largest = vmaxq_u8(largest, vorrq_u8(vld1q_u8(codes + i), sign));
    }
    return vmaxvq_u8(largest) == 0xFF;
}

/* Halves of the first of two columns, and of the second. */
struct codes_pair {
    float16x8_t column[2];
};

static inline struct codes_pair pair_load(const struct decoder *decoder, const uint8_t *block, int pair,
                                          int strip) {
    const int16x8_t both = vreinterpretq_s16_u8(vld1q_u8(block + pair * TILE8_PAIR_BYTES + strip * 4 * LANES));
    const int16x8_t first = vandq_s16(vshlq_s16(vshlq_n_s16(both, 8), decoder->move), decoder->kept);
    const int16x8_t second = vandq_s16(vshlq_s16(both, decoder->move), decoder->kept);
    return (struct codes_pair){{vreinterpretq_f16_s16(first), vreinterpretq_f16_s16(second)}};
}

static inline void pair_column(const struct codes_pair *pair, int c, struct vector column[2]) {
    column[0].lane = vcvt_f32_f16(vget_low_f16(pair->column[c]));
    column[1].lane = vcvt_high_f32_f16(pair->column[c]);
}

static inline void scales_arrange(const uint8_t *codes, uint8_t *to) { memcpy(to, codes, TILE8_ROWS); }

static inline void sums_restore(const float *sums, float *to) { memcpy(to, sums, TILE8_ROWS * sizeof *to); }

#include "cpu/gemm/simd/packed_fp8.h"

const struct packed_table packed_table_neon_8bit = {
    .name = "neon",
    .features = OPAQ_CPU_NEON,
    .kernel = {[PACKED_MXFP8] = {KERNEL(mxfp8, exact, neon)},
               [PACKED_FP8] = {KERNEL(fp8, exact, neon)},
               [PACKED_FP8BLK] = {KERNEL(fp8blk, exact, neon)}}};
#endif
