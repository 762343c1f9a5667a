/* quant/amax_rows_vec.h: the amax kernel, in vectors. Depends on amax_vec.h. */
#ifndef OPAQ_QUANT_AMAX_ROWS_VEC_H
#define OPAQ_QUANT_AMAX_ROWS_VEC_H

#include "quant/amax_vec.h"
#include "quant/quant_table_ref.h"

/* Over `rows` rows of n elements. */
VEC_INLINE float amax_all(const struct quant_matrix *m, const char *x, int64_t rows, int64_t row_step,
                          int64_t n, enum opaq_element dtype, bool drop_nan) {
    struct amax_keys keys = amax_keys_none();
    (void)m;
    for (int64_t row = 0; row < rows; ++row) {
        amax_keys_add(&keys, x + row * row_step * element_bytes(dtype), n, dtype, drop_nan);
    }
    return float_from_bits(amax_keys_bits(&keys, dtype, drop_nan));
}

VEC_INLINE void amax_rows(const struct quant_matrix *m, int64_t r, int64_t r_end, float *amax, int64_t step,
                          enum opaq_element dtype, bool drop_nan) {
    const char *const data = m->data;
    const int bytes = element_bytes(dtype);
    if (step != 0) {
        for (int64_t row = r; row < r_end; ++row) {
            amax[row] =
                float_from_bits(amax_run(data + row * m->row_step * bytes, m->columns, dtype, drop_nan));
        }
    } else if (m->column_step == 1) {
        *amax =
            amax_all(m, data + r * m->row_step * bytes, r_end - r, m->row_step, m->columns, dtype, drop_nan);
    } else { /* the operand's rows lie across memory; for one maximum of all it does not matter */
        *amax = amax_all(m, data + r * bytes, m->columns, m->column_step, r_end - r, dtype, drop_nan);
    }
}

VEC_INLINE void amax_dtype(const struct quant_matrix *m, int64_t r, int64_t r_end, float *amax, int64_t step,
                           bool drop_nan) {
    if (m->dtype == OPAQ_BF16) {
        amax_rows(m, r, r_end, amax, step, OPAQ_BF16, drop_nan);
    } else if (m->dtype == OPAQ_F16) {
        amax_rows(m, r, r_end, amax, step, OPAQ_F16, drop_nan);
    } else {
        amax_rows(m, r, r_end, amax, step, OPAQ_F32, drop_nan);
    }
}

static inline void amax_vec(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r,
                            int64_t r_end, float *amax, int64_t step) {
    const struct quant_matrix *m = &copy->operand;
    const bool is_along = m->column_step == 1 || (m->row_step == 1 && step == 0);
    if (copy->is_hadamard || !is_along) {
        amax_ref(copy, spec, r, r_end, amax, step);
    } else if (spec->rule == OPAQ_RULE_TE) {
        amax_dtype(m, r, r_end, amax, step, true);
    } else {
        amax_dtype(m, r, r_end, amax, step, false);
    }
}

#endif
