/* cpu/gemm/x86/packed_fp8_bf16_avx512.c: products of 8-bit tiles with bfloat16, 16 lanes, by vdpbf16ps: two columns at
 * once; compiled with AVX-512, VBMI and BF16. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include "cpu/gemm/x86/packed_fp8_avx512.h"

#define NUMBER_COLUMNS 2

/* Two columns. */
typedef uint32_t number;

static inline const number *numbers_of(const struct packed_rows *x) {
    return (const number *)(const void *)x->bf16;
}

static inline struct vector vector_broadcast(const number *from) {
    return (struct vector){_mm512_castsi512_ps(_mm512_set1_epi32((int)*from))};
}

static inline struct vector vector_dot(struct vector w, struct vector x, struct vector sum) {
    return (struct vector){_mm512_dpbf16_ps(sum.lane, (__m512bh)w.lane, (__m512bh)x.lane)};
}

static inline struct vector vector_product(struct vector w, struct vector x) {
    return vector_dot(w, x, vector_zero());
}

/* sum += a * *b, of both columns. */
static inline void vector_add_product(struct vector *sum, struct vector a, const number *b) {
    *sum = vector_dot(a, vector_broadcast(b), *sum);
}

static inline void pair_column(const struct codes_pair *pair, int c, struct vector column[2]) {
    (void)c;
    for (int v = 0; v < 2; ++v) {
        column[v].lane = _mm512_castsi512_ps(pair->words[v]);
    }
}

#include "cpu/gemm/simd/packed_fp8.h"

const struct packed_table packed_table_avx512_8bit_bf16 = {
    .name = "avx512",
    .features = OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_VBMI | OPAQ_CPU_AVX512_BF16,
    .kernel = {[PACKED_MXFP8] = {[PACKED_BF16] = KERNEL(mxfp8, bf16, avx512)},
               [PACKED_FP8] = {[PACKED_BF16] = KERNEL(fp8, bf16, avx512)},
               [PACKED_FP8BLK] = {[PACKED_BF16] = KERNEL(fp8blk, bf16, avx512)}}};
#endif
