/* op/table/kernel_list.c: all kernels by name, and forcing some. */
#include "op/table/kernel_list.h"

#include <stdatomic.h>
#include <string.h>

#include "base/forced_kernels.h"
#include "cpu/gemm/gemm_table.h"
#include "cpu/gemm/packed.h"
#include "cpu/gemm/packed_prepare.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/moe/activation_table.h"
#include "opaq/cpu.h"
#include "cpu/quant/quant_table.h"

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

const char *opaq_kernel_at(int index, int *can_run) {
    struct search search = {index, NULL, 0};
    if (index >= 0) {
        pass_quant(&search);
        pass_packed(&search);
        pass_others(&search);
    }
    if (can_run != NULL) {
        *can_run = search.name != NULL && (search.features & ~opaq_cpu_features()) == 0;
    }
    return search.name;
}

static enum opaq_status check_name(const char *operation, const char *name, size_t length,
                                   struct opaq_error *error) {
    int can_run;
    int index = 0;
    for (const char *one = opaq_kernel_at(0, &can_run); one != NULL; one = opaq_kernel_at(++index, &can_run)) {
        if (strlen(one) == length && memcmp(one, name, length) == 0) {
            return can_run
                       ? OPAQ_OK
                       : opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                                   "%s: this processor cannot run the kernel \"%s\", or OPAQ_CPU forbids it",
                                   operation, one);
        }
    }
    return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                     "%s: there is no kernel \"%.*s\", expected one of the %d names of opaq_kernel_at such as "
                     "\"packed_nvfp4_fast_avx2\" or \"gemm_ref\", or several with commas between them",
                     operation, (int)(length < 80 ? length : 80), name, index);
}

static enum opaq_status check_names(const char *operation, const char *names, struct opaq_error *error) {
    enum opaq_status status = OPAQ_OK;
    size_t length;
    for (const char *one = kernel_name_next(names, &length, &names); status == OPAQ_OK && one != NULL;
         one = kernel_name_next(names, &length, &names)) {
        status = check_name(operation, one, length, error);
    }
    return status;
}

enum opaq_status opaq_kernel_force(const char *names, struct opaq_error *error) {
    names = names == NULL ? "" : names;
    enum opaq_status status = opaq_cpu_check(error);
    if (status == OPAQ_OK) {
        status = check_names("kernel_force", names, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    return forced_kernels_set(names) ? OPAQ_OK
                                     : opaq_fail(error, OPAQ_ERROR_MEMORY,
                                                 "kernel_force: no memory for %zu bytes", strlen(names) + 1);
}

const char *opaq_kernel_forced(void) { return forced_kernels(); }

enum opaq_status kernel_list_check(struct opaq_error *error) {
    static _Atomic(const char *) checked; /* the list that was found right */
    const char *names = forced_kernels();
    if (atomic_load_explicit(&checked, memory_order_relaxed) == names) {
        return OPAQ_OK;
    }
    enum opaq_status status = opaq_cpu_check(error);
    if (status == OPAQ_OK) {
        status = check_names("OPAQ_KERNEL", names, error);
    }
    if (status == OPAQ_OK) {
        atomic_store_explicit(&checked, names, memory_order_relaxed);
    }
    return status;
}
