/* cpu/quant/simd/quantize_fp8_vec.h: fp8, fp8row, fp8blk1 and fp8blk2 in vectors. Depends on
 * encode_run_vec.h, quantize_fp8_both_vec.h and quantize_fp8row_both_vec.h. Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_FP8_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_FP8_VEC_H

#include "base/checked.h"
#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/simd/encode_run_vec.h"
#include "cpu/quant/simd/quantize_fp8_both_vec.h"
#include "cpu/quant/simd/quantize_fp8row_both_vec.h"
#include "cpu/quant/simd/region_vec.h"
#include "cpu/quant/simd/scales_vec.h"
#include "cpu/quant/simd/specialize_vec.h"

/* Adjacent blocks that are processed together: their scales are computed in one vector. Square ones are read twice,
 * and must stay in the cache in between. */
VEC_INLINE int64_t fp8_group_columns(int64_t block_rows) { return (block_rows == 1 ? FLOATS : 4) * FP8_BLOCK; }

/* ---- one for each row ---- */

static inline void fp8_scaled_rows(struct encode_how how, const struct quant_job *job,
                                   const struct quant_copy *copy, int64_t r, int64_t r_end,
                                   struct random_bytes *random) {
    const struct quant_matrix *m = &copy->operand;
    const int64_t next = m->row_step * element_bytes(how.dtype); /* the next row is prefetched */
    const bool streams = lines_stream(copy);
    for (int64_t row = r; row < r_end; ++row) {
        const char *const x = operand_at(m, row, 0, how.dtype);
        uint8_t *const data = copy->data + row * copy->data_row_step;
        const float all = float_from_bits(amax_of_run(x, m->columns, how.dtype, false));
        const bool passes_over = !how.not_te && float_is_nan(all);
        const float amax = passes_over ? float_from_bits(amax_of_run(x, m->columns, how.dtype, true)) : all;
        const struct fp8_scale scale = fp8_scale_from_amax(&job->spec, amax, FLT_MAX);
        ((float *)copy->scale)[row * copy->scale_layout.row_step] = scale.stored;
        if (!how.not_te && random->is_used) {
            encode_randomly(how, random, row, 0, x, m->columns, scale.apply, 0, data);
        } else if (is_regular_amax(how, all, scale.apply)) {
            encode_regular_run(how, x, m->columns, scale.apply, next, streams, data);
        } else if (how.not_te && how.dtype == OPAQ_BF16) {
            encode_bf16_row_not_te(&how, x, m->columns, scale.apply, next, data);
        } else {
            encode_any_run(how, x, m->columns, scale.apply, NULL, 0, data);
        }
    }
}

/* ---- one for each block of 1x128 or 128x128 ---- */

/* Blocks next to each other, `columns` elements wide. */
struct fp8_group {
    const char *x;
    int64_t row_bytes;
    int64_t rows;
    int64_t columns;
    int64_t ahead; /* prefetch distance, in bytes */
};

/* The key of a whole block of one row. Prefetches `ahead` bytes further, unless that is 0. */
VEC_INLINE vec32 fp8_block_key(const char *x, int64_t ahead, enum opaq_element dtype) {
    const int parts = FP8_BLOCK * element_bytes(dtype) / VEC_BYTES;
    vec32 key = vec32_set(0);
    for (int i = 0; i < parts; ++i) {
        if (ahead != 0) {
            __builtin_prefetch(x + ahead + i * VEC_BYTES);
        }
        key = key_max(key, key_of(vec_load(x + i * VEC_BYTES), dtype, false), dtype);
    }
    return key;
}

