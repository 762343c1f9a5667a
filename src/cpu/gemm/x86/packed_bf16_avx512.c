/* cpu/gemm/x86/packed_bf16_avx512.c: 4-bit tiled weights times rows of bf16 (exact), with vdpbf16ps: two products for
 * each row of a tile. The weights' values are exact in bf16, the products in float32. Depends on
 * packed_words_avx512.h. */
#include "cpu/gemm/packed.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/gemm/x86/packed_avx512.h"

#define NAME(format) packed_##format##_bf16_avx512
#define ROUNDS PACKED_APART
enum { HALVINGS = 0 };

typedef __m512 sums;

PACKED_INLINE __m512i words_table(void) { return table_of_floats(); }

PACKED_INLINE const uint8_t *words_of(const struct packed_rows *x) { return (const uint8_t *)x->bf16; }

PACKED_INLINE sums sums_zero(void) { return _mm512_setzero_ps(); }

PACKED_INLINE sums sums_add(sums sum, __m512i w, __m512i x) {
    return _mm512_dpbf16_ps(sum, (__m512bh)w, (__m512bh)x);
}

PACKED_INLINE __m512 sums_value(sums sum) { return sum; }

#include "cpu/gemm/x86/packed_words_avx512.h"
#endif
