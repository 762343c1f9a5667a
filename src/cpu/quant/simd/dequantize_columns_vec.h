/* cpu/quant/simd/dequantize_columns_vec.h: dequantize of copies whose operand is x transposed, in vectors. Depends on
 * columns_vec.h, decode_factors_vec.h and transpose_vec.h. Specification: docs/formats.md.
 *
 * Vectors lie along the rows of the result, so every lane has a column and a factor of its own. Codes that are stored
 * transposed are transposed in tiles first; those of mxfp8 and mxfp4 are in the result's order. */
#ifndef OPAQ_CPU_QUANT_SIMD_DEQUANTIZE_COLUMNS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_DEQUANTIZE_COLUMNS_VEC_H

#include "cpu/quant/simd/columns_vec.h"
#include "cpu/quant/simd/decode_factors_vec.h"
#include "cpu/quant/simd/specialize_vec.h"
#include "cpu/quant/simd/transpose_vec.h"

/* Whether the result is so large that stores bypass the caches, row by row. */
static inline bool is_streamed(const void *y, int64_t rows, int64_t row_step, enum opaq_element dtype) {
    const int64_t row_bytes = row_step * element_bytes(dtype);
    const int64_t large = 8 << 20;
    return rows * row_bytes >= large && row_bytes % VEC_BYTES == 0 && (uintptr_t)y % VEC_BYTES == 0;
}

VEC_INLINE bool decode_streams(const struct quant_matrix *m) {
    return is_streamed(m->data, m->rows, m->row_step, m->dtype);
}

/* What is decoded. */
struct column_decode {
    enum opaq_element dtype;
    enum opaq_element element;
    const struct opaq_spec *spec;
    const struct quant_copy *copy;
    int64_t block; /* rows of the result under one scale */
    bool streams;
};

/* Columns of the result that are processed together, and the factors of their codes. */
struct decode_columns {
    int64_t c;
    int64_t columns; /* up to TILE */
    float factors[TILE];
    bool all_finite; /* the factors */
};

/* The destination of a tile of the result: rows of TILE elements. */
struct decode_target {
    char *y;
    int64_t row_bytes;
    bool streams;
};

/* ---- factors ---- */

/* The scale codes of TILE columns in scale block `block`; columns beyond the last get the last one's. */
static inline void column_scale_codes(const struct quant_copy *copy, const struct decode_columns *together,
                                      int64_t block, uint8_t codes[TILE]) {
    const struct scale_layout *layout = &copy->scale_layout;
    const uint8_t *const scale = copy->scale;
    if (layout->swizzled_columns != 0 || layout->tiled_columns != 0) {
        for (int64_t i = 0; i < together->columns; ++i) {
            codes[i] = scale[scale_place(layout, together->c + i, block)];
        }
    } else {
        const uint8_t *const first = scale + scale_place(layout, together->c, block);
        for (int64_t i = 0; i < together->columns; ++i) {
            codes[i] = first[i * layout->row_step];
        }
    }
    for (int64_t i = together->columns; i < TILE; ++i) {
        codes[i] = codes[together->columns - 1];
    }
}

/* The factors of scale block `block`. */
VEC_OUTLINE void column_factors(const struct column_decode *how, struct decode_columns *together,
                                int64_t block) {
    const struct quant_copy *copy = how->copy;
    const struct scale_layout *layout = &copy->scale_layout;
    const int64_t last = together->columns - 1;
    if (!format_has_bytes(how->spec)) {
        const float *const scale = (const float *)copy->scale + block * layout->column_step;
        for (int64_t i = 0; i < TILE; ++i) {
            together->factors[i] =
                scale[(together->c + min_int64(i, last)) / layout->row_per * layout->row_step];
        }
        together->all_finite = false; /* not known; codes may be NaN as well */
        return;
    }
    uint8_t codes[TILE];
    float stored[TILE];
    column_scale_codes(copy, together, block, codes);
    for (int64_t i = 0; i < TILE; ++i) {
        stored[i] =
            copy->amax == NULL ? 0.0f : copy->amax[(together->c + min_int64(i, last)) * copy->amax_step];
    }
    vec32 largest = vec32_set(0);
    for (int i = 0; i < TILE; i += FLOATS) {
        const vec32 factors = (vec32)byte_factors(codes + i, how->spec, (vecf)vec_load(stored + i));
        vec_store(together->factors + i, factors);
        largest = max32(largest, factors & 0x7FFFFFFFu);
    }
    together->all_finite = !any32(above32(largest, 0x7F7FFFFFu));
}

/* ---- codes in the order of the result ---- */

/* The factors of a step's columns: even and odd columns separately for packed codes, else in order. */
VEC_INLINE struct step_floats column_step_factors(const float *factors, enum opaq_element element) {
    const vec32 first = vec_load(factors);
    const vec32 second = vec_load(factors + FLOATS);
    return element == OPAQ_E2M1
               ? (struct step_floats){(vecf)split_even(first, second), (vecf)split_odd(first, second)}
               : (struct step_floats){(vecf)first, (vecf)second};
}

