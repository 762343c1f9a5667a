/* cpu/quant/amax_run.c: amax of a tensor: computed in slots, one per range of rows, then combined by maximum,
 * so that the result does not depend on the number of slots or threads. */
#include "cpu/cpu_functions.h"

#include <assert.h>
#include <stdbool.h>
#include <stddef.h>

#include "base/checked.h"
#include "base/float_bits.h"
#include "base/fp_environment.h"
#include "base/parallel_run.h"
#include "cpu/quant/quant_table.h"
#include "definition/scale_rules.h"

enum { PARTIAL_LIMIT = 64 };

struct amax_task {
    const struct quant_copy *copy;
    const struct opaq_spec *spec;
    const struct amax_kernel *kernel;
    float *amax;
    int64_t step;
    int64_t count;
    float partial[PARTIAL_LIMIT];
};

static void amax_rows(void *argument, int64_t begin, int64_t end) {
    const struct amax_task *task = argument;
    task->kernel->run(task->copy, task->spec, begin, end, task->amax, 1);
}

static void amax_partials(void *argument, int64_t begin, int64_t end) {
    struct amax_task *task = argument;
    const int64_t rows = task->copy->operand.rows;
    for (int64_t i = begin; i < end; ++i) {
        const int64_t part = ceil_div(rows, task->count);
        task->kernel->run(task->copy, task->spec, min_int64(rows, i * part), min_int64(rows, (i + 1) * part),
                          &task->partial[i], 0);
    }
}

void amax_compute(const struct quant_copy *copy, const struct opaq_spec *spec,
                  const struct opaq_parallel *parallel, float *amax, int64_t step) {
    assert(amax != NULL || (step != 0 && copy->operand.rows == 0));
    if (copy->operand.rows == 0 || copy->operand.columns == 0) { /* the other extent is then of any size */
        for (int64_t i = 0; i < (step == 0 ? 1 : copy->operand.rows); ++i) {
            amax[i] = 0.0f;
        }
        return;
    }
    parallel = parallel_if_worth(parallel, copy->operand.rows * copy->operand.columns);
    struct quant_copy along = *copy;
    if (step == 0 && !copy->is_hadamard && copy->operand.column_step != 1) {
        along.operand = quant_matrix_transposed(copy->operand); /* the same elements in memory order */
        copy = &along;
    }
    struct amax_task task = {.copy = copy, .spec = spec, .kernel = amax_kernel(), .amax = amax, .step = step};
    if (step != 0) {
        const struct opaq_body body = {amax_rows, &task};
        parallel_run(parallel, copy->operand.rows, &body);
        return;
    }
    /* columns to transform are read in groups of adjacent ones */
    const int64_t together = copy->is_hadamard ? 512 : 1;
    task.count = max_int64(1, min_int64(PARTIAL_LIMIT, copy->operand.rows / together));
    const struct opaq_body body = {amax_partials, &task};
    parallel_run(parallel, task.count, &body);
    uint32_t bits = 0;
    for (int64_t i = 0; i < task.count; ++i) { /* the bits have no sign; a NaN is the largest */
        const uint32_t partial = float_to_bits(task.partial[i]);
        bits = partial > bits ? partial : bits;
    }
    *amax = float_from_bits(bits);
}

enum opaq_status cpu_amax(const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored,
                          int64_t step, float *amax, const struct opaq_execution *execution,
                          struct opaq_error *error) {
    (void)error;
    amax_compute(copy, spec, execution->parallel, amax, step);
    if (is_stored) {
        const uint64_t saved = fp_environment_enter();
        for (int64_t i = 0; i < (step == 0 ? 1 : copy->operand.rows); ++i) {
            amax[i] = nvfp4_stored(spec, amax[i]);
        }
        fp_environment_leave(saved);
    }
    return OPAQ_OK;
}
