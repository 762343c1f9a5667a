/* cpu/quant/x86/quantize_mx_avx2.c: quantize_mx_vec.h, compiled for AVX2. */
#include "cpu/quant/x86/quant_kernels_x86.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx2.h"

#include "cpu/quant/simd/quantize_mx_vec.h"
#endif
