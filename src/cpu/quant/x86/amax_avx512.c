/* cpu/quant/x86/amax_avx512.c: amax_rows_vec.h, compiled for AVX-512. */
#include "cpu/quant/x86/quant_kernels_x86.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx512.h"

#include "cpu/quant/simd/amax_rows_vec.h"
#endif
