/* torch/torch_scratch.c: scratch memory of calls, from PyTorch's allocator.
 *
 * On the CPU each thread keeps its last call's memory for the next one. The C library returns large blocks to
 * the system at once, which maps new ones page by page: for a mixture of experts with a few tokens that took a fifth
 * of the call's time. */
#include "torch/torch_scratch.h"

#include <pthread.h>
#include <stdbool.h>

#include "torch/torch_stack.h"

enum { KEPT_LIMIT = 64 << 20 }; /* bytes per thread; larger memory is not kept */

static _Thread_local struct torch_scratch kept;
static pthread_key_t at_exit_of_thread;
static bool keeps;

static void forget(void *scratch) {
    struct torch_scratch *mine = scratch;
    if (mine->handle != 0) {
        torch_tensor_free(mine->handle);
    }
    mine->handle = 0;
}

__attribute__((constructor)) static void begin(void) {
    keeps = pthread_key_create(&at_exit_of_thread, forget) == 0;
}

enum opaq_status torch_scratch_take(struct opaq_device device, size_t bytes, struct torch_scratch *scratch,
                                    struct opaq_error *error) {
    const bool is_cpu = device.type == OPAQ_DEVICE_CPU;
    if (is_cpu && kept.handle != 0 && bytes <= (size_t)kept.tensor.shape[0]) {
        *scratch = kept;
        kept.handle = 0; /* a nested call allocates its own */
        return OPAQ_OK;
    }
    if (is_cpu) {
        forget(&kept);
    }
    *scratch = (struct torch_scratch){
        .tensor = {
            .dtype = OPAQ_DTYPE_U8, .rank = 1, .shape = {(int64_t)bytes}, .strides = {1}, .device = device}};
    return torch_tensor_allocate(&scratch->tensor, &scratch->handle, error);
}

void torch_scratch_give(struct torch_scratch *scratch) {
    const bool is_kept = keeps && scratch->tensor.device.type == OPAQ_DEVICE_CPU && kept.handle == 0 &&
                         scratch->tensor.shape[0] <= KEPT_LIMIT &&
                         pthread_setspecific(at_exit_of_thread, &kept) == 0;
    if (is_kept) {
        kept = *scratch;
    } else {
        forget(scratch);
    }
    scratch->handle = 0;
}
