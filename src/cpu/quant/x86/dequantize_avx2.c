/* cpu/quant/x86/dequantize_avx2.c: dequantize_vec.h and decode_row_vec.h, compiled for AVX2. */
#include "cpu/quant/x86/quant_kernels_x86.h"

#if defined(__x86_64__)
#include "cpu/quant/x86/vec_avx2.h"

#include "cpu/quant/simd/decode_row_vec.h"
#include "cpu/quant/simd/dequantize_vec.h"
#endif
