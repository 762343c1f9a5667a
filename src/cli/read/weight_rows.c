/* cli/read/weight_rows.c: see weight_rows.h. */
#include "cli/read/weight_rows.h"

#include <stdlib.h>
#include <string.h>

#include "cli/cli_try.h"
#include "opaq/stored.h"

enum { SLOT_DATA, SLOT_SCALE, SLOT_QUANTIZED, SLOT_FLOATS };

static const struct opaq_device on_cpu = {OPAQ_DEVICE_CPU, 0};

void row_memory_free(struct row_memory *memory) {
    for (int i = 0; i < 4; ++i) {
        free(memory->bytes[i]);
    }
    *memory = (struct row_memory){{NULL}, {0}};
}

void *row_memory_take(struct row_memory *memory, int slot, size_t bytes) {
    if (memory->capacity[slot] < bytes || memory->bytes[slot] == NULL) {
        free(memory->bytes[slot]);
        memory->bytes[slot] = alloc_aligned(bytes);
        memory->capacity[slot] = bytes;
    }
    return memory->bytes[slot];
}

int64_t rows_in(const struct weight *weight, uint64_t bytes) {
    const uint64_t all = weight->data->tensor->bytes;
    const uint64_t total = (uint64_t)(weight->stack * weight->rows);
    const uint64_t row_bytes = total == 0 || all == 0 ? 1 : (all + total - 1) / total;
    enum { TOGETHER = 128 }; /* rows of the largest block */
    const int64_t rows = (int64_t)(bytes / row_bytes);
    return rows >= TOGETHER                                                   ? rows / TOGETHER * TOGETHER
           : weight->scheme != NULL && weight->scheme->format == OPAQ_FP8BLK2 ? TOGETHER
           : rows < 1                                                         ? 1
                                                                              : rows;
}

/* Reads entries [first, first + count) of one matrix, of a tensor with `entries` entries for each matrix of the stack. */
static enum opaq_status read_entries(const struct model *model, const struct weight *weight,
                                     const struct model_tensor *tensor, int64_t matrix, int64_t first,
                                     int64_t count, int64_t entries, struct row_memory *memory, int slot,
                                     struct opaq_error *error) {
    const int64_t all = weight->stack * entries;
    const uint64_t entry = all == 0 ? 0 : tensor->tensor->bytes / (uint64_t)all;
    const uint64_t bytes = (uint64_t)count * entry;
    return model_read(model, tensor, (uint64_t)(matrix * entries + first) * entry,
                      row_memory_take(memory, slot, bytes), bytes, error);
}

static struct opaq_tensor tensor_of(void *data, int dtype, int64_t rows, int64_t columns) {
    return (struct opaq_tensor){.data = data,
                                .dtype = dtype,
                                .rank = 2,
                                .device = on_cpu,
                                .shape = {rows, columns},
                                .strides = {columns, 1}};
}

/* Reads the scales of rows [first, first + count). */
static enum opaq_status read_scales(const struct model *model, const struct weight *weight, int64_t matrix,
                                    int64_t first, int64_t count, struct row_memory *memory,
                                    struct opaq_stored *stored, struct opaq_error *error) {
    const struct opaq_format_row *const format = opaq_format_row(weight->scheme->format);
    const int64_t block = format->block_rows == 0 ? weight->rows : format->block_rows;
    const int64_t scale_rows = block == 0 ? 0 : (weight->rows + block - 1) / block;
    const int64_t first_scale = format->block_rows == 0 ? 0 : first / block;
    const int64_t scales = format->block_rows == 0 ? scale_rows : (count + block - 1) / block;
    CLI_TRY(read_entries(model, weight, weight->scale, matrix, first_scale, scales, scale_rows, memory,
                         SLOT_SCALE, error));
    const int64_t columns =
        format->block_columns == 0 ? 1 : (weight->columns + format->block_columns - 1) / format->block_columns;
    stored->scale =
        tensor_of(memory->bytes[SLOT_SCALE], st_dtype_opaq(weight->scale->tensor->dtype), scales, columns);
    stored->global = (struct opaq_tensor){.rank = -1};
    return OPAQ_OK;
}

