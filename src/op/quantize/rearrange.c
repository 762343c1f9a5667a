/* op/quantize/rearrange.c: what the operators share that move codes and scales without rounding anything again. */
#include "op/quantize/rearrange.h"

#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "base/parallel_run.h"
#include "format/proto_layout.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"

void locate(const struct opaq_view *view, struct quant_job *job) {
    struct opaq_view plain; /* the job wants the tensor's shape; nobody reads its data */
    memset(&plain, 0, sizeof plain);
    plain.proto = view->proto;
    plain.row_stride = opaq_proto_columns(&view->proto);
    quant_job_make(&plain, view, view->proto.spec.usage, job);
}

enum opaq_status rearranged_from(const char *operation, const struct opaq_proto *like,
                                 const struct opaq_value *text, const int64_t *shape, int rank,
                                 const struct opaq_tensor *buffers, int64_t count, struct located *source,
                                 struct opaq_error *error) {
    struct opaq_spec spec;
    struct opaq_proto proto;
    struct opaq_error reason;
    enum opaq_status status = spec_of_text(operation, text, &spec, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (opaq_proto_make(shape, rank, (enum opaq_element)like->dtype, &spec, like->device, &proto, &reason) !=
        OPAQ_OK) {
        return opaq_fail(error, reason.status, "%s: %s", operation, reason.text);
    }
    status = view_of_buffers(operation, &proto, buffers, count, &source->view, error);
    if (status == OPAQ_OK) {
        locate(&source->view, &source->job);
    }
    return status;
}

const struct quant_copy *located_copy(const struct quant_job *job, enum opaq_usage usage) {
    for (int i = 0; i < job->copy_count; ++i) {
        if (job->copy[i].usage == usage) {
            return &job->copy[i];
        }
    }
    return NULL;
}

int located_scale_bytes(const struct opaq_proto *proto, enum opaq_usage usage) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    (void)proto_buffers(proto, buffers);
    return buffers[opaq_proto_find(proto, OPAQ_ROLE_SCALE, usage)].entry_bytes;
}

void located_clear(const struct opaq_view *out) {
    for (int i = 0; i < opaq_proto_buffer_count(&out->proto); ++i) {
        if (out->buffer[i].bytes > 0) {
            memset(out->buffer[i].data, 0, out->buffer[i].bytes);
        }
    }
}

struct panel_task {
    const struct remap *remap;
    int64_t first_row;
    int64_t rows;
    int64_t panel_rows;
};

static void run_panels(void *argument, int64_t begin, int64_t end) {
    const struct panel_task *task = argument;
    remap_rows(task->remap, task->first_row + begin * task->panel_rows,
               task->first_row + min_int64(task->rows, end * task->panel_rows));
}

void remap_run(const struct remap *remap, int64_t row, int64_t rows, const struct opaq_parallel *parallel) {
    const struct scale_layout *scales = &remap->to->scale_layout;
    if (remap->column == remap->column_end && scales->column_step != 0) {
        return;
    }
    if (remap->column == remap->column_end && scales->row_step == 0) {
        rows = min_int64(rows, 1); /* no elements, and one scale for all rows, however many they are */
    }
    struct panel_task task = {remap, row, rows, quant_panel_rows(remap->to)};
    const struct opaq_body body = {run_panels, &task};
    parallel_run(parallel_if_worth(parallel, rows * (remap->column_end - remap->column)),
                 ceil_div(rows, task.panel_rows), &body);
}

enum opaq_status rearranged_to(const char *operation, const struct opaq_proto *proto,
                               const struct opaq_outputs *outputs, struct located *target,
                               struct opaq_error *error) {
    const enum opaq_status status =
        view_of_buffers(operation, proto, outputs->tensor, outputs->count, &target->view, error);
    if (status == OPAQ_OK) {
        locate(&target->view, &target->job);
    }
    return status;
}

void remap_amax(const struct quant_copy *from, const struct quant_copy *to, int64_t offset) {
    if (from->amax != NULL && to->amax != NULL) {
        const int64_t count = to->amax_step == 0 ? 1 : to->operand.rows;
        memcpy(to->amax, from->amax + (to->amax_step == 0 ? 0 : offset), (size_t)count * sizeof *to->amax);
    }
}

enum opaq_status check_row_cut(const char *operation, const struct quant_job *job, int64_t start, int64_t rows,
                               int64_t all, struct opaq_error *error) {
    if (start < 0 || rows < 0 || rows > all || start > all - rows) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: %lld rows from row %lld on, of a tensor with %lld rows",
                         operation, (long long)rows, (long long)start, (long long)all);
    }
    const struct opaq_format_row *format = opaq_format_row((enum opaq_format)job->spec.format);
    int64_t multiple = 1;
    for (int i = 0; i < job->copy_count; ++i) {
        /* rows of the tensor under one scale of this copy; a scale over everything is cut without harm */
        const bool rowwise = job->copy[i].usage == OPAQ_ROWWISE;
        const int64_t whole = rowwise ? format->block_rows : format->block_columns;
        const int64_t block = whole == 0 ? 1 : rowwise ? job->copy[i].block_rows : job->copy[i].block_columns;
        multiple = max_int64(multiple, block);
    }
    if (start % multiple != 0 || ((start + rows) % multiple != 0 && start + rows != all)) {
        return opaq_fail(
            error, OPAQ_ERROR_SHAPE,
            "%s: rows %lld to %lld cut a block in two; this quantizer's copies can be cut at multiples of "
            "%lld rows",
            operation, (long long)start, (long long)start + rows, (long long)multiple);
    }
    return OPAQ_OK;
}

enum opaq_status check_same_columns(const char *operation, const struct opaq_proto *a,
                                    const struct opaq_proto *b, struct opaq_error *error) {
    if (opaq_proto_columns(a) != opaq_proto_columns(b)) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: the last dimensions are %lld and %lld", operation,
                         (long long)opaq_proto_columns(a), (long long)opaq_proto_columns(b));
    }
    return OPAQ_OK;
}
