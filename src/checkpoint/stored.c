/* checkpoint/stored.c: copies rows of a quantized tensor to and from the plain matrices of checkpoints. */
#include "opaq/stored.h"

#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"
#include "checkpoint/stored_cells.h"
#include "definition/segment_ref.h"
#include "format/proto_layout.h"
#include "op/quantize/rearrange.h"
#include "op/table/op_tensor.h"
#include "op/table/tensor_check.h"
#include "opaq/status.h"

/* One call, checked. */
struct stored_range {
    const char *operation;
    struct quant_job job;
    const struct quant_copy *copy;
    const struct opaq_format_row *format;
    int64_t all; /* rows of the tensor */
    int64_t columns;
    int64_t first;
    int64_t rows;
    int64_t data_columns; /* bytes in a stored row */
    int64_t scale_rows;
    int64_t scale_columns;
    bool has_float_scale;
    struct cells data;
    struct cells scale;
    struct cells global;
};

static enum opaq_status refuse_dtype(const char *operation, const char *what, int32_t dtype,
                                     const char *expected, struct opaq_error *error) {
    return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: %s holds %s, expected %s", operation, what,
                     dtype_name(dtype), expected);
}

/* ---- checks ---- */

static enum opaq_status check_tensor(const char *operation, const struct opaq_view *view,
                                     const struct opaq_stored *stored, struct stored_range *range,
                                     struct opaq_error *error) {
    memset(range, 0, sizeof *range);
    range->operation = operation;
    TRY_AS(operation, error, check_quantized_tensor("the tensor", view, error));
    range->format = opaq_format_row((enum opaq_format)view->proto.spec.format);
    if (view->proto.device.type != OPAQ_DEVICE_CPU) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s: the tensor is on cuda:%d, this works on the cpu",
                         operation, view->proto.device.index);
    }
    if (stored == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: the stored rows are NULL", operation);
    }
    if (view->proto.spec.usage != OPAQ_ROWWISE) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: the tensor is %s, expected one with a rowwise copy only", operation,
                         view->proto.spec.usage == OPAQ_BOTH ? "both" : "columnwise");
    }
    if (view->proto.spec.options & OPAQ_TILED) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: the tensor is tiled; convert it", operation);
    }
    locate(view, &range->job);
    range->copy = &range->job.copy[0];
    range->all = opaq_proto_rows(&view->proto);
    range->columns = opaq_proto_columns(&view->proto);
    range->data_columns = range->copy->is_packed ? ceil_div(range->columns, 2) : range->columns;
    range->has_float_scale = located_scale_bytes(&view->proto, OPAQ_ROWWISE) == sizeof(float);
    return OPAQ_OK;
}

/* Stacked matrices are consecutive rows only if no block spans two of them. */
static enum opaq_status check_stack(const struct stored_range *range, struct opaq_error *error) {
    const int64_t inner = range->data.inner_rows;
    const int64_t block = range->format->block_rows == 0 ? 1 : range->copy->block_rows;
    if (range->data.rows != inner && inner % block != 0) {
        return opaq_fail(
            error, OPAQ_ERROR_SHAPE,
            "%s: data has %lld rows in stacks of %lld, expected stacks of a multiple of %lld rows, which share "
            "a scale",
            range->operation, (long long)range->data.rows, (long long)inner, (long long)block);
    }
    return OPAQ_OK;
}

static enum opaq_status check_data(struct stored_range *range, const struct opaq_tensor *data, int64_t first,
                                   int64_t rows, struct opaq_error *error) {
    TRY(cells_check(range->operation, "data", data, error));
    if (data->dtype != OPAQ_DTYPE_U8) {
        return refuse_dtype(range->operation, "data", data->dtype, "uint8", error);
    }
    TRY(cells_of(range->operation, "data", data, range->data_columns, &range->data, error));
    if (rows >= 0 && range->data.rows != rows) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: data has %lld rows, expected %lld", range->operation,
                         (long long)range->data.rows, (long long)rows);
    }
    TRY_AS(range->operation, error, check_row_cut(&range->job, first, range->data.rows, range->all, error));
    range->first = first;
    range->rows = range->data.rows;
    return check_stack(range, error);
}

/* Checks a tensor of rows x columns entries or, with `repeats`, of one entry for all rows. */
static enum opaq_status check_entries(const struct stored_range *range, const char *what,
                                      const struct opaq_tensor *tensor, int64_t rows, int64_t columns,
                                      bool repeats, struct cells *cells, struct opaq_error *error) {
    TRY(cells_of(range->operation, what, tensor, columns, cells, error));
    if (cells->rows == 1 && rows != 1 && repeats) {
        cells->rows = rows;
        cells->row_step = 0;
    }
    if (cells->rows != rows) {
        char shape[128];
        return opaq_fail(error, OPAQ_ERROR_SHAPE,
                         "%s: %s has the shape %s, expected [%lld,%lld] for %lld rows and %lld columns",
                         range->operation, what, shape_text(tensor, shape, sizeof shape), (long long)rows,
                         (long long)columns, (long long)range->rows, (long long)range->columns);
    }
    return OPAQ_OK;
}

