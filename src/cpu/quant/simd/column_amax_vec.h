/* cpu/quant/simd/column_amax_vec.h: amaxes of columns of x, in vectors. Depends on columns_vec.h. */
#ifndef OPAQ_CPU_QUANT_SIMD_COLUMN_AMAX_VEC_H
#define OPAQ_CPU_QUANT_SIMD_COLUMN_AMAX_VEC_H

#include "cpu/quant/simd/columns_vec.h"
#include "cpu/quant/simd/specialize_vec.h"

/* Columns that are processed together: rows are read in segments of this length. */
enum { AMAX_COLUMNS = 512, AMAX_STEPS = AMAX_COLUMNS / STEP, AHEAD_ROWS = 8 };

/* Keys of steps of columns. */
struct column_keys {
    struct step step[AMAX_STEPS];
};

/* Takes `columns` columns of one row into the keys. Prefetches `ahead` bytes on. */
VEC_INLINE void column_keys_add(struct column_keys *keys, const char *x, int64_t columns,
                                enum opaq_element dtype, bool drop_nan, int64_t ahead) {
    const int64_t bytes = element_bytes(dtype);
    for (int64_t i = 0; i * STEP < columns; ++i) {
        char staged[STEP * 4];
        const char *from = x + i * STEP * bytes;
        __builtin_prefetch(from + ahead);
        const int64_t inside = columns - i * STEP;
        if (inside < STEP) {
            memset(staged, 0, sizeof staged);
            memcpy(staged, from, (size_t)(inside * bytes));
            from = staged;
        }
        keys->step[i] = step_keys_max(keys->step[i], step_keys(step_load(from, dtype), dtype, drop_nan), dtype);
    }
}

/* The amax of each of up to AMAX_COLUMNS columns of x from c on, over rows [row, row_end). */
VEC_INLINE void column_amaxes(const struct quant_matrix *m, int64_t row, int64_t row_end, int64_t c,
                              int64_t columns, enum opaq_element dtype, bool drop_nan,
                              float amax[AMAX_COLUMNS]) {
    const int64_t bytes = element_bytes(dtype);
    struct column_keys keys;
    memset(&keys, 0, sizeof keys);
    for (int64_t i = row; i < row_end; ++i) {
        column_keys_add(&keys, (const char *)m->data + (i * m->column_step + c) * bytes, columns, dtype,
                        drop_nan, AHEAD_ROWS * m->column_step * bytes);
    }
    for (int64_t i = 0; i * STEP < columns; ++i) {
        const struct step_floats each = step_amaxes(keys.step[i], dtype, drop_nan);
        vec_store(amax + i * STEP, interleave_first((vec32)each.even, (vec32)each.odd));
        vec_store(amax + i * STEP + FLOATS, interleave_second((vec32)each.even, (vec32)each.odd));
    }
}

/* The same for any dtype, out of line. */
VEC_OUTLINE void column_amaxes_of(const struct quant_matrix *m, int64_t row, int64_t row_end, int64_t c,
                                  int64_t columns, enum opaq_element dtype, bool drop_nan,
                                  float amax[AMAX_COLUMNS]) {
    FOR_DTYPE(dtype, FOR_FLAG(drop_nan, column_amaxes(m, row, row_end, c, columns, DTYPE, FLAG, amax)));
}

/* Keys of steps of columns after the Hadamard transform, as floats that are not rounded yet: rounding keeps the order,
 * so the largest one can be rounded instead of all. */
VEC_INLINE void transformed_keys(const struct quant_matrix *m, int64_t c, int64_t columns,
                                 enum opaq_element dtype, const struct hadamard_quarters *quarters,
                                 bool drop_nan, struct step_floats keys[AMAX_STEPS]) {
    const int64_t bytes = element_bytes(dtype);
    for (int64_t i = 0; i < AMAX_STEPS; ++i) {
        keys[i] = (struct step_floats){vecf_set(0.0f), vecf_set(0.0f)};
    }
    for (int64_t row = 0; row < m->columns; row += HELD_ROWS) {
        const int64_t rows = min_int64(HELD_ROWS, m->columns - row);
        for (int64_t i = 0; i * STEP < columns; ++i) {
            char staged[HELD_ROWS * STEP * 4];
            struct step held[HELD_ROWS];
            vecf v[HELD_ROWS];
            const struct column_source source = column_source_part(
                column_source_at(m, row, c, dtype), rows, i * STEP, columns - i * STEP, STEP, dtype, staged);
            for (int64_t k = 0; k < rows * bytes / 2; ++k) { /* prefetches the next rows, a line at a time */
                const int64_t next = (row + HELD_ROWS + k % rows) * m->column_step + c + i * STEP;
                __builtin_prefetch((const char *)m->data + next * bytes + k / rows * VEC_BYTES);
            }
            hold_rows(&source, 0, rows, 0, dtype, held);
            transform_half(held, dtype, false, quarters, v);
            for (int k = 0; k < HELD_ROWS; ++k) {
                keys[i].even = (vecf)max32((vec32)keys[i].even, key_of((vec32)v[k], OPAQ_F32, drop_nan));
            }
            transform_half(held, dtype, true, quarters, v);
            for (int k = 0; k < HELD_ROWS; ++k) {
                keys[i].odd = (vecf)max32((vec32)keys[i].odd, key_of((vec32)v[k], OPAQ_F32, drop_nan));
            }
        }
    }
}

/* The same for any dtype, out of line. */
VEC_OUTLINE void transformed_keys_of(const struct quant_matrix *m, int64_t c, int64_t columns,
                                     enum opaq_element dtype, const struct hadamard_quarters *quarters,
                                     bool drop_nan, struct step_floats keys[AMAX_STEPS]) {
    FOR_DTYPE(dtype, FOR_FLAG(drop_nan, transformed_keys(m, c, columns, DTYPE, quarters, FLAG, keys)));
}

/* The amaxes of columns after the Hadamard transform. The version that skips NaNs runs only if there are any. */
static inline void transformed_amaxes(const struct quant_matrix *m, int64_t c, int64_t columns,
                                      enum opaq_element dtype, uint16_t mask, bool drop_nan,
                                      float amax[AMAX_COLUMNS]) {
    const struct hadamard_quarters quarters = hadamard_quarters(mask);
    struct step_floats keys[AMAX_STEPS];
    bool has_any = false;
    transformed_keys_of(m, c, columns, dtype, &quarters, false, keys);
    for (int64_t i = 0; i < AMAX_STEPS; ++i) {
        has_any |= has_nans(keys[i]);
    }
    if (has_any && drop_nan) {
        transformed_keys_of(m, c, columns, dtype, &quarters, true, keys);
    }
    for (int64_t i = 0; i * STEP < columns; ++i) {
        const vec32 even = key_magnitude((vec32)keys[i].even, OPAQ_F32, has_any && drop_nan);
        const vec32 odd = key_magnitude((vec32)keys[i].odd, OPAQ_F32, has_any && drop_nan);
        const vec32 rounded_even = round_to_bf16((vecf)even, true) & 0xFFFF0000u;
        const vec32 rounded_odd = round_to_bf16((vecf)odd, true) & 0xFFFF0000u;
        vec_store(amax + i * STEP, interleave_first(rounded_even, rounded_odd));
        vec_store(amax + i * STEP + FLOATS, interleave_second(rounded_even, rounded_odd));
    }
}

#endif
