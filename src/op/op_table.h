/* op/op_table.h: the run functions of the operator table's rows. Depends on opaq/op.h. */
#ifndef OPAQ_OP_OP_TABLE_H
#define OPAQ_OP_OP_TABLE_H

#include "opaq/op.h"

/* quantize_row.c */
enum opaq_status run_quantize(const struct opaq_value *values, const struct opaq_proto *proto,
                              const struct opaq_outputs *outputs, struct opaq_span workspace,
                              const struct opaq_parallel *parallel, struct opaq_error *error);
enum opaq_status run_dequantize(const struct opaq_value *values, const struct opaq_proto *proto,
                                const struct opaq_outputs *outputs, struct opaq_span workspace,
                                const struct opaq_parallel *parallel, struct opaq_error *error);

/* convert_row.c, slice_rows_row.c, gather_rows_row.c */
enum opaq_status run_convert(const struct opaq_value *values, const struct opaq_proto *proto,
                             const struct opaq_outputs *outputs, struct opaq_span workspace,
                             const struct opaq_parallel *parallel, struct opaq_error *error);
enum opaq_status run_slice_rows(const struct opaq_value *values, const struct opaq_proto *proto,
                                const struct opaq_outputs *outputs, struct opaq_span workspace,
                                const struct opaq_parallel *parallel, struct opaq_error *error);
enum opaq_status run_gather_rows(const struct opaq_value *values, const struct opaq_proto *proto,
                                 const struct opaq_outputs *outputs, struct opaq_span workspace,
                                 const struct opaq_parallel *parallel, struct opaq_error *error);

#endif
