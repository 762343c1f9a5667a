/* backend/operand.c: makes operands of products, on any back end. */
#include "backend/operand.h"

#include <string.h>

#include "backend/backend.h"
#include "base/try.h"
#include "format/proto_layout.h"

/* ---- views without memory of their own ---- */

struct opaq_view plain_view_like(const struct opaq_view *view, enum opaq_element dtype) {
    struct opaq_view plain = {.proto = view->proto, .row_stride = opaq_proto_columns(&view->proto)};
    plain.proto.is_quantized = 0;
    plain.proto.dtype = (int32_t)dtype;
    memset(&plain.proto.spec, 0, sizeof plain.proto.spec);
    return plain;
}

/* Sets the sizes of a prototype and clears the unused ones. */
static void set_shape(struct opaq_proto *proto, int rank, int64_t first, int64_t second) {
    memset(proto->shape, 0, sizeof proto->shape);
    proto->rank = rank;
    proto->shape[0] = first;
    proto->shape[1] = rank > 1 ? second : 0;
}

static void *element_at(const struct opaq_view *view, int64_t index) {
    char *const data = view->buffer[0].data;
    return data == NULL ? NULL : data + index * (view->proto.dtype == OPAQ_F32 ? 4 : 2);
}

struct opaq_view plain_rows(const struct opaq_view *view, int64_t first, int64_t rows) {
    struct opaq_view part = *view;
    set_shape(&part.proto, 2, rows, opaq_proto_columns(&view->proto));
    part.buffer[0].data = element_at(view, first * view->row_stride);
    return part;
}

struct opaq_view stack_vector(const struct opaq_view *stack, int64_t index) {
    struct opaq_view row = *stack;
    if (stack->proto.rank == 2) {
        set_shape(&row.proto, 1, stack->proto.shape[1], 0);
        row.buffer[0].data = element_at(stack, index * stack->row_stride);
    }
    return row;
}

struct opaq_view stack_matrix(const struct opaq_view *stack, int64_t index) {
    struct opaq_view matrix = *stack;
    if (stack->proto.rank == 3) {
        set_shape(&matrix.proto, 2, stack->proto.shape[1], stack->proto.shape[2]);
        matrix.buffer[0].data = element_at(stack, index * stack->proto.shape[1] * stack->row_stride);
    }
    return matrix;
}

/* ---- views in the arena ---- */

enum opaq_status work_plain_like(struct work *work, const struct opaq_view *like, enum opaq_element dtype,
                                 struct opaq_view *plain, struct opaq_error *error) {
    size_t bytes;
    *plain = plain_view_like(like, dtype);
    TRY(opaq_proto_check(&plain->proto, error));
    TRY(opaq_proto_bytes(&plain->proto, &bytes, error));
    plain->buffer[0] = (struct opaq_span){arena_take(&work->arena, bytes), bytes};
    return OPAQ_OK;
}

enum opaq_status work_matrix(struct work *work, int64_t rows, int64_t columns, enum opaq_element dtype,
                             struct opaq_view *plain, struct opaq_error *error) {
    const int64_t shape[2] = {rows, columns};
    struct opaq_view like = {.row_stride = columns};
    TRY(opaq_proto_make(shape, 2, dtype, NULL, work->execution->device, &like.proto, error));
    return work_plain_like(work, &like, dtype, plain, error);
}

enum opaq_status work_dequantize(struct work *work, const struct opaq_view *view, struct opaq_view *plain,
                                 struct opaq_error *error) {
    if (!view->proto.is_quantized) {
        *plain = *view;
        return OPAQ_OK;
    }
    TRY(work_plain_like(work, view, OPAQ_F32, plain, error));
    if (work->is_measuring) {
        return OPAQ_OK;
    }
    struct quant_job job;
    const int usage = view->proto.spec.usage & OPAQ_ROWWISE ? OPAQ_ROWWISE : OPAQ_COLUMNWISE;
    quant_job_make(plain, view, usage, &job);
    return work->backend->dequantize(&job, work->execution, error);
}

/* ---- operands ---- */

static struct gemm_operand plain_operand(const struct opaq_view *view, enum opaq_usage along) {
    const struct quant_matrix matrix = quant_matrix_make(view);
    return (struct gemm_operand){.plain = along == OPAQ_ROWWISE ? matrix : quant_matrix_transposed(matrix)};
}

/* An operand from the copy of a quantized tensor whose blocks run along a usage. */
static void copy_operand(const struct opaq_view *view, enum opaq_usage along, struct operand *operand) {
    const struct opaq_view plain = plain_view_like(view, OPAQ_F32);
    quant_job_make(&plain, view, (int)along, &operand->job);
    operand->gemm = plain_operand(&plain, along);
    operand->gemm.spec = &operand->job.spec;
    operand->gemm.copy = &operand->job.copy[0];
    operand->gemm.undo_hadamard = true;
}

/* An operand from the rowwise copy of a quantized tensor, read across its rows. */
static void across_operand(const struct opaq_view *view, struct operand *operand) {
    copy_operand(view, OPAQ_ROWWISE, operand);
    operand_turn(operand);
}

void operand_turn(struct operand *operand) {
    operand->gemm.plain = quant_matrix_transposed(operand->gemm.plain);
    operand->gemm.is_across = true;
}

