/* definition/segment_ref.h: load, amax, encode and store of a segment of one operand row. Depends on format.
 * This is the reference: simple instead of fast. */
#ifndef OPAQ_DEFINITION_SEGMENT_REF_H
#define OPAQ_DEFINITION_SEGMENT_REF_H

#include <assert.h>
#include <string.h>

#include "backend/quant_job.h"
#include "base/checked.h"
#include "base/philox.h"
#include "definition/hadamard.h"
#include "definition/scale_rules.h"
#include "format/swizzle.h"
#include "format/tile.h"

/* Elements of the longest segment. Segments start at multiples of 16. */
enum { SEGMENT = 128 };

/* ---- operand elements ---- */

OPAQ_DEVICE static inline float matrix_at(const struct quant_matrix *m, int64_t index) {
    if (m->dtype == OPAQ_F32) {
        return ((const float *)m->data)[index];
    }
    const uint16_t code = ((const uint16_t *)m->data)[index];
    return m->dtype == OPAQ_BF16 ? decode_bf16(code) : decode_f16(code);
}

/* Loads elements (r, c) to (r, c+n-1) of the matrix; zeros beyond its last column. */
OPAQ_DEVICE static inline void segment_load(const struct quant_matrix *m, int64_t r, int64_t c, int n,
                                            float *values) {
    const int64_t start = r * m->row_step + c * m->column_step;
    const int64_t inside = m->columns - c;
    for (int i = 0; i < n; ++i) {
        values[i] = i < inside ? matrix_at(m, start + i * m->column_step) : 0.0f;
    }
}

/* Stores with rounding to the matrix's dtype; elements beyond its last column are dropped. */
OPAQ_DEVICE static inline void segment_store(const struct quant_matrix *m, int64_t r, int64_t c, int n,
                                             const float *values) {
    const int64_t start = r * m->row_step + c * m->column_step;
    const int inside = (int)max_int64(0, min_int64(n, m->columns - c));
    if (m->dtype == OPAQ_F32) {
        float *data = (float *)m->data + start;
        for (int i = 0; i < inside; ++i) {
            data[i * m->column_step] = float_is_nan(values[i]) ? float_nan() : values[i];
        }
    } else {
        uint16_t *data = (uint16_t *)m->data + start;
        const bool is_bf16 = m->dtype == OPAQ_BF16;
        for (int i = 0; i < inside; ++i) {
            data[i * m->column_step] =
                (uint16_t)(is_bf16 ? encode_bf16_ieee(values[i]) : encode_f16_ieee(values[i]));
        }
    }
}

/* Loads through the Hadamard transform if the copy has one; n is then 16. */
OPAQ_DEVICE static inline void copy_load(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r,
                                         int64_t c, int n, float *values) {
    assert(n > 0 && (!copy->is_hadamard || n == HADAMARD_SIZE));
    segment_load(&copy->operand, r, c, n, values);
    if (copy->is_hadamard) {
        hadamard_forward(values, spec->hadamard_mask);
    }
}

/* ---- amax, kept as the bits of a float that is not negative ---- */

/* Rule te ignores NaNs. Under the others one NaN makes the result NaN, whose bits are the largest. */
OPAQ_DEVICE static inline uint32_t amax_bits(uint32_t so_far, const float *values, int n, bool drop_nan) {
    for (int i = 0; i < n; ++i) {
        const uint32_t magnitude = float_to_bits(values[i]) & 0x7FFFFFFFu;
        if (magnitude > so_far && !(drop_nan && magnitude > 0x7F800000u)) {
            so_far = magnitude;
        }
    }
    return so_far;
}

OPAQ_DEVICE static inline float amax_from_bits(uint32_t bits) {
    return bits > 0x7F800000u ? float_nan() : float_from_bits(bits);
}

/* The amax of the block whose first element is (r, c). */
OPAQ_DEVICE static inline float block_amax(const struct quant_copy *copy, const struct opaq_spec *spec,
                                           int64_t r, int64_t c) {
    float values[SEGMENT];
    uint32_t bits = 0;
    const int64_t r_end = min_int64(r + copy->block_rows, copy->operand.rows);
    const int64_t c_end = min_int64(c + copy->block_columns, copy->operand.columns);
    const int length = (int)min_int64(copy->block_columns, SEGMENT);
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t column = c; column < c_end; column += length) {
            copy_load(copy, spec, row, column, length, values);
            bits = amax_bits(bits, values, length, spec->rule == OPAQ_RULE_TE);
        }
    }
    return amax_from_bits(bits);
}

