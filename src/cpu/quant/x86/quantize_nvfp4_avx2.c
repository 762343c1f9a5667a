/* cpu/quant/x86/quantize_nvfp4_avx2.c: quantize_nvfp4_vec.h, compiled for AVX2. */
#include "cpu/quant/x86/quant_table_avx2.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx2.h"

#include "cpu/quant/simd/quantize_nvfp4_vec.h"

void quantize_nvfp4_avx2(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    quantize_nvfp4_vec(job, copy, r, r_end);
}

bool covers_both_nvfp4_avx2(const struct quant_job *job) { return covers_both_nvfp4_vec(job); }

void quantize_both_nvfp4_avx2(const struct quant_job *job, int64_t r, int64_t r_end) {
    quantize_both_nvfp4_vec(job, r, r_end);
}
#endif
