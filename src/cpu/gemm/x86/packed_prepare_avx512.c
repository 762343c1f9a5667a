/* cpu/gemm/x86/packed_prepare_avx512.c: preparing rows; compiled with AVX-512 F, BW, DQ and VL. */
#include "cpu/gemm/packed_prepare_tables.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include "cpu/gemm/simd/packed_prepare_loops.h"

PREPARE_TABLE(avx512, OPAQ_CPU_AVX512);
#endif