/* The amax of each block, including NaNs. */
VEC_INLINE vecf fp8_group_amax(const struct fp8_group *group, enum opaq_element dtype) {
    const int64_t block_bytes = FP8_BLOCK * element_bytes(dtype);
    vec32 key[FLOATS];
    if (group->rows == 1 && group->columns == FLOATS * FP8_BLOCK) {
        for (int b = 0; b < FLOATS; ++b) {
            key[b] = fp8_block_key(group->x + b * block_bytes, 0, dtype);
        }
    } else {
        for (int b = 0; b < FLOATS; ++b) {
            key[b] = vec32_set(0);
        }
        for (int64_t row = 0; row < group->rows; ++row) {
            for (int b = 0; b * FP8_BLOCK < group->columns; ++b) {
                char staged[FP8_BLOCK * 4];
                const char *from = group->x + row * group->row_bytes + b * block_bytes;
                const int64_t inside = group->columns - b * FP8_BLOCK;
                if (inside < FP8_BLOCK) {
                    memset(staged, 0, sizeof staged);
                    memcpy(staged, from, (size_t)(inside * element_bytes(dtype)));
                    from = staged;
                }
                /* one row is prefetched while codes are made */
                const vec32 each = fp8_block_key(from, group->rows > 1 ? group->ahead : 0, dtype);
                key[b] = key_max(key[b], each, dtype);
            }
        }
    }
    return magnitudes_to_floats(key_magnitude(fold_keys(key, FLOATS, dtype), dtype, false), dtype);
}

/* The same, skipping NaNs. They are rare, so this is short rather than fast. */
VEC_OUTLINE vecf fp8_group_amax_without_nans(const struct fp8_group *group, enum opaq_element dtype) {
    uint32_t amax[FLOATS] = {0};
    for (int64_t i = 0; i < group->rows; ++i) {
        for (int b = 0; b * FP8_BLOCK < group->columns; ++b) {
            const char *const x = group->x + i * group->row_bytes + b * FP8_BLOCK * element_bytes(dtype);
            const int64_t n = min_int64(FP8_BLOCK, group->columns - b * FP8_BLOCK);
            const uint32_t bits = amax_of_run(x, n, dtype, true);
            amax[b] = bits > amax[b] ? bits : amax[b];
        }
    }
    return (vecf)vec_load(amax);
}

/* The destinations of the codes of blocks and of their scales: those of one row of blocks, by steps, in up to two
 * places. */
struct fp8_target {
    uint8_t *data;
    int64_t data_step;
    float *scale[2];
    int64_t scale_step[2];
    int64_t ahead; /* prefetch distance, in bytes */
    struct random_bytes *random;
    bool streams; /* one scale for the tensor: codes are written past the caches */
};

/* Encodes blocks, given the amax of each, including NaNs, and their factors. */
VEC_OUTLINE void fp8_group_codes(struct encode_how how, const struct fp8_group *group, int64_t r, int64_t c,
                                 const float *amax, const float *apply, const struct fp8_target *target) {
    for (int b = 0; how.not_te && b * FP8_BLOCK < group->columns; ++b) {
        const int64_t place = (int64_t)b * FP8_BLOCK;
        const struct encode_rows block = {
            group->x + place * element_bytes(how.dtype),  group->row_bytes,     group->rows,
            min_int64(FP8_BLOCK, group->columns - place), target->data + place, target->data_step,
            group->rows == 1 ? target->ahead : 0};
        encode_rows_not_te(&how, &block, apply[b]);
    }
    for (int64_t i = 0; !how.not_te && i < group->rows; ++i) {
        const uint8_t *const random =
            target->random->is_used ? random_bytes(target->random, r + i, c, group->columns) : NULL;
        for (int b = 0; b * FP8_BLOCK < group->columns; ++b) {
            const int64_t place = (int64_t)b * FP8_BLOCK;
            const char *const x = group->x + i * group->row_bytes + place * element_bytes(how.dtype);
            uint8_t *const data = target->data + i * target->data_step + place;
            const int64_t n = min_int64(FP8_BLOCK, group->columns - place);
            if (group->rows == 1) {
                prefetch_run(x + target->ahead, FP8_BLOCK * element_bytes(how.dtype));
            }
            if (random == NULL && is_regular_amax(how, amax[b], apply[b])) {
                encode_regular_run(how, x, n, apply[b], 0, false, data);
            } else {
                encode_any_run(how, x, n, apply[b], random == NULL ? NULL : random + place, 0, data);
            }
        }
    }
}

