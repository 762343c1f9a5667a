/* cpu/quant/simd/quantize_mx_columns_vec.h: the columnwise copies of mxfp8 and mxfp4, in vectors. Depends on
 * columns_vec.h, region_vec.h and scales_vec.h. Specification: docs/formats.md. They are stored in the order of x, so
 * nothing is transposed. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_MX_COLUMNS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_MX_COLUMNS_VEC_H

#include "cpu/quant/simd/columns_vec.h"
#include "cpu/quant/simd/random_bytes_vec.h"
#include "cpu/quant/simd/region_vec.h"
#include "cpu/quant/simd/scales_vec.h"
#include "cpu/quant/simd/specialize_vec.h"
#include "format/swizzle.h"

/* MX_WIDTH columns are done at a time, row by row, so that memory is read and written in long runs; codes of
 * MX_VECTOR_COLUMNS columns are whole vectors. */
enum { MX_BLOCK = 32, MX_STEPS = 4, MX_VECTOR_COLUMNS = MX_STEPS * STEP, MX_WIDTH = 2048 };

/* How columns become blocks. */
struct mx_columns {
    struct encode_how how;
    bool is_square;
    const struct opaq_spec *spec;
    struct random_bytes *random;
};

/* What columns are multiplied with, step by step; before that their keys. */
struct mx_column_factors {
    struct step_floats step[MX_WIDTH / STEP];
    uint8_t codes[MX_WIDTH]; /* of the scales */
    bool is_regular;
};

/* A step of a row that has `left` more columns. */
VEC_INLINE struct step load_step_partly(const char *x, int64_t left, enum opaq_element dtype) {
    char staged[STEP * 4];
    if (left >= STEP) {
        return step_load(x, dtype);
    }
    memset(staged, 0, sizeof staged);
    memcpy(staged, x, (size_t)(max_int64(left, 0) * element_bytes(dtype)));
    return step_load(staged, dtype);
}

/* The amaxes of `columns` columns, row by row. */
VEC_INLINE void mx_column_amaxes(const struct column_source *source, int64_t rows, int64_t columns,
                                 enum opaq_element dtype, bool drop_nan, struct step_floats *amax) {
    struct step keys[MX_WIDTH / STEP];
    const int64_t step_bytes = STEP * element_bytes(dtype);
    const int64_t steps = round_up(columns, MX_VECTOR_COLUMNS) / STEP;
    memset(keys, 0, (size_t)steps * sizeof keys[0]);
    for (int64_t i = 0; i < rows; ++i) {
        const char *const x = source->x + i * source->row_bytes;
        for (int64_t s = 0; s < steps; ++s) {
            const struct step step = load_step_partly(x + s * step_bytes, columns - s * STEP, dtype);
            __builtin_prefetch(x + s * step_bytes + 2 * source->row_bytes);
            keys[s] = step_keys_max(keys[s], step_keys(step, dtype, drop_nan), dtype);
        }
    }
    for (int64_t s = 0; s < steps; ++s) {
        amax[s] = step_amaxes(keys[s], dtype, drop_nan);
    }
}

/* The same for any dtype, out of line. */
VEC_OUTLINE void mx_column_amaxes_of(const struct column_source *source, int64_t rows, int64_t columns,
                                     enum opaq_element dtype, bool drop_nan, struct step_floats *amax) {
    FOR_DTYPE(dtype, FOR_FLAG(drop_nan, mx_column_amaxes(source, rows, columns, DTYPE, FLAG, amax)));
}

/* Square blocks: one amax for MX_BLOCK columns. */
VEC_INLINE void mx_square_amaxes(struct step_floats *amax) {
    enum { TOGETHER = MX_BLOCK / STEP };
    vec32 all = max32((vec32)amax[0].even, (vec32)amax[0].odd);
    for (int i = 1; i < TOGETHER; ++i) {
        all = max32(all, max32((vec32)amax[i].even, (vec32)amax[i].odd));
    }
    all = max_of_all(all);
    for (int i = 0; i < TOGETHER; ++i) {
        amax[i] = (struct step_floats){(vecf)all, (vecf)all};
    }
}

