/* cuda/moe/grouped_product.cu: products, gradients and dot products of rows in groups, one group after another in the same
 * scratch memory, each as if it had all rows: how many it has is read by the kernels. */
#include "cuda/gemm/product_stream.h"
#include "cuda/moe/row_kernels.h"

extern "C" {
#include "backend/operand.h"
}

/* ---- operands whose rows are counted on the device ---- */

/* An execution on one group, and the table that operand.c calls with it. */
struct group_execution {
    struct opaq_execution execution; /* first member: a pointer to it is a pointer to the struct */
    struct group_part group;
    enum product_part part;
};

static const struct group_part *group_of(const struct opaq_execution *execution) {
    return &((const struct group_execution *)execution)->group;
}

static enum opaq_status group_quantize(const struct quant_job *job, const struct quantize_figures *figures,
                                       const struct opaq_execution *execution, struct opaq_error *error) {
    return quantize_group(job, figures, group_of(execution), execution, error);
}

static enum opaq_status group_dequantize(const struct quant_job *job, const struct opaq_execution *execution,
                                         struct opaq_error *error) {
    return dequantize_group(job, group_of(execution), execution, error);
}

static enum opaq_status group_product(const struct gemm_job *job, void *workspace,
                                      const struct opaq_execution *execution, struct opaq_error *error) {
    return product_group(job, group_of(execution), ((const struct group_execution *)execution)->part, workspace,
                         execution, error);
}

static size_t rows_workspace(const struct gemm_job *job) { return product_group_workspace(job, PRODUCT_ROWS); }
static size_t terms_workspace(const struct gemm_job *job) {
    return product_group_workspace(job, PRODUCT_TERMS);
}

/* The state of one call; `work` makes everything but the rows' operands. */
struct grouped_run {
    struct work work;
    struct backend group_table; /* CUDA's, with the functions above */
    struct group_execution group;
    struct row_groups groups;
};

static void run_begin(struct grouped_run *run, const struct row_groups *groups, void *workspace,
                      bool is_measuring, const struct opaq_execution *execution) {
    memset(run, 0, sizeof *run);
    run->work.backend = &cuda_backend;
    run->work.execution = execution;
    run->work.arena.memory = (char *)workspace;
    run->work.is_measuring = is_measuring;
    run->group_table = cuda_backend;
    run->group_table.quantize = group_quantize;
    run->group_table.dequantize = group_dequantize;
    run->group_table.product = group_product;
    run->group.execution = *execution;
    run->groups = *groups;
}

/* Selects group `index`. */
static void run_group(struct grouped_run *run, int64_t index) {
    run->group.group.first = run->groups.is_split ? run->groups.first : NULL;
    run->group.group.group = index;
}

static struct operand_form form_of_group(const struct operand_form *form, int64_t figure_step, int64_t index) {
    struct operand_form own = *form;
    own.random.stream += GROUP_STREAMS * index;
    own.scale = form->scale == NULL ? NULL : form->scale + figure_step * index;
    own.amax = form->amax == NULL ? NULL : form->amax + figure_step * index;
    return own;
}

/* A group's rows, gathered, as an operand. */
static enum opaq_status rows_operand(struct grouped_run *run, const struct grouped_rows *rows, int64_t index,
                                     struct operand *operand, struct opaq_error *error) {
    struct opaq_view taken;
    const struct operand_form form = form_of_group(&rows->form, rows->figure_step, index);
    const struct row_span span = {run->groups, index};
    TRY(work_matrix(&run->work, run->groups.rows, opaq_proto_columns(&rows->view.proto),
                    (enum opaq_element)rows->view.proto.dtype, &taken, error));
    if (!run->work.is_measuring) {
        const struct quant_matrix from = quant_matrix_make(&rows->view);
        const struct quant_matrix to = quant_matrix_make(&taken);
        TRY(gather_span(&span, &from, rows->order, rows->is_weighted, &to, run->work.execution, error));
    }
    struct work work = run->work;
    work.backend = &run->group_table;
    work.execution = &run->group.execution;
    const enum opaq_status status = operand_make(&work, &taken, &form, operand, error);
    run->work.arena = work.arena;
    return status;
}

