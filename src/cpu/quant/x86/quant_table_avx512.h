/* cpu/quant/x86/quant_table_avx512.h: the kernels for AVX-512. Depends on quant_table.h. */
#ifndef OPAQ_CPU_QUANT_X86_QUANT_TABLE_AVX512_H
#define OPAQ_CPU_QUANT_X86_QUANT_TABLE_AVX512_H

#include "cpu/quant/quant_table.h"

extern const struct quant_table quant_table_avx512;

void quantize_fp8_avx512(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);
void quantize_mx_avx512(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);
void quantize_nvfp4_avx512(const struct quant_job *job, const struct quant_copy *copy, int64_t r,
                           int64_t r_end);
void dequantize_avx512(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);
void amax_avx512(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r, int64_t r_end,
                 float *amax, int64_t step);

void decode_row_avx512(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t row, int64_t k,
                       const uint8_t *codes, int n, float *to);

bool covers_both_fp8_avx512(const struct quant_job *job);
void quantize_both_fp8_avx512(const struct quant_job *job, int64_t r, int64_t r_end);
extern const struct both_amaxes amaxes_fp8row_avx512;
bool covers_both_mx_avx512(const struct quant_job *job);
void quantize_both_mx_avx512(const struct quant_job *job, int64_t r, int64_t r_end);
bool covers_both_nvfp4_avx512(const struct quant_job *job);
void quantize_both_nvfp4_avx512(const struct quant_job *job, int64_t r, int64_t r_end);

#endif
