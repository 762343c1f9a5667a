/* op/quantize/gather_shards.c: the operator gather_rows: joins equal shards of a quantized tensor, which were gathered
 * buffer by buffer. */
#include <stdbool.h>

#include "base/checked.h"
#include "base/try.h"
#include "format/format_traits.h"
#include "format/proto_layout.h"
#include "op/quantize/rearrange.h"
#include "op/table/op_tensor.h"

enum { BUFFERS, QUANTIZER, SHAPE };

/* Whether each gathered buffer is the concatenation of `shards` buffers of the shard's prototype. */
static enum opaq_status check_gathered(const struct opaq_proto *proto, const struct opaq_value *gathered,
                                       int64_t shards, struct opaq_error *error) {
    struct opaq_buffer buffers[OPAQ_BUFFER_LIMIT];
    struct opaq_tensor expected[OPAQ_BUFFER_LIMIT];
    (void)proto_buffers(proto, buffers);
    const int count = tensors_of_proto(proto, expected);
    if (gathered->count != count) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "got %lld buffers, expected %d",
                         (long long)gathered->count, count);
    }
    for (int i = 0; i < count; ++i) {
        struct opaq_tensor whole = expected[i];
        if (!checked_multiply(whole.shape[0], shards, &whole.shape[0])) {
            return opaq_fail(error, OPAQ_ERROR_OVERFLOW, "%lld shards of buffer \"%s\" do not fit",
                             (long long)shards, buffers[i].name);
        }
        TRY(check_same_tensor(buffers[i].name, &gathered->tensors[i], &whole, error));
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

static enum opaq_status place_shard(const struct work *work, const struct located *shard,
                                    const struct located *target, int64_t start, struct opaq_error *error) {
    const int64_t rows = opaq_proto_rows(&shard->view.proto);
    for (int i = 0; i < target->job.copy_count; ++i) {
        const struct quant_copy *from = &shard->job.copy[i];
        const struct quant_copy *to = &target->job.copy[i];
        const bool rowwise = to->usage == OPAQ_ROWWISE;
        const bool has_row_amaxes = to->amax_step != 0 && rowwise;
        const struct remap_job job = {
            .remap = {.from = from,
                      .to = to,
                      .row_offset = rowwise ? -start : 0,
                      .column_offset = rowwise ? 0 : -start,
                      .column = rowwise ? 0 : start,
                      .column_end = rowwise ? to->operand.columns : start + rows,
                      .scale_bytes = located_scale_bytes(&target->view.proto, to->usage)},
            .row = rowwise ? start : 0,
            .rows = rowwise ? rows : to->operand.rows,
            .has_tensor_scale = spec_has_tensor_scale(&target->job.spec),
            .amax_count = has_row_amaxes ? rows : copy_amax_count(to),
            .amax_to = has_row_amaxes ? start : 0};
        TRY(work->backend->remap(&job, work->execution, error));
    }
    return OPAQ_OK;
}

/* The shards of a call. */
struct shards {
    struct opaq_proto proto;
    int64_t rows;
    int64_t
        distinct; /* tensors without elements may have any number of shards, equal but for per-row scales and amaxes */
};

static enum opaq_status read_shards(const struct op_call *call, const struct located *target,
                                    struct shards *shards, struct opaq_error *error) {
    const struct opaq_value *shape = &call->values[SHAPE];
    const struct opaq_proto *proto = call->protos;
    const int64_t all = opaq_proto_rows(proto);
    TRY(opaq_proto_make(shape->sizes, (int)shape->count, (enum opaq_element)proto->dtype, &proto->spec,
                        proto->device, &shards->proto, error));
    shards->rows = opaq_proto_rows(&shards->proto);
    if (shards->rows == 0 || all % shards->rows != 0) {
        return opaq_fail(error, OPAQ_ERROR_SHAPE, "shards of %lld rows do not make %lld rows",
                         (long long)shards->rows, (long long)all);
    }
    TRY(check_same_columns(&shards->proto, proto, error));
    TRY(check_gathered(&shards->proto, &call->values[BUFFERS], all / shards->rows, error));
    TRY(check_row_cut(&target->job, 0, shards->rows, all, error));
    const bool has_row_figures =
        spec_has_row_scales(&proto->spec) || (proto->spec.options & OPAQ_ROWSCALED) != 0;
    shards->distinct = opaq_proto_columns(proto) == 0 && !has_row_figures ? 1 : all / shards->rows;
    return OPAQ_OK;
}

static enum opaq_status locate_shard(const struct op_call *call, const struct shards *shards, int64_t index,
                                     struct located *shard, struct opaq_error *error) {
    struct opaq_tensor tensors[OPAQ_BUFFER_LIMIT];
    const struct opaq_value *gathered = &call->values[BUFFERS];
    shard_of(&shards->proto, gathered, index, tensors);
    return locate_buffers(&shards->proto, tensors, gathered->count, shard, error);
}

enum opaq_status run_gather_rows(struct op_call *call, struct opaq_error *error) {
    const struct work *work = &call->work;
    struct located target;
    struct located first;
    struct located shard;
    struct shards shards;
    TRY(locate_target(call, &target, error));
    TRY(read_shards(call, &target, &shards, error));
    TRY(locate_shard(call, &shards, 0, &first, error));
    for (int64_t i = 1; i < shards.distinct; ++i) { /* check everything before writing */
        bool are_equal = true;
        TRY(locate_shard(call, &shards, i, &shard, error));
        TRY(work->backend->compare_figures(&first.job, &shard.job, &are_equal, work->execution, error));
        if (!are_equal) {
            return opaq_fail(
                error, OPAQ_ERROR_ARGUMENT,
                "shard %lld has another tensor-wide scale than shard 0, so they are not shards of one "
                "quantized tensor",
                (long long)i);
        }
    }
    TRY(located_clear(work, &target.view, error));
    for (int64_t i = 0; i < shards.distinct; ++i) {
        TRY(locate_shard(call, &shards, i, &shard, error));
        TRY(place_shard(work, &shard, &target, i * shards.rows, error));
    }
    return OPAQ_OK;
}
