/* op/table/op_describe.h: what a row says about a call. Depends on opaq/op.h. */
#ifndef OPAQ_OP_TABLE_OP_DESCRIBE_H
#define OPAQ_OP_TABLE_OP_DESCRIBE_H

#include "opaq/op.h"

/* Whether every argument that must be given is, with ranks that fit. */
enum opaq_status check_values(const struct opaq_op *op, const struct opaq_value *values,
                              struct opaq_error *error);

/* How many tensors an argument brings. */
int64_t argument_tensors(enum opaq_argument_kind kind, const struct opaq_value *value);

/* Each output row's prototype, and all tensors, without data. The values were checked. */
enum opaq_status op_describe(const struct opaq_op *op, const struct opaq_value *values,
                             struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT], struct opaq_outputs *outputs,
                             struct opaq_error *error);

#endif
