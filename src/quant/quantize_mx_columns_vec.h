/* quant/quantize_mx_columns_vec.h: the columnwise copies of mxfp8 and mxfp4, in vectors. Depends on columns_vec.h and
 * scales_vec.h. Specification: docs/formats.md. They are stored as x lies, so nothing is transposed. */
#ifndef OPAQ_QUANT_QUANTIZE_MX_COLUMNS_VEC_H
#define OPAQ_QUANT_QUANTIZE_MX_COLUMNS_VEC_H

#include "format/swizzle.h"
#include "quant/columns_vec.h"
#include "quant/scales_vec.h"

/* A strip of this many columns is done at a time, which makes whole vectors of codes. */
enum { MX_BLOCK = 32, MX_STEPS = 4, MX_STRIP = MX_STEPS * STEP };

/* Constants where it is used, except `spec`. */
struct mx_columns {
    struct encode_how how;
    bool is_square;
    const struct opaq_spec *spec;
};

/* The factors of a strip, and whether all of its elements are plain. */
struct mx_column_factors {
    struct step_floats step[MX_STEPS];
    bool is_plain;
};

/* Of a step of columns, which is kept where rows lie close together: those of x may all want the same place in the
 * caches. */
VEC_INLINE struct step_floats mx_column_amaxes(const struct column_source *source, int64_t rows, int64_t place,
                                               enum opaq_element dtype, bool drop_nan, char *kept) {
    const int64_t row_bytes = MX_STRIP * element_bytes(dtype);
    struct step keys = {{vec32_set(0), vec32_set(0)}};
    for (int64_t i = 0; i < rows; ++i) {
        const struct step x = step_load(source->x + i * source->row_bytes + place, dtype);
        __builtin_prefetch(source->x + i * source->row_bytes + place + row_bytes);
        step_store(kept + i * row_bytes + place, x, dtype, false);
        keys = step_keys_max(keys, step_keys(x, dtype, drop_nan), dtype);
    }
    return step_amaxes(keys, dtype, drop_nan);
}

/* Square blocks: one amax for MX_BLOCK columns. */
VEC_INLINE void mx_square_amaxes(struct step_floats amax[MX_STEPS]) {
    enum { TOGETHER = MX_BLOCK / STEP };
    for (int s = 0; s < MX_STEPS; s += TOGETHER) {
        vec32 all = max32((vec32)amax[s].even, (vec32)amax[s].odd);
        for (int i = 1; i < TOGETHER; ++i) {
            all = max32(all, max32((vec32)amax[s + i].even, (vec32)amax[s + i].odd));
        }
        all = max_of_all(all);
        for (int i = 0; i < TOGETHER; ++i) {
            amax[s + i] = (struct step_floats){(vecf)all, (vecf)all};
        }
    }
}

/* Scale codes of a strip, and its factors. */
VEC_INLINE struct mx_column_factors mx_column_scales(struct mx_columns kind, const struct column_source *source,
                                                     int64_t rows, uint8_t codes[MX_STRIP], char *kept) {
    const bool is_te = !kind.how.is_careful;
    struct mx_column_factors factors = {.is_plain = is_te};
    struct step_floats amax[MX_STEPS];
    vec16 words[MX_STEPS];
    for (int s = 0; s < MX_STEPS; ++s) {
        const int64_t place = s * STEP * element_bytes(kind.how.dtype);
        amax[s] = mx_column_amaxes(source, rows, place, kind.how.dtype, false, kept);
        if (is_te && has_nans(amax[s])) {
            amax[s] = mx_column_amaxes(source, rows, place, kind.how.dtype, true, kept);
            factors.is_plain = false;
        }
    }
    if (kind.is_square) {
        mx_square_amaxes(amax);
    }
    for (int s = 0; s < MX_STEPS; ++s) {
        const struct block_scales even = mx_scales(amax[s].even, kind.how.element, kind.spec, is_te);
        const struct block_scales odd = mx_scales(amax[s].odd, kind.how.element, kind.spec, is_te);
        words[s] = join_words(even.codes, odd.codes);
        factors.step[s] = (struct step_floats){even.factors, odd.factors};
        factors.is_plain = factors.is_plain && even.is_plain && odd.is_plain;
    }
    vec_store(codes, pack_bytes(words[0], words[1]));
    vec_store(codes + 2 * STEP, pack_bytes(words[2], words[3]));
    for (int s = 0; factors.is_plain && s < MX_STEPS; ++s) {
        factors.step[s].even = factors.step[s].even * plain_factor(kind.how.element);
        factors.step[s].odd = factors.step[s].odd * plain_factor(kind.how.element);
    }
    return factors;
}

