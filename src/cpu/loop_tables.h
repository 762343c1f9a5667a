/* cpu/loop_tables.h: the kernel tables whose functions are loops that compilers vectorize: products of tiles,
 * conversions of plain rows, preparing rows for tiled weights, activations. Each loops_<isa>.c includes this file and
 * is compiled with the flags of its instruction set; all give the same bytes. Depends on gemm_tile.h, whose macros the
 * file defines, and the headers of the tables. */
#ifndef OPAQ_CPU_LOOP_TABLES_H
#define OPAQ_CPU_LOOP_TABLES_H

#include "cpu/gemm/gemm_tile.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/gemm/simd/packed_prepare_loops.h"
#include "cpu/moe/activation_table.h"
#include "definition/activation_formulas.h"

static void load_neighbours(const void *data, enum opaq_element dtype, int n, float *to) {
    plain_row_load_step(data, dtype, 1, n, to);
}

static void store_neighbours(void *data, enum opaq_element dtype, int n, const float *from) {
    plain_row_store_step(data, dtype, 1, n, from);
}

/* The four tables of an instruction set that needs the given bits of enum opaq_cpu_feature. */
#define LOOP_TABLES(isa, needed)                                                                              \
    const struct gemm_table gemm_table_##isa = {                                                              \
        .name = "gemm_" #isa, .features = (needed), .tile_columns = TILE_COLUMNS, .run = tile_run};           \
    const struct plain_table plain_table_##isa = {                                                            \
        .name = "plain_" #isa, .features = (needed), .load = load_neighbours, .store = store_neighbours};     \
    const struct packed_prepare packed_prepare_##isa = {"prepare_" #isa, (needed),      finite_amax, to_int8, \
                                                        to_int16,        codes_to_int8, correct};             \
    const struct activation_table activation_table_##isa = {                                                  \
        .name = "activation_" #isa, .features = (needed), .run = activate_segment}

#endif
