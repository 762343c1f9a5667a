/* cpu/gemm/plain_convert.c: f32, bf16 or f16 to float32 and back, with this processor's kernels for long rows. */
#include "cpu/gemm/plain_convert.h"

enum { FEW = 16 };

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
