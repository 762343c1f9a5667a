/* runner/bound_weights.h: an operator's weights as a runner keeps them. Depends on op. */
#ifndef OPAQ_RUNNER_BOUND_WEIGHTS_H
#define OPAQ_RUNNER_BOUND_WEIGHTS_H

#include "op/linear/linear_parts.h"

enum { WEIGHT_LIMIT = 2, BOUND_TEXT_BYTES = 1024 };

/* One list argument of the operator, `name`; its shape is the argument `name`_shape. */
struct bound_weight {
    const char *name;
    const struct opaq_value *list;
    const struct opaq_value *shape;
    struct opaq_form given; /* how it comes */
    struct opaq_form here;  /* plain, or how the plan quantizes it: each matrix of a stack by itself */
    struct opaq_form kept;  /* how the runner keeps it: the rowwise copy, all that a product reads */
};

/* The weights of a call, and the plan of one whose weights are kept so. */
struct bound_layer {
    int argument; /* which one is the plan */
    int weight_count;
    struct bound_weight weight[WEIGHT_LIMIT];
    char text[BOUND_TEXT_BYTES];
    size_t length;
};

/* Of a call that was checked. The error names no operation. */
enum opaq_status bound_layer_make(const struct opaq_op *op, const struct opaq_value *values,
                                  struct bound_layer *layer, struct opaq_error *error);

/* A contiguous copy of any strided tensor, in memory of the work's arena. While measuring nothing is written. */
enum opaq_status bound_tensor_copy(struct work *work, const struct opaq_tensor *from, struct opaq_tensor *to,
                                   struct opaq_error *error);

/* A weight's tensors as they are kept; `tensors` has room for OPAQ_BUFFER_LIMIT. How many. */
enum opaq_status bound_weight_copy(struct work *work, const struct bound_weight *weight,
                                   struct opaq_tensor *tensors, int *count, struct opaq_error *error);

/* "nvfp4+2d", "bf16" */
enum opaq_status bound_weight_format(const struct bound_weight *weight, char *text, size_t capacity,
                                     struct opaq_error *error);

#endif
