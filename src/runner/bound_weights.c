/* runner/bound_weights.c: what a runner does with an operator's weights: it quantizes those that come plain and are
 * quantized by the plan, leaves out the copies that no product reads, and copies the rest. */
#include "runner/bound_weights.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "base/fp_environment.h"
#include "format/proto_layout.h"
#include "op/table/op_tensor.h"
#include "op/plan/plan_words.h"
#include "op/linear/weight_stack.h"
#include "opaq/status.h"
#include "cpu/quant/ref/scale_rules.h"

static const struct opaq_device cpu = {OPAQ_DEVICE_CPU, 0};

/* ---- the plan ---- */

/* The argument called `name`, with `suffix` behind it; -1 if there is none. */
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

/* How a stack is kept whose matrices are quantized each by itself: a number for a tensor becomes one for each row of
 * it, which gives the same products. */
static enum opaq_status stack_form(const struct bound_weight *weight, struct opaq_form *form,
                                   struct opaq_error *error) {
    struct opaq_error reason;
    const struct opaq_format_row *row = opaq_format_row((enum opaq_format)form->spec.format);
    const int64_t square = row->block_rows > row->block_columns ? row->block_rows : row->block_columns;
    const int64_t block = has_option(form, OPAQ_2D) ? square : row->block_rows;
    if (block > 1 && weight->shape->sizes[1] % block != 0) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "%s has %lld rows for each expert, but its blocks have %lld, and would reach "
                         "into the next expert",
                         weight->name, (long long)weight->shape->sizes[1], (long long)block);
    }
    if (form->spec.format == OPAQ_FP8) {
        const uint8_t element = form->spec.element;
        (void)opaq_spec_make(OPAQ_FP8ROW, &form->spec, NULL);
        form->spec.element = element;
    } else if (form->spec.format == OPAQ_NVFP4) {
        form->spec.options |= OPAQ_ROWSCALED;
    }
    if (opaq_spec_check(&form->spec, &reason) != OPAQ_OK) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "%s has a number for each expert, but %s; quantize it first", weight->name,
                         reason.text);
    }
    return OPAQ_OK;
}

/* A word of the plan: about a weight, or kept as it is. */
static enum opaq_status read_word(const struct plan_word *word, void *context, struct opaq_error *error) {
    struct bound_plan *plan = context;
    bool is_about_weights = false;
    for (int i = 0; i < plan->weight_count; ++i) {
        struct bound_weight *weight = &plan->weight[i];
        char given[32];
        (void)snprintf(given, sizeof given, "%s_given", weight->name);
        const bool is_here = word_is(word, "w");
        if (!is_here && !word_is(word, given)) {
            continue;
        }
        is_about_weights = true;
        enum opaq_status status = word_read_form(word, is_here ? &weight->here : &weight->given, error);
        weight->kept = is_here ? weight->here : weight->given;
        weight->kept.spec.usage =
            is_here || (weight->kept.spec.usage & OPAQ_ROWWISE) ? OPAQ_ROWWISE : OPAQ_COLUMNWISE;
        if (status == OPAQ_OK && is_here && weight->shape->count == 3) {
            status = stack_form(weight, &weight->kept, error);
        }
        if (status != OPAQ_OK) {
            return status;
        }
    }
    if (!is_about_weights && plan->length + word->length + 1 < sizeof plan->text) {
        plan->length += (size_t)snprintf(plan->text + plan->length, sizeof plan->text - plan->length, "%s%.*s",
                                         plan->length ? " " : "", (int)word->length, word->text);
    }
    return OPAQ_OK;
}

/* " w_given=nvfp4" */
static enum opaq_status add_given(struct bound_plan *plan, const struct bound_weight *weight,
                                  struct opaq_error *error) {
    char spec[OPAQ_SPEC_TEXT_BYTES];
    const enum opaq_status status = opaq_spec_print(&weight->kept.spec, spec, sizeof spec, error);
    if (status != OPAQ_OK) {
        return status;
    }
    const size_t room = sizeof plan->text - plan->length;
    const int wanted =
        snprintf(plan->text + plan->length, room, "%s%s_given=%s", plan->length ? " " : "", weight->name, spec);
    if (wanted < 0 || (size_t)wanted >= room) {
        return opaq_fail(error, OPAQ_ERROR_TEXT, "the plan is too long with its weights' words");
    }
    plan->length += (size_t)wanted;
    return OPAQ_OK;
}

