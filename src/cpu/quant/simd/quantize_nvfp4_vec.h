/* cpu/quant/simd/quantize_nvfp4_vec.h: nvfp4 in vectors. Depends on quantize_nvfp4_both_vec.h. Specification:
 * docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_NVFP4_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_NVFP4_VEC_H

#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/simd/specialize_vec.h"

/* for quantize_blocks_vec.h */
enum { BLOCK = 16, BLOCKS_ARE_NVFP4 = true };
#define FOR_BLOCK_ELEMENT(element, statement)        \
    do {                                             \
        const enum opaq_element ELEMENT = OPAQ_E2M1; \
        (void)(element);                             \
        statement;                                   \
    } while (0)

#include "cpu/quant/simd/quantize_nvfp4_both_vec.h"
#include "cpu/quant/simd/region_vec.h"

VEC_INLINE struct encode_how nvfp4_how(enum opaq_element dtype, bool is_te) {
    return is_te ? encode_te(dtype, OPAQ_E2M1) : nvfp4_not_te(dtype);
}

/* Along the rows of x. Prefetches `rows_ahead` rows ahead. */
static inline void quantize_nvfp4_rows(enum opaq_element dtype, bool is_te, const struct quant_job *job,
                                       const struct quant_copy *copy, int64_t r, int64_t r_end, int64_t c,
                                       int64_t c_end, int64_t rows_ahead) {
    const bool is_random = (job->spec.options & OPAQ_STOCHASTIC) != 0;
    struct random_source random;
    if (is_random) {
        random = random_source(job, copy);
    }
    const struct block_kind kind = {nvfp4_how(dtype, is_te), &job->spec, ahead_bytes(copy, rows_ahead),
                                    codes_stream(copy), is_random ? &random : NULL};
    for (int64_t row = r; row < r_end; row += copy->block_rows) {
        const float stored = copy->amax[row * copy->amax_step];
        const struct block_globals globals = {nvfp4_global_of_stored(&job->spec, stored), stored};
        const int64_t rows = min_int64(copy->block_rows, r_end - row);
        quantize_block_rows(&kind, copy, row, (int)rows, c, c_end, globals);
    }
}

/* Down its columns: block `block` of a buffer. */
static inline void quantize_nvfp4_columns(enum opaq_element dtype, bool is_te, const struct quant_job *job,
                                          const struct quant_copy *copy, struct nvfp4_buffer *buffer,
                                          int64_t block, int64_t row, int64_t row_end, int64_t c, int64_t c_end,
                                          bool prefetches) {
    const bool is_random = (job->spec.options & OPAQ_STOCHASTIC) != 0;
    struct random_source random;
    if (is_random) {
        random = random_source(job, copy);
    }
    const struct nvfp4_columns kind = {nvfp4_how(dtype, is_te), copy->is_hadamard, copy->block_rows > 1,
                                       &job->spec, is_random ? &random : NULL};
    nvfp4_column_block(&kind, copy, buffer, block, row, row_end - row, c, c_end - c, prefetches);
}

/* Rows [row, row_end) and columns [c, c_end) of x, for the requested copies. For the columnwise one row is a multiple
 * of NVFP4_BUFFER_ROWS, and row_end too unless it is the last; c is a multiple of TILE. */
