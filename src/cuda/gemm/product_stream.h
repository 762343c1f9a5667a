/* cuda/gemm/product_stream.h: products of few tokens by packed weights, with the bits of product_mma.cu. Depends on mma_form.h. */
#ifndef OPAQ_CUDA_GEMM_PRODUCT_STREAM_H
#define OPAQ_CUDA_GEMM_PRODUCT_STREAM_H

#include "cuda/gemm/mma_form.h"

/* Whether the product goes through product_stream: OPAQ_CUDA_PRODUCT=stream selects it, and it takes the operands. */
bool product_stream_takes(const struct gemm_job *job, enum product_part part,
                          const struct mma_arguments *arguments);
enum opaq_status product_stream(const struct mma_arguments *arguments, CUDA_RUN);

#endif
