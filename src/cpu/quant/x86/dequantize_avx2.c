/* cpu/quant/x86/dequantize_avx2.c: dequantize_vec.h, compiled for AVX2. */
#include "cpu/quant/x86/quant_table_avx2.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx2.h"

#include "cpu/quant/simd/dequantize_vec.h"

void dequantize_avx2(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    dequantize_vec(job, copy, r, r_end);
}
#endif
