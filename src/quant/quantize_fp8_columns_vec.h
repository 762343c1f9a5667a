/* quant/quantize_fp8_columns_vec.h: the columnwise copies of fp8, fp8row, fp8blk1 and fp8blk2, in vectors. Depends on
 * column_amax_vec.h, scales_vec.h and transpose_vec.h. Specification: docs/formats.md.
 *
 * Codes are made row by row of x, into a tile that is then transposed, because the copy is stored transposed. Where the
 * rowwise copy has the same codes, it is filled on the way. */
#ifndef OPAQ_QUANT_QUANTIZE_FP8_COLUMNS_VEC_H
#define OPAQ_QUANT_QUANTIZE_FP8_COLUMNS_VEC_H

#include "base/float_bits.h"
#include "quant/column_amax_vec.h"
#include "quant/scales_vec.h"
#include "quant/transpose_vec.h"

enum { FP8_COLUMN_ROWS = 128, FP8_TILE_STEPS = TILE / STEP };

/* Columns that are done together: what each is multiplied with, and its amax, NaNs counting, if that is known. */
struct fp8_columns {
    int64_t c;
    int64_t columns;
    bool has_amax;
    float amax[AMAX_COLUMNS];
    float apply[AMAX_COLUMNS];
};

/* Where the codes go. */
struct fp8_column_copies {
    const struct quant_copy *columnwise;
    const struct quant_copy *rowwise; /* or NULL */
};

VEC_INLINE float fp8_half_beyond(enum opaq_element element) { return element == OPAQ_E4M3 ? 464.0f : 61440.0f; }

/* ---- a tile ---- */

/* Whether no element of a tile is NaN, infinite or scaled beyond the largest value. */
VEC_INLINE bool fp8_tile_is_plain(struct encode_how how, const struct column_source *source, int64_t rows,
                                  float factor) {
    const uint32_t limit = float_to_bits(fp8_half_beyond(how.element)) - 1u;
    bool is_plain = !how.is_careful && factor >= 0x1p-90f;
    for (int s = 0; s < FP8_TILE_STEPS && is_plain; ++s) {
        const char *const x = source->x + s * STEP * element_bytes(how.dtype);
        struct step keys = step_keys(step_load(x, how.dtype), how.dtype, false);
        for (int64_t i = 1; i < rows; ++i) {
            const struct step step = step_load(x + i * source->row_bytes, how.dtype);
            keys = step_keys_max(keys, step_keys(step, how.dtype, false), how.dtype);
        }
        const struct step_floats amax = step_amaxes(keys, how.dtype, false);
        is_plain = !any32(above32((vec32)(amax.even * factor), limit)) &&
                   !any32(above32((vec32)(amax.odd * factor), limit));
    }
    return is_plain;
}

/* The same from amaxes that are known. */
static inline bool fp8_columns_are_plain(struct encode_how how, const float *apply, const float *amax,
                                         int64_t columns) {
    bool is_plain = !how.is_careful;
    for (int64_t i = 0; i < columns; ++i) {
        is_plain &= apply[i] >= 0x1p-90f && amax[i] * apply[i] < fp8_half_beyond(how.element);
    }
    return is_plain;
}

/* Codes of up to TILE rows. */
VEC_INLINE void fp8_tile_codes(struct encode_how how, const struct column_source *source, int64_t rows,
                               const float *apply, bool is_plain, uint8_t tile[TILE * TILE]) {
    struct step_floats factors[FP8_TILE_STEPS];
    const vecf down = vecf_set(is_plain ? plain_factor(how.element) : 1.0f);
    for (int s = 0; s < FP8_TILE_STEPS; ++s) {
        const vec32 first = (vec32)((vecf)vec_load(apply + s * STEP) * down);
        const vec32 second = (vec32)((vecf)vec_load(apply + s * STEP + FLOATS) * down);
        factors[s] = (struct step_floats){(vecf)split_even(first, second), (vecf)split_odd(first, second)};
    }
    for (int64_t i = 0; i < rows; ++i) {
        vec16 codes[FP8_TILE_STEPS];
        for (int s = 0; s < FP8_TILE_STEPS; ++s) {
            const int64_t place = s * STEP * element_bytes(how.dtype);
            const struct step step = step_load(source->x + i * source->row_bytes + place, how.dtype);
            codes[s] = is_plain ? encode_plain(step, how.dtype, how.element, factors[s].even, factors[s].odd)
                                : encode_step(how, step, factors[s].even, factors[s].odd);
        }
        vec_store(tile + i * TILE, pack_bytes(codes[0], codes[1]));
    }
}

