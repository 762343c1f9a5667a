/* cpu/quant/x86/amax_avx512.c: amax_rows_vec.h, compiled for AVX-512. */
#include "cpu/quant/x86/quant_table_avx512.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx512.h"

#include "cpu/quant/simd/amax_rows_vec.h"

void amax_avx512(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t r, int64_t r_end,
                 float *amax, int64_t step) {
    amax_vec(copy, spec, r, r_end, amax, step);
}
#endif
