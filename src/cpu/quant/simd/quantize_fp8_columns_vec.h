/* cpu/quant/simd/quantize_fp8_columns_vec.h: the columnwise copies of fp8row and fp8blk1, in vectors. Depends on
 * column_amax_vec.h, random_bytes_vec.h, scales_vec.h and transpose_vec.h. Specification: docs/formats.md.
 *
 * Codes are computed row by row of x and then transposed, because the copy is stored transposed. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_FP8_COLUMNS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_FP8_COLUMNS_VEC_H

#include "base/float_bits.h"
#include "cpu/quant/simd/column_amax_vec.h"
#include "cpu/quant/simd/random_bytes_vec.h"
#include "cpu/quant/simd/scales_vec.h"
#include "cpu/quant/simd/transpose_vec.h"

/* Codes of FP8_BUFFER_ROWS rows, to be transposed together: each column of the copy may lie in a page of its own, so it
 * is written in long runs. */
enum { FP8_WIDTH = 1024, FP8_PITCH = FP8_WIDTH + 64, FP8_BUFFER_ROWS = 128 };
struct fp8_buffer {
    _Alignas(VEC_BYTES) uint8_t codes[FP8_BUFFER_ROWS * FP8_PITCH];
    struct random_bytes random; /* of the first buffer only */
};

/* Columns that are processed together: the factor of each and its amax, including NaNs. */
struct fp8_columns {
    int64_t c;
    int64_t columns;
    float amax[AMAX_COLUMNS];
    float apply[AMAX_COLUMNS];
};

VEC_INLINE float fp8_half_beyond(enum opaq_element element) { return element == OPAQ_E4M3 ? 464.0f : 61440.0f; }

/* Transposes codes of `rows` rows of x into the copy, tile by tile, so that it can be interleaved with encoding. */
struct fp8_transpose {
    const uint8_t *codes;
    int64_t step;
    bool may_read_beyond;
    uint8_t *to;
    int64_t to_step;
    int64_t rows;
    int64_t columns;
    int64_t done; /* tiles */
    int64_t tiles;
    bool streams;
};

static inline struct fp8_transpose fp8_transpose_begin(const uint8_t *codes, int64_t step, bool may_read_beyond,
                                                       const struct quant_copy *copy, int64_t row, int64_t rows,
                                                       int64_t c, int64_t columns) {
    uint8_t *const to = copy->data + c * copy->data_row_step + row;
    return (struct fp8_transpose){
        codes,
        step,
        may_read_beyond,
        to,
        copy->data_row_step,
        rows,
        columns,
        0,
        ceil_div(rows, TILE) * ceil_div(columns, TILE),
        transpose_streams(to, copy->data_row_step, copy->operand.rows * copy->data_row_step)};
}

/* Transposes until `tiles` tiles are complete. */
VEC_OUTLINE void fp8_transpose_until(struct fp8_transpose *transpose, int64_t tiles) {
    const int64_t down = ceil_div(transpose->rows, TILE);
    for (; transpose->done < min_int64(tiles, transpose->tiles); ++transpose->done) {
        const int64_t i = transpose->done / down * TILE;
        const int64_t r = transpose->done % down * TILE;
        transpose_tile(transpose->codes + r * transpose->step + i, transpose->step,
                       min_int64(TILE, transpose->rows - r), min_int64(TILE, transpose->columns - i),
                       transpose->may_read_beyond, transpose->to + i * transpose->to_step + r,
                       transpose->to_step, transpose->streams);
    }
}

static inline void fp8_transpose_all(const uint8_t *codes, int64_t step, bool may_read_beyond,
                                     const struct quant_copy *copy, int64_t row, int64_t rows, int64_t c,
                                     int64_t columns) {
    struct fp8_transpose transpose =
        fp8_transpose_begin(codes, step, may_read_beyond, copy, row, rows, c, columns);
    fp8_transpose_until(&transpose, transpose.tiles);
}

/* Whether no element is NaN, infinite or scaled beyond the largest value. */
VEC_OUTLINE bool fp8_columns_are_regular(struct encode_how how, const struct fp8_columns *together) {
    bool is_regular = !how.not_te;
    for (int64_t i = 0; i < together->columns; ++i) {
        is_regular &= together->apply[i] >= 0x1p-90f &&
                      together->amax[i] * together->apply[i] < fp8_half_beyond(how.element);
    }
    return is_regular;
}

/* Codes of a row of x, with its random bytes if they are not rounded to the nearest. */
VEC_INLINE void fp8_column_row(struct encode_how how, const char *x, int64_t columns, const float *apply,
                               bool is_regular, const uint8_t *random, uint8_t *codes) {
    const int64_t bytes = element_bytes(how.dtype);
    const vecf down = vecf_set(is_regular ? regular_factor(how.element) : 1.0f);
    for (int64_t i = 0; i < columns; i += 2 * STEP) {
        char staged[2 * STEP * 4];
        const char *from = x + i * bytes;
        vec16 words[2];
        if (columns - i < 2 * STEP) {
            memset(staged, 0, sizeof staged);
            memcpy(staged, from, (size_t)((columns - i) * bytes));
            from = staged;
        }
        for (int s = 0; s < 2; ++s) {
            const vec32 first = vec_load(apply + i + s * STEP);
            const vec32 second = vec_load(apply + i + s * STEP + FLOATS);
            const vecf even = (vecf)split_even(first, second) * down;
            const vecf odd = (vecf)split_odd(first, second) * down;
            const struct step step = step_load(from + s * STEP * bytes, how.dtype);
            words[s] = random != NULL
                           ? encode_stochastic(how, step, even, odd, random_of_bytes(random + i + s * STEP))
                       : is_regular ? encode_regular(step, how.dtype, how.element, even, odd)
                                    : encode_step(how, step, even, odd);
        }
        vec_store(codes + i, pack_bytes(words[0], words[1]));
    }
}

