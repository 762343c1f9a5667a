/* support_quant.c: quantizes in one call. */
#include "support_quant.h"

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

static void fail(const struct opaq_error *error) {
    printf("  %s\n", error->text);
    exit(1);
}

struct tensor plain_like(const struct tensor *tensor) {
    struct opaq_proto proto = tensor->view.proto;
    proto.is_quantized = 0;
    proto.dtype = OPAQ_F32;
    memset(&proto.spec, 0, sizeof proto.spec);
    return tensor_make_proto(&proto);
}

struct tensor quantized_like(const struct tensor *x, const struct opaq_spec *spec) {
    struct opaq_proto proto = x->view.proto;
    proto.is_quantized = 1;
    proto.spec = *spec;
    return tensor_make_proto(&proto);
}

struct opaq_quantize_args args_for(const struct opaq_spec *spec) {
    static const float factor = 3.0f;
    static const float divisor = 1.0f / 3.0f;
    const float *scale = spec->rule == OPAQ_RULE_TE ? &factor : &divisor;
    return (struct opaq_quantize_args){.scale = spec->options & OPAQ_DELAYED ? scale : NULL,
                                       .random = {0x0123456789ABCDEFu, 42}};
}

struct tensor quantized(const struct tensor *x, const struct opaq_spec *spec,
                        const struct opaq_quantize_args *args) {
    return quantized_on(x, spec, args, NULL);
}

struct tensor quantized_on(const struct tensor *x, const struct opaq_spec *spec,
                           const struct opaq_quantize_args *args, const struct opaq_parallel *parallel) {
    const struct opaq_execution execution = {.parallel = parallel};
    const struct opaq_quantize_args usual = args_for(spec);
    struct tensor q = quantized_like(x, spec);
    struct opaq_error error;
    if (opaq_quantize(&x->view, args == NULL ? &usual : args, &execution, &q.view, &error) != OPAQ_OK) {
        fail(&error);
    }
    return q;
}

struct tensor dequantized(const struct tensor *q, int usage) {
    struct tensor y = plain_like(q);
    struct opaq_error error;
    if (opaq_dequantize(&q->view, usage, NULL, &y.view, &error) != OPAQ_OK) {
        fail(&error);
    }
    return y;
}

struct tensor transposed(const struct tensor *x) {
    const int64_t rows = opaq_proto_rows(&x->view.proto);
    const int64_t columns = opaq_proto_columns(&x->view.proto);
    struct tensor t = tensor_make(columns, rows, (enum opaq_element)x->view.proto.dtype, NULL);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            tensor_set(&t, c, r, tensor_get(x, r, c));
        }
    }
    return t;
}

int first_difference(const struct tensor *a, const struct tensor *b) {
    const int count = opaq_proto_buffer_count(&a->view.proto);
    for (int i = 0; i < count; ++i) {
        const struct opaq_span p = a->view.buffer[i];
        const struct opaq_span q = b->view.buffer[i];
        if (p.bytes != q.bytes || memcmp(p.data, q.data, p.bytes) != 0) {
            return i;
        }
    }
    return -1;
}
