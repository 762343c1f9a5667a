/* op/tensor_check.c: checks that several operations make at the door. */
#include "op/tensor_check.h"

#include <string.h>

#include "format/proto_layout.h"
#include "opaq/status.h"

static enum opaq_status check_tensor(const char *operation, const char *what, const struct opaq_view *view,
                                     int is_quantized, struct opaq_error *error) {
    struct opaq_error reason;
    if (view == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is NULL", operation, what);
    }
    if (opaq_view_check(view, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s: %s", operation, what, reason.text);
    }
    if (view->proto.is_quantized != is_quantized) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is a %s tensor, expected a %s one", operation,
                         what, is_quantized ? "plain" : "quantized", is_quantized ? "quantized" : "plain");
    }
    if (view->proto.device.type != OPAQ_DEVICE_CPU) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s: %s is on cuda:%d, this build works on the cpu",
                         operation, what, view->proto.device.index);
    }
    return OPAQ_OK;
}

enum opaq_status check_plain_tensor(const char *operation, const char *what, const struct opaq_view *view,
                                    struct opaq_error *error) {
    return check_tensor(operation, what, view, 0, error);
}

enum opaq_status check_quantized_tensor(const char *operation, const char *what, const struct opaq_view *view,
                                        struct opaq_error *error) {
    return check_tensor(operation, what, view, 1, error);
}

/* The bytes from the first to the last that a view's buffer covers. */
static struct opaq_span covered(const struct opaq_view *view, int index) {
    struct opaq_buffer buffer;
    proto_buffer_at(&view->proto, index, &buffer);
    size_t bytes = buffer.bytes;
    if (!view->proto.is_quantized && bytes > 0) {
        const int64_t rows = opaq_proto_rows(&view->proto);
        bytes = (size_t)((rows - 1) * view->row_stride + opaq_proto_columns(&view->proto)) *
                (size_t)buffer.entry_bytes;
    }
    return (struct opaq_span){view->buffer[index].data, bytes};
}

enum opaq_status check_pair(const char *operation, const struct opaq_view *plain,
                            const struct opaq_view *quantized, struct opaq_error *error) {
    const struct opaq_proto *a = &plain->proto;
    const struct opaq_proto *b = &quantized->proto;
    if (a->rank != b->rank || memcmp(a->shape, b->shape, sizeof a->shape) != 0) {
        char first[OPAQ_PROTO_TEXT_BYTES];
        char second[OPAQ_PROTO_TEXT_BYTES];
        (void)opaq_proto_print(a, first, sizeof first, NULL);
        (void)opaq_proto_print(b, second, sizeof second, NULL);
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: the shapes differ: %s and %s", operation, first, second);
    }
    const struct opaq_span x = covered(plain, 0);
    const int count = opaq_proto_buffer_count(b);
    for (int i = 0; i < count; ++i) {
        const struct opaq_span q = covered(quantized, i);
        if (x.bytes > 0 && q.bytes > 0 && (uintptr_t)x.data < (uintptr_t)q.data + q.bytes &&
            (uintptr_t)q.data < (uintptr_t)x.data + x.bytes) {
            struct opaq_buffer buffer;
            proto_buffer_at(b, i, &buffer);
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: buffer \"%s\" overlaps the plain tensor", operation,
                             buffer.name);
        }
    }
    return OPAQ_OK;
}
