/* op/experts/routing.c: which rows of a batch go to which expert, and moving them there and back. */
#include "op/experts/routing.h"

#include <string.h>

#include "base/checked.h"
#include "base/parallel_run.h"
#include "cpu/gemm/plain_convert.h"
#include "op/table/op_tensor.h"
#include "opaq/status.h"

enum { STRETCH = 256 };

/* ---- reading ---- */

/* The place of element `index`, counted along the rows, of a strided tensor. */
static int64_t offset_of(const struct opaq_tensor *tensor, int64_t index) {
    int64_t offset = 0;
    for (int i = tensor->rank - 1; i >= 0; --i) {
        offset += index % tensor->shape[i] * tensor->strides[i];
        index /= tensor->shape[i];
    }
    return offset;
}

static bool is_float(int32_t dtype) {
    return dtype == OPAQ_DTYPE_F32 || dtype == OPAQ_DTYPE_BF16 || dtype == OPAQ_DTYPE_F16;
}

static enum opaq_status check_memory(const char *operation, const char *name, const struct opaq_tensor *tensor,
                                     struct opaq_error *error) {
    const int64_t reach = tensor_reach(tensor);
    if (reach < 0) {
        return opaq_fail(error, OPAQ_ERROR_OVERFLOW, "%s: the strides of %s are negative or reach too far",
                         operation, name);
    }
    if (reach > 0 &&
        (tensor->data == NULL || (uintptr_t)tensor->data % (uintptr_t)dtype_bytes(tensor->dtype))) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER, "%s: %s is %s", operation, name,
                         tensor->data == NULL ? "NULL" : "not aligned to its elements");
    }
    return OPAQ_OK;
}

/* [tokens, k], or the leading sizes of the tokens' tensor and k; sizes of 1 do not count. */
static bool fits_tokens(const struct opaq_tensor *ids, const struct opaq_proto *tokens) {
    const int64_t flat = opaq_proto_rows(tokens);
    const int leading = ids->rank - 1;
    int mine = 0;
    int theirs = 0;
    if (leading == 1 && ids->shape[0] == flat) {
        return true;
    }
    for (;;) {
        while (mine < leading && ids->shape[mine] == 1) {
            ++mine;
        }
        while (theirs < tokens->rank - 1 && tokens->shape[theirs] == 1) {
            ++theirs;
        }
        if (mine >= leading || theirs >= tokens->rank - 1 || ids->shape[mine] != tokens->shape[theirs]) {
            return ids->rank >= 1 && mine == leading && theirs >= tokens->rank - 1;
        }
        ++mine;
        ++theirs;
    }
}

static enum opaq_status check_tensors(const struct linear *linear, const struct opaq_tensor *weights,
                                      const struct opaq_tensor *ids, const struct opaq_proto *tokens,
                                      struct opaq_error *error) {
    char got[160];
    char other[160];
    if (ids->dtype != OPAQ_DTYPE_I32 && ids->dtype != OPAQ_DTYPE_I64) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: topk_ids holds %s, expected int32 or int64",
                         linear->operation, dtype_name(ids->dtype));
    }
    if (!is_float(weights->dtype)) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "%s: topk_weights holds %s, expected f32, bf16 or f16",
                         linear->operation, dtype_name(weights->dtype));
    }
    if (tensor_elements(ids) < 0 || !fits_tokens(ids, tokens)) {
        return opaq_fail(
            error, OPAQ_ERROR_SHAPE,
            "%s: topk_ids has the shape %s, expected %lld tokens by choices, or the tokens' own sizes "
            "by choices",
            linear->operation, shape_text(ids, got, sizeof got), (long long)opaq_proto_rows(tokens));
    }
    if (weights->rank != ids->rank ||
        memcmp(weights->shape, ids->shape, (size_t)ids->rank * sizeof ids->shape[0]) != 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "%s: topk_weights has the shape %s, expected topk_ids' %s",
                         linear->operation, shape_text(weights, got, sizeof got),
                         shape_text(ids, other, sizeof other));
    }
    if (weights->device.type != linear->device.type || ids->device.type != linear->device.type ||
        weights->device.index != linear->device.index || ids->device.index != linear->device.index) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "%s: topk_weights or topk_ids is on another device than the first tensor",
                         linear->operation);
    }
    const enum opaq_status status = check_memory(linear->operation, "topk_ids", ids, error);
    return status == OPAQ_OK ? check_memory(linear->operation, "topk_weights", weights, error) : status;
}

static int64_t id_at(const struct opaq_tensor *ids, int64_t slot) {
    const int64_t offset = offset_of(ids, slot);
    return ids->dtype == OPAQ_DTYPE_I32 ? ((const int32_t *)ids->data)[offset]
                                        : ((const int64_t *)ids->data)[offset];
}

