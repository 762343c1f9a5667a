/* gemm/packed_prepare_ref.c: preparing rows for any processor. */
#include "gemm/packed_prepare_loops.h"

PREPARE_TABLE(ref, 0);
