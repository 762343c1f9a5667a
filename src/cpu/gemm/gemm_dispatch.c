/* cpu/gemm/gemm_dispatch.c: which tile kernel serves this processor. */
#include "base/forced_kernels.h"
#include "cpu/gemm/gemm_run.h"
#include "cpu/gemm/gemm_tile_tables.h"

/* Fastest first; the reference needs nothing and stands last. */
static const struct gemm_table *const tables[] = {
#if defined(__x86_64__)
    &gemm_table_avx512,
    &gemm_table_avx2,
#elif defined(__aarch64__)
    &gemm_table_neon,
#endif
    &gemm_table_ref,
};
enum { TABLE_COUNT = sizeof tables / sizeof tables[0] };

const struct gemm_table *const *gemm_tables(int *count) {
    *count = TABLE_COUNT;
    return tables;
}

const struct gemm_table *gemm_table_best(void) { return kernel_choose(tables, TABLE_COUNT); }

const char *gemm_kernel_name(void) { return gemm_table_best()->name; }
