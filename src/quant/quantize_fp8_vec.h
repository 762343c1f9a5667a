/* quant/quantize_fp8_vec.h: fp8, fp8row, fp8blk1 and fp8blk2 in vectors. Depends on
 * amax_vec.h and quantize_fp8_columns_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_QUANT_QUANTIZE_FP8_VEC_H
#define OPAQ_QUANT_QUANTIZE_FP8_VEC_H

#include "base/checked.h"
#include "quant/amax_vec.h"
#include "quant/quant_table_ref.h"
#include "quant/quantize_fp8_columns_vec.h"
#include "quant/scales_vec.h"

enum { FP8_BLOCK = 128, AHEAD_BYTES = 8192 };

/* Blocks next to each other that are done together: their scales are computed in one vector. Square ones are read twice,
 * and must stay in the cache in between. */
VEC_INLINE int64_t fp8_group_columns(int64_t block_rows) { return (block_rows == 1 ? FLOATS : 4) * FP8_BLOCK; }

VEC_INLINE void prefetch_run(const char *x, int bytes) {
    for (int i = 0; i < bytes; i += 64) {
        __builtin_prefetch(x + i);
    }
}

/* n elements under one factor. Plain ones take fewer instructions; the factor is as usual. */
VEC_INLINE void encode_run(struct encode_how how, const char *x, int64_t n, float factor, bool is_plain,
                           uint8_t *data) {
    enum { AT_ONCE = 2 * STEP };
    const int bytes = element_bytes(how.dtype);
    const vecf apply = vecf_set(is_plain ? factor * plain_factor(how.element) : factor);
    for (int64_t i = 0; i < n; i += AT_ONCE) {
        char staged[4 * VEC_BYTES];
        const char *from = x + i * bytes;
        const int64_t inside = min_int64(AT_ONCE, n - i);
        if (inside < AT_ONCE) {
            memset(staged, 0, sizeof staged);
            memcpy(staged, from, (size_t)(inside * bytes));
            from = staged;
        }
        const struct step first = step_load(from, how.dtype);
        const struct step second = step_load(from + STEP * bytes, how.dtype);
        const vec32 codes = is_plain ? pack_bytes(encode_plain(first, how.dtype, how.element, apply, apply),
                                                  encode_plain(second, how.dtype, how.element, apply, apply))
                                     : pack_bytes(encode_step(how, first, apply, apply),
                                                  encode_step(how, second, apply, apply));
        if (inside < AT_ONCE) {
            vec_store(staged, codes);
            memcpy(data + i, staged, (size_t)inside);
        } else {
            vec_store(data + i, codes);
        }
    }
}

/* Whether elements up to this one (NaN standing for any) are plain under a factor. What is scaled to less than half a
 * step beyond the largest value rounds to it. */
VEC_INLINE bool is_plain_amax(struct encode_how how, float amax, float factor) {
    const float half_beyond = how.element == OPAQ_E4M3 ? 464.0f : 61440.0f;
    return !how.is_careful && factor >= 0x1p-90f && amax * factor < half_beyond;
}

/* The same for elements whose amax is not known. */
VEC_INLINE void encode_unseen(struct encode_how how, const char *x, int64_t n, float factor, uint8_t *data) {
    enum { AT_ONCE = 2048 };
    for (int64_t i = 0; i < n; i += AT_ONCE) {
        const char *const from = x + i * element_bytes(how.dtype);
        const int64_t count = min_int64(AT_ONCE, n - i);
        const uint32_t amax = how.is_careful ? 0 : amax_run(from, count, how.dtype, false);
        if (is_plain_amax(how, float_from_bits(amax), factor)) {
            encode_run(how, from, count, factor, true, data + i);
        } else {
            encode_run(how, from, count, factor, false, data + i);
        }
    }
}

VEC_INLINE const char *operand_at(const struct quant_matrix *m, int64_t r, int64_t c, enum opaq_element dtype) {
    return (const char *)m->data + (r * m->row_step + c) * element_bytes(dtype);
}

/* ---- one scale for the tensor ---- */

VEC_INLINE void fp8_tensor_rows(struct encode_how how, const struct quant_job *job,
                                const struct quant_copy *copy, int64_t r, int64_t r_end) {
    for (int64_t row = r; row < r_end; ++row) {
        encode_unseen(how, operand_at(&copy->operand, row, 0, how.dtype), copy->operand.columns,
                      job->tensor_scale, copy->data + row * copy->data_row_step);
    }
}

