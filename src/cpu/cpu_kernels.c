/* cpu/cpu_kernels.c: all CPU kernels by name. */
#include "cpu/cpu_functions.h"
#include "cpu/gemm/gemm_table.h"
#include "cpu/gemm/packed.h"
#include "cpu/gemm/packed_prepare.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/moe/activation_table.h"
#include "cpu/quant/quant_table.h"
#include "opaq/cpu.h"

/* Counts down to the kernel that is looked for. */
struct search {
    int left;
    const char *name;
    uint32_t features;
};

static void pass(struct search *search, const char *name, uint32_t features) {
    if (name != NULL && search->left-- == 0) {
        search->name = name;
        search->features = features;
    }
}

static void pass_quant(struct search *search) {
    int count;
    const struct quant_table *const *tables = quant_tables(&count);
    for (int t = 0; t < count; ++t) {
        for (int f = 0; f < OPAQ_FORMAT_COUNT; ++f) {
            pass(search, tables[t]->quantize[f].name, tables[t]->features);
            pass(search, tables[t]->dequantize[f].name, tables[t]->features);
            pass(search, tables[t]->both[f].name, tables[t]->features);
        }
        pass(search, tables[t]->amax.name, tables[t]->features);
        pass(search, tables[t]->decode_row.name, tables[t]->features);
    }
}

static void pass_packed(struct search *search) {
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    for (int t = 0; t < count; ++t) {
        for (int k = 0; k < PACKED_FORMAT_COUNT * PACKED_PRECISION_COUNT; ++k) {
            const struct packed_kernel *kernel =
                &tables[t]->kernel[k / PACKED_PRECISION_COUNT][k % PACKED_PRECISION_COUNT];
            pass(search, kernel->name, tables[t]->features);
        }
    }
}

static void pass_others(struct search *search) {
    int count;
    const struct gemm_table *const *products = gemm_tables(&count);
    for (int t = 0; t < count; ++t) {
        pass(search, products[t]->name, products[t]->features);
    }
    const struct plain_table *const *conversions = plain_tables(&count);
    for (int t = 0; t < count; ++t) {
        pass(search, conversions[t]->name, conversions[t]->features);
    }
    const struct packed_prepare *const *preparations = packed_prepare_tables(&count);
    for (int t = 0; t < count; ++t) {
        pass(search, preparations[t]->name, preparations[t]->features);
    }
    const struct activation_table *const *activations = activation_tables(&count);
    for (int t = 0; t < count; ++t) {
        pass(search, activations[t]->name, activations[t]->features);
    }
}

const char *cpu_kernel_at(int index, bool *can_run) {
    struct search search = {index, NULL, 0};
    if (index >= 0) {
        pass_quant(&search);
        pass_packed(&search);
        pass_others(&search);
    }
    *can_run = search.name != NULL && (search.features & ~opaq_cpu_features()) == 0;
    return search.name;
}
