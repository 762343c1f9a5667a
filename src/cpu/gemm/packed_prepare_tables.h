/* cpu/gemm/packed_prepare_tables.h: the tables of packed_prepare.h, each in a file of its own. Depends on packed_prepare.h. */
#ifndef OPAQ_CPU_GEMM_PACKED_PREPARE_TABLES_H
#define OPAQ_CPU_GEMM_PACKED_PREPARE_TABLES_H

#include "cpu/gemm/packed_prepare.h"

extern const struct packed_prepare packed_prepare_ref;
#if defined(__x86_64__)
extern const struct packed_prepare packed_prepare_avx2;
extern const struct packed_prepare packed_prepare_avx512;
#endif

#endif
