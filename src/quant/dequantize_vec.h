/* quant/dequantize_vec.h: dequantize along rows that lie in memory, in vectors. Depends on decode_vec.h. Specification:
 * docs/formats.md. */
#ifndef OPAQ_QUANT_DEQUANTIZE_VEC_H
#define OPAQ_QUANT_DEQUANTIZE_VEC_H

#include "base/checked.h"
#include "base/float_bits.h"
#include "format/swizzle.h"
#include "quant/decode_vec.h"
#include "quant/quant_job.h"
#include "quant/quant_table_ref.h"

/* Elements whose scales are looked up together. */
enum { SCALED_AT_ONCE = 2048, SCALES_AT_ONCE = SCALED_AT_ONCE / 16 };

/* What is decoded; constants where it is used, except `spec`. */
struct decode_kind {
    enum opaq_element dtype;
    enum opaq_element element;
    int block; /* elements under one scale, or 128 */
    const struct opaq_spec *spec;
};

/* What codes are multiplied with, one for every block. */
struct decode_factors {
    float value[SCALES_AT_ONCE];
    bool is_usual; /* all finite, not 0 and far from the largest float */
};

/* `count` scale bytes of a row from block `block` on, zeros behind them. */
static void load_scales(const struct quant_copy *copy, int64_t row, int64_t block, int64_t count,
                        uint8_t codes[SCALES_AT_ONCE]) {
    const uint8_t *const scale = copy->scale;
    const struct scale_layout *layout = &copy->scale_layout;
    if (layout->swizzled_columns == 0) {
        memcpy(codes, scale + row * layout->row_step + block, (size_t)count);
    } else {
        for (int64_t i = 0; i < count; i += SWIZZLE_COLUMNS) {
            memcpy(codes + i, scale + swizzle_offset(row, block + i, layout->swizzled_columns),
                   (size_t)min_int64(SWIZZLE_COLUMNS, count - i));
        }
    }
    memset(codes + count, 0, (size_t)(round_up(count, FLOATS) - count));
}

/* nvfp4_decode_factor() */
VEC_INLINE vecf nvfp4_factors(vec32 codes, const struct opaq_spec *spec, float stored) {
    const vecf scale = e4m3_values(codes);
    if ((spec->options & OPAQ_GLOBAL) == 0) {
        return scale * stored * (1.0f / (6.0f * (float)spec->e4m3_max));
    }
    if (spec->rule == OPAQ_RULE_MODELOPT) {
        return scale * stored;
    }
    const mask32 zeros = equal32((vec32)scale & 0x7FFFFFFFu, 0);
    const vecf factors = scale / stored;
    return stored == 0.0f ? (vecf)replace32(zeros, (vec32)factors, vec32_set(0)) : factors;
}

VEC_INLINE void factors_of_bytes(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t row,
                                 int64_t block, int64_t count, struct decode_factors *factors) {
    uint8_t codes[SCALES_AT_ONCE];
    load_scales(copy, row, block, count, codes);
    factors->is_usual = true;
    for (int64_t i = 0; i < count; i += FLOATS) {
        const vec32 some = load_bytes_as_dwords(codes + i);
        const vecf values = spec->format == OPAQ_NVFP4
                                ? nvfp4_factors(some, spec, copy->amax[row * copy->amax_step])
                                : e8m0_values(some);
        vec_store(factors->value + i, (vec32)values);
        factors->is_usual &= !any32(above32((vec32)values & 0x7FFFFFFFu, (127u + 118u) << 23));
    }
}

VEC_INLINE void factors_of_floats(const struct quant_copy *copy, int64_t row, int64_t c, int64_t n,
                                  struct decode_factors *factors) {
    const struct scale_layout *layout = &copy->scale_layout;
    const float *const scale = (const float *)copy->scale + row / layout->row_per * layout->row_step;
    const bool is_one = layout->column_step == 0;
    factors->is_usual = true;
    for (int64_t i = 0; i < ceil_div(n, 128); ++i) {
        const float value = scale[is_one ? 0 : (c / 128 + i) * layout->column_step];
        factors->value[i] = value;
        factors->is_usual &= value != 0.0f && float_abs(value) < 0x1p118f;
    }
}

/* n elements of a row that have their factors, n a multiple of STEP or the output large enough. */
VEC_INLINE void decode_run(struct decode_kind kind, const uint8_t *codes, int64_t n, const float *factors,
                           bool may_be_nan, bool streams, char *y) {
    const int64_t step_bytes = STEP * element_bytes(kind.dtype);
    for (int64_t i = 0; i * STEP < n; ++i) {
        const struct step step =
            kind.element == OPAQ_E2M1
                ? decode_pairs(codes + i * FLOATS, kind.dtype,
                               STEP > kind.block ? set_halves(&factors[2 * i], &factors[2 * i + 1])
                                                 : vecf_set(factors[i * STEP / kind.block]),
                               may_be_nan)
                : decode_bytes(codes + i * STEP, kind.element, kind.dtype, factors[i * STEP / kind.block],
                               may_be_nan);
        step_store(y + i * step_bytes, step, kind.dtype, streams);
    }
}

