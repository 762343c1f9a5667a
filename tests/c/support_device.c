/* support_device.c: the device that tests use in the role of CUDA. */
#define _DEFAULT_SOURCE /* MAP_ANONYMOUS */
#include "support_device.h"

#include <dlfcn.h>
#include <pthread.h>
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
static emulation_capture_function *emulation_capture_here;

static uint64_t hash_of_results; /* FNV-1a; 0 if there are none */

void test_device_hash(const void *results, size_t bytes) {
    uint64_t hash = hash_of_results == 0 ? 0xCBF29CE484222325u : hash_of_results;
    for (size_t i = 0; i < bytes; ++i) {
        hash = (hash ^ ((const uint8_t *)results)[i]) * 0x100000001B3u;
    }
    hash_of_results = hash;
}

static void print_results(void) {
    if (hash_of_results != 0) {
        printf("  results have the hash %016llx\n", (unsigned long long)hash_of_results);
    }
    if (emulation_kernels_here != NULL) {
        printf("  %ld kernels ran on the emulated GPU\n", emulation_kernels_here());
    }
}

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
    (void)atexit(print_results);
    if (strcmp(name, "cuda") == 0) {
        return TEST_DEVICE_CUDA;
    }
    emulation_hooks_function *set_hooks;
    symbol = symbol_of(file, "emulation_set_hooks");
    memcpy(&set_hooks, &symbol, sizeof set_hooks);
    set_hooks(enter, leave);
    symbol = symbol_of(file, "emulation_kernels");
    memcpy(&emulation_kernels_here, &symbol, sizeof emulation_kernels_here);
    symbol = symbol_of(file, "emulation_capture");
    memcpy(&emulation_capture_here, &symbol, sizeof emulation_capture_here);
    return TEST_DEVICE_EMULATED;
}

/* ---- memory ---- */

static const struct opaq_device first_gpu = {OPAQ_DEVICE_CUDA, 0};

void *test_device_allocate(enum test_device device, const struct backend *table, size_t bytes) {
    struct opaq_error error = {.text = ""};
    void *memory = NULL;
    if (device != TEST_DEVICE_CUDA) {
        memory = mmap(NULL, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS, -1, 0);
        if (memory == MAP_FAILED) {
            stop("mmap", "no memory");
        }
    } else if (table->allocate(first_gpu, bytes, &memory, &error) != OPAQ_OK) {
        stop("memory of the GPU", error.text);
    }
    return memory;
}

void test_device_free(enum test_device device, const struct backend *table, void *memory, size_t bytes) {
    if (device == TEST_DEVICE_CUDA) {
        table->release(first_gpu, memory);
    } else {
        (void)munmap(memory, bytes);
    }
}

/* The driver's functions, looked up because tests are built without CUDA. The context is that of the thread's last
 * allocation. */
static struct {
    int (*synchronize)(void);
    int (*write)(uintptr_t to, const void *from, size_t bytes);
    int (*read)(void *to, uintptr_t from, size_t bytes);
    int (*describe)(int error, const char **text);
    int (*stream_create)(void **stream, unsigned flags);
    int (*stream_destroy)(void *stream);
    int (*capture)(void *stream, int mode);
    int (*capture_end)(void *stream, void **graph);
    int (*instantiate)(void **executable, void *graph, unsigned long long flags);
    int (*launch)(void *executable, void *stream);
    int (*executable_destroy)(void *executable);
    int (*graph_destroy)(void *graph);
} driver;

static void driver_symbol(const char *name, void *function) {
    void *const symbol = symbol_of("libcuda.so.1", name);
    memcpy(function, &symbol, sizeof symbol);
}

static void open_driver(void) {
    driver_symbol("cuCtxSynchronize", &driver.synchronize);
    driver_symbol("cuMemcpyHtoD_v2", &driver.write);
    driver_symbol("cuMemcpyDtoH_v2", &driver.read);
    driver_symbol("cuGetErrorString", &driver.describe);
    driver_symbol("cuStreamCreate", &driver.stream_create);
    driver_symbol("cuStreamDestroy_v2", &driver.stream_destroy);
    driver_symbol("cuStreamBeginCapture_v2", &driver.capture);
    driver_symbol("cuStreamEndCapture", &driver.capture_end);
    driver_symbol("cuGraphInstantiateWithFlags", &driver.instantiate);
    driver_symbol("cuGraphLaunch", &driver.launch);
    driver_symbol("cuGraphExecDestroy", &driver.executable_destroy);
    driver_symbol("cuGraphDestroy", &driver.graph_destroy);
}

static void check_driver(const char *name, int result) {
    const char *text = NULL;
    if (result != 0) {
        (void)driver.describe(result, &text);
        printf("  %s: CUDA error %d (%s)\n", name, result, text == NULL ? "unknown" : text);
        exit(1);
    }
}

/* Waits first, to distinguish a failed kernel from a failed copy. */
static void need_driver(void) {
    static pthread_once_t once = PTHREAD_ONCE_INIT;
    (void)pthread_once(&once, open_driver);
    check_driver("kernels before a copy", driver.synchronize());
}

void test_device_write(void *to, const void *from, size_t bytes) {
    need_driver();
    if (bytes > 0) {
        check_driver("cuMemcpyHtoD", driver.write((uintptr_t)to, from, bytes));
    }
}

void test_device_read(void *to, const void *from, size_t bytes) {
    need_driver();
    if (bytes > 0) {
        check_driver("cuMemcpyDtoH", driver.read(to, (uintptr_t)from, bytes));
    }
}

/* ---- capture ---- */

void *test_device_begin(enum test_device device) {
    const char *const captures = getenv("OPAQ_TEST_CAPTURE");
    const unsigned not_blocking = 1;
    const int thread_local_mode = 1; /* other threads of a test allocate meanwhile */
    void *stream = NULL;
    if (device == TEST_DEVICE_EMULATED) {
        emulation_capture_here(1);
    } else if (device == TEST_DEVICE_CUDA && captures != NULL && strcmp(captures, "1") == 0) {
        need_driver();
        check_driver("cuStreamCreate", driver.stream_create(&stream, not_blocking));
        check_driver("cuStreamBeginCapture", driver.capture(stream, thread_local_mode));
    }
    return stream;
}

void test_device_end(enum test_device device, void *stream) {
    void *graph = NULL;
    void *executable = NULL;
    if (device == TEST_DEVICE_EMULATED) {
        emulation_capture_here(0);
    } else if (stream != NULL) {
        check_driver("cuStreamEndCapture", driver.capture_end(stream, &graph));
        check_driver("cuGraphInstantiate", driver.instantiate(&executable, graph, 0));
        check_driver("cuGraphLaunch", driver.launch(executable, stream));
        check_driver("a captured call", driver.synchronize());
        check_driver("cuGraphExecDestroy", driver.executable_destroy(executable));
        check_driver("cuGraphDestroy", driver.graph_destroy(graph));
        check_driver("cuStreamDestroy", driver.stream_destroy(stream));
    }
}
