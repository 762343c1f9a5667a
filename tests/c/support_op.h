/* support_op.h: calls rows of the operator table in tests. Every call also runs on the hiding back end, with
 * copies of its tensors, and must give the same bytes (support_hiding.h). Depends on opaq/op.h and
 * support_tensor.h. */
#ifndef SUPPORT_OP_H
#define SUPPORT_OP_H

#include "opaq/op.h"
#include "support_tensor.h"

/* The buffers of a test tensor as arguments of an operator. */
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

/* Runs an operator whose output is a tensor like `out` (in its memory), and checks that the row describes it
 * so. */
enum opaq_status op_run_into(const char *name, const struct opaq_value *values, const struct tensor *out,
                             struct opaq_error *error);

/* The outputs of any operator, each in an allocation of exactly its size, initialized to 0xA5. */
struct op_result {
    struct opaq_outputs outputs;
    int has_slots; /* the operator changes tensors, so its absent outputs are empty u8 tensors */
};

/* Settings of a call besides its arguments. NULL and zeros are allowed. */
struct op_settings {
    const struct opaq_parallel *parallel;
    int64_t random[2]; /* contents of random outputs */
};

/* Allocates outputs and a workspace of exactly the size that the row requires, and runs. On failure there is no
 * result to free. `settings` may be NULL. */
enum opaq_status op_call(const char *name, const struct opaq_value *values, const struct op_settings *settings,
                         struct op_result *result, struct opaq_error *error);
void op_result_free(struct op_result *result);

/* The tensors of an output row; none if it is absent. */
struct op_tensors op_result_row(const struct op_result *result, int output);

/* Bytes, and elements, of a contiguous tensor. */
size_t op_tensor_bytes(const struct opaq_tensor *tensor);
int64_t op_tensor_elements(const struct opaq_tensor *tensor);

/* Index of the first tensor of an output row in which two results differ, -1 if they are equal. */
int op_result_difference(const struct op_result *a, const struct op_result *b, int output);

#endif
