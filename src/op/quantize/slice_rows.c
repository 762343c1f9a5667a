/* op/quantize/slice_rows.c: the operator slice_rows: some rows of a quantized tensor. */
#include <stdbool.h>

#include "base/try.h"
#include "format/format_traits.h"
#include "op/quantize/rearrange.h"

enum { BUFFERS, QUANTIZER, SHAPE, TO, DTYPE, START };

enum opaq_status run_slice_rows(struct op_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct work *work = &call->work;
    const int64_t start = values[START].integer;
    struct located source;
    struct located target;
    TRY(locate_target(call, &target, error));
    TRY(locate_source(call->protos, &call->plan.spec[0], values[SHAPE].sizes, (int)values[SHAPE].count,
                      values[BUFFERS].tensors, values[BUFFERS].count, &source, error));
    TRY(check_same_columns(&source.view.proto, &target.view.proto, error));
    TRY(check_row_cut(&source.job, start, opaq_proto_rows(&target.view.proto),
                      opaq_proto_rows(&source.view.proto), error));
    TRY(located_clear(work, &target.view, error));
    for (int i = 0; i < target.job.copy_count; ++i) {
        const struct quant_copy *from = &source.job.copy[i];
        const struct quant_copy *to = &target.job.copy[i];
        const bool rowwise = to->usage == OPAQ_ROWWISE;
        const struct remap_job job = {
            .remap = {.from = from,
                      .to = to,
                      .row_offset = rowwise ? start : 0,
                      .column_offset = rowwise ? 0 : start,
                      .column_end = to->operand.columns,
                      .scale_bytes = located_scale_bytes(&target.view.proto, to->usage)},
            .rows = to->operand.rows,
            .has_tensor_scale = spec_has_tensor_scale(&source.job.spec),
            .amax_count = copy_amax_count(to),
            .amax_from = rowwise && to->amax_step != 0 ? start : 0};
        TRY(work->backend->remap(&job, work->execution, error));
    }
    return OPAQ_OK;
}
