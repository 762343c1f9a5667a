/* cpu/quant/simd/quantize_mx_vec.h: mxfp8 and mxfp4 in vectors. Depends on quantize_mx_both_vec.h. Specification:
 * docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_MX_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_MX_VEC_H

#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/simd/specialize_vec.h"

/* for quantize_blocks_vec.h */
enum { BLOCK = 32, BLOCKS_ARE_NVFP4 = false };
#define FOR_BLOCK_ELEMENT FOR_ELEMENT

#include "cpu/quant/simd/quantize_mx_both_vec.h"
#include "cpu/quant/simd/region_vec.h"

/* Rows [row, row_end) and columns [c, c_end) of x, for the requested copies; row is a multiple of MX_BLOCK. */
static inline void quantize_mx_how(struct encode_how how, const struct quant_job *job,
                                   struct quant_region region, struct random_bytes *random) {
    const struct opaq_spec *const spec = &job->spec;
    const struct quant_copy *rowwise = region.rowwise;
    const struct quant_copy *columnwise = region.columnwise;
    const bool is_both = rowwise != NULL && columnwise != NULL;
    const bool is_stochastic = (spec->options & OPAQ_STOCHASTIC) != 0;
    const bool in_one_pass = is_both && !how.not_te && rowwise->block_rows == 1 && !is_stochastic;
    const int64_t width = in_one_pass                           ? BOTH_COLUMNS
                          : columnwise != NULL && is_stochastic ? RANDOM_DOWN
                          : columnwise != NULL                  ? MX_WIDTH
                                                                : max_int64(region.c_end - region.c, 1);
    struct block_kind kind = {how, spec, 0, rowwise != NULL && codes_stream(rowwise), NULL};
    const struct random_source along =
        rowwise == NULL ? (struct random_source){.row_blocks = 0} : random_source(job, rowwise);
    kind.random = is_stochastic ? &along : NULL;
    if (columnwise != NULL) {
        random_bytes_begin(random, job, columnwise, true);
    }
    kind.ahead = rowwise == NULL ? 0 : ahead_bytes(rowwise, is_both ? 2 : 1);
    const int64_t row_step = rowwise != NULL ? rowwise->operand.row_step : columnwise->operand.column_step;
    const bool streams = columnwise != NULL && codes_stream(columnwise);
    for (int64_t row = region.row; row < region.row_end; row += MX_BLOCK) {
        const int64_t row_end = min_int64(row + MX_BLOCK, region.row_end);
        for (int64_t c = region.c; c < region.c_end; c += width) {
            const int64_t c_end = min_int64(c + width, region.c_end);
            const int64_t next = c_end < region.c_end ? width : MX_BLOCK * row_step + region.c - c;
            if (in_one_pass && row_end - row == MX_BLOCK && c_end - c == BOTH_COLUMNS) {
                struct block_kind part = kind;
                part.ahead = next * element_bytes(how.dtype);
                part.streams = kind.streams && streams;
                if (mx_both_part(&part, rowwise, columnwise, row, c)) {
                    continue;
                }
            }
            const int64_t block_rows = rowwise == NULL ? row_end - row : rowwise->block_rows;
            for (int64_t r = row; rowwise != NULL && r < row_end; r += block_rows) {
                quantize_block_rows(&kind, rowwise, r, (int)min_int64(block_rows, row_end - r), c, c_end,
                                    (struct block_globals){0.0f, 0.0f});
            }
            if (columnwise != NULL) {
                mx_column_part((struct mx_columns){how, columnwise->block_rows > 1, spec, random}, columnwise,
                               row, c, c_end - c, next, streams);
            }
        }
    }
}

VEC_OUTLINE void mx_quantize_region(const struct quant_job *job, struct quant_region region) {
    struct random_bytes random;
    const enum opaq_rule rule = (enum opaq_rule)job->spec.rule;
    const struct encode_how how = {.dtype = job->copy[0].operand.dtype,
                                   .element = (enum opaq_element)job->spec.element,
                                   .not_te = rule != OPAQ_RULE_TE,
                                   .drops_zero_sign = rule == OPAQ_RULE_COMPRESSED_TENSORS,
                                   .halves_down = rule == OPAQ_RULE_MODELOPT};
    quantize_mx_how(how, job, region, &random);
    finish_streams();
}

static inline bool mx_is_along_columns(const struct quant_copy *copy) {
    return copy->operand.row_step == 1 && copy->data_row_step == 1;
}

/* Whether the vector kernel supports it and is not slower: ModelOpt's scales need a logarithm for each lane, and a
 * narrow tensor has too few blocks to fill the lanes. */
static inline bool mx_is_covered(const struct opaq_spec *spec, const struct quant_copy *copy) {
    enum { MODELOPT_COLUMNS = 128 };
    const bool is_wide = spec->rule != OPAQ_RULE_MODELOPT || spec->element != OPAQ_E2M1 ||
                         copy->operand.columns >= MODELOPT_COLUMNS;
    return (is_along_rows(copy) || mx_is_along_columns(copy)) && is_wide;
}

void VEC_NAME(quantize_mx)(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                           int64_t r_end) {
    if (mx_is_covered(&job->spec, copy)) {
        mx_quantize_region(job, region_of_copy(copy, is_along_rows(copy), r, r_end));
    } else {
        quantize_mx_ref(job, copy, r, r_end);
    }
}

bool VEC_NAME(covers_both_mx)(const struct quant_job *job) {
    return is_along_rows(&job->copy[0]) && mx_is_along_columns(&job->copy[1]) &&
           mx_is_covered(&job->spec, &job->copy[0]) && mx_is_covered(&job->spec, &job->copy[1]);
}

void VEC_NAME(quantize_both_mx)(const struct quant_job *job, int64_t r, int64_t r_end) {
    mx_quantize_region(job, region_of_both(job, r, r_end));
}

#endif