static enum opaq_status quantize_for(struct work *work, const struct opaq_view *view,
                                     const struct operand_form *form, struct opaq_view *quantized,
                                     struct opaq_error *error) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    memset(quantized, 0, sizeof *quantized);
    TRY(opaq_proto_make(view->proto.shape, view->proto.rank, (enum opaq_element)view->proto.dtype, &form->spec,
                        view->proto.device, &quantized->proto, error));
    const int count = proto_buffers(&quantized->proto, buffers);
    for (int i = 0; i < count; ++i) {
        void *const data = arena_take(&work->arena, buffers[i].bytes);
        quantized->buffer[i] = (struct opaq_span){data, buffers[i].bytes};
    }
    if (work->is_measuring) {
        return OPAQ_OK;
    }
    struct quant_job job;
    const struct quantize_figures figures = {
        .scale = form->scale, .amax_rowwise = form->amax, .random = form->random};
    quant_job_make(view, quantized, form->spec.usage, &job);
    return work->backend->quantize(&job, &figures, work->execution, error);
}

enum opaq_status operand_make(struct work *work, const struct opaq_view *view, const struct operand_form *form,
                              struct operand *operand, struct opaq_error *error) {
    struct opaq_view read = *view;
    memset(operand, 0, sizeof *operand);
    if (form->quantizes && !view->proto.is_quantized) {
        TRY(quantize_for(work, view, form, &read, error));
    }
    const bool has_copy = read.proto.is_quantized && (read.proto.spec.usage & (int)form->along) != 0;
    if (has_copy && !form->is_dequantized) {
        copy_operand(&read, form->along, operand);
        return OPAQ_OK;
    }
    if (read.proto.is_quantized && form->may_be_across && form->along == OPAQ_COLUMNWISE &&
        (read.proto.spec.usage & OPAQ_ROWWISE) != 0) {
        across_operand(&read, operand);
        return OPAQ_OK;
    }
    struct opaq_view plain;
    TRY(work_dequantize(work, &read, &plain, error));
    operand->gemm = plain_operand(&plain, form->along);
    return OPAQ_OK;
}

bool operand_rows(const struct operand *whole, int64_t first, int64_t rows, struct operand *part) {
    struct quant_matrix *plain = &part->gemm.plain;
    *part = *whole;
    if (whole->gemm.copy == NULL) {
        const int64_t step = first * plain->row_step;
        plain->data =
            plain->data == NULL ? NULL : (char *)plain->data + step * (plain->dtype == OPAQ_F32 ? 4 : 2);
    } else {
        part->gemm.spec = &part->job.spec;
        part->gemm.copy = &part->job.copy[0];
        if (!quant_copy_take_rows(&part->job.copy[0], first, rows)) {
            return false;
        }
    }
    plain->rows = rows;
    return true;
}

bool stack_operand(const struct operand *stack, int64_t rows, int64_t index, struct operand *matrix) {
    return operand_rows(stack, index * rows, rows, matrix);
}

/* ---- products ---- */

/* Two copies with the same Hadamard transform are multiplied without undoing it: the product is the same. */
static void settle_hadamard(struct gemm_operand *a, struct gemm_operand *b) {
    const bool both = a->copy != NULL && b->copy != NULL && a->copy->is_hadamard && b->copy->is_hadamard;
    if (both && a->spec->hadamard_mask == b->spec->hadamard_mask) {
        a->undo_hadamard = false;
        b->undo_hadamard = false;
    }
}

/* Scratch memory of one call, reused by the next since calls run in sequence: counted while measuring, else the
 * rest of the arena. */
static void *scratch_of(struct work *work, size_t bytes) {
    const size_t mark = work->arena.used;
    void *const memory = arena_take(&work->arena, bytes);
    work->arena.used = mark;
    return memory;
}

enum opaq_status work_product(struct work *work, struct gemm_job *job, struct opaq_error *error) {
    const int64_t limit = (int64_t)1 << 48; /* keeps the product's own size computations from overflowing */
    if (job->a.plain.columns > limit) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW, "a product over %lld elements, at most 2^48 are possible",
                         (long long)job->a.plain.columns);
    }
    const bool is_tiled = job->b.copy != NULL && job->b.copy->tile_rows != 0 && !job->b.is_across;
    if (is_tiled &&
        job->c.columns > limit) { /* its results and panels need memory in proportion to the columns */
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW, "a tiled weight of %lld rows, at most 2^48 are possible",
                         (long long)job->c.columns);
    }
    settle_hadamard(&job->a, &job->b);
    if (work->is_measuring) {
        (void)scratch_of(work, work->backend->product_workspace(job));
        return OPAQ_OK;
    }
    return work->backend->product(job, scratch_of(work, 0), work->execution, error);
}

enum opaq_status work_grouped_product(struct work *work, const struct grouped_product *job,
                                      struct opaq_error *error) {
    size_t bytes = 0;
    if (work->is_measuring) {
        TRY(work->backend->grouped_product_workspace(job, &bytes, error));
        (void)scratch_of(work, bytes);
        return OPAQ_OK;
    }
    return work->backend->grouped_product(job, scratch_of(work, 0), work->execution, error);
}

enum opaq_status work_grouped_gradient(struct work *work, const struct grouped_gradient *job,
                                       struct opaq_error *error) {
    size_t bytes = 0;
    if (work->is_measuring) {
        TRY(work->backend->grouped_gradient_workspace(job, &bytes, error));
        (void)scratch_of(work, bytes);
        return OPAQ_OK;
    }
    return work->backend->grouped_gradient(job, scratch_of(work, 0), work->execution, error);
}

enum opaq_status work_row_dot(struct work *work, const struct row_dot *job, struct opaq_error *error) {
    size_t bytes = 0;
    if (work->is_measuring) {
        TRY(work->backend->row_dot_workspace(job, &bytes, error));
        (void)scratch_of(work, bytes);
        return OPAQ_OK;
    }
    return work->backend->row_dot(job, scratch_of(work, 0), work->execution, error);
}
