/* cpu/moe/grouped_product.c: products, gradients and dot products of rows in groups, one group after another.
 * All groups use the same scratch memory, measured once for a group with all rows. Products with tiled weights
 * process all groups at once (grouped_tiles.c). */
#include <assert.h>
#include <string.h>

#include "base/checked.h"
#include "base/try.h"
#include "cpu/cpu_functions.h"
#include "cpu/gemm/gemm_run.h"
#include "cpu/moe/activation.h"
#include "cpu/moe/grouped_tiles.h"
#include "cpu/moe/rows.h"

enum { COMBINE_ROWS = 1024 }; /* rows of float32 results at a time */

struct group {
    int64_t index;
    struct row_range range;
};

/* ---- all groups ---- */

static struct work work_in(void *workspace, const struct opaq_execution *execution) {
    return (struct work){.backend = &cpu_backend, .execution = execution, .arena = {.memory = workspace}};
}

/* Calls `run` for each group, resetting the arena in between so that all use the same memory. */
static enum opaq_status each_group(struct work *work, const struct row_groups *groups,
                                   enum opaq_status (*run)(struct work *work, const void *job,
                                                           const struct group *group, struct opaq_error *error),
                                   const void *job, struct opaq_error *error) {
    const size_t mark = work->arena.used;
    for (int64_t e = 0; e < groups->count; ++e) {
        const struct group group = {e, {groups, group_begin(groups, e), group_rows(groups, e)}};
        work->arena.used = mark;
        TRY(run(work, job, &group, error));
    }
    return OPAQ_OK;
}

/* Measures the memory of `run` for a group with all rows. */
static enum opaq_status measure_group(const struct row_groups *groups, struct opaq_device device,
                                      enum opaq_status (*run)(struct work *work, const void *job,
                                                              const struct group *group,
                                                              struct opaq_error *error),
                                      const void *job, size_t *bytes, struct opaq_error *error) {
    const struct opaq_execution execution = {.device = device};
    struct work work = {.backend = &cpu_backend, .execution = &execution, .is_measuring = true};
    const struct group group = {0, {groups, 0, groups->rows}};
    if (groups->count > 0) {
        TRY(run(&work, job, &group, error));
    }
    *bytes = work.arena.most;
    return OPAQ_OK;
}

/* ---- operands ---- */

/* A group's rows as a matrix: in place, or gathered into the arena. */
static enum opaq_status take_rows(struct work *work, const struct grouped_rows *rows, const struct group *group,
                                  struct opaq_view *taken, struct opaq_error *error) {
    if (rows->order == ROWS_SORTED && !rows->is_weighted) {
        *taken = plain_rows(&rows->view, group->range.first, group->range.count);
        return OPAQ_OK;
    }
    TRY(work_matrix(work, group->range.count, opaq_proto_columns(&rows->view.proto),
                    (enum opaq_element)rows->view.proto.dtype, taken, error));
    if (!work->is_measuring) {
        const struct quant_matrix from = quant_matrix_make(&rows->view);
        const struct quant_matrix to = quant_matrix_make(taken);
        rows_gather(&group->range, &from, rows->order, rows->is_weighted, &to, work->execution->parallel);
    }
    return OPAQ_OK;
}

static struct operand_form form_of_group(const struct operand_form *form, int64_t figure_step, int64_t index) {
    struct operand_form own = *form;
    own.random.stream += GROUP_STREAMS * index;
    own.scale = form->scale == NULL ? NULL : form->scale + figure_step * index;
    own.amax = form->amax == NULL ? NULL : form->amax + figure_step * index;
    return own;
}

static enum opaq_status rows_operand(struct work *work, const struct grouped_rows *rows,
                                     const struct group *group, struct operand *operand,
                                     struct opaq_error *error) {
    struct opaq_view taken;
    const struct operand_form form = form_of_group(&rows->form, rows->figure_step, group->index);
    TRY(take_rows(work, rows, group, &taken, error));
    return operand_make(work, &taken, &form, operand, error);
}

/* The operand of one matrix of a quantized stack. */
static enum opaq_status quantized_matrix(struct work *work, const struct opaq_view *stack, int64_t index,
                                         struct operand *matrix, struct opaq_error *error) {
    const struct operand_form along_rows = {.along = OPAQ_ROWWISE};
    struct operand whole;
    TRY(operand_make(work, stack, &along_rows, &whole, error));
    const bool can_take = stack_operand(&whole, stack->proto.shape[stack->proto.rank - 2], index, matrix);
    assert(can_take); /* checked by the operator */
    (void)can_take;
    return OPAQ_OK;
}

