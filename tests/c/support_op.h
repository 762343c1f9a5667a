/* support_op.h: calling rows of the operator table from tests. Depends on opaq/op.h and support_tensor.h. */
#ifndef SUPPORT_OP_H
#define SUPPORT_OP_H

#include "opaq/op.h"
#include "support_tensor.h"

/* The buffers of a test tensor as an operator takes them. */
struct op_tensors {
    struct opaq_tensor tensor[OPAQ_BUFFER_LIMIT];
    int count;
};
struct op_tensors op_tensors_of(const struct tensor *tensor);

struct opaq_value op_tensor_value(const struct opaq_tensor *tensor);
struct opaq_value op_list_value(const struct op_tensors *tensors);
struct opaq_value op_text_value(const char *text);
struct opaq_value op_sizes_value(const int64_t *sizes, int count);
struct opaq_value op_int_value(int64_t value);

/* Runs an operator whose output is a tensor like `out` (its memory), checking that the row says so. */
enum opaq_status op_run_into(const char *name, const struct opaq_value *values, const struct tensor *out,
                             struct opaq_error *error);

#endif
