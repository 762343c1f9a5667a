/* cpu/gemm/x86/packed_int16_avx512.c: 4-bit tiled weights times rows of int16 (near), with vpdpwssd: two products of
 * signed words for each row of a tile. Depends on packed_words_avx512.h. */
#include "cpu/gemm/packed.h"

#if defined(__x86_64__)
#include <immintrin.h>

#include "cpu/gemm/x86/packed_avx512.h"

#define NAME(format) packed_##format##_near_avx512
#define ROUNDS PACKED_INLINE
enum { HALVINGS = 1 };

typedef __m512i sums;

PACKED_INLINE __m512i words_table(void) { return table_of_words(); }

PACKED_INLINE const uint8_t *words_of(const struct packed_rows *x) { return (const uint8_t *)x->q16; }

PACKED_INLINE sums sums_zero(void) { return _mm512_setzero_si512(); }

PACKED_INLINE sums sums_add(sums sum, __m512i w, __m512i x) { return _mm512_dpwssd_epi32(sum, w, x); }

PACKED_INLINE __m512 sums_value(sums sum) { return _mm512_cvtepi32_ps(sum); }

#include "cpu/gemm/x86/packed_words_avx512.h"
#endif