static enum opaq_status weight_operand(struct work *work, const struct grouped_weights *weights, int64_t index,
                                       struct operand *operand, struct opaq_error *error) {
    const struct operand_form form = form_of_group(&weights->form, 0, index);
    if (!weights->view.proto.is_quantized) {
        const struct opaq_view matrix = stack_matrix(&weights->view, index);
        return operand_make(work, &matrix, &form, operand, error);
    }
    TRY(quantized_matrix(work, &weights->view, index, operand, error));
    if (form.along == OPAQ_COLUMNWISE) {
        operand_turn(operand);
    }
    return OPAQ_OK;
}

/* ---- products ---- */

static struct quant_matrix matrix_rows(const struct quant_matrix *matrix, int64_t first, int64_t rows) {
    struct quant_matrix part = *matrix;
    part.rows = rows;
    if (matrix->data != NULL) {
        part.data = (char *)matrix->data + first * matrix->row_step * (matrix->dtype == OPAQ_F32 ? 4 : 2);
    }
    return part;
}

static struct gemm_job product_of(const struct grouped_product *job, int64_t index, const struct operand *a,
                                  const struct operand *b, const struct quant_matrix *c) {
    struct gemm_job product = {.a = a->gemm, .b = b->gemm, .c = *c, .precision = job->precision};
    if (job->bias != NULL) {
        const struct opaq_view bias = stack_vector(job->bias, index);
        product.bias = bias.buffer[0].data;
        product.bias_dtype = (enum opaq_element)bias.proto.dtype;
    }
    return product;
}

static enum opaq_status store(struct work *work, const struct grouped_product *job, const struct group *group,
                              const struct operand *a, const struct operand *b, struct opaq_error *error) {
    const struct quant_matrix c = matrix_rows(&job->c, group->range.first, group->range.count);
    struct gemm_job product = product_of(job, group->index, a, b, &c);
    return work_product(work, &product, error);
}

static enum opaq_status activate(struct work *work, const struct grouped_product *job,
                                 const struct group *group, const struct operand *a, const struct operand *b,
                                 struct opaq_error *error) {
    const bool has_h = job->h.columns > 0;
    const bool is_h_sorted = has_h && !group->range.groups->is_routed;
    struct quant_matrix h = matrix_rows(&job->h, group->range.first, group->range.count);
    if (!is_h_sorted) {
        struct opaq_view scratch;
        TRY(work_matrix(work, group->range.count, b->gemm.plain.rows, job->c.dtype, &scratch, error));
        h = quant_matrix_make(&scratch);
    }
    struct gemm_job product = product_of(job, group->index, a, b, &h);
    TRY(work_product(work, &product, error));
    if (work->is_measuring) {
        return OPAQ_OK;
    }
    const struct quant_matrix c = matrix_rows(&job->c, group->range.first, group->range.count);
    activation_forward(job->activation, &h, &c, work->execution->parallel);
    if (has_h && !is_h_sorted) {
        rows_scatter(&group->range, &h, &job->h, work->execution->parallel);
    }
    return OPAQ_OK;
}

static enum opaq_status combine(struct work *work, const struct grouped_product *job, const struct group *group,
                                const struct operand *a, const struct operand *b, struct opaq_error *error) {
    const int64_t rows = group->range.count;
    struct opaq_view scratch;
    TRY(work_matrix(work, min_int64(rows, COMBINE_ROWS), b->gemm.plain.rows, OPAQ_F32, &scratch, error));
    const struct quant_matrix results = quant_matrix_make(&scratch);
    for (int64_t first = 0; first < rows; first += COMBINE_ROWS) {
        const struct row_range range = {group->range.groups, group->range.first + first,
                                        min_int64(rows - first, COMBINE_ROWS)};
        const struct quant_matrix c = matrix_rows(&results, 0, range.count);
        struct operand part;
        const bool can_take = operand_rows(a, first, range.count, &part);
        assert(can_take); /* COMBINE_ROWS is a multiple of every block's rows */
        (void)can_take;
        struct gemm_job product = product_of(job, group->index, &part, b, &c);
        TRY(work_product(work, &product, error));
        if (work->is_measuring) {
            return OPAQ_OK; /* measuring: the first range is the largest */
        }
        if (job->dot_result != NULL) {
            const struct rows_dot dot = {&c, &job->dot, ROWS_BY_TOKEN, false};
            rows_dot(&range, &dot, job->dot_result, work->execution->parallel);
        }
        rows_add(&range, &c, job->is_weighted, &job->sums, work->execution->parallel);
    }
    return OPAQ_OK;
}

