/* quant/quantize_mx_vec.h: mxfp8 and mxfp4 in vectors. Depends on quantize_blocks_vec.h and
 * quantize_mx_columns_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_QUANT_QUANTIZE_MX_VEC_H
#define OPAQ_QUANT_QUANTIZE_MX_VEC_H

#include "quant/quant_table_ref.h"
#include "quant/quantize_blocks_vec.h"
#include "quant/quantize_mx_columns_vec.h"

/* Along the rows of x. */
VEC_INLINE void quantize_mx_rows(struct encode_how how, const struct opaq_spec *spec,
                                 const struct quant_copy *copy, int64_t r, int64_t r_end, int64_t c,
                                 int64_t c_end) {
    const struct block_kind kind = {how, MX_BLOCK, false, spec};
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        const int64_t rows = min_int64(copy->block_rows, r_end - row);
        quantize_block_rows(kind, copy, row, (int)rows, c, c_end, 0.0f);
    }
}

/* Down its columns. */
VEC_INLINE void quantize_mx_columns(struct encode_how how, const struct opaq_spec *spec,
                                    const struct quant_copy *copy, int64_t row, int64_t row_end, int64_t c,
                                    int64_t c_end) {
    if (copy->block_rows > 1) {
        mx_column_range((struct mx_columns){how, true, spec}, copy, row, row_end, c, c_end);
    } else {
        mx_column_range((struct mx_columns){how, false, spec}, copy, row, row_end, c, c_end);
    }
}

VEC_INLINE void quantize_mx_how(struct encode_how how, const struct opaq_spec *spec,
                                const struct quant_copy *copy, int64_t r, int64_t r_end) {
    if (is_along_rows(copy)) {
        quantize_mx_rows(how, spec, copy, r, r_end, 0, copy->operand.columns);
    } else {
        quantize_mx_columns(how, spec, copy, 0, copy->operand.columns, r, r_end);
    }
}

VEC_INLINE void quantize_mx_dtype(enum opaq_element dtype, enum opaq_element element,
                                  const struct opaq_spec *spec, const struct quant_copy *copy, int64_t r,
                                  int64_t r_end) {
    if (spec->rule == OPAQ_RULE_TE) {
        const struct encode_how how = {.dtype = dtype, .element = element};
        quantize_mx_how(how, spec, copy, r, r_end);
    } else {
        const struct encode_how how = {.dtype = dtype,
                                       .element = element,
                                       .is_careful = true,
                                       .drops_zero_sign = spec->rule == OPAQ_RULE_COMPRESSED_TENSORS};
        quantize_mx_how(how, spec, copy, r, r_end);
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
    const bool is_along_columns = copy->operand.row_step == 1 && copy->data_row_step == 1;
    if ((!is_along_rows(copy) && !is_along_columns) || rounds_half_down || (spec->options & OPAQ_STOCHASTIC)) {
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
