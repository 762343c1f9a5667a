/* cpu/gemm/x86/plain_convert_avx512.c: conversions with 16 lanes; compiled with -mavx512f and -mavx512bw. */
#include "cpu/gemm/plain_convert.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include "cpu/gemm/simd/plain_convert_loops.h"

const struct plain_table plain_table_avx512 = {
    .name = "plain_avx512", .features = OPAQ_CPU_AVX512, .load = load_neighbours, .store = store_neighbours};
#endif