enum opaq_status bound_plan_make(const struct opaq_op *op, const struct opaq_value *values,
                                 struct bound_plan *plan, struct opaq_error *error) {
    memset(plan, 0, sizeof *plan);
    plan->argument = find_argument(op, "plan", "");
    for (int i = 0; i < op->argument_count && plan->weight_count < WEIGHT_LIMIT; ++i) {
        if (op->argument[i].kind == OPAQ_ARGUMENT_TENSOR_LIST) {
            const char *name = op->argument[i].name;
            const struct opaq_form plain = {.kind = OPAQ_FORM_PLAIN};
            plan->weight[plan->weight_count++] = (struct bound_weight){
                name, &values[i], &values[find_argument(op, name, "_shape")], plain, plain, plain};
        }
    }
    const struct opaq_value *text = &values[plan->argument];
    enum opaq_status status =
        plan_read_words(text->text, (size_t)text->count, sizeof plan->text, plan, read_word, error);
    for (int i = 0; status == OPAQ_OK && i < plan->weight_count; ++i) {
        if (is_quantized(&plan->weight[i].kept)) {
            status = add_given(plan, &plan->weight[i], error);
        }
    }
    return status;
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

/* Copies `bytes` at each place of a strided tensor, the last dimension innermost. */
static void copy_strided(const struct opaq_tensor *from, int dimension, const char *source, size_t bytes,
                         char **target) {
    if (dimension == from->rank) {
        memcpy(*target, source, bytes);
        *target += bytes;
        return;
    }
    const int64_t size = from->shape[dimension];
    if (dimension == from->rank - 1 && from->strides[dimension] == 1 && size > 0) {
        memcpy(*target, source, (size_t)size * bytes);
        *target += (size_t)size * bytes;
        return;
    }
    for (int64_t i = 0; i < size; ++i) {
        copy_strided(from, dimension + 1, source + (size_t)(i * from->strides[dimension]) * bytes, bytes,
                     target);
    }
}

void bound_tensor_copy(const struct opaq_tensor *from, struct scratch *memory, struct opaq_tensor *to) {
    const size_t bytes = (size_t)dtype_bytes(from->dtype);
    *to = *from;
    int64_t stride = 1;
    for (int i = from->rank - 1; i >= 0; --i) {
        to->strides[i] = stride;
        stride *= from->shape[i];
    }
    to->data = scratch_take(memory, (size_t)tensor_elements(from) * bytes);
    char *target = to->data;
    if (target != NULL) {
        copy_strided(from, 0, from->data, bytes, &target);
    }
}

/* Room for a tensor's buffers; a view of them, and the tensors. */
static int place_buffers(const struct opaq_proto *proto, struct scratch *memory, struct opaq_view *view,
                         struct opaq_tensor *tensors) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(proto, buffers);
    (void)tensors_of_proto(proto, tensors);
    memset(view, 0, sizeof *view);
    view->proto = *proto;
    for (int i = 0; i < count; ++i) {
        view->buffer[i] = (struct opaq_span){scratch_take(memory, buffers[i].bytes), buffers[i].bytes};
        tensors[i].data = view->buffer[i].data;
    }
    return count;
}

/* A stack of fp8: each matrix with a scale of its own, written once for each of its rows. */
static enum opaq_status quantize_scaled_stack(const struct bound_weight *weight, const struct opaq_view *plain,
                                              const struct opaq_parallel *parallel, const struct opaq_view *out,
                                              struct opaq_error *error) {
    const int64_t rows = weight->shape->sizes[1];
    const size_t bytes = (size_t)(rows * weight->shape->sizes[2]);
    const struct opaq_form form = form_with_usage(&weight->here, OPAQ_ROWWISE);
    const struct opaq_quantize_args args = {.parallel = parallel};
    for (int64_t i = 0; i < weight->shape->sizes[0]; ++i) {
        const struct opaq_view matrix = weight_plain_at(plain, i);
        float scale;
        struct opaq_view one;
        memset(&one, 0, sizeof one);
        enum opaq_status status = opaq_proto_make(matrix.proto.shape, 2, (enum opaq_element)matrix.proto.dtype,
                                                  &form.spec, cpu, &one.proto, error);
        one.buffer[0] = (struct opaq_span){(char *)out->buffer[0].data + (size_t)i * bytes, bytes};
        one.buffer[1] = (struct opaq_span){&scale, sizeof scale};
        if (status == OPAQ_OK) {
            status = opaq_quantize(&matrix, &args, &one, error);
        }
        if (status != OPAQ_OK) {
            return status;
        }
        for (int64_t row = 0; row < rows; ++row) {
            ((float *)out->buffer[1].data)[i * rows + row] = scale;
        }
    }
    return OPAQ_OK;
}

