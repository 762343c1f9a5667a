/* op/table/op_describe.h: evaluates a row for a call. Depends on op_table.h. */
#ifndef OPAQ_OP_TABLE_OP_DESCRIBE_H
#define OPAQ_OP_TABLE_OP_DESCRIBE_H

#include "op/table/op_table.h"

/* Checks that an operator is one of the table's and that there are values. */
enum opaq_status check_row(const struct op_row *row, const struct opaq_value *values, struct opaq_error *error);

/* Checks that every required argument is present, with a valid rank. */
enum opaq_status check_values(const struct op_row *row, const struct opaq_value *values,
                              struct opaq_error *error);

/* The number of tensors of an argument. */
int64_t argument_tensors(enum opaq_argument_kind kind, const struct opaq_value *value);

/* Each output row's prototype, and all tensors, without data. The values were checked and the plan is resolved. */
enum opaq_status op_describe(const struct op_call *call, struct opaq_proto protos[OPAQ_OP_RESULT_LIMIT],
                             struct opaq_outputs *outputs, struct opaq_error *error);

#endif
