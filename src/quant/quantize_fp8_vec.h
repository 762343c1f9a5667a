/* quant/quantize_fp8_vec.h: fp8, fp8row, fp8blk1 and fp8blk2 in vectors. Depends on amax_vec.h. Specification:
 * docs/formats.md. */
#ifndef OPAQ_QUANT_QUANTIZE_FP8_VEC_H
#define OPAQ_QUANT_QUANTIZE_FP8_VEC_H

#include "base/checked.h"
#include "quant/amax_vec.h"
#include "quant/quant_table_ref.h"
#include "quant/scale_rules.h"

/* n elements under one factor. */
VEC_INLINE void encode_run(struct encode_how how, const char *x, int64_t n, float factor, uint8_t *data) {
    enum { AT_ONCE = 2 * STEP };
    const int bytes = element_bytes(how.dtype);
    const vecf apply = vecf_set(factor);
    for (int64_t i = 0; i < n; i += AT_ONCE) {
        char staged[4 * VEC_BYTES];
        const char *from = x + i * bytes;
        const int64_t inside = min_int64(AT_ONCE, n - i);
        if (inside < AT_ONCE) {
            memset(staged, 0, sizeof staged);
            memcpy(staged, from, (size_t)(inside * bytes));
            from = staged;
        }
        const vec16 first = encode_step(how, step_load(from, how.dtype), apply, apply);
        const vec16 second = encode_step(how, step_load(from + STEP * bytes, how.dtype), apply, apply);
        const vec32 codes = pack_bytes(first, second);
        if (inside < AT_ONCE) {
            vec_store(staged, codes);
            memcpy(data + i, staged, (size_t)inside);
        } else {
            vec_store(data + i, codes);
        }
    }
}

VEC_INLINE void encode_run_rule(enum opaq_element dtype, enum opaq_element element,
                                const struct opaq_spec *spec, const char *x, int64_t n, float factor,
                                uint8_t *data) {
    if (spec->rule == OPAQ_RULE_TE) {
        encode_run((struct encode_how){.dtype = dtype, .element = element}, x, n, factor, data);
    } else {
        encode_run((struct encode_how){.dtype = dtype,
                                       .element = element,
                                       .is_careful = true,
                                       .divides = true,
                                       .drops_zero_sign = spec->rule == OPAQ_RULE_COMPRESSED_TENSORS},
                   x, n, factor, data);
    }
}

VEC_INLINE void encode_run_dtype(enum opaq_element dtype, const struct opaq_spec *spec, const char *x,
                                 int64_t n, float factor, uint8_t *data) {
    if (spec->element == OPAQ_E5M2) {
        encode_run_rule(dtype, OPAQ_E5M2, spec, x, n, factor, data);
    } else {
        encode_run_rule(dtype, OPAQ_E4M3, spec, x, n, factor, data);
    }
}

static const char *element_at(const struct quant_matrix *m, int64_t r, int64_t c) {
    return (const char *)m->data + (r * m->row_step + c) * element_bytes(m->dtype);
}

/* Elements (r, c) to (r, c + n - 1). */
static void encode_elements(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t r, int64_t c,
                            int64_t n, float factor) {
    const char *const x = element_at(&copy->operand, r, c);
    uint8_t *const data = copy->data + r * copy->data_row_step + c;
    if (copy->operand.dtype == OPAQ_BF16) {
        encode_run_dtype(OPAQ_BF16, spec, x, n, factor, data);
    } else if (copy->operand.dtype == OPAQ_F16) {
        encode_run_dtype(OPAQ_F16, spec, x, n, factor, data);
    } else {
        encode_run_dtype(OPAQ_F32, spec, x, n, factor, data);
    }
}

static uint32_t amax_elements(const struct opaq_spec *spec, const struct quant_matrix *m, int64_t r, int64_t c,
                              int64_t n) {
    const char *const x = element_at(m, r, c);
    const bool drop_nan = spec->rule == OPAQ_RULE_TE;
    if (m->dtype == OPAQ_BF16) {
        return amax_run(x, n, OPAQ_BF16, drop_nan);
    }
    return m->dtype == OPAQ_F16 ? amax_run(x, n, OPAQ_F16, drop_nan) : amax_run(x, n, OPAQ_F32, drop_nan);
}

/* Whether the vectors' arithmetic goes with a factor: under rule te above 0 and finite, else not negative. A caller may
 * give any. */
static bool fp8_is_usual(const struct opaq_spec *spec, float factor) {
    return spec->rule == OPAQ_RULE_TE ? factor > 0.0f && float_is_finite(factor)
                                      : float_to_bits(factor) >> 31 == 0;
}

static bool fp8_is_along_rows(const struct quant_job *job, const struct quant_copy *copy) {
    return copy->operand.column_step == 1 && copy->data_column_step == 1 && copy->operand.columns > 0 &&
           (job->spec.options & OPAQ_STOCHASTIC) == 0;
}

static inline void quantize_fp8_tensor_vec(const struct quant_job *job, const struct quant_copy *copy,
                                           int64_t r, int64_t r_end) {
    if (!fp8_is_along_rows(job, copy) || !fp8_is_usual(&job->spec, job->tensor_scale)) {
        quantize_fp8_tensor_ref(job, copy, r, r_end);
        return;
    }
    for (int64_t row = r; row < r_end; ++row) {
        encode_elements(&job->spec, copy, row, 0, copy->operand.columns, job->tensor_scale);
    }
}

static inline void quantize_fp8_blocks_vec(const struct quant_job *job, const struct quant_copy *copy,
                                           int64_t r, int64_t r_end) {
    if (!fp8_is_along_rows(job, copy)) {
        quantize_fp8_blocks_ref(job, copy, r, r_end);
        return;
    }
    const struct quant_matrix *m = &copy->operand;
    const struct scale_layout *layout = &copy->scale_layout;
    const float limit = fp8_scale_limit(&job->spec, m->dtype);
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        const int64_t row_end = min_int64(row + copy->block_rows, r_end);
        for (int64_t c = 0; c < m->columns; c += copy->block_columns) {
            const int64_t n = min_int64(copy->block_columns, m->columns - c);
            uint32_t bits = 0;
            for (int64_t i = row; i < row_end; ++i) {
                const uint32_t of_row = amax_elements(&job->spec, m, i, c, n);
                bits = of_row > bits ? of_row : bits;
            }
            const struct fp8_scale scale = fp8_scale_from_amax(&job->spec, float_from_bits(bits), limit);
            const int64_t place =
                row / layout->row_per * layout->row_step + c / layout->column_per * layout->column_step;
            ((float *)copy->scale)[place] = scale.stored;
            for (int64_t i = row; i < row_end; ++i) {
                encode_elements(&job->spec, copy, i, c, n, scale.apply);
            }
        }
    }
}

#endif
