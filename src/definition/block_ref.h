/* definition/block_ref.h: quantizes one scaled block of an operand: amax, scale, codes. Depends on
 * segment_ref.h. Specification: docs/formats.md. The block begins at operand element (r, c); packed bytes must
 * be zero before. */
#ifndef OPAQ_DEFINITION_BLOCK_REF_H
#define OPAQ_DEFINITION_BLOCK_REF_H

#include "definition/segment_ref.h"

enum { MX_BLOCK = 32, NVFP4_BLOCK = 16 };

/* ---- fp8, fp8row, fp8blk1, fp8blk2 ---- */

/* Codes of n <= SEGMENT elements of a row. */
OPAQ_DEVICE static inline void encode_fp8_segment(const struct quant_job *job, const struct quant_copy *copy,
                                                  int64_t r, int64_t c, int n, float apply) {
    float values[SEGMENT];
    uint8_t random[SEGMENT];
    uint8_t codes[SEGMENT];
    segment_load(&copy->operand, r, c, n, values);
    segment_scale(values, n, apply, rule_divides(&job->spec));
    if (job->spec.options & OPAQ_STOCHASTIC) {
        segment_random(job, copy, r, c, n, random);
    }
    segment_encode(&job->spec, values, random, n, codes);
    copy_store(copy, r, c, n, codes);
}

/* ---- mxfp8, mxfp4 ---- */

OPAQ_DEVICE static inline void encode_mx_block(const struct quant_job *job, const struct quant_copy *copy,
                                               int64_t r, int64_t c, float factor) {
    float values[MX_BLOCK];
    uint8_t random[MX_BLOCK];
    uint8_t codes[MX_BLOCK];
    const int64_t r_end = min_int64(r + copy->block_rows, copy->operand.rows);
    const int n = (int)min_int64(MX_BLOCK, copy->operand.columns - c);
    for (int64_t row = r; row < r_end; ++row) {
        segment_load(&copy->operand, row, c, n, values);
        segment_scale(values, n, factor, false); /* a power of two: the same as dividing by its inverse */
        if (job->spec.options & OPAQ_STOCHASTIC) {
            segment_random(job, copy, row, c, n, random);
        }
        segment_encode(&job->spec, values, random, n, codes);
        copy_store(copy, row, c, n, codes);
    }
}

OPAQ_DEVICE static inline void quantize_mx_block(const struct quant_job *job, const struct quant_copy *copy,
                                                 int64_t r, int64_t c) {
    const uint32_t exponent = mx_exponent(&job->spec, block_amax(copy, &job->spec, r, c));
    scale_store_byte(copy, r, c, exponent);
    encode_mx_block(job, copy, r, c, mx_factor(exponent));
}

/* ---- nvfp4 ---- */

OPAQ_DEVICE static inline void encode_nvfp4_block(const struct quant_job *job, const struct quant_copy *copy,
                                                  int64_t r, int64_t c, float apply) {
    float values[NVFP4_BLOCK];
    uint8_t random[NVFP4_BLOCK];
    uint8_t codes[NVFP4_BLOCK];
    const int64_t r_end = min_int64(r + copy->block_rows, copy->operand.rows);
    /* a Hadamard group is stored completely, even beyond the operand's last column */
    const int n = copy->is_hadamard ? NVFP4_BLOCK : (int)min_int64(NVFP4_BLOCK, copy->operand.columns - c);
    for (int64_t row = r; row < r_end; ++row) {
        copy_load(copy, &job->spec, row, c, NVFP4_BLOCK, values);
        segment_scale(values, n, apply, rule_divides(&job->spec));
        if (job->spec.options & OPAQ_STOCHASTIC) {
            segment_random(job, copy, row, c, n, random);
        }
        segment_encode(&job->spec, values, random, n, codes);
        copy_store(copy, row, c, n, codes);
    }
}

/* The error of quantizing one row of a block with a candidate scale. */
OPAQ_DEVICE static inline float nvfp4_row_error(const struct opaq_spec *spec, const float values[NVFP4_BLOCK],
                                                uint32_t code, float apply, float amax) {
    const float scale = decode_e4m3(code);
    const float denominator = 6.0f * (float)spec->e4m3_max;
    float sum = 0.0f;
    for (int i = 0; i < NVFP4_BLOCK; ++i) {
        const float value = decode_e2m1(encode_e2m1(values[i] * apply)) * scale * amax / denominator;
        const float difference = value - values[i];
        sum += spec->error_mode == OPAQ_ERROR_MODE_MSE ? difference * difference : float_abs(difference);
    }
    return sum;
}

/* The sum over the 16 rows of a square block, added as a tree; for one row, its own error. */
OPAQ_DEVICE static inline float nvfp4_block_error(const struct quant_job *job, const struct quant_copy *copy,
                                                  int64_t r, int64_t c, uint32_t code, float apply,
                                                  float amax) {
    float error[NVFP4_BLOCK];
    float values[NVFP4_BLOCK];
    const int rows = copy->block_rows == 1 ? 1 : NVFP4_BLOCK;
    for (int i = 0; i < rows; ++i) {
        memset(values, 0, sizeof values);
        if (r + i < copy->operand.rows) {
            segment_load(&copy->operand, r + i, c, NVFP4_BLOCK, values);
        }
        error[i] = nvfp4_row_error(&job->spec, values, code, apply, amax);
    }
    for (int half = rows / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            error[i] += error[i + half];
        }
    }
    return error[0];
}

/* Quantizes the block with its largest value mapped to 6 and to 4, and returns the better scale. */
OPAQ_DEVICE static inline struct nvfp4_scale nvfp4_four_over_six(const struct quant_job *job,
                                                                 const struct quant_copy *copy, int64_t r,
                                                                 int64_t c, float global, float amax) {
    const float base = block_amax(copy, &job->spec, r, c) / 6.0f * global;
    struct nvfp4_scale six = {encode_e4m3(float_min(base, 448.0f)), 0.0f};
    struct nvfp4_scale four = {encode_e4m3(float_min(base * 1.5f, 448.0f)), 0.0f};
    six.apply = nvfp4_encode_factor(six.code, global);
    four.apply = nvfp4_encode_factor(four.code, global);
    const float six_error = nvfp4_block_error(job, copy, r, c, six.code, six.apply, amax);
    const float four_error = nvfp4_block_error(job, copy, r, c, four.code, four.apply, amax);
    return four_error < six_error ? four : six;
}

/* `amax` is the stored float of the block's row, `global` the factor computed from it. */
OPAQ_DEVICE static inline void quantize_nvfp4_block(const struct quant_job *job, const struct quant_copy *copy,
                                                    int64_t r, int64_t c, float global, float amax) {
    const struct nvfp4_scale scale = job->spec.options & OPAQ_4OVER6
                                         ? nvfp4_four_over_six(job, copy, r, c, global, amax)
                                         : nvfp4_block(&job->spec, global, block_amax(copy, &job->spec, r, c));
    scale_store_byte(copy, r, c, scale.code);
    encode_nvfp4_block(job, copy, r, c, scale.apply);
}

#endif
