/* cpu/gemm/x86/gemm_tile_avx512.c: the tile kernel with 16 lanes; compiled with -mavx512f. */
#include "cpu/gemm/gemm_tile_tables.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TILE_FMA(factor, column, sum) _mm512_fmadd_ps(_mm512_set1_ps(factor), column, sum)
enum { TILE_LANES = 16, TILE_ROWS = 16, TILE_VECTORS = 1 };
#include "cpu/gemm/gemm_tile.h"

const struct gemm_table gemm_table_avx512 = {
    .name = "gemm_avx512", .features = OPAQ_CPU_AVX512, .tile_columns = TILE_COLUMNS, .run = tile_run};
#endif
