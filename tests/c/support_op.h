/* support_op.h: calling rows of the operator table from tests. Every call also runs on the hiding back end, with copies of
 * its tensors, and must give the same bytes (support_hiding.h). Depends on opaq/op.h and support_tensor.h. */
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

/* Any operator's outputs, each in an allocation of exactly its size that starts as 0xA5. */
struct op_result {
    struct opaq_outputs outputs;
    int has_slots; /* of an operator with changed tensors */
};

/* What a call runs with besides its arguments. NULL and zeros will do. */
struct op_means {
    const struct opaq_parallel *parallel;
    int64_t random[2]; /* what random outputs are filled with */
};

/* Allocates outputs and a workspace of exactly what the row asks for, and runs. On failure there is no result to
 * free. `means` may be NULL. */
enum opaq_status op_call(const char *name, const struct opaq_value *values, const struct op_means *means,
                         struct op_result *result, struct opaq_error *error);
void op_result_free(struct op_result *result);

/* The tensors of an output row; none if it is absent. */
struct op_tensors op_result_row(const struct op_result *result, int output);

/* Bytes, and elements, of a contiguous tensor. */
size_t op_tensor_bytes(const struct opaq_tensor *tensor);
int64_t op_tensor_elements(const struct opaq_tensor *tensor);

/* The first of an output row's tensors in which two results differ, -1 if none does. */
int op_result_difference(const struct op_result *a, const struct op_result *b, int output);

#endif
