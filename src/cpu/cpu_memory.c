/* cpu/cpu_memory.c: allocation, filling and copying of CPU memory. */
#include <stdlib.h>
#include <string.h>

#include "cpu/cpu_functions.h"
#include "format/proto_layout.h"

enum opaq_status cpu_allocate(struct opaq_device device, size_t bytes, void **memory,
                              struct opaq_error *error) {
    (void)device;
    return posix_memalign(memory, 64, bytes == 0 ? 64 : bytes) == 0
               ? OPAQ_OK
               : opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory for %zu bytes", bytes);
}

void cpu_release(struct opaq_device device, void *memory) {
    (void)device;
    free(memory);
}

enum opaq_status cpu_zero(void *memory, size_t bytes, const struct opaq_execution *execution,
                          struct opaq_error *error) {
    (void)execution;
    (void)error;
    if (bytes > 0) {
        memset(memory, 0, bytes);
    }
    return OPAQ_OK;
}

/* Copies the elements from dimension `dimension` on, the last dimension innermost. */
static void copy_strided(const struct opaq_tensor *from, int dimension, const char *source, size_t bytes,
                         char **target) {
    if (dimension == from->rank) {
        memcpy(*target, source, bytes);
        *target += bytes;
        return;
    }
    const int64_t size = from->shape[dimension];
    if (dimension == from->rank - 1 && from->strides[dimension] == 1 && size > 0) {
        memcpy(*target, source, (size_t)size * bytes);
        *target += (size_t)size * bytes;
        return;
    }
    for (int64_t i = 0; i < size; ++i) {
        copy_strided(from, dimension + 1, source + (size_t)(i * from->strides[dimension]) * bytes, bytes,
                     target);
    }
}

enum opaq_status cpu_copy(const struct opaq_tensor *from, void *to, const struct opaq_execution *execution,
                          struct opaq_error *error) {
    char *target = to;
    (void)execution;
    (void)error;
    copy_strided(from, 0, from->data, (size_t)dtype_bytes(from->dtype), &target);
    return OPAQ_OK;
}

enum opaq_status cpu_fill(const float *value, int64_t count, float *to, const struct opaq_execution *execution,
                          struct opaq_error *error) {
    (void)execution;
    (void)error;
    for (int64_t i = 0; i < count; ++i) {
        to[i] = *value;
    }
    return OPAQ_OK;
}
