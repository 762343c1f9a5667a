/* torch/torch_scratch.h: scratch memory of calls, from PyTorch's allocator. Depends on opaq/op.h. */
#ifndef OPAQ_TORCH_TORCH_SCRATCH_H
#define OPAQ_TORCH_TORCH_SCRATCH_H

#include "opaq/op.h"

/* A tensor of bytes. */
struct torch_scratch {
    struct opaq_tensor tensor;
    uint64_t handle; /* 0: none */
};

/* At least `bytes` bytes on a device: the memory of an earlier call of this thread, or newly allocated. */
enum opaq_status torch_scratch_take(struct opaq_device device, size_t bytes, struct torch_scratch *scratch,
                                    struct opaq_error *error);

/* Frees the memory, or keeps it for the thread's next call. */
void torch_scratch_give(struct torch_scratch *scratch);

#endif
