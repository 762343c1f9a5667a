/* format/proto.c: prototypes and their buffers, evaluated from the format table. */
#include "opaq/proto.h"

#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"
#include "format/proto_layout.h"
#include "opaq/status.h"

/* Whether the rank is within limits; opaq_proto_check checks the other fields. */
static bool has_rank(const struct opaq_proto *proto) {
    return proto != NULL && proto->rank >= 0 && proto->rank <= OPAQ_RANK_LIMIT;
}

int64_t opaq_proto_rows(const struct opaq_proto *proto) {
    int64_t rows = 1;
    if (!has_rank(proto)) {
        return 0;
    }
    for (int i = 0; i + 1 < proto->rank; ++i) {
        if (!checked_multiply(rows, proto->shape[i], &rows)) {
            return -1;
        }
    }
    return rows;
}

int64_t opaq_proto_columns(const struct opaq_proto *proto) {
    if (!has_rank(proto)) {
        return 0;
    }
    return proto->rank > 0 ? proto->shape[proto->rank - 1] : 1;
}

static bool is_present(const struct opaq_buffer_row *row, const struct opaq_spec *spec) {
    return (row->usage & spec->usage) != 0 && (row->options_needed & ~(uint32_t)spec->options) == 0 &&
           (row->options_excluded & spec->options) == 0;
}

/* Iterates over the rows of the buffers that a quantized tensor has: the first one present from `row` on; NULL
 * at the end. */
static const struct opaq_buffer_row *next_present(const struct opaq_spec *spec,
                                                  const struct opaq_buffer_row *row) {
    const struct opaq_format_row *format = opaq_format_row((enum opaq_format)spec->format);
    const struct opaq_buffer_row *end = format == NULL ? row : format->buffers + format->buffer_count;
    while (row != end && !is_present(row, spec)) {
        ++row;
    }
    return row == end ? NULL : row;
}

static const struct opaq_buffer_row *first_present(const struct opaq_spec *spec) {
    const struct opaq_format_row *format = opaq_format_row((enum opaq_format)spec->format);
    return format == NULL ? NULL : next_present(spec, format->buffers);
}

int opaq_proto_buffer_count(const struct opaq_proto *proto) {
    if (proto == NULL || !proto->is_quantized) {
        return proto == NULL ? 0 : 1;
    }
    int count = 0;
    for (const struct opaq_buffer_row *row = first_present(&proto->spec); row != NULL;
         row = next_present(&proto->spec, row + 1)) {
        ++count;
    }
    return count;
}

int opaq_proto_find(const struct opaq_proto *proto, enum opaq_role role, enum opaq_usage usage) {
    if (proto == NULL || !proto->is_quantized || (proto->spec.usage & (int)usage) == 0) {
        return -1;
    }
    int index = 0;
    for (const struct opaq_buffer_row *row = first_present(&proto->spec); row != NULL;
         row = next_present(&proto->spec, row + 1), ++index) {
        if (row->role == role && (row->usage & (int)usage) != 0) {
            return index;
        }
    }
    return -1;
}

/* Evaluates the shape. In a data buffer, an extent of exactly the rows becomes the leading dimensions. */
static void fill_shape(const struct opaq_proto *proto, const struct opaq_buffer_row *row, int64_t rows,
                       int64_t columns, struct opaq_buffer *buffer) {
    for (int i = 0; i < row->rank; ++i) {
        const struct opaq_extent *extent = &row->extent[i];
        const bool leading = extent->dim == OPAQ_DIM_ROWS && extent->per == 1 && extent->to == 1;
        if (leading && row->role == OPAQ_ROLE_DATA) {
            for (int d = 0; d + 1 < proto->rank; ++d) {
                buffer->shape[buffer->rank++] = proto->shape[d];
            }
        } else {
            buffer->shape[buffer->rank++] = opaq_extent_eval(extent, rows, columns);
        }
    }
}

/* `row` NULL: the one buffer of a plain tensor. */
static void describe(const struct opaq_proto *proto, const struct opaq_buffer_row *row, int64_t rows,
                     int64_t columns, struct opaq_buffer *buffer) {
    memset(buffer, 0, sizeof *buffer);
    if (row == NULL) {
        buffer->name = "data";
        buffer->role = OPAQ_ROLE_DATA;
        buffer->element = (enum opaq_element)proto->dtype;
        buffer->rank = proto->rank;
        memcpy(buffer->shape, proto->shape, sizeof buffer->shape);
    } else {
        buffer->name = row->name;
        buffer->role = row->role;
        buffer->usage = row->usage;
        buffer->element =
            (enum opaq_element)(row->element == OPAQ_ELEMENT_OF_SPEC ? proto->spec.element : row->element);
        fill_shape(proto, row, rows, columns, buffer);
    }
    const int bits = opaq_element_info(buffer->element)->bits;
    buffer->packing = bits < 8 ? 8 / bits : 1;
    buffer->entry_bytes = bits < 8 ? 1 : bits / 8;
}

