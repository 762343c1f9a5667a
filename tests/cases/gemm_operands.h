/* gemm_operands.h: the operands of gemm_cases.h, made in the same way for the tests and the benchmark of the
 * matrix product. Depends on gemm and opaq's public headers: the product has no public function, so these two
 * programs use internal ones. */
#ifndef GEMM_OPERANDS_H
#define GEMM_OPERANDS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "cpu/gemm/gemm_run.h"
#include "opaq/opaq.h"

struct gemm_case_operand {
    struct opaq_view x; /* the source of quantizing, which the caller fills; the plain operand itself */
    struct opaq_view q;
    struct quant_job job;
    struct gemm_operand operand; /* points into this struct, which must not be moved */
};

static inline void gemm_case_stop(const char *what, const struct opaq_error *error) {
    fprintf(stderr, "%s: %s\n", what, error == NULL ? "no memory" : error->text);
    exit(1);
}

/* Aligned to 64 and of exactly that size, so that AddressSanitizer detects an access beyond it; initialized to
 * 0xA5. */
static inline void *gemm_case_allocate(size_t bytes) {
    void *memory;
    if (posix_memalign(&memory, 64, bytes > 0 ? bytes : 1) != 0) {
        gemm_case_stop("posix_memalign", NULL);
    }
    memset(memory, 0xA5, bytes);
    return memory;
}

/* A tensor with each buffer in separate memory. `spec` NULL: plain. */
static inline struct opaq_view gemm_case_tensor(int64_t rows, int64_t columns, enum opaq_element dtype,
                                                const struct opaq_spec *spec) {
    const int64_t shape[2] = {rows, columns};
    const struct opaq_device cpu = {OPAQ_DEVICE_CPU, 0};
    struct opaq_view view;
    struct opaq_error error;
    memset(&view, 0, sizeof view);
    if (opaq_proto_make(shape, 2, dtype, spec, cpu, &view.proto, &error) != OPAQ_OK) {
        gemm_case_stop("proto_make", &error);
    }
    view.row_stride = spec == NULL ? columns : 0;
    for (int i = 0; i < opaq_proto_buffer_count(&view.proto); ++i) {
        struct opaq_buffer buffer;
        if (opaq_proto_buffer(&view.proto, i, &buffer, &error) != OPAQ_OK) {
            gemm_case_stop("proto_buffer", &error);
        }
        view.buffer[i] = (struct opaq_span){gemm_case_allocate(buffer.bytes), buffer.bytes};
    }
    return view;
}

static inline void gemm_case_tensor_free(struct opaq_view *view) {
    for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
        free(view->buffer[i].data);
    }
    memset(view, 0, sizeof *view);
}

/* First step: x, which the caller fills. Quantizers get float32. */
static inline void gemm_case_operand_make(struct gemm_case_operand *o, const char *text, int64_t rows,
                                          int64_t columns) {
    static const char *const plain[] = {[OPAQ_F16] = "f16", [OPAQ_BF16] = "bf16", [OPAQ_F32] = "f32"};
    static const char across[] = "across ";
    const bool is_across = strncmp(text, across, sizeof across - 1) == 0;
    struct opaq_spec spec;
    struct opaq_error error;
    memset(o, 0, sizeof *o);
    text += is_across ? sizeof across - 1 : 0;
    for (int dtype = OPAQ_F16; dtype <= OPAQ_F32; ++dtype) {
        if (strcmp(text, plain[dtype]) == 0) {
            o->x = gemm_case_tensor(rows, columns, (enum opaq_element)dtype, NULL);
            o->operand.plain = quant_matrix_make(&o->x);
            return;
        }
    }
    if (opaq_spec_parse(text, strlen(text), &spec, &error) != OPAQ_OK) {
        gemm_case_stop(text, &error);
    }
    const bool is_turned = spec.usage == OPAQ_COLUMNWISE || is_across;
    const int64_t stored_rows = is_turned ? columns : rows;
    const int64_t stored_columns = is_turned ? rows : columns;
    o->operand.is_across = is_across;
    o->x = gemm_case_tensor(stored_rows, stored_columns, OPAQ_F32, NULL);
    o->q = gemm_case_tensor(stored_rows, stored_columns, OPAQ_F32, &spec);
    o->operand.plain = (struct quant_matrix){.rows = rows, .columns = columns};
}

/* Second step: quantizes x, unless the operand is plain. */
static inline void gemm_case_operand_quantize(struct gemm_case_operand *o, bool undo_hadamard,
                                              const struct opaq_parallel *parallel) {
    const struct opaq_execution execution = {.parallel = parallel};
    struct opaq_error error;
    if (!o->q.proto.is_quantized) {
        return;
    }
    if (opaq_quantize(&o->x, NULL, &execution, &o->q, &error) != OPAQ_OK) {
        gemm_case_stop("quantize", &error);
    }
    quant_job_make(&o->x, &o->q, o->q.proto.spec.usage, &o->job);
    o->operand.spec = &o->job.spec;
    o->operand.copy = &o->job.copy[0];
    o->operand.undo_hadamard = undo_hadamard;
}

static inline void gemm_case_operand_free(struct gemm_case_operand *o) {
    gemm_case_tensor_free(&o->x);
    gemm_case_tensor_free(&o->q);
}

#endif
