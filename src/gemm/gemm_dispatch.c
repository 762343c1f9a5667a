/* gemm/gemm_dispatch.c: which tile kernel serves this processor. */
#include <stdatomic.h>
#include <stddef.h>

#include "gemm/gemm_run.h"
#include "gemm/gemm_tile_tables.h"
#include "opaq/cpu.h"

/* Fastest first; the reference needs nothing and stands last. */
static const struct gemm_table *const tables[] = {
#if defined(__x86_64__)
    &gemm_table_avx512,
    &gemm_table_avx2,
#endif
    &gemm_table_ref,
};
enum { TABLE_COUNT = sizeof tables / sizeof tables[0] };

const struct gemm_table *const *gemm_tables(int *count) {
    *count = TABLE_COUNT;
    return tables;
}

static const struct gemm_table *choose(uint32_t features) {
    for (int i = 0; i < TABLE_COUNT; ++i) {
        if ((tables[i]->features & ~features) == 0) {
            return tables[i];
        }
    }
    return &gemm_table_ref;
}

/* Two threads may both choose; they choose the same. */
const struct gemm_table *gemm_table_best(void) {
    static _Atomic(const struct gemm_table *) cache;
    const struct gemm_table *best = atomic_load_explicit(&cache, memory_order_relaxed);
    if (best == NULL) {
        best = choose(opaq_cpu_features());
        atomic_store_explicit(&cache, best, memory_order_relaxed);
    }
    return best;
}

const char *gemm_kernel_name(void) { return gemm_table_best()->name; }