static inline void nvfp4_region(enum opaq_element dtype, bool is_te, const struct quant_job *job,
                                struct quant_region region) {
    const struct quant_copy *rowwise = region.rowwise;
    const struct quant_copy *columnwise = region.columnwise;
    const int64_t width = columnwise == NULL ? max_int64(region.c_end - region.c, 1) : NVFP4_BUFFER_COLUMNS;
    const bool in_one_pass = rowwise != NULL && columnwise != NULL && is_te && rowwise->block_rows == 1 &&
                             !columnwise->is_hadamard &&
                             (job->spec.options & (OPAQ_STOCHASTIC | OPAQ_4OVER6)) == 0;
    struct block_kind kind = {nvfp4_how(dtype, true), &job->spec, 0, false, NULL};
    if (in_one_pass) {
        kind.ahead = ahead_bytes(rowwise, HELD_ROWS);
        kind.streams = codes_stream(rowwise);
    }
    struct nvfp4_buffer buffer;
    for (int64_t row = region.row; row < region.row_end; row += NVFP4_BUFFER_ROWS) {
        const int64_t row_end = min_int64(row + NVFP4_BUFFER_ROWS, region.row_end);
        for (int64_t c = region.c; c < region.c_end; c += width) {
            const int64_t c_end = min_int64(c + width, region.c_end);
            if (columnwise != NULL) {
                nvfp4_buffer_begin(&buffer, &job->spec, columnwise, c, c_end - c);
            }
            for (int64_t r = row; r < row_end; r += HELD_ROWS) {
                const int64_t r_end = min_int64(r + HELD_ROWS, row_end);
                if (in_one_pass && r_end - r == HELD_ROWS && c_end - c == BOTH_COLUMNS &&
                    nvfp4_both_part(&kind, rowwise, &buffer, (r - row) / HELD_ROWS, r, c)) {
                    continue;
                }
                if (rowwise != NULL) {
                    quantize_nvfp4_rows(dtype, is_te, job, rowwise, r, r_end, c, c_end,
                                        columnwise == NULL ? 1 : HELD_ROWS);
                }
                if (columnwise != NULL) {
                    quantize_nvfp4_columns(dtype, is_te, job, columnwise, &buffer, (r - row) / HELD_ROWS, r,
                                           r_end, c, c_end, rowwise == NULL);
                }
            }
            if (columnwise != NULL) {
                nvfp4_buffer_end(&buffer, columnwise, row, ceil_div(row_end - row, HELD_ROWS), c, c_end - c);
            }
        }
    }
}

VEC_OUTLINE void nvfp4_quantize_region(const struct quant_job *job, struct quant_region region) {
    nvfp4_region(job->copy[0].operand.dtype, job->spec.rule == OPAQ_RULE_TE, job, region);
    finish_streams();
}

/* Whether the vector code supports the copy. */
static inline bool nvfp4_is_covered(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                                    int64_t r_end) {
    const bool is_along = is_along_rows(copy) || (is_along_columns(copy) && copy->data_column_step == 1);
    const bool is_4over6 = (job->spec.options & OPAQ_4OVER6) != 0;
    bool in_range = true;
    for (int64_t row = r; row < (copy->amax_step == 0 ? r + 1 : r_end); ++row) {
        const float stored = copy->amax[row * copy->amax_step];
        const float global = nvfp4_global_of_stored(&job->spec, stored);
        in_range &= nvfp4_global_in_range(global, job->spec.rule == OPAQ_RULE_TE) &&
                    (!is_4over6 || four_over_six_in_range(stored));
    }
    const bool is_nearest = (job->spec.options & OPAQ_STOCHASTIC) == 0 || job->spec.rule == OPAQ_RULE_TE;
    return is_along && in_range && is_nearest;
}

void VEC_NAME(quantize_nvfp4)(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                              int64_t r_end) {
    if (!nvfp4_is_covered(job, copy, r, r_end)) {
        quantize_nvfp4_ref(job, copy, r, r_end);
    } else {
        nvfp4_quantize_region(job, region_of_copy(copy, is_along_rows(copy), r, r_end));
    }
}

bool VEC_NAME(covers_both_nvfp4)(const struct quant_job *job) {
    const struct quant_copy *rowwise = &job->copy[0];
    const struct quant_copy *columnwise = &job->copy[1];
    return is_along_rows(rowwise) && !is_along_rows(columnwise) &&
           nvfp4_is_covered(job, rowwise, 0, rowwise->operand.rows) &&
           nvfp4_is_covered(job, columnwise, 0, columnwise->operand.rows);
}

void VEC_NAME(quantize_both_nvfp4)(const struct quant_job *job, int64_t r, int64_t r_end) {
    nvfp4_quantize_region(job, region_of_both(job, r, r_end));
}

#endif
