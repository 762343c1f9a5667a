/* quant/quantize_nvfp4_both_vec.h: both copies of nvfp4 in one pass over x, in vectors. Depends on quantize_both_vec.h
 * and quantize_nvfp4_columns_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_QUANT_QUANTIZE_NVFP4_BOTH_VEC_H
#define OPAQ_QUANT_QUANTIZE_NVFP4_BOTH_VEC_H

#include "quant/quantize_both_vec.h"
#include "quant/quantize_nvfp4_columns_vec.h"

_Static_assert((int)NVFP4_STRIP == (int)BOTH_COLUMNS, "a strip is as wide as a part");

/* Codes of two rows of both copies: each row's for the rowwise one, and pairs of theirs for the columnwise one. */
VEC_INLINE void nvfp4_both_rows(struct block_kind kind, const char *x, int64_t row_bytes,
                                const float *row_factors, const struct step_floats *column_factors,
                                uint8_t *rowwise, int64_t rowwise_step, uint8_t *pairs) {
    enum { AT_ONCE = 4, BLOCKS = BOTH_COLUMNS / HELD_ROWS };
    const int64_t step_bytes = STEP * element_bytes(kind.how.dtype);
    for (int s = 0; s < BOTH_STEPS; s += AT_ONCE) {
        vec16 along[2][AT_ONCE];
        vec16 down[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) {
            const char *const from = x + (s + k) * step_bytes;
            const struct step first = step_load(from, kind.how.dtype);
            const struct step second = step_load(from + row_bytes, kind.how.dtype);
            prefetch_step(from + kind.ahead, kind.how.dtype);
            prefetch_step(from + kind.ahead + row_bytes, kind.how.dtype);
            along[0][k] = both_along(kind, first, row_factors, s + k);
            along[1][k] = both_along(kind, second, row_factors + BLOCKS, s + k);
            down[k] = both_down(kind, first, column_factors, s + k) |
                      both_down(kind, second, column_factors, s + k) << 4;
        }
        for (int i = 0; i < 2; ++i) {
            vec_put(rowwise + i * rowwise_step + s * STEP / 2,
                    pack_nibbles(along[i][0], along[i][1], along[i][2], along[i][3]), kind.streams);
        }
        vec_store(pairs + s * STEP, pack_bytes(down[0], down[1]));
        vec_store(pairs + (s + 2) * STEP, pack_bytes(down[2], down[3]));
    }
}

/* HELD_ROWS rows and BOTH_COLUMNS columns from (row, c) on, block `block` of the strip; what comes next lies `kind.ahead`
 * bytes on. False, and nothing is written, if they are not as usual. */
VEC_INLINE bool nvfp4_both_part(struct block_kind kind, const struct quant_copy *rowwise,
                                struct nvfp4_strip *strip, int64_t block, int64_t row, int64_t c) {
    enum { BLOCKS = BOTH_COLUMNS / HELD_ROWS };
    const int64_t bytes = element_bytes(kind.how.dtype);
    const int64_t row_bytes = rowwise->operand.row_step * bytes;
    const int64_t data_step = rowwise->data_row_step / 2;
    const char *const x = (const char *)rowwise->operand.data + row * row_bytes + c * bytes;
    struct both_globals globals = {.column = strip->global, .column_inverse = strip->inverse};
    struct both_scales scales;
    for (int i = 0; i < HELD_ROWS; ++i) {
        globals.row[i] = nvfp4_global_of_stored(kind.spec, rowwise->amax[(row + i) * rowwise->amax_step]);
    }
    both_find_scales(kind, x, row_bytes, &globals, &scales);
    if (!scales.is_plain) {
        return false;
    }
    memcpy(strip->scales + block * NVFP4_PITCH, scales.column_codes, BOTH_COLUMNS);
    for (int i = 0; i < HELD_ROWS; i += 2) {
        store_scales(rowwise, row + i, c / HELD_ROWS, BLOCKS, scales.row_codes + i * BLOCKS);
        store_scales(rowwise, row + i + 1, c / HELD_ROWS, BLOCKS, scales.row_codes + (i + 1) * BLOCKS);
        nvfp4_both_rows(kind, x + i * row_bytes, row_bytes, scales.row_factors + i * BLOCKS,
                        scales.column_factors, rowwise->data + (row + i) * data_step + c / 2, data_step,
                        strip->codes + (block * (HELD_ROWS / 2) + i / 2) * NVFP4_PITCH);
    }
    return true;
}

#endif