static float weight_at(const struct opaq_tensor *weights, int64_t slot) {
    float weight;
    plain_load(weights->data, (enum opaq_element)weights->dtype, offset_of(weights, slot), 1, 1, &weight);
    return weight;
}

/* The stack's number for an id; -1 for nobody's. */
static int64_t local_expert(int64_t id, struct routing_slice slice, int64_t experts) {
    const int64_t local = id - slice.first;
    return id >= 0 && id < slice.total && local >= 0 && local < experts ? local : -1;
}

enum opaq_status routing_read(struct linear *linear, const struct opaq_tensor *weights,
                              const struct opaq_tensor *ids, const struct opaq_proto *tokens, int64_t experts,
                              struct routing_slice slice, struct routing *routing, struct opaq_error *error) {
    const enum opaq_status status = check_tensors(linear, weights, ids, tokens, error);
    if (status != OPAQ_OK) {
        return status;
    }
    const int64_t slots = tensor_elements(ids);
    routing->tokens = opaq_proto_rows(tokens);
    routing->choices = ids->shape[ids->rank - 1];
    routing->experts = experts;
    routing->first = scratch_take_array(&linear->scratch, experts + 1, sizeof *routing->first);
    routing->slot = scratch_take_array(&linear->scratch, slots, sizeof *routing->slot);
    routing->weight = scratch_take_array(&linear->scratch, slots, sizeof *routing->weight);
    if (linear->is_measuring) {
        return OPAQ_OK;
    }
    memset(routing->first, 0, (size_t)(experts + 1) * sizeof *routing->first);
    for (int64_t s = 0; s < slots; ++s) {
        const int64_t id = id_at(ids, s);
        if (id < -1 || id > slice.total) {
            return opaq_fail(
                error, OPAQ_ERROR_ARGUMENT,
                "%s: topk_ids has %lld at token %lld, choice %lld, expected 0 to %lld, or -1 or %lld "
                "for nobody",
                linear->operation, (long long)id, (long long)(s / routing->choices),
                (long long)(s % routing->choices), (long long)slice.total - 1, (long long)slice.total);
        }
        const int64_t expert = local_expert(id, slice, experts);
        routing->weight[s] = weight_at(weights, s);
        if (expert >= 0) {
            ++routing->first[expert + 1];
        }
    }
    for (int64_t e = 0; e < experts; ++e) {
        routing->first[e + 1] += routing->first[e];
    }
    for (int64_t s = 0; s < slots;
         ++s) { /* first[e] runs to the end of e's slots, which is where e + 1 begins */
        const int64_t expert = local_expert(id_at(ids, s), slice, experts);
        if (expert >= 0) {
            routing->slot[routing->first[expert]++] = s;
        }
    }
    memmove(routing->first + 1, routing->first, (size_t)experts * sizeof *routing->first);
    routing->first[0] = 0;
    return OPAQ_OK;
}

/* ---- moving rows ---- */

struct row_task {
    const struct routing_gather *gather;
    const struct quant_matrix *from;
    const struct quant_matrix *to;
    float *sums;
    const struct routing_dot *dot;
};

static int64_t row_of(const struct routing_gather *gather, int64_t i) {
    const int64_t slot = gather->slots[i];
    return gather->by_token ? slot / gather->routing->choices : slot;
}

static void move_row(const struct quant_matrix *from, int64_t from_row, const struct quant_matrix *to,
                     int64_t to_row, float weight) {
    float values[STRETCH];
    if (from->dtype == to->dtype && weight == 1.0f && to->columns > 0) {
        const char *const start =
            (const char *)from->data + plain_bytes(from->dtype, from_row * from->row_step);
        memcpy((char *)to->data + plain_bytes(to->dtype, to_row * to->row_step), start,
               (size_t)plain_bytes(to->dtype, to->columns));
        return;
    }
    for (int64_t c = 0; c < to->columns; c += STRETCH) {
        const int n = (int)min_int64(STRETCH, to->columns - c);
        plain_load(from->data, from->dtype, from_row * from->row_step + c, 1, n, values);
        for (int i = 0; i < n; ++i) {
            values[i] *= weight;
        }
        plain_store(to->data, to->dtype, to_row * to->row_step + c, 1, n, values);
    }
}

static void gather_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    for (int64_t i = begin; i < end; ++i) {
        const float weight = task->gather->weight == NULL ? 1.0f : task->gather->weight[task->gather->slots[i]];
        move_row(task->from, row_of(task->gather, i), task->to, i, weight);
    }
}

void routing_gather(const struct routing_gather *gather, const struct quant_matrix *from,
                    const struct quant_matrix *to, const struct opaq_parallel *parallel) {
    struct row_task task = {.gather = gather, .from = from, .to = to};
    const struct opaq_body body = {gather_rows, &task};
    parallel_run(parallel_if_worth(parallel, to->rows * to->columns), gather->count, &body);
}

