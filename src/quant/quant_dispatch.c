/* quant/quant_dispatch.c: which table serves what on this processor. */
#include <stddef.h>
#include <string.h>

#include "opaq/cpu.h"
#include "quant/quant_table_avx2.h"
#include "quant/quant_table_avx512.h"
#include "quant/quant_table_ref.h"

/* Fastest first; the reference is complete and stands last. */
static const struct quant_table *const tables[] = {
#if defined(__x86_64__)
    &quant_table_avx512,
    &quant_table_avx2,
#endif
    &quant_table_ref,
};
enum { TABLE_COUNT = sizeof tables / sizeof tables[0] };

const struct quant_table *const *quant_tables(int *count) {
    *count = TABLE_COUNT;
    return tables;
}

const struct quant_table *quant_table_choose(const struct quant_table *const *list, int count,
                                             uint32_t features, size_t offset) {
    for (int i = 0; i + 1 < count; ++i) {
        const char *name; /* all kinds of kernels begin with their name */
        memcpy(&name, (const char *)list[i] + offset, sizeof name);
        if (name != NULL && (list[i]->features & ~features) == 0) {
            return list[i];
        }
    }
    return list[count - 1];
}

const struct quant_kernel *quantize_kernel(enum opaq_format format) {
    const size_t offset = offsetof(struct quant_table, quantize) + (size_t)format * sizeof(struct quant_kernel);
    return &quant_table_choose(tables, TABLE_COUNT, opaq_cpu_features(), offset)->quantize[format];
}

const struct quant_kernel *dequantize_kernel(enum opaq_format format) {
    const size_t offset =
        offsetof(struct quant_table, dequantize) + (size_t)format * sizeof(struct quant_kernel);
    return &quant_table_choose(tables, TABLE_COUNT, opaq_cpu_features(), offset)->dequantize[format];
}

const struct both_kernel *both_kernel(enum opaq_format format) {
    const size_t offset = offsetof(struct quant_table, both) + (size_t)format * sizeof(struct both_kernel);
    return &quant_table_choose(tables, TABLE_COUNT, opaq_cpu_features(), offset)->both[format];
}

const struct amax_kernel *amax_kernel(void) {
    return &quant_table_choose(tables, TABLE_COUNT, opaq_cpu_features(), offsetof(struct quant_table, amax))
                ->amax;
}

const struct decode_row_kernel *decode_row_kernel(void) {
    return &quant_table_choose(tables, TABLE_COUNT, opaq_cpu_features(),
                               offsetof(struct quant_table, decode_row))
                ->decode_row;
}