/* `rows` rows of TILE codes, `codes_step` bytes apart. */
VEC_INLINE void decode_tile(enum opaq_element dtype, enum opaq_element element, bool may_be_nan,
                            const float *factors, int64_t rows, const uint8_t *codes, int64_t codes_step,
                            struct decode_target to) {
    enum { STEPS = TILE / STEP, TILE_AHEAD = 2 /* prefetch distance, in tiles */ };
    const int packing = element == OPAQ_E2M1 ? 2 : 1;
    struct step_floats apply[STEPS];
    for (int s = 0; s < STEPS; ++s) {
        apply[s] = column_step_factors(factors + s * STEP, element);
    }
    for (int64_t row = 0; row < rows; ++row, codes += codes_step, to.y += to.row_bytes) {
        __builtin_prefetch(codes + TILE_AHEAD * TILE / packing);
        for (int s = 0; s < STEPS; ++s) {
            const uint8_t *const from = codes + s * STEP / packing;
            struct step step;
            if (element == OPAQ_E2M1) {
                const vec32 pairs = load_bytes_as_dwords(from);
                step = step_of_pairs(e2m1_values(pairs) * apply[s].even, e2m1_values(pairs >> 4) * apply[s].odd,
                                     dtype, may_be_nan);
            } else {
                const struct decoded values = byte_values(from, element);
                step = step_of_values(values.first * apply[s].even, values.second * apply[s].odd, dtype, true);
            }
            step_store(to.y + s * STEP * element_bytes(dtype), step, dtype, to.streams);
        }
    }
}