enum opaq_status weight_decoded(const struct model *model, const struct weight *weight, int64_t matrix,
                                int64_t first, int64_t count, enum opaq_element dtype,
                                struct row_memory *memory, struct opaq_view *rows, struct opaq_error *error) {
    const int64_t shape[2] = {count, weight->columns};
    struct opaq_proto proto;
    struct opaq_view view;
    size_t bytes = 0;
    CLI_TRY(opaq_proto_make(shape, 2, dtype, &weight->spec, on_cpu, &proto, error));
    CLI_TRY(opaq_view_bind_bytes(&proto, &bytes, error));
    void *const quantized = row_memory_take(memory, SLOT_QUANTIZED, bytes);
    memset(quantized, 0, bytes);
    CLI_TRY(opaq_view_bind(&proto, quantized, bytes, &view, error));

    CLI_TRY(read_entries(model, weight, weight->data, matrix, first, count, weight->rows, memory, SLOT_DATA,
                         error));
    const bool is_packed = weight->data->tensor->dtype == ST_U8;
    struct opaq_stored stored = {.data = tensor_of(memory->bytes[SLOT_DATA], OPAQ_DTYPE_U8, count,
                                                   is_packed ? weight->columns / 2 : weight->columns)};
    CLI_TRY(read_scales(model, weight, matrix, first, count, memory, &stored, error));
    float global = 0;
    if (weight->global != NULL) {
        CLI_TRY(
            model_read(model, weight->global, (uint64_t)matrix * sizeof global, &global, sizeof global, error));
        stored.global = (struct opaq_tensor){.data = &global, .dtype = OPAQ_DTYPE_F32, .device = on_cpu};
    }
    CLI_TRY(opaq_stored_import(&view, 0, &stored, error));

    const size_t float_bytes = (size_t)(count * weight->columns) * (dtype == OPAQ_F32 ? 4 : 2);
    CLI_TRY(opaq_view_plain(shape, NULL, 2, dtype, on_cpu, row_memory_take(memory, SLOT_FLOATS, float_bytes),
                            float_bytes, rows, error));
    return opaq_dequantize(&view, OPAQ_ROWWISE, NULL, rows, error);
}

enum opaq_status weight_rows(const struct model *model, const struct weight *weight, int64_t matrix,
                             int64_t first, int64_t count, struct row_memory *memory, struct opaq_view *rows,
                             struct opaq_error *error) {
    if (weight->scheme != NULL) {
        return weight_decoded(model, weight, matrix, first, count, OPAQ_F32, memory, rows, error);
    }
    CLI_TRY(read_entries(model, weight, weight->data, matrix, first, count, weight->rows, memory, SLOT_DATA,
                         error));
    const int64_t shape[2] = {count, weight->columns};
    const enum st_dtype dtype = weight->data->tensor->dtype;
    if (!weight_is_float(weight)) {
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED, "%s is %s, which opaq does not compute with",
                         weight->name, st_dtype_name(dtype));
    }
    return opaq_view_plain(shape, NULL, 2, (enum opaq_element)st_dtype_opaq(dtype), on_cpu,
                           memory->bytes[SLOT_DATA],
                           (size_t)(count * weight->columns) * (size_t)st_dtype_bits(dtype) / 8, rows, error);
}

/* ---- conversion to float32 ---- */

static void widen_bf16(const uint16_t *from, size_t count, float *to) {
    for (size_t i = 0; i < count; ++i) {
        const uint32_t bits = (uint32_t)from[i] << 16;
        memcpy(&to[i], &bits, sizeof bits);
    }
}

static void widen_f16(const uint16_t *from, size_t count, float *to) {
    for (size_t i = 0; i < count; ++i) {
        to[i] = opaq_element_decode(OPAQ_F16, from[i]);
    }
}

const float *rows_floats(const struct opaq_view *rows, struct row_memory *memory) {
    const size_t elements = (size_t)(rows->proto.shape[0] * rows->proto.shape[1]);
    if (rows->proto.dtype == OPAQ_F32) {
        return rows->buffer[0].data;
    }
    float *const wide = row_memory_take(memory, SLOT_FLOATS, elements * sizeof(float));
    if (rows->proto.dtype == OPAQ_BF16) {
        widen_bf16(rows->buffer[0].data, elements, wide);
    } else {
        widen_f16(rows->buffer[0].data, elements, wide);
    }
    return wide;
}

enum opaq_status weight_floats(const struct model *model, const struct weight *weight, int64_t matrix,
                               int64_t first, int64_t count, struct row_memory *memory, const float **floats,
                               struct opaq_error *error) {
    struct opaq_view rows = {0};
    CLI_TRY(weight_rows(model, weight, matrix, first, count, memory, &rows, error));
    *floats = rows_floats(&rows, memory);
    return OPAQ_OK;
}
