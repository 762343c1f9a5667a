/* cpu/moe/activation_dispatch.c: which activation kernel serves this processor. */
#include "base/forced_kernels.h"
#include "cpu/moe/activation_table.h"

/* Fastest first; the reference needs nothing and stands last. */
static const struct activation_table *const tables[] = {
#if defined(__x86_64__)
    &activation_table_avx512,
    &activation_table_avx2,
#endif
    &activation_table_ref,
};
enum { TABLE_COUNT = sizeof tables / sizeof tables[0] };

const struct activation_table *const *activation_tables(int *count) {
    *count = TABLE_COUNT;
    return tables;
}

const struct activation_table *activation_table_best(void) { return kernel_choose(tables, TABLE_COUNT); }

void activation_stretch(const struct opaq_experts_plan *plan, enum opaq_element dtype, float *g, float *u,
                        int n, void *to) {
    activation_table_best()->run(plan, dtype, g, u, n, to);
}
