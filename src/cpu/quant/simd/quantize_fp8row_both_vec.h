/* cpu/quant/simd/quantize_fp8row_both_vec.h: both copies of fp8row in vectors, in one pass over x for the amaxes of
 * all rows and columns and one for their codes. Depends on encode_run_vec.h and quantize_fp8_both_vec.h.
 * Specification: docs/formats.md.
 *
 * Amaxes are stored where scales go later: those of rows until their codes are made, those of columns until all are.
 * Only for rule te, and if no element is NaN, infinite or scaled beyond the largest value. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_FP8ROW_BOTH_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_FP8ROW_BOTH_VEC_H

#include "cpu/quant/simd/encode_run_vec.h"
#include "cpu/quant/simd/quantize_fp8_both_vec.h"

/* Columns whose keys are kept in the cache while rows are read, and rows that are read together: the keys are loaded
 * once for all of these. */
enum { FP8ROW_COLUMNS = 4096, FP8ROW_ROWS = 4 };

/* ---- amaxes ---- */

/* Merges `bytes` bytes of `rows` rows into the keys of the columns and of each row. Prefetches `ahead` bytes further.
 * */
VEC_INLINE void fp8row_keys_add(const char *x, int64_t row_bytes, int rows, int64_t bytes, int64_t ahead,
                                enum opaq_element dtype, vec32 *column_keys, vec32 row_keys[FP8ROW_ROWS]) {
    const int64_t parts = bytes / VEC_BYTES;
    const int64_t left = bytes % VEC_BYTES;
    for (int64_t i = 0; i < parts; ++i) {
        vec32 column_key = column_keys[i];
        for (int k = 0; k < rows; ++k) {
            const char *const from = x + k * row_bytes + i * VEC_BYTES;
            const vec32 key = key_of(vec_load(from), dtype, false);
            __builtin_prefetch(from + ahead);
            column_key = key_max(column_key, key, dtype);
            row_keys[k] = key_max(row_keys[k], key, dtype);
        }
        column_keys[i] = column_key;
    }
    for (int k = 0; left != 0 && k < rows; ++k) {
        char staged[VEC_BYTES] = {0};
        memcpy(staged, x + k * row_bytes + parts * VEC_BYTES, (size_t)left);
        const vec32 key = key_of(vec_load(staged), dtype, false);
        column_keys[parts] = key_max(column_keys[parts], key, dtype);
        row_keys[k] = key_max(row_keys[k], key, dtype);
    }
}

/* Up to FLOATS rows; `amax` is raised to their amaxes. */
VEC_INLINE void fp8row_group_amaxes(const char *x, int64_t row_bytes, int64_t rows, int64_t bytes,
                                    enum opaq_element dtype, vec32 *column_keys, float *amax) {
    vec32 row_keys[FLOATS];
    memset(row_keys, 0, sizeof row_keys);
    for (int64_t row = 0; row < rows; row += FP8ROW_ROWS) {
        const char *const from = x + row * row_bytes;
        if (rows - row >= FP8ROW_ROWS) {
            fp8row_keys_add(from, row_bytes, FP8ROW_ROWS, bytes, FP8ROW_ROWS * row_bytes, dtype, column_keys,
                            row_keys + row);
        } else {
            fp8row_keys_add(from, row_bytes, (int)(rows - row), bytes, 0, dtype, column_keys, row_keys + row);
        }
    }
    uint32_t found[FLOATS];
    vec_store(found, (vec32)magnitudes_to_floats(fold_keys(row_keys, FLOATS, dtype), dtype));
    for (int64_t i = 0; i < rows; ++i) {
        amax[i] = found[i] > float_to_bits(amax[i]) ? float_from_bits(found[i]) : amax[i];
    }
}

/* Merges the amaxes found into `amax` by maximum; other threads do the same at the same time. */
static inline void fp8row_join(const float *found, int64_t n, float *amax) {
    uint32_t *const there = (uint32_t *)amax;
    for (int64_t i = 0; i < n; ++i) {
        const uint32_t bits = float_to_bits(found[i]);
        uint32_t seen = __atomic_load_n(&there[i], __ATOMIC_RELAXED);
        while (bits > seen &&
               !__atomic_compare_exchange_n(&there[i], &seen, bits, true, __ATOMIC_RELAXED, __ATOMIC_RELAXED)) {
        }
    }
}

