/* cpu/kernel_tables.c: every kernel table of this build. A new table is a line here. */
#include <stddef.h>

#include "base/forced_kernels.h"
#include "cpu/cpu_functions.h"
#include "cpu/gemm/gemm_run.h"
#include "cpu/gemm/gemm_table.h"
#include "cpu/gemm/packed.h"
#include "cpu/gemm/packed_prepare.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/kernel_family.h"
#include "cpu/moe/activation_table.h"
#include "cpu/quant/quant_table.h"
#include "cpu/quant/ref/quant_table_ref.h"
#include "cpu/quant/x86/quant_kernels_x86.h"
#include "opaq/cpu.h"

/* ---- the tables, fastest first, the reference last ---- */

static const struct quant_table *const quant_list[] = {
#if defined(__x86_64__)
    &quant_table_avx512,
    &quant_table_avx2,
#endif
    &quant_table_ref,
};

static const struct packed_table *const packed_list[] = {
#if defined(__x86_64__)
    &packed_table_avx512_bf16, &packed_table_avx512_8bit_bf16, &packed_table_avx512, &packed_table_avx512_8bit,
    &packed_table_avx2,        &packed_table_avx2_8bit,
#elif defined(__aarch64__)
    &packed_table_dotprod,   &packed_table_neon_exact, &packed_table_neon_near,
    &packed_table_neon_fast, &packed_table_neon_8bit,
#endif
    &packed_table_ref,
};

static const struct gemm_table *const gemm_list[] = {
#if defined(__x86_64__)
    &gemm_table_avx512,
    &gemm_table_avx2,
#elif defined(__aarch64__)
    &gemm_table_neon,
#endif
    &gemm_table_ref,
};

static const struct gemm_table *const pairs_list[] = {
#if defined(__x86_64__)
    &gemm_pairs_avx512,
#endif
    &gemm_pairs_ref,
};

static const struct plain_table *const plain_list[] = {
#if defined(__x86_64__)
    &plain_table_avx512,
    &plain_table_avx2,
#endif
    &plain_table_ref,
};

static const struct packed_prepare *const prepare_list[] = {
#if defined(__x86_64__)
    &packed_prepare_avx512,
    &packed_prepare_avx2,
#endif
    &packed_prepare_ref,
};

static const struct activation_table *const activation_list[] = {
#if defined(__x86_64__)
    &activation_table_avx512,
    &activation_table_avx2,
#endif
    &activation_table_ref,
};

/* ---- families ---- */

#define LIST(list) list, (int)(sizeof(list) / sizeof(list)[0])
#define RANGE(table, member, kernel, count) \
    { offsetof(struct table, member), sizeof(struct kernel), count }
#define ONE_KERNEL  \
    {               \
        { 0, 0, 1 } \
    }

static const struct kernel_family quant_family = {
    LIST(quant_list),
    {RANGE(quant_table, quantize, quant_kernel, OPAQ_FORMAT_COUNT),
     RANGE(quant_table, dequantize, quant_kernel, OPAQ_FORMAT_COUNT),
     RANGE(quant_table, both, both_kernel, OPAQ_FORMAT_COUNT), RANGE(quant_table, amax, amax_kernel, 1),
     RANGE(quant_table, decode_row, decode_row_kernel, 1)}};
static const struct kernel_family packed_family = {
    LIST(packed_list),
    {RANGE(packed_table, kernel, packed_kernel, PACKED_FORMAT_COUNT *PACKED_PRECISION_COUNT)}};
static const struct kernel_family gemm_family = {LIST(gemm_list), ONE_KERNEL};
static const struct kernel_family pairs_family = {LIST(pairs_list), ONE_KERNEL};
static const struct kernel_family plain_family = {LIST(plain_list), ONE_KERNEL};
static const struct kernel_family prepare_family = {LIST(prepare_list), ONE_KERNEL};
static const struct kernel_family activation_family = {LIST(activation_list), ONE_KERNEL};

static const struct kernel_family *const families[] = {&quant_family,     &packed_family, &gemm_family,
                                                       &pairs_family,     &plain_family,  &prepare_family,
                                                       &activation_family};
enum { FAMILY_COUNT = sizeof families / sizeof families[0] };

/* ---- kernels by index ---- */

/* Kernel `*left` of a table, not counting empty entries; if it has fewer, returns NULL and subtracts their
 * number. */
static const char *kernel_of_table(const struct kernel_family *family, const void *table, int *left) {
    for (int r = 0; r < KERNEL_RANGE_LIMIT; ++r) {
        for (int k = 0; k < family->range[r].count; ++k) {
            const char *name =
                kernel_name_at(table, family->range[r].offset + (size_t)k * family->range[r].size);
            if (name != NULL && (*left)-- == 0) {
                return name;
            }
        }
    }
    return NULL;
}

