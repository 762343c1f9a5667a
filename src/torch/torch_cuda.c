/* torch/torch_cuda.c: PyTorch's current stream and device. What only a CUDA build of PyTorch has is looked up at run
 * time, so this file loads everywhere. */
#define _GNU_SOURCE /* RTLD_NOLOAD */
#include "torch/torch_cuda.h"

#include <dlfcn.h>
#include <stdatomic.h>
#include <string.h>

#include "opaq/status.h"
#include "torch/torch_shim.h"

/* Looks the function up unless that has succeeded before: PyTorch keeps its library open. */
void *torch_cuda_symbol(const char *name, torch_cuda_cache *cache) {
    void *symbol = atomic_load_explicit(cache, memory_order_relaxed);
    if (symbol == NULL) {
        void *const library = dlopen("libtorch_cuda.so", RTLD_LAZY | RTLD_NOLOAD);
        if (library == NULL) {
            return NULL;
        }
        symbol = dlsym(library, name);
        (void)dlclose(library);
        atomic_store_explicit(cache, symbol, memory_order_relaxed);
    }
    return symbol;
}

/* From 2.13 on for any device; before, by a function of libtorch_cuda.so. */
static int32_t current_stream(int32_t index, void **stream) {
    struct torch_stream *handle;
    if (torch_stream_native_handle != NULL) {
        if (aoti_torch_get_current_stream(index, &handle) != 0) {
            return 1;
        }
        const int32_t failed = torch_stream_native_handle(handle, stream);
        (void)aoti_torch_delete_stream(handle);
        return failed;
    }
    int32_t (*get)(int32_t index, void **stream);
    static torch_cuda_cache cache;
    void *const symbol = torch_cuda_symbol("aoti_torch_get_current_cuda_stream", &cache);
    if (symbol == NULL) {
        return 1;
    }
    memcpy(&get, &symbol, sizeof get);
    return get(index, stream);
}

enum opaq_status torch_cuda_begin(struct opaq_device device, struct torch_guard **guard, void **stream,
                                  struct opaq_error *error) {
    *guard = NULL;
    if (aoti_torch_create_device_guard(device.index, guard) != 0) {
        *guard = NULL;
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "PyTorch could not make cuda:%d the current device",
                         device.index);
    }
    if (current_stream(device.index, stream) != 0) {
        torch_cuda_end(*guard);
        *guard = NULL;
        return opaq_fail(error, OPAQ_ERROR_SYSTEM, "PyTorch gave no current stream of cuda:%d", device.index);
    }
    return OPAQ_OK;
}

void torch_cuda_end(struct torch_guard *guard) {
    if (guard != NULL) {
        (void)aoti_torch_delete_device_guard(guard);
    }
}
