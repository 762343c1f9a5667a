/* cpu/quant/simd/quantize_fp8_both_vec.h: both copies of fp8blk1 in one pass over x, in vectors. Depends on
 * quantize_fp8_columns_vec.h and region_vec.h. Specification: docs/formats.md.
 *
 * A part of x, FP8_BLOCK rows and FP8_BOTH_COLUMNS columns, is read once for the amaxes of both copies and once for
 * their codes, while the next part is prefetched. Only for rule te, and if no element is NaN, infinite or scaled beyond
 * the largest value. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_FP8_BOTH_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_FP8_BOTH_VEC_H

#include "cpu/quant/simd/quantize_fp8_columns_vec.h"
#include "cpu/quant/simd/region_vec.h"
#include "cpu/quant/simd/specialize_vec.h"

enum { FP8_BLOCK = 128, FP8_BOTH_COLUMNS = 512, FP8_BOTH_BLOCKS = FP8_BOTH_COLUMNS / FP8_BLOCK };

/* The factors of rows and columns, times regular_factor(), and the scales to store. */
struct fp8_both_scales {
    float row_apply[FP8_BLOCK * FP8_BOTH_BLOCKS];
    float row_stored[FP8_BLOCK * FP8_BOTH_BLOCKS];
    struct step_floats column_apply[FP8_BOTH_COLUMNS / STEP];
    float column_stored[FP8_BOTH_COLUMNS];
    bool is_regular;
};

/* Whether elements up to these, NaN standing for any, are regular under these factors: is_regular_amax(). */
VEC_INLINE bool are_regular_amaxes(enum opaq_element element, vecf amax, vecf apply) {
    const vec32 least = vec32_set(0x12800000u); /* 2^-90 */
    const uint32_t half_beyond = element == OPAQ_E4M3 ? 0x43E80000u : 0x47700000u;
    return !any32(above32((vec32)(amax * apply), half_beyond - 1u)) &&
           !any32(above32(least - min32((vec32)apply, least), 0));
}

/* FLOATS blocks, those of some rows; their keys are joined to those of the columns. */
VEC_INLINE void fp8_both_group(struct encode_how how, const struct opaq_spec *spec, const char *x,
                               int64_t row_bytes, float limit, vec32 *column_keys, float *apply, float *stored,
                               bool *is_regular) {
    const int parts = FP8_BLOCK * element_bytes(how.dtype) / VEC_BYTES;
    vec32 key[FLOATS];
    for (int b = 0; b < FLOATS; ++b) {
        const int column = b % FP8_BOTH_BLOCKS * parts;
        const char *const from = x + b / FP8_BOTH_BLOCKS * row_bytes + column * VEC_BYTES;
        key[b] = vec32_set(0);
        for (int i = 0; i < parts; ++i) {
            const vec32 part = key_of(vec_load(from + i * VEC_BYTES), how.dtype, false);
            column_keys[column + i] = key_max(column_keys[column + i], part, how.dtype);
            key[b] = key_max(key[b], part, how.dtype);
        }
    }
    const vecf amax = magnitudes_to_floats(fold_keys(key, FLOATS, how.dtype), how.dtype);
    const struct fp8_scales scales = fp8_scales_from_amax(amax, spec, how, limit);
    vec_store(apply, (vec32)(scales.apply * regular_factor(how.element)));
    vec_store(stored, (vec32)scales.stored);
    *is_regular = *is_regular && are_regular_amaxes(how.element, amax, scales.apply);
}

/* A step of columns. */
VEC_INLINE void fp8_both_column_step(struct encode_how how, const struct opaq_spec *spec, struct step keys,
                                     float limit, struct step_floats *apply, float *stored, bool *is_regular) {
    const struct step_floats amax = step_amaxes(keys, how.dtype, false);
    const struct fp8_scales even = fp8_scales_from_amax(amax.even, spec, how, limit);
    const struct fp8_scales odd = fp8_scales_from_amax(amax.odd, spec, how, limit);
    *apply =
        (struct step_floats){even.apply * regular_factor(how.element), odd.apply * regular_factor(how.element)};
    vec_store(stored, interleave_first((vec32)even.stored, (vec32)odd.stored));
    vec_store(stored + FLOATS, interleave_second((vec32)even.stored, (vec32)odd.stored));
    *is_regular = *is_regular && are_regular_amaxes(how.element, amax.even, even.apply) &&
                  are_regular_amaxes(how.element, amax.odd, odd.apply);
}

VEC_INLINE void fp8_both_find_scales(struct encode_how how, const struct opaq_spec *spec, const char *x,
                                     int64_t row_bytes, float limit, struct fp8_both_scales *scales) {
    enum { PARTS = FP8_BOTH_COLUMNS * 4 / VEC_BYTES, ROWS = FLOATS / FP8_BOTH_BLOCKS };
    const int step_parts = how.dtype == OPAQ_F32 ? 2 : 1;
    bool is_regular = true;
    vec32 keys[PARTS];
    memset(keys, 0, sizeof keys);
    for (int row = 0; row < FP8_BLOCK; row += ROWS) {
        fp8_both_group(how, spec, x + row * row_bytes, row_bytes, limit, keys,
                       scales->row_apply + row * FP8_BOTH_BLOCKS, scales->row_stored + row * FP8_BOTH_BLOCKS,
                       &is_regular);
    }
    for (int s = 0; s < FP8_BOTH_COLUMNS / STEP; ++s) {
        const vec32 *const first = keys + s * step_parts;
        fp8_both_column_step(how, spec, (struct step){{first[0], first[step_parts - 1]}}, limit,
                             &scales->column_apply[s], scales->column_stored + s * STEP, &is_regular);
    }
    scales->is_regular = is_regular;
}

