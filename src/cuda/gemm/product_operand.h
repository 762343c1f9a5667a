/* cuda/gemm/product_operand.h: what both products' kernels share: operands that a kernel can keep a copy of, and storing a
 * result. Depends on cuda_functions.h, definition. */
#ifndef OPAQ_CUDA_GEMM_PRODUCT_OPERAND_H
#define OPAQ_CUDA_GEMM_PRODUCT_OPERAND_H

#include "cuda/cuda_functions.h"
#include "definition/operand_ref.h"

/* An operand with the structs it points to. */
struct product_operand {
    struct gemm_operand gemm;
    struct bare_copy of; /* its spec and copy */
};

/* Where the results go, and which part of them. */
struct product_target {
    struct quant_matrix c;
    const void *bias;
    enum opaq_element bias_dtype;
    bool accumulate;
    struct group_part group;
    enum product_part part;
};

static inline struct product_operand product_operand_of(const struct gemm_operand *gemm) {
    struct product_operand operand;
    memset(&operand, 0, sizeof operand);
    operand.gemm = *gemm;
    if (gemm->copy != NULL) {
        operand.of.spec = *gemm->spec;
        operand.of.copy = *gemm->copy;
    }
    return operand;
}

static inline struct product_target product_target_of(const struct gemm_job *job,
                                                      const struct group_part *group, enum product_part part) {
    return {job->c, job->bias, job->bias_dtype, job->accumulate, *group, part};
}

/* A copy of an operand that points to its own parts, with the sizes of the group. */
static inline __device__ void place_operand(const struct product_operand *from,
                                            const struct product_target *target, bool is_a,
                                            struct product_operand *to) {
    *to = *from;
    if (target->part == PRODUCT_TERMS) {
        to->gemm.plain.columns = rows_of_group(&target->group, from->gemm.plain.columns);
        to->of.copy.operand.columns = to->gemm.plain.columns;
    } else if (target->part == PRODUCT_ROWS && is_a) {
        to->gemm.plain.rows = rows_of_group(&target->group, from->gemm.plain.rows);
    }
    if (from->gemm.copy != NULL) {
        to->gemm.spec = &to->of.spec;
        to->gemm.copy = &to->of.copy;
    }
}

/* The row of c that the first row of a belongs to. */
static inline __device__ int64_t first_row(const struct product_target *target) {
    return target->part == PRODUCT_ROWS ? first_of_group(&target->group) : 0;
}

/* Adds bias and previous c, rounds and stores. The bias begins at its element `first_bias`. */
static inline __device__ void store_result(const struct product_target *target, int64_t row, int64_t column,
                                           float total, int64_t first_bias = 0) {
    struct quant_matrix c = target->c;
    if (target->bias != NULL) {
        const struct quant_matrix bias = {(void *)target->bias, target->bias_dtype, 1, c.columns, 0, 1};
        total += matrix_at(&bias, first_bias + column);
    }
    c.rows = row + 1;
    if (target->accumulate) {
        total += matrix_at(&c, row * c.row_step + column * c.column_step);
    }
    segment_store(&c, row, column, 1, &total);
}

/* gemm/product_mma.cu, mma_form.cu: the product on tensor cores. Whether it takes a pair of operands; the bytes of scratch memory, which do
 * not depend on addresses (0 if it does not take them); and the product. */
bool product_mma_takes(const struct gemm_job *job, enum product_part part);
size_t product_mma_workspace(const struct gemm_job *job, enum product_part part);
enum opaq_status product_mma(const struct gemm_job *job, const struct group_part *group, enum product_part part,
                             void *workspace, CUDA_RUN);

/* For products of another library: operands as rows of bf16, without the scales in float32. Whether these are at most one for each
 * operand, and bf16 holds the values; what an operand is when it is decoded to this address, which is a multiple of 16; decoding a
 * or b; and two floats in device memory: what the product is multiplied with, and what it is added to. */
bool product_mma_decodes(const struct gemm_job *job);
struct gemm_operand product_mma_decoded(const struct gemm_operand *operand, void *memory);
enum opaq_status product_mma_decode(const struct gemm_job *job, bool is_a, void *to, CUDA_RUN);
enum opaq_status product_mma_factors(const struct gemm_job *job, float *factors, CUDA_RUN);

#endif
