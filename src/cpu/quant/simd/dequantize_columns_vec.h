/* cpu/quant/simd/dequantize_columns_vec.h: dequantize of copies whose operand is x transposed, in vectors. Depends on columns_vec.h,
 * decode_factors_vec.h and transpose_vec.h. Specification: docs/formats.md.
 *
 * Vectors lie along the rows of the result, so every lane has a column and a factor of its own. Codes that are stored
 * transposed are turned in tiles first; those of mxfp8 and mxfp4 lie as the result does. */
#ifndef OPAQ_CPU_QUANT_SIMD_DEQUANTIZE_COLUMNS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_DEQUANTIZE_COLUMNS_VEC_H

#include "cpu/quant/simd/columns_vec.h"
#include "cpu/quant/simd/decode_factors_vec.h"
#include "cpu/quant/simd/specialize_vec.h"
#include "cpu/quant/simd/transpose_vec.h"

/* Whether so much is written that it goes past the caches, row by row. */
static inline bool is_streamed(const void *y, int64_t rows, int64_t row_step, enum opaq_element dtype) {
    const int64_t row_bytes = row_step * element_bytes(dtype);
    const int64_t large = 8 << 20;
    return rows * row_bytes >= large && row_bytes % VEC_BYTES == 0 && (uintptr_t)y % VEC_BYTES == 0;
}

VEC_INLINE bool decode_streams(const struct quant_matrix *m) {
    return is_streamed(m->data, m->rows, m->row_step, m->dtype);
}

/* What is decoded. The first two are constants in what is inlined into an out-of-line function. */
struct column_decode {
    enum opaq_element dtype;
    enum opaq_element element;
    const struct opaq_spec *spec;
    const struct quant_copy *copy;
    int64_t block; /* rows of the result under one scale */
    bool streams;
};

/* Columns of the result that are done together, and what their codes are multiplied with. */
struct decode_columns {
    int64_t c;
    int64_t columns; /* up to TILE */
    float factors[TILE];
};

/* Up to STEP values of row `row` of the result, at column `place` of those done together. */
VEC_INLINE void store_decoded(const struct column_decode *how, const struct decode_columns *together,
                              int64_t row, int place, vecf first, vecf second) {
    const struct quant_matrix *m = &how->copy->operand;
    const int64_t bytes = element_bytes(how->dtype);
    char *const y = (char *)m->data + (row * m->column_step + together->c + place) * bytes;
    const struct step step = step_of_values(first, second, how->dtype, true);
    const int64_t left = together->columns - place;
    if (left < STEP) {
        char staged[STEP * 4];
        step_store(staged, step, how->dtype, false);
        memcpy(y, staged, (size_t)(max_int64(left, 0) * bytes));
    } else if (how->streams) {
        step_store(y, step, how->dtype, true);
    } else {
        step_store(y, step, how->dtype, false);
    }
}

/* The factors of scale block `block`; columns beyond the last get one that is there. */
VEC_OUTLINE void column_factors(const struct column_decode *how, struct decode_columns *together,
                                int64_t block) {
    const struct quant_copy *copy = how->copy;
    const struct scale_layout *layout = &copy->scale_layout;
    if (!format_has_bytes(how->spec)) {
        const float *const scale = (const float *)copy->scale + block * layout->column_step;
        for (int64_t i = 0; i < TILE; ++i) {
            const int64_t column = together->c + min_int64(i, together->columns - 1);
            together->factors[i] = scale[column / layout->row_per * layout->row_step];
        }
        return;
    }
    uint8_t codes[TILE];
    float stored[TILE];
    for (int64_t i = 0; i < TILE; ++i) {
        const int64_t column = together->c + min_int64(i, together->columns - 1);
        codes[i] = ((const uint8_t *)copy->scale)[scale_place(layout, column, block)];
        stored[i] = copy->amax == NULL ? 0.0f : copy->amax[column * copy->amax_step];
    }
    for (int i = 0; i < TILE; i += FLOATS) {
        vec_store(together->factors + i, (vec32)byte_factors(codes + i, how->spec, (vecf)vec_load(stored + i)));
    }
}

