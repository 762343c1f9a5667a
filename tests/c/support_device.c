/* support_device.c: the device that tests use in the role of CUDA. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "support_device.h"

#include <dlfcn.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>

#include "../cuda/emulation.h"
#include "backend/backend_library.h"

static void stop(const char *what, const char *why) {
    printf("  %s: %s\n", what, why);
    exit(1);
}

static void *symbol_of(const char *file, const char *name) {
    void *const library = dlopen(file, RTLD_NOW | RTLD_LOCAL);
    void *const symbol = library == NULL ? NULL : dlsym(library, name);
    if (symbol == NULL) {
        stop(name, dlerror());
    }
    return symbol;
}

static emulation_kernels_function *emulation_kernels_here;

static void print_kernels(void) { printf("  %ld kernels ran on the emulated GPU\n", emulation_kernels_here()); }

enum test_device test_device_open(void (*enter)(void), void (*leave)(void), const struct backend **table) {
    const char *name = getenv("OPAQ_TEST_DEVICE");
    const char *file = getenv("OPAQ_TEST_CUDA_LIBRARY");
    struct opaq_error error;
    backend_open_function *open;
    *table = &cpu_backend;
    if (name == NULL || name[0] == '\0') {
        return TEST_DEVICE_CPU;
    }
    if (strcmp(name, "emulated") != 0 && strcmp(name, "cuda") != 0) {
        stop("OPAQ_TEST_DEVICE", "expected emulated or cuda");
    }
    void *symbol = symbol_of(file, "opaq_cuda_open");
    memcpy(&open, &symbol, sizeof open);
    if (open(opaq_version(), sizeof(struct backend), table, &error) != OPAQ_OK) {
        stop(name, error.text);
    }
    if (strcmp(name, "cuda") == 0) {
        return TEST_DEVICE_CUDA;
    }
    emulation_hooks_function *set_hooks;
    symbol = symbol_of(file, "emulation_set_hooks");
    memcpy(&set_hooks, &symbol, sizeof set_hooks);
    set_hooks(enter, leave);
    symbol = symbol_of(file, "emulation_kernels");
    memcpy(&emulation_kernels_here, &symbol, sizeof emulation_kernels_here);
    (void)atexit(print_kernels);
    return TEST_DEVICE_EMULATED;
}

/* ---- functions of the driver, loaded at run time because tests are built without CUDA ---- */

static void check_driver(const char *name, int result) {
    if (result != 0) {
        printf("  %s: CUDA error %d\n", name, result);
        exit(1);
    }
}

static void *driver(const char *name) { return symbol_of("libcuda.so.1", name); }

void *test_device_allocate(enum test_device device, const struct backend *table, size_t bytes) {
    if (device != TEST_DEVICE_CUDA) {
        void *const memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            stop("mmap", "no memory");
        }
        return memory;
    }
    int (*allocate)(uintptr_t * memory, size_t bytes, unsigned flags);
    void *const symbol = driver("cuMemAllocManaged");
    const unsigned attach_global = 1;
    uintptr_t address = 0;
    void *first = NULL;
    memcpy(&allocate, &symbol, sizeof allocate);
    /* the runtime's first allocation creates this thread's context */
    if (table->allocate((struct opaq_device){OPAQ_DEVICE_CUDA, 0}, 64, &first, NULL) != OPAQ_OK) {
        stop("allocate", "no memory on the GPU");
    }
    table->release((struct opaq_device){OPAQ_DEVICE_CUDA, 0}, first);
    check_driver("cuMemAllocManaged", allocate(&address, bytes, attach_global));
    memset((void *)address, 0, bytes);
    return (void *)address;
}

void test_device_free(enum test_device device, void *memory, size_t bytes) {
    if (device != TEST_DEVICE_CUDA) {
        (void)munmap(memory, bytes);
        return;
    }
    int (*release)(uintptr_t memory);
    void *const symbol = driver("cuMemFree_v2");
    memcpy(&release, &symbol, sizeof release);
    check_driver("cuMemFree", release((uintptr_t)memory));
}

void test_device_wait(enum test_device device) {
    if (device == TEST_DEVICE_CUDA) {
        int (*wait)(void);
        void *const symbol = driver("cuCtxSynchronize");
        memcpy(&wait, &symbol, sizeof wait);
        check_driver("cuCtxSynchronize", wait());
    }
}
