/* cpu/gemm/ref/gemm_tile_ref.c: the tile kernel with 4 lanes, which every 64-bit processor has. */
#include "cpu/gemm/gemm_tile_tables.h"

enum { TILE_LANES = 4, TILE_ROWS = 4, TILE_VECTORS = 2 };
#include "cpu/gemm/gemm_tile.h"

const struct gemm_table gemm_table_ref = {
    .name = "gemm_ref", .features = 0, .tile_columns = TILE_COLUMNS, .run = tile_run};
