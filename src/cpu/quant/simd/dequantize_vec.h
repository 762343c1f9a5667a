/* cpu/quant/simd/dequantize_vec.h: dequantize, in vectors. Depends on dequantize_columns_vec.h and lookup_vec.h. Specification:
 * docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_DEQUANTIZE_VEC_H
#define OPAQ_CPU_QUANT_SIMD_DEQUANTIZE_VEC_H

#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/simd/dequantize_columns_vec.h"
#include "cpu/quant/simd/lookup_vec.h"

/* What is decoded. Constants in what is inlined into an out-of-line function, except `spec`. */
struct decode_kind {
    enum opaq_element dtype;
    enum opaq_element element;
    int block; /* elements under one scale, or 128 */
    const struct opaq_spec *spec;
};

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

/* The same for any dtype. */
VEC_INLINE void decode_run_dtype(enum opaq_element element, int block, struct decode_kind kind,
                                 const uint8_t *codes, int64_t n, const float *factors, bool may_be_nan,
                                 bool streams, char *y) {
    const struct opaq_spec *const spec = kind.spec;
    if (may_be_nan) {
        FOR_DTYPE(kind.dtype, decode_run((struct decode_kind){DTYPE, element, block, spec}, codes, n, factors,
                                         true, false, y));
    } else if (streams) {
        FOR_DTYPE(kind.dtype, decode_run((struct decode_kind){DTYPE, element, block, spec}, codes, n, factors,
                                         false, true, y));
    } else {
        FOR_DTYPE(kind.dtype, decode_run((struct decode_kind){DTYPE, element, block, spec}, codes, n, factors,
                                         false, false, y));
    }
}

/* The same for any format, out of line. */
VEC_OUTLINE void decode_run_of(struct decode_kind kind, const uint8_t *codes, int64_t n, const float *factors,
                               bool may_be_nan, bool streams, char *y) {
    if (kind.element == OPAQ_E2M1 && kind.block == 16) {
        decode_run_dtype(OPAQ_E2M1, 16, kind, codes, n, factors, may_be_nan, streams, y);
    } else if (kind.element == OPAQ_E2M1) {
        decode_run_dtype(OPAQ_E2M1, 32, kind, codes, n, factors, may_be_nan, streams, y);
    } else if (kind.block == 32) {
        FOR_FP8_ELEMENT(kind.element,
                        decode_run_dtype(ELEMENT, 32, kind, codes, n, factors, may_be_nan, streams, y));
    } else {
        FOR_FP8_ELEMENT(kind.element,
                        decode_run_dtype(ELEMENT, 128, kind, codes, n, factors, may_be_nan, streams, y));
    }
}

/* The same, the whole of it or what is left of it. */
static inline void decode_stretch(struct decode_kind kind, const uint8_t *codes, int64_t n,
                                  const struct decode_factors *factors, bool streams, char *y) {
    const int64_t bytes = element_bytes(kind.dtype);
    const int packing = kind.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t whole = n / STEP * STEP;
    decode_run_of(kind, codes, whole, factors->value, !factors->is_usual, streams, y);
    if (whole < n) {
        uint8_t staged_codes[STEP] = {0};
        char staged[STEP * 4];
        float rest[2] = {factors->value[whole / kind.block], 0.0f};
        if (STEP > kind.block && n - whole > kind.block) {
            rest[1] = factors->value[whole / kind.block + 1];
        }
        memcpy(staged_codes, codes + whole / packing, (size_t)ceil_div(n - whole, packing));
        decode_run_of(kind, staged_codes, STEP, rest, true, false, staged);
        memcpy(y + whole * bytes, staged, (size_t)((n - whole) * bytes));
    }
}

/* Rows under one amax or none, to 16-bit elements: whole blocks are looked up. */
static inline void dequantize_by_lookup(struct decode_kind kind, const struct quant_copy *copy, int64_t r,
                                        int64_t r_end, bool streams) {
    const struct quant_matrix *m = &copy->operand;
    struct lookup table;
    struct decode_factors factors;
    uint8_t scales[SCALES_AT_ONCE];
    lookup_make_of(kind.spec, copy->amax == NULL ? 0.0f : copy->amax[0], kind.dtype, &table);
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t c = 0; c < m->columns; c += SCALED_AT_ONCE) {
            const int64_t n = min_int64(SCALED_AT_ONCE, m->columns - c);
            const int64_t whole = n / kind.block * kind.block;
            const uint8_t *const codes = copy->data + (row * copy->data_row_step + c) / 2;
            char *const y = (char *)m->data + (row * m->row_step + c) * 2;
            load_scales(copy, row, c / kind.block, whole / kind.block, scales);
            lookup_run_of(&table, codes, scales, whole, kind.block, streams, y);
            if (whole < n) {
                factors_of_bytes(copy, kind.spec, row, (c + whole) / kind.block, 1, &factors);
                decode_stretch(kind, codes + whole / 2, n - whole, &factors, false, y + whole * 2);
            }
        }
    }
}

static inline void dequantize_rows(struct decode_kind kind, const struct quant_copy *copy, int64_t r,
                                   int64_t r_end) {
    const struct quant_matrix *m = &copy->operand;
    const int packing = kind.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t bytes = element_bytes(kind.dtype);
    const bool streams = decode_streams(m);
    struct decode_factors factors;
    const bool is_many = (r_end - r) * m->columns >= LOOKUP_WORTH;
    if (kind.element == OPAQ_E2M1 && kind.dtype != OPAQ_F32 && copy->amax_step == 0 && is_many) {
        dequantize_by_lookup(kind, copy, r, r_end, streams);
        r = r_end;
    }
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

VEC_OUTLINE void dequantize_along_rows(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                       int64_t r_end) {
    const enum opaq_format format = (enum opaq_format)job->spec.format;
    const int block = format == OPAQ_NVFP4 ? 16 : format == OPAQ_MXFP4 || format == OPAQ_MXFP8 ? 32 : 128;
    const struct decode_kind kind = {copy->operand.dtype, (enum opaq_element)job->spec.element, block,
                                     &job->spec};
    dequantize_rows(kind, copy, r, r_end);
}

static inline void dequantize_vec(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                  int64_t r_end) {
    const bool is_tiled = copy->tile_rows != 0;
    if (!is_tiled && copy->operand.column_step == 1 && copy->data_column_step == 1 && !copy->is_hadamard) {
        dequantize_along_rows(job, copy, r, r_end);
    } else if (!is_tiled && copy->operand.row_step == 1) {
        dequantize_columns(job, copy, r, r_end);
    } else {
        dequantize_ref(job, copy, r, r_end);
    }
}

#endif
