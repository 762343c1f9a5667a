/* cpu/quant/remap_run.c: runs remaps on all threads, and copies tensor-wide scales and amaxes. */
#include <string.h>

#include "base/checked.h"
#include "base/parallel_run.h"
#include "cpu/cpu_functions.h"
#include "cpu/quant/remap_rows.h"
#include "format/format_traits.h"

struct panel_task {
    const struct remap *remap;
    int64_t first_row;
    int64_t rows;
    int64_t panel_rows;
};

static void run_panels(void *argument, int64_t begin, int64_t end) {
    const struct panel_task *task = argument;
    remap_rows(task->remap, task->first_row + begin * task->panel_rows,
               task->first_row + min_int64(task->rows, end * task->panel_rows));
}

static void move_elements(const struct remap *remap, int64_t row, int64_t rows,
                          const struct opaq_parallel *parallel) {
    const struct scale_layout *scales = &remap->to->scale_layout;
    if (remap->column == remap->column_end && scales->column_step != 0) {
        return;
    }
    if (remap->column == remap->column_end && scales->row_step == 0) {
        rows = min_int64(rows, 1); /* no elements, and one scale for any number of rows */
    }
    struct panel_task task = {remap, row, rows, quant_panel_rows(remap->to)};
    const struct opaq_body body = {run_panels, &task};
    parallel_run(parallel_if_worth(parallel, rows * (remap->column_end - remap->column)),
                 ceil_div(rows, task.panel_rows), &body);
}

enum opaq_status cpu_remap(const struct remap_job *job, const struct opaq_execution *execution,
                           struct opaq_error *error) {
    const struct quant_copy *from = job->remap.from;
    const struct quant_copy *to = job->remap.to;
    (void)error;
    if (job->amax_count > 0) {
        memcpy(to->amax + job->amax_to, from->amax + job->amax_from,
               (size_t)job->amax_count * sizeof *to->amax);
    }
    if (job->has_tensor_scale) {
        memcpy(to->scale, from->scale, sizeof(float));
    }
    move_elements(&job->remap, job->row, job->rows, execution->parallel);
    return OPAQ_OK;
}

enum opaq_status cpu_compare_figures(const struct quant_job *first, const struct quant_job *second,
                                     bool *are_equal, const struct opaq_execution *execution,
                                     struct opaq_error *error) {
    (void)execution;
    (void)error;
    *are_equal = true;
    for (int i = 0; i < first->copy_count; ++i) {
        const struct quant_copy *a = &first->copy[i];
        const struct quant_copy *b = &second->copy[i];
        const bool shared_amax = a->amax != NULL && (a->amax_step == 0 || a->usage == OPAQ_COLUMNWISE);
        const size_t amaxes = shared_amax ? (size_t)(a->amax_step == 0 ? 1 : a->operand.rows) : 0;
        const bool has_one = spec_has_tensor_scale(&first->spec);
        const bool shared_scale = has_one || (spec_has_row_scales(&first->spec) && a->usage == OPAQ_COLUMNWISE);
        const size_t scales = shared_scale ? (size_t)(has_one ? 1 : a->operand.rows) : 0;
        if ((amaxes > 0 && memcmp(a->amax, b->amax, amaxes * sizeof(float)) != 0) ||
            (scales > 0 && memcmp(a->scale, b->scale, scales * sizeof(float)) != 0)) {
            *are_equal = false;
        }
    }
    return OPAQ_OK;
}
