/* op/table/op_table.h: the functions of the operator table's rows. Depends on opaq/op.h. */
#ifndef OPAQ_OP_TABLE_OP_TABLE_H
#define OPAQ_OP_TABLE_OP_TABLE_H

#include "opaq/op.h"

/* ---- forms of outputs ---- */

/* The buffers of the quantizer that argument 1 names; convert's: that argument 2 does. quantize_row.c, convert_row.c */
enum opaq_status form_quantizer(const struct opaq_value *values, int output, struct opaq_form *form,
                                struct opaq_error *error);
enum opaq_status form_converted(const struct opaq_value *values, int output, struct opaq_form *form,
                                struct opaq_error *error);
enum opaq_status form_linear_forward(const struct opaq_value *values, int output, struct opaq_form *form,
                                     struct opaq_error *error);
enum opaq_status form_linear_backward(const struct opaq_value *values, int output, struct opaq_form *form,
                                      struct opaq_error *error);

enum opaq_status form_mlp_backward(const struct opaq_value *values, int output, struct opaq_form *form,
                                   struct opaq_error *error);
enum opaq_status form_moe_backward(const struct opaq_value *values, int output, struct opaq_form *form,
                                   struct opaq_error *error);
enum opaq_status form_grouped_linear_backward(const struct opaq_value *values, int output,
                                              struct opaq_form *form, struct opaq_error *error);

/* ---- workspaces ---- */

enum opaq_status workspace_linear_forward(const struct opaq_call *call, size_t *bytes,
                                          struct opaq_error *error);
enum opaq_status workspace_linear_backward(const struct opaq_call *call, size_t *bytes,
                                           struct opaq_error *error);

enum opaq_status workspace_linear(const struct opaq_call *call, size_t *bytes, struct opaq_error *error);

enum opaq_status workspace_experts_forward(const struct opaq_call *call, size_t *bytes,
                                           struct opaq_error *error);
enum opaq_status workspace_gemm(const struct opaq_call *call, size_t *bytes, struct opaq_error *error);

enum opaq_status workspace_experts_backward(const struct opaq_call *call, size_t *bytes,
                                            struct opaq_error *error);
enum opaq_status workspace_grouped_linear(const struct opaq_call *call, size_t *bytes,
                                          struct opaq_error *error);
enum opaq_status workspace_grouped_linear_backward(const struct opaq_call *call, size_t *bytes,
                                                   struct opaq_error *error);

/* ---- runs ---- */

/* quantize_row.c; random_state's numbers are the caller's */
enum opaq_status run_random_state(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_quantize(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_dequantize(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_amax(const struct opaq_call *call, struct opaq_error *error);

/* convert_row.c, slice_rows_row.c, gather_rows_row.c */
enum opaq_status run_convert(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_slice_rows(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_gather_rows(const struct opaq_call *call, struct opaq_error *error);

/* linear_row.c, linear_forward_row.c, linear_backward_row.c, delayed_row.c */
enum opaq_status run_linear(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_linear_forward(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_linear_backward(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_delayed_update(const struct opaq_call *call, struct opaq_error *error);

/* experts_forward_row.c, experts_backward_row.c, grouped_linear_row.c */
enum opaq_status run_experts_forward(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_experts_backward(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_grouped_linear(const struct opaq_call *call, struct opaq_error *error);
enum opaq_status run_grouped_linear_backward(const struct opaq_call *call, struct opaq_error *error);

/* gemm_rows.c: linear_gemm, mlp_gemm and moe_gemm */
enum opaq_status run_gemm(const struct opaq_call *call, struct opaq_error *error);

#endif