/* Rows from `row` on, up to TILE of them, and up to TILE columns, the first being the one at `place` of those done
 * together. */
VEC_INLINE void fp8_column_tile(struct encode_how how, const struct fp8_column_copies *copies,
                                const struct fp8_columns *together, int64_t row, int64_t rows, int64_t place) {
    char staged[TILE * TILE * 4];
    uint8_t tile[TILE * TILE];
    const struct quant_copy *copy = copies->columnwise;
    const int64_t c = together->c + place;
    const int64_t columns = min_int64(TILE, together->columns - place);
    const float *const apply = together->apply + place;
    const struct column_source source =
        column_source_at(&copy->operand, row, rows, c, columns, TILE, how.dtype, staged);
    const bool is_plain = together->has_amax
                              ? fp8_columns_are_plain(how, apply, together->amax + place, columns)
                              : fp8_tile_is_plain(how, &source, rows, apply[0]);
    if (is_plain) {
        fp8_tile_codes(how, &source, rows, apply, true, tile);
    } else {
        fp8_tile_codes(how, &source, rows, apply, false, tile);
    }
    if (copies->rowwise != NULL) {
        uint8_t *const data = copies->rowwise->data + row * copies->rowwise->data_row_step + c;
        for (int64_t i = 0; i < rows; ++i) {
            if (columns == TILE) {
                vec_store(data + i * copies->rowwise->data_row_step, vec_load(tile + i * TILE));
            } else {
                memcpy(data + i * copies->rowwise->data_row_step, tile + i * TILE, (size_t)columns);
            }
        }
    }
    transpose_tile(tile, rows, columns, copy->data + c * copy->data_row_step + row, copy->data_row_step);
}

VEC_INLINE void fp8_column_tiles(struct encode_how how, const struct fp8_column_copies *copies,
                                 const struct fp8_columns *together, int64_t row, int64_t row_end) {
    for (; row < row_end; row += TILE) {
        for (int64_t place = 0; place < together->columns; place += TILE) {
            fp8_column_tile(how, copies, together, row, min_int64(TILE, row_end - row), place);
        }
    }
}

/* ---- scales ---- */

/* Amaxes over rows [row, row_end), NaNs counting, and factors that follow from them; `square` columns next to each other
 * share theirs. `stored` gets what is stored. */
