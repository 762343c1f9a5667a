/* cpu/loops_avx512.c: the tables of loop_tables.h with 16 lanes; compiled with AVX-512 F and BW. */
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include <immintrin.h>

#define TILE_FMA(factor, column, sum) _mm512_fmadd_ps(_mm512_set1_ps(factor), column, sum)
enum { TILE_LANES = 16, TILE_ROWS = 16, TILE_VECTORS = 1 };
#include "cpu/loop_tables.h"

LOOP_TABLES(avx512, OPAQ_CPU_AVX512);
#endif
