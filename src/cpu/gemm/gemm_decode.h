/* cpu/gemm/gemm_decode.h: operands to float32. Depends on product.h. */
#ifndef OPAQ_CPU_GEMM_GEMM_DECODE_H
#define OPAQ_CPU_GEMM_GEMM_DECODE_H

#include "backend/product.h"
#include "cpu/quant/quant_table.h"

/* How far the contraction runs: the operands' columns, or, where a Hadamard transform is left in place, up to the end
 * of its last group, whose codes beyond the columns count. */
int64_t gemm_depth(const struct gemm_job *job);

/* An operand and what its bytes are worth. */
struct gemm_decoder {
    const struct gemm_operand *operand;
    float value[256][2];                    /* of a code before it is scaled; of two codes if they are packed */
    float factor[256];                      /* of a scale byte */
    const struct decode_row_kernel *kernel; /* what is used instead of these, if its run is not NULL */
    bool has_factors;                       /* scales are bytes that mean the same in all rows */
};

/* This and gemm_decode run in the library's floating-point environment (base/fp_environment.h). */
void gemm_decoder_make(const struct gemm_operand *operand, struct gemm_decoder *decoder);

/* At most this many rows are decoded at once. */
enum { GEMM_DECODE_ROWS = 32 };

/* `rows` rows from `row` on, of each columns [k, k + n), zeros beyond the operand's end; rows of GEMM_BLOCK floats in
 * `to`. k is a multiple of GEMM_BLOCK and n at most that. */
void gemm_decode(const struct gemm_decoder *decoder, int64_t row, int rows, int64_t k, int n, float *to);

#endif
