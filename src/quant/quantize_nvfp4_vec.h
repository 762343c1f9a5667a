/* quant/quantize_nvfp4_vec.h: nvfp4 in vectors. Depends on quantize_blocks_vec.h and
 * quantize_nvfp4_columns_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_QUANT_QUANTIZE_NVFP4_VEC_H
#define OPAQ_QUANT_QUANTIZE_NVFP4_VEC_H

#include "quant/quant_table_ref.h"
#include "quant/quantize_blocks_vec.h"
#include "quant/quantize_nvfp4_columns_vec.h"

VEC_INLINE struct encode_how nvfp4_how(enum opaq_element dtype, bool is_te) {
    return (struct encode_how){
        .dtype = dtype, .element = OPAQ_E2M1, .is_careful = !is_te, .divides = true, .drops_zero_sign = true};
}

/* Along the rows of x. */
VEC_INLINE void quantize_nvfp4_rows(enum opaq_element dtype, bool is_te, const struct quant_job *job,
                                    const struct quant_copy *copy, int64_t r, int64_t r_end, int64_t c,
                                    int64_t c_end) {
    const struct block_kind kind = {nvfp4_how(dtype, is_te), 16, true, &job->spec};
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        const float global = nvfp4_global_of_stored(&job->spec, copy->amax[row * copy->amax_step]);
        const int64_t rows = min_int64(copy->block_rows, r_end - row);
        quantize_block_rows(kind, copy, row, (int)rows, c, c_end, global);
    }
}

/* Down its columns. */
VEC_INLINE void quantize_nvfp4_columns(enum opaq_element dtype, bool is_te, const struct quant_job *job,
                                       const struct quant_copy *copy, int64_t row, int64_t row_end, int64_t c,
                                       int64_t c_end) {
    struct nvfp4_columns kind = {nvfp4_how(dtype, is_te), dtype, false, false, &job->spec};
    if (copy->is_hadamard) {
        kind.how.dtype = OPAQ_BF16;
        kind.is_hadamard = true;
        nvfp4_column_range(kind, copy, row, row_end, c, c_end);
    } else if (copy->block_rows > 1) {
        kind.is_square = true;
        nvfp4_column_range(kind, copy, row, row_end, c, c_end);
    } else {
        nvfp4_column_range(kind, copy, row, row_end, c, c_end);
    }
}

VEC_INLINE void quantize_nvfp4_rule(enum opaq_element dtype, bool is_te, const struct quant_job *job,
                                    const struct quant_copy *copy, int64_t r, int64_t r_end) {
    if (is_along_rows(copy)) {
        quantize_nvfp4_rows(dtype, is_te, job, copy, r, r_end, 0, copy->operand.columns);
    } else {
        quantize_nvfp4_columns(dtype, is_te, job, copy, 0, copy->operand.columns, r, r_end);
    }
}

VEC_INLINE void quantize_nvfp4_dtype(enum opaq_element dtype, const struct quant_job *job,
                                     const struct quant_copy *copy, int64_t r, int64_t r_end) {
    if (job->spec.rule == OPAQ_RULE_TE) {
        quantize_nvfp4_rule(dtype, true, job, copy, r, r_end);
    } else {
        quantize_nvfp4_rule(dtype, false, job, copy, r, r_end);
    }
}

/* Whether vectors can do it. */
static inline bool nvfp4_is_covered(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                    int64_t r_end) {
    const bool is_along = is_along_rows(copy) || (is_along_columns(copy) && copy->data_column_step == 1);
    bool is_usual = true;
    for (int64_t row = r; row < (copy->amax_step == 0 ? r + 1 : r_end); ++row) {
        const float global = nvfp4_global_of_stored(&job->spec, copy->amax[row * copy->amax_step]);
        is_usual &= nvfp4_is_usual(global, job->spec.rule == OPAQ_RULE_TE);
    }
    return is_along && is_usual && (job->spec.options & (OPAQ_STOCHASTIC | OPAQ_4OVER6)) == 0;
}

static inline void quantize_nvfp4_vec(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                      int64_t r_end) {
    if (!nvfp4_is_covered(job, copy, r, r_end)) {
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
