/* cpu/loops_avx2.c: the tables of loop_tables.h with 8 lanes; compiled with AVX2 and FMA. */
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TILE_FMA(factor, column, sum) _mm256_fmadd_ps(_mm256_set1_ps(factor), column, sum)
enum { TILE_LANES = 8, TILE_ROWS = 6, TILE_VECTORS = 2 };
#include "cpu/loop_tables.h"

LOOP_TABLES(avx2, OPAQ_CPU_AVX2);
#endif