/* A row of codes as it lies in the result. */
VEC_INLINE void decode_along(const struct column_decode *how, const struct decode_columns *together,
                             int64_t row, const uint8_t *codes) {
    uint8_t staged[TILE];
    const int packing = how->element == OPAQ_E2M1 ? 2 : 1;
    if (together->columns < TILE) {
        memset(staged, 0, sizeof staged);
        memcpy(staged, codes, (size_t)ceil_div(together->columns, packing));
        codes = staged;
    }
    for (int place = 0; place < TILE; place += STEP) {
        const vec32 first = vec_load(together->factors + place);
        const vec32 second = vec_load(together->factors + place + FLOATS);
        if (how->element == OPAQ_E2M1) {
            const vec32 pairs = load_bytes_as_dwords(codes + place / 2);
            const vec32 even = (vec32)(e2m1_values(pairs) * (vecf)split_even(first, second));
            const vec32 odd = (vec32)(e2m1_values(pairs >> 4) * (vecf)split_odd(first, second));
            store_decoded(how, together, row, place, (vecf)interleave_first(even, odd),
                          (vecf)interleave_second(even, odd));
        } else {
            const struct decoded values = byte_values(codes + place, how->element);
            store_decoded(how, together, row, place, values.first * (vecf)first, values.second * (vecf)second);
        }
    }
}

VEC_INLINE struct column_decode column_decode_with(const struct column_decode *how, enum opaq_element dtype,
                                                   enum opaq_element element) {
    struct column_decode constant = *how;
    constant.dtype = dtype;
    constant.element = element;
    return constant;
}

VEC_INLINE void decode_rows_along(struct column_decode how, const struct decode_columns *together, int64_t row,
                                  int64_t end, const uint8_t *codes, int64_t codes_step) {
    for (; row < end; ++row, codes += codes_step) {
        decode_along(&how, together, row, codes);
    }
}

/* Rows [row, end) of the result, whose codes lie `codes_step` bytes apart. */
VEC_OUTLINE void decode_rows_along_of(const struct column_decode *how, const struct decode_columns *together,
                                      int64_t row, int64_t end, const uint8_t *codes, int64_t codes_step) {
    FOR_DTYPE(how->dtype, FOR_ELEMENT(how->element, decode_rows_along(column_decode_with(how, DTYPE, ELEMENT),
                                                                      together, row, end, codes, codes_step)));
}

/* ---- codes that are stored transposed ---- */

/* hadamard_inverse() in each lane. */
VEC_INLINE void transform_back(vecf v[HELD_ROWS], uint16_t mask) {
    for (int i = 0; i < HELD_ROWS; ++i) {
        v[i] = v[i] * 0.25f;
    }
    butterflies(v);
    for (int i = 0; i < HELD_ROWS; ++i) {
        v[i] = (vecf)((vec32)v[i] ^ ((uint32_t)(mask >> i & 1) << 31));
    }
}

/* HELD_ROWS rows of the result from `row` on, of which `rows` are there: pairs of them in rows of the tile. */
VEC_INLINE void decode_held_pairs(const struct column_decode *how, const struct decode_columns *together,
                                  int64_t row, int64_t rows, const uint8_t *tile) {
    for (int place = 0; place < TILE; place += STEP) {
        vecf first[HELD_ROWS];
        vecf second[HELD_ROWS];
        const vecf first_factors = (vecf)vec_load(together->factors + place);
        const vecf second_factors = (vecf)vec_load(together->factors + place + FLOATS);
        for (int i = 0; i < HELD_ROWS; ++i) {
            const uint8_t *const pairs = tile + i / 2 * TILE + place;
            first[i] = e2m1_values(load_bytes_as_dwords(pairs) >> (i % 2 * 4)) * first_factors;
            second[i] = e2m1_values(load_bytes_as_dwords(pairs + FLOATS) >> (i % 2 * 4)) * second_factors;
        }
        if (how->copy->is_hadamard) {
            transform_back(first, how->spec->hadamard_mask);
            transform_back(second, how->spec->hadamard_mask);
        }
        for (int i = 0; i < HELD_ROWS && i < rows; ++i) {
            store_decoded(how, together, row + i, place, first[i], second[i]);
        }
    }
}

VEC_INLINE void decode_held(struct column_decode how, const struct decode_columns *together, int64_t row,
                            int64_t rows, const uint8_t *tile) {
    decode_held_pairs(&how, together, row, rows, tile);
}

