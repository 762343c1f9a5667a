/* cuda/gemm/product_stream.h: products whose operands are copied to shared memory ahead, with the bits of product_mma.cu. Depends on
 * mma_form.h. */
#ifndef OPAQ_CUDA_GEMM_PRODUCT_STREAM_H
#define OPAQ_CUDA_GEMM_PRODUCT_STREAM_H

#include "cuda/gemm/mma_form.h"

/* product_stream.cu: few tokens by packed weights. Whether it takes the product; `arguments` are those of mma_prepare. */
bool product_stream_takes(const struct gemm_job *job, enum product_part part,
                          const struct mma_arguments *arguments, const struct opaq_execution *execution);
enum opaq_status product_stream(const struct mma_arguments *arguments, CUDA_RUN);

/* product_stream.cu: the products of groups of rows in one launch. `job` is that of group 0 with the sorted rows of all groups, whose
 * offsets are `first`; `next` is the weight of group 1, and `next_bias` its bias. */
bool product_stream_groups_takes(const struct gemm_job *job, int64_t count,
                                 const struct opaq_execution *execution);
enum opaq_status product_stream_groups(const struct gemm_job *job, const struct gemm_operand *next,
                                       const void *next_bias, const int64_t *first, int64_t count, CUDA_RUN);

/* product_panels.cu: more tokens by any weights. The workspace has room for the tokens in bf16. */
bool product_panels_takes(const struct gemm_job *job, enum product_part part,
                          const struct mma_arguments *arguments, const struct opaq_execution *execution);
enum opaq_status product_panels(const struct mma_arguments *arguments, void *workspace, CUDA_RUN);

#endif
