/* quant/quantize_fp8_avx512.c: quantize_fp8_vec.h, compiled for AVX-512. */
#include "quant/quant_table_avx512.h"

#if defined(__x86_64__)
#include "quant/vec_avx512.h"

#include "quant/quantize_fp8_vec.h"

void quantize_fp8_avx512(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    quantize_fp8_vec(job, copy, r, r_end);
}

bool covers_both_fp8_avx512(const struct quant_job *job) { return covers_both_fp8_vec(job); }

void quantize_both_fp8_avx512(const struct quant_job *job, int64_t r, int64_t r_end) {
    quantize_both_fp8_vec(job, r, r_end);
}
#endif
