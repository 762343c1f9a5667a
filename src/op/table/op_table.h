/* op/table/op_table.h: the private part of the operator table: the functions that compute each row. Depends on
 * backend.h.
 *
 * Error texts below do not name the operation: opaq_op_call and its relatives prepend it. */
#ifndef OPAQ_OP_TABLE_OP_TABLE_H
#define OPAQ_OP_TABLE_OP_TABLE_H

#include "backend/backend.h"
#include "opaq/experts.h"
#include "opaq/op.h"

/* What the text arguments of a call are parsed to, once per call. */
enum plan_kind {
    PLAN_NONE,
    PLAN_SPEC,     /* a quantizer */
    PLAN_SPECS,    /* two, in neighbouring arguments */
    PLAN_LINEAR,   /* opaq_linear_plan */
    PLAN_TRAINING, /* the same, whose delayed scales are factors */
    PLAN_EXPERTS   /* opaq_experts_plan */
};

union op_plan {
    struct opaq_spec spec[2];
    struct opaq_linear_plan linear;
    struct opaq_experts_plan experts;
};

/* One call of an operator, checked: what its functions are given. */
struct op_call {
    const struct op_row *row;
    const struct opaq_op *op;
    const struct opaq_value *values;
    union op_plan plan;
    const struct opaq_proto *protos;    /* of each output row, where it is there and of floats */
    const struct opaq_outputs *outputs; /* while measuring without memory */
    struct opaq_device device;          /* of all tensors */
    struct opaq_execution execution;
    struct work work; /* points to execution */
};

struct op_row {
    struct opaq_op op;
    enum plan_kind plan_kind;
    int plan_argument;
    bool has_workspace; /* `run` is called twice: while measuring, and to run */
    /* The form of an output, by call->plan only; NULL: all are plain. */
    enum opaq_status (*form)(const struct op_call *call, int output, struct opaq_form *form,
                             struct opaq_error *error);
    enum opaq_status (*run)(struct op_call *call, struct opaq_error *error);
};

/* The row behind a public description; NULL if it is none of the table's. */
const struct op_row *op_row_of(const struct opaq_op *op);

/* op_plan.c: looks up the parsed texts of a call. */
enum opaq_status op_plan_resolve(const struct op_row *row, const struct opaq_value *values, union op_plan *plan,
                                 struct opaq_error *error);

/* The value of an argument by its name; NULL if the operator has none of that name. */
const struct opaq_value *op_argument(const struct op_call *call, const char *name);

/* An output that is there and plain, as a view; without memory while measuring. */
struct opaq_view op_plain_output(const struct op_call *call, int output);

/* ---- forms of outputs ---- */

/* quantize_operators.c, convert.c */
enum opaq_status form_quantizer(const struct op_call *call, int output, struct opaq_form *form,
                                struct opaq_error *error);
enum opaq_status form_converted(const struct op_call *call, int output, struct opaq_form *form,
                                struct opaq_error *error);
/* linear_forward.c, linear_backward.c */
enum opaq_status form_linear_forward(const struct op_call *call, int output, struct opaq_form *form,
                                     struct opaq_error *error);
enum opaq_status form_linear_backward(const struct op_call *call, int output, struct opaq_form *form,
                                      struct opaq_error *error);
/* experts_backward.c, grouped_linear.c */
enum opaq_status form_mlp_backward(const struct op_call *call, int output, struct opaq_form *form,
                                   struct opaq_error *error);
enum opaq_status form_moe_backward(const struct op_call *call, int output, struct opaq_form *form,
                                   struct opaq_error *error);
enum opaq_status form_grouped_linear_backward(const struct op_call *call, int output, struct opaq_form *form,
                                              struct opaq_error *error);

/* ---- runs ---- */

/* quantize_operators.c, delayed_operator.c */
enum opaq_status run_random_state(struct op_call *call, struct opaq_error *error);
enum opaq_status run_quantize(struct op_call *call, struct opaq_error *error);
enum opaq_status run_dequantize(struct op_call *call, struct opaq_error *error);
enum opaq_status run_amax(struct op_call *call, struct opaq_error *error);
enum opaq_status run_delayed_update(struct op_call *call, struct opaq_error *error);

/* convert.c, slice_rows.c, gather_shards.c */
enum opaq_status run_convert(struct op_call *call, struct opaq_error *error);
enum opaq_status run_slice_rows(struct op_call *call, struct opaq_error *error);
enum opaq_status run_gather_rows(struct op_call *call, struct opaq_error *error);

/* linear_inference.c, linear_forward.c, linear_backward.c */
enum opaq_status run_linear(struct op_call *call, struct opaq_error *error);
enum opaq_status run_linear_forward(struct op_call *call, struct opaq_error *error);
enum opaq_status run_linear_backward(struct op_call *call, struct opaq_error *error);

/* experts_forward.c, experts_backward.c, grouped_linear.c */
enum opaq_status run_experts_forward(struct op_call *call, struct opaq_error *error);
enum opaq_status run_experts_hidden(struct op_call *call, struct opaq_error *error); /* h only, without y */
enum opaq_status run_experts_backward(struct op_call *call, struct opaq_error *error);
enum opaq_status run_grouped_linear(struct op_call *call, struct opaq_error *error);
enum opaq_status run_grouped_linear_backward(struct op_call *call, struct opaq_error *error);

/* runner_operators.c: linear_gemm, mlp_gemm and moe_gemm, and their backward operators */
enum opaq_status run_gemm(struct op_call *call, struct opaq_error *error);

#endif