/* Rows [r, r + rows) and columns [c, c_end) of x, at most as many as are processed together. */
VEC_INLINE void fp8_group(struct encode_how how, const struct quant_job *job, const struct quant_matrix *m,
                          int64_t r, int64_t rows, int64_t c, int64_t c_end, const struct fp8_target *target) {
    const struct fp8_group group = {operand_at(m, r, c, how.dtype), m->row_step * element_bytes(how.dtype),
                                    rows, c_end - c, target->ahead};
    const vecf all = fp8_group_amax(&group, how.dtype);
    vecf amax = all;
    if (!how.not_te && any32(above32((vec32)all, 0x7F800000u))) {
        amax = fp8_group_amax_without_nans(&group, how.dtype);
    }
    const struct fp8_scales scales =
        fp8_scales_from_amax(amax, &job->spec, how, fp8_scale_limit(&job->spec, m->dtype));
    float apply[FLOATS];
    float stored[FLOATS];
    vec_store(apply, (vec32)scales.apply);
    vec_store(stored, (vec32)scales.stored);
    for (int b = 0; b * FP8_BLOCK < group.columns; ++b) {
        for (int i = 0; i < 2; ++i) {
            if (target->scale[i] != NULL) {
                target->scale[i][b * target->scale_step[i]] = stored[b];
            }
        }
    }
    const bool is_random = !how.not_te && target->random->is_used;
    if (how.not_te || is_random || group.columns % FP8_BLOCK != 0 ||
        !are_regular_amaxes(how.element, all, scales.apply)) {
        float each[FLOATS];
        vec_store(each, (vec32)all);
        fp8_group_codes(how, &group, r, c, each, apply, target);
        return;
    }
    for (int64_t i = 0; i < rows; ++i) {
        for (int b = 0; b * FP8_BLOCK < group.columns; ++b) {
            const int64_t place = (int64_t)b * FP8_BLOCK;
            const char *const x = group.x + i * group.row_bytes + place * element_bytes(how.dtype);
            if (rows == 1) {
                prefetch_run(x + target->ahead, FP8_BLOCK * element_bytes(how.dtype));
            }
            encode_run(how, x, FP8_BLOCK, apply[b], true, NULL, 0,
                       target->data + i * target->data_step + place);
        }
    }
}

/* fp8_group(), out of line. */
VEC_OUTLINE void fp8_group_of(struct encode_how how, const struct quant_job *job, const struct quant_matrix *m,
                              int64_t r, int64_t rows, int64_t c, int64_t c_end,
                              const struct fp8_target *target) {
    if (how.not_te) {
        FOR_DTYPE(how.dtype,
                  fp8_group(encode_not_te(how, DTYPE, OPAQ_E4M3, true), job, m, r, rows, c, c_end, target));
    } else {
        FOR_FP8_TE(how, fp8_group(HOW, job, m, r, rows, c, c_end, target));
    }
}

/* Blocks of 1x128 along rows [r, r_end), columns [c, c_end). */
static inline void fp8_block_rows(struct encode_how how, const struct quant_job *job,
                                  const struct quant_copy *copy, int64_t r, int64_t r_end, int64_t c,
                                  int64_t c_end, int64_t ahead, struct random_bytes *random) {
    const struct scale_layout *layout = &copy->scale_layout;
    for (int64_t row = r; row < r_end; ++row) {
        for (int64_t i = c; i < c_end; i += fp8_group_columns(1)) {
            const struct fp8_target target = {
                copy->data + row * copy->data_row_step + i,
                copy->data_row_step,
                {(float *)copy->scale + row * layout->row_step + i / FP8_BLOCK * layout->column_step, NULL},
                {layout->column_step, 0},
                ahead,
                random,
                false};
            fp8_group_of(how, job, &copy->operand, row, 1, i, min_int64(i + fp8_group_columns(1), c_end),
                         &target);
        }
    }
}

/* ---- one code for both copies: a scale for the tensor, or for squares of 128x128 ---- */

/* x in its own order, not transposed. */
VEC_INLINE struct quant_matrix region_matrix(const struct quant_region *region) {
    return region->rowwise != NULL ? region->rowwise->operand
                                   : quant_matrix_transposed(region->columnwise->operand);
}

/* Codes of n elements under the tensor's factor, from (row, c) of x on. */
static inline void fp8_tensor_codes(struct encode_how how, const struct quant_job *job,
                                    struct random_bytes *random, int64_t row, int64_t c, const char *x,
                                    int64_t n, int64_t ahead, bool streams, uint8_t *data) {
    if (!how.not_te && random->is_used) {
        encode_randomly(how, random, row, c, x, n, job->tensor_scale, ahead, data);
    } else {
        encode_unseen(how, x, n, job->tensor_scale, ahead, streams, data);
    }
}

