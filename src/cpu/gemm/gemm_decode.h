/* cpu/gemm/gemm_decode.h: operands to float32. Depends on product.h. */
#ifndef OPAQ_CPU_GEMM_GEMM_DECODE_H
#define OPAQ_CPU_GEMM_GEMM_DECODE_H

#include "backend/product.h"
#include "cpu/quant/quant_table.h"
#include "definition/operand_ref.h"

/* How far the contraction runs: the operands' columns, or, where a Hadamard transform is left in place, up to the end
 * of its last group, whose codes beyond the columns count. */
int64_t gemm_depth(const struct gemm_job *job);

/* An operand and its decoding tables. Points into itself: do not move. */
struct gemm_decoder {
    const struct gemm_operand *operand;
    const struct opaq_spec *spec;           /* what is decoded; NULL: plain */
    const struct quant_copy *copy;          /* the same */
    float left_out;                         /* a factor of all values that decoding omits; else 1 */
    bool is_bf16;                           /* decoded values are exact in bf16 */
    struct bare_copy bare;                  /* the operand without its factor */
    float value[256][2];                    /* of a code without its scale; of two codes if they are packed */
    float factor[256];                      /* of a scale byte */
    const struct decode_row_kernel *kernel; /* used instead of the tables, if its run is not NULL */
    bool has_factors;                       /* scales are bytes with the same meaning in all rows */
};

/* This and what follows run in the library's floating-point environment (base/fp_environment.h). */
void gemm_decoder_make(const struct gemm_operand *operand, struct gemm_decoder *decoder);

/* A decoder of a copy without the factor common to all its elements, where there is one (fp8; nvfp4 without
 * rowscaled): codes times their block scales are exact in bf16. Factors that are too large, too small or not
 * finite are kept. */
void gemm_decoder_make_bare(const struct gemm_operand *operand, struct gemm_decoder *decoder);

/* At most this many rows are decoded at once. */
enum { GEMM_DECODE_ROWS = 32 };

/* `rows` rows from `row` on, of each columns [k, k + n), zeros beyond the operand's end; rows of GEMM_BLOCK floats in
 * `to`. k is a multiple of GEMM_BLOCK and n at most that. */
void gemm_decode(const struct gemm_decoder *decoder, int64_t row, int rows, int64_t k, int n, float *to);

/* Rows of the operand that are decoded at once where it is read across the copy's rows. */
enum { GEMM_ACROSS = 128 };

/* Decodes across rows: for each k in [k, k + n), passes the elements of rows [row, row + GEMM_ACROSS) of the
 * operand, zeros beyond the last one, to `take`, with k's position in the block; they stay valid until the end
 * of the next call. An odd n is followed by a step of zeros. row is a multiple of GEMM_ACROSS. */
void gemm_decode_across(const struct gemm_decoder *decoder, int64_t row, int64_t k, int n,
                        void (*take)(void *argument, int place, const float *values), void *argument);

#endif
