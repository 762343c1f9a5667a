/* op/activation_dispatch.c: which activation kernel serves this processor. */
#include <stddef.h>

#include "base/forced_kernels.h"
#include "op/activation_table.h"
#include "opaq/cpu.h"

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

static const struct activation_table *best_table(void) {
    const uint32_t features = opaq_cpu_features();
    const struct activation_table *best = NULL;
    for (int i = 0; i < TABLE_COUNT; ++i) {
        if ((tables[i]->features & ~features) != 0) {
            continue;
        }
        if (kernel_is_forced(tables[i]->name)) {
            return tables[i];
        }
        best = best == NULL ? tables[i] : best;
    }
    return best;
}

void activation_stretch(const struct opaq_experts_plan *plan, enum opaq_element dtype, float *g, float *u,
                        int n, void *to) {
    best_table()->run(plan, dtype, g, u, n, to);
}
