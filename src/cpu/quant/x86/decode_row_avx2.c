/* cpu/quant/x86/decode_row_avx2.c: decode_row_vec.h, compiled for AVX2. */
#include "cpu/quant/x86/quant_table_avx2.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx2.h"

#include "cpu/quant/simd/decode_row_vec.h"

void decode_row_avx2(const struct opaq_spec *spec, const struct quant_copy *copy, int64_t row, int64_t k,
                     const uint8_t *codes, int n, float *to) {
    decode_row_vec(spec, copy, row, k, codes, n, to);
}
#endif
