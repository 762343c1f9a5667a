/* op/linear/linear_parts.c: what the linear operators' forward and backward share. */
#include "op/linear/linear_parts.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "format/proto_layout.h"
#include "cpu/gemm/gemm_run.h"
#include "cpu/gemm/packed_run.h"
#include "op/table/op_describe.h"
#include "op/table/op_tensor.h"
#include "op/quantize/quantize_op.h"
#include "opaq/status.h"

void *scratch_take(struct scratch *scratch, size_t bytes) {
    void *piece = scratch->memory == NULL ? NULL : scratch->memory + scratch->used;
    const size_t limit = (size_t)OPAQ_SIZE_LIMIT + 64;
    const size_t rounded = bytes < limit ? (bytes + 63) / 64 * 64 : limit;
    scratch->used = rounded < limit - scratch->used ? scratch->used + rounded : limit;
    scratch->most = scratch->used > scratch->most ? scratch->used : scratch->most;
    return piece;
}

void *scratch_take_array(struct scratch *scratch, int64_t count, size_t size) {
    int64_t bytes;
    return scratch_take(scratch, checked_multiply(count, (int64_t)size, &bytes) ? (size_t)bytes : SIZE_MAX);
}

/* "[4,128]" */
static const char *sizes_text(const int64_t *sizes, int64_t count, char *buffer, size_t capacity) {
    struct opaq_tensor tensor = {.rank = (int32_t)min_int64(count, OPAQ_RANK_LIMIT)};
    if (tensor.rank > 0) {
        memcpy(tensor.shape, sizes, (size_t)tensor.rank * sizeof *sizes);
    }
    return shape_text(&tensor, buffer, capacity);
}

struct linear linear_workbench(const struct opaq_call *call, bool is_measuring) {
    struct linear linear;
    memset(&linear, 0, sizeof linear);
    linear.operation = call->op->name;
    linear.call = call;
    linear.is_measuring = is_measuring;
    linear.scratch.memory = is_measuring ? NULL : call->workspace.data;
    return linear;
}

enum opaq_status linear_begin(const struct opaq_call *call, int x_shape, int plan, bool is_measuring,
                              struct linear *linear, struct opaq_error *error) {
    const char *operation = call->op->name;
    const struct opaq_value *x = &call->values[x_shape];
    const struct opaq_value *w = &call->values[x_shape + 1];
    struct opaq_error reason;
    char text[160];
    *linear = linear_workbench(call, is_measuring);
    enum opaq_status status = plan_of_value(&call->values[plan], &linear->plan, &reason);
    if (status != OPAQ_OK) {
        return opaq_fail(error, status, "%s: %s", operation, reason.text);
    }
    if (w->count != 2 || x->count < 1 || x->count > OPAQ_RANK_LIMIT) {
        const struct opaq_value *wrong = w->count != 2 ? w : x;
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s is %s, expected %s", operation,
                         w->count != 2 ? "w_shape" : "x_shape",
                         sizes_text(wrong->sizes, wrong->count, text, sizeof text),
                         w->count != 2 ? "two sizes, out features and in features" : "1 to 8 sizes");
    }
    linear->rank = (int)x->count;
    linear->x_shape = x->sizes;
    memcpy(linear->w_shape, w->sizes, sizeof linear->w_shape);
    memcpy(linear->y_shape, x->sizes, (size_t)linear->rank * sizeof *x->sizes);
    linear->y_shape[linear->rank - 1] = w->sizes[0];
    if (x->sizes[linear->rank - 1] != w->sizes[1]) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: x of shape %s has %lld features, expected the %lld of w",
                         operation, sizes_text(x->sizes, x->count, text, sizeof text),
                         (long long)x->sizes[linear->rank - 1], (long long)w->sizes[1]);
    }
    if (argument_tensors(call->op->argument[0].kind, &call->values[0]) ==
        0) { /* without outputs nobody looked */
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is empty", operation, call->op->argument[0].name);
    }
    linear->device = call->values[0].tensors->device;
    return OPAQ_OK;
}