/* fp8_column_row(), out of line. */
VEC_OUTLINE void fp8_column_row_of(struct encode_how how, const char *x, int64_t columns, const float *apply,
                                   bool is_regular, const uint8_t *random, uint8_t *codes) {
    if (how.not_te) {
        FOR_DTYPE(how.dtype, fp8_column_row(encode_not_te(how, DTYPE, OPAQ_E4M3, true), x, columns, apply,
                                            false, NULL, codes));
    } else if (random != NULL) {
        FOR_FP8_TE(how, fp8_column_row(HOW, x, columns, apply, false, random, codes));
    } else {
        FOR_FP8_TE(how, FOR_FLAG(is_regular, fp8_column_row(HOW, x, columns, apply, FLAG, NULL, codes)));
    }
}

/* Codes of rows [row, row_end), to a buffer. */
static inline void fp8_column_codes(struct encode_how how, const struct quant_copy *copy,
                                    const struct fp8_columns *together, int64_t row, int64_t row_end,
                                    struct random_bytes *random, uint8_t *codes) {
    const struct quant_matrix *m = &copy->operand;
    const bool is_regular = fp8_columns_are_regular(how, together);
    const bool is_random = !how.not_te && random->is_used;
    for (int64_t i = row; i < row_end; ++i, codes += FP8_PITCH) {
        const char *const x =
            (const char *)m->data + (i * m->column_step + together->c) * element_bytes(how.dtype);
        fp8_column_row_of(how, x, together->columns, together->apply, is_regular,
                          is_random ? random_bytes(random, i, together->c, together->columns) : NULL, codes);
    }
}

/* ---- scales ---- */

/* Amaxes over rows [row, row_end), including NaNs, and the factors from them. `stored` receives the scales to store.
 * */
static inline void fp8_columns_scale(struct encode_how how, const struct opaq_spec *spec,
                                     const struct quant_matrix *m, int64_t row, int64_t row_end,
                                     struct fp8_columns *together, float stored[AMAX_COLUMNS]) {
    float used[AMAX_COLUMNS];
    bool has_nan = false;
    column_amaxes_of(m, row, row_end, together->c, together->columns, how.dtype, false, together->amax);
    for (int64_t i = 0; i < together->columns; ++i) {
        has_nan |= float_is_nan(together->amax[i]) != 0;
    }
    if (has_nan && !how.not_te) {
        column_amaxes_of(m, row, row_end, together->c, together->columns, how.dtype, true, used);
    } else {
        memcpy(used, together->amax, sizeof used);
    }
    const float limit = fp8_scale_limit(spec, m->dtype);
    for (int64_t i = 0; i < together->columns; i += FLOATS) {
        const struct fp8_scales scales = fp8_scales_from_amax((vecf)vec_load(used + i), spec, how, limit);
        vec_store(together->apply + i, (vec32)scales.apply);
        vec_store(stored + i, (vec32)scales.stored);
    }
}

static inline void fp8_store_scales(const struct quant_copy *copy, const struct fp8_columns *together,
                                    int64_t row, const float *stored) {
    const struct scale_layout *layout = &copy->scale_layout;
    float *const scale = (float *)copy->scale + row / layout->column_per * layout->column_step;
    for (int64_t i = 0; i < together->columns; ++i) {
        scale[(together->c + i) * layout->row_step] = stored[i];
    }
}

/* Factors of columns beyond the last are read, but their codes are not stored. */
VEC_INLINE struct fp8_columns fp8_columns_at(int64_t c, int64_t c_end, float apply) {
    struct fp8_columns together = {.c = c, .columns = min_int64(AMAX_COLUMNS, c_end - c)};
    for (int i = 0; i < AMAX_COLUMNS; ++i) {
        together.amax[i] = 0.0f;
        together.apply[i] = apply;
    }
    return together;
}

/* Rows [row, row_end) and up to AMAX_COLUMNS columns from c on, a scale for each column and `block` rows. */
VEC_OUTLINE void fp8_scaled_columns(struct encode_how how, const struct quant_job *job,
                                    const struct quant_copy *copy, int64_t row, int64_t row_end, int64_t block,
                                    int64_t c, int64_t c_end, struct fp8_buffer *buffer) {
    float stored[AMAX_COLUMNS];
    struct fp8_columns together = fp8_columns_at(c, c_end, 1.0f);
    for (int64_t from = row; from < row_end; from += FP8_BUFFER_ROWS) {
        const int64_t end = min_int64(from + FP8_BUFFER_ROWS, row_end);
        for (int64_t r = from; r < end; r += min_int64(block, FP8_BUFFER_ROWS)) {
            if ((r - row) % block == 0) {
                fp8_columns_scale(how, &job->spec, &copy->operand, r, min_int64(r + block, row_end), &together,
                                  stored);
                fp8_store_scales(copy, &together, r, stored);
            }
            fp8_column_codes(how, copy, &together, r, min_int64(r + block, end), &buffer->random,
                             buffer->codes + (r - from) * FP8_PITCH);
        }
        fp8_transpose_all(buffer->codes, FP8_PITCH, true, copy, from, end - from, c, together.columns);
    }
}

#endif
