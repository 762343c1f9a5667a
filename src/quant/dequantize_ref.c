/* quant/dequantize_ref.c: reference for bytes to floats, every format. Specification: docs/formats.md. */
#include "quant/quant_table_ref.h"
#include "quant/segment_ref.h"

/* What the codes at (r, c) and after are multiplied with, up to the end of their block. */
static float decode_factor(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t c) {
    const int64_t index = scale_index(copy, r, c);
    switch ((enum opaq_format)job->spec.format) {
    case OPAQ_MXFP8:
    case OPAQ_MXFP4:
        return decode_e8m0(((const uint8_t *)copy->scale)[index]);
    case OPAQ_NVFP4:
        return nvfp4_decode_factor(&job->spec, ((const uint8_t *)copy->scale)[index],
                                   copy->amax[r * copy->amax_step]);
    case OPAQ_FP8:
    case OPAQ_FP8ROW:
    case OPAQ_FP8BLK1:
    case OPAQ_FP8BLK2:
        break;
    }
    return ((const float *)copy->scale)[index];
}

static void decode_codes(const struct opaq_spec *spec, const uint8_t *codes, int n, float factor,
                         float *values) {
    for (int i = 0; i < n; ++i) {
        const float value = spec->element == OPAQ_E2M1   ? decode_e2m1(codes[i])
                            : spec->element == OPAQ_E5M2 ? decode_e5m2(codes[i])
                                                         : decode_e4m3(codes[i]);
        values[i] = value * factor;
    }
}

void dequantize_ref(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    uint8_t codes[SEGMENT];
    float values[SEGMENT];
    const int n = (int)min_int64(copy->block_columns, SEGMENT);
    assert(n > 0 && (!copy->is_hadamard || n == HADAMARD_SIZE));
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t c = 0; c < copy->operand.columns; c += n) {
            copy_load_codes(copy, row, c, n, codes);
            decode_codes(&job->spec, codes, n, decode_factor(job, copy, row, c), values);
            if (copy->is_hadamard) {
                hadamard_inverse(values, job->spec.hadamard_mask);
            }
            segment_store(&copy->operand, row, c, n, values);
        }
    }
}
