/* op/quantize/convert.c: the operator convert: the same tensor with other usages, or with its scales in the
 * other order. */
#include <stdbool.h>

#include "base/try.h"
#include "format/format_traits.h"
#include "op/quantize/rearrange.h"

/* Whether two specs differ only in usages and the order of scales. */
static bool is_same_quantizer(struct opaq_spec a, struct opaq_spec b) {
    a.usage = b.usage;
    a.options &= (uint16_t) ~(OPAQ_SWIZZLED | OPAQ_TILED);
    b.options &= (uint16_t) ~(OPAQ_SWIZZLED | OPAQ_TILED);
    return opaq_spec_equal(&a, &b) != 0;
}

enum { BUFFERS, FROM, TO };

enum opaq_status form_converted(const struct op_call *call, int output, struct opaq_form *form,
                                struct opaq_error *error) {
    (void)output;
    (void)error;
    *form = (struct opaq_form){OPAQ_FORM_QUANTIZED, call->plan.spec[1]};
    return OPAQ_OK;
}

static enum opaq_status check_specs(const struct op_call *call, const struct located *source,
                                    const struct located *target, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_spec *spec = &source->job.spec;
    if (!is_same_quantizer(*spec, target->job.spec)) {
        return opaq_fail(error, OPAQ_ERROR_SPEC,
                         "from %.*s to %.*s would round again; only usages, swizzle and tiled may differ",
                         (int)values[FROM].count, values[FROM].text, (int)values[TO].count, values[TO].text);
    }
    for (int i = 0; i < target->job.copy_count; ++i) {
        if (located_copy(&source->job, target->job.copy[i].usage) == NULL && !spec_has_square_blocks(spec)) {
            return opaq_fail(error, OPAQ_ERROR_SPEC,
                             "%.*s has no %s copy, and one cannot be made without the original tensor",
                             (int)values[FROM].count, values[FROM].text,
                             target->job.copy[i].usage == OPAQ_ROWWISE ? "rowwise" : "columnwise");
        }
    }
    return OPAQ_OK;
}

enum opaq_status run_convert(struct op_call *call, struct opaq_error *error) {
    const struct opaq_value *buffers = &call->values[BUFFERS];
    const struct opaq_proto *proto = call->protos;
    const struct work *work = &call->work;
    struct located source;
    struct located target;
    TRY(locate_target(call, &target, error));
    TRY(locate_source(proto, &call->plan.spec[0], proto->shape, proto->rank, buffers->tensors, buffers->count,
                      &source, error));
    TRY(check_specs(call, &source, &target, error));
    TRY(located_clear(work, &target.view, error));
    for (int i = 0; i < target.job.copy_count; ++i) {
        const struct quant_copy *to = &target.job.copy[i];
        const struct quant_copy *same = located_copy(&source.job, to->usage);
        const struct quant_copy *from = same != NULL ? same : &source.job.copy[0];
        const struct remap_job job = {
            .remap = {.from = from,
                      .to = to,
                      .is_transposed = same == NULL,
                      .column_end = to->operand.columns,
                      .scale_bytes = located_scale_bytes(&target.view.proto, to->usage)},
            .rows = to->operand.rows,
            .has_tensor_scale = spec_has_tensor_scale(&source.job.spec),
            .amax_count = from->amax == NULL ? 0 : copy_amax_count(to)};
        TRY(work->backend->remap(&job, work->execution, error));
    }
    return OPAQ_OK;
}