/* Scale codes of columns, and their factors. */
static inline void mx_column_scales(struct mx_columns kind, const struct column_source *source, int64_t rows,
                                    int64_t columns, struct mx_column_factors *factors) {
    const bool is_te = !kind.how.not_te;
    const int64_t steps = round_up(columns, MX_VECTOR_COLUMNS) / STEP;
    bool is_regular = is_te && !kind.random->is_used;
    mx_column_amaxes_of(source, rows, columns, kind.how.dtype, false, factors->step);
    bool drops_nans = false;
    for (int64_t s = 0; is_te && s < steps; ++s) {
        drops_nans = drops_nans || has_nans(factors->step[s]);
    }
    is_regular = is_regular && !drops_nans;
    if (drops_nans) {
        mx_column_amaxes_of(source, rows, columns, kind.how.dtype, true, factors->step);
    }
    for (int64_t s = 0; kind.is_square && s < steps; s += MX_BLOCK / STEP) {
        mx_square_amaxes(&factors->step[s]);
    }
    for (int64_t s = 0; s < steps; s += 2) {
        vec16 words[2];
        for (int i = 0; i < 2; ++i) {
            const struct step_floats amax = factors->step[s + i];
            const struct block_scales even = mx_scales_of(amax.even, kind.how.element, kind.spec, is_te);
            const struct block_scales odd = mx_scales_of(amax.odd, kind.how.element, kind.spec, is_te);
            words[i] = join_words(even.codes, odd.codes);
            factors->step[s + i] = (struct step_floats){even.factors, odd.factors};
            is_regular = is_regular && even.is_regular && odd.is_regular;
        }
        vec_store(factors->codes + s * STEP, pack_bytes(words[0], words[1]));
    }
    for (int64_t s = 0; is_regular && s < steps; ++s) {
        factors->step[s].even = factors->step[s].even * regular_factor(kind.how.element);
        factors->step[s].odd = factors->step[s].odd * regular_factor(kind.how.element);
    }
    factors->is_regular = is_regular;
}

static inline void store_mx_column_scales(const struct quant_copy *copy, int64_t c, int64_t columns,
                                          int64_t block, const uint8_t *codes) {
    const struct scale_layout *layout = &copy->scale_layout;
    uint8_t *const scale = copy->scale;
    if (layout->swizzled_columns == 0) {
        memcpy(scale + block * layout->column_step + c, codes, (size_t)columns);
        return;
    }
    for (int64_t i = 0; i < columns; ++i) {
        /* NOLINTNEXTLINE(clang-analyzer-core.uninitialized.Assign): it does not follow round_up() */
        scale[swizzle_offset(c + i, block, layout->swizzled_columns)] = codes[i];
    }
}

/* Codes of a row that ends within a whole number of vectors; packed rows go on to the end of a block, with code 0. */
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

/* Codes of MX_VECTOR_COLUMNS columns of a row; with their random bytes if they are not rounded to the nearest. */
VEC_INLINE void mx_column_codes(struct encode_how how, const char *x, const struct step_floats *factors,
                                bool is_regular, const uint8_t *random, bool streams, uint8_t *data) {
    vec16 codes[MX_STEPS];
    for (int s = 0; s < MX_STEPS; ++s) {
        const struct step step = step_load(x + s * STEP * element_bytes(how.dtype), how.dtype);
        const struct step_floats apply = factors[s];
        codes[s] = random != NULL
                       ? encode_stochastic(how, step, apply.even, apply.odd, random_of_bytes(random + s * STEP))
                   : is_regular ? encode_regular(step, how.dtype, how.element, apply.even, apply.odd)
                                : encode_step(how, step, apply.even, apply.odd);
    }
    if (how.element == OPAQ_E2M1) {
        vec_put(data, pack_nibbles(codes[0], codes[1], codes[2], codes[3]), streams);
    } else {
        vec_put(data, pack_bytes(codes[0], codes[1]), streams);
        vec_put(data + 2 * STEP, pack_bytes(codes[2], codes[3]), streams);
    }
}

