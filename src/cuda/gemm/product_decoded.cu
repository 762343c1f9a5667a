/* cuda/gemm/product_decoded.cu: products in any order of operands that cuBLASLt does not know (MX formats, NVFP4, FP8 by bf16): they
 * are decoded to bf16, which holds their values exactly, in the workspace, and multiplied there. Scales in float32 that belong to
 * a whole operand become the factor of the product, which cuBLASLt reads from device memory.
 *
 * Decoding writes 2 bytes for each value of an operand, once for each product, so it is for products of many rows only. */
#include "cuda/gemm/product_cublaslt.h"
#include "cuda/gemm/product_operand.h"

enum {
    LEAST_ROWS =
        128,        /* of c: below, the kernels of product_mma.cu read fewer bytes and are faster on an H200 */
    ALIGNMENT = 256 /* of each part of the workspace: two factors, the operands, what cuBLASLt needs */
};

/* Whether the operands may be decoded. Depends on no address, except that operands at odd ones are not. */
static bool is_taken(const struct gemm_job *job) {
    return job->any_order && (job->a.copy != NULL || job->b.copy != NULL) && job->c.rows >= LEAST_ROWS &&
           product_mma_decodes(job);
}

/* Replaces an operand that is quantized by its decoded form, at *memory, which it moves behind it. */
static void replace(struct gemm_operand *operand, char **memory) {
    if (operand->copy != NULL) {
        *operand = product_mma_decoded(operand, *memory);
        *memory += round_up(operand->plain.rows * operand->plain.row_step * 2, ALIGNMENT);
    }
}

/* The job as cuBLASLt sees it; *left is where the rest of the workspace begins. */
static struct gemm_job decoded_job(const struct gemm_job *job, char *workspace, char **left) {
    struct gemm_job decoded = *job;
    *left = workspace + ALIGNMENT;
    replace(&decoded.a, left);
    replace(&decoded.b, left);
    return decoded;
}

size_t product_decoded_workspace(const struct gemm_job *job) {
    if (!is_taken(job)) {
        return 0;
    }
    char *const begin = (char *)(uintptr_t)ALIGNMENT; /* any address */
    char *left;
    const struct gemm_job decoded = decoded_job(job, begin, &left);
    const size_t library = product_cublaslt_workspace(&decoded);
    return library == 0 ? 0 : (size_t)(left - begin) + ALIGNMENT + library;
}

enum opaq_status product_decoded(const struct gemm_job *job, void *workspace, bool *is_done,
                                 const struct opaq_execution *execution, struct opaq_error *error) {
    *is_done = false;
    if (product_decoded_workspace(job) == 0) {
        return OPAQ_OK;
    }
    char *const begin = (char *)round_up((int64_t)(uintptr_t)workspace, ALIGNMENT);
    char *left;
    const struct gemm_job decoded = decoded_job(job, begin, &left);
    float *const factors = (float *)begin;
    if (job->a.copy != NULL) {
        TRY(product_mma_decode(job, true, decoded.a.plain.data, execution, error));
    }
    if (job->b.copy != NULL) {
        TRY(product_mma_decode(job, false, decoded.b.plain.data, execution, error));
    }
    TRY(product_mma_factors(job, factors, execution, error));
    return product_cublaslt(&decoded, factors, left, is_done, execution, error);
}
