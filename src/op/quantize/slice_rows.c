/* op/quantize/slice_rows.c: the operator slice_rows: some rows of a quantized tensor. */
#include <stdbool.h>
#include <string.h>

#include "op/table/op_table.h"
#include "op/quantize/rearrange.h"

enum opaq_status run_slice_rows(const struct opaq_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_proto *proto = call->protos;
    const struct opaq_outputs *outputs = call->outputs;
    struct located source;
    struct located target;
    const int64_t start = values[5].integer;
    enum opaq_status status = rearranged_to("slice_rows", proto, outputs, &target, error);
    if (status == OPAQ_OK) {
        status = rearranged_from("slice_rows", &target.view.proto, &values[1], values[2].sizes,
                                 (int)values[2].count, values[0].tensors, values[0].count, &source, error);
    }
    if (status == OPAQ_OK) {
        status = check_same_columns("slice_rows", &source.view.proto, &target.view.proto, error);
    }
    if (status == OPAQ_OK) {
        status = check_row_cut("slice_rows", &source.job, start, opaq_proto_rows(&target.view.proto),
                               opaq_proto_rows(&source.view.proto), error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    located_clear(&target.view);
    for (int i = 0; i < target.job.copy_count; ++i) {
        const struct quant_copy *from = &source.job.copy[i];
        const struct quant_copy *to = &target.job.copy[i];
        const bool rowwise = to->usage == OPAQ_ROWWISE;
        const struct remap remap = {.from = from,
                                    .to = to,
                                    .row_offset = rowwise ? start : 0,
                                    .column_offset = rowwise ? 0 : start,
                                    .column_end = to->operand.columns,
                                    .scale_bytes = located_scale_bytes(&target.view.proto, to->usage)};
        remap_amax(from, to, rowwise ? start : 0);
        if (source.job.spec.format == OPAQ_FP8) {
            memcpy(to->scale, from->scale, sizeof(float));
        }
        remap_run(&remap, 0, to->operand.rows, call->parallel);
    }
    return OPAQ_OK;
}
