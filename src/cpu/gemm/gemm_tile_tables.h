/* cpu/gemm/gemm_tile_tables.h: the tables of the files gemm_tile_*.c. Depends on gemm_table.h. */
#ifndef OPAQ_CPU_GEMM_GEMM_TILE_TABLES_H
#define OPAQ_CPU_GEMM_GEMM_TILE_TABLES_H

#include "cpu/gemm/gemm_table.h"

extern const struct gemm_table gemm_table_ref;
extern const struct gemm_table gemm_pairs_ref;
#if defined(__x86_64__)
extern const struct gemm_table gemm_table_avx2;
extern const struct gemm_table gemm_table_avx512;
extern const struct gemm_table gemm_pairs_avx512;
#elif defined(__aarch64__)
extern const struct gemm_table gemm_table_neon;
#endif

#endif
