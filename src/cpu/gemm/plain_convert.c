/* cpu/gemm/plain_convert.c: which conversions serve this processor. */
#include "cpu/gemm/plain_convert.h"

#include "base/forced_kernels.h"

/* Fastest first; the reference needs nothing and stands last. */
static const struct plain_table *const tables[] = {
#if defined(__x86_64__)
    &plain_table_avx512,
    &plain_table_avx2,
#endif
    &plain_table_ref,
};
enum { TABLE_COUNT = sizeof tables / sizeof tables[0], FEW = 16 };

const struct plain_table *const *plain_tables(int *count) {
    *count = TABLE_COUNT;
    return tables;
}

const struct plain_table *plain_table_best(void) { return kernel_choose(tables, TABLE_COUNT); }

void plain_load(const void *data, enum opaq_element dtype, int64_t start, int64_t step, int n, float *to) {
    if (step != 1 || n < FEW) {
        plain_row_load(data, dtype, start, step, n, to);
    } else {
        plain_table_best()->load((const char *)data + plain_bytes(dtype, start), dtype, n, to);
    }
}

void plain_store(void *data, enum opaq_element dtype, int64_t start, int64_t step, int n, const float *from) {
    if (step != 1 || n < FEW) {
        plain_row_store(data, dtype, start, step, n, from);
    } else {
        plain_table_best()->store((char *)data + plain_bytes(dtype, start), dtype, n, from);
    }
}
