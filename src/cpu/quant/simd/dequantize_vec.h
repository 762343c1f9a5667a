/* cpu/quant/simd/dequantize_vec.h: dequantize, in vectors. Depends on dequantize_columns_vec.h and lookup_vec.h.
 * Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_DEQUANTIZE_VEC_H
#define OPAQ_CPU_QUANT_SIMD_DEQUANTIZE_VEC_H

#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/simd/dequantize_columns_vec.h"
#include "cpu/quant/simd/lookup_vec.h"

/* The kind of decoding; constants where functions are inlined. */
struct decode_kind {
    enum opaq_element dtype;
    enum opaq_element element;
    int block_bits; /* log2 of the elements under one scale, or of 128 */
};

/* Prefetch distance of 8-bit codes, in bytes: a page, because the processor's own prefetchers stop at its end. */
enum { DECODE_AHEAD = 4096 };

/* n elements of a row that have their factors, n a multiple of STEP or the output large enough. */
VEC_INLINE void decode_run(struct decode_kind kind, const uint8_t *codes, int64_t n, const float *factors,
                           bool may_be_nan, bool streams, char *y) {
    const int64_t step_bytes = STEP * element_bytes(kind.dtype);
    const int block = 1 << kind.block_bits;
    for (int64_t i = 0; i * STEP < n; ++i) {
        if (kind.element != OPAQ_E2M1 && !may_be_nan) {
            __builtin_prefetch(codes + i * STEP + DECODE_AHEAD);
        }
        const struct step step =
            kind.element == OPAQ_E2M1
                ? decode_pairs(codes + i * FLOATS, kind.dtype,
                               STEP > block ? set_halves(&factors[2 * i], &factors[2 * i + 1])
                                            : vecf_set(factors[i * STEP / block]),
                               may_be_nan)
                : decode_bytes(codes + i * STEP, kind.element, kind.dtype, factors[i * STEP / block],
                               may_be_nan);
        step_store(y + i * step_bytes, step, kind.dtype, streams);
    }
}

/* The same for any dtype. */
VEC_INLINE void decode_run_dtype(enum opaq_element dtype, enum opaq_element element, int block_bits,
                                 const uint8_t *codes, int64_t n, const float *factors, bool may_be_nan,
                                 bool streams, char *y) {
    if (may_be_nan) {
        FOR_DTYPE(dtype, decode_run((struct decode_kind){DTYPE, element, block_bits}, codes, n, factors, true,
                                    false, y));
    } else if (streams) {
        FOR_DTYPE(dtype, decode_run((struct decode_kind){DTYPE, element, block_bits}, codes, n, factors, false,
                                    true, y));
    } else {
        FOR_DTYPE(dtype, decode_run((struct decode_kind){DTYPE, element, block_bits}, codes, n, factors, false,
                                    false, y));
    }
}

/* The same for any format, out of line. */
VEC_OUTLINE void decode_run_of(struct decode_kind kind, const uint8_t *codes, int64_t n, const float *factors,
                               bool may_be_nan, bool streams, char *y) {
    const enum opaq_element dtype = kind.dtype;
    if (kind.element == OPAQ_E2M1 && kind.block_bits == 4) {
        decode_run_dtype(dtype, OPAQ_E2M1, 4, codes, n, factors, may_be_nan, streams, y);
    } else if (kind.element == OPAQ_E2M1) {
        decode_run_dtype(dtype, OPAQ_E2M1, 5, codes, n, factors, may_be_nan, streams, y);
    } else if (kind.block_bits == 5) {
        FOR_FP8_ELEMENT(kind.element,
                        decode_run_dtype(dtype, ELEMENT, 5, codes, n, factors, may_be_nan, streams, y));
    } else {
        FOR_FP8_ELEMENT(kind.element,
                        decode_run_dtype(dtype, ELEMENT, 7, codes, n, factors, may_be_nan, streams, y));
    }
}

/* The last elements of a row, fewer than STEP. */
VEC_OUTLINE void decode_rest(struct decode_kind kind, const uint8_t *codes, int64_t n, const float *factors,
                             char *y) {
    const int packing = kind.element == OPAQ_E2M1 ? 2 : 1;
    const int block = 1 << kind.block_bits;
    uint8_t staged_codes[STEP] = {0};
    char staged[STEP * 4];
    const float each[2] = {factors[0], STEP > block && n > block ? factors[1] : 0.0f};
    memcpy(staged_codes, codes, (size_t)ceil_div(n, packing));
    decode_run_of(kind, staged_codes, STEP, each, true, false, staged);
    memcpy(y, staged, (size_t)(n * element_bytes(kind.dtype)));
}

