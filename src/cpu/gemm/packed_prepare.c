/* cpu/gemm/packed_prepare.c: which table prepares rows on this processor. */
#include "base/forced_kernels.h"
#include "cpu/gemm/packed_prepare_tables.h"

/* Fastest first; the last one needs nothing. */
static const struct packed_prepare *const tables[] = {
#if defined(__x86_64__)
    &packed_prepare_avx512,
    &packed_prepare_avx2,
#endif
    &packed_prepare_ref,
};
enum { TABLE_COUNT = sizeof tables / sizeof tables[0] };

const struct packed_prepare *const *packed_prepare_tables(int *count) {
    *count = TABLE_COUNT;
    return tables;
}

const struct packed_prepare *packed_prepare_best(void) { return kernel_choose(tables, TABLE_COUNT); }
