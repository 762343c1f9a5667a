/* cpu/quant/simd/columns_vec.h: loads and amaxes for scales along the columns of x. Depends on decode_vec.h and
 * fold_vec.h.
 *
 * The operand of a columnwise copy is x transposed, so its rows are strided in memory. Vectors are loaded along
 * the rows of x instead, with one column per lane: an amax over rows is then a lane-wise maximum. */
#ifndef OPAQ_CPU_QUANT_SIMD_COLUMNS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_COLUMNS_VEC_H

#include "backend/quant_job.h"
#include "base/checked.h"
#include "cpu/quant/simd/decode_vec.h"
#include "cpu/quant/simd/fold_vec.h"
#include "definition/hadamard.h"

/* Rows that are held at once. */
enum { HELD_ROWS = HADAMARD_SIZE };

/* Part of x, from some row and column on. */
struct column_source {
    const char *x;
    int64_t row_bytes;
};

/* x from row `row` and column `c` on, the operand being x transposed. */
VEC_INLINE struct column_source column_source_at(const struct quant_matrix *m, int64_t row, int64_t c,
                                                 enum opaq_element dtype) {
    const int64_t bytes = element_bytes(dtype);
    return (struct column_source){(const char *)m->data + (row * m->column_step + c) * bytes,
                                  m->column_step * bytes};
}

/* The source from column c on, of which `width` columns are read and `columns` remain. If these are fewer, a copy of
 * `rows` rows in `staged`, padded with zeros. */
VEC_INLINE struct column_source column_source_part(struct column_source source, int64_t rows, int64_t c,
                                                   int64_t columns, int64_t width, enum opaq_element dtype,
                                                   char *staged) {
    const int64_t bytes = element_bytes(dtype);
    source.x += c * bytes;
    if (columns >= width) {
        return source;
    }
    for (int64_t i = 0; i < rows; ++i) {
        memcpy(staged + i * width * bytes, source.x + i * source.row_bytes, (size_t)(columns * bytes));
        memset(staged + (i * width + columns) * bytes, 0, (size_t)((width - columns) * bytes));
    }
    return (struct column_source){staged, width * bytes};
}

/* Whether the operand's rows are columns of x, adjacent in memory. */
VEC_INLINE bool is_along_columns(const struct quant_copy *copy) { return copy->operand.row_step == 1; }

/* ---- a step of HELD_ROWS rows ---- */

VEC_INLINE void hold_rows(const struct column_source *source, int64_t row, int64_t rows, int64_t place,
                          enum opaq_element dtype, struct step held[HELD_ROWS]) {
    for (int i = 0; i < HELD_ROWS; ++i) {
        held[i] = i < rows ? step_load(source->x + (row + i) * source->row_bytes + place, dtype)
                           : (struct step){{vec32_set(0), vec32_set(0)}};
    }
}

VEC_INLINE struct step step_keys(struct step x, enum opaq_element dtype, bool drop_nan) {
    x.part[0] = key_of(x.part[0], dtype, drop_nan);
    x.part[1] = dtype == OPAQ_F32 ? key_of(x.part[1], dtype, drop_nan) : x.part[1];
    return x;
}

VEC_INLINE struct step step_keys_max(struct step a, struct step b, enum opaq_element dtype) {
    a.part[0] = key_max(a.part[0], b.part[0], dtype);
    a.part[1] = dtype == OPAQ_F32 ? key_max(a.part[1], b.part[1], dtype) : a.part[1];
    return a;
}

/* Columns' amaxes from their keys; every NaN becomes the canonical one. */
VEC_INLINE struct step_floats step_amaxes(struct step keys, enum opaq_element dtype, bool drop_nan) {
    keys.part[0] = key_magnitude(keys.part[0], dtype, drop_nan);
    keys.part[1] = dtype == OPAQ_F32 ? key_magnitude(keys.part[1], dtype, drop_nan) : keys.part[1];
    const struct step_floats a = step_magnitudes(keys, dtype);
    const vec32 nan = vec32_set(0x7FC00000u);
    return (struct step_floats){(vecf)replace32(above32((vec32)a.even, 0x7F800000u), (vec32)a.even, nan),
                                (vecf)replace32(above32((vec32)a.odd, 0x7F800000u), (vec32)a.odd, nan)};
}

VEC_INLINE bool has_nans(struct step_floats amax) {
    return any32(above32((vec32)amax.even, 0x7F800000u)) || any32(above32((vec32)amax.odd, 0x7F800000u));
}

VEC_INLINE struct step_floats held_amaxes(const struct step held[HELD_ROWS], enum opaq_element dtype,
                                          bool drop_nan) {
    struct step keys = step_keys(held[0], dtype, drop_nan);
    for (int i = 1; i < HELD_ROWS; ++i) {
        keys = step_keys_max(keys, step_keys(held[i], dtype, drop_nan), dtype);
    }
    return step_amaxes(keys, dtype, drop_nan);
}

