/* op/quantize/quantize_operators.c: the operators quantize and dequantize, on tensors. */
#include <stdbool.h>

#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "op/quantize/quantize_op.h"
#include "opaq/status.h"

enum opaq_status form_quantizer(const struct opaq_value *values, int output, struct opaq_form *form,
                                struct opaq_error *error) {
    (void)output;
    form->kind = OPAQ_FORM_QUANTIZED;
    return spec_of_value(&values[1], &form->spec, error);
}

enum opaq_status run_quantize(const struct opaq_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_proto *proto = call->protos;
    const struct opaq_outputs *outputs = call->outputs;
    struct opaq_view x;
    struct opaq_view out;
    struct opaq_quantize_args args = {.parallel = call->parallel};
    const int64_t *random;
    const bool is_stochastic = (proto->spec.options & OPAQ_STOCHASTIC) != 0;
    if (is_stochastic != (values[5].tensors != NULL)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "quantize: random is %s, but the quantizer is %s",
                         is_stochastic ? "missing" : "given",
                         is_stochastic ? "stochastic (sr)" : "not stochastic");
    }
    enum opaq_status status = view_of_tensor("quantize", "x", values[0].tensors, &x, error);
    if (status == OPAQ_OK) {
        status = view_of_buffers("quantize", proto, outputs->tensor, outputs->count, &out, error);
    }
    if (status == OPAQ_OK) {
        status = floats_of_tensor("quantize", "scale", &values[2], 1, &args.scale, error);
    }
    if (status == OPAQ_OK) {
        status = floats_of_tensor("quantize", "amax_rowwise", &values[3], opaq_amax_count(proto, OPAQ_ROWWISE),
                                  &args.amax_rowwise, error);
    }
    if (status == OPAQ_OK) {
        status = floats_of_tensor("quantize", "amax_columnwise", &values[4],
                                  opaq_amax_count(proto, OPAQ_COLUMNWISE), &args.amax_columnwise, error);
    }
    if (status == OPAQ_OK) {
        status = random_of_tensor("quantize", &values[5], &random, error);
    }
    if (status == OPAQ_OK && random != NULL) { /* a negative offset is refused further on */
        args.random = (struct opaq_random){(uint64_t)random[0], (uint64_t)random[1]};
    }
    return status == OPAQ_OK ? quantize_checked(&x, &args, &out, error) : status;
}

enum opaq_status run_dequantize(const struct opaq_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_proto *proto = call->protos;
    const struct opaq_outputs *outputs = call->outputs;
    struct opaq_spec spec;
    struct opaq_error reason;
    struct opaq_proto quantized;
    struct opaq_view q;
    struct opaq_view y;
    enum opaq_status status = spec_of_text("dequantize", &values[1], &spec, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (opaq_proto_make(proto->shape, proto->rank, (enum opaq_element)proto->dtype, &spec, proto->device,
                        &quantized, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "dequantize: %s", reason.text);
    }
    status = view_of_buffers("dequantize", &quantized, values[0].tensors, values[0].count, &q, error);
    if (status == OPAQ_OK) {
        status = view_of_tensor("dequantize", "y", &outputs->tensor[0], &y, error);
    }
    if (status == OPAQ_OK && (values[4].integer < 0 || values[4].integer > OPAQ_COLUMNWISE)) {
        status = opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                           "dequantize: usage is %lld, expected 0 (either), 1 (rowwise) or 2 (columnwise)",
                           (long long)values[4].integer);
    }
    return status == OPAQ_OK ? dequantize_checked(&q, (int)values[4].integer, call->parallel, &y, error)
                             : status;
}

enum opaq_status run_amax(const struct opaq_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    float *amax = call->outputs->tensor[0].data;
    struct opaq_view x;
    struct opaq_spec spec;
    enum opaq_status status = view_of_tensor("amax", "x", values[0].tensors, &x, error);
    if (status == OPAQ_OK) {
        status = spec_of_text("amax", &values[1], &spec, error);
    }
    if (status == OPAQ_OK && ((spec.format != OPAQ_FP8 && spec.format != OPAQ_NVFP4) ||
                              (spec.options & (OPAQ_ROWSCALED | OPAQ_DELAYED | OPAQ_GLOBAL)) != 0)) {
        status = opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                           "amax: %.*s has no amax that covers the tensor, only fp8 and nvfp4 without delayed, "
                           "rowscaled or global do",
                           (int)values[1].count, values[1].text);
    }
    for (int i = 0; status == OPAQ_OK && i < 2; ++i) {
        const enum opaq_usage usage = i == 0 ? OPAQ_ROWWISE : OPAQ_COLUMNWISE;
        spec.usage = (uint8_t)usage;
        status = opaq_amax(&x, &spec, usage, call->parallel, &amax[i], 1, error);
    }
    return status;
}

enum opaq_status run_random_state(const struct opaq_call *call, struct opaq_error *error) {
    (void)call;
    (void)error;
    return OPAQ_OK;
}
