/* cpu/moe/activation_table.h: activation kernels, one table per instruction set (loop_tables.h), all with the same
 * bits. Depends on activation.h. */
#ifndef OPAQ_CPU_MOE_ACTIVATION_TABLE_H
#define OPAQ_CPU_MOE_ACTIVATION_TABLE_H

#include "cpu/moe/activation.h"

struct activation_table {
    const char *name;  /* "activation_avx2" */
    uint32_t features; /* required bits of enum opaq_cpu_feature */
    void (*run)(const struct opaq_experts_plan *plan, enum opaq_element dtype, float *g, float *u, int n,
                void *to);
};

extern const struct activation_table activation_table_ref;
#if defined(__x86_64__)
extern const struct activation_table activation_table_avx2;
extern const struct activation_table activation_table_avx512;
#endif

/* The fastest table that this machine can run. */
const struct activation_table *activation_table_best(void);

/* All tables of this build, fastest first. */
const struct activation_table *const *activation_tables(int *count);

#endif
