/* cpu/gemm/simd/plain_convert_loops.h: the conversions of plain_row.h as functions, compiled once for each instruction set by the file
 * that includes it. Depends on plain_convert.h. */
#ifndef OPAQ_CPU_GEMM_SIMD_PLAIN_CONVERT_LOOPS_H
#define OPAQ_CPU_GEMM_SIMD_PLAIN_CONVERT_LOOPS_H

#include "cpu/gemm/plain_convert.h"

static void load_neighbours(const void *data, enum opaq_element dtype, int n, float *to) {
    plain_row_load_step(data, dtype, 1, n, to);
}

static void store_neighbours(void *data, enum opaq_element dtype, int n, const float *from) {
    plain_row_store_step(data, dtype, 1, n, from);
}

#endif
