/* cpu/quant/x86/quantize_fp8_avx2.c: quantize_fp8_vec.h, compiled for AVX2. */
#include "cpu/quant/x86/quant_table_avx2.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx2.h"

#include "cpu/quant/simd/quantize_fp8_vec.h"

void quantize_fp8_avx2(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    quantize_fp8_vec(job, copy, r, r_end);
}

bool covers_both_fp8_avx2(const struct quant_job *job) { return covers_both_fp8_vec(job); }

void quantize_both_fp8_avx2(const struct quant_job *job, int64_t r, int64_t r_end) {
    quantize_both_fp8_vec(job, r, r_end);
}

static void find_amaxes(const struct quant_job *job, int64_t r, int64_t r_end) {
    fp8row_find_amaxes(job, r, r_end);
}

static bool are_usual(const struct quant_job *job) { return fp8row_amaxes_are_usual(job); }

static void finish(const struct quant_job *job) { fp8row_finish(job); }

const struct both_amaxes amaxes_fp8row_avx2 = {find_amaxes, are_usual, finish};
#endif
