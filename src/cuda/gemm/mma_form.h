/* cuda/gemm/mma_form.h: operands of products on tensor cores: what a kernel's arguments are, and how they are made on the host.
 * Depends on mma_operand.h. */
#ifndef OPAQ_CUDA_GEMM_MMA_FORM_H
#define OPAQ_CUDA_GEMM_MMA_FORM_H

#include "cuda/gemm/mma_operand.h"

struct mma_arguments {
    struct product_operand a, b;
    struct mma_form a_form, b_form;
    float constant; /* of all elements: 1 / (6 * 448) for each nvfp4 tensor without a global scale */
    struct product_target target;
};

/* ---- mma_form.cu ---- */

/* How an operand is read; multiplies *constant with what is common to all its elements. */
struct mma_form mma_form_of(const struct gemm_operand *operand, enum product_part part, float *constant);

/* The arguments of a product, and after mma_prepare their last part: what decoded 4-bit codes lack. */
struct mma_arguments mma_arguments_of(const struct gemm_job *job, const struct group_part *group,
                                      enum product_part part);
void mma_arguments_settle(struct mma_arguments *arguments);

/* How many columns of c are computed at a time: all, or a slice, whose weights are decoded to the workspace. */
int64_t mma_slice(const struct gemm_job *job, enum product_part part);

/* Decodes the operands that kernels cannot read as they are to the workspace, and makes them plain. Restricts b and c to the
 * slice from column `first` on. */
enum opaq_status mma_prepare(const struct gemm_job *job, enum product_part part, int64_t first,
                             struct mma_arguments *arguments, void *workspace, CUDA_RUN);

/* ---- in kernels ---- */

static inline __device__ void side_make(const struct product_operand *operand,
                                        const struct product_target *target, bool is_a, struct mma_side *side) {
    place_operand(operand, target, is_a, &side->operand);
    side->rows = (int)side->operand.gemm.plain.rows;
    side->depth = (int)operand_depth(&side->operand.gemm);
}

/* Fills sides[0] with a and sides[1] with b. */
static inline __device__ void sides_make(const struct mma_arguments *job, struct mma_side sides[2]) {
    if (threadIdx.x < 2) {
        side_make(threadIdx.x == 0 ? &job->a : &job->b, &job->target, threadIdx.x == 0, &sides[threadIdx.x]);
    }
    __syncthreads();
}

/* The order of multiplications with factors, the same everywhere. */
static __device__ __forceinline__ float scaled(float sum, float constant, float b_factor, float a_factor) {
    return sum * constant * b_factor * a_factor;
}

#endif
