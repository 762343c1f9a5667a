/* op/table/tensor_check.c: argument checks of public functions. */
#include "op/table/tensor_check.h"

#include <string.h>

#include "base/try.h"
#include "format/proto_layout.h"

static enum opaq_status check_tensor(const char *what, const struct opaq_view *view, int is_quantized,
                                     struct opaq_error *error) {
    if (view == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is NULL", what);
    }
    TRY_AS(what, error, opaq_view_check(view, error));
    if (view->proto.is_quantized != is_quantized) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s is a %s tensor, expected a %s one", what,
                         is_quantized ? "plain" : "quantized", is_quantized ? "quantized" : "plain");
    }
    return OPAQ_OK;
}

enum opaq_status check_plain_tensor(const char *what, const struct opaq_view *view, struct opaq_error *error) {
    return check_tensor(what, view, 0, error);
}

enum opaq_status check_quantized_tensor(const char *what, const struct opaq_view *view,
                                        struct opaq_error *error) {
    return check_tensor(what, view, 1, error);
}

enum opaq_status work_of(const struct opaq_execution *given, struct opaq_device device,
                         struct opaq_execution *execution, struct work *work, struct opaq_error *error) {
    memset(work, 0, sizeof *work);
    TRY(kernel_list_check(error));
    TRY(backend_of(device, &work->backend, error));
    TRY(execution_of(given, device, execution, error));
    work->execution = execution;
    return OPAQ_OK;
}

enum opaq_status check_usage(const struct opaq_view *quantized, int usage, int *copy,
                             struct opaq_error *error) {
    const int present = quantized->proto.spec.usage;
    *copy = usage == 0 ? (present & OPAQ_ROWWISE ? OPAQ_ROWWISE : OPAQ_COLUMNWISE) : usage;
    if ((*copy != OPAQ_ROWWISE && *copy != OPAQ_COLUMNWISE) || (*copy & present) == 0) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "usage is %d, expected 0 or one that the tensor has (%d)",
                         usage, present);
    }
    return OPAQ_OK;
}

/* The bytes from the first to the last that a plain view covers. */
static size_t covered_bytes(const struct opaq_view *plain) {
    const int64_t rows = opaq_proto_rows(&plain->proto);
    const int64_t columns = opaq_proto_columns(&plain->proto);
    const int bits = opaq_element_info((enum opaq_element)plain->proto.dtype)->bits;
    return rows == 0 || columns == 0 ? 0
                                     : (size_t)((rows - 1) * plain->row_stride + columns) * (size_t)(bits / 8);
}

enum opaq_status check_pair(const struct opaq_view *plain, const struct opaq_view *quantized,
                            struct opaq_error *error) {
    const struct opaq_proto *a = &plain->proto;
    const struct opaq_proto *b = &quantized->proto;
    if (a->device.type != b->device.type || a->device.index != b->device.index) {
        return opaq_fail(
            error, OPAQ_ERROR_ARGUMENT,
            "the plain tensor is on %s:%d and the quantized one on %s:%d, expected the same device",
            a->device.type == OPAQ_DEVICE_CPU ? "cpu" : "cuda", a->device.index,
            b->device.type == OPAQ_DEVICE_CPU ? "cpu" : "cuda", b->device.index);
    }
    if (a->rank != b->rank || memcmp(a->shape, b->shape, sizeof a->shape) != 0) {
        char first[OPAQ_PROTO_TEXT_BYTES];
        char second[OPAQ_PROTO_TEXT_BYTES];
        (void)opaq_proto_print(a, first, sizeof first, NULL);
        (void)opaq_proto_print(b, second, sizeof second, NULL);
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "the shapes differ: %s and %s", first, second);
    }
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(b, buffers);
    const uintptr_t x = (uintptr_t)plain->buffer[0].data;
    const size_t x_bytes = covered_bytes(plain);
    for (int i = 0; i < count; ++i) {
        const uintptr_t q = (uintptr_t)quantized->buffer[i].data;
        if (x_bytes > 0 && buffers[i].bytes > 0 && x < q + buffers[i].bytes && q < x + x_bytes) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "buffer \"%s\" overlaps the plain tensor",
                             buffers[i].name);
        }
    }
    return OPAQ_OK;
}
