/* op/linear/linear_parts.h: what the linear operators' forward and backward share: sizes, operands, scratch memory, quantizing
 * on the way. Depends on gemm. */
#ifndef OPAQ_OP_LINEAR_LINEAR_PARTS_H
#define OPAQ_OP_LINEAR_LINEAR_PARTS_H

#include "backend/gemm_job.h"
#include "op/plan/linear_plan.h"

/* Which numbers of the random state an operand's stochastic rounding takes; a stream. */
enum linear_stream { STREAM_X = 0, STREAM_W = 1, STREAM_DY = 2, STREAM_Y = 3, STREAM_DX = 4 };

/* Workspace handed out piece by piece. With `memory` NULL the pieces are only counted, so that one function both
 * measures and runs. */
struct scratch {
    char *memory;
    size_t used; /* beyond OPAQ_SIZE_LIMIT: more than that */
    size_t most; /* that was ever used: pieces may be given back by setting `used` */
};

void *scratch_take(struct scratch *scratch, size_t bytes);

/* The same for so many things of a size. */
void *scratch_take_array(struct scratch *scratch, int64_t count, size_t size);

/* One linear call, its sizes checked. */
struct linear {
    const char *operation;
    const struct opaq_call *call;
    struct opaq_linear_plan plan;
    int rank; /* of x_shape */
    const int64_t *x_shape;
    int64_t y_shape[OPAQ_RANK_LIMIT];
    int64_t w_shape[2];
    struct opaq_device device;
    struct scratch scratch;
    bool is_measuring;
};

/* Nothing but where work is done: for the operation's own plan and sizes. */
struct linear linear_workbench(const struct opaq_call *call, bool is_measuring);

/* Reads the plan and the sizes; `call` has x_shape, w_shape and the plan at these places. */
enum opaq_status linear_begin(const struct opaq_call *call, int x_shape, int plan, bool is_measuring,
                              struct linear *linear, struct opaq_error *error);

/* What a call that was measured needs; an error if that does not fit. */
enum opaq_status linear_measured(const struct linear *linear, size_t *bytes, struct opaq_error *error);

/* A plain tensor of a shape and dtype or f32. dtype -1: any float. */
enum opaq_status linear_plain_input(const struct linear *linear, const char *name,
                                    const struct opaq_tensor *tensor, const int64_t *shape, int rank,
                                    int32_t dtype, struct opaq_view *view, struct opaq_error *error);

/* A list: one plain tensor, or the buffers of a form. */
enum opaq_status linear_input(const struct linear *linear, const char *name, const struct opaq_value *list,
                              const struct opaq_form *form, const int64_t *shape, int rank, int32_t dtype,
                              struct opaq_view *view, struct opaq_error *error);

/* A plain output, without memory while measuring. */
struct opaq_view linear_plain_output(const struct linear *linear, int output);

/* Quantizes a plain tensor: the buffers that output row `output` has (-1: none) lie there, the others in scratch. */
struct linear_quantize {
    struct opaq_form form; /* with the usages that are made */
    int output;
    int64_t stream;
    const int64_t *random; /* seed and offset, or NULL */
    const float *scale;    /* delayed scaling */
    const float *given;    /* of a checkpoint: the scale of delayed scaling, else the amax; or NULL */
    float *amax;           /* receives fp8's amax; may be NULL */
};
enum opaq_status linear_quantize(struct linear *linear, const struct opaq_view *x,
                                 const struct linear_quantize *how, struct opaq_view *quantized,
                                 struct opaq_error *error);

/* A plain tensor shaped like another, in scratch. */
enum opaq_status linear_scratch(struct linear *linear, const struct opaq_view *like, enum opaq_element dtype,
                                struct opaq_view *plain, struct opaq_error *error);

/* A tensor as a plain one: itself, or dequantized to f32 in scratch. */
enum opaq_status linear_plain(struct linear *linear, const struct opaq_view *view, struct opaq_view *plain,
                              struct opaq_error *error);

/* An operand of a product: a tensor read along its rows (ROWWISE) or its columns. */
struct linear_operand {
    struct quant_job job;
    struct gemm_operand gemm;
};

/* A plain tensor, or the copy of a quantized one that runs that way; where there is none, the other one dequantized
 * into scratch. */
enum opaq_status linear_operand(struct linear *linear, const struct opaq_view *view, enum opaq_usage usage,
                                struct linear_operand *operand, struct opaq_error *error);

/* How a plain activation becomes the left operand of a product: as it is, or quantized, by a scale that a checkpoint
 * gives (`count` of them: one for all, or one for each expert) or that its data give. */
struct linear_input_form {
    const char *name;
    const char *scale_name;
    const struct opaq_form *form;
    const float *given; /* or NULL */
    int64_t count;
    int64_t stream;
    const int64_t *random; /* there, if the form rounds stochastically */
};
enum opaq_status linear_input_operand(struct linear *linear, const struct opaq_view *x,
                                      const struct linear_input_form *input, int64_t index,
                                      struct linear_operand *operand, struct opaq_error *error);

/* Rows first to first + rows - 1 of an operand that was made along its rows. False where those share a scale with
 * others. */
bool linear_operand_rows(const struct linear_operand *whole, int64_t first, int64_t rows,
                         struct linear_operand *part);

/* A plain matrix in scratch. */
enum opaq_status linear_matrix(struct linear *linear, int64_t rows, int64_t columns, enum opaq_element dtype,
                               struct opaq_view *plain, struct opaq_error *error);

/* What a backward multiplies along its rows' dimension: an operand of the forward that was kept. One that was kept as it
 * came is quantized again; where the backward is not quantized, it is what the forward multiplied. */
struct linear_kept {
    const struct opaq_view *view;
    const struct opaq_form *form; /* how the forward quantized it */
    int32_t backward;             /* enum opaq_backward */
    int64_t stream;
    const int64_t *random;
};
enum opaq_status linear_kept_operand(struct linear *linear, const struct linear_kept *kept,
                                     struct linear_operand *operand, struct opaq_error *error);

/* c = a b^T (+ bias). */
struct linear_product {
    struct linear_operand *a;
    struct linear_operand *b;
    const struct opaq_view *c;
    const struct opaq_view *bias; /* or NULL */
    bool accumulate;
};
enum opaq_status linear_product(struct linear *linear, const struct linear_product *product,
                                struct opaq_error *error);

/* A contiguous f32 argument of `count` floats, which must be there exactly if `is_needed`. */
enum opaq_status linear_floats(const struct linear *linear, const char *name, const struct opaq_value *value,
                               bool is_needed, int64_t count, const float **floats, struct opaq_error *error);

/* Two int64 (seed, offset), which must be there if `is_needed`. */
enum opaq_status linear_random(const struct linear *linear, const struct opaq_value *value, bool is_needed,
                               const int64_t **random, struct opaq_error *error);

#endif
