/* cpu/gemm/gemm_table.h: the tile kernels and the choice among them. Depends on nothing.
 *
 * Each instruction set has one constant table in its own file, compiled with its own flags. All give the same
 * bits: gemm_run.h specifies the operations of a sum, and a kernel only computes many sums in parallel. */
#ifndef OPAQ_CPU_GEMM_GEMM_TABLE_H
#define OPAQ_CPU_GEMM_GEMM_TABLE_H

#include <stdint.h>

enum {
    GEMM_BLOCK = 256,           /* steps of the contraction in one partial sum */
    GEMM_TILE_COLUMN_LIMIT = 16 /* every table's tile columns divide this */
};

struct gemm_table {
    const char *name;  /* "gemm_avx2" */
    uint32_t features; /* bits of enum opaq_cpu_feature that it needs */
    int tile_columns;
    /* Adds to each of `rows` x tile_columns totals one block's sum, of `depth` (at most GEMM_BLOCK) products in
     * order: a[row * GEMM_BLOCK + k] * b[k * tile_columns + column]. */
    void (*run)(const float *a, int rows, const float *b, int depth, float *total, int64_t total_step);
};

/* The table for this machine. */
const struct gemm_table *gemm_table_best(void);

/* All tables that this build has, fastest first, whether this machine can run them or not. */
const struct gemm_table *const *gemm_tables(int *count);

/* Tables of kernels whose steps are pairs: a float of a or b holds two bf16 numbers, the earlier in its upper
 * half, and a step adds the product of the upper halves, then that of the lower ones. `depth` counts pairs. */
const struct gemm_table *const *gemm_pairs_tables(int *count);

/* The one for this machine; NULL where there is none faster than gemm_table_best(). */
const struct gemm_table *gemm_pairs_best(void);

extern const struct gemm_table gemm_table_ref;
extern const struct gemm_table gemm_pairs_ref;
#if defined(__x86_64__)
extern const struct gemm_table gemm_table_avx2;
extern const struct gemm_table gemm_table_avx512;
extern const struct gemm_table gemm_pairs_avx512;
#elif defined(__aarch64__)
extern const struct gemm_table gemm_table_neon;
#endif

#endif