enum opaq_status linear_measured(const struct linear *linear, size_t *bytes, struct opaq_error *error) {
    if (linear->scratch.most > (size_t)OPAQ_SIZE_LIMIT) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW, "%s: the workspace would have more than 2^62 bytes",
                         linear->operation);
    }
    *bytes = linear->scratch.most;
    return OPAQ_OK;
}

static enum opaq_status check_list_device(const struct linear *linear, const char *name,
                                          const struct opaq_tensor *tensor, struct opaq_error *error) {
    if (tensor->device.type != linear->device.type || tensor->device.index != linear->device.index) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is on another device than the first tensor",
                         linear->operation, name);
    }
    return OPAQ_OK;
}

enum opaq_status linear_plain_input(const struct linear *linear, const char *name,
                                    const struct opaq_tensor *tensor, const int64_t *shape, int rank,
                                    int32_t dtype, struct opaq_view *view, struct opaq_error *error) {
    char got[160];
    char want[160];
    if (tensor->rank != rank || memcmp(tensor->shape, shape, (size_t)rank * sizeof *shape) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s has the shape %s, expected %s", linear->operation,
                         name, shape_text(tensor, got, sizeof got), sizes_text(shape, rank, want, sizeof want));
    }
    if (dtype >= 0 && tensor->dtype != dtype && tensor->dtype != OPAQ_DTYPE_F32) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s holds %s, expected %s%s", linear->operation, name,
                         dtype_name(tensor->dtype), dtype_name(dtype),
                         dtype == OPAQ_DTYPE_F32 ? "" : " or f32");
    }
    const enum opaq_status status = check_list_device(linear, name, tensor, error);
    return status == OPAQ_OK ? view_of_tensor(linear->operation, name, tensor, view, error) : status;
}