/* Rows [row, row_end), up to FP8ROW_COLUMNS columns from c on. */
VEC_INLINE void fp8row_part_amaxes(const struct quant_job *job, int64_t row, int64_t row_end, int64_t c,
                                   int64_t columns, enum opaq_element dtype) {
    const struct quant_matrix *m = &job->copy[0].operand;
    const int64_t row_bytes = m->row_step * element_bytes(dtype);
    const int step_parts = dtype == OPAQ_F32 ? 2 : 1;
    vec32 keys[FP8ROW_COLUMNS * 4 / VEC_BYTES];
    memset(keys, 0, (size_t)(round_up(columns, STEP) * element_bytes(dtype)));
    for (int64_t r = row; r < row_end; r += FLOATS) {
        fp8row_group_amaxes((const char *)m->data + r * row_bytes + c * element_bytes(dtype), row_bytes,
                            min_int64(FLOATS, row_end - r), columns * element_bytes(dtype), dtype, keys,
                            (float *)job->copy[0].scale + r);
    }
    for (int64_t i = 0; i < columns; i += STEP) {
        const vec32 *const first = keys + i / STEP * step_parts;
        const struct step_floats each =
            step_amaxes((struct step){{first[0], first[step_parts - 1]}}, dtype, false);
        _Alignas(VEC_BYTES) float found[STEP];
        vec_store(found, interleave_first((vec32)each.even, (vec32)each.odd));
        vec_store(found + FLOATS, interleave_second((vec32)each.even, (vec32)each.odd));
        fp8row_join(found, min_int64(STEP, columns - i), (float *)job->copy[1].scale + c + i);
    }
}

static inline void fp8row_find_amaxes(const struct quant_job *job, int64_t r, int64_t r_end) {
    const struct quant_matrix *m = &job->copy[0].operand;
    for (int64_t c = 0; c < m->columns; c += FP8ROW_COLUMNS) {
        const int64_t columns = min_int64(FP8ROW_COLUMNS, m->columns - c);
        FOR_DTYPE(m->dtype, fp8row_part_amaxes(job, r, r_end, c, columns, DTYPE));
    }
}

/* ---- scales ---- */

/* Of up to FLOATS amaxes. Behind them are zeros. */
VEC_INLINE vecf fp8row_load(const float *amax, int64_t n) {
    _Alignas(VEC_BYTES) float each[FLOATS] = {0};
    memcpy(each, amax, (size_t)min_int64(FLOATS, n) * sizeof *each);
    return (vecf)vec_load(each);
}

VEC_INLINE struct encode_how fp8row_how(const struct quant_job *job) {
    return (struct encode_how){.dtype = job->copy[0].operand.dtype,
                               .element = job->spec.element == OPAQ_E5M2 ? OPAQ_E5M2 : OPAQ_E4M3};
}

static inline bool fp8row_amaxes_in_range(const struct quant_job *job) {
    const struct encode_how how = fp8row_how(job);
    bool are_regular = true;
    for (int copy = 0; copy < 2; ++copy) {
        const float *const amax = job->copy[copy].scale;
        const int64_t n = job->copy[copy].operand.rows;
        for (int64_t i = 0; are_regular && i < n; i += FLOATS) {
            const vecf each = fp8row_load(amax + i, n - i);
            are_regular = are_regular_amaxes(how.element, each,
                                             fp8_scales_from_amax(each, &job->spec, how, FLT_MAX).apply);
        }
    }
    return are_regular;
}

/* Replaces n amaxes by the scales to store. Writes the factors to `apply`, if it is not NULL: n rounded up to
 * FLOATS. */
VEC_OUTLINE void fp8row_settle(struct encode_how how, const struct opaq_spec *spec, float *amax, int64_t n,
                               float *apply) {
    for (int64_t i = 0; i < n; i += FLOATS) {
        _Alignas(VEC_BYTES) float stored[FLOATS];
        const struct fp8_scales scales = fp8_scales_from_amax(fp8row_load(amax + i, n - i), spec, how, FLT_MAX);
        vec_store(stored, (vec32)scales.stored);
        memcpy(amax + i, stored, (size_t)min_int64(FLOATS, n - i) * sizeof *stored);
        if (apply != NULL) {
            vec_store(apply + i, (vec32)scales.apply);
        }
    }
}

static inline void fp8row_finish(const struct quant_job *job) {
    fp8row_settle(fp8row_how(job), &job->spec, job->copy[1].scale, job->copy[1].operand.rows, NULL);
}

/* ---- codes ---- */

