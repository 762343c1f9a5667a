/* backend/quant_job.c: makes jobs of kernels from views. Every number comes from the format table. */
#include "backend/quant_job.h"

#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "format/proto_layout.h"
#include "format/swizzle.h"

struct quant_matrix quant_matrix_make(const struct opaq_view *plain) {
    return (struct quant_matrix){.data = plain->buffer[0].data,
                                 .dtype = (enum opaq_element)plain->proto.dtype,
                                 .rows = opaq_proto_rows(&plain->proto),
                                 .columns = opaq_proto_columns(&plain->proto),
                                 .row_step = plain->row_stride,
                                 .column_step = 1};
}

/* The format table's row of a prototype's buffer, found by iterating over both in the same order. */
static const struct opaq_buffer_row *table_row(const struct opaq_proto *proto,
                                               const struct opaq_buffer *buffer) {
    const struct opaq_format_row *format = opaq_format_row((enum opaq_format)proto->spec.format);
    const struct opaq_buffer_row *row = format->buffers;
    while (strcmp(row->name, buffer->name) != 0) {
        ++row;
    }
    return row;
}

/* Steps of a row-major matrix with these two extents, from the operand's point of view. */
static void operand_steps(const struct opaq_buffer_row *row, int64_t inner, enum opaq_dim operand_rows,
                          struct scale_layout *layout) {
    const int64_t step[2] = {inner, 1};
    *layout = (struct scale_layout){.row_per = 1, .row_step = 0, .column_per = 1, .column_step = 0};
    assert(row->rank <= 2);
    for (int i = 0; i < row->rank; ++i) {
        const struct opaq_extent *extent = &row->extent[i];
        if (extent->dim == OPAQ_DIM_ONE) {
            continue;
        }
        if (extent->dim == operand_rows) {
            layout->row_per = extent->per;
            layout->row_step = step[i];
        } else {
            layout->column_per = extent->per;
            layout->column_step = step[i];
        }
    }
}

static int64_t inner_extent(const struct opaq_proto *proto, const struct opaq_buffer_row *row) {
    return row->rank < 2 ? 1
                         : opaq_extent_eval(&row->extent[1], opaq_proto_rows(proto), opaq_proto_columns(proto));
}

static void locate_data(const struct opaq_view *view, const struct opaq_buffer *buffers,
                        enum opaq_dim operand_rows, struct quant_copy *copy) {
    struct scale_layout layout;
    const int index = opaq_proto_find(&view->proto, OPAQ_ROLE_DATA, copy->usage);
    const struct opaq_buffer buffer = buffers[index];
    const struct opaq_buffer_row *row = table_row(&view->proto, &buffer);
    const int64_t inner = inner_extent(&view->proto, row) * buffer.packing;
    operand_steps(row, inner, operand_rows, &layout);
    copy->data = view->buffer[index].data;
    copy->data_row_step = layout.row_step;
    copy->data_column_step = layout.column_step;
    copy->is_packed = buffer.packing == 2;
    copy->data_columns = row->extent[0].dim == operand_rows ? inner : copy->operand.columns;
    if (view->proto.spec.options & OPAQ_TILED) { /* tiles have no constant steps */
        copy->tile_rows = row->extent[0].to;
        copy->data_row_step = 0;
        copy->data_column_step = 0;
    }
}

static void locate_scale(const struct opaq_view *view, const struct opaq_buffer *buffers,
                         enum opaq_dim operand_rows, struct quant_copy *copy) {
    const int index = opaq_proto_find(&view->proto, OPAQ_ROLE_SCALE, copy->usage);
    const struct opaq_buffer buffer = buffers[index];
    const struct opaq_buffer_row *row = table_row(&view->proto, &buffer);
    const int64_t inner = inner_extent(&view->proto, row);
    operand_steps(row, inner, operand_rows, &copy->scale_layout);
    copy->scale = view->buffer[index].data;
    copy->scale_bytes = buffer.entry_bytes;
    copy->scale_buffer_bytes = buffer.bytes;
    if (view->proto.spec.options & OPAQ_SWIZZLED) {
        /* the tiles cover (operand rows, blocks), whatever the direction of the plain buffer */
        const bool upright = row->extent[0].dim == operand_rows;
        copy->scale_layout.swizzled_columns = upright ? inner : buffer.shape[0];
    }
    if (row->options_needed & OPAQ_TILED) {
        copy->scale_layout.tiled_columns = inner;
        copy->scale_layout.tile_rows = row->extent[0].to;
    }
}

