/* op/linear/weight_stack.c: weights, or a stack of them, and one of them as an operand. */
#include "op/linear/weight_stack.h"

#include <string.h>

#include "op/table/op_tensor.h"
#include "op/quantize/quantize_op.h"
#include "opaq/status.h"

enum opaq_status weight_stack_read(const struct linear *linear, const char *name, const struct opaq_value *list,
                                   const struct opaq_value *shape, int rank, const struct opaq_form *given,
                                   const struct opaq_form *here, int32_t dtype, struct weight_stack *stack,
                                   struct opaq_error *error) {
    if (shape->count != rank) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s_shape has %lld sizes, expected %s", linear->operation,
                         name, (long long)shape->count,
                         rank == 2 ? "two, out features and in features"
                                   : "three, experts, out features and in features");
    }
    stack->name = name;
    stack->here = *here;
    stack->count = rank == 3 ? shape->sizes[0] : 1;
    stack->rows = shape->sizes[rank - 2];
    stack->columns = shape->sizes[rank - 1];
    return linear_input(linear, name, list, given, shape->sizes, rank, dtype, &stack->view, error);
}

enum opaq_status weight_bias_read(const struct linear *linear, const char *name, const struct opaq_value *value,
                                  const struct weight_stack *stack, int32_t dtype, struct opaq_view *bias,
                                  bool *is_there, struct opaq_error *error) {
    const bool is_stack = stack->view.proto.rank == 3;
    const int64_t shape[2] = {stack->count, stack->rows};
    *is_there = value->tensors != NULL;
    return *is_there ? linear_plain_input(linear, name, value->tensors, is_stack ? shape : shape + 1,
                                          is_stack ? 2 : 1, dtype, bias, error)
                     : OPAQ_OK;
}

/* A prototype's sizes, none left of what was there before. */
static void set_shape(struct opaq_proto *proto, int rank, int64_t first, int64_t second) {
    memset(proto->shape, 0, sizeof proto->shape);
    proto->rank = rank;
    proto->shape[0] = first;
    proto->shape[1] = rank > 1 ? second : 0;
}

static void *element_at(const struct opaq_view *view, int64_t index) {
    char *data = view->buffer[0].data;
    return data == NULL ? NULL : data + index * (view->proto.dtype == OPAQ_F32 ? 4 : 2);
}

struct opaq_view weight_bias_at(const struct opaq_view *bias, int64_t index) {
    struct opaq_view row = *bias;
    if (bias->proto.rank == 2) {
        set_shape(&row.proto, 1, bias->proto.shape[1], 0);
        row.buffer[0].data = element_at(bias, index * bias->row_stride);
    }
    return row;
}

struct opaq_view weight_plain_at(const struct opaq_view *stack, int64_t index) {
    struct opaq_view matrix = *stack;
    if (stack->proto.rank == 3) {
        set_shape(&matrix.proto, 2, stack->proto.shape[1], stack->proto.shape[2]);
        matrix.buffer[0].data = element_at(stack, index * stack->proto.shape[1] * stack->row_stride);
        matrix.buffer[0].bytes = stack->buffer[0].bytes; /* at most */
    }
    return matrix;
}

static enum opaq_status refuse_rows(const struct linear *linear, const struct weight_stack *stack,
                                    const struct quant_copy *copy, struct opaq_error *error) {
    return opaq_fail(
        error, OPAQ_ERROR_UNSUPPORTED,
        "%s: %s has %lld rows for each expert, expected a multiple of %lld: else some share a scale, "
        "or a tile, with the next expert's",
        linear->operation, stack->name, (long long)stack->rows, (long long)quant_copy_rows_together(copy));
}

/* The rows of one matrix in a stack that came quantized. */
static enum opaq_status given_operand(struct linear *linear, const struct weight_stack *stack, int64_t index,
                                      struct linear_operand *operand, struct opaq_error *error) {
    if ((stack->view.proto.spec.usage & OPAQ_ROWWISE) == 0) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s: %s has no rowwise copy", linear->operation,
                         stack->name);
    }
    struct linear_operand whole;
    const enum opaq_status status = linear_operand(linear, &stack->view, OPAQ_ROWWISE, &whole, error);
    if (status != OPAQ_OK) {
        return status;
    }
    /* the second one's tells for all: what is refused is refused whoever is asked for, and while measuring */
    return linear_operand_rows(&whole, stack->count > 1 ? stack->rows : 0, stack->rows, operand) &&
                   linear_operand_rows(&whole, index * stack->rows, stack->rows, operand)
               ? OPAQ_OK
               : refuse_rows(linear, stack, &whole.job.copy[0], error);
}

enum opaq_status weight_forward_operand(struct linear *linear, const struct weight_stack *stack,
                                        const struct weight_use *use, struct linear_operand *operand,
                                        struct opaq_error *error) {
    if (stack->view.proto.is_quantized) {
        return given_operand(linear, stack, use->index, operand, error);
    }
    const struct opaq_view plain = weight_plain_at(&stack->view, use->index);
    if (!is_quantized(&stack->here)) {
        return linear_operand(linear, &plain, OPAQ_ROWWISE, operand, error);
    }
    struct opaq_view quantized;
    const struct linear_quantize how = {.form = form_with_usage(&stack->here, OPAQ_ROWWISE),
                                        .output = -1,
                                        .stream = use->stream,
                                        .random = use->random};
    const enum opaq_status status = linear_quantize(linear, &plain, &how, &quantized, error);
    return status == OPAQ_OK ? linear_operand(linear, &quantized, OPAQ_ROWWISE, operand, error) : status;
}

/* A matrix of a quantized stack as floats in scratch. */
static enum opaq_status dequantize_one(struct linear *linear, const struct weight_stack *stack, int64_t index,
                                       struct opaq_view *plain, struct opaq_error *error) {
    struct linear_operand operand;
    struct opaq_view shape = {.proto = stack->view.proto};
    enum opaq_status status = given_operand(linear, stack, index, &operand, error);
    if (status != OPAQ_OK) {
        return status;
    }
    set_shape(&shape.proto, 2, stack->rows, stack->columns);
    status = linear_scratch(linear, &shape, OPAQ_F32, plain, error);
    if (status == OPAQ_OK && !linear->is_measuring) {
        operand.job.copy[0].operand = quant_matrix_make(plain);
        dequantize_job(&operand.job, linear->call->parallel);
    }
    return status;
}

enum opaq_status weight_backward_operand(struct linear *linear, const struct weight_stack *stack,
                                         const struct weight_use *use, struct linear_operand *operand,
                                         struct opaq_error *error) {
    struct opaq_view plain;
    if (!stack->view.proto.is_quantized) {
        plain = weight_plain_at(&stack->view, use->index);
    } else {
        const enum opaq_status status = dequantize_one(linear, stack, use->index, &plain, error);
        if (status != OPAQ_OK) {
            return status;
        }
    }
    const struct linear_kept kept = {&plain, &stack->here, use->backward, use->stream, use->random};
    return linear_kept_operand(linear, &kept, operand, error);
}
