/* cpu/gemm/x86/gemm_pairs_avx512.c: the tile kernel for pairs of bf16 with 16 lanes; compiled with -mavx512f
 * -mavx512bf16. vdpbf16ps adds the product of the upper halves first, then that of the lower ones, each with one
 * rounding. */
#include "cpu/gemm/gemm_table.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TILE_FMA(factor, column, sum) \
    _mm512_dpbf16_ps(sum, (__m512bh)_mm512_set1_ps(factor), (__m512bh)(__m512)(column))
enum { TILE_LANES = 16, TILE_ROWS = 16, TILE_VECTORS = 1 };
#include "cpu/gemm/gemm_tile.h"

const struct gemm_table gemm_pairs_avx512 = {.name = "gemm_bf16_avx512",
                                             .features = OPAQ_CPU_AVX512 | OPAQ_CPU_AVX512_BF16,
                                             .tile_columns = TILE_COLUMNS,
                                             .run = tile_run};
#endif
