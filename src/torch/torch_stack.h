/* torch/torch_stack.h: converts an operator's stack to opaq values, and frees its handles. Depends on opaq/op.h. */
#ifndef OPAQ_TORCH_TORCH_STACK_H
#define OPAQ_TORCH_TORCH_STACK_H

#include <stdbool.h>

#include "opaq/op.h"

enum {
    STACK_LIST_LIMIT = 64, /* tensors in lists */
    STACK_TENSOR_LIMIT = STACK_LIST_LIMIT + OPAQ_OP_ARGUMENT_LIMIT,
    STACK_SIZE_LIMIT = 64
};

struct torch_list;

/* The arguments of one call, with room for what they point to. */
struct torch_arguments {
    struct opaq_value value[OPAQ_OP_ARGUMENT_LIMIT];
    int tensor_count;
    struct opaq_tensor tensor[STACK_TENSOR_LIMIT];
    int size_count;
    int64_t size[STACK_SIZE_LIMIT];
    bool tracks;     /* gradients are enabled */
    bool tracks_all; /* and a tensor of a runner's operator requires one, whose gradient may read all */
    struct torch_list *tracked; /* the tensors that require a gradient, or all; NULL if none requires one */
};

/* The index of the argument that is a runner's handle; -1 if there is none. */
int torch_runner_argument(const struct opaq_op *op);

/* Reads the stack, which keeps its handles. Tensors with strides that the library does not support (transposed,
 * expanded, with gaps) are replaced by contiguous copies. */
enum opaq_status torch_arguments_read(const struct opaq_op *op, uint64_t *stack, bool tracks,
                                      struct torch_arguments *arguments, struct opaq_error *error);

/* Frees every handle that the stack and the arguments hold. */
void torch_arguments_free(const struct opaq_op *op, uint64_t *stack, struct torch_arguments *arguments);

/* A new tensor like `like`; its handle, and its address in like->data. */
enum opaq_status torch_tensor_allocate(struct opaq_tensor *like, uint64_t *handle, struct opaq_error *error);

/* Random integers from PyTorch's default generator into a tensor that was allocated. */
enum opaq_status torch_tensor_randomize(const struct opaq_tensor *tensor, uint64_t handle,
                                        struct opaq_error *error);

void torch_tensor_free(uint64_t handle);

#endif
