/* cpu/gemm/plain_convert.h: f32, bf16 or f16 to float32 and back, with the vectors of this processor; bit for bit the
 * results of plain_row.h. Depends on plain_row.h. */
#ifndef OPAQ_CPU_GEMM_PLAIN_CONVERT_H
#define OPAQ_CPU_GEMM_PLAIN_CONVERT_H

#include "definition/plain_row.h"

/* n elements, `step` apart, from element `start` of the data on. */
void plain_load(const void *data, enum opaq_element dtype, int64_t start, int64_t step, int n, float *to);

/* Rounded once, every NaN the canonical one. */
void plain_store(void *data, enum opaq_element dtype, int64_t start, int64_t step, int n, const float *from);

/* Conversions of n contiguous elements, one table per instruction set (loop_tables.h). */
struct plain_table {
    const char *name;  /* "plain_avx2" */
    uint32_t features; /* bits of enum opaq_cpu_feature that it needs */
    void (*load)(const void *data, enum opaq_element dtype, int n, float *to);
    void (*store)(void *data, enum opaq_element dtype, int n, const float *from);
};

/* The table for this machine. */
const struct plain_table *plain_table_best(void);

/* All tables that this build has, fastest first. */
const struct plain_table *const *plain_tables(int *count);

extern const struct plain_table plain_table_ref;
#if defined(__x86_64__)
extern const struct plain_table plain_table_avx2;
extern const struct plain_table plain_table_avx512;
#endif

#endif