/* Codes and scales of up to FP8_BLOCK rows and fp8_group_columns() columns to target->data. */
static inline void fp8_shared_codes(struct encode_how how, const struct quant_job *job,
                                    const struct quant_region *part, struct fp8_target target) {
    const struct quant_matrix m = region_matrix(part);
    if (job->spec.format == OPAQ_FP8) {
        for (int64_t row = part->row; row < part->row_end; ++row) {
            const char *const x = operand_at(&m, row, part->c, how.dtype);
            if (part->columnwise != NULL) {
                prefetch_run(x + target.ahead, (part->c_end - part->c) * element_bytes(how.dtype));
            }
            fp8_tensor_codes(how, job, target.random, row, part->c, x, part->c_end - part->c, 0, target.streams,
                             target.data + (row - part->row) * target.data_step);
        }
        return;
    }
    if (part->rowwise != NULL) {
        const struct scale_layout *layout = &part->rowwise->scale_layout;
        target.scale[0] = (float *)part->rowwise->scale + part->row / FP8_BLOCK * layout->row_step +
                          part->c / FP8_BLOCK * layout->column_step;
        target.scale_step[0] = layout->column_step;
    }
    if (part->columnwise != NULL) {
        const struct scale_layout *layout = &part->columnwise->scale_layout;
        target.scale[1] = (float *)part->columnwise->scale + part->row / FP8_BLOCK * layout->column_step +
                          part->c / FP8_BLOCK * layout->row_step;
        target.scale_step[1] = layout->row_step;
    }
    fp8_group_of(how, job, &m, part->row, part->row_end - part->row, part->c, part->c_end, &target);
}

static inline void put_row(const uint8_t *codes, int64_t columns, bool streams, uint8_t *to) {
    const int64_t whole = columns / VEC_BYTES * VEC_BYTES;
    for (int64_t i = 0; i < whole; i += VEC_BYTES) {
        vec_put(to + i, vec_load(codes + i), streams);
    }
    memcpy(to + whole, codes + whole, (size_t)(columns - whole));
}

/* One scale for the tensor: codes are written to a buffer, copied to the rowwise copy, and transposed while the
 * next rows are encoded, so that memory reads and writes overlap. */
static inline void fp8_tensor_region(struct encode_how how, const struct quant_job *job,
                                     struct quant_region region, struct fp8_buffer *buffer) {
    int used = 0;
    struct fp8_transpose transpose = {.tiles = 0};
    const struct quant_copy *rowwise = region.rowwise;
    const struct quant_matrix m = region_matrix(&region);
    const bool streams = rowwise != NULL && codes_stream(rowwise);
    const int64_t ahead = 2 * m.row_step * element_bytes(how.dtype);
    for (int64_t row = region.row; row < region.row_end; row += FP8_BUFFER_ROWS) {
        const int64_t rows = min_int64(FP8_BUFFER_ROWS, region.row_end - row);
        for (int64_t c = region.c; c < region.c_end; c += FP8_WIDTH) {
            const int64_t columns = min_int64(FP8_WIDTH, region.c_end - c);
            for (int64_t r = 0; r < rows; ++r) {
                uint8_t *const codes = buffer[used].codes + r * FP8_PITCH;
                fp8_tensor_codes(how, job, &buffer->random, row + r, c, operand_at(&m, row + r, c, how.dtype),
                                 columns, ahead, false, codes);
                if (rowwise != NULL) {
                    put_row(codes, columns, streams, rowwise->data + (row + r) * rowwise->data_row_step + c);
                }
                fp8_transpose_until(&transpose, transpose.tiles * (r + 1) / rows);
            }
            transpose = fp8_transpose_begin(buffer[used].codes, FP8_PITCH, true, region.columnwise, row, rows,
                                            c, columns);
            used = 1 - used;
        }
    }
    fp8_transpose_until(&transpose, transpose.tiles);
}

