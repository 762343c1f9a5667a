/* cpu/gemm/x86/packed_prepare_avx2.c: preparing rows; compiled with AVX2. */
#include "cpu/gemm/packed_prepare_tables.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include "cpu/gemm/simd/packed_prepare_loops.h"

PREPARE_TABLE(avx2, OPAQ_CPU_AVX2);
#endif
