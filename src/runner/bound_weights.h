/* runner/bound_weights.h: converts an operator's weights to the form that a runner keeps. Depends on op. */
#ifndef OPAQ_RUNNER_BOUND_WEIGHTS_H
#define OPAQ_RUNNER_BOUND_WEIGHTS_H

#include "op/linear/linear_parts.h"

enum { WEIGHT_LIMIT = 2, BOUND_TEXT_BYTES = 1024 };

/* One list argument of the operator, `name`; its shape is the argument `name`_shape. */
struct bound_weight {
    const char *name;
    const struct opaq_value *list;
    const struct opaq_value *shape;
    struct opaq_form given; /* as given */
    struct opaq_form here;  /* plain, or how the plan quantizes it: each matrix of a stack separately */
    struct opaq_form kept;  /* as the runner keeps it: only the rowwise copy, which products read */
};

/* The weights of a call, and the plan for the kept forms. */
struct bound_layer {
    int argument; /* index of the plan argument */
    int weight_count;
    struct bound_weight weight[WEIGHT_LIMIT];
    char text[BOUND_TEXT_BYTES];
    size_t length;
};

/* For a checked call. Error texts do not name the operation. */
enum opaq_status bound_layer_make(const struct opaq_op *op, const struct opaq_value *values,
                                  struct bound_layer *layer, struct opaq_error *error);

/* A contiguous copy of any strided tensor, in memory of the work's arena. While measuring nothing is written. */
enum opaq_status bound_tensor_copy(struct work *work, const struct opaq_tensor *from, struct opaq_tensor *to,
                                   struct opaq_error *error);

/* Writes a weight's tensors in their kept form; `tensors` holds OPAQ_BUFFER_LIMIT. Returns their number. */
enum opaq_status bound_weight_copy(struct work *work, const struct bound_weight *weight,
                                   struct opaq_tensor *tensors, int *count, struct opaq_error *error);

/* "nvfp4+2d", "bf16" */
enum opaq_status bound_weight_format(const struct bound_weight *weight, char *text, size_t capacity,
                                     struct opaq_error *error);

#endif
