/* cpu/gemm/ref/packed_prepare_ref.c: preparing rows for any processor. */
#include "cpu/gemm/simd/packed_prepare_loops.h"

PREPARE_TABLE(ref, 0);