/* Up to SCALED_AT_ONCE elements of row `row` from column c on, a multiple of a block. */
VEC_OUTLINE void dequantize_run(struct decode_kind kind, const struct opaq_spec *spec,
                                const struct quant_copy *copy, int64_t row, int64_t c, int64_t n,
                                bool streams) {
    const struct quant_matrix *m = &copy->operand;
    const bool is_packed = kind.element == OPAQ_E2M1;
    const int64_t bytes = element_bytes(kind.dtype);
    const int64_t at = row * copy->data_row_step + c;
    const uint8_t *const codes = copy->data + (is_packed ? at / 2 : at);
    char *const y = (char *)m->data + (row * m->row_step + c) * bytes;
    const int64_t whole = n / STEP * STEP;
    struct decode_factors factors;
    if (kind.block_bits == 7) {
        factors_of_floats(copy, row, c, n, &factors);
    } else {
        const int64_t block = 1 << kind.block_bits;
        factors_of_bytes(copy, spec, row, c >> kind.block_bits, (n + block - 1) >> kind.block_bits, &factors);
    }
    decode_run_of(kind, codes, whole, factors.value, !factors.all_in_range, streams, y);
    if (whole < n) {
        decode_rest(kind, codes + (is_packed ? whole / 2 : whole), n - whole,
                    factors.value + (whole >> kind.block_bits), y + whole * bytes);
    }
}

/* Rows under one amax or none, to 16-bit elements: whole blocks are looked up. */
VEC_INLINE void lookup_rows(struct decode_kind kind, const struct opaq_spec *spec,
                            const struct quant_copy *copy, const struct lookup *table, int64_t r, int64_t r_end,
                            bool streams) {
    const struct quant_matrix *m = &copy->operand;
    const int block = 1 << kind.block_bits;
    uint8_t buffer[SCALES_AT_ONCE];
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t c = 0; c < m->columns; c += SCALED_AT_ONCE) {
            const int64_t n = min_int64(SCALED_AT_ONCE, m->columns - c);
            const int64_t whole = n / block * block;
            const uint8_t *const scales = scales_at(copy, row, c / block, whole / block, buffer);
            lookup_run(table, copy->data + (row * copy->data_row_step + c) / 2, scales, whole, block, streams,
                       (char *)m->data + (row * m->row_step + c) * 2);
            if (whole < n) {
                dequantize_run(kind, spec, copy, row, c + whole, n - whole, false);
            }
        }
    }
}

/* The same for any format, out of line. */
VEC_OUTLINE void dequantize_by_lookup(struct decode_kind kind, const struct opaq_spec *spec,
                                      const struct quant_copy *copy, int64_t r, int64_t r_end, bool streams) {
    struct lookup table;
    lookup_make_of(spec, copy->amax == NULL ? 0.0f : copy->amax[0], kind.dtype, &table);
    const struct decode_kind nvfp4 = {kind.dtype, OPAQ_E2M1, 4};
    const struct decode_kind mxfp4 = {kind.dtype, OPAQ_E2M1, 5};
    if (kind.block_bits == 4 && streams) {
        lookup_rows(nvfp4, spec, copy, &table, r, r_end, true);
    } else if (kind.block_bits == 4) {
        lookup_rows(nvfp4, spec, copy, &table, r, r_end, false);
    } else if (streams) {
        lookup_rows(mxfp4, spec, copy, &table, r, r_end, true);
    } else {
        lookup_rows(mxfp4, spec, copy, &table, r, r_end, false);
    }
}

VEC_OUTLINE void dequantize_along_rows(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                       int64_t r_end) {
    const enum opaq_format format = (enum opaq_format)job->spec.format;
    const struct quant_matrix *m = &copy->operand;
    const struct decode_kind kind = {m->dtype, (enum opaq_element)job->spec.element,
                                     format == OPAQ_NVFP4                           ? 4
                                     : format == OPAQ_MXFP4 || format == OPAQ_MXFP8 ? 5
                                                                                    : 7};
    const bool streams = decode_streams(m);
    const bool is_many = (r_end - r) * m->columns >= LOOKUP_WORTH;
    if (kind.element == OPAQ_E2M1 && kind.dtype != OPAQ_F32 && copy->amax_step == 0 && is_many) {
        dequantize_by_lookup(kind, &job->spec, copy, r, r_end, streams);
        r = r_end;
    }
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t c = 0; c < m->columns; c += SCALED_AT_ONCE) {
            dequantize_run(kind, &job->spec, copy, row, c, min_int64(SCALED_AT_ONCE, m->columns - c), streams);
        }
    }
    if (streams) {
        _mm_sfence();
    }
}

void VEC_NAME(dequantize)(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
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
