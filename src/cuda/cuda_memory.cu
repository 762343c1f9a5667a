/* cuda/cuda_memory.cu: memory of a GPU. */
#include "cuda/cuda_functions.h"
#include "definition/sorted_rows.h"

enum opaq_status cuda_allocate(struct opaq_device device, size_t bytes, void **memory,
                               struct opaq_error *error) {
    struct device_state saved;
    TRY(device_enter(device, &saved, error));
    const cudaError_t result = cudaMalloc(memory, bytes == 0 ? 64 : bytes);
    device_leave(device, saved);
    return result == cudaSuccess ? OPAQ_OK
                                 : opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory for %zu bytes on cuda:%d: %s",
                                             bytes, device.index, cudaGetErrorString(result));
}

void cuda_release(struct opaq_device device, void *memory) {
    struct device_state saved;
    if (device_enter(device, &saved, NULL) == OPAQ_OK) {
        (void)cudaFree(memory);
        device_leave(device, saved);
    }
}

enum opaq_status cuda_zero(void *memory, size_t bytes, const struct opaq_execution *execution,
                           struct opaq_error *error) {
    return queue_set(memory, 0, bytes, execution, error);
}

struct copy_arguments {
    struct opaq_tensor from;
    void *to;
    int64_t count;
    int bytes; /* of an element */
};

static __global__ void copy_kernel(struct copy_arguments job) {
    for (int64_t i = thread_index(); i < job.count; i += thread_count()) {
        const int64_t offset = tensor_offset(&job.from, i);
        switch (job.bytes) {
        case 1:
            ((uint8_t *)job.to)[i] = ((const uint8_t *)job.from.data)[offset];
            break;
        case 2:
            ((uint16_t *)job.to)[i] = ((const uint16_t *)job.from.data)[offset];
            break;
        case 4:
            ((uint32_t *)job.to)[i] = ((const uint32_t *)job.from.data)[offset];
            break;
        default:
            ((uint64_t *)job.to)[i] = ((const uint64_t *)job.from.data)[offset];
        }
    }
}

static int dtype_bytes(int32_t dtype) {
    return dtype == OPAQ_DTYPE_U8                               ? 1
           : dtype == OPAQ_DTYPE_I64                            ? 8
           : dtype == OPAQ_DTYPE_F32 || dtype == OPAQ_DTYPE_I32 ? 4
                                                                : 2;
}

enum opaq_status cuda_copy(const struct opaq_tensor *from, void *to, const struct opaq_execution *execution,
                           struct opaq_error *error) {
    struct copy_arguments job = {*from, to, 1, dtype_bytes(from->dtype)};
    for (int i = 0; i < from->rank; ++i) {
        job.count *= from->shape[i];
    }
    return job.count == 0 ? OPAQ_OK
                          : launch("to copy a tensor", copy_kernel, blocks_for(job.count, THREADS), THREADS,
                                   job, execution, error);
}

struct fill_arguments {
    const float *value;
    float *to;
    int64_t count;
};

static __global__ void fill_kernel(struct fill_arguments job) {
    for (int64_t i = thread_index(); i < job.count; i += thread_count()) {
        job.to[i] = *job.value;
    }
}

enum opaq_status cuda_fill(const float *value, int64_t count, float *to, const struct opaq_execution *execution,
                           struct opaq_error *error) {
    const struct fill_arguments job = {value, to, count};
    return count == 0 ? OPAQ_OK
                      : launch("to fill memory", fill_kernel, blocks_for(count, THREADS), THREADS, job,
                               execution, error);
}