const char *cpu_kernel_at(int index, bool *can_run) {
    *can_run = false;
    for (int f = 0; index >= 0 && f < FAMILY_COUNT; ++f) {
        for (int t = 0; t < families[f]->table_count; ++t) {
            const struct kernel_head *head = kernel_family_at(families[f], t);
            const char *name = kernel_of_table(families[f], head, &index);
            if (name != NULL) {
                *can_run = (head->features & ~opaq_cpu_features()) == 0;
                return name;
            }
        }
    }
    return NULL;
}

/* ---- quantizing ---- */

const struct quant_table *const *quant_tables(int *count) {
    *count = quant_family.table_count;
    return quant_list;
}

const struct quant_kernel *quantize_kernel(enum opaq_format format) {
    return kernel_family_choose(&quant_family, quant_kernel_offset(quantize, format));
}

const struct quant_kernel *dequantize_kernel(enum opaq_format format) {
    return kernel_family_choose(&quant_family, quant_kernel_offset(dequantize, format));
}

const struct both_kernel *both_kernel(enum opaq_format format) {
    return kernel_family_choose(&quant_family, quant_kernel_offset(both, format));
}

const struct amax_kernel *amax_kernel(void) {
    return kernel_family_choose(&quant_family, offsetof(struct quant_table, amax));
}

const struct decode_row_kernel *decode_row_kernel(void) {
    return kernel_family_choose(&quant_family, offsetof(struct quant_table, decode_row));
}

const struct quant_kernel *quantize_kernel_for(const struct quant_copy *copy, enum opaq_format format) {
    const struct quant_kernel *kernel = quantize_kernel(format);
    return quant_copy_is_narrow(copy) && !kernel_is_forced(kernel->name) ? &quant_table_ref.quantize[format]
                                                                         : kernel;
}

const struct quant_kernel *dequantize_kernel_for(const struct quant_copy *copy, enum opaq_format format) {
    const struct quant_kernel *kernel = dequantize_kernel(format);
    return quant_copy_is_narrow(copy) && !kernel_is_forced(kernel->name) ? &quant_table_ref.dequantize[format]
                                                                         : kernel;
}

bool quant_is_reference(const struct quant_kernel *kernel) {
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        if (kernel == &quant_table_ref.quantize[format] || kernel == &quant_table_ref.dequantize[format]) {
            return true;
        }
    }
    return false;
}

/* ---- products ---- */

const struct packed_table *const *packed_tables(int *count) {
    *count = packed_family.table_count;
    return packed_list;
}

const struct packed_kernel *packed_kernel(enum packed_format format, enum packed_precision precision) {
    const size_t index = (size_t)format * PACKED_PRECISION_COUNT + (size_t)precision;
    const struct packed_kernel *kernel = kernel_family_choose(
        &packed_family, offsetof(struct packed_table, kernel) + index * sizeof(struct packed_kernel));
    return kernel->run == NULL ? NULL : kernel; /* not every format has a kernel for every precision */
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

const struct gemm_table *const *gemm_tables(int *count) {
    *count = gemm_family.table_count;
    return gemm_list;
}

const struct gemm_table *gemm_table_best(void) { return kernel_family_choose(&gemm_family, 0); }

const struct gemm_table *const *gemm_pairs_tables(int *count) {
    *count = pairs_family.table_count;
    return pairs_list;
}

const struct gemm_table *gemm_pairs_best(void) {
    const struct gemm_table *const table = kernel_family_choose(&pairs_family, 0);
    return table != &gemm_pairs_ref || kernel_is_forced(table->name) ? table : NULL;
}

const char *gemm_kernel_name(void) { return gemm_table_best()->name; }

const struct packed_prepare *const *packed_prepare_tables(int *count) {
    *count = prepare_family.table_count;
    return prepare_list;
}

const struct packed_prepare *packed_prepare_best(void) { return kernel_family_choose(&prepare_family, 0); }

/* ---- rows ---- */

const struct plain_table *const *plain_tables(int *count) {
    *count = plain_family.table_count;
    return plain_list;
}

const struct plain_table *plain_table_best(void) { return kernel_family_choose(&plain_family, 0); }

const struct activation_table *const *activation_tables(int *count) {
    *count = activation_family.table_count;
    return activation_list;
}

const struct activation_table *activation_table_best(void) {
    return kernel_family_choose(&activation_family, 0);
}