static enum opaq_status check_scale(struct stored_range *range, const struct opaq_tensor *scale, bool is_import,
                                    struct opaq_error *error) {
    const struct opaq_format_row *format = range->format;
    TRY(cells_check(range->operation, "scale", scale, error));
    const bool takes_e8m0 = format->format == OPAQ_FP8BLK2 && is_import;
    const bool is_right = range->has_float_scale ? scale->dtype == OPAQ_DTYPE_F32 ||
                                                       (is_import && scale->dtype == OPAQ_DTYPE_BF16) ||
                                                       (takes_e8m0 && scale->dtype == OPAQ_DTYPE_U8)
                                                 : scale->dtype == OPAQ_DTYPE_U8;
    if (!is_right) {
        return refuse_dtype(range->operation, "scale", scale->dtype,
                            !range->has_float_scale ? "uint8"
                            : takes_e8m0            ? "f32, bf16 or uint8 (e8m0)"
                            : is_import             ? "f32 or bf16"
                                                    : "f32",
                            error);
    }
    range->scale_rows = format->block_rows == 0 ? 1 : ceil_div(range->rows, format->block_rows);
    range->scale_columns = format->block_columns == 0 ? 1 : ceil_div(range->columns, format->block_columns);
    return check_entries(range, "scale", scale, range->scale_rows, range->scale_columns,
                         format->format == OPAQ_FP8ROW, &range->scale, error);
}

static enum opaq_status check_global(struct stored_range *range, const struct opaq_tensor *global,
                                     struct opaq_error *error) {
    if (range->format->format != OPAQ_NVFP4) {
        return global->rank == -1 && global->data == NULL
                   ? OPAQ_OK
                   : opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                               "%s: global is given (rank %d), but %s has none (rank -1, data NULL)",
                               range->operation, global->rank, range->format->name);
    }
    TRY(cells_check(range->operation, "global", global, error));
    if (global->dtype != OPAQ_DTYPE_F32) {
        return refuse_dtype(range->operation, "global", global->dtype, "f32", error);
    }
    const bool per_row = range->copy->amax_step != 0;
    return check_entries(range, "global", global, per_row ? range->rows : 1, 1, per_row, &range->global, error);
}

static enum opaq_status check_all(const char *operation, const struct opaq_view *view, int64_t first,
                                  int64_t rows, const struct opaq_stored *stored, bool is_import,
                                  struct stored_range *range, struct opaq_error *error) {
    TRY(check_tensor(operation, view, stored, range, error));
    TRY(check_data(range, &stored->data, first, rows, error));
    TRY(check_scale(range, &stored->scale, is_import, error));
    return check_global(range, &stored->global, error);
}

/* ---- import ---- */

/* Checks a float of the whole tensor: it must equal the one of the rows that were imported before. Zero bytes: none
 * were. */
static enum opaq_status check_shared(const struct stored_range *range, const char *what, const float *there,
                                     float given, struct opaq_error *error) {
    const uint32_t bits = float_to_bits(*there);
    const bool is_whole = range->rows == range->all;
    if (is_whole || bits == 0 || bits == float_to_bits(given)) {
        return OPAQ_OK;
    }
    return opaq_fail(
        error, OPAQ_ERROR_ARGUMENT,
        "%s: rows %lld to %lld come with the %s %.9g, but the tensor has one for all rows, and that is %.9g",
        range->operation, (long long)range->first, (long long)range->first + range->rows, what, (double)given,
        (double)*there);
}

/* A square block has one scale, stored once per row. */
static enum opaq_status check_squares(const struct stored_range *range, struct opaq_error *error) {
    const int64_t block = range->copy->block_rows;
    for (int64_t r = 0; r < range->scale_rows; ++r) {
        for (int64_t c = 0; c < range->scale_columns; ++c) {
            const int first = *(const uint8_t *)cell_at(&range->scale, r - r % block, c);
            const int here = *(const uint8_t *)cell_at(&range->scale, r, c);
            if (first != here) {
                return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                                 "%s: the scales of rows %lld and %lld in block %lld are %d and %d, but a "
                                 "square block (2d) has one",
                                 range->operation, (long long)r - r % block, (long long)r, (long long)c, first,
                                 here);
            }
        }
    }
    return OPAQ_OK;
}

