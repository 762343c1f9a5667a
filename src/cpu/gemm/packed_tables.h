/* cpu/gemm/packed_tables.h: the tables of packed kernels, each in files of its own. Depends on packed.h. */
#ifndef OPAQ_CPU_GEMM_PACKED_TABLES_H
#define OPAQ_CPU_GEMM_PACKED_TABLES_H

#include "cpu/gemm/packed.h"

extern const struct packed_table packed_table_ref;
#if defined(__x86_64__)
extern const struct packed_table packed_table_avx512;
extern const struct packed_table packed_table_avx512_bf16;
extern const struct packed_table packed_table_avx2;
extern const struct packed_table packed_table_avx512_8bit;
extern const struct packed_table packed_table_avx512_8bit_bf16;
extern const struct packed_table packed_table_avx2_8bit;
#elif defined(__aarch64__)
extern const struct packed_table packed_table_dotprod;
extern const struct packed_table packed_table_neon_exact;
extern const struct packed_table packed_table_neon_near;
extern const struct packed_table packed_table_neon_fast;
extern const struct packed_table packed_table_neon_8bit;
#endif

#endif
