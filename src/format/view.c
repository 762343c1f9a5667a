/* format/view.c: makes and checks views. */
#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"
#include "format/proto_layout.h"
#include "opaq/proto.h"
#include "opaq/status.h"

enum { BIND_ALIGNMENT = 64 };

/* The constant distance between rows that the leading strides amount to; false if there is none. Dimensions of
 * size 1 may have any stride. */
static bool common_row_stride(const int64_t *shape, const int64_t *strides, int rank, int64_t *row_stride) {
    int64_t expected = -1;
    for (int i = rank - 2; i >= 0; --i) {
        if (shape[i] == 1) {
            continue;
        }
        if (expected < 0) {
            *row_stride = strides[i];
        } else if (strides[i] != expected) {
            return false;
        }
        if (strides[i] < 0 || !checked_multiply(strides[i], shape[i], &expected)) {
            return false;
        }
    }
    return true;
}

static bool is_empty(const struct opaq_proto *proto) {
    for (int i = 0; i < proto->rank; ++i) {
        if (proto->shape[i] == 0) {
            return true;
        }
    }
    return false;
}

static enum opaq_status check_plain(const struct opaq_view *view, struct opaq_error *error) {
    const int64_t rows = opaq_proto_rows(&view->proto);
    const int64_t columns = opaq_proto_columns(&view->proto);
    const int entry_bytes = opaq_element_info((enum opaq_element)view->proto.dtype)->bits / 8;
    if (view->row_stride < columns) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "view: rows of %lld elements lie %lld elements apart",
                         (long long)columns, (long long)view->row_stride);
    }
    int64_t needed = 0;
    if (!is_empty(&view->proto) && (!checked_multiply(rows - 1, view->row_stride, &needed) ||
                                    !checked_multiply(needed + columns, entry_bytes, &needed))) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                         "view: %lld rows %lld elements apart have more than 2^62 bytes", (long long)rows,
                         (long long)view->row_stride);
    }
    const struct opaq_span span = view->buffer[0];
    if (needed > 0 && (span.data == NULL || span.bytes < (size_t)needed)) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER,
                         "view: %lld rows of %lld elements need %lld bytes, the buffer has %zu%s",
                         (long long)rows, (long long)columns, (long long)needed, span.bytes,
                         span.data == NULL ? " and is NULL" : "");
    }
    if ((uintptr_t)span.data % (uintptr_t)entry_bytes != 0) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "view: the data is not aligned to its elements' %d bytes",
                         entry_bytes);
    }
    return OPAQ_OK;
}

enum opaq_status opaq_view_check(const struct opaq_view *view, struct opaq_error *error) {
    if (view == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "view: NULL");
    }
    TRY(opaq_proto_check(&view->proto, error));
    if (!view->proto.is_quantized) {
        return check_plain(view, error);
    }
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(&view->proto, buffers);
    for (int i = 0; i < count; ++i) {
        const struct opaq_buffer buffer = buffers[i];
        const struct opaq_span span = view->buffer[i];
        if (buffer.bytes > 0 && (span.data == NULL || span.bytes < buffer.bytes)) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "view: buffer \"%s\" needs %zu bytes, it has %zu%s",
                             buffer.name, buffer.bytes, span.bytes, span.data == NULL ? " and is NULL" : "");
        }
        if ((uintptr_t)span.data % (uintptr_t)buffer.entry_bytes != 0) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER,
                             "view: buffer \"%s\" is not aligned to its entries' %d bytes", buffer.name,
                             buffer.entry_bytes);
        }
    }
    return OPAQ_OK;
}

