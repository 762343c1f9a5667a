/* op/linear/linear_parts.h: what operators with weights share: reading arguments, quantizing on the way to outputs, the
 * forms of operands. Depends on op_table.h and the plans. */
#ifndef OPAQ_OP_LINEAR_LINEAR_PARTS_H
#define OPAQ_OP_LINEAR_LINEAR_PARTS_H

#include "op/plan/parsed_plan.h"
#include "op/table/op_table.h"

/* The random stream of an operand's stochastic rounding. */
enum linear_stream { STREAM_X = 0, STREAM_W = 1, STREAM_DY = 2, STREAM_Y = 3, STREAM_DX = 4 };

/* ---- arguments ---- */

/* Sizes of x[..., K], w[N, K] and y[..., N]. */
struct linear_sizes {
    int rank; /* of x and y */
    const int64_t *x_shape;
    int64_t y_shape[OPAQ_RANK_LIMIT];
    int64_t w_shape[2];
};

/* Reads the sizes argument `x_shape` and the one after it, w's. */
enum opaq_status linear_sizes_read(const struct op_call *call, int x_shape, struct linear_sizes *sizes,
                                   struct opaq_error *error);

/* A plain tensor of a shape and of dtype or f32; dtype -1: any float. */
enum opaq_status read_plain(const struct op_call *call, const char *name, const struct opaq_tensor *tensor,
                            const int64_t *shape, int rank, int32_t dtype, struct opaq_view *view,
                            struct opaq_error *error);

/* A list: one plain tensor, or the buffers of a form. */
enum opaq_status read_list(const struct op_call *call, const char *name, const struct opaq_value *list,
                           const struct opaq_form *form, const int64_t *shape, int rank, int32_t dtype,
                           struct opaq_view *view, struct opaq_error *error);

/* A weight [N,K] (rank 2), or a stack of them [E,N,K] (rank 3), from a list and its shape. */
struct weight_stack {
    const char *name;
    struct opaq_view view; /* plain, or quantized as given */
    int64_t count, rows, columns;
};
enum opaq_status read_stack(const struct op_call *call, const char *name, const struct opaq_value *list,
                            const struct opaq_value *shape, int rank, const struct opaq_form *given,
                            int32_t dtype, struct weight_stack *stack, struct opaq_error *error);

/* A plain tensor [N] or [E,N] that belongs to a stack; *is_there is false if `value` has none. */
enum opaq_status read_stack_bias(const struct op_call *call, const char *name, const struct opaq_value *value,
                                 const struct weight_stack *stack, int32_t dtype, struct opaq_view *bias,
                                 bool *is_there, struct opaq_error *error);

/* A contiguous f32 argument of `count` floats, present if and only if `is_needed`. */
enum opaq_status read_floats(const struct op_call *call, const char *name, const struct opaq_value *value,
                             bool is_needed, int64_t count, const float **floats, struct opaq_error *error);

/* Two int64 (seed, offset), required if `is_needed`. */
enum opaq_status read_random(const struct op_call *call, const struct opaq_value *value, bool is_needed,
                             const int64_t **random, struct opaq_error *error);

/* ---- operands ---- */

/* How the forward reads an operand: quantized along its rows, or plain; `given`: a scale of a checkpoint, or
 * NULL. */
struct operand_form forward_form(const struct opaq_form *form, const float *given, const int64_t *random,
                                 int64_t stream);

/* How the backward reads x or w, the second operand of its products, along their rows' dimension: an operand that was
 * kept as it came is quantized again; where the backward is not quantized, it is what the forward multiplied. */
struct operand_form kept_form(const struct opaq_form *form, int32_t backward, const int64_t *random,
                              int64_t stream);

/* Plain, along a usage. */
struct operand_form form_along(enum opaq_usage usage);

/* Checks a checkpoint's scale against the form: required if it is delayed, absent otherwise. */
enum opaq_status check_given_scale(const char *scale_name, const char *name, const struct opaq_form *form,
                                   const float *given, struct opaq_error *error);

/* Whether the matrices of a quantized stack can be read separately: they share no scale and no tile. */
enum opaq_status check_stack(const struct weight_stack *stack, struct opaq_error *error);

/* c = a b^T (+ bias). */
enum opaq_status multiply(struct op_call *call, const struct operand *a, const struct operand *b,
                          const struct opaq_view *c, const struct opaq_view *bias,
                          const struct opaq_linear_plan *plan, bool accumulate, struct opaq_error *error);

/* ---- quantizing ---- */

/* Quantizes a plain tensor: buffers that output row `output` has (-1: none) are written there, others to the
 * arena. */
struct quantize_target {
    struct opaq_form form; /* with the usages to make */
    int output;
    struct quantize_figures figures;
};
enum opaq_status quantize_to(struct op_call *call, const struct opaq_view *x,
                             const struct quantize_target *target, struct opaq_view *quantized,
                             struct opaq_error *error);

#endif
