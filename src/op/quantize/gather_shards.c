/* op/quantize/gather_shards.c: the operator gather_rows: equal shards of a quantized tensor, gathered buffer by buffer,
 * together again. */
#include <stdbool.h>
#include <string.h>

#include "base/checked.h"
#include "format/proto_layout.h"
#include "op/table/op_table.h"
#include "op/table/op_tensor.h"
#include "op/quantize/rearrange.h"

/* Whether each gathered buffer is `shards` buffers of the shard's prototype after one another. */
static enum opaq_status check_gathered(const struct opaq_proto *proto, const struct opaq_value *gathered,
                                       int64_t shards, struct opaq_error *error) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    struct opaq_tensor expected[OPAQ_BUFFER_LIMIT];
    (void)proto_buffers(proto, buffers);
    const int count = tensors_of_proto(proto, expected);
    if (gathered->count != count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "gather_rows: got %lld buffers, expected %d",
                         (long long)gathered->count, count);
    }
    for (int i = 0; i < count; ++i) {
        struct opaq_tensor whole = expected[i];
        if (!checked_multiply(whole.shape[0], shards, &whole.shape[0])) {
            return opaq_fail(error, OPAQ_ERROR_OVERFLOW, "gather_rows: %lld shards of buffer \"%s\" do not fit",
                             (long long)shards, buffers[i].name);
        }
        const enum opaq_status status =
            check_same_tensor("gather_rows", buffers[i].name, &gathered->tensors[i], &whole, error);
        if (status != OPAQ_OK) {
            return status;
        }
    }
    return OPAQ_OK;
}

/* The buffers of shard `index` in the gathered ones. */
static void shard_of(const struct opaq_proto *proto, const struct opaq_value *gathered, int64_t index,
                     struct opaq_tensor *tensors) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    struct opaq_tensor expected[OPAQ_BUFFER_LIMIT];
    (void)proto_buffers(proto, buffers);
    const int count = tensors_of_proto(proto, expected);
    for (int i = 0; i < count; ++i) {
        tensors[i] = expected[i];
        tensors[i].data = gathered->tensors[i].data;
        tensors[i].device = gathered->tensors[i].device;
        if (buffers[i].bytes > 0) {
            tensors[i].data = (char *)tensors[i].data + (size_t)index * buffers[i].bytes;
        }
    }
}

static void place_shard(const struct located *shard, const struct located *target, int64_t start,
                        const struct opaq_parallel *parallel) {
    const int64_t rows = opaq_proto_rows(&shard->view.proto);
    for (int i = 0; i < target->job.copy_count; ++i) {
        const struct quant_copy *from = &shard->job.copy[i];
        const struct quant_copy *to = &target->job.copy[i];
        const bool rowwise = to->usage == OPAQ_ROWWISE;
        const struct remap remap = {.from = from,
                                    .to = to,
                                    .row_offset = rowwise ? -start : 0,
                                    .column_offset = rowwise ? 0 : -start,
                                    .column = rowwise ? 0 : start,
                                    .column_end = rowwise ? to->operand.columns : start + rows,
                                    .scale_bytes = located_scale_bytes(&target->view.proto, to->usage)};
        if (to->amax != NULL && to->amax_step != 0 && rowwise) {
            memcpy(to->amax + start, from->amax, (size_t)rows * sizeof *to->amax);
        } else if (to->amax != NULL) {
            memcpy(to->amax, from->amax,
                   (size_t)(to->amax_step == 0 ? 1 : to->operand.rows) * sizeof *to->amax);
        }
        if (target->job.spec.format == OPAQ_FP8) {
            memcpy(to->scale, from->scale, sizeof(float));
        }
        remap_run(&remap, rowwise ? start : 0, rowwise ? rows : to->operand.rows, parallel);
    }
}

