/* op/table/kernel_list.c: kernels by name, and forcing some. */
#include "op/table/tensor_check.h"

#include <stdatomic.h>
#include <string.h>

#include "backend/backend.h"
#include "base/forced_kernels.h"
#include "base/try.h"
#include "opaq/cpu.h"
#include "opaq/kernel.h"

/* The kernels of the CPU; other back ends do not list theirs. */
const char *opaq_kernel_at(int index, int *can_run) {
    const struct backend *backend;
    bool runs = false;
    const char *name = backend_of((struct opaq_device){OPAQ_DEVICE_CPU, 0}, &backend, NULL) == OPAQ_OK
                           ? backend->kernel_at(index, &runs)
                           : NULL;
    if (can_run != NULL) {
        *can_run = runs;
    }
    return name;
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
    size_t length;
    for (const char *one = kernel_name_next(names, &length, &names); one != NULL;
         one = kernel_name_next(names, &length, &names)) {
        TRY(check_name(operation, one, length, error));
    }
    return OPAQ_OK;
}

enum opaq_status opaq_kernel_force(const char *names, struct opaq_error *error) {
    names = names == NULL ? "" : names;
    TRY(opaq_cpu_check(error));
    TRY(check_names("kernel_force", names, error));
    return forced_kernels_set(names) ? OPAQ_OK
                                     : opaq_fail(error, OPAQ_ERROR_MEMORY,
                                                 "kernel_force: no memory for %zu bytes", strlen(names) + 1);
}

const char *opaq_kernel_forced(void) { return forced_kernels(); }

enum opaq_status kernel_list_check(struct opaq_error *error) {
    static _Atomic(const char *) checked; /* the list that was last checked successfully */
    const char *names = forced_kernels();
    if (atomic_load_explicit(&checked, memory_order_relaxed) == names) {
        return OPAQ_OK;
    }
    TRY(opaq_cpu_check(error));
    TRY(check_names("OPAQ_KERNEL", names, error));
    atomic_store_explicit(&checked, names, memory_order_relaxed);
    return OPAQ_OK;
}