/* Codes of a row of both copies. Prefetches the row at `next`. */
VEC_INLINE void fp8_both_row(struct encode_how how, const char *x, const char *next, const float *row_apply,
                             const struct step_floats *column_apply, bool streams, uint8_t *rowwise,
                             uint8_t *columnwise) {
    const int64_t step_bytes = STEP * element_bytes(how.dtype);
    for (int s = 0; s < FP8_BOTH_COLUMNS / STEP; s += 2) {
        const vecf along = vecf_set(row_apply[s * STEP / FP8_BLOCK]);
        vec16 rows[2];
        vec16 columns[2];
        for (int k = 0; k < 2; ++k) {
            const struct step step = step_load(x + (s + k) * step_bytes, how.dtype);
            const struct step_floats down = column_apply[s + k];
            for (int i = 0; i < step_bytes; i += 64) {
                __builtin_prefetch(next + (s + k) * step_bytes + i);
            }
            rows[k] = encode_regular(step, how.dtype, how.element, along, along);
            columns[k] = encode_regular(step, how.dtype, how.element, down.even, down.odd);
        }
        vec_put(rowwise + s * STEP, pack_bytes(rows[0], rows[1]), streams);
        vec_store(columnwise + s * STEP, pack_bytes(columns[0], columns[1]));
    }
}

static inline void fp8_both_store_scales(const struct quant_copy *rowwise, const struct quant_copy *columnwise,
                                         int64_t row, int64_t c, const struct fp8_both_scales *scales) {
    const struct scale_layout *along = &rowwise->scale_layout;
    const struct scale_layout *down = &columnwise->scale_layout;
    float *const rows = (float *)rowwise->scale + row * along->row_step + c / FP8_BLOCK * along->column_step;
    float *const columns =
        (float *)columnwise->scale + c * down->row_step + row / FP8_BLOCK * down->column_step;
    for (int64_t b = 0; b < FP8_BOTH_BLOCKS; ++b) {
        for (int64_t i = 0; i < FP8_BLOCK; ++i) {
            rows[i * along->row_step + b * along->column_step] = scales->row_stored[i * FP8_BOTH_BLOCKS + b];
        }
    }
    for (int64_t i = 0; i < FP8_BOTH_COLUMNS; ++i) {
        columns[i * down->row_step] = scales->column_stored[i];
    }
}

/* fp8_both_find_scales() and fp8_both_row(), out of line. */
VEC_OUTLINE void fp8_both_find_scales_of(struct encode_how how, const struct opaq_spec *spec, const char *x,
                                         int64_t row_bytes, float limit, struct fp8_both_scales *scales) {
    FOR_FP8_TE(how, fp8_both_find_scales(HOW, spec, x, row_bytes, limit, scales));
}

VEC_OUTLINE void fp8_both_row_of(struct encode_how how, const char *x, const char *next, const float *row_apply,
                                 const struct step_floats *column_apply, bool streams, uint8_t *rowwise,
                                 uint8_t *columnwise) {
    FOR_FP8_TE(how, fp8_both_row(HOW, x, next, row_apply, column_apply, streams, rowwise, columnwise));
}

/* FP8_BLOCK rows and FP8_BOTH_COLUMNS columns from (row, c) on; the next part is `ahead` bytes further. Returns false
 * and writes nothing if not all elements are regular. */
static inline bool fp8_both_part(struct encode_how how, const struct opaq_spec *spec,
                                 const struct quant_copy *rowwise, const struct quant_copy *columnwise,
                                 int64_t row, int64_t c, int64_t ahead, struct fp8_buffer *buffer) {
    const struct quant_matrix *m = &rowwise->operand;
    const int64_t row_bytes = m->row_step * element_bytes(how.dtype);
    const char *const x = (const char *)m->data + row * row_bytes + c * element_bytes(how.dtype);
    const bool streams = codes_stream(rowwise);
    struct fp8_both_scales scales;
    fp8_both_find_scales_of(how, spec, x, row_bytes, fp8_scale_limit(spec, m->dtype), &scales);
    if (!scales.is_regular) {
        return false;
    }
    fp8_both_store_scales(rowwise, columnwise, row, c, &scales);
    for (int i = 0; i < FP8_BLOCK; ++i) {
        const char *const from = x + i * row_bytes;
        fp8_both_row_of(how, from, from + ahead, scales.row_apply + i * FP8_BOTH_BLOCKS, scales.column_apply,
                        streams, rowwise->data + (row + i) * rowwise->data_row_step + c,
                        buffer->codes + i * FP8_PITCH);
    }
    fp8_transpose_all(buffer->codes, FP8_PITCH, true, columnwise, row, FP8_BLOCK, c, FP8_BOTH_COLUMNS);
    return true;
}

#endif