static void make_copy(const struct opaq_view *plain, const struct opaq_view *view,
                      const struct opaq_buffer *buffers, enum opaq_usage usage, struct quant_copy *copy) {
    const struct opaq_spec *spec = &view->proto.spec;
    const struct opaq_format_row *format = opaq_format_row((enum opaq_format)spec->format);
    const struct quant_matrix x = quant_matrix_make(plain);
    const enum opaq_dim operand_rows = usage == OPAQ_ROWWISE ? OPAQ_DIM_ROWS : OPAQ_DIM_COLUMNS;
    memset(copy, 0, sizeof *copy);
    copy->usage = usage;
    copy->operand = usage == OPAQ_ROWWISE ? x : quant_matrix_transposed(x);
    const bool square = (spec->options & OPAQ_2D) != 0;
    const int64_t block_rows = square ? format->block_columns : format->block_rows;
    copy->block_rows = block_rows == 0 ? max_int64(copy->operand.rows, 1) : block_rows;
    copy->block_columns =
        format->block_columns == 0 ? max_int64(copy->operand.columns, 1) : format->block_columns;
    copy->is_hadamard = (spec->options & OPAQ_HADAMARD) != 0 && usage == OPAQ_COLUMNWISE;
    locate_data(view, buffers, operand_rows, copy);
    locate_scale(view, buffers, operand_rows, copy);
    const int amax = opaq_proto_find(&view->proto, OPAQ_ROLE_AMAX, usage);
    if (amax >= 0) {
        copy->amax = view->buffer[amax].data;
        copy->amax_step = (spec->options & OPAQ_ROWSCALED) != 0;
    }
}

void quant_job_make(const struct opaq_view *plain, const struct opaq_view *quantized, int usage,
                    struct quant_job *job) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    (void)proto_buffers(&quantized->proto, buffers);
    memset(job, 0, sizeof *job);
    job->spec = quantized->proto.spec;
    for (int bit = OPAQ_ROWWISE; bit <= OPAQ_COLUMNWISE; bit <<= 1) {
        if (usage & bit) {
            make_copy(plain, quantized, buffers, (enum opaq_usage)bit, &job->copy[job->copy_count++]);
        }
    }
}

int64_t quant_copy_rows_together(const struct quant_copy *copy) {
    const struct scale_layout *layout = &copy->scale_layout;
    const int64_t shared = layout->row_step == 0 ? 1 : layout->row_per;
    return max_int64(copy->tile_rows, layout->swizzled_columns != 0 ? SWIZZLE_ROWS : shared);
}

bool quant_copy_take_rows(struct quant_copy *copy, int64_t first, int64_t rows) {
    const struct scale_layout *layout = &copy->scale_layout;
    const bool is_swizzled = layout->swizzled_columns != 0;
    if (first % quant_copy_rows_together(copy) != 0) {
        return false;
    }
    const int64_t entries = layout->tiled_columns != 0 ? first * layout->tiled_columns
                            : is_swizzled              ? swizzle_offset(first, 0, layout->swizzled_columns)
                                                       : first / layout->row_per * layout->row_step;
    const int64_t row_codes = copy->tile_rows != 0 ? copy->data_columns : copy->data_row_step;
    if (copy->data != NULL) { /* a tensor that is only measured has no memory */
        copy->data += first * row_codes / (copy->is_packed ? 2 : 1);
        copy->scale = (char *)copy->scale + entries * copy->scale_bytes;
    }
    if (copy->amax != NULL) {
        copy->amax += first * copy->amax_step;
    }
    copy->operand.rows = rows;
    return true;
}

int64_t quant_panel_rows(const struct quant_copy *copy) {
    const int64_t whole_bytes = copy->tile_rows != 0 || (copy->data_row_step == 1 && copy->is_packed) ? 32 : 16;
    return copy->block_rows > 1 && copy->block_rows <= 128 ? round_up(copy->block_rows, whole_bytes)
                                                           : whole_bytes;
}
