/* runner/bound_weights.c: what a runner does with an operator's weights: it quantizes those that come plain and are
 * quantized by the plan, leaves out the copies that no product reads, and copies the rest. */
#include "runner/bound_weights.h"

#include <stdio.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"
#include "format/format_traits.h"
#include "format/proto_layout.h"
#include "op/plan/plan_words.h"
#include "op/quantize/quantize.h"
#include "op/table/op_tensor.h"

/* ---- the plan ---- */

/* The index of the argument `name` + `suffix`; -1 if there is none. */
static int find_argument(const struct opaq_op *op, const char *name, const char *suffix) {
    const size_t length = strlen(name);
    for (int i = 0; i < op->argument_count; ++i) {
        if (strncmp(op->argument[i].name, name, length) == 0 &&
            strcmp(op->argument[i].name + length, suffix) == 0) {
            return i;
        }
    }
    return -1;
}

/* The form of a stack whose matrices are quantized separately: a float per tensor becomes one per row, which
 * gives the same products. */
static enum opaq_status stack_form(const struct bound_weight *weight, struct opaq_form *form,
                                   struct opaq_error *error) {
    struct opaq_error reason;
    const struct opaq_format_row *row = opaq_format_row((enum opaq_format)form->spec.format);
    const int64_t square = row->block_rows > row->block_columns ? row->block_rows : row->block_columns;
    const int64_t block = has_option(form, OPAQ_2D) ? square : row->block_rows;
    const int64_t tile = has_option(form, OPAQ_TILED) ? opaq_rows_together(&form->spec) : 1;
    const int64_t together = max_int64(block, tile);
    if (weight->shape->sizes[1] % together != 0) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "%s has %lld rows for each expert, but its %s have %lld, and would reach into the "
                         "next expert",
                         weight->name, (long long)weight->shape->sizes[1], tile > block ? "tiles" : "blocks",
                         (long long)together);
    }
    if (spec_has_tensor_scale(&form->spec)) {
        const struct opaq_spec own = form->spec;
        (void)opaq_spec_make(OPAQ_FP8ROW, &form->spec, NULL);
        form->spec.element = own.element;
        form->spec.options |= own.options & OPAQ_TILED;
    } else if (spec_has_second_scale(&form->spec)) {
        form->spec.options |= OPAQ_ROWSCALED;
    }
    if (opaq_spec_check(&form->spec, &reason) != OPAQ_OK) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "%s has a number for each expert, but %s; quantize it first", weight->name,
                         reason.text);
    }
    return OPAQ_OK;
}

/* A word of the plan: rewritten if it is about a weight, else copied. */
static enum opaq_status read_word(const struct plan_word *word, void *context, struct opaq_error *error) {
    struct bound_layer *layer = context;
    bool is_about_weights = false;
    for (int i = 0; i < layer->weight_count; ++i) {
        struct bound_weight *weight = &layer->weight[i];
        char given[32];
        (void)snprintf(given, sizeof given, "%s_given", weight->name);
        const bool is_here = word_is(word, "w");
        if (!is_here && !word_is(word, given)) {
            continue;
        }
        is_about_weights = true;
        TRY(word_read_form(word, is_here ? &weight->here : &weight->given, error));
        weight->kept = is_here ? weight->here : weight->given;
        weight->kept.spec.usage =
            is_here || (weight->kept.spec.usage & OPAQ_ROWWISE) ? OPAQ_ROWWISE : OPAQ_COLUMNWISE;
        if (is_here && weight->shape->count == 3) {
            TRY(stack_form(weight, &weight->kept, error));
        }
    }
    if (!is_about_weights && layer->length + word->length + 1 < sizeof layer->text) {
        layer->length += (size_t)snprintf(layer->text + layer->length, sizeof layer->text - layer->length,
                                          "%s%.*s", layer->length ? " " : "", (int)word->length, word->text);
    }
    return OPAQ_OK;
}

/* " w_given=nvfp4" */
static enum opaq_status add_given(struct bound_layer *layer, const struct bound_weight *weight,
                                  struct opaq_error *error) {
    char spec[OPAQ_SPEC_TEXT_BYTES];
    TRY(opaq_spec_print(&weight->kept.spec, spec, sizeof spec, error));
    const size_t room = sizeof layer->text - layer->length;
    const int wanted = snprintf(layer->text + layer->length, room, "%s%s_given=%s", layer->length ? " " : "",
                                weight->name, spec);
    if (wanted < 0 || (size_t)wanted >= room) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "the plan is too long with its weights' words");
    }
    layer->length += (size_t)wanted;
    return OPAQ_OK;
}

