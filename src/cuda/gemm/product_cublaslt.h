/* cuda/gemm/product_cublaslt.h: products of NVIDIA's cuBLASLt, where that is installed. Depends on cuda_functions.h. */
#ifndef OPAQ_CUDA_GEMM_PRODUCT_CUBLASLT_H
#define OPAQ_CUDA_GEMM_PRODUCT_CUBLASLT_H

#include "cuda/cuda_functions.h"

/* The bytes of scratch memory, which do not depend on addresses: 0 if cuBLASLt certainly does not take the job. */
size_t product_cublaslt_workspace(const struct gemm_job *job);

/* Runs the product if cuBLASLt takes the job, and sets *is_done; else another kernel has to. A job with groups has no one size
 * that the host knows: cuBLASLt never takes it. `factors`: NULL, or two floats in device memory, of the product and of what is
 * added to it: 0, or 1 if the job accumulates. */
enum opaq_status product_cublaslt(const struct gemm_job *job, const float *factors, void *workspace,
                                  bool *is_done, CUDA_RUN);

/* gemm/product_decoded.cu: the same for operands that cuBLASLt does not know, decoded to bf16 in the workspace beforehand: of many
 * rows, and with at most one float32 scale each. */
size_t product_decoded_workspace(const struct gemm_job *job);
enum opaq_status product_decoded(const struct gemm_job *job, void *workspace, bool *is_done, CUDA_RUN);

#endif