/* The same out of line. */
VEC_OUTLINE void decode_held_of(const struct column_decode *how, const struct decode_columns *together,
                                int64_t row, int64_t rows, const uint8_t *tile) {
    FOR_DTYPE(how->dtype, decode_held(column_decode_with(how, DTYPE, OPAQ_E2M1), together, row, rows, tile));
}

/* The bytes of up to TILE columns of the result from byte `at` of theirs on, turned. */
VEC_OUTLINE void turn_codes(const struct column_decode *how, const struct decode_columns *together, int64_t at,
                            int64_t row_bytes, uint8_t turned[TILE * TILE]) {
    const struct quant_copy *copy = how->copy;
    const int packing = how->element == OPAQ_E2M1 ? 2 : 1;
    const int64_t step = copy->data_row_step / packing;
    const int64_t there = min_int64(TILE, row_bytes - at);
    const uint8_t *const from = copy->data + together->c * step + at;
    uint8_t tile[TILE * TILE];
    for (int64_t i = 0; i < together->columns; ++i) {
        if (there == TILE) {
            vec_store(tile + i * TILE, vec_load(from + i * step));
            __builtin_prefetch(from + i * step + TILE);
        } else {
            memset(tile + i * TILE, 0, TILE);
            memcpy(tile + i * TILE, from + i * step, (size_t)there);
        }
    }
    memset(tile + together->columns * TILE, 0, (size_t)((TILE - together->columns) * TILE));
    transpose_tile(tile, TILE, TILE, TILE, true, turned, TILE, false);
}

static inline void dequantize_turned(const struct column_decode *how, struct decode_columns *together) {
    const struct quant_copy *copy = how->copy;
    const int packing = how->element == OPAQ_E2M1 ? 2 : 1;
    const int64_t rows = copy->operand.columns;
    const int64_t row_bytes = ceil_div(copy->data_columns, packing); /* a Hadamard group is stored whole */
    const bool is_one = copy->scale_layout.column_step == 0;
    uint8_t turned[TILE * TILE];
    for (int64_t row = 0; row < rows; row += TILE * packing) {
        const int64_t end = min_int64(row + TILE * packing, rows);
        turn_codes(how, together, row / packing, row_bytes, turned);
        if (how->element == OPAQ_E2M1) {
            for (int64_t i = row; i < end; i += HELD_ROWS) {
                column_factors(how, together, i / HELD_ROWS);
                decode_held_of(how, together, i, end - i, turned + (i - row) / 2 * TILE);
            }
            continue;
        }
        if (row % how->block == 0) {
            column_factors(how, together, is_one ? 0 : row / how->block);
        }
        decode_rows_along_of(how, together, row, end, turned, TILE);
    }
}

/* ---- codes that lie as the result ---- */

static inline void dequantize_in_place(const struct column_decode *how, struct decode_columns *together,
                                       int64_t row, int64_t end) {
    const struct quant_copy *copy = how->copy;
    const int packing = how->element == OPAQ_E2M1 ? 2 : 1;
    column_factors(how, together, row / how->block);
    decode_rows_along_of(how, together, row, end,
                         copy->data + (row * copy->data_column_step + together->c) / packing,
                         copy->data_column_step / packing);
}

/* ---- all of it ---- */

VEC_OUTLINE void dequantize_columns(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                    int64_t r_end) {
    const struct quant_matrix *m = &copy->operand;
    const struct column_decode how = {.dtype = m->dtype,
                                      .element = (enum opaq_element)job->spec.element,
                                      .spec = &job->spec,
                                      .copy = copy,
                                      .block = copy->block_columns,
                                      .streams = r % (VEC_BYTES / 2) == 0 &&
                                                 is_streamed(m->data, m->columns, m->column_step, m->dtype)};
    struct decode_columns together;
    if (copy->data_column_step == 1) {
        for (int64_t c = r; c < r_end; c += TILE) {
            together.c = c;
            together.columns = min_int64(TILE, r_end - c);
            dequantize_turned(&how, &together);
        }
    } else {
        for (int64_t row = 0; row < m->columns; row += how.block) {
            for (int64_t c = r; c < r_end; c += TILE) {
                together.c = c;
                together.columns = min_int64(TILE, r_end - c);
                dequantize_in_place(&how, &together, row, min_int64(row + how.block, m->columns));
            }
        }
    }
    if (how.streams) {
        _mm_sfence();
    }
}

#endif
