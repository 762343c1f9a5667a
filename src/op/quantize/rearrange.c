/* op/quantize/rearrange.c: shared by the operators that move codes and scales without rounding again. */
#include "op/quantize/rearrange.h"

#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"
#include "format/proto_layout.h"
#include "op/table/op_tensor.h"

void locate(const struct opaq_view *view, struct quant_job *job) {
    struct opaq_view plain; /* the job needs the tensor's shape; its data is not read */
    memset(&plain, 0, sizeof plain);
    plain.proto = view->proto;
    plain.row_stride = opaq_proto_columns(&view->proto);
    quant_job_make(&plain, view, view->proto.spec.usage, job);
}

enum opaq_status locate_buffers(const struct opaq_proto *proto, const struct opaq_tensor *buffers,
                                int64_t count, struct located *located, struct opaq_error *error) {
    TRY(view_of_buffers(proto, buffers, count, &located->view, error));
    locate(&located->view, &located->job);
    return OPAQ_OK;
}

enum opaq_status locate_source(const struct opaq_proto *like, const struct opaq_spec *spec,
                               const int64_t *shape, int rank, const struct opaq_tensor *buffers, int64_t count,
                               struct located *located, struct opaq_error *error) {
    struct opaq_proto proto;
    TRY(opaq_proto_make(shape, rank, (enum opaq_element)like->dtype, spec, like->device, &proto, error));
    return locate_buffers(&proto, buffers, count, located, error);
}

enum opaq_status locate_target(const struct op_call *call, struct located *located, struct opaq_error *error) {
    return locate_buffers(call->protos, call->outputs->tensor, call->outputs->count, located, error);
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

enum opaq_status located_clear(const struct work *work, const struct opaq_view *out, struct opaq_error *error) {
    for (int i = 0; i < opaq_proto_buffer_count(&out->proto); ++i) {
        TRY(work->backend->zero(out->buffer[i].data, out->buffer[i].bytes, work->execution, error));
    }
    return OPAQ_OK;
}

int64_t copy_amax_count(const struct quant_copy *copy) {
    return copy->amax == NULL ? 0 : copy->amax_step == 0 ? 1 : copy->operand.rows;
}

enum opaq_status check_row_cut(const struct quant_job *job, int64_t start, int64_t rows, int64_t all,
                               struct opaq_error *error) {
    if (start < 0 || rows < 0 || rows > all || start > all - rows) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%lld rows from row %lld on, of a tensor with %lld rows",
                         (long long)rows, (long long)start, (long long)all);
    }
    const struct opaq_format_row *format = opaq_format_row((enum opaq_format)job->spec.format);
    int64_t multiple = 1;
    for (int i = 0; i < job->copy_count; ++i) {
        /* rows of the tensor under one scale of this copy; a scale over all rows does not restrict the split */
        const bool rowwise = job->copy[i].usage == OPAQ_ROWWISE;
        const int64_t whole = rowwise ? format->block_rows : format->block_columns;
        const int64_t block = whole == 0 ? 1 : rowwise ? job->copy[i].block_rows : job->copy[i].block_columns;
        multiple = max_int64(multiple, block);
    }
    if (start % multiple != 0 || ((start + rows) % multiple != 0 && start + rows != all)) {
        return opaq_fail(
            error, OPAQ_ERROR_SHAPE,
            "rows %lld to %lld cut a block in two; this quantizer's copies can be cut at multiples of "
            "%lld rows",
            (long long)start, (long long)start + rows, (long long)multiple);
    }
    return OPAQ_OK;
}

enum opaq_status check_same_columns(const struct opaq_proto *a, const struct opaq_proto *b,
                                    struct opaq_error *error) {
    if (opaq_proto_columns(a) != opaq_proto_columns(b)) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "the last dimensions are %lld and %lld",
                         (long long)opaq_proto_columns(a), (long long)opaq_proto_columns(b));
    }
    return OPAQ_OK;
}
