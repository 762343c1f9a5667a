/* cpu/quant/x86/quant_kernels_x86.h: declares the kernels and tables for AVX2 and AVX-512. Depends on
 * quant_table.h.
 *
 * Kernels are written once, in simd/, with the vector types of vec_avx2.h or vec_avx512.h; VEC_NAME() adds the
 * suffix. */
#ifndef OPAQ_CPU_QUANT_X86_QUANT_KERNELS_X86_H
#define OPAQ_CPU_QUANT_X86_QUANT_KERNELS_X86_H

#include "cpu/quant/quant_table.h"

/* clang-format off */
#define QUANT_KERNELS(isa)                                                                                           \
    extern const struct quant_table quant_table_##isa;                                                               \
    void quantize_fp8_##isa(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);   \
    void quantize_mx_##isa(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);    \
    void quantize_nvfp4_##isa(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end); \
    void dequantize_##isa(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);     \
    void amax_##isa(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r, int64_t r_end,           \
                    float *amax, int64_t step);                                                                      \
    void decode_row_##isa(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t row, int64_t k,       \
                          const uint8_t *codes, int n, float *to);                                                   \
    bool covers_both_fp8_##isa(const struct quant_job *job);                                                         \
    bool covers_both_mx_##isa(const struct quant_job *job);                                                          \
    bool covers_both_nvfp4_##isa(const struct quant_job *job);                                                       \
    void quantize_both_fp8_##isa(const struct quant_job *job, int64_t r, int64_t r_end);                             \
    void quantize_both_mx_##isa(const struct quant_job *job, int64_t r, int64_t r_end);                              \
    void quantize_both_nvfp4_##isa(const struct quant_job *job, int64_t r, int64_t r_end);                           \
    extern const struct both_amaxes amaxes_fp8row_##isa;
/* clang-format on */

QUANT_KERNELS(avx2)
QUANT_KERNELS(avx512)

#endif