/* ---- the Hadamard transform of the columns of HELD_ROWS rows ---- */

/* `h` is a constant where it is used, so that the rows stay in registers. */
VEC_INLINE void butterflies_of(vecf v[HELD_ROWS], int h) {
    for (int i = 0; i < HELD_ROWS; ++i) {
        if ((i & h) == 0) {
            const vecf a = v[i];
            const vecf b = v[i + h];
            v[i] = a + b;
            v[i + h] = a - b;
        }
    }
}

VEC_INLINE void butterflies(vecf v[HELD_ROWS]) {
    butterflies_of(v, 1);
    butterflies_of(v, 2);
    butterflies_of(v, 4);
    butterflies_of(v, 8);
}

/* What rows are multiplied with first: a quarter, with the sign that the mask has for the row. */
struct hadamard_quarters {
    float row[HELD_ROWS];
};

VEC_INLINE struct hadamard_quarters hadamard_quarters(uint16_t mask) {
    struct hadamard_quarters quarters;
    for (int i = 0; i < HELD_ROWS; ++i) {
        quarters.row[i] = mask >> i & 1 ? -0.25f : 0.25f;
    }
    return quarters;
}

/* hadamard_forward() in each lane, up to the rounding. */
VEC_INLINE void transform_lanes(vecf v[HELD_ROWS], const struct hadamard_quarters *quarters) {
    for (int i = 0; i < HELD_ROWS; ++i) {
        v[i] = v[i] * quarters->row[i];
    }
    butterflies(v);
}

/* The elements as floats, with their signs; NaNs are unchanged. */
VEC_INLINE struct step_floats step_values(struct step x, enum opaq_element dtype) {
    if (dtype == OPAQ_BF16) {
        return (struct step_floats){(vecf)(x.part[0] << 16), (vecf)(x.part[0] & 0xFFFF0000u)};
    }
    vec32 first = x.part[0];
    vec32 second = x.part[1];
    if (dtype == OPAQ_F16) {
        first = (vec32)from_halves((vec16)x.part[0], false);
        second = (vec32)from_halves((vec16)x.part[0], true);
    }
    return (struct step_floats){(vecf)split_even(first, second), (vecf)split_odd(first, second)};
}

/* transform_lanes() of the even or the odd elements of held rows. */
VEC_INLINE void transform_half(const struct step held[HELD_ROWS], enum opaq_element dtype, bool is_odd,
                               const struct hadamard_quarters *quarters, vecf v[HELD_ROWS]) {
    for (int i = 0; i < HELD_ROWS; ++i) {
        const struct step_floats values = step_values(held[i], dtype);
        v[i] = is_odd ? values.odd : values.even;
    }
    transform_lanes(v, quarters);
}

/* Whether a value may be NaN, from their sum: it is NaN if a value is, or if there are infinities of both signs. */
VEC_INLINE bool may_have_nans(const vecf v[HELD_ROWS]) {
    vecf sum[4] = {v[0], v[1], v[2], v[3]};
    for (int i = 4; i < HELD_ROWS; ++i) {
        sum[i % 4] = sum[i % 4] + v[i];
    }
    const vec32 all = (vec32)(sum[0] + sum[1] + (sum[2] + sum[3]));
    return any32(above32(all & 0x7FFFFFFFu, 0x7F800000u));
}

/* Held rows rounded to bf16, in the high words. */
VEC_INLINE void round_held(const vecf v[HELD_ROWS], vec32 rounded[HELD_ROWS]) {
    if (may_have_nans(v)) {
        for (int i = 0; i < HELD_ROWS; ++i) {
            rounded[i] = round_to_bf16(v[i], true);
        }
    } else {
        for (int i = 0; i < HELD_ROWS; ++i) {
            rounded[i] = round_to_bf16(v[i], false);
        }
    }
}

/* hadamard_forward() of held rows of any dtype, to rows of bf16. The halves are processed one after the other,
 * because both would not fit in the registers. */
VEC_INLINE void transform_held(struct step held[HELD_ROWS], enum opaq_element dtype,
                               const struct hadamard_quarters *quarters) {
    vecf v[HELD_ROWS];
    vec32 low[HELD_ROWS];
    vec32 high[HELD_ROWS];
    transform_half(held, dtype, false, quarters, v);
    round_held(v, low);
    transform_half(held, dtype, true, quarters, v);
    round_held(v, high);
    for (int i = 0; i < HELD_ROWS; ++i) {
        held[i] = (struct step){{choose_bits(low[i] >> 16, high[i], vec32_set(0xFFFFu)), vec32_set(0)}};
    }
}

#endif
