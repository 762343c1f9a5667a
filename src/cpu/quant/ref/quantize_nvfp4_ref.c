/* cpu/quant/ref/quantize_nvfp4_ref.c: reference for nvfp4: E2M1 codes under one E4M3 scale per 1x16 or 16x16, under one
 * float per tensor or row. Specification: docs/formats.md. */
#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/ref/segment_ref.h"

enum { BLOCK = 16 };

static float row_amax(const struct quant_copy *copy, int64_t r) { return copy->amax[r * copy->amax_step]; }

static void encode_block(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t c,
                         float apply) {
    float values[BLOCK];
    uint8_t random[BLOCK];
    uint8_t codes[BLOCK];
    const int64_t r_end = min_int64(r + copy->block_rows, copy->operand.rows);
    /* a Hadamard group is stored whole, beyond the operand's last column too */
    const int n = copy->is_hadamard ? BLOCK : (int)min_int64(BLOCK, copy->operand.columns - c);
    for (int64_t row = r; row < r_end; ++row) {
        copy_load(copy, &job->spec, row, c, BLOCK, values);
        segment_scale(values, n, apply, rule_divides(&job->spec));
        if (job->spec.options & OPAQ_STOCHASTIC) {
            segment_random(job, copy, row, c, n, random);
        }
        segment_encode(&job->spec, values, random, n, codes);
        copy_store(copy, row, c, n, codes);
    }
}

/* The error of quantizing one row of a block with a candidate scale. */
static float row_error(const struct opaq_spec *spec, const float values[BLOCK], uint32_t code, float apply,
                       float amax) {
    const float scale = decode_e4m3(code);
    const float denominator = 6.0f * (float)spec->e4m3_max;
    float sum = 0.0f;
    for (int i = 0; i < BLOCK; ++i) {
        const float value = decode_e2m1(encode_e2m1(values[i] * apply)) * scale * amax / denominator;
        const float difference = value - values[i];
        sum += spec->error_mode == OPAQ_ERROR_MODE_MSE ? difference * difference : float_abs(difference);
    }
    return sum;
}

/* Summed as a tree over the 16 rows of a square block; one row is itself. */
static float block_error(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t c,
                         uint32_t code, float apply, float amax) {
    float error[BLOCK];
    float values[BLOCK];
    const int rows = copy->block_rows == 1 ? 1 : BLOCK;
    for (int i = 0; i < rows; ++i) {
        memset(values, 0, sizeof values);
        if (r + i < copy->operand.rows) {
            segment_load(&copy->operand, r + i, c, BLOCK, values);
        }
        error[i] = row_error(&job->spec, values, code, apply, amax);
    }
    for (int half = rows / 2; half > 0; half /= 2) {
        for (int i = 0; i < half; ++i) {
            error[i] += error[i + half];
        }
    }
    return error[0];
}

/* The better of mapping the block's largest value to 6 and to 4. */
static struct nvfp4_scale four_over_six(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                        int64_t c, float global, float amax) {
    const float base = block_amax(copy, &job->spec, r, c) / 6.0f * global;
    struct nvfp4_scale six = {encode_e4m3(float_min(base, 448.0f)), 0.0f};
    struct nvfp4_scale four = {encode_e4m3(float_min(base * 1.5f, 448.0f)), 0.0f};
    six.apply = nvfp4_encode_factor(six.code, global);
    four.apply = nvfp4_encode_factor(four.code, global);
    const float six_error = block_error(job, copy, r, c, six.code, six.apply, amax);
    const float four_error = block_error(job, copy, r, c, four.code, four.apply, amax);
    return four_error < six_error ? four : six;
}

void quantize_nvfp4_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    copy_clear(copy, r, r_end - r);
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        const float amax = row_amax(copy, row);
        const float global = nvfp4_global_of_stored(&job->spec, amax);
        for (int64_t c = 0; c < copy->operand.columns; c += BLOCK) {
            const struct nvfp4_scale scale =
                job->spec.options & OPAQ_4OVER6
                    ? four_over_six(job, copy, row, c, global, amax)
                    : nvfp4_block(&job->spec, global, block_amax(copy, &job->spec, row, c));
            scale_store_byte(copy, row, c, scale.code);
            encode_block(job, copy, row, c, scale.apply);
        }
    }
}