/* Sets strides and bytes from the shape; false on overflow. */
static bool finish(struct opaq_buffer *buffer) {
    int64_t stride = 1;
    int64_t entries = 1;
    for (int i = buffer->rank - 1; i >= 0; --i) {
        buffer->strides[i] = stride;
        if (buffer->shape[i] < 0 || !checked_multiply(entries, buffer->shape[i], &entries) ||
            !checked_multiply(stride, max_int64(buffer->shape[i], 1), &stride)) {
            return false;
        }
    }
    int64_t bytes;
    if (!checked_multiply(entries, buffer->entry_bytes, &bytes)) {
        return false;
    }
    buffer->bytes = (size_t)bytes;
    return true;
}

static enum opaq_status check_shape(const struct opaq_proto *proto, struct opaq_error *error) {
    for (int i = 0; i < proto->rank; ++i) {
        if (proto->shape[i] < 0) {
            return opaq_fail(error, OPAQ_ERROR_SHAPE, "proto: dimension %d is %lld, expected at least 0", i,
                             (long long)proto->shape[i]);
        }
    }
    for (int i = proto->rank; i < OPAQ_RANK_LIMIT; ++i) {
        if (proto->shape[i] != 0) {
            return opaq_fail(error, OPAQ_ERROR_SHAPE, "proto: rank is %d, but dimension %d is set to %lld",
                             proto->rank, i, (long long)proto->shape[i]);
        }
    }
    int64_t elements;
    const int64_t rows = opaq_proto_rows(proto);
    const int64_t columns = opaq_proto_columns(proto);
    if (rows < 0 || !checked_multiply(rows, columns, &elements) || columns > OPAQ_SIZE_LIMIT) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                         "proto: a rank-%d tensor with last dimension %lld has more than 2^62 elements",
                         proto->rank, (long long)columns);
    }
    const struct opaq_buffer_row *row = proto->is_quantized ? first_present(&proto->spec) : NULL;
    int64_t total = 0;
    do {
        struct opaq_buffer buffer;
        describe(proto, row, rows, columns, &buffer);
        if (!finish(&buffer) || (int64_t)buffer.bytes > OPAQ_SIZE_LIMIT - total) {
            return opaq_fail(
                error, OPAQ_ERROR_OVERFLOW,
                "proto: up to buffer \"%s\" a rank-%d tensor with last dimension %lld has more than 2^62 "
                "bytes",
                buffer.name, proto->rank, (long long)columns);
        }
        total += (int64_t)buffer.bytes;
        row = row == NULL ? NULL : next_present(&proto->spec, row + 1);
    } while (row != NULL);
    return OPAQ_OK;
}

enum opaq_status opaq_proto_check(const struct opaq_proto *proto, struct opaq_error *error) {
    static const struct opaq_spec no_spec = {0};
    if (proto == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "proto: NULL");
    }
    const bool quantized = proto->is_quantized == 1;
    if (proto->is_quantized != 0 && !quantized) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "proto: is_quantized is %d, expected 0 or 1",
                         proto->is_quantized);
    }
    if (proto->rank < (quantized ? 1 : 0) || proto->rank > OPAQ_RANK_LIMIT) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "proto: rank is %d, expected %d to %d", proto->rank,
                         quantized ? 1 : 0, OPAQ_RANK_LIMIT);
    }
    if (proto->dtype != OPAQ_F32 && proto->dtype != OPAQ_BF16 && proto->dtype != OPAQ_F16) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "proto: dtype is %d, expected f16 (%d), bf16 (%d) or f32 (%d)", proto->dtype, OPAQ_F16,
                         OPAQ_BF16, OPAQ_F32);
    }
    const struct opaq_device device = proto->device;
    if ((device.type != OPAQ_DEVICE_CPU && device.type != OPAQ_DEVICE_CUDA) || device.index < 0 ||
        (device.type == OPAQ_DEVICE_CPU && device.index != 0)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "proto: device is (%d, %d), expected cpu (0, 0) or cuda (1, n)", device.type,
                         device.index);
    }
    if (!quantized && !opaq_spec_equal(&proto->spec, &no_spec)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "proto: a plain tensor carries a spec, expected all zero");
    }
    if (quantized) {
        TRY(opaq_spec_check(&proto->spec, error));
    }
    return check_shape(proto, error);
}

