/* cpu/quant/simd/amax_rows_vec.h: the amax kernel, in vectors. Depends on amax_vec.h and column_amax_vec.h. */
#ifndef OPAQ_CPU_QUANT_SIMD_AMAX_ROWS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_AMAX_ROWS_VEC_H

#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/simd/amax_vec.h"
#include "cpu/quant/simd/column_amax_vec.h"

/* Over `rows` rows of n elements. */
VEC_INLINE float amax_all(const char *x, int64_t rows, int64_t row_step, int64_t n, enum opaq_element dtype,
                          bool drop_nan) {
    const int64_t row_bytes = row_step * element_bytes(dtype);
    const int64_t stream_rows = rows / AMAX_CHAINS;
    struct amax_keys keys = amax_keys_none();
    for (int64_t row = 0; row < stream_rows; ++row) {
        amax_keys_add_streams(&keys, x + row * row_bytes, stream_rows * row_bytes, n, dtype, drop_nan);
    }
    for (int64_t row = stream_rows * AMAX_CHAINS; row < rows; ++row) {
        amax_keys_add(&keys, x + row * row_bytes, n, dtype, drop_nan);
    }
    return float_from_bits(amax_keys_bits(&keys, dtype, drop_nan));
}

/* The same for any dtype, out of line. */
VEC_OUTLINE float amax_all_of(const char *x, int64_t rows, int64_t row_step, int64_t n, enum opaq_element dtype,
                              bool drop_nan) {
    float amax;
    FOR_DTYPE(dtype, FOR_FLAG(drop_nan, amax = amax_all(x, rows, row_step, n, DTYPE, FLAG)));
    return amax;
}

static inline void amax_rows(const struct quant_matrix *m, int64_t r, int64_t r_end, float *amax, int64_t step,
                             enum opaq_element dtype, bool drop_nan) {
    const char *const data = m->data;
    const int bytes = element_bytes(dtype);
    for (int64_t row = r; step != 0 && row < r_end; ++row) {
        amax[row] = float_from_bits(amax_of_run(data + row * m->row_step * bytes, m->columns, dtype, drop_nan));
    }
    if (step == 0) {
        *amax =
            amax_all_of(data + r * m->row_step * bytes, r_end - r, m->row_step, m->columns, dtype, drop_nan);
    }
}

/* For operands whose rows are columns of x. */
static inline void amax_columns(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r,
                                int64_t r_end, float *amax, int64_t step, enum opaq_element dtype,
                                bool drop_nan) {
    const struct quant_matrix *m = &copy->operand;
    if (step == 0 && !copy->is_hadamard) { /* one amax of all elements does not depend on their order */
        *amax = amax_all_of((const char *)m->data + r * element_bytes(dtype), m->columns, m->column_step,
                            r_end - r, dtype, drop_nan);
        return;
    }
    uint32_t bits = 0;
    for (int64_t c = r; c < r_end; c += AMAX_COLUMNS) {
        float each[AMAX_COLUMNS];
        const int64_t columns = min_int64(AMAX_COLUMNS, r_end - c);
        if (copy->is_hadamard) {
            transformed_amaxes(m, c, columns, dtype, spec->hadamard_mask, drop_nan, each);
        } else {
            column_amaxes_of(m, 0, m->columns, c, columns, dtype, drop_nan, each);
        }
        for (int64_t i = 0; i < columns; ++i) {
            if (step != 0) {
                amax[c + i] = each[i];
            }
            bits = float_to_bits(each[i]) > bits ? float_to_bits(each[i]) : bits;
        }
    }
    if (step == 0) {
        *amax = float_from_bits(bits);
    }
}

void VEC_NAME(amax)(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r, int64_t r_end,
                    float *amax, int64_t step) {
    const struct quant_matrix *m = &copy->operand;
    const bool is_along_rows = m->column_step == 1 && !copy->is_hadamard;
    if ((!is_along_rows && !is_along_columns(copy)) || m->columns == 0) {
        amax_ref(copy, spec, r, r_end, amax, step);
    } else if (is_along_rows) {
        amax_rows(m, r, r_end, amax, step, m->dtype, spec->rule == OPAQ_RULE_TE);
    } else {
        amax_columns(copy, spec, r, r_end, amax, step, m->dtype, spec->rule == OPAQ_RULE_TE);
    }
}

#endif
