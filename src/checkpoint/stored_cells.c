/* checkpoint/stored_cells.c: strided tensors as matrices. */
#include "checkpoint/stored_cells.h"

#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "format/element_codec.h"
#include "opaq/status.h"

float cells_float(const struct cells *cells, int64_t r, int64_t c) {
    const char *at = cell_at(cells, r, c);
    if (cells->dtype == OPAQ_DTYPE_U8) {
        return decode_e8m0(*(const uint8_t *)at);
    }
    uint16_t half;
    float value;
    memcpy(&half, at, sizeof half);
    if (cells->dtype == OPAQ_DTYPE_BF16) {
        return decode_bf16(half);
    }
    memcpy(&value, at, sizeof value);
    return value;
}

/* The common step of dimensions [begin, end) merged into one; false if there is none. */
static bool merge(const struct opaq_tensor *tensor, int begin, int end, int64_t *step) {
    int64_t count = 1;
    *step = 0;
    for (int i = end - 1; i >= begin; --i) {
        if (tensor->shape[i] == 1) {
            continue;
        }
        if (count == 1) {
            *step = tensor->strides[i];
        } else if (tensor->strides[i] != *step * count) {
            return false;
        }
        count *= tensor->shape[i];
    }
    return true;
}

enum opaq_status cells_check(const char *operation, const char *what, const struct opaq_tensor *tensor,
                             struct opaq_error *error) {
    if (tensor->rank < 0 || tensor->rank > OPAQ_RANK_LIMIT) {
        return tensor->rank == -1 ? opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s is missing", operation, what)
                                  : opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s has rank %d, expected 0 to %d",
                                              operation, what, tensor->rank, OPAQ_RANK_LIMIT);
    }
    if (tensor->device.type != OPAQ_DEVICE_CPU) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s: %s is on cuda:%d, this works on the cpu",
                         operation, what, tensor->device.index);
    }
    const int64_t elements = tensor_elements(tensor);
    if (elements < 0 || tensor_reach(tensor) < 0) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                         "%s: %s has negative sizes or strides, or reaches beyond 2^62 bytes", operation, what);
    }
    if (elements > 0 && tensor->data == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s has %lld elements, but its data is NULL",
                         operation, what, (long long)elements);
    }
    return OPAQ_OK;
}

enum opaq_status cells_of(const char *operation, const char *what, const struct opaq_tensor *tensor,
                          int64_t columns, struct cells *cells, struct opaq_error *error) {
    char shape[128];
    int split = tensor->rank;
    int64_t product = 1;
    while (product != columns && split > 0 && checked_multiply(product, tensor->shape[split - 1], &product)) {
        --split;
    }
    if (product != columns) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %s has the shape %s, expected rows of %lld entries",
                         operation, what, shape_text(tensor, shape, sizeof shape), (long long)columns);
    }
    *cells = (struct cells){.data = tensor->data, .dtype = tensor->dtype, .rows = 1, .inner_rows = 1};
    for (int i = split - 1; i >= 0; --i) {
        cells->inner_rows = cells->rows == 1 ? tensor->shape[i] : cells->inner_rows;
        if (!checked_multiply(cells->rows, tensor->shape[i], &cells->rows)) {
            return opaq_fail(error, OPAQ_ERROR_OVERFLOW,
                             "%s: %s has the shape %s, which is more than 2^62 rows", operation, what,
                             shape_text(tensor, shape, sizeof shape));
        }
    }
    if (cells->rows != 0 && columns != 0 &&
        !(merge(tensor, split, tensor->rank, &cells->column_step) &&
          merge(tensor, 0, split, &cells->row_step))) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%s: the strides of %s, of the shape %s, are not those of a matrix with %lld columns",
                         operation, what, shape_text(tensor, shape, sizeof shape), (long long)columns);
    }
    return OPAQ_OK;
}