/* ---- random bits ---- */

OPAQ_DEVICE static inline uint8_t random_byte(const struct opaq_random *random, uint32_t high_bit, int64_t row,
                                              int64_t column, int64_t columns, struct philox_block *block,
                                              int64_t *block_group) {
    const int64_t group = row * ceil_div(columns, 16) + column / 16;
    if (group != *block_group) {
        const struct philox_block counter = {{(uint32_t)group, (uint32_t)((uint64_t)group >> 32),
                                              (uint32_t)random->offset,
                                              (uint32_t)(random->offset >> 32) | high_bit}};
        *block = philox(counter, (uint32_t)random->seed, (uint32_t)(random->seed >> 32));
        *block_group = group;
    }
    const int place = (int)(column % 16);
    return (uint8_t)(block->word[place / 4] >> (place % 4 * 8));
}

/* One byte per element (r, c+i). fp8's columnwise copy is the transposed rowwise one, so it uses the same
 * random bits. */
OPAQ_DEVICE static inline void segment_random(const struct quant_job *job, const struct quant_copy *copy,
                                              int64_t r, int64_t c, int n, uint8_t *bytes) {
    struct philox_block block = {{0, 0, 0, 0}};
    int64_t group = -1;
    const bool columnwise = copy->usage == OPAQ_COLUMNWISE;
    const bool mirrored = columnwise && job->spec.format == OPAQ_FP8;
    const uint32_t high_bit = columnwise && !mirrored ? 0x80000000u : 0;
    for (int i = 0; i < n; ++i) {
        bytes[i] = mirrored
                       ? random_byte(&job->random, 0, c + i, r, copy->operand.rows, &block, &group)
                       : random_byte(&job->random, high_bit, r, c + i, copy->operand.columns, &block, &group);
    }
}

/* ---- codes ---- */

/* compressed-tensors and ModelOpt set the sign bit of values below zero, but not of a negative zero. */
OPAQ_DEVICE static inline uint32_t encode_e2m1_by_comparison(float value) {
    return float_is_nan(value) ? 7u : encode_e2m1(float_abs(value)) | (value < 0.0f ? 8u : 0u);
}

/* ModelOpt's MXFP4: halves round down, and zero is code 8. */
OPAQ_DEVICE static inline uint32_t encode_e2m1_half_down(float value) {
    static const float bounds[7] = {0.25f, 0.75f, 1.25f, 1.75f, 2.5f, 3.5f, 5.0f};
    if (float_is_nan(value)) {
        return 7;
    }
    uint32_t code = value > 0.0f ? 0u : 8u;
    for (int i = 0; i < 7; ++i) {
        code += float_abs(value) > bounds[i];
    }
    return code;
}

/* Encodes scaled values, one code per byte. `random` is used with OPAQ_STOCHASTIC only. */
OPAQ_DEVICE static inline void segment_encode(const struct opaq_spec *spec, const float *scaled,
                                              const uint8_t *random, int n, uint8_t *codes) {
    const bool is_e5m2 = spec->element == OPAQ_E5M2;
    const struct narrow narrow = spec->element == OPAQ_E2M1 ? narrow_e2m1 : is_e5m2 ? narrow_e5m2 : narrow_e4m3;
    if (spec->options & OPAQ_STOCHASTIC) {
        for (int i = 0; i < n; ++i) {
            codes[i] = (uint8_t)narrow_encode_stochastic(scaled[i], narrow, random[i], 8);
        }
    } else if (spec->element != OPAQ_E2M1) {
        /* compressed-tensors adds a zero point of 0, which makes a negative zero positive */
        const float zero_point = spec->rule == OPAQ_RULE_COMPRESSED_TENSORS ? 0.0f : -0.0f;
        for (int i = 0; i < n; ++i) {
            codes[i] = (uint8_t)(is_e5m2 ? encode_e5m2(scaled[i]) : encode_e4m3(scaled[i] + zero_point));
        }
    } else if (!rule_divides(spec)) {
        for (int i = 0; i < n; ++i) {
            codes[i] = (uint8_t)encode_e2m1(scaled[i]);
        }
    } else {
        const bool half_down = spec->rule == OPAQ_RULE_MODELOPT && spec->format == OPAQ_MXFP4;
        for (int i = 0; i < n; ++i) {
            codes[i] =
                (uint8_t)(half_down ? encode_e2m1_half_down(scaled[i]) : encode_e2m1_by_comparison(scaled[i]));
        }
    }
}

