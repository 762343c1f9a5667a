/* op/quantize/quantize_operators.c: the operators quantize, dequantize, amax and random_state. */
#include <stdbool.h>

#include "base/try.h"
#include "format/format_traits.h"
#include "op/quantize/quantize.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"

enum opaq_status form_quantizer(const struct op_call *call, int output, struct opaq_form *form,
                                struct opaq_error *error) {
    (void)output;
    (void)error;
    *form = (struct opaq_form){OPAQ_FORM_QUANTIZED, call->plan.spec[0]};
    return OPAQ_OK;
}

enum opaq_status run_quantize(struct op_call *call, struct opaq_error *error) {
    enum { X, QUANTIZER, SCALE, AMAX_ROWWISE, AMAX_COLUMNWISE, RANDOM };
    const struct opaq_value *values = call->values;
    const struct opaq_proto *proto = call->protos;
    struct opaq_view x;
    struct opaq_view out;
    struct quantize_figures figures = {0};
    const bool is_stochastic = (proto->spec.options & OPAQ_STOCHASTIC) != 0;
    if (is_stochastic != (values[RANDOM].tensors != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "random is %s, but the quantizer is %s",
                         is_stochastic ? "missing" : "given",
                         is_stochastic ? "stochastic (sr)" : "not stochastic");
    }
    TRY(view_of_tensor("x", values[X].tensors, &x, error));
    TRY(view_of_buffers(proto, call->outputs->tensor, call->outputs->count, &out, error));
    TRY(floats_of_tensor("scale", &values[SCALE], 1, call->device, &figures.scale, error));
    TRY(floats_of_tensor("amax_rowwise", &values[AMAX_ROWWISE], opaq_amax_count(proto, OPAQ_ROWWISE),
                         call->device, &figures.amax_rowwise, error));
    TRY(floats_of_tensor("amax_columnwise", &values[AMAX_COLUMNWISE], opaq_amax_count(proto, OPAQ_COLUMNWISE),
                         call->device, &figures.amax_columnwise, error));
    TRY(random_of_tensor(&values[RANDOM], call->device, &figures.random.state, error));
    return quantize_view(&call->work, &x, &figures, &out, error);
}

enum opaq_status run_dequantize(struct op_call *call, struct opaq_error *error) {
    enum { BUFFERS, QUANTIZER, SHAPE, DTYPE, USAGE };
    const struct opaq_value *values = call->values;
    const struct opaq_proto *proto = call->protos;
    struct opaq_proto quantized;
    struct opaq_view q;
    struct opaq_view y;
    const int64_t usage = values[USAGE].integer;
    TRY(opaq_proto_make(proto->shape, proto->rank, (enum opaq_element)proto->dtype, &call->plan.spec[0],
                        proto->device, &quantized, error));
    TRY(view_of_buffers(&quantized, values[BUFFERS].tensors, values[BUFFERS].count, &q, error));
    TRY(view_of_tensor("y", &call->outputs->tensor[0], &y, error));
    if (usage < 0 || usage > OPAQ_COLUMNWISE) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "usage is %lld, expected 0 (either), 1 (rowwise) or 2 (columnwise)", (long long)usage);
    }
    return dequantize_view(&call->work, &q, (int)usage, &y, error);
}

enum opaq_status run_amax(struct op_call *call, struct opaq_error *error) {
    enum { X, QUANTIZER };
    const struct opaq_value *values = call->values;
    float *const amax = call->outputs->tensor[0].data;
    struct opaq_spec spec = call->plan.spec[0];
    struct opaq_view x;
    TRY(view_of_tensor("x", values[X].tensors, &x, error));
    if (!spec_has_tensor_figure(&spec) || (spec.options & (OPAQ_ROWSCALED | OPAQ_DELAYED | OPAQ_GLOBAL)) != 0) {
        return opaq_fail(
            error, OPAQ_ERROR_ARGUMENT,
            "%.*s has no amax that covers the tensor, only fp8 and nvfp4 without delayed, rowscaled "
            "or global do",
            (int)values[QUANTIZER].count, values[QUANTIZER].text);
    }
    for (int i = 0; i < 2; ++i) {
        const enum opaq_usage usage = i == 0 ? OPAQ_ROWWISE : OPAQ_COLUMNWISE;
        struct opaq_proto proto;
        spec.usage = (uint8_t)usage;
        TRY(opaq_proto_make(x.proto.shape, x.proto.rank, (enum opaq_element)x.proto.dtype, &spec,
                            x.proto.device, &proto, error)); /* whether the spec has such a copy */
        TRY(amax_view(&call->work, &x, &spec, usage, false, &amax[i], error));
    }
    return OPAQ_OK;
}

/* The caller supplies the numbers: it fills outputs that are marked as random. */
enum opaq_status run_random_state(struct op_call *call, struct opaq_error *error) {
    (void)call;
    (void)error;
    return OPAQ_OK;
}