/* A stack of nvfp4: each row is given the amax of its matrix, or what is stored for that. */
static enum opaq_status quantize_amax_stack(const struct bound_weight *weight, const struct opaq_view *plain,
                                            const struct opaq_parallel *parallel, const struct opaq_view *out,
                                            struct opaq_error *error) {
    const int64_t rows = weight->shape->sizes[1];
    const int64_t count = weight->shape->sizes[0] * rows;
    struct opaq_spec spec = weight->here.spec;
    spec.options &= (uint16_t)~OPAQ_GLOBAL;
    float *amax = malloc((size_t)count * sizeof *amax + 1);
    if (amax == NULL) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "no memory for %lld numbers", (long long)count);
    }
    enum opaq_status status = OPAQ_OK;
    for (int64_t i = 0; status == OPAQ_OK && i < count; ++i) {
        if (i % rows != 0) {
            amax[i] = amax[i - 1];
            continue;
        }
        const struct opaq_view matrix = weight_plain_at(plain, i / rows);
        status = opaq_amax(&matrix, &spec, OPAQ_ROWWISE, parallel, &amax[i], 1, error);
        const uint64_t saved = fp_environment_enter();
        amax[i] = nvfp4_stored(&weight->here.spec, amax[i]);
        fp_environment_leave(saved);
    }
    const struct opaq_quantize_args args = {.amax_rowwise = amax, .parallel = parallel};
    if (status == OPAQ_OK) {
        status = opaq_quantize(plain, &args, out, error);
    }
    free(amax);
    return status;
}

static enum opaq_status quantize_weight(const struct bound_weight *weight, const struct opaq_parallel *parallel,
                                        const struct opaq_view *out, struct opaq_error *error) {
    const struct opaq_quantize_args args = {.parallel = parallel};
    struct opaq_view plain;
    const enum opaq_status status =
        view_of_tensor("runner_create", weight->name, weight->list->tensors, &plain, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (weight->here.spec.format != weight->kept.spec.format) {
        return quantize_scaled_stack(weight, &plain, parallel, out, error);
    }
    if (weight->here.spec.options != weight->kept.spec.options) {
        return quantize_amax_stack(weight, &plain, parallel, out, error);
    }
    return opaq_quantize(&plain, &args, out, error);
}

/* The buffers of the copy that is kept, from those that came. */
static void copy_buffers(const struct opaq_proto *came, const struct opaq_tensor *from,
                         const struct opaq_view *out) {
    struct opaq_buffer theirs[OPAQ_BUFFER_LIMIT];
    struct opaq_buffer mine[OPAQ_BUFFER_LIMIT];
    const int their_count = proto_buffers(came, theirs);
    const int count = proto_buffers(&out->proto, mine);
    for (int i = 0; i < count; ++i) {
        for (int k = 0; k < their_count; ++k) {
            if (strcmp(theirs[k].name, mine[i].name) == 0 && mine[i].bytes > 0) {
                memcpy(out->buffer[i].data, from[k].data, mine[i].bytes);
            }
        }
    }
}

enum opaq_status bound_weight_copy(const struct bound_weight *weight, const struct opaq_parallel *parallel,
                                   struct scratch *memory, struct opaq_tensor *tensors, int *count,
                                   struct opaq_error *error) {
    struct opaq_proto came;
    struct opaq_proto proto;
    struct opaq_view out;
    struct opaq_error reason;
    const int rank = (int)weight->shape->count;
    if (!is_quantized(&weight->kept)) {
        bound_tensor_copy(weight->list->tensors, memory, tensors);
        *count = 1;
        return OPAQ_OK;
    }
    enum opaq_status status =
        opaq_proto_make(weight->shape->sizes, rank, OPAQ_BF16, &weight->kept.spec, cpu, &proto, &reason);
    if (status == OPAQ_OK && is_quantized(&weight->given)) {
        status =
            opaq_proto_make(weight->shape->sizes, rank, OPAQ_BF16, &weight->given.spec, cpu, &came, &reason);
    }
    if (status == OPAQ_OK) {
        *count = place_buffers(&proto, memory, &out, tensors);
    }
    if (status == OPAQ_OK && memory->memory != NULL) {
        if (is_quantized(&weight->given)) {
            copy_buffers(&came, weight->list->tensors, &out);
        } else {
            status = quantize_weight(weight, parallel, &out, &reason);
        }
    }
    return status == OPAQ_OK ? OPAQ_OK
                             : opaq_fail(error, status, "runner_create: %s: %s", weight->name, reason.text);
}
