/* op/linear/linear_parts.c: shared by operators with weights. */
#include "op/linear/linear_parts.h"

#include <string.h>

#include "base/try.h"
#include "format/format_traits.h"
#include "format/proto_layout.h"
#include "op/quantize/quantize.h"
#include "op/table/op_describe.h"
#include "op/table/op_tensor.h"

/* ---- arguments ---- */

/* "[4,128]" */
static const char *sizes_text(const int64_t *sizes, int64_t count, char *buffer, size_t capacity) {
    struct opaq_tensor tensor = {.rank = (int32_t)min_int64(count, OPAQ_RANK_LIMIT)};
    if (tensor.rank > 0) {
        memcpy(tensor.shape, sizes, (size_t)tensor.rank * sizeof *sizes);
    }
    return shape_text(&tensor, buffer, capacity);
}

enum opaq_status linear_sizes_read(const struct op_call *call, int x_shape, struct linear_sizes *sizes,
                                   struct opaq_error *error) {
    const struct opaq_value *x = &call->values[x_shape];
    const struct opaq_value *w = &call->values[x_shape + 1];
    char text[160];
    memset(sizes, 0, sizeof *sizes);
    if (w->count != 2 || x->count < 1) {
        const struct opaq_value *wrong = w->count != 2 ? w : x;
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s is %s, expected %s",
                         w->count != 2 ? "w_shape" : "x_shape",
                         sizes_text(wrong->sizes, wrong->count, text, sizeof text),
                         w->count != 2 ? "two sizes, out features and in features" : "at least one size");
    }
    sizes->rank = (int)x->count;
    sizes->x_shape = x->sizes;
    memcpy(sizes->w_shape, w->sizes, sizeof sizes->w_shape);
    memcpy(sizes->y_shape, x->sizes, (size_t)sizes->rank * sizeof *x->sizes);
    sizes->y_shape[sizes->rank - 1] = w->sizes[0];
    if (x->sizes[sizes->rank - 1] != w->sizes[1]) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "x of shape %s has %lld features, expected the %lld of w",
                         sizes_text(x->sizes, x->count, text, sizeof text),
                         (long long)x->sizes[sizes->rank - 1], (long long)w->sizes[1]);
    }
    if (argument_tensors(call->op->argument[0].kind, &call->values[0]) ==
        0) { /* unchecked if no output reads it */
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is empty", call->op->argument[0].name);
    }
    return OPAQ_OK;
}

enum opaq_status read_plain(const struct op_call *call, const char *name, const struct opaq_tensor *tensor,
                            const int64_t *shape, int rank, int32_t dtype, struct opaq_view *view,
                            struct opaq_error *error) {
    char got[160];
    char want[160];
    if (tensor->rank != rank || memcmp(tensor->shape, shape, (size_t)rank * sizeof *shape) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s has the shape %s, expected %s", name,
                         shape_text(tensor, got, sizeof got), sizes_text(shape, rank, want, sizeof want));
    }
    if (dtype >= 0 && tensor->dtype != dtype && strcmp(name, "x") != 0 &&
        (tensor->dtype == OPAQ_DTYPE_BF16 ||
         tensor->dtype == OPAQ_DTYPE_F16)) { /* usually x is the wrong one */
        const char *const mine = dtype_name(tensor->dtype);
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "x holds %s, but %s holds %s; expected x in %s, or %s in %s%s", dtype_name(dtype),
                         name, mine, mine, name, dtype_name(dtype), dtype == OPAQ_DTYPE_F32 ? "" : " or f32");
    }
    if (dtype >= 0 && tensor->dtype != dtype && tensor->dtype != OPAQ_DTYPE_F32) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s holds %s, expected %s%s", name,
                         dtype_name(tensor->dtype), dtype_name(dtype),
                         dtype == OPAQ_DTYPE_F32 ? "" : " or f32");
    }
    TRY(check_on_device(name, tensor, call->device, error));
    return view_of_tensor(name, tensor, view, error);
}