/* ---- one for each row ---- */

VEC_INLINE void fp8_scaled_rows(struct encode_how how, const struct quant_job *job,
                                const struct quant_copy *copy, int64_t r, int64_t r_end) {
    const struct quant_matrix *m = &copy->operand;
    for (int64_t row = r; row < r_end; ++row) {
        const char *const x = operand_at(m, row, 0, how.dtype);
        uint8_t *const data = copy->data + row * copy->data_row_step;
        const float all = float_from_bits(amax_run(x, m->columns, how.dtype, false));
        const bool passes_over = !how.is_careful && float_is_nan(all);
        const float amax = passes_over ? float_from_bits(amax_run(x, m->columns, how.dtype, true)) : all;
        const struct fp8_scale scale = fp8_scale_from_amax(&job->spec, amax, FLT_MAX);
        ((float *)copy->scale)[row * copy->scale_layout.row_step] = scale.stored;
        if (is_plain_amax(how, all, scale.apply)) {
            encode_run(how, x, m->columns, scale.apply, true, data);
        } else {
            encode_run(how, x, m->columns, scale.apply, false, data);
        }
    }
}

/* ---- one for each block of 1x128 or 128x128 ---- */

/* Blocks next to each other, `columns` elements wide. */
struct fp8_group {
    const char *x;
    int64_t row_bytes;
    int64_t rows;
    int64_t columns;
};

/* The amax of each block. */
VEC_INLINE vecf fp8_group_amax(const struct fp8_group *group, enum opaq_element dtype, bool drop_nan) {
    enum { PARTS_LIMIT = FP8_BLOCK * 4 / VEC_BYTES };
    const int bytes = element_bytes(dtype);
    const int parts = FP8_BLOCK * bytes / VEC_BYTES;
    vec32 key[FLOATS];
    for (int b = 0; b < FLOATS; ++b) {
        key[b] = vec32_set(0);
    }
    for (int64_t row = 0; row < group->rows; ++row) {
        for (int b = 0; b * FP8_BLOCK < group->columns; ++b) {
            char staged[PARTS_LIMIT * VEC_BYTES];
            const char *from = group->x + row * group->row_bytes + (int64_t)b * FP8_BLOCK * bytes;
            const int64_t inside = group->columns - b * FP8_BLOCK;
            if (inside < FP8_BLOCK) {
                memset(staged, 0, sizeof staged);
                memcpy(staged, from, (size_t)(inside * bytes));
                from = staged;
            }
            for (int i = 0; i < parts; ++i) {
                key[b] = key_max(key[b], key_of(vec_load(from + i * VEC_BYTES), dtype, drop_nan), dtype);
            }
        }
    }
    return magnitudes_to_floats(key_magnitude(fold_keys(key, FLOATS, dtype), dtype, drop_nan), dtype);
}

VEC_INLINE void fp8_group(struct encode_how how, const struct quant_job *job, const struct quant_copy *copy,
                          int64_t r, int64_t c, int64_t rows) {
    const struct quant_matrix *m = &copy->operand;
    const struct scale_layout *layout = &copy->scale_layout;
    const struct fp8_group group = {operand_at(m, r, c, how.dtype), m->row_step * element_bytes(how.dtype),
                                    rows, min_int64(fp8_group_columns(copy->block_rows), m->columns - c)};
    const vecf all = fp8_group_amax(&group, how.dtype, false);
    vecf amax = all;
    if (!how.is_careful && any32(above32((vec32)all, 0x7F800000u))) {
        amax = fp8_group_amax(&group, how.dtype, true);
    }
    const struct fp8_scales scales =
        fp8_scales_from_amax(amax, &job->spec, how, fp8_scale_limit(&job->spec, m->dtype));
    float each[FLOATS];
    float apply[FLOATS];
    float stored[FLOATS];
    vec_store(each, (vec32)all);
    vec_store(apply, (vec32)scales.apply);
    vec_store(stored, (vec32)scales.stored);
    float *const scale =
        (float *)copy->scale + r / layout->row_per * layout->row_step + c / FP8_BLOCK * layout->column_step;
    for (int b = 0; b * FP8_BLOCK < group.columns; ++b) {
        scale[b * layout->column_step] = stored[b];
    }
    for (int64_t i = 0; i < rows; ++i) {
        for (int b = 0; b * FP8_BLOCK < group.columns; ++b) {
            const int64_t place = (int64_t)b * FP8_BLOCK;
            const char *const x = group.x + i * group.row_bytes + place * element_bytes(how.dtype);
            uint8_t *const data = copy->data + (r + i) * copy->data_row_step + c + place;
            const int64_t n = min_int64(FP8_BLOCK, group.columns - place);
            if (rows == 1) {
                prefetch_run(x + AHEAD_BYTES, FP8_BLOCK * element_bytes(how.dtype));
            }
            if (n == FP8_BLOCK && is_plain_amax(how, each[b], apply[b])) {
                encode_run(how, x, FP8_BLOCK, apply[b], true, data); /* a constant, so without a loop's end */
            } else {
                encode_run(how, x, n, apply[b], false, data);
            }
        }
    }
}

