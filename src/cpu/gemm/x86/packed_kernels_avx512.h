/* cpu/gemm/x86/packed_kernels_avx512.h: the AVX-512 kernels for tiled weights; packed_table_avx512.c lists them.
 * Depends on packed.h. */
#ifndef OPAQ_CPU_GEMM_X86_PACKED_KERNELS_AVX512_H
#define OPAQ_CPU_GEMM_X86_PACKED_KERNELS_AVX512_H

#include "cpu/gemm/packed.h"

/* As packed_kernel.run. */
typedef void packed_run_function(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin,
                                 int64_t end, float *y, int64_t y_step, void *panel);

/* Scratch memory of a task, in bytes; the same where x has few rows. */
enum { PACKED_SCRATCH_AVX512 = 664 << 10, PACKED_FEW_SCRATCH_AVX512 = 128 << 10 };

/* packed_float_avx512.c */
packed_run_function packed_nvfp4_exact_avx512;
packed_run_function packed_mxfp4_exact_avx512;

/* packed_int16_avx512.c */
packed_run_function packed_nvfp4_near_avx512;
packed_run_function packed_mxfp4_near_avx512;

/* packed_bf16_avx512.c */
packed_run_function packed_nvfp4_bf16_avx512;
packed_run_function packed_mxfp4_bf16_avx512;

/* packed_int8_avx512.c; fast32's serve codes as well: there is a scale for each block. */
packed_run_function packed_nvfp4_fast_avx512;
packed_run_function packed_nvfp4_fast32_avx512;
packed_run_function packed_mxfp4_fast_avx512;
packed_run_function packed_mxfp4_fast32_avx512;

#endif