OPAQ_DEVICE static inline void segment_scale(float *values, int n, float apply, bool divide) {
    for (int i = 0; i < n; ++i) {
        values[i] = divide ? values[i] / apply : values[i] * apply;
    }
}

/* The byte of code (r, c), and the bit position of the code in it. */
OPAQ_DEVICE static inline uint8_t *code_place(const struct quant_copy *copy, int64_t r, int64_t c, int *shift) {
    if (copy->tile_rows != 0) {
        *shift = 0;
        return copy->data + (copy->is_packed ? tile4_offset(r, c, copy->data_columns, shift)
                                             : tile8_offset(r, c, copy->data_columns));
    }
    const int64_t index = r * copy->data_row_step + c * copy->data_column_step;
    *shift = copy->is_packed ? (int)(index % 2) * 4 : 0;
    return copy->data + (copy->is_packed ? index / 2 : index);
}

/* Stores codes (r, c) to (r, c+n-1), dropping those beyond the buffer's row. Packed buffers must be zero
 * before. */
OPAQ_DEVICE static inline void copy_store(const struct quant_copy *copy, int64_t r, int64_t c, int n,
                                          const uint8_t *codes) {
    const int inside = (int)min_int64(n, copy->data_columns - c);
    for (int i = 0; i < inside; ++i) {
        int shift;
        uint8_t *const byte = code_place(copy, r, c + i, &shift);
        *byte = (uint8_t)(copy->is_packed ? *byte | codes[i] << shift : codes[i]);
    }
}

OPAQ_DEVICE static inline void copy_load_codes(const struct quant_copy *copy, int64_t r, int64_t c, int n,
                                               uint8_t *codes) {
    const int inside = (int)min_int64(n, copy->data_columns - c);
    for (int i = 0; i < inside; ++i) {
        int shift;
        const uint8_t byte = *code_place(copy, r, c + i, &shift);
        codes[i] = (uint8_t)(copy->is_packed ? byte >> shift & 15 : byte);
    }
    memset(codes + inside, 0, (size_t)(n - inside));
}

/* Zeroes the bytes of operand rows [r, r+rows) of a packed buffer, so that codes can be or-ed in, and of a
 * tiled one, whose padding is zero. */
OPAQ_DEVICE static inline void copy_clear(const struct quant_copy *copy, int64_t r, int64_t rows) {
    if (copy->tile_rows != 0) { /* r is the first row of a tile */
        const int64_t codes = round_up(rows, copy->tile_rows) * copy->data_columns;
        uint8_t *const first = copy->data + r * copy->data_columns / (copy->is_packed ? 2 : 1);
        memset(first, 0, (size_t)(copy->is_packed ? codes / 2 : codes));
        return;
    }
    if (!copy->is_packed) {
        return;
    }
    if (copy->data_column_step == 1) { /* operand rows are rows of bytes */
        memset(copy->data + r * copy->data_row_step / 2, 0, (size_t)(rows * copy->data_row_step / 2));
    } else { /* operand rows are columns of the buffer: clear these columns of every row, and the padding of the last */
        const int64_t end = r + rows >= copy->operand.rows ? copy->data_column_step : r + rows;
        for (int64_t c = 0; c < copy->operand.columns; ++c) {
            memset(copy->data + (c * copy->data_column_step + r) / 2, 0, (size_t)((end - r) / 2));
        }
    }
}

/* ---- block scales ---- */

OPAQ_DEVICE static inline int64_t scale_index(const struct quant_copy *copy, int64_t r, int64_t c) {
    const struct scale_layout *layout = &copy->scale_layout;
    if (layout->tiled_columns != 0) {
        return tile_scale_offset(r, c / layout->column_per, layout->tiled_columns, layout->tile_rows);
    }
    if (layout->swizzled_columns != 0) {
        return swizzle_offset(r / layout->row_per, c / layout->column_per, layout->swizzled_columns);
    }
    return r / layout->row_per * layout->row_step + c / layout->column_per * layout->column_step;
}

/* Stores the scale byte of the block at (r, c), once for every row of it that has its own entry. */
OPAQ_DEVICE static inline void scale_store_byte(const struct quant_copy *copy, int64_t r, int64_t c,
                                                uint32_t code) {
    const int64_t end = min_int64(r + copy->block_rows, copy->operand.rows);
    for (int64_t row = r; row < end; row += copy->scale_layout.row_per) {
        ((uint8_t *)copy->scale)[scale_index(copy, row, c)] = (uint8_t)code;
    }
}

#endif