VEC_INLINE void fp8_block_rows(struct encode_how how, const struct quant_job *job,
                               const struct quant_copy *copy, int64_t r, int64_t r_end) {
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        for (int64_t c = 0; c < copy->operand.columns; c += fp8_group_columns(copy->block_rows)) {
            fp8_group(how, job, copy, row, c, min_int64(copy->block_rows, r_end - row));
        }
    }
}

/* ---- which of them ---- */

VEC_INLINE void quantize_fp8_how(struct encode_how how, const struct quant_job *job,
                                 const struct quant_copy *copy, int64_t r, int64_t r_end) {
    if (copy->operand.column_step != 1) {
        quantize_fp8_columns(how, job, copy, r, r_end);
    } else if (job->spec.format == OPAQ_FP8) {
        fp8_tensor_rows(how, job, copy, r, r_end);
    } else if (job->spec.format == OPAQ_FP8ROW) {
        fp8_scaled_rows(how, job, copy, r, r_end);
    } else {
        fp8_block_rows(how, job, copy, r, r_end);
    }
}

VEC_INLINE void quantize_fp8_rule(enum opaq_element dtype, enum opaq_element element,
                                  const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                  int64_t r_end) {
    if (job->spec.rule == OPAQ_RULE_TE) {
        const struct encode_how how = {.dtype = dtype, .element = element};
        quantize_fp8_how(how, job, copy, r, r_end);
    } else {
        const struct encode_how how = {.dtype = dtype,
                                       .element = element,
                                       .is_careful = true,
                                       .divides = true,
                                       .drops_zero_sign = job->spec.rule == OPAQ_RULE_COMPRESSED_TENSORS};
        quantize_fp8_how(how, job, copy, r, r_end);
    }
}

VEC_INLINE void quantize_fp8_dtype(enum opaq_element dtype, const struct quant_job *job,
                                   const struct quant_copy *copy, int64_t r, int64_t r_end) {
    if (job->spec.element == OPAQ_E5M2) {
        quantize_fp8_rule(dtype, OPAQ_E5M2, job, copy, r, r_end);
    } else {
        quantize_fp8_rule(dtype, OPAQ_E4M3, job, copy, r, r_end);
    }
}

/* Whether the vectors' arithmetic goes with the tensor's factor: under rule te above 0 and finite, else not negative. A
 * caller may give any. */
static inline bool fp8_is_usual(const struct quant_job *job) {
    const float factor = job->tensor_scale;
    return job->spec.format != OPAQ_FP8 ||
           (job->spec.rule == OPAQ_RULE_TE ? factor > 0.0f && float_is_finite(factor)
                                           : float_to_bits(factor) >> 31 == 0);
}

static inline void quantize_fp8_vec(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                    int64_t r_end) {
    const bool is_along = (copy->operand.column_step == 1 || copy->operand.row_step == 1) &&
                          copy->data_column_step == 1 && copy->operand.columns > 0;
    if (!is_along || !fp8_is_usual(job) || (job->spec.options & OPAQ_STOCHASTIC)) {
        (job->spec.format == OPAQ_FP8 ? quantize_fp8_tensor_ref : quantize_fp8_blocks_ref)(job, copy, r, r_end);
    } else if (copy->operand.dtype == OPAQ_BF16) {
        quantize_fp8_dtype(OPAQ_BF16, job, copy, r, r_end);
    } else if (copy->operand.dtype == OPAQ_F16) {
        quantize_fp8_dtype(OPAQ_F16, job, copy, r, r_end);
    } else {
        quantize_fp8_dtype(OPAQ_F32, job, copy, r, r_end);
    }
}

#endif
