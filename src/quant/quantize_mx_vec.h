/* quant/quantize_mx_vec.h: mxfp8 and mxfp4 in vectors. Depends on quantize_blocks_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_QUANT_QUANTIZE_MX_VEC_H
#define OPAQ_QUANT_QUANTIZE_MX_VEC_H

#include "quant/quant_table_ref.h"
#include "quant/quantize_blocks_vec.h"

VEC_INLINE void quantize_mx_rows(struct encode_how how, const struct opaq_spec *spec,
                                 const struct quant_copy *copy, int64_t r, int64_t r_end) {
    const struct block_kind kind = {how, 32, false, spec};
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        quantize_block_rows(kind, copy, row, (int)(min_int64(row + copy->block_rows, r_end) - row), 0.0f);
    }
}

VEC_INLINE void quantize_mx_dtype(enum opaq_element dtype, enum opaq_element element,
                                  const struct opaq_spec *spec, const struct quant_copy *copy, int64_t r,
                                  int64_t r_end) {
    if (spec->rule == OPAQ_RULE_TE) {
        const struct encode_how how = {.dtype = dtype, .element = element};
        quantize_mx_rows(how, spec, copy, r, r_end);
    } else {
        const struct encode_how how = {.dtype = dtype,
                                       .element = element,
                                       .is_careful = true,
                                       .drops_zero_sign = spec->rule == OPAQ_RULE_COMPRESSED_TENSORS};
        quantize_mx_rows(how, spec, copy, r, r_end);
    }
}

VEC_INLINE void quantize_mx_element(enum opaq_element element, const struct opaq_spec *spec,
                                    const struct quant_copy *copy, int64_t r, int64_t r_end) {
    if (copy->operand.dtype == OPAQ_BF16) {
        quantize_mx_dtype(OPAQ_BF16, element, spec, copy, r, r_end);
    } else if (copy->operand.dtype == OPAQ_F16) {
        quantize_mx_dtype(OPAQ_F16, element, spec, copy, r, r_end);
    } else {
        quantize_mx_dtype(OPAQ_F32, element, spec, copy, r, r_end);
    }
}

static inline void quantize_mx_vec(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                   int64_t r_end) {
    const struct opaq_spec *spec = &job->spec;
    const bool rounds_half_down = spec->rule == OPAQ_RULE_MODELOPT && spec->element == OPAQ_E2M1;
    if (!is_along_rows(copy) || rounds_half_down || (spec->options & OPAQ_STOCHASTIC)) {
        quantize_mx_ref(job, copy, r, r_end);
    } else if (spec->element == OPAQ_E2M1) {
        quantize_mx_element(OPAQ_E2M1, spec, copy, r, r_end);
    } else if (spec->element == OPAQ_E4M3) {
        quantize_mx_element(OPAQ_E4M3, spec, copy, r, r_end);
    } else {
        quantize_mx_element(OPAQ_E5M2, spec, copy, r, r_end);
    }
}

#endif