enum opaq_status opaq_proto_make(const int64_t *shape, int rank, enum opaq_element dtype,
                                 const struct opaq_spec *spec, struct opaq_device device,
                                 struct opaq_proto *proto, struct opaq_error *error) {
    if (proto == NULL || (shape == NULL && rank > 0)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "proto_make: %s is NULL",
                         proto == NULL ? "proto" : "shape");
    }
    struct opaq_proto made;
    memset(&made, 0, sizeof made);
    made.rank = rank;
    made.dtype = (int32_t)dtype;
    made.is_quantized = spec != NULL;
    made.device = device;
    for (int i = 0; i < rank && i < OPAQ_RANK_LIMIT; ++i) {
        made.shape[i] = shape[i];
    }
    if (spec != NULL) {
        made.spec = *spec;
    }
    TRY(opaq_proto_check(&made, error));
    *proto = made;
    return OPAQ_OK;
}

int dtype_bytes(int32_t dtype) {
    switch (dtype) {
    case OPAQ_DTYPE_U8:
        return 1;
    case OPAQ_DTYPE_F16:
    case OPAQ_DTYPE_BF16:
        return 2;
    case OPAQ_DTYPE_F32:
    case OPAQ_DTYPE_I32:
        return 4;
    case OPAQ_DTYPE_I64:
        return 8;
    default:
        return 0;
    }
}

int proto_buffers(const struct opaq_proto *proto, struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT]) {
    const struct opaq_buffer_row *row = proto->is_quantized ? first_present(&proto->spec) : NULL;
    const int64_t rows = opaq_proto_rows(proto);
    const int64_t columns = opaq_proto_columns(proto);
    int count = 0;
    do {
        describe(proto, row, rows, columns, &buffers[count]);
        (void)finish(&buffers[count++]); /* opaq_proto_check has checked for overflow */
        row = row == NULL ? NULL : next_present(&proto->spec, row + 1);
    } while (row != NULL && count < OPAQ_BUFFER_LIMIT);
    return count;
}

enum opaq_status opaq_proto_buffer(const struct opaq_proto *proto, int index, struct opaq_buffer *buffer,
                                   struct opaq_error *error) {
    TRY(opaq_proto_check(proto, error));
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(proto, buffers);
    if (buffer == NULL || index < 0 || index >= count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "proto_buffer: index is %d of %d buffers%s", index, count,
                         buffer == NULL ? ", and buffer is NULL" : "");
    }
    *buffer = buffers[index];
    return OPAQ_OK;
}

enum opaq_status opaq_proto_bytes(const struct opaq_proto *proto, size_t *bytes, struct opaq_error *error) {
    TRY(opaq_proto_check(proto, error));
    if (bytes == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "proto_bytes: bytes is NULL");
    }
    size_t total = 0;
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(proto, buffers);
    for (int i = 0; i < count; ++i) {
        total += buffers[i].bytes;
    }
    *bytes = total;
    return OPAQ_OK;
}

enum opaq_status opaq_proto_update_usage(struct opaq_proto *proto, int usage, struct opaq_error *error) {
    if (proto == NULL || !proto->is_quantized) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "proto_update_usage: %s",
                         proto == NULL ? "proto is NULL" : "a plain tensor has no usages");
    }
    if (usage < OPAQ_ROWWISE || usage > OPAQ_BOTH) {
        return opaq_fail(error, OPAQ_ERROR_SPEC,
                         "proto_update_usage: usage is %d, expected 1 (rowwise), 2 (columnwise) or 3 (both)",
                         usage);
    }
    struct opaq_proto changed = *proto;
    changed.spec.usage = (uint8_t)usage;
    TRY(opaq_proto_check(&changed, error));
    *proto = changed;
    return OPAQ_OK;
}

int opaq_proto_equal(const struct opaq_proto *a, const struct opaq_proto *b) {
    if (a == NULL || b == NULL) {
        return 0;
    }
    return a->rank == b->rank && a->dtype == b->dtype && a->is_quantized == b->is_quantized &&
           a->device.type == b->device.type && a->device.index == b->device.index &&
           memcmp(a->shape, b->shape, sizeof a->shape) == 0 && opaq_spec_equal(&a->spec, &b->spec);
}