enum opaq_status bound_layer_make(const struct opaq_op *op, const struct opaq_value *values,
                                  struct bound_layer *layer, struct opaq_error *error) {
    memset(layer, 0, sizeof *layer);
    layer->argument = find_argument(op, "plan", "");
    for (int i = 0; i < op->argument_count && layer->weight_count < WEIGHT_LIMIT; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_TENSOR_LIST) {
            const char *name = op->argument[i].name;
            const struct opaq_form plain = {.kind = OPAQ_FORM_PLAIN};
            layer->weight[layer->weight_count++] = (struct bound_weight){
                name, &values[i], &values[find_argument(op, name, "_shape")], plain, plain, plain};
        }
    }
    const struct opaq_value *text = &values[layer->argument];
    TRY(plan_read_words(text->text, (size_t)text->count, sizeof layer->text, layer, read_word, error));
    for (int i = 0; i < layer->weight_count; ++i) {
        if (is_quantized(&layer->weight[i].kept)) {
            TRY(add_given(layer, &layer->weight[i], error));
        }
    }
    return OPAQ_OK;
}

enum opaq_status bound_weight_format(const struct bound_weight *weight, char *text, size_t capacity,
                                     struct opaq_error *error) {
    if (is_quantized(&weight->kept)) {
        return opaq_spec_print(&weight->kept.spec, text, capacity, error);
    }
    (void)snprintf(text, capacity, "%s", dtype_name(weight->list->tensors->dtype));
    return OPAQ_OK;
}

/* ---- the tensors ---- */

enum opaq_status bound_tensor_copy(struct work *work, const struct opaq_tensor *from, struct opaq_tensor *to,
                                   struct opaq_error *error) {
    const int64_t elements = tensor_elements(from);
    *to = *from;
    int64_t stride = 1;
    for (int i = from->rank - 1; i >= 0; --i) {
        to->strides[i] = stride;
        stride *= from->shape[i];
    }
    to->data = arena_take(&work->arena, (size_t)elements * (size_t)dtype_bytes(from->dtype));
    return work->is_measuring || elements == 0 ? OPAQ_OK
                                               : work->backend->copy(from, to->data, work->execution, error);
}

/* Allocates a tensor's buffers; sets a view of them, and the tensors. */
static int place_buffers(struct work *work, const struct opaq_proto *proto, struct opaq_view *view,
                         struct opaq_tensor *tensors) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(proto, buffers);
    (void)tensors_of_proto(proto, tensors);
    memset(view, 0, sizeof *view);
    view->proto = *proto;
    for (int i = 0; i < count; ++i) {
        view->buffer[i] = (struct opaq_span){arena_take(&work->arena, buffers[i].bytes), buffers[i].bytes};
        tensors[i].data = view->buffer[i].data;
    }
    return count;
}

/* A stack of fp8: each matrix has its own scale, stored once per row. */
static enum opaq_status quantize_scaled_stack(struct work *work, const struct bound_weight *weight,
                                              const struct opaq_view *plain, const struct opaq_view *out,
                                              struct opaq_error *error) {
    const struct quantize_figures figures = {0};
    const int64_t rows = weight->shape->sizes[1];
    const struct opaq_form form = form_with_usage(&weight->here, OPAQ_ROWWISE);
    for (int64_t i = 0; rows > 0 && i < weight->shape->sizes[0]; ++i) {
        const struct opaq_view matrix = stack_matrix(plain, i);
        float *const scales = (float *)out->buffer[1].data + i * rows;
        struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
        struct opaq_view one;
        memset(&one, 0, sizeof one);
        TRY(opaq_proto_make(matrix.proto.shape, 2, (enum opaq_element)matrix.proto.dtype, &form.spec,
                            out->proto.device, &one.proto, error));
        (void)proto_buffers(&one.proto, buffers);
        const size_t bytes = buffers[0].bytes;
        one.buffer[0] = (struct opaq_span){(char *)out->buffer[0].data + (size_t)i * bytes, bytes};
        one.buffer[1] = (struct opaq_span){scales, sizeof *scales};
        TRY(quantize_view(work, &matrix, &figures, &one, error));
        TRY(work->backend->fill(scales, rows - 1, scales + 1, work->execution, error));
    }
    return OPAQ_OK;
}