/* Factors of the columns of a part, and the same times regular_factor() by steps. */
struct fp8row_columns {
    float apply[FP8_BOTH_COLUMNS];
    struct step_floats regular[FP8_BOTH_COLUMNS / STEP];
};

VEC_OUTLINE void fp8row_columns_at(struct encode_how how, const struct opaq_spec *spec, const float *amax,
                                   int64_t columns, struct fp8row_columns *to) {
    for (int64_t i = 0; i < FP8_BOTH_COLUMNS; i += FLOATS) {
        const vecf each = i < columns ? fp8row_load(amax + i, columns - i) : vecf_set(0.0f);
        vec_store(to->apply + i, (vec32)fp8_scales_from_amax(each, spec, how, FLT_MAX).apply);
    }
    for (int64_t s = 0; s < FP8_BOTH_COLUMNS / STEP; ++s) {
        const vec32 first = vec_load(to->apply + s * STEP);
        const vec32 second = vec_load(to->apply + s * STEP + FLOATS);
        to->regular[s] = (struct step_floats){(vecf)split_even(first, second) * regular_factor(how.element),
                                              (vecf)split_odd(first, second) * regular_factor(how.element)};
    }
}

/* Up to FP8_BLOCK rows and FP8_BOTH_COLUMNS columns; the next part is `ahead` bytes further. */
static inline void fp8row_both_part(struct encode_how how, const struct quant_region *part,
                                    const float *row_apply, const struct fp8row_columns *down, int64_t ahead,
                                    struct fp8_buffer *buffer) {
    const struct quant_copy *rowwise = part->rowwise;
    const int64_t columns = part->c_end - part->c;
    const bool streams = codes_stream(rowwise);
    for (int64_t i = 0; i < part->row_end - part->row; ++i) {
        const char *const from = operand_at(&rowwise->operand, part->row + i, part->c, how.dtype);
        uint8_t *const to = rowwise->data + (part->row + i) * rowwise->data_row_step + part->c;
        uint8_t *const beside = buffer->codes + i * FP8_PITCH;
        if (columns == FP8_BOTH_COLUMNS) {
            float along[FP8_BOTH_BLOCKS];
            for (int b = 0; b < FP8_BOTH_BLOCKS; ++b) {
                along[b] = row_apply[i] * regular_factor(how.element);
            }
            fp8_both_row_of(how, from, from + ahead, along, down->regular, streams, to, beside);
        } else {
            encode_regular_run(how, from, columns, row_apply[i], 0, false, to);
            fp8_column_row_of(how, from, columns, down->apply, true, NULL, beside);
        }
    }
    fp8_transpose_all(buffer->codes, FP8_PITCH, true, part->columnwise, part->row, part->row_end - part->row,
                      part->c, columns);
}

/* Rows [row, row_end) of x; in reverse order, because the last ones may still be in a cache from the first pass. */
static inline void fp8row_both_region(struct encode_how how, const struct opaq_spec *spec,
                                      const struct quant_region *region, struct fp8_buffer *buffer) {
    const int64_t panels = ceil_div(region->row_end - region->row, FP8_BLOCK);
    const int64_t row_step = region->rowwise->operand.row_step;
    for (int64_t panel = panels - 1; panel >= 0; --panel) {
        float row_apply[FP8_BLOCK];
        struct quant_region part = *region;
        part.row = region->row + panel * FP8_BLOCK;
        part.row_end = min_int64(part.row + FP8_BLOCK, region->row_end);
        fp8row_settle(how, spec, (float *)region->rowwise->scale + part.row, part.row_end - part.row,
                      row_apply);
        for (part.c = region->c; part.c < region->c_end; part.c = part.c_end) {
            struct fp8row_columns down;
            part.c_end = min_int64(part.c + FP8_BOTH_COLUMNS, region->c_end);
            fp8row_columns_at(how, spec, (const float *)region->columnwise->scale + part.c, part.c_end - part.c,
                              &down);
            const int64_t before = panel > 0 ? region->c - part.c - FP8_BLOCK * row_step : 0;
            const int64_t next = part.c_end < region->c_end ? FP8_BOTH_COLUMNS : before;
            fp8row_both_part(how, &part, row_apply, &down, next * element_bytes(how.dtype), buffer);
        }
    }
}

VEC_OUTLINE void fp8row_quantize_both(const struct quant_job *job, struct quant_region region) {
    struct fp8_buffer buffer;
    fp8row_both_region(fp8row_how(job), &job->spec, &region, &buffer);
    finish_streams();
}

#endif
