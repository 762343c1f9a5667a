/* cuda/cuda_device.h: kernel launches, and helpers of kernels. Depends on backend, the CUDA runtime.
 *
 * Every kernel takes one struct by value and loops over its units of work, so that a grid of any size is
 * correct: the number of units may be known on the device only. Nothing here allocates or waits. */
#ifndef OPAQ_CUDA_CUDA_DEVICE_H
#define OPAQ_CUDA_CUDA_DEVICE_H

#include <cuda_runtime.h>

#include <assert.h>
#include <float.h>
#include <math.h>
#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

extern "C" {
#include "backend/backend.h"
#include "base/checked.h"
#include "base/try.h"
}

enum { THREADS = 256, WARP = 32 };

/* Blocks of a grid, at most. Few on an emulated GPU, so that every kernel loops there. */
#if defined(OPAQ_CUDA_EMULATION)
enum { BLOCK_LIMIT = 3 };
#else
enum { BLOCK_LIMIT = 4096 };
#endif

/* Fails with CUDA's error text if `result` is an error. */
enum opaq_status cuda_status(cudaError_t result, const char *what, struct opaq_error *error);

/* Whether the environment variable `name` has that value, or, if it is NULL, any but "". Read once and kept in `*state`, which
 * is 0 before; threads that read it at the same time get the same answer. */
bool variable_is(const char *name, const char *value, int *state);

/* What device_enter changes for the calling thread. */
struct device_state {
    int index;
    cudaStreamCaptureMode mode;
};

/* Makes a device current, and permits what the runtime may do at a kernel's first launch, such as loading its code, while a
 * CUDA graph is captured. device_leave restores both. */
enum opaq_status device_enter(struct opaq_device device, struct device_state *saved, struct opaq_error *error);
void device_leave(struct opaq_device device, struct device_state saved);

static inline cudaStream_t stream_of(const struct opaq_execution *execution) {
    return (cudaStream_t)execution->stream;
}

/* The blocks of a grid in which each does `per_block` units at a time. */
static inline int64_t blocks_for(int64_t units, int64_t per_block) {
    return max_int64(1, min_int64(ceil_div(units, per_block), BLOCK_LIMIT));
}

#if defined(__CUDACC__)
template <class Arguments>
cudaError_t launch_kernel(void (*kernel)(Arguments), int64_t blocks, int threads, const Arguments *arguments,
                          cudaStream_t stream, int memory = 0) {
    Arguments copy = *arguments;
    void *pointers[] = {&copy};
    return cudaLaunchKernel((const void *)kernel, dim3((unsigned)blocks), dim3((unsigned)threads), pointers,
                            (size_t)memory, stream);
}

template <class Arguments> cudaError_t allow_shared_memory(void (*kernel)(Arguments), int memory) {
    return cudaFuncSetAttribute((const void *)kernel, cudaFuncAttributeMaxDynamicSharedMemorySize, memory);
}
#else /* tests/cuda/cuda_runtime.h */
template <class Arguments>
cudaError_t launch_kernel(void (*kernel)(Arguments), int64_t blocks, int threads, const Arguments *arguments,
                          cudaStream_t stream, int memory = 0) {
    (void)stream;
    return emulation_launch(kernel, (unsigned)blocks, (unsigned)threads, *arguments, (unsigned)memory);
}

template <class Arguments> cudaError_t allow_shared_memory(void (*kernel)(Arguments), int memory) {
    (void)kernel;
    return emulation_allow_shared_memory((unsigned)memory);
}
#endif

template <class Arguments>
enum opaq_status launch(const char *name, void (*kernel)(Arguments), int64_t blocks, int threads,
                        const Arguments &arguments, const struct opaq_execution *execution,
                        struct opaq_error *error) {
    struct device_state saved;
    TRY(device_enter(execution->device, &saved, error));
    const cudaError_t result = launch_kernel(kernel, blocks, threads, &arguments, stream_of(execution));
    device_leave(execution->device, saved);
    return cuda_status(result, name, error);
}

/* Bytes of shared memory that a block can have on a device, at most; 48 KB if CUDA does not tell. */
int shared_memory_of(struct opaq_device device);

/* Devices, a bit each, on which a kernel is known to use more shared memory than the default of 48 KB. */
struct shared_limit {
    uint64_t devices;
};

/* Launches a kernel with `memory` bytes of dynamic shared memory. `limit` belongs to the kernel. */
template <class Arguments>
enum opaq_status launch_with_memory(const char *name, void (*kernel)(Arguments), int64_t blocks, int threads,
                                    int memory, struct shared_limit *limit, const Arguments &arguments,
                                    const struct opaq_execution *execution, struct opaq_error *error) {
    const int index = execution->device.index;
    const uint64_t bit = index < 64 ? (uint64_t)1 << index : 0;
    struct device_state saved;
    cudaError_t result = cudaSuccess;
    TRY(device_enter(execution->device, &saved, error));
    if ((__atomic_load_n(&limit->devices, __ATOMIC_RELAXED) & bit) == 0) {
        result = allow_shared_memory(kernel, memory);
        if (result == cudaSuccess) {
            __atomic_or_fetch(&limit->devices, bit, __ATOMIC_RELAXED);
        }
    }
    if (result == cudaSuccess) {
        result = launch_kernel(kernel, blocks, threads, &arguments, stream_of(execution), memory);
    }
    device_leave(execution->device, saved);
    return cuda_status(result, name, error);
}

/* Queues a memset, and a copy within the device. */
enum opaq_status queue_set(void *memory, int value, size_t bytes, const struct opaq_execution *execution,
                           struct opaq_error *error);
enum opaq_status queue_copy(const void *from, void *to, size_t bytes, const struct opaq_execution *execution,
                            struct opaq_error *error);

/* ---- rows of a group, whose number is in device memory ---- */

/* A matrix that has room for the rows of all groups holds those of one: of group `group` if `first` is not NULL. */
struct group_part {
    const int64_t *first; /* device memory: offsets of groups, struct row_groups */
    int64_t group;
};

OPAQ_DEVICE static inline int64_t rows_of_group(const struct group_part *group, int64_t otherwise) {
    return group->first == NULL ? otherwise : group->first[group->group + 1] - group->first[group->group];
}

OPAQ_DEVICE static inline int64_t first_of_group(const struct group_part *group) {
    return group->first == NULL ? 0 : group->first[group->group];
}

/* ---- units ---- */

#if defined(__CUDACC__) || defined(OPAQ_CUDA_EMULATION)
static inline __device__ int64_t thread_index(void) { return (int64_t)blockIdx.x * blockDim.x + threadIdx.x; }
static inline __device__ int64_t thread_count(void) { return (int64_t)gridDim.x * blockDim.x; }

/* The maximum of a warp's values, in every lane. All lanes must call it. */
static inline __device__ uint32_t warp_max(uint32_t value) {
    for (int step = WARP / 2; step > 0; step /= 2) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, value, step);
        value = other > value ? other : value;
    }
    return value;
}
#endif

#endif