static enum opaq_status check_values(const struct stored_range *range, struct opaq_error *error) {
    const struct quant_copy *copy = range->copy;
    if (range->format->format == OPAQ_FP8) {
        return check_shared(range, "scale", copy->scale, cells_float(&range->scale, 0, 0), error);
    }
    if (copy->amax != NULL && copy->amax_step == 0) {
        TRY(check_shared(range, "global scale", copy->amax, cells_float(&range->global, 0, 0), error));
    }
    return range->job.spec.options & OPAQ_2D ? check_squares(range, error) : OPAQ_OK;
}

/* A placeholder for memory that is not read. */
static void *no_memory(void) {
    static _Alignas(64) char anchor[64];
    return anchor;
}

enum opaq_status opaq_stored_check(const struct opaq_proto *to, int64_t first_row,
                                   const struct opaq_stored *from, struct opaq_error *error) {
    struct opaq_error reason;
    if (from == NULL || opaq_proto_check(to, &reason) != OPAQ_OK) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "stored_check: %s",
                         from == NULL ? "the stored rows are NULL" : reason.text);
    }
    struct opaq_view view;
    memset(&view, 0, sizeof view);
    view.proto = *to;
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    const int count = proto_buffers(to, buffers);
    for (int i = 0; i < count; ++i) {
        view.buffer[i].data = no_memory();
        view.buffer[i].bytes = buffers[i].bytes;
    }
    struct opaq_stored stored = *from;
    struct opaq_tensor *const tensors[] = {&stored.data, &stored.scale, &stored.global};
    for (int i = 0; i < 3; ++i) {
        if (tensors[i]->rank != -1) {
            tensors[i]->data = no_memory();
        }
    }
    struct stored_range range;
    return check_all("stored_check", &view, first_row, -1, &stored, true, &range, error);
}

/* A row's codes in the tensor. */
static uint8_t *code_row(const struct stored_range *range, int64_t r) {
    const struct quant_copy *copy = range->copy;
    assert(copy->data_column_step == 1);
    return copy->data + (range->first + r) * copy->data_row_step / (copy->is_packed ? 2 : 1);
}

static char *scale_entry(const struct stored_range *range, int64_t r, int64_t c) {
    const int64_t row = range->first + r * range->format->block_rows;
    const int64_t index = scale_index(range->copy, row, c * range->format->block_columns);
    return (char *)range->copy->scale + index * (int64_t)(range->has_float_scale ? sizeof(float) : 1);
}

static void import_codes(const struct stored_range *range) {
    const struct cells *data = &range->data;
    const int64_t count = range->data_columns;
    for (int64_t r = 0; count > 0 && r < range->rows; ++r) {
        uint8_t *row = code_row(range, r);
        if (data->column_step == 1) {
            memcpy(row, cell_at(data, r, 0), (size_t)count);
        }
        for (int64_t c = 0; data->column_step != 1 && c < count; ++c) {
            row[c] = *(const uint8_t *)cell_at(data, r, c);
        }
        if (range->copy->is_packed && range->columns % 2 != 0) {
            row[count - 1] &= 15; /* no code beyond the last column */
        }
    }
}

enum opaq_status opaq_stored_import(const struct opaq_view *to, int64_t first_row,
                                    const struct opaq_stored *from, struct opaq_error *error) {
    struct stored_range range;
    TRY(check_all("stored_import", to, first_row, -1, from, true, &range, error));
    TRY(check_values(&range, error));
    import_codes(&range);
    for (int64_t r = 0; r < range.scale_rows; ++r) {
        for (int64_t c = 0; c < range.scale_columns; ++c) {
            const float value = range.has_float_scale ? cells_float(&range.scale, r, c) : 0.0f;
            const void *entry = range.has_float_scale ? (const void *)&value : cell_at(&range.scale, r, c);
            memcpy(scale_entry(&range, r, c), entry, range.has_float_scale ? sizeof value : 1);
        }
    }
    const struct quant_copy *copy = range.copy;
    for (int64_t r = 0; copy->amax != NULL && r < (copy->amax_step == 0 ? 1 : range.rows); ++r) {
        copy->amax[copy->amax_step * (first_row + r)] = cells_float(&range.global, r, 0);
    }
    return OPAQ_OK;
}

/* ---- export ---- */

/* Floats of several rows that are stored as one entry. */
static enum opaq_status check_agreement(const struct stored_range *range, const char *what,
                                        const struct cells *cells, const float *values,
                                        struct opaq_error *error) {
    for (int64_t r = 1; cells->row_step == 0 && r < cells->rows; ++r) {
        if (float_to_bits(values[r]) != float_to_bits(values[0])) {
            return opaq_fail(
                error, OPAQ_ERROR_ARGUMENT,
                "%s: %s has one entry for all rows, but that of row %lld is %.9g and that of row %lld %.9g",
                range->operation, what, (long long)range->first, (double)values[0], (long long)range->first + r,
                (double)values[r]);
        }
    }
    return OPAQ_OK;
}