/* The matrix of a group's weight. */
static enum opaq_status weight_operand(struct work *work, const struct grouped_weights *weights, int64_t index,
                                       struct operand *operand, struct opaq_error *error) {
    const struct operand_form form = form_of_group(&weights->form, 0, index);
    const struct operand_form along_rows = {.along = OPAQ_ROWWISE};
    struct operand whole;
    if (!weights->view.proto.is_quantized) {
        const struct opaq_view matrix = stack_matrix(&weights->view, index);
        return operand_make(work, &matrix, &form, operand, error);
    }
    TRY(operand_make(work, &weights->view, &along_rows, &whole, error));
    const bool can_take =
        stack_operand(&whole, weights->view.proto.shape[weights->view.proto.rank - 2], index, operand);
    assert(can_take); /* checked by the operator */
    (void)can_take;
    if (form.along == OPAQ_COLUMNWISE) {
        operand_turn(operand);
    }
    return OPAQ_OK;
}

/* The product of one group. */
static enum opaq_status multiply(struct grouped_run *run, struct gemm_job *job, enum product_part part,
                                 struct opaq_error *error) {
    struct work work = run->work;
    work.backend = &run->group_table;
    work.execution = &run->group.execution;
    run->group.part = part;
    run->group_table.product_workspace = part == PRODUCT_TERMS ? terms_workspace : rows_workspace;
    const enum opaq_status status = work_product(&work, job, error);
    run->work.arena = work.arena;
    return status;
}

/* ---- products ---- */

/* The destination of the product: the result itself, or scratch memory for all sorted rows. */
static enum opaq_status product_target(struct grouped_run *run, const struct grouped_product *job,
                                       int64_t columns, struct quant_matrix *c, struct opaq_error *error) {
    struct opaq_view scratch;
    const bool is_h_sorted = job->h.columns > 0 && !run->groups.is_routed;
    if (job->result == GROUPED_STORE || (job->result == GROUPED_ACTIVATE && is_h_sorted)) {
        *c = job->result == GROUPED_STORE ? job->c : job->h;
        return OPAQ_OK;
    }
    TRY(work_matrix(&run->work, run->groups.rows, columns,
                    job->result == GROUPED_ACTIVATE ? job->c.dtype : OPAQ_F32, &scratch, error));
    *c = quant_matrix_make(&scratch);
    return OPAQ_OK;
}

/* Processes the products of all groups. */
static enum opaq_status finish_product(struct grouped_run *run, const struct grouped_product *job,
                                       const struct quant_matrix *c, int64_t *places,
                                       struct opaq_error *error) {
    const struct opaq_execution *execution = run->work.execution;
    const struct row_span all = {run->groups, -1};
    switch (job->result) {
    case GROUPED_STORE:
        return OPAQ_OK;
    case GROUPED_ACTIVATE:
        TRY(cuda_activate(&run->groups, job->activation, c, &job->c, execution, error));
        return job->h.columns > 0 && run->groups.is_routed
                   ? scatter_rows(&run->groups, c, &job->h, execution, error)
                   : OPAQ_OK;
    case GROUPED_COMBINE:
        break;
    }
    if (job->dot_result != NULL) {
        const struct span_dot dot = {*c, job->dot, ROWS_BY_TOKEN, false, false};
        TRY(dot_span(&all, &dot, job->dot_result, execution, error));
    }
    return combine_rows(&run->groups, c, job->is_weighted, &job->sums, places, execution, error);
}

static enum opaq_status product_of_group(struct grouped_run *run, const struct grouped_product *job,
                                         int64_t index, const struct quant_matrix *c,
                                         struct opaq_error *error) {
    struct operand a;
    struct operand b;
    struct gemm_job product;
    run_group(run, index);
    TRY(rows_operand(run, &job->a, index, &a, error));
    TRY(weight_operand(&run->work, &job->w, index, &b, error));
    memset(&product, 0, sizeof product);
    product.a = a.gemm;
    product.b = b.gemm;
    product.c = *c;
    product.any_order = job->any_order;
    product.precision = job->precision;
    if (job->bias != NULL) {
        const struct opaq_view bias = stack_vector(job->bias, index);
        product.bias = bias.buffer[0].data;
        product.bias_dtype = (enum opaq_element)bias.proto.dtype;
    }
    return multiply(run, &product, PRODUCT_ROWS, error);
}