static void scatter_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    for (int64_t i = begin; i < end; ++i) {
        move_row(task->from, i, task->to, row_of(task->gather, i), 1.0f);
    }
}

void routing_scatter(const struct routing_gather *gather, const struct quant_matrix *from,
                     const struct quant_matrix *to, const struct opaq_parallel *parallel) {
    struct row_task task = {.gather = gather, .from = from, .to = to};
    const struct opaq_body body = {scatter_rows, &task};
    parallel_run(parallel_if_worth(parallel, from->rows * from->columns), gather->count, &body);
}

/* n elements from element `start` on as floats: where they are, if they are floats, or in `values`. */
static const float *floats_at(const struct quant_matrix *matrix, int64_t start, int n, float *values) {
    if (matrix->dtype == OPAQ_F32) {
        return (const float *)matrix->data + start;
    }
    plain_load(matrix->data, matrix->dtype, start, 1, n, values);
    return values;
}

/* Unit: a stretch of columns, because a token may come twice. */
static void add_columns(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    const struct routing_gather *gather = task->gather;
    const int64_t columns = task->from->columns;
    float memory[STRETCH];
    for (int64_t i = 0; i < gather->count; ++i) {
        const float weight = gather->weight == NULL ? 1.0f : gather->weight[gather->slots[i]];
        for (int64_t c = begin * STRETCH; c < min_int64(end * STRETCH, columns); c += STRETCH) {
            const int n = (int)min_int64(STRETCH, columns - c);
            const float *const values = floats_at(task->from, i * task->from->row_step + c, n, memory);
            float *const sum = task->sums + row_of(gather, i) * columns + c;
            for (int k = 0; k < n; ++k) {
                sum[k] += weight * values[k];
            }
        }
    }
}

void routing_add(const struct routing_gather *gather, const struct quant_matrix *from, float *sums,
                 int64_t columns, const struct opaq_parallel *parallel) {
    struct row_task task = {.gather = gather, .from = from, .sums = sums};
    const struct opaq_body body = {add_columns, &task};
    parallel_run(parallel_if_worth(parallel, gather->count * columns), ceil_div(columns, STRETCH), &body);
}

static void weigh_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    for (int64_t i = begin; i < end; ++i) {
        const float weight = task->gather->weight[task->gather->slots[i]];
        float *const row = (float *)task->to->data + i * task->to->row_step;
        for (int64_t c = 0; c < task->to->columns; ++c) {
            row[c] *= weight;
        }
    }
}

void routing_weigh(const struct routing_gather *gather, const float *weight, const struct quant_matrix *rows,
                   const struct opaq_parallel *parallel) {
    struct routing_gather weighted = *gather;
    weighted.weight = weight;
    struct row_task task = {.gather = &weighted, .to = rows};
    const struct opaq_body body = {weigh_rows, &task};
    parallel_run(parallel_if_worth(parallel, rows->rows * rows->columns), gather->count, &body);
}

static void copy_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    for (int64_t row = begin; row < end; ++row) {
        move_row(task->from, row, task->to, row, 1.0f);
    }
}

void routing_copy(const struct quant_matrix *from, const struct quant_matrix *to,
                  const struct opaq_parallel *parallel) {
    struct row_task task = {.from = from, .to = to};
    const struct opaq_body body = {copy_rows, &task};
    parallel_run(parallel_if_worth(parallel, to->rows * to->columns), to->rows, &body);
}

static void dot_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    const struct quant_matrix *a = task->dot->a;
    const struct quant_matrix *b = task->dot->b;
    float left[STRETCH];
    float right[STRETCH];
    for (int64_t i = begin; i < end; ++i) {
        float *const result = &task->sums[task->gather->slots[i]];
        float total = task->dot->adds ? *result : 0.0f;
        for (int64_t c = 0; c < a->columns; c += STRETCH) {
            const int n = (int)min_int64(STRETCH, a->columns - c);
            float sum = 0.0f;
            plain_load(a->data, a->dtype, i * a->row_step + c, 1, n, left);
            plain_load(b->data, b->dtype, i * b->row_step + c, 1, n, right);
            for (int k = 0; k < n; ++k) {
                sum += left[k] * right[k];
            }
            total += sum;
        }
        *result = total;
    }
}

void routing_dot(const struct routing_gather *gather, const struct routing_dot *dot, float *result,
                 const struct opaq_parallel *parallel) {
    struct row_task task = {.gather = gather, .sums = result, .dot = dot};
    const struct opaq_body body = {dot_rows, &task};
    parallel_run(parallel_if_worth(parallel, gather->count * dot->a->columns), gather->count, &body);
}