static void export_codes(const struct stored_range *range) {
    const struct cells *data = &range->data;
    const int64_t count = range->data_columns;
    for (int64_t r = 0; count > 0 && r < range->rows; ++r) {
        const uint8_t *row = code_row(range, r);
        if (data->column_step == 1) {
            memcpy(cell_at(data, r, 0), row, (size_t)count);
        }
        for (int64_t c = 0; data->column_step != 1 && c < count; ++c) {
            *cell_at(data, r, c) = (char)row[c];
        }
    }
}

enum opaq_status opaq_stored_export(const struct opaq_view *from, int64_t first_row, int64_t rows,
                                    const struct opaq_stored *to, struct opaq_error *error) {
    struct stored_range range;
    if (rows < 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "stored_export: rows is %lld, expected at least 0",
                         (long long)rows);
    }
    TRY(check_all("stored_export", from, first_row, rows, to, false, &range, error));
    const struct quant_copy *copy = range.copy;
    if (range.format->format == OPAQ_FP8ROW && rows > 0) {
        TRY(check_agreement(&range, "scale", &range.scale, (const float *)copy->scale + first_row, error));
    } else if (copy->amax != NULL && copy->amax_step != 0 && rows > 0) {
        TRY(check_agreement(&range, "global", &range.global, copy->amax + first_row, error));
    }
    export_codes(&range);
    for (int64_t r = 0; r < range.scale_rows; ++r) {
        for (int64_t c = 0; c < range.scale_columns; ++c) {
            memcpy(cell_at(&range.scale, r, c), scale_entry(&range, r, c),
                   range.has_float_scale ? sizeof(float) : 1);
        }
    }
    for (int64_t r = 0; copy->amax != NULL && r < (copy->amax_step == 0 ? 1 : rows); ++r) {
        memcpy(cell_at(&range.global, r, 0), &copy->amax[copy->amax_step * (first_row + r)], sizeof(float));
    }
    return OPAQ_OK;
}

/* ---- what to allocate ---- */

/* One dimension if columns is -1. */
static struct opaq_tensor described(int32_t dtype, int64_t rows, int64_t columns) {
    struct opaq_tensor tensor = {.dtype = dtype, .rank = columns < 0 ? 1 : 2};
    tensor.shape[0] = rows;
    tensor.strides[0] = columns < 0 ? 1 : max_int64(columns, 1);
    if (columns >= 0) {
        tensor.shape[1] = columns;
        tensor.strides[1] = 1;
    }
    return tensor;
}

enum opaq_status opaq_stored_describe(const struct opaq_proto *proto, int64_t rows, struct opaq_stored *stored,
                                      struct opaq_error *error) {
    struct opaq_error reason;
    if (stored == NULL || opaq_proto_check(proto, &reason) != OPAQ_OK) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "stored_describe: %s",
                         stored == NULL ? "stored is NULL" : reason.text);
    }
    if (!proto->is_quantized || proto->spec.usage != OPAQ_ROWWISE) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "stored_describe: expected a quantized tensor with a rowwise copy only");
    }
    if (rows < 0 || rows > opaq_proto_rows(proto)) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "stored_describe: rows is %lld, expected 0 to %lld",
                         (long long)rows, (long long)opaq_proto_rows(proto));
    }
    const struct opaq_format_row *format = opaq_format_row((enum opaq_format)proto->spec.format);
    const int64_t columns = opaq_proto_columns(proto);
    const int32_t scale = located_scale_bytes(proto, OPAQ_ROWWISE) == 1 ? OPAQ_DTYPE_U8 : OPAQ_DTYPE_F32;
    const bool per_row = (proto->spec.options & OPAQ_ROWSCALED) != 0;
    stored->data =
        described(OPAQ_DTYPE_U8, rows, proto->spec.element == OPAQ_E2M1 ? ceil_div(columns, 2) : columns);
    stored->scale = format->block_rows == 0
                        ? described(scale, 1, -1)
                        : described(scale, ceil_div(rows, format->block_rows),
                                    format->block_columns == 0 ? 1 : ceil_div(columns, format->block_columns));
    stored->global = format->format == OPAQ_NVFP4 ? described(OPAQ_DTYPE_F32, per_row ? rows : 1, -1)
                                                  : (struct opaq_tensor){.rank = -1};
    return OPAQ_OK;
}