enum opaq_status read_list(const struct op_call *call, const char *name, const struct opaq_value *list,
                           const struct opaq_form *form, const int64_t *shape, int rank, int32_t dtype,
                           struct opaq_view *view, struct opaq_error *error) {
    struct opaq_proto proto;
    if (!is_quantized(form) && (list->count != 1 || list->tensors == NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s has %lld tensors, expected one plain tensor", name,
                         (long long)list->count);
    }
    if (!is_quantized(form)) {
        return read_plain(call, name, list->tensors, shape, rank, dtype, view, error);
    }
    const enum opaq_element element = dtype < 0 ? OPAQ_F32 : (enum opaq_element)dtype;
    TRY_AS(name, error, opaq_proto_make(shape, rank, element, &form->spec, call->device, &proto, error));
    TRY_AS(name, error, view_of_buffers(&proto, list->tensors, list->count, view, error));
    return OPAQ_OK;
}

enum opaq_status read_stack(const struct op_call *call, const char *name, const struct opaq_value *list,
                            const struct opaq_value *shape, int rank, const struct opaq_form *given,
                            int32_t dtype, struct weight_stack *stack, struct opaq_error *error) {
    if (shape->count != rank) {
        return opaq_fail(
            error, OPAQ_ERROR_SHAPE, "%s_shape has %lld sizes, expected %s", name, (long long)shape->count,
            rank == 2 ? "two, out features and in features" : "three, experts, out features and in features");
    }
    stack->name = name;
    stack->count = rank == 3 ? shape->sizes[0] : 1;
    stack->rows = shape->sizes[rank - 2];
    stack->columns = shape->sizes[rank - 1];
    return read_list(call, name, list, given, shape->sizes, rank, dtype, &stack->view, error);
}

enum opaq_status read_stack_bias(const struct op_call *call, const char *name, const struct opaq_value *value,
                                 const struct weight_stack *stack, int32_t dtype, struct opaq_view *bias,
                                 bool *is_there, struct opaq_error *error) {
    const bool is_stack = stack->view.proto.rank == 3;
    const int64_t shape[2] = {stack->count, stack->rows};
    *is_there = value != NULL && value->tensors != NULL;
    return *is_there ? read_plain(call, name, value->tensors, is_stack ? shape : shape + 1, is_stack ? 2 : 1,
                                  dtype, bias, error)
                     : OPAQ_OK;
}

enum opaq_status read_floats(const struct op_call *call, const char *name, const struct opaq_value *value,
                             bool is_needed, int64_t count, const float **floats, struct opaq_error *error) {
    if (is_needed != (value->tensors != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is %s, but the plan is %s", name,
                         is_needed ? "missing" : "given",
                         is_needed ? "delayed (its quantizers)" : "not delayed");
    }
    return floats_of_tensor(name, value, count, call->device, floats, error);
}

enum opaq_status read_random(const struct op_call *call, const struct opaq_value *value, bool is_needed,
                             const int64_t **random, struct opaq_error *error) {
    TRY(random_of_tensor(value, call->device, random, error));
    if (is_needed && *random == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "random is missing, but the plan rounds stochastically (sr)");
    }
    return OPAQ_OK;
}

/* ---- operands ---- */

struct operand_form forward_form(const struct opaq_form *form, const float *given, const int64_t *random,
                                 int64_t stream) {
    const bool is_delayed = has_option(form, OPAQ_DELAYED);
    return (struct operand_form){.quantizes = is_quantized(form),
                                 .spec = form_with_usage(form, OPAQ_ROWWISE).spec,
                                 .along = OPAQ_ROWWISE,
                                 .scale = is_delayed ? given : NULL,
                                 .amax = is_delayed ? NULL : given,
                                 .random = {.state = random, .stream = stream}};
}

struct operand_form kept_form(const struct opaq_form *form, int32_t backward, const int64_t *random,
                              int64_t stream) {
    const int usage = backward == OPAQ_BACKWARD_DEQUANTIZED ? OPAQ_ROWWISE : OPAQ_COLUMNWISE;
    return (struct operand_form){.quantizes = is_quantized(form) && backward != OPAQ_BACKWARD_HIGH_PRECISION,
                                 .spec = form_with_usage(form, usage).spec,
                                 .is_dequantized = backward != OPAQ_BACKWARD_QUANTIZED,
                                 .may_be_across = true,
                                 .along = OPAQ_COLUMNWISE,
                                 .random = {.state = random, .stream = stream}};
}

