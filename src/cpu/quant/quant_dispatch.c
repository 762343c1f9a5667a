/* cpu/quant/quant_dispatch.c: which table serves what on this processor. */
#include <stddef.h>
#include <string.h>

#include "base/forced_kernels.h"
#include "opaq/cpu.h"
#include "cpu/quant/x86/quant_kernels_x86.h"
#include "cpu/quant/ref/quant_table_ref.h"

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

/* All kinds of kernels begin with their name. */
static const char *name_at(const struct quant_table *table, size_t offset) {
    const char *name;
    memcpy(&name, (const char *)table + offset, sizeof name);
    return name;
}

const struct quant_table *quant_table_choose(const struct quant_table *const *list, int count,
                                             uint32_t features, size_t offset) {
    for (int i = 0; i + 1 < count; ++i) {
        if (name_at(list[i], offset) != NULL && (list[i]->features & ~features) == 0) {
            return list[i];
        }
    }
    return list[count - 1];
}

/* The table whose kernel at `offset` is asked for by name, or the one that is chosen. */
static const struct quant_table *table_for(size_t offset) {
    const uint32_t features = opaq_cpu_features();
    for (int i = 0; i < TABLE_COUNT; ++i) {
        const char *name = name_at(tables[i], offset);
        if (name != NULL && (tables[i]->features & ~features) == 0 && kernel_is_forced(name)) {
            return tables[i];
        }
    }
    return quant_table_choose(tables, TABLE_COUNT, features, offset);
}

const struct quant_kernel *quantize_kernel(enum opaq_format format) {
    const size_t offset = offsetof(struct quant_table, quantize) + (size_t)format * sizeof(struct quant_kernel);
    return &table_for(offset)->quantize[format];
}

const struct quant_kernel *dequantize_kernel(enum opaq_format format) {
    const size_t offset =
        offsetof(struct quant_table, dequantize) + (size_t)format * sizeof(struct quant_kernel);
    return &table_for(offset)->dequantize[format];
}

const struct quant_kernel *quantize_kernel_for(const struct quant_copy *copy, enum opaq_format format) {
    const struct quant_kernel *kernel = quantize_kernel(format);
    const bool is_forced = kernel_is_forced(kernel->name);
    return quant_copy_is_narrow(copy) && !is_forced ? &quant_table_ref.quantize[format] : kernel;
}

const struct quant_kernel *dequantize_kernel_for(const struct quant_copy *copy, enum opaq_format format) {
    const struct quant_kernel *kernel = dequantize_kernel(format);
    const bool is_forced = kernel_is_forced(kernel->name);
    return quant_copy_is_narrow(copy) && !is_forced ? &quant_table_ref.dequantize[format] : kernel;
}

bool quant_is_reference(const struct quant_kernel *kernel) {
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        if (kernel == &quant_table_ref.quantize[format] || kernel == &quant_table_ref.dequantize[format]) {
            return true;
        }
    }
    return false;
}

const struct both_kernel *both_kernel(enum opaq_format format) {
    const size_t offset = offsetof(struct quant_table, both) + (size_t)format * sizeof(struct both_kernel);
    return &table_for(offset)->both[format];
}

const struct amax_kernel *amax_kernel(void) { return &table_for(offsetof(struct quant_table, amax))->amax; }

const struct decode_row_kernel *decode_row_kernel(void) {
    return &table_for(offsetof(struct quant_table, decode_row))->decode_row;
}