/* ---- products of all groups in one launch ---- */

/* Whether a matrix can be an operand as it is: rows of bf16 at multiples of 16 bytes. */
static bool has_aligned_rows(const struct quant_matrix *m) {
    return m->dtype == OPAQ_BF16 && m->column_step == 1 && m->row_step % 8 == 0 && (uintptr_t)m->data % 16 == 0;
}

/* The product of all groups at once, if its operands permit that. What it takes of the workspace, the groups' own products take
 * too. */
static enum opaq_status product_of_groups(struct grouped_run *run, const struct grouped_product *job,
                                          const struct quant_matrix *c, bool *is_done,
                                          struct opaq_error *error) {
    const struct row_groups *groups = &run->groups;
    const struct row_span all = {*groups, -1};
    struct operand b[2];
    struct gemm_job product;
    *is_done = false;
    if (!groups->is_split || groups->count < 2 || job->a.form.quantizes || job->a.view.proto.is_quantized ||
        !job->w.view.proto.is_quantized || job->w.form.along != OPAQ_ROWWISE || job->w.form.is_dequantized) {
        return OPAQ_OK;
    }
    memset(&product, 0, sizeof product);
    for (int i = 0; i < 2; ++i) {
        TRY(weight_operand(&run->work, &job->w, i, &b[i], error));
    }
    struct opaq_view taken;
    const int64_t columns = opaq_proto_columns(&job->a.view.proto);
    TRY(work_matrix(&run->work, groups->rows, columns, (enum opaq_element)job->a.view.proto.dtype, &taken,
                    error));
    const struct quant_matrix from = quant_matrix_make(&job->a.view);
    const bool is_in_place = job->a.order == ROWS_SORTED && !job->a.is_weighted && has_aligned_rows(&from);
    product.a.plain = is_in_place ? from : quant_matrix_make(&taken);
    product.a.plain.rows = groups->rows;
    product.b = b[0].gemm;
    product.c = *c;
    const void *next_bias = NULL;
    if (job->bias != NULL) {
        const struct opaq_view bias[2] = {stack_vector(job->bias, 0), stack_vector(job->bias, 1)};
        product.bias = bias[0].buffer[0].data;
        product.bias_dtype = (enum opaq_element)bias[0].proto.dtype;
        next_bias = bias[1].buffer[0].data;
    }
    if (!product_stream_groups_takes(&product, groups->count, run->work.execution)) {
        return OPAQ_OK;
    }
    *is_done = true;
    if (!is_in_place) {
        TRY(gather_span(&all, &from, job->a.order, job->a.is_weighted, &product.a.plain, run->work.execution,
                        error));
    }
    return product_stream_groups(&product, &b[1].gemm, next_bias, groups->first, groups->count,
                                 run->work.execution, error);
}

static int64_t weight_rows(const struct grouped_weights *weights) {
    const struct opaq_proto *proto = &weights->view.proto;
    return proto->shape[proto->rank - (weights->form.along == OPAQ_ROWWISE ? 2 : 1)];
}

static enum opaq_status run_product(struct grouped_run *run, const struct grouped_product *job,
                                    struct opaq_error *error) {
    struct quant_matrix c;
    int64_t *places = NULL;
    TRY(product_target(run, job, weight_rows(&job->w), &c, error));
    if (job->result == GROUPED_COMBINE && run->groups.is_routed) {
        places = (int64_t *)arena_take_array(&run->work.arena, run->groups.rows, sizeof *places);
    }
    const size_t mark = run->work.arena.used;
    bool is_done = false;
    if (!run->work.is_measuring) {
        TRY(product_of_groups(run, job, &c, &is_done, error));
    }
    for (int64_t e = 0;
         !is_done && e < (run->work.is_measuring ? min_int64(1, run->groups.count) : run->groups.count); ++e) {
        run->work.arena.used = mark;
        TRY(product_of_group(run, job, e, &c, error));
    }
    return run->work.is_measuring ? OPAQ_OK : finish_product(run, job, &c, places, error);
}