static enum opaq_status product_group(struct work *work, const void *argument, const struct group *group,
                                      struct opaq_error *error) {
    const struct grouped_product *job = argument;
    struct operand a;
    struct operand b;
    if (group->range.count == 0 && !work->is_measuring) {
        return OPAQ_OK;
    }
    TRY(rows_operand(work, &job->a, group, &a, error));
    TRY(weight_operand(work, &job->w, group->index, &b, error));
    switch (job->result) {
    case GROUPED_STORE:
        return store(work, job, group, &a, &b, error);
    case GROUPED_ACTIVATE:
        return activate(work, job, group, &a, &b, error);
    case GROUPED_COMBINE:
        break;
    }
    return combine(work, job, group, &a, &b, error);
}

enum opaq_status cpu_grouped_product_workspace(const struct grouped_product *job, size_t *bytes,
                                               struct opaq_error *error) {
    size_t tiles = 0;
    if (grouped_tiles_could_run(job)) {
        TRY(grouped_tiles_workspace(job, &tiles, error));
    }
    TRY(measure_group(job->groups, job->a.view.proto.device, product_group, job, bytes, error));
    *bytes = tiles > *bytes ? tiles : *bytes;
    return OPAQ_OK;
}

enum opaq_status cpu_grouped_product(const struct grouped_product *job, void *workspace,
                                     const struct opaq_execution *execution, struct opaq_error *error) {
    struct work work = work_in(workspace, execution);
    return grouped_tiles_can_run(job) ? grouped_tiles_run(&work, job, error)
                                      : each_group(&work, job->groups, product_group, job, error);
}

/* ---- gradients of weights ---- */

static enum opaq_status gradient_group(struct work *work, const void *argument, const struct group *group,
                                       struct opaq_error *error) {
    const struct grouped_gradient *job = argument;
    const struct opaq_view matrix = stack_matrix(&job->c, group->index);
    const struct quant_matrix c = quant_matrix_make(&matrix);
    struct operand a;
    struct operand b;
    if (group->range.count == 0 && !work->is_measuring) {
        return cpu_zero(c.data, (size_t)(c.rows * c.columns * (c.dtype == OPAQ_F32 ? 4 : 2)), work->execution,
                        error);
    }
    TRY(rows_operand(work, &job->a, group, &a, error));
    TRY(rows_operand(work, &job->b, group, &b, error));
    struct gemm_job product = {.a = a.gemm, .b = b.gemm, .c = c};
    return work_product(work, &product, error);
}

enum opaq_status cpu_grouped_gradient_workspace(const struct grouped_gradient *job, size_t *bytes,
                                                struct opaq_error *error) {
    return measure_group(job->groups, job->a.view.proto.device, gradient_group, job, bytes, error);
}

enum opaq_status cpu_grouped_gradient(const struct grouped_gradient *job, void *workspace,
                                      const struct opaq_execution *execution, struct opaq_error *error) {
    struct work work = work_in(workspace, execution);
    return each_group(&work, job->groups, gradient_group, job, error);
}

enum opaq_status cpu_column_sum(const struct row_groups *groups, const struct quant_matrix *rows,
                                const struct opaq_view *sums, const struct opaq_execution *execution,
                                struct opaq_error *error) {
    (void)error;
    for (int64_t e = 0; e < (groups == NULL ? 1 : groups->count); ++e) {
        const struct opaq_view vector = stack_vector(sums, e);
        const struct quant_matrix to = quant_matrix_make(&vector);
        const struct quant_matrix from =
            groups == NULL ? *rows : matrix_rows(rows, group_begin(groups, e), group_rows(groups, e));
        column_sum(&from, &to, execution->parallel);
    }
    return OPAQ_OK;
}

/* ---- dot products of rows ---- */

static enum opaq_status dot_group(struct work *work, const void *argument, const struct group *group,
                                  struct opaq_error *error) {
    const struct row_dot *job = argument;
    struct operand a;
    TRY(rows_operand(work, &job->a, group, &a, error));
    if (work->is_measuring || group->range.count == 0) {
        return OPAQ_OK;
    }
    const struct opaq_view other = job->is_b_per_group
                                       ? stack_vector(&job->b, group->index)
                                       : plain_rows(&job->b, group->range.first, group->range.count);
    struct quant_matrix b = quant_matrix_make(&other);
    b.row_step = job->is_b_per_group ? 0 : b.row_step;
    const struct rows_dot dot = {&a.gemm.plain, &b, ROWS_SORTED, job->adds};
    rows_dot(&group->range, &dot, job->result, work->execution->parallel);
    return OPAQ_OK;
}

enum opaq_status cpu_row_dot_workspace(const struct row_dot *job, size_t *bytes, struct opaq_error *error) {
    return measure_group(job->groups, job->a.view.proto.device, dot_group, job, bytes, error);
}

enum opaq_status cpu_row_dot(const struct row_dot *job, void *workspace, const struct opaq_execution *execution,
                             struct opaq_error *error) {
    struct work work = work_in(workspace, execution);
    return each_group(&work, job->groups, dot_group, job, error);
}