/* Codes of a row. The last columns, if fewer than MX_VECTOR_COLUMNS, are copied, with zeros behind them. */
VEC_INLINE void mx_column_row(struct encode_how how, const char *x, int64_t columns,
                              const struct step_floats *factors, bool is_regular, const uint8_t *random,
                              bool streams, uint8_t *data) {
    const int packing = how.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t bytes = element_bytes(how.dtype);
    for (int64_t k = 0; k < columns; k += MX_VECTOR_COLUMNS) {
        char staged[MX_VECTOR_COLUMNS * 4];
        uint8_t staged_codes[MX_VECTOR_COLUMNS];
        const bool is_whole = columns - k >= MX_VECTOR_COLUMNS;
        if (!is_whole) {
            memset(staged, 0, sizeof staged);
            memcpy(staged, x + k * bytes, (size_t)((columns - k) * bytes));
        }
        mx_column_codes(how, is_whole ? x + k * bytes : staged, &factors[k / STEP], is_regular,
                        random == NULL ? NULL : random + k, streams && is_whole,
                        is_whole ? data + k / packing : staged_codes);
        if (!is_whole) {
            store_row_partly(staged_codes, columns - k, how.element, data + k / packing);
        }
    }
}

/* The same out of line: to the nearest by the rules of other software, and in any way. */
VEC_OUTLINE void mx_column_row_not_te(struct encode_how how, const char *x, int64_t columns,
                                      const struct step_floats *factors, bool streams, uint8_t *data) {
    FOR_DTYPE(how.dtype, FOR_ELEMENT(how.element, mx_column_row(encode_not_te(how, DTYPE, ELEMENT, false), x,
                                                                columns, factors, false, NULL, streams, data)));
}

VEC_OUTLINE void mx_column_row_of(struct encode_how how, const char *x, int64_t columns,
                                  const struct step_floats *factors, bool is_regular, const uint8_t *random,
                                  bool streams, uint8_t *data) {
    if (random != NULL) {
        FOR_DTYPE(how.dtype,
                  FOR_ELEMENT(how.element, mx_column_row(encode_at_random(how, DTYPE, ELEMENT), x, columns,
                                                         factors, false, random, streams, data)));
    } else if (how.not_te) {
        mx_column_row_not_te(how, x, columns, factors, streams, data);
    } else {
        FOR_BLOCK_TE(how,
                     FOR_FLAG(is_regular, mx_column_row(HOW, x, columns, factors, FLAG, NULL, streams, data)));
    }
}

/* Rows from `row` on, up to MX_BLOCK of them, and up to MX_WIDTH columns from c on. The next part, `ahead` elements
 * further, is prefetched. */
static inline void mx_column_part(struct mx_columns kind, const struct quant_copy *copy, int64_t row, int64_t c,
                                  int64_t columns, int64_t ahead, bool streams) {
    struct mx_column_factors factors;
    const int packing = kind.how.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t rows = min_int64(MX_BLOCK, copy->operand.columns - row);
    const struct column_source source = column_source_at(&copy->operand, row, c, kind.how.dtype);
    mx_column_scales(kind, &source, rows, columns, &factors);
    store_mx_column_scales(copy, c, columns, row / MX_BLOCK, factors.codes);
    for (int64_t i = 0; i < rows; ++i) {
        uint8_t *const data = copy->data + ((row + i) * copy->data_column_step + c) / packing;
        const char *const x = source.x + i * source.row_bytes;
        const uint8_t *const random =
            kind.random->is_used ? random_bytes(kind.random, row + i, c, columns) : NULL;
        prefetch_run(x + ahead * element_bytes(kind.how.dtype), columns * element_bytes(kind.how.dtype));
        mx_column_row_of(kind.how, x, columns, factors.step, factors.is_regular, random, streams, data);
    }
}

#endif
