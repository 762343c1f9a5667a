/* quant/quantize_nvfp4_vec.h: nvfp4 in vectors. Depends on quantize_blocks_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_QUANT_QUANTIZE_NVFP4_VEC_H
#define OPAQ_QUANT_QUANTIZE_NVFP4_VEC_H

#include "quant/quant_table_ref.h"
#include "quant/quantize_blocks_vec.h"

/* Whether factors come out as the vectors expect them: under rule te above 0 and finite, else not negative. They may
 * not where a caller gives a strange amax. */
static inline bool nvfp4_is_usual(float global, bool is_te) {
    return is_te ? global > 0.0f && float_is_finite(1.0f / global) && float_is_finite(global)
                 : float_to_bits(global) <= 0x7F800000u;
}

VEC_INLINE void quantize_nvfp4_rows(enum opaq_element dtype, bool is_te, const struct quant_job *job,
                                    const struct quant_copy *copy, int64_t r, int64_t r_end) {
    const struct encode_how how = {
        .dtype = dtype, .element = OPAQ_E2M1, .is_careful = !is_te, .divides = true, .drops_zero_sign = true};
    const struct block_kind kind = {how, 16, true, &job->spec};
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        const float global = nvfp4_global_of_stored(&job->spec, copy->amax[row * copy->amax_step]);
        const int64_t end = min_int64(row + copy->block_rows, r_end);
        if (nvfp4_is_usual(global, is_te)) {
            quantize_block_rows(kind, copy, row, (int)(end - row), global);
        } else {
            quantize_nvfp4_ref(job, copy, row, end);
        }
    }
}

VEC_INLINE void quantize_nvfp4_dtype(enum opaq_element dtype, const struct quant_job *job,
                                     const struct quant_copy *copy, int64_t r, int64_t r_end) {
    if (job->spec.rule == OPAQ_RULE_TE) {
        quantize_nvfp4_rows(dtype, true, job, copy, r, r_end);
    } else {
        quantize_nvfp4_rows(dtype, false, job, copy, r, r_end);
    }
}

static inline void quantize_nvfp4_vec(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                      int64_t r_end) {
    if (!is_along_rows(copy) || (job->spec.options & (OPAQ_STOCHASTIC | OPAQ_4OVER6))) {
        quantize_nvfp4_ref(job, copy, r, r_end);
    } else if (copy->operand.dtype == OPAQ_BF16) {
        quantize_nvfp4_dtype(OPAQ_BF16, job, copy, r, r_end);
    } else if (copy->operand.dtype == OPAQ_F16) {
        quantize_nvfp4_dtype(OPAQ_F16, job, copy, r, r_end);
    } else {
        quantize_nvfp4_dtype(OPAQ_F32, job, copy, r, r_end);
    }
}

#endif
