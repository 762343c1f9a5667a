/* cpu/quant/simd/quantize_nvfp4_both_vec.h: both copies of nvfp4 in one pass over x, in vectors. Depends on
 * quantize_both_vec.h and quantize_nvfp4_columns_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_NVFP4_BOTH_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_NVFP4_BOTH_VEC_H

#include "cpu/quant/simd/quantize_both_vec.h"
#include "cpu/quant/simd/quantize_nvfp4_columns_vec.h"

_Static_assert((int)NVFP4_BUFFER_COLUMNS == (int)BOTH_COLUMNS, "a buffer is as wide as a part");

/* Steps of a row that make a vector of codes, rows whose codes make a word, blocks of a row of a part. */
enum { NVFP4_BOTH_STEPS = 4, NVFP4_BOTH_ROWS = 4, NVFP4_BOTH_BLOCKS = BOTH_COLUMNS / HELD_ROWS };

/* Codes of NVFP4_BOTH_STEPS steps from s on, of NVFP4_BOTH_ROWS rows of both copies: each row's for the rowwise one,
 * and words of theirs for the columnwise one. */
VEC_INLINE void nvfp4_both_steps(struct encode_how how, const char *x, int64_t row_bytes, int64_t ahead, int s,
                                 const float *row_factors, const struct step_floats *column_factors,
                                 bool is_regular, bool streams, uint8_t *rowwise, int64_t rowwise_step,
                                 uint8_t *words) {
    const int64_t step_bytes = STEP * element_bytes(how.dtype);
    vec16 down[NVFP4_BOTH_STEPS] = {vec16_set(0), vec16_set(0), vec16_set(0), vec16_set(0)};
    for (int i = NVFP4_BOTH_ROWS - 1; i >= 0; --i) {
        vec16 along[NVFP4_BOTH_STEPS];
        for (int k = 0; k < NVFP4_BOTH_STEPS; ++k) {
            const char *const from = x + i * row_bytes + (s + k) * step_bytes;
            const struct step step = step_load(from, how.dtype);
            prefetch_step(from + ahead, how.dtype);
            along[k] = both_along(how, step, row_factors + i * NVFP4_BOTH_BLOCKS, s + k, is_regular);
            down[k] = down[k] << 4 | both_down(how, step, column_factors, s + k, is_regular);
        }
        vec_put(rowwise + i * rowwise_step + s * STEP / 2, pack_nibbles(along[0], along[1], along[2], along[3]),
                streams);
    }
    for (int k = 0; k < NVFP4_BOTH_STEPS; ++k) {
        vec_store(words + 2 * (s + k) * STEP, (vec32)down[k]);
    }
}

/* The same out of line. */
VEC_OUTLINE void nvfp4_both_steps_of(const struct block_kind *kind, const char *x, int64_t row_bytes, int s,
                                     const float *row_factors, const struct step_floats *column_factors,
                                     bool is_regular, uint8_t *rowwise, int64_t rowwise_step, uint8_t *words) {
    if (!is_regular) {
        FOR_DTYPE(kind->how.dtype,
                  nvfp4_both_steps(encode_te(DTYPE, OPAQ_E2M1), x, row_bytes, kind->ahead, s, row_factors,
                                   column_factors, false, kind->streams, rowwise, rowwise_step, words));
    } else if (kind->streams) {
        FOR_DTYPE(kind->how.dtype,
                  nvfp4_both_steps(encode_te(DTYPE, OPAQ_E2M1), x, row_bytes, kind->ahead, s, row_factors,
                                   column_factors, true, true, rowwise, rowwise_step, words));
    } else {
        FOR_DTYPE(kind->how.dtype,
                  nvfp4_both_steps(encode_te(DTYPE, OPAQ_E2M1), x, row_bytes, kind->ahead, s, row_factors,
                                   column_factors, true, false, rowwise, rowwise_step, words));
    }
}

/* NVFP4_BOTH_ROWS rows from row i of a part on. */
static inline void nvfp4_both_rows(const struct block_kind *kind, const char *x, int64_t row_bytes,
                                   const struct both_scales *scales, int i, uint8_t *rowwise,
                                   int64_t rowwise_step, uint8_t *words) {
    const float *const row_factors = scales->row_factors + i * NVFP4_BOTH_BLOCKS;
    bool rows_are_regular = true;
    for (int k = 0; k < NVFP4_BOTH_ROWS; ++k) {
        rows_are_regular = rows_are_regular && scales->row_is_regular[i + k];
    }
    for (int s = 0; s < BOTH_STEPS; s += NVFP4_BOTH_STEPS) {
        const bool is_regular =
            rows_are_regular && scales->column_is_regular[s] && scales->column_is_regular[s + 2];
        nvfp4_both_steps_of(kind, x, row_bytes, s, row_factors, scales->column_factors, is_regular, rowwise,
                            rowwise_step, words);
    }
}

/* HELD_ROWS rows and BOTH_COLUMNS columns from (row, c) on, block `block` of the buffer; the next part is
 * `kind->ahead` bytes further. Returns false and writes nothing if there is a NaN. */
static inline bool nvfp4_both_part(const struct block_kind *kind, const struct quant_copy *rowwise,
                                   struct nvfp4_buffer *buffer, int64_t block, int64_t row, int64_t c) {
    const int64_t bytes = element_bytes(kind->how.dtype);
    const int64_t row_bytes = rowwise->operand.row_step * bytes;
    const int64_t data_step = rowwise->data_row_step / 2;
    const char *const x = (const char *)rowwise->operand.data + row * row_bytes + c * bytes;
    struct both_globals globals = {.column = buffer->global, .column_inverse = buffer->inverse};
    struct both_scales scales;
    for (int i = 0; i < HELD_ROWS; ++i) {
        globals.row[i] = nvfp4_global_of_stored(kind->spec, rowwise->amax[(row + i) * rowwise->amax_step]);
    }
    both_find_scales_of(kind, x, row_bytes, &globals, &scales);
    if (scales.has_nans) {
        return false;
    }
    memcpy(buffer->scales + block * NVFP4_SCALE_PITCH, scales.column_codes, BOTH_COLUMNS);
    for (int i = 0; i < HELD_ROWS; ++i) {
        store_scales(rowwise, row + i, c / HELD_ROWS, NVFP4_BOTH_BLOCKS,
                     scales.row_codes + i * NVFP4_BOTH_BLOCKS);
    }
    for (int i = 0; i < HELD_ROWS; i += NVFP4_BOTH_ROWS) {
        nvfp4_both_rows(kind, x + i * row_bytes, row_bytes, &scales, i,
                        rowwise->data + (row + i) * data_step + c / 2, data_step,
                        buffer_codes(buffer, block, i / NVFP4_BOTH_ROWS, 0));
    }
    return true;
}

#endif