VEC_INLINE void fp8_columns_scale(struct encode_how how, const struct opaq_spec *spec,
                                  const struct quant_matrix *m, int64_t row, int64_t row_end, int64_t square,
                                  struct fp8_columns *together, float stored[AMAX_COLUMNS]) {
    float used[AMAX_COLUMNS];
    bool has_nan = false;
    together->has_amax = true;
    column_amaxes(m, row, row_end, together->c, together->columns, how.dtype, false, together->amax);
    for (int64_t i = 0; i < together->columns; ++i) {
        has_nan |= float_is_nan(together->amax[i]) != 0;
    }
    if (has_nan && !how.is_careful) {
        column_amaxes(m, row, row_end, together->c, together->columns, how.dtype, true, used);
    } else {
        memcpy(used, together->amax, sizeof used);
    }
    for (int64_t i = 0; i < together->columns && square > 1; i += square) {
        uint32_t bits = 0; /* which NaN has the most of */
        const int64_t end = min_int64(i + square, together->columns);
        for (int64_t k = i; k < end; ++k) {
            bits = float_to_bits(used[k]) > bits ? float_to_bits(used[k]) : bits;
        }
        for (int64_t k = i; k < end; ++k) {
            used[k] = float_from_bits(bits);
        }
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
    for (int64_t i = 0; i < together->columns; i += layout->row_per) {
        scale[(together->c + i) / layout->row_per * layout->row_step] = stored[i];
    }
}

/* Columns beyond the last are read as factors, but come to nothing. */
VEC_INLINE struct fp8_columns fp8_columns_at(int64_t c, int64_t c_end, float apply) {
    struct fp8_columns together = {.c = c, .columns = min_int64(AMAX_COLUMNS, c_end - c)};
    for (int i = 0; i < AMAX_COLUMNS; ++i) {
        together.amax[i] = 0.0f;
        together.apply[i] = apply;
    }
    return together;
}

/* ---- the formats ---- */

/* Rows [row, row_end) and columns [c, c_end) of x, under the tensor's scale. */
VEC_INLINE void fp8_tensor_columns(struct encode_how how, const struct quant_job *job,
                                   const struct fp8_column_copies *copies, int64_t row, int64_t row_end,
                                   int64_t c, int64_t c_end) {
    for (; c < c_end; c += AMAX_COLUMNS) {
        const struct fp8_columns together = fp8_columns_at(c, c_end, job->tensor_scale);
        fp8_column_tiles(how, copies, &together, row, row_end);
    }
}

/* A scale for every column, or one for every 128 of them, and 128 rows. */
VEC_INLINE void fp8_block_columns(struct encode_how how, const struct quant_job *job,
                                  const struct fp8_column_copies *copies, int64_t row, int64_t row_end,
                                  int64_t c, int64_t c_end) {
    const struct quant_copy *copy = copies->columnwise;
    float stored[AMAX_COLUMNS];
    for (; row < row_end; row += FP8_COLUMN_ROWS) {
        const int64_t end = min_int64(row + FP8_COLUMN_ROWS, row_end);
        for (int64_t i = c; i < c_end; i += AMAX_COLUMNS) {
            struct fp8_columns together = fp8_columns_at(i, c_end, 1.0f);
            fp8_columns_scale(how, &job->spec, &copy->operand, row, end, copy->block_rows, &together, stored);
            fp8_store_scales(copy, &together, row, stored);
            if (copies->rowwise != NULL) { /* whose scales lie the other way */
                const struct scale_layout *layout = &copies->rowwise->scale_layout;
                float *const scale = (float *)copies->rowwise->scale + row / layout->row_per * layout->row_step;
                for (int64_t k = 0; k < together.columns; k += layout->column_per) {
                    scale[(i + k) / layout->column_per * layout->column_step] = stored[k];
                }
            }
            fp8_column_tiles(how, copies, &together, row, end);
        }
    }
}

/* A scale for every column. */
VEC_INLINE void fp8_scaled_columns(struct encode_how how, const struct quant_job *job,
                                   const struct quant_copy *copy, int64_t c, int64_t c_end) {
    const struct fp8_column_copies copies = {copy, NULL};
    float stored[AMAX_COLUMNS];
    for (; c < c_end; c += AMAX_COLUMNS) {
        struct fp8_columns together = fp8_columns_at(c, c_end, 1.0f);
        fp8_columns_scale(how, &job->spec, &copy->operand, 0, copy->operand.columns, 1, &together, stored);
        fp8_store_scales(copy, &together, 0, stored);
        fp8_column_tiles(how, &copies, &together, 0, copy->operand.columns);
    }
}

VEC_INLINE void quantize_fp8_columns(struct encode_how how, const struct quant_job *job,
                                     const struct quant_copy *copy, int64_t c, int64_t c_end) {
    const struct fp8_column_copies copies = {copy, NULL};
    if (job->spec.format == OPAQ_FP8) {
        fp8_tensor_columns(how, job, &copies, 0, copy->operand.columns, c, c_end);
    } else if (job->spec.format == OPAQ_FP8ROW) {
        fp8_scaled_columns(how, job, copy, c, c_end);
    } else {
        fp8_block_columns(how, job, &copies, 0, copy->operand.columns, c, c_end);
    }
}

#endif