/* Each row's float, in given memory: the amax of its matrix, or its stored form. */
static enum opaq_status stack_amaxes(struct work *work, const struct bound_weight *weight,
                                     const struct opaq_view *plain, float *amax, struct opaq_error *error) {
    const int64_t rows = weight->shape->sizes[1];
    for (int64_t i = 0; rows > 0 && i < weight->shape->sizes[0]; ++i) {
        const struct opaq_view matrix = stack_matrix(plain, i);
        float *const first = amax + i * rows;
        TRY(amax_view(work, &matrix, &weight->here.spec, OPAQ_ROWWISE, true, first, error));
        TRY(work->backend->fill(first, rows - 1, first + 1, work->execution, error));
    }
    return OPAQ_OK;
}

/* A stack of nvfp4: each row gets the float of its matrix. */
static enum opaq_status quantize_amax_stack(struct work *work, const struct bound_weight *weight,
                                            const struct opaq_view *plain, const struct opaq_view *out,
                                            struct opaq_error *error) {
    const struct opaq_device device = out->proto.device;
    const int64_t count = weight->shape->sizes[0] * weight->shape->sizes[1];
    void *amax;
    TRY(work->backend->allocate(device, (size_t)count * sizeof(float), &amax, error));
    enum opaq_status status = stack_amaxes(work, weight, plain, amax, error);
    if (status == OPAQ_OK) {
        const struct quantize_figures figures = {.amax_rowwise = amax};
        status = quantize_view(work, plain, &figures, out, error);
    }
    work->backend->release(device, amax);
    return status;
}

static enum opaq_status quantize_weight(struct work *work, const struct bound_weight *weight,
                                        const struct opaq_view *out, struct opaq_error *error) {
    const struct quantize_figures figures = {0};
    struct opaq_view plain;
    TRY(view_of_tensor(weight->name, weight->list->tensors, &plain, error));
    if (weight->here.spec.format != weight->kept.spec.format) {
        return quantize_scaled_stack(work, weight, &plain, out, error);
    }
    if (weight->here.spec.options != weight->kept.spec.options) {
        return quantize_amax_stack(work, weight, &plain, out, error);
    }
    return quantize_view(work, &plain, &figures, out, error);
}

/* The buffers of the copy that is kept, selected from the given ones. */
static enum opaq_status copy_buffers(struct work *work, const struct opaq_proto *came,
                                     const struct opaq_tensor *from, const struct opaq_view *out,
                                     struct opaq_error *error) {
    struct opaq_buffer theirs[OPAQ_BUFFER_LIMIT];
    struct opaq_buffer mine[OPAQ_BUFFER_LIMIT];
    const int their_count = proto_buffers(came, theirs);
    const int count = proto_buffers(&out->proto, mine);
    for (int i = 0; i < count; ++i) {
        for (int k = 0; k < their_count; ++k) {
            if (strcmp(theirs[k].name, mine[i].name) == 0 && mine[i].bytes > 0) {
                TRY(work->backend->copy(&from[k], out->buffer[i].data, work->execution, error));
            }
        }
    }
    return OPAQ_OK;
}

static enum opaq_status weight_copy(struct work *work, const struct bound_weight *weight,
                                    struct opaq_tensor *tensors, int *count, struct opaq_error *error) {
    const struct opaq_device device = work->execution->device;
    const int rank = (int)weight->shape->count;
    struct opaq_proto came;
    struct opaq_proto proto;
    struct opaq_view out;
    if (!is_quantized(&weight->kept)) {
        *count = 1;
        return bound_tensor_copy(work, weight->list->tensors, tensors, error);
    }
    TRY(opaq_proto_make(weight->shape->sizes, rank, OPAQ_BF16, &weight->kept.spec, device, &proto, error));
    *count = place_buffers(work, &proto, &out, tensors);
    if (work->is_measuring) {
        return OPAQ_OK;
    }
    if (!is_quantized(&weight->given)) {
        return quantize_weight(work, weight, &out, error);
    }
    TRY(opaq_proto_make(weight->shape->sizes, rank, OPAQ_BF16, &weight->given.spec, device, &came, error));
    return copy_buffers(work, &came, weight->list->tensors, &out, error);
}

enum opaq_status bound_weight_copy(struct work *work, const struct bound_weight *weight,
                                   struct opaq_tensor *tensors, int *count, struct opaq_error *error) {
    TRY_AS(weight->name, error, weight_copy(work, weight, tensors, count, error));
    return OPAQ_OK;
}
