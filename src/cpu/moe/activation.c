/* cpu/moe/activation.c: the activation of an MLP and its gradient.
 *
 * A row is processed in segments: gates and factors are converted to float32, activated and converted back. */
#include "cpu/moe/activation.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/parallel_run.h"
#include "cpu/cpu_functions.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/moe/activation_table.h"
#include "cpu/moe/rows.h"
#include "definition/activation_formulas.h"

struct activation_task {
    const struct opaq_experts_plan *plan;
    const struct quant_matrix *h;
    const struct quant_matrix *a;  /* or da */
    const struct quant_matrix *dh; /* gradient only */
};

/* The positions of a segment's gates and factors in a row of h or dh. */
struct gate_places {
    int64_t gate, factor, step;
};

static struct gate_places places_of(const struct activation_task *task, const struct quant_matrix *matrix,
                                    int64_t row, int64_t column) {
    const int64_t start = row * matrix->row_step;
    if (task->plan->activation == OPAQ_SWIGLU_OAI) {
        return (struct gate_places){start + 2 * column, start + 2 * column + 1, 2};
    }
    return (struct gate_places){start + column, start + task->a->columns + column, 1};
}

static void load(const struct activation_task *task, const struct gate_places *at, int n, float *g, float *u) {
    const bool is_gated = opaq_activation_is_gated((enum opaq_activation)task->plan->activation) != 0;
    plain_load(task->h->data, task->h->dtype, at->gate, at->step, n, g);
    if (is_gated) {
        plain_load(task->h->data, task->h->dtype, at->factor, at->step, n, u);
    } else {
        memset(u, 0, (size_t)n * sizeof *u);
    }
}

static void forward_rows(void *argument, int64_t begin, int64_t end) {
    const struct activation_task *task = argument;
    float g[ACTIVATION_SEGMENT];
    float u[ACTIVATION_SEGMENT];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t c = 0; c < task->a->columns; c += ACTIVATION_SEGMENT) {
            const int n = (int)min_int64(ACTIVATION_SEGMENT, task->a->columns - c);
            const struct gate_places at = places_of(task, task->h, row, c);
            load(task, &at, n, g, u);
            activation_segment(task->plan, task->h->dtype, g, u, n,
                               (char *)task->a->data +
                                   plain_bytes(task->a->dtype, row * task->a->row_step + c));
        }
    }
}

static void backward_rows(void *argument, int64_t begin, int64_t end) {
    const struct activation_task *task = argument;
    const struct opaq_experts_plan *plan = task->plan;
    const bool is_gated = opaq_activation_is_gated((enum opaq_activation)plan->activation) != 0;
    float g[ACTIVATION_SEGMENT];
    float u[ACTIVATION_SEGMENT];
    float da[ACTIVATION_SEGMENT];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t c = 0; c < task->a->columns; c += ACTIVATION_SEGMENT) {
            const int n = (int)min_int64(ACTIVATION_SEGMENT, task->a->columns - c);
            const struct gate_places at = places_of(task, task->h, row, c);
            load(task, &at, n, g, u);
            plain_load(task->a->data, task->a->dtype, row * task->a->row_step + c, 1, n, da);
            for (int i = 0; i < n; ++i) {
                activation_gradient(plan, da[i], &g[i], &u[i]);
            }
            const struct gate_places to = places_of(task, task->dh, row, c);
            plain_store(task->dh->data, task->dh->dtype, to.gate, to.step, n, g);
            if (is_gated) {
                plain_store(task->dh->data, task->dh->dtype, to.factor, to.step, n, u);
            }
        }
    }
}

void activation_segment(const struct opaq_experts_plan *plan, enum opaq_element dtype, float *g, float *u,
                        int n, void *to) {
    activation_table_best()->run(plan, dtype, g, u, n, to);
}

void activation_forward(const struct opaq_experts_plan *plan, const struct quant_matrix *h,
                        const struct quant_matrix *a, const struct opaq_parallel *parallel) {
    struct activation_task task = {plan, h, a, NULL};
    const struct opaq_body body = {forward_rows, &task};
    parallel_run(parallel_if_worth(parallel, a->rows * a->columns), a->rows, &body);
}

void activation_backward(const struct opaq_experts_plan *plan, const struct quant_matrix *h,
                         const struct quant_matrix *da, const struct quant_matrix *dh,
                         const struct opaq_parallel *parallel) {
    struct activation_task task = {plan, h, da, dh};
    const struct opaq_body body = {backward_rows, &task};
    parallel_run(parallel_if_worth(parallel, da->rows * da->columns), da->rows, &body);
}

/* ---- entries of the back end's table ---- */

/* The first rows of a matrix. */
static struct quant_matrix first_rows(const struct quant_matrix *matrix, int64_t rows) {
    struct quant_matrix first = *matrix;
    first.rows = rows;
    return first;
}

enum opaq_status cpu_activate(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                              const struct quant_matrix *h, const struct quant_matrix *a,
                              const struct opaq_execution *execution, struct opaq_error *error) {
    const struct quant_matrix to = first_rows(a, groups_total(groups));
    (void)error;
    activation_forward(plan, h, &to, execution->parallel);
    return OPAQ_OK;
}

enum opaq_status cpu_activate_backward(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                                       const struct quant_matrix *h, const struct quant_matrix *da,
                                       const struct quant_matrix *dh, const struct opaq_execution *execution,
                                       struct opaq_error *error) {
    const struct quant_matrix from = first_rows(da, groups_total(groups));
    (void)error;
    activation_backward(plan, h, &from, dh, execution->parallel);
    return OPAQ_OK;
}