enum opaq_status cuda_grouped_product_workspace(const struct grouped_product *job, size_t *bytes,
                                                struct opaq_error *error) {
    const struct opaq_execution execution = {.device = job->a.view.proto.device};
    struct grouped_run run;
    run_begin(&run, job->groups, NULL, true, &execution);
    TRY(run_product(&run, job, error));
    *bytes = run.work.arena.most;
    return OPAQ_OK;
}

enum opaq_status cuda_grouped_product(const struct grouped_product *job, void *workspace,
                                      const struct opaq_execution *execution, struct opaq_error *error) {
    struct grouped_run run;
    run_begin(&run, job->groups, workspace, false, execution);
    return run_product(&run, job, error);
}

/* ---- gradients of weights ---- */

static enum opaq_status run_gradient(struct grouped_run *run, const struct grouped_gradient *job,
                                     struct opaq_error *error) {
    for (int64_t e = 0; e < (run->work.is_measuring ? min_int64(1, run->groups.count) : run->groups.count);
         ++e) {
        const struct opaq_view matrix = stack_matrix(&job->c, e);
        struct operand a;
        struct operand b;
        struct gemm_job product;
        run->work.arena.used = 0;
        run_group(run, e);
        TRY(rows_operand(run, &job->a, e, &a, error));
        TRY(rows_operand(run, &job->b, e, &b, error));
        memset(&product, 0, sizeof product);
        product.a = a.gemm;
        product.b = b.gemm;
        product.c = quant_matrix_make(&matrix);
        TRY(multiply(run, &product, PRODUCT_TERMS, error));
    }
    return OPAQ_OK;
}

enum opaq_status cuda_grouped_gradient_workspace(const struct grouped_gradient *job, size_t *bytes,
                                                 struct opaq_error *error) {
    const struct opaq_execution execution = {.device = job->a.view.proto.device};
    struct grouped_run run;
    run_begin(&run, job->groups, NULL, true, &execution);
    TRY(run_gradient(&run, job, error));
    *bytes = run.work.arena.most;
    return OPAQ_OK;
}

enum opaq_status cuda_grouped_gradient(const struct grouped_gradient *job, void *workspace,
                                       const struct opaq_execution *execution, struct opaq_error *error) {
    struct grouped_run run;
    run_begin(&run, job->groups, workspace, false, execution);
    return run_gradient(&run, job, error);
}

/* ---- dot products of rows ---- */

static enum opaq_status run_dot(struct grouped_run *run, const struct row_dot *job, struct opaq_error *error) {
    for (int64_t e = 0; e < (run->work.is_measuring ? min_int64(1, run->groups.count) : run->groups.count);
         ++e) {
        const struct row_span span = {run->groups, e};
        const struct opaq_view vector = stack_vector(&job->b, e);
        struct operand a;
        run->work.arena.used = 0;
        run_group(run, e);
        TRY(rows_operand(run, &job->a, e, &a, error));
        const struct span_dot dot = {a.gemm.plain, quant_matrix_make(job->is_b_per_group ? &vector : &job->b),
                                     ROWS_SORTED, job->is_b_per_group, job->adds};
        if (!run->work.is_measuring) {
            TRY(dot_span(&span, &dot, job->result, run->work.execution, error));
        }
    }
    return OPAQ_OK;
}

enum opaq_status cuda_row_dot_workspace(const struct row_dot *job, size_t *bytes, struct opaq_error *error) {
    const struct opaq_execution execution = {.device = job->a.view.proto.device};
    struct grouped_run run;
    run_begin(&run, job->groups, NULL, true, &execution);
    TRY(run_dot(&run, job, error));
    *bytes = run.work.arena.most;
    return OPAQ_OK;
}

enum opaq_status cuda_row_dot(const struct row_dot *job, void *workspace,
                              const struct opaq_execution *execution, struct opaq_error *error) {
    struct grouped_run run;
    run_begin(&run, job->groups, workspace, false, execution);
    return run_dot(&run, job, error);
}
