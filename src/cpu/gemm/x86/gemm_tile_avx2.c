/* cpu/gemm/x86/gemm_tile_avx2.c: the tile kernel with 8 lanes; compiled with -mavx2 -mfma. */
#include "cpu/gemm/gemm_tile_tables.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TILE_FMA(factor, column, sum) _mm256_fmadd_ps(_mm256_set1_ps(factor), column, sum)
enum { TILE_LANES = 8, TILE_ROWS = 6, TILE_VECTORS = 2 };
#include "cpu/gemm/gemm_tile.h"

const struct gemm_table gemm_table_avx2 = {
    .name = "gemm_avx2", .features = OPAQ_CPU_AVX2, .tile_columns = TILE_COLUMNS, .run = tile_run};
#endif