/* A row of a strip. */
VEC_INLINE void mx_column_row(struct encode_how how, const char *x, const struct mx_column_factors *factors,
                              bool is_plain, uint8_t *data) {
    vec16 codes[MX_STEPS];
    for (int s = 0; s < MX_STEPS; ++s) {
        const struct step step = step_load(x + s * STEP * element_bytes(how.dtype), how.dtype);
        const struct step_floats apply = factors->step[s];
        codes[s] = is_plain ? encode_plain(step, how.dtype, how.element, apply.even, apply.odd)
                            : encode_step(how, step, apply.even, apply.odd);
    }
    if (how.element == OPAQ_E2M1) {
        vec_store(data, pack_nibbles(codes[0], codes[1], codes[2], codes[3]));
    } else {
        vec_store(data, pack_bytes(codes[0], codes[1]));
        vec_store(data + 2 * STEP, pack_bytes(codes[2], codes[3]));
    }
}

static inline void store_mx_column_scales(const struct quant_copy *copy, int64_t c, int64_t columns,
                                          int64_t block, const uint8_t codes[MX_STRIP]) {
    const struct scale_layout *layout = &copy->scale_layout;
    uint8_t *const scale = copy->scale;
    if (layout->swizzled_columns == 0) {
        memcpy(scale + block * layout->column_step + c, codes, (size_t)columns);
        return;
    }
    for (int64_t i = 0; i < columns; ++i) {
        scale[swizzle_offset(c + i, block, layout->swizzled_columns)] = codes[i];
    }
}

/* Codes of a row that ends within the strip; packed rows go on to the end of a block, with code 0. */
VEC_INLINE void store_row_partly(const uint8_t *codes, int64_t columns, enum opaq_element element,
                                 uint8_t *data) {
    if (element != OPAQ_E2M1) {
        memcpy(data, codes, (size_t)columns);
        return;
    }
    memset(data, 0, (size_t)(round_up(columns, MX_BLOCK) / 2));
    memcpy(data, codes, (size_t)(columns / 2));
    if (columns % 2 != 0) {
        data[columns / 2] = codes[columns / 2] & 0x0F;
    }
}

/* Rows from `row` on, up to MX_BLOCK of them, and up to MX_STRIP columns from c on. */
VEC_INLINE void mx_column_strip(struct mx_columns kind, const struct quant_copy *copy, int64_t row, int64_t c,
                                int64_t columns) {
    char staged[MX_BLOCK * MX_STRIP * 4];
    char kept[MX_BLOCK * MX_STRIP * 4];
    uint8_t codes[MX_STRIP];
    const int packing = kind.how.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t rows = min_int64(MX_BLOCK, copy->operand.columns - row);
    const struct column_source source =
        column_source_at(&copy->operand, row, rows, c, columns, MX_STRIP, kind.how.dtype, staged);
    const struct mx_column_factors factors = mx_column_scales(kind, &source, rows, codes, kept);
    store_mx_column_scales(copy, c, columns, row / MX_BLOCK, codes);
    for (int64_t i = 0; i < rows; ++i) {
        uint8_t *const data = copy->data + ((row + i) * copy->data_column_step + c) / packing;
        const char *const x = kept + i * MX_STRIP * element_bytes(kind.how.dtype);
        uint8_t *const to = columns < MX_STRIP ? codes : data;
        if (factors.is_plain) {
            mx_column_row(kind.how, x, &factors, true, to);
        } else {
            mx_column_row(kind.how, x, &factors, false, to);
        }
        if (columns < MX_STRIP) {
            store_row_partly(codes, columns, kind.how.element, data);
        }
    }
}

#endif
