/* cpu/gemm/ref/plain_convert_ref.c: conversions which every processor can run. */
#include "cpu/gemm/simd/plain_convert_loops.h"

const struct plain_table plain_table_ref = {
    .name = "plain_ref", .features = 0, .load = load_neighbours, .store = store_neighbours};
