/* op/table/op_describe.h: what a row says about a call. Depends on op_table.h. */
#ifndef OPAQ_OP_TABLE_OP_DESCRIBE_H
#define OPAQ_OP_TABLE_OP_DESCRIBE_H

#include "op/table/op_table.h"

/* Whether a caller's operator is one, and has values. */
enum opaq_status check_row(const struct op_row *row, const struct opaq_value *values, struct opaq_error *error);

/* Whether every argument that must be given is, with ranks that fit. */
enum opaq_status check_values(const struct op_row *row, const struct opaq_value *values,
                              struct opaq_error *error);

/* How many tensors an argument brings. */
int64_t argument_tensors(enum opaq_argument_kind kind, const struct opaq_value *value);

/* Each output row's prototype, and all tensors, without data. The values were checked and the plan is resolved. */
enum opaq_status op_describe(const struct op_call *call, struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT],
                             struct opaq_outputs *outputs, struct opaq_error *error);

#endif
