/* cuda/cuda_device.cu: the current device, errors, and memory operations without a kernel. */
#include <stdlib.h>

#include "cuda/cuda_device.h"

enum opaq_status cuda_status(cudaError_t result, const char *what, struct opaq_error *error) {
    return result == cudaSuccess
               ? OPAQ_OK
               : opaq_fail(error, result == cudaErrorMemoryAllocation ? OPAQ_ERROR_MEMORY : OPAQ_ERROR_SYSTEM,
                           "CUDA refused %s: %s", what, cudaGetErrorString(result));
}

enum opaq_status device_enter(struct opaq_device device, struct device_state *saved, struct opaq_error *error) {
    saved->mode = cudaStreamCaptureModeRelaxed;
    TRY(cuda_status(cudaGetDevice(&saved->index), "to name the current device", error));
    if (saved->index != device.index) {
        TRY(cuda_status(cudaSetDevice(device.index), "to change the device", error));
    }
    (void)cudaThreadExchangeStreamCaptureMode(&saved->mode);
    return OPAQ_OK;
}

void device_leave(struct opaq_device device, struct device_state saved) {
    (void)cudaThreadExchangeStreamCaptureMode(&saved.mode);
    if (saved.index != device.index) {
        (void)cudaSetDevice(saved.index);
    }
}

enum opaq_status queue_set(void *memory, int value, size_t bytes, const struct opaq_execution *execution,
                           struct opaq_error *error) {
    struct device_state saved;
    if (bytes == 0) {
        return OPAQ_OK;
    }
    TRY(device_enter(execution->device, &saved, error));
    const cudaError_t result = cudaMemsetAsync(memory, value, bytes, stream_of(execution));
    device_leave(execution->device, saved);
    return cuda_status(result, "to clear memory", error);
}

enum opaq_status queue_copy(const void *from, void *to, size_t bytes, const struct opaq_execution *execution,
                            struct opaq_error *error) {
    struct device_state saved;
    if (bytes == 0) {
        return OPAQ_OK;
    }
    TRY(device_enter(execution->device, &saved, error));
    const cudaError_t result = cudaMemcpyAsync(to, from, bytes, cudaMemcpyDeviceToDevice, stream_of(execution));
    device_leave(execution->device, saved);
    return cuda_status(result, "to copy memory", error);
}

int shared_memory_of(struct opaq_device device) {
    enum { DEFAULT = 48 << 10, KNOWN = 64 };
    static int known[KNOWN]; /* 0: not asked yet */
    int *const place = &known[device.index < KNOWN ? device.index : 0];
    int bytes = device.index < KNOWN ? __atomic_load_n(place, __ATOMIC_RELAXED) : 0;
    if (bytes == 0) {
        if (cudaDeviceGetAttribute(&bytes, cudaDevAttrMaxSharedMemoryPerBlockOptin, device.index) !=
            cudaSuccess) {
            return DEFAULT;
        }
        if (device.index < KNOWN) {
            __atomic_store_n(place, bytes, __ATOMIC_RELAXED);
        }
    }
    return bytes;
}

bool variable_is(const char *name, const char *value, int *state) {
    enum { UNKNOWN, NO, YES };
    int known = __atomic_load_n(state, __ATOMIC_RELAXED);
    if (known == UNKNOWN) {
        const char *const found = getenv(name);
        const bool is_set = found != NULL && found[0] != '\0';
        known = is_set && (value == NULL || strcmp(found, value) == 0) ? YES : NO;
        __atomic_store_n(state, known, __ATOMIC_RELAXED);
    }
    return known == YES;
}
