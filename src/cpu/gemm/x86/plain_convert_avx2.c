/* cpu/gemm/x86/plain_convert_avx2.c: conversions with 8 lanes; compiled with -mavx2. */
#include "cpu/gemm/plain_convert.h"
#include "opaq/cpu.h"

#if defined(__x86_64__)
#include "cpu/gemm/simd/plain_convert_loops.h"

const struct plain_table plain_table_avx2 = {
    .name = "plain_avx2", .features = OPAQ_CPU_AVX2, .load = load_neighbours, .store = store_neighbours};
#endif