/* Where a scale covers the tensor, all shards must have the same one: they are shards of one quantized tensor. */
static enum opaq_status check_agreement(const struct located *first, const struct located *shard, int64_t index,
                                        struct opaq_error *error) {
    for (int i = 0; i < first->job.copy_count; ++i) {
        const struct quant_copy *a = &first->job.copy[i];
        const struct quant_copy *b = &shard->job.copy[i];
        const bool shared_amax = a->amax != NULL && (a->amax_step == 0 || a->usage == OPAQ_COLUMNWISE);
        const size_t amaxes = shared_amax ? (size_t)(a->amax_step == 0 ? 1 : a->operand.rows) : 0;
        const bool shared_scale = first->job.spec.format == OPAQ_FP8 ||
                                  (first->job.spec.format == OPAQ_FP8ROW && a->usage == OPAQ_COLUMNWISE);
        const size_t scales =
            shared_scale ? (size_t)(first->job.spec.format == OPAQ_FP8 ? 1 : a->operand.rows) : 0;
        if ((amaxes > 0 && memcmp(a->amax, b->amax, amaxes * sizeof(float)) != 0) ||
            (scales > 0 && memcmp(a->scale, b->scale, scales * sizeof(float)) != 0)) {
            return opaq_fail(
                error, OPAQ_ERROR_ARGUMENT,
                "gather_rows: shard %lld has another tensor-wide scale than shard 0, so they are not shards "
                "of one quantized tensor",
                (long long)index);
        }
    }
    return OPAQ_OK;
}

enum opaq_status run_gather_rows(const struct opaq_call *call, struct opaq_error *error) {
    const struct opaq_value *values = call->values;
    const struct opaq_proto *proto = call->protos;
    const struct opaq_outputs *outputs = call->outputs;
    struct located target;
    struct located first = {0};
    struct opaq_proto shard_proto;
    struct opaq_error reason;
    enum opaq_status status = rearranged_to("gather_rows", proto, outputs, &target, error);
    if (status != OPAQ_OK) {
        return status;
    }
    if (opaq_proto_make(values[2].sizes, (int)values[2].count, (enum opaq_element)proto->dtype, &proto->spec,
                        proto->device, &shard_proto, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "gather_rows: %s", reason.text);
    }
    const int64_t all = opaq_proto_rows(proto);
    const int64_t rows = opaq_proto_rows(&shard_proto);
    if (rows == 0 || all % rows != 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "gather_rows: shards of %lld rows do not make %lld rows",
                         (long long)rows, (long long)all);
    }
    const int64_t shards = all / rows;
    status = check_same_columns("gather_rows", &shard_proto, proto, error);
    if (status == OPAQ_OK) {
        status = check_gathered(&shard_proto, &values[0], shards, error);
    }
    if (status == OPAQ_OK) {
        status = check_row_cut("gather_rows", &target.job, 0, rows, all, error);
    }
    /* without elements there may be any number of shards, all alike but for figures that rows have of their own */
    const bool has_row_figures =
        proto->spec.format == OPAQ_FP8ROW || (proto->spec.options & OPAQ_ROWSCALED) != 0;
    const int64_t distinct = opaq_proto_columns(proto) == 0 && !has_row_figures ? 1 : shards;
    for (int pass = 0; pass < 2; ++pass) { /* all is checked before anything is written */
        for (int64_t i = 0; status == OPAQ_OK && i < distinct; ++i) {
            struct opaq_tensor tensors[OPAQ_BUFFER_LIMIT];
            struct located shard;
            shard_of(&shard_proto, &values[0], i, tensors);
            status = rearranged_from("gather_rows", proto, &values[1], shard_proto.shape, shard_proto.rank,
                                     tensors, values[0].count, &shard, error);
            if (status == OPAQ_OK && i == 0) {
                first = shard;
            }
            if (status == OPAQ_OK && pass == 0) {
                status = check_agreement(&first, &shard, i, error);
            }
            if (status == OPAQ_OK && pass == 1) {
                if (i == 0) {
                    located_clear(&target.view);
                }
                place_shard(&shard, &target, i * rows, call->parallel);
            }
        }
    }
    return status;
}
