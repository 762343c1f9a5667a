/* cpu/gemm/packed_dispatch.c: which packed kernel serves what on this processor. */
#include <stddef.h>

#include "base/forced_kernels.h"
#include "cpu/gemm/packed_tables.h"
#include "opaq/cpu.h"

/* Fastest first; the reference needs nothing and stands last. */
static const struct packed_table *const tables[] = {
#if defined(__x86_64__)
    &packed_table_avx512_bf16, &packed_table_avx512_8bit_bf16, &packed_table_avx512, &packed_table_avx512_8bit,
    &packed_table_avx2,        &packed_table_avx2_8bit,
#elif defined(__aarch64__)
    &packed_table_dotprod,   &packed_table_neon_exact, &packed_table_neon_near,
    &packed_table_neon_fast, &packed_table_neon_8bit,
#endif
    &packed_table_ref,
};
enum { TABLE_COUNT = sizeof tables / sizeof tables[0] };

const struct packed_table *const *packed_tables(int *count) {
    *count = TABLE_COUNT;
    return tables;
}

const struct packed_kernel *packed_kernel(enum packed_format format, enum packed_precision precision) {
    const uint32_t features = opaq_cpu_features();
    const struct packed_kernel *best = NULL;
    for (int i = 0; i < TABLE_COUNT; ++i) {
        const struct packed_kernel *kernel = &tables[i]->kernel[format][precision];
        if (kernel->run == NULL || (tables[i]->features & ~features) != 0) {
            continue;
        }
        if (kernel_is_forced(kernel->name)) {
            return kernel;
        }
        best = best == NULL ? kernel : best;
    }
    return best;
}

bool packed_is_reference(const struct packed_kernel *kernel) {
    for (int format = 0; format < PACKED_FORMAT_COUNT; ++format) {
        for (int precision = 0; precision < PACKED_PRECISION_COUNT; ++precision) {
            if (kernel == &packed_table_ref.kernel[format][precision]) {
                return true;
            }
        }
    }
    return false;
}