/* The same out of line. */
VEC_OUTLINE void decode_tile_of(const struct column_decode *how, const struct decode_columns *together,
                                int64_t rows, const uint8_t *codes, int64_t codes_step,
                                struct decode_target to) {
    const float *const factors = together->factors;
    if (how->element == OPAQ_E2M1 && together->all_finite) {
        FOR_DTYPE(how->dtype, decode_tile(DTYPE, OPAQ_E2M1, false, factors, rows, codes, codes_step, to));
    } else {
        FOR_DTYPE(how->dtype, FOR_ELEMENT(how->element, decode_tile(DTYPE, ELEMENT, true, factors, rows, codes,
                                                                    codes_step, to)));
    }
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

/* HELD_ROWS rows of the result, of which the first `rows` are stored; rows of `tile` hold pairs of them. */
VEC_INLINE void decode_held(enum opaq_element dtype, bool is_hadamard, uint16_t mask, bool may_be_nan,
                            const float *factors, int64_t rows, const uint8_t *tile, struct decode_target to) {
    for (int place = 0; place < TILE; place += STEP) {
        vecf first[HELD_ROWS];
        vecf second[HELD_ROWS];
        const vecf first_factors = (vecf)vec_load(factors + place);
        const vecf second_factors = (vecf)vec_load(factors + place + FLOATS);
        for (int i = 0; i < HELD_ROWS; ++i) {
            const uint8_t *const pairs = tile + i / 2 * TILE + place;
            first[i] = e2m1_values(load_bytes_as_dwords(pairs) >> (i % 2 * 4)) * first_factors;
            second[i] = e2m1_values(load_bytes_as_dwords(pairs + FLOATS) >> (i % 2 * 4)) * second_factors;
        }
        if (is_hadamard) {
            transform_back(first, mask);
            transform_back(second, mask);
        }
        for (int i = 0; i < HELD_ROWS && i < rows; ++i) {
            step_store(to.y + i * to.row_bytes + place * element_bytes(dtype),
                       step_of_values(first[i], second[i], dtype, may_be_nan), dtype, to.streams);
        }
    }
}

/* The same out of line. */
VEC_OUTLINE void decode_held_of(const struct column_decode *how, const struct decode_columns *together,
                                int64_t rows, const uint8_t *tile, struct decode_target to) {
    const uint16_t mask = how->spec->hadamard_mask;
    const float *const factors = together->factors;
    if (how->copy->is_hadamard) {
        FOR_DTYPE(how->dtype, decode_held(DTYPE, true, mask, true, factors, rows, tile, to));
    } else if (together->all_finite) {
        FOR_DTYPE(how->dtype, decode_held(DTYPE, false, mask, false, factors, rows, tile, to));
    } else {
        FOR_DTYPE(how->dtype, decode_held(DTYPE, false, mask, true, factors, rows, tile, to));
    }
}

/* The bytes of up to TILE columns of the result from byte `at` of theirs on, transposed. */
VEC_OUTLINE void transpose_codes(const struct column_decode *how, const struct decode_columns *together,
                                 int64_t at, int64_t row_bytes, uint8_t transposed[TILE * TILE]) {
    const struct quant_copy *copy = how->copy;
    const int64_t step = how->element == OPAQ_E2M1 ? copy->data_row_step / 2 : copy->data_row_step;
    const int64_t there = min_int64(TILE, row_bytes - at);
    const uint8_t *const from = copy->data + together->c * step + at;
    uint8_t tile[TILE * TILE];
    if (there == TILE && together->columns == TILE) {
        for (int64_t i = 0; i < TILE; ++i) {
            __builtin_prefetch(from + i * step + TILE);
        }
        transpose_tile(from, step, TILE, TILE, true, transposed, TILE, false);
        return;
    }
    memset(tile, 0, sizeof tile);
    for (int64_t i = 0; i < together->columns; ++i) {
        memcpy(tile + i * TILE, from + i * step, (size_t)there);
    }
    transpose_tile(tile, TILE, TILE, TILE, true, transposed, TILE, false);
}

/* ---- tiles ---- */

/* Rows [row, row + rows) of the result, up to TILE of them, from codes of whole tiles: rows `codes_step` bytes apart,
 * or transposed pairs. A tile that the result has only part of is decoded into a buffer and copied. */
static inline void decode_rows(const struct column_decode *how, const struct decode_columns *together,
                               int64_t row, int64_t rows, const uint8_t *codes, int64_t codes_step,
                               bool is_pairs) {
    const struct quant_matrix *m = &how->copy->operand;
    const int64_t bytes = element_bytes(how->dtype);
    struct decode_target target = {(char *)m->data + (row * m->column_step + together->c) * bytes,
                                   m->column_step * bytes, how->streams};
    char *const y = target.y;
    _Alignas(VEC_BYTES) char staged[TILE * TILE * 4];
    const bool is_whole = together->columns == TILE;
    if (!is_whole) {
        target = (struct decode_target){staged, TILE * bytes, false};
    }
    if (is_pairs) {
        decode_held_of(how, together, rows, codes, target);
    } else {
        decode_tile_of(how, together, rows, codes, codes_step, target);
    }
    for (int64_t i = 0; !is_whole && i < rows; ++i) {
        memcpy(y + i * m->column_step * bytes, staged + i * TILE * bytes, (size_t)(together->columns * bytes));
    }
}

static inline void dequantize_transposed(const struct column_decode *how, struct decode_columns *together) {
    const struct quant_copy *copy = how->copy;
    const bool is_packed = how->element == OPAQ_E2M1;
    const int64_t tile_rows = is_packed ? 2 * TILE : TILE;
    const int64_t rows = copy->operand.columns;
    const int64_t row_bytes =
        is_packed ? ceil_div(copy->data_columns, 2) : copy->data_columns; /* a Hadamard group is stored whole */
    const bool is_one = copy->scale_layout.column_step == 0;
    uint8_t transposed[TILE * TILE];
    for (int64_t row = 0; row < rows; row += tile_rows) {
        const int64_t end = min_int64(row + tile_rows, rows);
        transpose_codes(how, together, is_packed ? row / 2 : row, row_bytes, transposed);
        if (is_packed) {
            for (int64_t i = row; i < end; i += HELD_ROWS) {
                column_factors(how, together, i / HELD_ROWS);
                decode_rows(how, together, i, min_int64(HELD_ROWS, end - i), transposed + (i - row) / 2 * TILE,
                            0, true);
            }
            continue;
        }
        if (row % how->block == 0) {
            column_factors(how, together, is_one ? 0 : row / how->block);
        }
        decode_rows(how, together, row, end - row, transposed, TILE, false);
    }
}

/* Rows [row, end) of the result, in one scale block of mxfp8 or mxfp4, whose codes are in the result's order. */
static inline void dequantize_in_place(const struct column_decode *how, struct decode_columns *together,
                                       int64_t row, int64_t end) {
    const struct quant_copy *copy = how->copy;
    const bool is_packed = how->element == OPAQ_E2M1;
    const int64_t step = is_packed ? copy->data_column_step / 2 : copy->data_column_step;
    const uint8_t *const codes = copy->data + row * step + (is_packed ? together->c / 2 : together->c);
    column_factors(how, together, row / how->block);
    for (int64_t i = row; i < end; i += TILE) {
        const int64_t rows = min_int64(TILE, end - i);
        const uint8_t *from = codes + (i - row) * step;
        if (together->columns == TILE) {
            decode_rows(how, together, i, rows, from, step, false);
            continue;
        }
        uint8_t tile[TILE * TILE] = {0};
        const int64_t bytes = is_packed ? ceil_div(together->columns, 2) : together->columns;
        for (int64_t k = 0; k < rows; ++k) {
            memcpy(tile + k * TILE, from + k * step, (size_t)bytes);
        }
        decode_rows(how, together, i, rows, tile, TILE, false);
    }
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
            dequantize_transposed(&how, &together);
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
