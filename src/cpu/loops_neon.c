/* cpu/loops_neon.c: the product of tiles with 4 lanes and the fused multiply-add of NEON. For the other tables of
 * loop_tables.h AArch64 uses the reference, which compilers vectorize for NEON. */
#include "cpu/gemm/gemm_table.h"
#include "opaq/cpu.h"

#if defined(__aarch64__)
#include <arm_neon.h>

#define TILE_FMA(factor, column, sum) vfmaq_n_f32(sum, column, factor)
enum { TILE_LANES = 4, TILE_ROWS = 6, TILE_VECTORS = 4 };
#include "cpu/gemm/gemm_tile.h"

const struct gemm_table gemm_table_neon = {
    .name = "gemm_neon", .features = OPAQ_CPU_NEON, .tile_columns = TILE_COLUMNS, .run = tile_run};
#endif