enum opaq_status opaq_view_plain(const int64_t *shape, const int64_t *strides, int rank,
                                 enum opaq_element dtype, struct opaq_device device, void *data, size_t bytes,
                                 struct opaq_view *view, struct opaq_error *error) {
    struct opaq_view made;
    if (view == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "view_plain: view is NULL");
    }
    memset(&made, 0, sizeof made);
    TRY(opaq_proto_make(shape, rank, dtype, NULL, device, &made.proto, error));
    const int64_t columns = opaq_proto_columns(&made.proto);
    made.row_stride = columns;
    made.buffer[0] = (struct opaq_span){data, bytes};
    if (strides != NULL && rank > 0 && !is_empty(&made.proto)) {
        if (columns != 1 && strides[rank - 1] != 1) {
            return opaq_fail(error, OPAQ_ERROR_BUFFER, "view_plain: the last stride is %lld, expected 1",
                             (long long)strides[rank - 1]);
        }
        if (!common_row_stride(shape, strides, rank, &made.row_stride)) {
            return opaq_fail(
                error, OPAQ_ERROR_BUFFER,
                "view_plain: the leading strides of this rank-%d tensor are not those of rows at one "
                "common distance; make it contiguous first",
                rank);
        }
    }
    TRY(check_plain(&made, error)); /* the prototype was checked when it was made */
    *view = made;
    return OPAQ_OK;
}

enum opaq_status opaq_view_quantized(const struct opaq_proto *proto, const struct opaq_span *spans, int count,
                                     struct opaq_view *view, struct opaq_error *error) {
    struct opaq_view made;
    TRY(opaq_proto_check(proto, error));
    const int expected = opaq_proto_buffer_count(proto);
    if (view == NULL || spans == NULL || !proto->is_quantized || count != expected) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "view_quantized: got %d buffers%s%s, expected %d of a%s tensor", count,
                         spans == NULL ? " (NULL)" : "", view == NULL ? " for no view" : "", expected,
                         proto->is_quantized ? " quantized" : " quantized, not a plain,");
    }
    memset(&made, 0, sizeof made);
    made.proto = *proto;
    memcpy(made.buffer, spans, (size_t)count * sizeof *spans);
    TRY(opaq_view_check(&made, error));
    *view = made;
    return OPAQ_OK;
}

enum opaq_status opaq_view_bind_bytes(const struct opaq_proto *proto, size_t *bytes, struct opaq_error *error) {
    TRY(opaq_proto_check(proto, error));
    if (bytes == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "view_bind_bytes: bytes is NULL");
    }
    int64_t total = 0; /* at most 2^62 + 6 * 63, see opaq_proto_check */
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(proto, buffers);
    for (int i = 0; i < count; ++i) {
        total += round_up((int64_t)buffers[i].bytes, BIND_ALIGNMENT);
    }
    *bytes = (size_t)total;
    return OPAQ_OK;
}

enum opaq_status opaq_view_bind(const struct opaq_proto *proto, void *memory, size_t bytes,
                                struct opaq_view *view, struct opaq_error *error) {
    size_t needed;
    TRY(opaq_view_bind_bytes(proto, &needed, error));
    if (view == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "view_bind: view is NULL");
    }
    if (bytes < needed || (memory == NULL && needed > 0) || (uintptr_t)memory % BIND_ALIGNMENT != 0) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER,
                         "view_bind: needs %zu bytes aligned to %d, got %zu bytes at an address that is %s",
                         needed, BIND_ALIGNMENT, bytes,
                         memory == NULL                            ? "NULL"
                         : (uintptr_t)memory % BIND_ALIGNMENT != 0 ? "not aligned"
                                                                   : "aligned");
    }
    struct opaq_view made;
    memset(&made, 0, sizeof made);
    made.proto = *proto;
    made.row_stride = proto->is_quantized ? 0 : opaq_proto_columns(proto);
    size_t offset = 0;
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(proto, buffers);
    for (int i = 0; i < count; ++i) {
        if (buffers[i].bytes > 0) {
            made.buffer[i] = (struct opaq_span){(char *)memory + offset, buffers[i].bytes};
        }
        offset += (size_t)round_up((int64_t)buffers[i].bytes, BIND_ALIGNMENT);
    }
    *view = made;
    return OPAQ_OK;
}