/* Codes are written to the rowwise copy, or to a buffer if there is none, and transposed from there. */
static inline void fp8_shared_region(struct encode_how how, const struct quant_job *job,
                                     struct quant_region region, struct fp8_buffer *buffer) {
    const struct quant_copy *rowwise = region.rowwise;
    const struct quant_matrix m = region_matrix(&region);
    const bool is_alone = region.columnwise == NULL && job->spec.format == OPAQ_FP8;
    const int64_t width = is_alone                       ? max_int64(region.c_end - region.c, 1)
                          : job->spec.format == OPAQ_FP8 ? FP8_WIDTH
                                                         : fp8_group_columns(FP8_BLOCK);
    for (int64_t row = region.row; row < region.row_end; row += FP8_BUFFER_ROWS) {
        const int64_t row_end = min_int64(row + FP8_BUFFER_ROWS, region.row_end);
        for (int64_t c = region.c; c < region.c_end; c += width) {
            const int64_t c_end = min_int64(c + width, region.c_end);
            struct fp8_target target = {.data = buffer->codes,
                                        .data_step = FP8_PITCH,
                                        .ahead = 2 * m.row_step * element_bytes(how.dtype),
                                        .random = &buffer->random,
                                        .streams = is_alone && lines_stream(rowwise)};
            if (rowwise != NULL) {
                target.data = rowwise->data + row * rowwise->data_row_step + c;
                target.data_step = rowwise->data_row_step;
            }
            uint8_t *const codes = target.data;
            for (int64_t r = row; r < row_end; r += FP8_BLOCK) {
                const struct quant_region part = {
                    rowwise, region.columnwise, r, min_int64(r + FP8_BLOCK, row_end), c, c_end};
                target.data = codes + (r - row) * target.data_step;
                fp8_shared_codes(how, job, &part, target);
            }
            if (region.columnwise != NULL) {
                fp8_transpose_all(codes, target.data_step, rowwise == NULL, region.columnwise, row,
                                  row_end - row, c, c_end - c);
            }
        }
    }
}

/* ---- the others ---- */

/* Blocks of 128 along rows, or down columns. If there are both, the columns are processed in parts. */
static inline void fp8_block_region(struct encode_how how, const struct quant_job *job,
                                    struct quant_region region, struct fp8_buffer *buffer) {
    const bool in_one_pass = region.rowwise != NULL && region.columnwise != NULL && !how.not_te;
    const int64_t width = region.columnwise != NULL ? AMAX_COLUMNS : max_int64(region.c_end - region.c, 1);
    for (int64_t row = region.row; row < region.row_end; row += FP8_BUFFER_ROWS) {
        const int64_t row_end = min_int64(row + FP8_BUFFER_ROWS, region.row_end);
        for (int64_t c = region.c; c < region.c_end; c += width) {
            const int64_t c_end = min_int64(c + width, region.c_end);
            if (in_one_pass && row_end - row == FP8_BLOCK && c_end - c == FP8_BOTH_COLUMNS) {
                const int64_t next = c_end < region.c_end
                                         ? FP8_BOTH_COLUMNS
                                         : FP8_BLOCK * region.rowwise->operand.row_step + region.c - c;
                if (fp8_both_part(how, &job->spec, region.rowwise, region.columnwise, row, c,
                                  next * element_bytes(how.dtype), buffer)) {
                    continue;
                }
            }
            if (region.rowwise != NULL) {
                fp8_block_rows(how, job, region.rowwise, row, row_end, c, c_end,
                               region.columnwise == NULL ? AHEAD_BYTES : ahead_bytes(region.rowwise, 2),
                               &buffer->random);
            }
            if (region.columnwise != NULL) {
                fp8_scaled_columns(how, job, region.columnwise, row, row_end, FP8_BLOCK, c, c_end, buffer);
            }
        }
    }
}

/* Whole rows, or whole columns. */
static inline void fp8_row_region(struct encode_how how, const struct quant_job *job,
                                  struct quant_region region, struct fp8_buffer *buffer) {
    if (region.rowwise != NULL) {
        fp8_scaled_rows(how, job, region.rowwise, region.row, region.row_end, &buffer->random);
    }
    for (int64_t c = region.c; region.columnwise != NULL && c < region.c_end; c += AMAX_COLUMNS) {
        fp8_scaled_columns(how, job, region.columnwise, region.row, region.row_end,
                           max_int64(region.row_end - region.row, 1), c, region.c_end, buffer);
    }
}

