/* op/quantize/amax_op.c: amax over a tensor: computed in slots, one per stretch of rows, then joined. Joining is a maximum,
 * so the number of slots, like the number of threads, does not matter to the result. */
#include "op/quantize/amax_op.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/checked.h"
#include "base/float_bits.h"
#include "base/parallel_run.h"
#include "op/table/kernel_list.h"
#include "op/table/tensor_check.h"
#include "opaq/status.h"
#include "cpu/quant/quant_table.h"

enum { SLOTS = 64 };

struct amax_task {
    const struct quant_copy *copy;
    const struct opaq_spec *spec;
    const struct amax_kernel *kernel;
    float *amax;
    int64_t step;
    int64_t slots;
    float slot[SLOTS];
};

static void amax_rows(void *argument, int64_t begin, int64_t end) {
    const struct amax_task *task = argument;
    task->kernel->run(task->copy, task->spec, begin, end, task->amax, 1);
}

static void amax_slots(void *argument, int64_t begin, int64_t end) {
    struct amax_task *task = argument;
    const int64_t rows = task->copy->operand.rows;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t share = ceil_div(rows, task->slots);
        task->kernel->run(task->copy, task->spec, min_int64(rows, i * share), min_int64(rows, (i + 1) * share),
                          &task->slot[i], 0);
    }
}

void amax_compute(const struct quant_copy *copy, const struct opaq_spec *spec,
                  const struct opaq_parallel *parallel, float *amax, int64_t step) {
    assert(amax != NULL || (step != 0 && copy->operand.rows == 0));
    if (copy->operand.columns == 0) { /* however many rows */
        for (int64_t i = 0; i < (step == 0 ? 1 : copy->operand.rows); ++i) {
            amax[i] = 0.0f;
        }
        return;
    }
    parallel = parallel_if_worth(parallel, copy->operand.rows * copy->operand.columns);
    struct quant_copy along = *copy;
    if (step == 0 && !copy->is_hadamard && copy->operand.column_step != 1) {
        along.operand = quant_matrix_transposed(copy->operand); /* the same elements, as they lie in memory */
        copy = &along;
    }
    struct amax_task task = {.copy = copy, .spec = spec, .kernel = amax_kernel(), .amax = amax, .step = step};
    if (step != 0) {
        const struct opaq_body body = {amax_rows, &task};
        parallel_run(parallel, copy->operand.rows, &body);
        return;
    }
    /* columns that go through a transform are read side by side */
    const int64_t together = copy->is_hadamard ? 512 : 1;
    task.slots = max_int64(1, min_int64(SLOTS, copy->operand.rows / together));
    const struct opaq_body body = {amax_slots, &task};
    parallel_run(parallel, task.slots, &body);
    uint32_t bits = 0;
    for (int64_t i = 0; i < task.slots; ++i) { /* no sign bits; a NaN is the largest */
        const uint32_t slot = float_to_bits(task.slot[i]);
        bits = slot > bits ? slot : bits;
    }
    *amax = float_from_bits(bits);
}

int64_t opaq_amax_count(const struct opaq_proto *proto, enum opaq_usage usage) {
    if (proto == NULL || !proto->is_quantized || (proto->spec.usage & (int)usage) == 0) {
        return 0;
    }
    if (proto->spec.format == OPAQ_FP8) {
        return proto->spec.options & OPAQ_DELAYED ? 0 : 1;
    }
    struct opaq_buffer buffer;
    const int index = opaq_proto_find(proto, OPAQ_ROLE_AMAX, usage);
    return index < 0 || opaq_proto_buffer(proto, index, &buffer, NULL) != OPAQ_OK ? 0 : buffer.shape[0];
}

enum opaq_status opaq_amax(const struct opaq_view *x, const struct opaq_spec *spec, enum opaq_usage usage,
                           const struct opaq_parallel *parallel, float *amax, int64_t count,
                           struct opaq_error *error) {
    enum opaq_status status = check_plain_tensor("amax", "x", x, error);
    if (status == OPAQ_OK) {
        status = kernel_list_check(error);
    }
    if (status != OPAQ_OK) {
        return status;
    }
    struct opaq_proto proto;
    struct opaq_error reason;
    if (spec == NULL) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "amax: spec is NULL");
    }
    if (opaq_proto_make(x->proto.shape, x->proto.rank, (enum opaq_element)x->proto.dtype, spec, x->proto.device,
                        &proto, &reason) != OPAQ_OK) {
        return opaq_fail(error, reason.status, "amax: %s", reason.text);
    }
    if (spec->options & OPAQ_GLOBAL) {
        return opaq_fail(
            error, OPAQ_ERROR_ARGUMENT,
            "amax: the quantizer keeps a global scale (global), not an amax; ask for the amax of the "
            "one without \"global\"");
    }
    if (usage != OPAQ_ROWWISE && usage != OPAQ_COLUMNWISE) {
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT,
                         "amax: usage is %d, expected 1 (rowwise) or 2 (columnwise)", (int)usage);
    }
    const int64_t expected = opaq_amax_count(&proto, usage);
    const bool takes_none =
        expected == 0 && opaq_proto_find(&proto, OPAQ_ROLE_AMAX, usage) < 0; /* not: no rows */
    if ((amax == NULL && expected > 0) || count != expected || takes_none) {
        return opaq_fail(error, OPAQ_ERROR_BUFFER,
                         "amax: got room for %lld floats%s, a %s has %lld of this usage", (long long)count,
                         amax == NULL ? " (NULL)" : "", opaq_format_row((enum opaq_format)spec->format)->name,
                         (long long)expected);
    }
    struct quant_copy copy = {.usage = usage, .operand = quant_matrix_make(x)};
    if (usage == OPAQ_COLUMNWISE) {
        copy.operand = quant_matrix_transposed(copy.operand);
        copy.is_hadamard = (spec->options & OPAQ_HADAMARD) != 0;
    }
    amax_compute(&copy, spec, parallel, amax, (spec->options & OPAQ_ROWSCALED) != 0);
    return OPAQ_OK;
}
