/* cpu/quant/x86/quantize_mx_avx2.c: quantize_mx_vec.h, compiled for AVX2. */
#include "cpu/quant/x86/quant_table_avx2.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx2.h"

#include "cpu/quant/simd/quantize_mx_vec.h"

void quantize_mx_avx2(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    quantize_mx_vec(job, copy, r, r_end);
}

bool covers_both_mx_avx2(const struct quant_job *job) { return covers_both_mx_vec(job); }

void quantize_both_mx_avx2(const struct quant_job *job, int64_t r, int64_t r_end) {
    quantize_both_mx_vec(job, r, r_end);
}
#endif
