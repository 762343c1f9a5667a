/* cpu/quant/simd/quantize_mx_both_vec.h: both copies of mxfp8 and mxfp4 in one pass over x, in vectors. Depends on
 * quantize_both_vec.h and quantize_mx_columns_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_MX_BOTH_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_MX_BOTH_VEC_H

#include "cpu/quant/simd/quantize_both_vec.h"
#include "cpu/quant/simd/quantize_mx_columns_vec.h"

/* Stores codes; bypasses the caches if `streams`. */
VEC_INLINE void mx_put(const vec16 codes[MX_STEPS], enum opaq_element element, bool streams, uint8_t *data) {
    if (element == OPAQ_E2M1) {
        vec_put(data, pack_nibbles(codes[0], codes[1], codes[2], codes[3]), streams);
    } else {
        vec_put(data, pack_bytes(codes[0], codes[1]), streams);
        vec_put(data + 2 * STEP, pack_bytes(codes[2], codes[3]), streams);
    }
}

/* Codes of a row of both copies. Prefetches the row at `next`. */
VEC_INLINE void mx_both_row(struct encode_how how, const char *x, const char *next, const float *row_factors,
                            const struct step_floats *column_factors, bool streams, uint8_t *rowwise,
                            uint8_t *columnwise) {
    const int packing = how.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t step_bytes = STEP * element_bytes(how.dtype);
    for (int s = 0; s < BOTH_STEPS; s += MX_STEPS) {
        vec16 along[MX_STEPS];
        vec16 down[MX_STEPS];
        for (int k = 0; k < MX_STEPS; ++k) {
            const struct step step = step_load(x + (s + k) * step_bytes, how.dtype);
            prefetch_step(next + (s + k) * step_bytes, how.dtype);
            along[k] = both_along(how, step, row_factors, s + k, true);
            down[k] = both_down(how, step, column_factors, s + k, true);
        }
        mx_put(along, how.element, streams, rowwise + s * STEP / packing);
        mx_put(down, how.element, streams, columnwise + s * STEP / packing);
    }
}

/* The same out of line. */
VEC_OUTLINE void mx_both_row_of(const struct block_kind *kind, const char *x, const float *row_factors,
                                const struct step_floats *column_factors, uint8_t *rowwise,
                                uint8_t *columnwise) {
    const char *const next = x + kind->ahead;
    FOR_BLOCK_TE(kind->how, FOR_FLAG(kind->streams, mx_both_row(HOW, x, next, row_factors, column_factors, FLAG,
                                                                rowwise, columnwise)));
}

/* MX_BLOCK rows and BOTH_COLUMNS columns from (row, c) on; the next part is `kind->ahead` bytes further.
 * Returns false and writes nothing if there is a NaN or an infinity; all other values are in range. */
static inline bool mx_both_part(const struct block_kind *kind, const struct quant_copy *rowwise,
                                const struct quant_copy *columnwise, int64_t row, int64_t c) {
    const int packing = kind->how.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t blocks = BOTH_COLUMNS / MX_BLOCK;
    const int64_t bytes = element_bytes(kind->how.dtype);
    const int64_t row_bytes = rowwise->operand.row_step * bytes;
    const char *const x = (const char *)rowwise->operand.data + row * row_bytes + c * bytes;
    struct both_scales scales;
    both_find_scales_of(kind, x, row_bytes, NULL, &scales);
    if (!scales.is_regular) {
        return false;
    }
    store_mx_column_scales(columnwise, c, BOTH_COLUMNS, row / MX_BLOCK, scales.column_codes);
    for (int i = 0; i < MX_BLOCK; ++i) {
        const char *const from = x + i * row_bytes;
        store_scales(rowwise, row + i, c / MX_BLOCK, blocks, scales.row_codes + i * blocks);
        uint8_t *const along = rowwise->data + ((row + i) * rowwise->data_row_step + c) / packing;
        uint8_t *const down = columnwise->data + ((row + i) * columnwise->data_column_step + c) / packing;
        mx_both_row_of(kind, from, scales.row_factors + i * blocks, scales.column_factors, along, down);
    }
    return true;
}

#endif