/* ---- choosing among the functions above ---- */

VEC_INLINE struct encode_how fp8_how(const struct quant_job *job) {
    const bool is_te = job->spec.rule == OPAQ_RULE_TE;
    return (struct encode_how){.dtype = job->copy[0].operand.dtype,
                               .element = job->spec.element == OPAQ_E5M2 ? OPAQ_E5M2 : OPAQ_E4M3,
                               .not_te = !is_te,
                               .divides = !is_te,
                               .drops_zero_sign = job->spec.rule == OPAQ_RULE_COMPRESSED_TENSORS};
}

/* Whether the vector code supports the tensor's factor, which a caller may have supplied: positive and finite
 * under rule te, else not negative. */
static inline bool fp8_factor_in_range(const struct quant_job *job) {
    const float factor = job->tensor_scale;
    return job->spec.format != OPAQ_FP8 ||
           (job->spec.rule == OPAQ_RULE_TE ? factor > 0.0f && float_is_finite(factor)
                                           : float_to_bits(factor) >> 31 == 0);
}

VEC_OUTLINE void fp8_quantize_region(const struct quant_job *job, struct quant_region region) {
    struct fp8_buffer buffer[2];
    const struct encode_how how = fp8_how(job);
    const bool is_across = region.rowwise == NULL;
    random_bytes_begin(&buffer->random, job, is_across ? region.columnwise : region.rowwise, is_across);
    if (job->spec.format == OPAQ_FP8ROW) {
        fp8_row_region(how, job, region, buffer);
    } else if (job->spec.format == OPAQ_FP8BLK1) {
        fp8_block_region(how, job, region, buffer);
    } else if (job->spec.format == OPAQ_FP8 && region.columnwise != NULL) {
        fp8_tensor_region(how, job, region, buffer);
    } else {
        fp8_shared_region(how, job, region, buffer);
    }
    finish_streams();
}

/* Whether the vector code supports the copy. */
static inline bool fp8_is_covered(const struct quant_job *job, const struct quant_copy *copy) {
    const bool is_along = (copy->operand.column_step == 1 || copy->operand.row_step == 1) &&
                          copy->data_column_step == 1 && copy->operand.columns > 0;
    return is_along && fp8_factor_in_range(job);
}

void VEC_NAME(quantize_fp8)(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                            int64_t r_end) {
    if (fp8_is_covered(job, copy)) {
        fp8_quantize_region(job, region_of_copy(copy, copy->operand.column_step == 1, r, r_end));
    } else {
        (job->spec.format == OPAQ_FP8 ? quantize_fp8_tensor_ref : quantize_fp8_blocks_ref)(job, copy, r, r_end);
    }
}

/* Under rules other than te, fp8row and fp8blk1 are faster one copy after the other. So are random bits, except those
 * of fp8, whose copies share them. */
bool VEC_NAME(covers_both_fp8)(const struct quant_job *job) {
    const struct quant_copy *copy = job->copy;
    const bool is_row = job->spec.format == OPAQ_FP8ROW;
    const bool is_stochastic = (job->spec.options & OPAQ_STOCHASTIC) != 0;
    const bool is_apart = ((is_row || job->spec.format == OPAQ_FP8BLK1) && job->spec.rule != OPAQ_RULE_TE) ||
                          (is_stochastic && job->spec.format != OPAQ_FP8);
    const bool has_places = copy[0].scale_layout.row_step == 1 && copy[1].scale_layout.row_step == 1;
    return !is_apart && (has_places || !is_row) && fp8_is_covered(job, &copy[0]) &&
           fp8_is_covered(job, &copy[1]) && copy[0].operand.column_step == 1 && copy[1].operand.row_step == 1;
}

void VEC_NAME(quantize_both_fp8)(const struct quant_job *job, int64_t r, int64_t r_end) {
    if (job->spec.format == OPAQ_FP8ROW) {
        fp8row_quantize_both(job, region_of_both(job, r, r_end));
    } else {
        fp8_quantize_region(job, region_of_both(job, r, r_end));
    }
}

const struct both_amaxes VEC_NAME(amaxes_fp8row) = {fp8row_find_amaxes, fp8row_amaxes_in_range, fp8row_finish};

#endif
