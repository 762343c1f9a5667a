/* cpu/gemm/x86/packed_fp8_avx512.c: products of 8-bit tiles with float32, 16 lanes; compiled with AVX-512 and VBMI.
 * Half of the bfloat16 of two columns make 16 floats of the one, the other half 16 of the other. */
#include "cpu/gemm/packed.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include "cpu/gemm/x86/packed_fp8_avx512.h"

/* In assembly, because the instruction for floats, which compilers prefer, needs a shuffle on some processors. */
static inline struct vector vector_broadcast(const float *from) {
    struct vector a;
    __asm__("vpbroadcastd %1, %0" : "=v"(a.lane) : "m"(*from));
    return a;
}

/* sum += a * *b. On some processors a separate broadcast needs a shuffle and this one does not; compilers prefer to
 * share a separate one. */
static inline void vector_add_product(struct vector *sum, struct vector a, const float *b) {
    __asm__("vfmadd231ps %2%{1to16%}, %1, %0" : "+v"(sum->lane) : "v"(a.lane), "m"(*b));
}

static inline void pair_column(const struct codes_pair *pair, int c, struct vector column[2]) {
    for (int v = 0; v < 2; ++v) {
        column[v].lane =
            _mm512_castsi512_ps(c == 0 ? _mm512_slli_epi32(pair->words[v], 16)
                                       : _mm512_and_si512(pair->words[v], _mm512_set1_epi32((int)0xFFFF0000)));
    }
}

#include "cpu/gemm/simd/packed_fp8.h"

const struct packed_table packed_table_avx512_8bit = {
    .name = "avx512",
    .features = OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_VBMI,
    .kernel = {[PACKED_MXFP8] = {KERNEL(mxfp8, exact, avx512)},
               [PACKED_FP8] = {KERNEL(fp8, exact, avx512)},
               [PACKED_FP8BLK] = {KERNEL(fp8blk, exact, avx512)}}};
#endif
