/* cpu/gemm/packed_prepare.h: the vector loops of packed_rows.c, one table per instruction set. Depends on
 * nothing.
 *
 * All tables are the same loops (simd/packed_prepare_loops.h), compiled with different flags, and give the same
 * bytes. */
#ifndef OPAQ_CPU_GEMM_PACKED_PREPARE_H
#define OPAQ_CPU_GEMM_PACKED_PREPARE_H

#include <stdint.h>

struct packed_prepare {
    const char *name;  /* "prepare_avx2" */
    uint32_t features; /* bits of enum opaq_cpu_feature that it needs */
    /* The largest |x|; NaN if one is NaN or infinite, which marks a row that cannot be scaled. */
    float (*finite_amax)(const float *x, int n);
    /* x * inverse, rounded to the nearest integer, ties to even; these fit. */
    void (*to_int8)(const float *x, int n, float inverse, int8_t *q);
    void (*to_int16)(const float *x, int n, float inverse, int16_t *q);
    /* Of pairs of e2m1 codes, the first one low: their values times 2. */
    void (*codes_to_int8)(const uint8_t *pairs, int64_t count, int8_t *q);
    /* -12 times the sum of every 16. */
    void (*correct)(const int8_t *q, int64_t count, int32_t *correction);
};

/* The table for this machine. */
const struct packed_prepare *packed_prepare_best(void);

/* All tables that this build has, fastest first. */
const struct packed_prepare *const *packed_prepare_tables(int *count);

extern const struct packed_prepare packed_prepare_ref;
#if defined(__x86_64__)
extern const struct packed_prepare packed_prepare_avx2;
extern const struct packed_prepare packed_prepare_avx512;
#endif

#endif