/* The same, the whole of it or what is left of it. */
VEC_INLINE void decode_stretch(struct decode_kind kind, const uint8_t *codes, int64_t n,
                               const struct decode_factors *factors, bool streams, char *y) {
    const int64_t bytes = element_bytes(kind.dtype);
    const int packing = kind.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t whole = n / STEP * STEP;
    if (!factors->is_usual) {
        decode_run(kind, codes, whole, factors->value, true, false, y);
    } else if (streams) {
        decode_run(kind, codes, whole, factors->value, false, true, y);
    } else {
        decode_run(kind, codes, whole, factors->value, false, false, y);
    }
    if (whole < n) {
        uint8_t staged_codes[STEP] = {0};
        char staged[STEP * 4];
        float rest[2] = {factors->value[whole / kind.block], 0.0f};
        if (STEP > kind.block && n - whole > kind.block) {
            rest[1] = factors->value[whole / kind.block + 1];
        }
        memcpy(staged_codes, codes + whole / packing, (size_t)ceil_div(n - whole, packing));
        decode_run(kind, staged_codes, STEP, rest, true, false, staged);
        memcpy(y + whole * bytes, staged, (size_t)((n - whole) * bytes));
    }
}

/* Whether so much is written that it goes past the caches. */
static bool decode_streams(const struct quant_matrix *m, const char *y) {
    const int64_t row_bytes = m->row_step * element_bytes(m->dtype);
    const int64_t large = 8 << 20;
    return m->rows * row_bytes >= large && row_bytes % VEC_BYTES == 0 && (uintptr_t)y % VEC_BYTES == 0;
}

VEC_INLINE void dequantize_rows(struct decode_kind kind, const struct quant_copy *copy, int64_t r,
                                int64_t r_end) {
    const struct quant_matrix *m = &copy->operand;
    const int packing = kind.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t bytes = element_bytes(kind.dtype);
    const bool streams = decode_streams(m, m->data);
    struct decode_factors factors;
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t c = 0; c < m->columns; c += SCALED_AT_ONCE) {
            const int64_t n = min_int64(SCALED_AT_ONCE, m->columns - c);
            if (kind.block == 128) {
                factors_of_floats(copy, row, c, n, &factors);
            } else {
                factors_of_bytes(copy, kind.spec, row, c / kind.block, ceil_div(n, kind.block), &factors);
            }
            decode_stretch(kind, copy->data + (row * copy->data_row_step + c) / packing, n, &factors, streams,
                           (char *)m->data + (row * m->row_step + c) * bytes);
        }
    }
    if (streams) {
        _mm_sfence();
    }
}

VEC_INLINE void dequantize_dtype(enum opaq_element element, int block, const struct quant_job *job,
                                 const struct quant_copy *copy, int64_t r, int64_t r_end) {
    if (copy->operand.dtype == OPAQ_BF16) {
        dequantize_rows((struct decode_kind){OPAQ_BF16, element, block, &job->spec}, copy, r, r_end);
    } else if (copy->operand.dtype == OPAQ_F16) {
        dequantize_rows((struct decode_kind){OPAQ_F16, element, block, &job->spec}, copy, r, r_end);
    } else {
        dequantize_rows((struct decode_kind){OPAQ_F32, element, block, &job->spec}, copy, r, r_end);
    }
}

static inline void dequantize_vec(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                  int64_t r_end) {
    const struct scale_layout *layout = &copy->scale_layout;
    const enum opaq_format format = (enum opaq_format)job->spec.format;
    const bool has_bytes = format == OPAQ_MXFP8 || format == OPAQ_MXFP4 || format == OPAQ_NVFP4;
    const bool is_along_rows = copy->operand.column_step == 1 && copy->data_column_step == 1 &&
                               !copy->is_hadamard &&
                               (!has_bytes || layout->column_step == 1 || layout->swizzled_columns != 0);
    if (!is_along_rows) {
        dequantize_ref(job, copy, r, r_end);
    } else if (format == OPAQ_NVFP4) {
        dequantize_dtype(OPAQ_E2M1, 16, job, copy, r, r_end);
    } else if (format == OPAQ_MXFP4) {
        dequantize_dtype(OPAQ_E2M1, 32, job, copy, r, r_end);
    } else if (format == OPAQ_MXFP8 && job->spec.element == OPAQ_E4M3) {
        dequantize_dtype(OPAQ_E4M3, 32, job, copy, r, r_end);
    } else if (format == OPAQ_MXFP8) {
        dequantize_dtype(OPAQ_E5M2, 32, job, copy, r, r_end);
    } else if (job->spec.element == OPAQ_E4M3) {
        dequantize_dtype(OPAQ_E4M3, 128, job, copy, r, r_end);
    } else {
        dequantize_dtype(OPAQ_E5M2, 128, job, copy, r, r_end);
    }
}

#endif
