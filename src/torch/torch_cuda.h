/* torch/torch_cuda.h: PyTorch's current stream and device. Depends on opaq/execution.h. */
#ifndef OPAQ_TORCH_TORCH_CUDA_H
#define OPAQ_TORCH_TORCH_CUDA_H

#include "opaq/execution.h"

struct torch_guard;

/* Makes a GPU current until torch_cuda_end, and returns its current stream. `guard` is NULL after a failure. */
enum opaq_status torch_cuda_begin(struct opaq_device device, struct torch_guard **guard, void **stream,
                                  struct opaq_error *error);
void torch_cuda_end(struct torch_guard *guard);

/* A function of libtorch_cuda.so, which a build of PyTorch for the CPU does not have; NULL there. It is looked up once:
 * `cache` is a static variable of the caller for this name. */
typedef _Atomic(void *) torch_cuda_cache;
void *torch_cuda_symbol(const char *name, torch_cuda_cache *cache);

#endif