struct operand_form form_along(enum opaq_usage usage) {
    return (struct operand_form){.along = usage};
}

enum opaq_status check_given_scale(const char *scale_name, const char *name, const struct opaq_form *form,
                                   const float *given, struct opaq_error *error) {
    if (has_option(form, OPAQ_DELAYED) && given == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is missing, but %s= is delayed", scale_name, name);
    }
    const bool takes_one = is_quantized(form) && spec_has_tensor_figure(&form->spec);
    if (given != NULL && (!takes_one || has_option(form, OPAQ_ROWSCALED))) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is given, but %s= has no scale for a whole tensor",
                         scale_name, name);
    }
    return OPAQ_OK;
}

enum opaq_status check_stack(const struct weight_stack *stack, struct opaq_error *error) {
    if (!stack->view.proto.is_quantized) {
        return OPAQ_OK;
    }
    if ((stack->view.proto.spec.usage & OPAQ_ROWWISE) == 0) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s has no rowwise copy", stack->name);
    }
    struct quant_job job;
    const struct opaq_view plain = plain_view_like(&stack->view, OPAQ_F32);
    quant_job_make(&plain, &stack->view, OPAQ_ROWWISE, &job);
    const int64_t together = quant_copy_rows_together(&job.copy[0]);
    if (stack->count > 1 && stack->rows % together != 0) {
        return opaq_fail(
            error, OPAQ_ERROR_UNSUPPORTED,
            "%s has %lld rows for each expert, expected a multiple of %lld: else some share a scale, "
            "or a tile, with the next expert's",
            stack->name, (long long)stack->rows, (long long)together);
    }
    return OPAQ_OK;
}

enum opaq_status multiply(struct op_call *call, const struct operand *a, const struct operand *b,
                          const struct opaq_view *c, const struct opaq_view *bias,
                          const struct opaq_linear_plan *plan, bool accumulate, struct opaq_error *error) {
    struct gemm_job job = {.a = a->gemm,
                           .b = b->gemm,
                           .c = quant_matrix_make(c),
                           .accumulate = accumulate,
                           .any_order = plan->order == OPAQ_ORDER_ANY,
                           .precision = plan->precision};
    if (bias != NULL) {
        job.bias = bias->buffer[0].data;
        job.bias_dtype = (enum opaq_element)bias->proto.dtype;
    }
    return work_product(&call->work, &job, error);
}

/* ---- quantizing ---- */

/* The memory of each buffer of `view`: an output's if that has a buffer of the name, else the arena's. */
static void place_buffers(struct op_call *call, int output, struct opaq_view *view) {
    const struct opaq_outputs *outputs = call->outputs;
    struct opaq_buffer mine[OPAQ_BUFFER_LIMIT];
    struct opaq_buffer theirs[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(&view->proto, mine);
    const bool has_output = output >= 0 && call->protos[output].is_quantized;
    const int output_count = has_output ? proto_buffers(&call->protos[output], theirs) : 0;
    for (int i = 0; i < count; ++i) {
        int place = 0;
        while (place < output_count && strcmp(theirs[place].name, mine[i].name) != 0) {
            ++place;
        }
        void *data = place < output_count ? outputs->tensor[outputs->first[output] + place].data
                                          : arena_take(&call->work.arena, mine[i].bytes);
        view->buffer[i] = (struct opaq_span){data, mine[i].bytes};
    }
}

enum opaq_status quantize_to(struct op_call *call, const struct opaq_view *x,
                             const struct quantize_target *target, struct opaq_view *quantized,
                             struct opaq_error *error) {
    memset(quantized, 0, sizeof *quantized);
    TRY(opaq_proto_make(x->proto.shape, x->proto.rank, (enum opaq_element)x->proto.dtype, &target->form.spec,
                        x->proto.device, &quantized->proto, error));
    place_buffers(call, target->output, quantized);
    if (call->work.is_measuring) {
        return OPAQ_OK;
    }
    struct quantize_figures figures = target->figures;
    if (!has_option(&target->form, OPAQ_DELAYED)) { /* other forms do not have one */
        figures.scale = NULL;
        figures.amax = NULL;
    }
    return quantize_view(&call->work, x, &figures, quantized, error);
}