enum opaq_status linear_input(const struct linear *linear, const char *name, const struct opaq_value *list,
                              const struct opaq_form *form, const int64_t *shape, int rank, int32_t dtype,
                              struct opaq_view *view, struct opaq_error *error) {
    struct opaq_proto proto;
    struct opaq_error reason;
    if (!is_quantized(form) && (list->count != 1 || list->tensors == NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s has %lld tensors, expected one plain tensor",
                         linear->operation, name, (long long)list->count);
    }
    if (!is_quantized(form)) {
        return linear_plain_input(linear, name, list->tensors, shape, rank, dtype, view, error);
    }
    const enum opaq_element element = dtype < 0 ? OPAQ_F32 : (enum opaq_element)dtype;
    if (opaq_proto_make(shape, rank, element, &form->spec, linear->device, &proto, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s: %s", linear->operation, name, reason.text);
    }
    if (view_of_buffers(name, &proto, list->tensors, list->count, view, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s", linear->operation, reason.text);
    }
    return OPAQ_OK;
}

struct opaq_view linear_plain_output(const struct linear *linear, int output) {
    const struct opaq_outputs *outputs = linear->call->outputs;
    struct opaq_view view = {.proto = linear->call->protos[output]};
    view.row_stride = opaq_proto_columns(&view.proto);
    view.buffer[0].data = outputs->tensor[outputs->first[output]].data;
    (void)opaq_proto_bytes(&view.proto, &view.buffer[0].bytes, NULL); /* of a prototype that was made */
    return view;
}

/* Where each buffer of `view` lies: an output's where that has one of the name, else in scratch. */
static void place_buffers(struct linear *linear, int output, struct opaq_view *view) {
    const struct opaq_outputs *outputs = linear->call->outputs;
    struct opaq_buffer mine[OPAQ_BUFFER_LIMIT];
    struct opaq_buffer theirs[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(&view->proto, mine);
    const bool has_output = output >= 0 && linear->call->protos[output].is_quantized;
    const int output_count = has_output ? proto_buffers(&linear->call->protos[output], theirs) : 0;
    for (int i = 0; i < count; ++i) {
        int place = 0;
        while (place < output_count && strcmp(theirs[place].name, mine[i].name) != 0) {
            ++place;
        }
        void *data = place < output_count ? outputs->tensor[outputs->first[output] + place].data
                                          : scratch_take(&linear->scratch, mine[i].bytes);
        view->buffer[i] = (struct opaq_span){data, mine[i].bytes};
    }
}

enum opaq_status linear_quantize(struct linear *linear, const struct opaq_view *x,
                                 const struct linear_quantize *how, struct opaq_view *quantized,
                                 struct opaq_error *error) {
    struct opaq_error reason;
    memset(quantized, 0, sizeof *quantized);
    if (opaq_proto_make(x->proto.shape, x->proto.rank, (enum opaq_element)x->proto.dtype, &how->form.spec,
                        x->proto.device, &quantized->proto, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s", linear->operation, reason.text);
    }
    place_buffers(linear, how->output, quantized);
    if (linear->is_measuring) {
        return OPAQ_OK;
    }
    struct opaq_quantize_args args = {.parallel = linear->call->parallel};
    if (has_option(&how->form, OPAQ_DELAYED)) {
        args.scale = how->given == NULL ? how->scale : how->given;
        args.amax = how->amax;
    } else {
        args.amax_rowwise = how->given;
    }
    if (has_option(&how->form, OPAQ_STOCHASTIC)) {
        args.random.seed = (uint64_t)how->random[0];
        args.random.offset = ((uint64_t)how->random[1] + (uint64_t)how->stream) & (UINT64_MAX >> 1);
    }
    const enum opaq_status status = quantize_checked(x, &args, quantized, &reason);
    return status == OPAQ_OK ? OPAQ_OK : opaq_fail(error, status, "%s: %s", linear->operation, reason.text);
}

static struct gemm_operand plain_operand(const struct opaq_view *view, enum opaq_usage usage) {
    const struct quant_matrix matrix = quant_matrix_make(view);
    return (struct gemm_operand){.plain = usage == OPAQ_ROWWISE ? matrix : quant_matrix_transposed(matrix)};
}

/* A plain tensor of the same shape, with no memory of its own. */
static struct opaq_view shape_of(const struct opaq_view *view, enum opaq_element dtype) {
    struct opaq_view plain = {.proto = view->proto, .row_stride = opaq_proto_columns(&view->proto)};
    plain.proto.is_quantized = 0;
    plain.proto.dtype = (int32_t)dtype;
    memset(&plain.proto.spec, 0, sizeof plain.proto.spec);
    return plain;
}

enum opaq_status linear_scratch(struct linear *linear, const struct opaq_view *like, enum opaq_element dtype,
                                struct opaq_view *plain, struct opaq_error *error) {
    size_t bytes;
    struct opaq_error reason;
    *plain = shape_of(like, dtype);
    if (opaq_proto_check(&plain->proto, &reason) != OPAQ_OK ||
        opaq_proto_bytes(&plain->proto, &bytes, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s", linear->operation, reason.text);
    }
    plain->buffer[0] = (struct opaq_span){scratch_take(&linear->scratch, bytes), bytes};
    return OPAQ_OK;
}

enum opaq_status linear_plain(struct linear *linear, const struct opaq_view *view, struct opaq_view *plain,
                              struct opaq_error *error) {
    if (!view->proto.is_quantized) {
        *plain = *view;
        return OPAQ_OK;
    }
    struct opaq_error reason;
    enum opaq_status status = linear_scratch(linear, view, OPAQ_F32, plain, error);
    if (status != OPAQ_OK || linear->is_measuring) {
        return status;
    }
    status = dequantize_checked(view, 0, linear->call->parallel, plain, &reason);
    return status == OPAQ_OK ? OPAQ_OK : opaq_fail(error, status, "%s: %s", linear->operation, reason.text);
}

enum opaq_status linear_operand(struct linear *linear, const struct opaq_view *view, enum opaq_usage usage,
                                struct linear_operand *operand, struct opaq_error *error) {
    memset(operand, 0, sizeof *operand);
    if (!view->proto.is_quantized) {
        operand->gemm = plain_operand(view, usage);
        return OPAQ_OK;
    }
    struct opaq_view plain = shape_of(view, OPAQ_F32);
    if (view->proto.spec.usage & (int)usage) {
        quant_job_make(&plain, view, (int)usage, &operand->job);
        operand->gemm = plain_operand(&plain, usage);
        operand->gemm.spec = &operand->job.spec;
        operand->gemm.copy = &operand->job.copy[0];
        operand->gemm.undo_hadamard = true;
        return OPAQ_OK;
    }
    const enum opaq_status status = linear_plain(linear, view, &plain, error);
    operand->gemm = plain_operand(&plain, usage);
    return status;
}

enum opaq_status linear_input_operand(struct linear *linear, const struct opaq_view *x,
                                      const struct linear_input_form *input, int64_t index,
                                      struct linear_operand *operand, struct opaq_error *error) {
    struct opaq_view quantized;
    const bool is_delayed = has_option(input->form, OPAQ_DELAYED);
    if (is_delayed && input->given == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is missing, but %s= is delayed", linear->operation,
                         input->scale_name, input->name);
    }
    const bool takes_one = is_quantized(input->form) &&
                           (input->form->spec.format == OPAQ_FP8 || input->form->spec.format == OPAQ_NVFP4);
    if (input->given != NULL && (!takes_one || has_option(input->form, OPAQ_ROWSCALED))) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is given, but %s= has no scale for a whole tensor",
                         linear->operation, input->scale_name, input->name);
    }
    if (!is_quantized(input->form)) {
        return linear_operand(linear, x, OPAQ_ROWWISE, operand, error);
    }
    const struct linear_quantize how = {
        .form = form_with_usage(input->form, OPAQ_ROWWISE),
        .output = -1,
        .stream = input->stream,
        .random = input->random,
        .given = input->given == NULL ? NULL : input->given + (input->count == 1 ? 0 : index)};
    const enum opaq_status status = linear_quantize(linear, x, &how, &quantized, error);
    return status == OPAQ_OK ? linear_operand(linear, &quantized, OPAQ_ROWWISE, operand, error) : status;
}

bool linear_operand_rows(const struct linear_operand *whole, int64_t first, int64_t rows,
                         struct linear_operand *part) {
    struct quant_matrix *plain = &part->gemm.plain;
    *part = *whole;
    if (whole->gemm.copy == NULL) {
        const int64_t step = first * plain->row_step;
        plain->data =
            plain->data == NULL ? NULL : (char *)plain->data + step * (plain->dtype == OPAQ_F32 ? 4 : 2);
    } else {
        part->gemm.spec = &part->job.spec;
        part->gemm.copy = &part->job.copy[0];
        if (!quant_copy_take_rows(&part->job.copy[0], first, rows)) {
            return false;
        }
    }
    plain->rows = rows;
    return true;
}

enum opaq_status linear_matrix(struct linear *linear, int64_t rows, int64_t columns, enum opaq_element dtype,
                               struct opaq_view *plain, struct opaq_error *error) {
    const int64_t shape[2] = {rows, columns};
    struct opaq_view like = {.row_stride = columns};
    struct opaq_error reason;
    if (opaq_proto_make(shape, 2, dtype, NULL, linear->device, &like.proto, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s", linear->operation, reason.text);
    }
    return linear_scratch(linear, &like, dtype, plain, error);
}

enum opaq_status linear_kept_operand(struct linear *linear, const struct linear_kept *kept,
                                     struct linear_operand *operand, struct opaq_error *error) {
    const bool again = !kept->view->proto.is_quantized && is_quantized(kept->form) &&
                       kept->backward != OPAQ_BACKWARD_HIGH_PRECISION;
    struct opaq_view quantized = *kept->view;
    struct opaq_view plain;
    enum opaq_status status = OPAQ_OK;
    if (again) {
        const int usage = kept->backward == OPAQ_BACKWARD_DEQUANTIZED ? OPAQ_ROWWISE : OPAQ_COLUMNWISE;
        const struct linear_quantize how = {.form = form_with_usage(kept->form, usage),
                                            .output = -1,
                                            .stream = kept->stream,
                                            .random = kept->random};
        status = linear_quantize(linear, kept->view, &how, &quantized, error);
    }
    if (status == OPAQ_OK && kept->backward != OPAQ_BACKWARD_QUANTIZED) {
        status = linear_plain(linear, &quantized, &plain, error);
        quantized = plain;
    }
    return status == OPAQ_OK ? linear_operand(linear, &quantized, OPAQ_COLUMNWISE, operand, error) : status;
}

/* Two copies that went through the same transform are multiplied as they are. */
static void settle_hadamard(struct gemm_operand *a, struct gemm_operand *b) {
    const bool both = a->copy != NULL && b->copy != NULL && a->copy->is_hadamard && b->copy->is_hadamard;
    if (both && a->spec->hadamard_mask == b->spec->hadamard_mask) {
        a->undo_hadamard = false;
        b->undo_hadamard = false;
    }
}

_Static_assert((int)PACKED_NEAR == OPAQ_PRECISION_NEAR && (int)PACKED_FAST == OPAQ_PRECISION_FAST &&
                   (int)PACKED_FAST32 == OPAQ_PRECISION_FAST32,
               "a plan's precision is a kernel's");

enum opaq_status linear_product(struct linear *linear, const struct linear_product *product,
                                struct opaq_error *error) {
    const int64_t depth_limit = (int64_t)1 << 48; /* far from where the product's own sizes would overflow */
    struct gemm_job job = {.a = product->a->gemm,
                           .b = product->b->gemm,
                           .c = quant_matrix_make(product->c),
                           .accumulate = product->accumulate};
    if (product->bias != NULL) {
        job.bias = product->bias->buffer[0].data;
        job.bias_dtype = (enum opaq_element)product->bias->proto.dtype;
    }
    if (job.a.plain.columns > depth_limit) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                         "%s: a product over %lld elements, at most 2^48 are possible", linear->operation,
                         (long long)job.a.plain.columns);
    }
    settle_hadamard(&job.a, &job.b);
    const enum packed_precision precision = (enum packed_precision)linear->plan.precision;
    const bool is_packed = packed_can_run(&job, precision);
    if (is_packed && job.c.columns > depth_limit) { /* whose results and panels take memory by the column */
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                         "%s: a tiled weight of %lld rows, at most 2^48 are possible", linear->operation,
                         (long long)job.c.columns);
    }
    size_t bytes = is_packed ? packed_workspace_bytes(&job, precision) : 0;
    if (!is_packed || linear->is_measuring) { /* whether memory is aligned shows in the run only */
        const size_t other = gemm_workspace_bytes(&job);
        bytes = other > bytes ? other : bytes;
    }
    const size_t mark = linear->scratch.used;
    void *memory = scratch_take(&linear->scratch, bytes);
    linear->scratch.used = mark; /* products come one after another */
    if (linear->is_measuring) {
        return OPAQ_OK;
    }
    if (is_packed) {
        packed_run(&job, precision, memory, linear->call->parallel);
    } else {
        gemm_run(&job, memory, linear->call->parallel);
    }
    return OPAQ_OK;
}

enum opaq_status linear_floats(const struct linear *linear, const char *name, const struct opaq_value *value,
                               bool is_needed, int64_t count, const float **floats, struct opaq_error *error) {
    if (is_needed != (value->tensors != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is %s, but the plan is %s", linear->operation,
                         name, is_needed ? "missing" : "given",
                         is_needed ? "delayed (its quantizers)" : "not delayed");
    }
    return floats_of_tensor(linear->operation, name, value, count, floats, error);
}

enum opaq_status linear_random(const struct linear *linear, const struct opaq_value *value, bool is_needed,
                               const int64_t **random, struct opaq_error *error) {
    const enum opaq_status status = random_of_tensor(linear->operation, value, random, error);
    if (status == OPAQ_OK && is_needed && *random == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: random is missing, but the plan rounds stochastically (sr)", linear->operation);
    }
    return status;
}
