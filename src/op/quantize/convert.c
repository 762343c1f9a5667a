/* op/quantize/convert.c: the operator convert: the same tensor with other usages, or its scales in the other order. */
#include <stdbool.h>
#include <string.h>

#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "op/quantize/rearrange.h"

/* Whether the two specs are the same quantizer but for usages and the order of scales. */
static bool is_same_quantizer(struct opaq_spec a, struct opaq_spec b) {
    a.usage = b.usage;
    a.options &= (uint16_t) ~(OPAQ_SWIZZLED | OPAQ_TILED);
    b.options &= (uint16_t) ~(OPAQ_SWIZZLED | OPAQ_TILED);
    return opaq_spec_equal(&a, &b) != 0;
}

/* Whether one copy's codes and scales are the other's, transposed: where a scale covers a square. */
static bool is_transposable(const struct opaq_spec *spec) {
    return spec->format == OPAQ_FP8 || spec->format == OPAQ_FP8BLK2 || (spec->options & OPAQ_2D) != 0;
}

enum opaq_status form_converted(const struct opaq_value *values, int output, struct opaq_form *form,
                                struct opaq_error *error) {
    (void)output;
    form->kind = OPAQ_FORM_QUANTIZED;
    return spec_of_value(&values[2], &form->spec, error);
}

enum opaq_status run_convert(const struct opaq_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_proto *proto = call->protos;
    const struct opaq_outputs *outputs = call->outputs;
    struct located source;
    struct located target;
    enum opaq_status status = rearranged_to("convert", proto, outputs, &target, error);
    if (status == OPAQ_OK) {
        status = rearranged_from("convert", proto, &values[1], proto->shape, proto->rank, values[0].tensors,
                                 values[0].count, &source, error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    const struct opaq_spec *spec = &source.job.spec;
    if (!is_same_quantizer(*spec, target.job.spec)) {
        return opaq_fail(
            error, OPAQ_ERROR_SPEC,
            "convert: from %.*s to %.*s would round again; only usages, swizzle and tiled may differ",
            (int)values[1].count, values[1].text, (int)values[2].count, values[2].text);
    }
    for (int i = 0; i < target.job.copy_count; ++i) {
        if (located_copy(&source.job, target.job.copy[i].usage) == NULL && !is_transposable(spec)) {
            return opaq_fail(error, OPAQ_ERROR_SPEC,
                             "convert: %.*s has no %s copy, and one cannot be made without the original tensor",
                             (int)values[1].count, values[1].text,
                             target.job.copy[i].usage == OPAQ_ROWWISE ? "rowwise" : "columnwise");
        }
    }
    located_clear(&target.view);
    for (int i = 0; i < target.job.copy_count; ++i) {
        const struct quant_copy *to = &target.job.copy[i];
        const struct quant_copy *same = located_copy(&source.job, to->usage);
        const struct remap remap = {.from = same != NULL ? same : &source.job.copy[0],
                                    .to = to,
                                    .is_transposed = same == NULL,
                                    .column_end = to->operand.columns,
                                    .scale_bytes = located_scale_bytes(&target.view.proto, to->usage)};
        remap_amax(remap.from, to, 0);
        if (spec->format == OPAQ_FP8) { /* also where there are no elements */
            memcpy(to->scale, remap.from->scale, sizeof(float));
        }
        remap_run(&remap, 0, to->operand.rows, call->parallel);
    }
    return OPAQ_OK;
}
