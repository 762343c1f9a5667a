/* cpu/moe/grouped_tiles.c: grouped products with tiled weights, all groups in one run over their tiles.
 *
 * Sorted rows are processed in batches of at most BATCH_ROWS. A batch has the rows of several groups, or some
 * of the rows of one large group; each group in it is a member. The thread that computes a member's columns
 * also applies bias and activation, or bias and rounding, to them. */
#include "cpu/moe/grouped_tiles.h"

#include <assert.h>
#include <string.h>

#include "backend/backend.h"
#include "base/checked.h"
#include "base/try.h"
#include "cpu/gemm/packed_batch.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/moe/activation.h"
#include "cpu/moe/rows.h"

enum { BATCH_ROWS = 1024 };

struct batch {
    const struct grouped_product *job;
    struct row_range range;
    int64_t count;   /* members */
    int64_t *group;  /* of each member */
    int64_t *source; /* the row of x for each sorted row; NULL: consecutive rows */
    struct operand *weights;
    struct packed_member *members;
    struct opaq_view x;       /* all rows, or those of this batch */
    struct opaq_view product; /* float32 */
};

static bool is_gated(const struct grouped_product *job) {
    return opaq_activation_is_gated((enum opaq_activation)job->activation->activation) != 0;
}

static bool is_interleaved(const struct grouped_product *job) {
    return job->activation->activation == OPAQ_SWIGLU_OAI;
}

static int64_t weight_rows(const struct grouped_product *job) {
    const struct opaq_proto *proto = &job->w.view.proto;
    return proto->shape[proto->rank - 2];
}

/* The number of columns from a gate to its factor if these are halves of a row; else 0. */
static int64_t partner_of(const struct grouped_product *job) {
    const bool has_halves = job->result == GROUPED_ACTIVATE && is_gated(job) && !is_interleaved(job);
    return has_halves ? job->c.columns : 0;
}

/* ---- applicability ---- */

/* The stack as one operand; false if the kernels for tiled weights cannot read it. */
static bool stack_of(const struct grouped_product *job, struct operand *stack) {
    const struct opaq_proto *proto = &job->w.view.proto;
    const struct operand_form form = {.along = OPAQ_ROWWISE};
    struct work nothing = {.is_measuring = true};
    return proto->is_quantized && (proto->spec.usage & OPAQ_ROWWISE) != 0 &&
           job->w.form.along == OPAQ_ROWWISE && !job->w.form.is_dequantized &&
           operand_make(&nothing, &job->w.view, &form, stack, NULL) == OPAQ_OK;
}

static bool fits(const struct grouped_product *job, const struct operand *stack) {
    const int64_t limit = (int64_t)1 << 32; /* limit of sizes, so that memory computations cannot overflow */
    const int64_t partner = partner_of(job);
    struct gemm_operand weight = stack->gemm;
    weight.plain.rows = weight_rows(job);
    return !job->a.form.quantizes && job->groups->count > 0 &&
           opaq_proto_columns(&job->a.view.proto) <= limit && weight.plain.rows <= limit &&
           job->groups->rows <= limit && !(job->result == GROUPED_ACTIVATE && job->h.columns > 0) &&
           job->dot_result == NULL && (partner == 0 || packed_batch_can_pair(&weight, partner));
}

static struct gemm_job probe_of(const struct grouped_product *job, const struct operand *stack) {
    return (struct gemm_job){.a = {.plain = {.dtype = (enum opaq_element)job->a.view.proto.dtype}},
                             .b = stack->gemm};
}

bool grouped_tiles_can_run(const struct grouped_product *job) {
    struct operand stack;
    if (!stack_of(job, &stack) || !fits(job, &stack)) {
        return false;
    }
    const struct gemm_job probe = probe_of(job, &stack);
    return packed_can_run(&probe, (enum packed_precision)job->precision);
}

bool grouped_tiles_could_run(const struct grouped_product *job) {
    struct operand stack;
    if (!stack_of(job, &stack) || !fits(job, &stack)) {
        return false;
    }
    const struct gemm_job probe = probe_of(job, &stack);
    return packed_could_run(&probe, (enum packed_precision)job->precision);
}

/* ---- batches ---- */

static void choose_members(struct batch *batch) {
    const struct row_groups *groups = batch->range.groups;
    int64_t group = 0;
    batch->count = 0;
    for (int64_t row = 0; row < batch->range.count;) {
        while (group_begin(groups, group) + group_rows(groups, group) <= batch->range.first + row) {
            ++group;
        }
        const int64_t group_end = group_begin(groups, group) + group_rows(groups, group) - batch->range.first;
        const int64_t end = min_int64(batch->range.count, group_end);
        batch->group[batch->count] = group;
        batch->members[batch->count++] = (struct packed_member){.first = row, .rows = end - row};
        row = end;
    }
}

static void choose_weights(struct batch *batch, const struct operand *stack) {
    for (int64_t i = 0; i < batch->count; ++i) {
        const bool can_take =
            stack_operand(stack, weight_rows(batch->job), batch->group[i], &batch->weights[i]);
        assert(can_take); /* checked by the operator */
        (void)can_take;
        batch->members[i].b = batch->weights[i].gemm;
    }
}

/* Rows with router weights are gathered, because these change them; others are read in place. */
static enum opaq_status choose_x(struct work *work, struct batch *batch, struct opaq_error *error) {
    const struct grouped_rows *a = &batch->job->a;
    batch->x = a->view;
    if (a->is_weighted) {
        TRY(work_matrix(work, batch->range.count, opaq_proto_columns(&a->view.proto),
                        (enum opaq_element)a->view.proto.dtype, &batch->x, error));
    }
    if (work->is_measuring) {
        return OPAQ_OK;
    }
    if (a->is_weighted) {
        const struct quant_matrix from = quant_matrix_make(&a->view);
        const struct quant_matrix to = quant_matrix_make(&batch->x);
        rows_gather(&batch->range, &from, a->order, true, &to, work->execution->parallel);
    }
    for (int64_t i = 0; batch->source != NULL && i < batch->range.count; ++i) {
        batch->source[i] = row_in_order(batch->range.groups, batch->range.first + i, a->order);
    }
    return OPAQ_OK;
}

/* ---- finishing columns ---- */

static const struct opaq_view *bias_of(const struct batch *batch, const struct packed_member *member,
                                       struct opaq_view *bias) {
    if (batch->job->bias == NULL) {
        return NULL;
    }
    *bias = stack_vector(batch->job->bias, batch->group[member - batch->members]);
    return bias;
}

/* Copies n results of a row, `step` apart, and adds their bias. */
static void biased_results(const float *results, const struct opaq_view *bias, int64_t column, int64_t step,
                           int n, float *to) {
    float added[ACTIVATION_SEGMENT];
    for (int i = 0; i < n; ++i) {
        to[i] = results[column + i * step];
    }
    if (bias != NULL) {
        plain_load(bias->buffer[0].data, (enum opaq_element)bias->proto.dtype, column, step, n, added);
        for (int i = 0; i < n; ++i) {
            to[i] += added[i];
        }
    }
}

/* Activates columns [begin, end) with their partner columns. */
static void activate(void *argument, const struct packed_member *member, int64_t begin, int64_t end) {
    const struct batch *batch = argument;
    const struct grouped_product *job = batch->job;
    const int64_t step = is_interleaved(job) ? 2 : 1;
    const int64_t to_factor = is_interleaved(job) ? 1 : job->c.columns;
    float g[ACTIVATION_SEGMENT];
    float u[ACTIVATION_SEGMENT];
    struct opaq_view row_bias;
    const struct opaq_view *bias = bias_of(batch, member, &row_bias);
    for (int64_t row = member->first; row < member->first + member->rows; ++row) {
        const float *const h = (const float *)batch->product.buffer[0].data + row * batch->product.row_stride;
        const int64_t target = (batch->range.first + row) * job->c.row_step;
        for (int64_t column = begin; column < end; column += ACTIVATION_SEGMENT * step) {
            const int n = (int)min_int64(ACTIVATION_SEGMENT, (end - column) / step);
            biased_results(h, bias, column, step, n, g);
            if (is_gated(job)) {
                biased_results(h, bias, column + to_factor, step, n, u);
            }
            activation_segment(job->activation, job->c.dtype, g, u, n,
                               (char *)job->c.data + plain_bytes(job->c.dtype, target + column / step));
        }
    }
}

/* Adds the bias to columns [begin, end) and, if they are stored, rounds them into place. */
static void conclude(void *argument, const struct packed_member *member, int64_t begin, int64_t end) {
    const struct batch *batch = argument;
    const struct grouped_product *job = batch->job;
    struct opaq_view row_bias;
    const struct opaq_view *bias = bias_of(batch, member, &row_bias);
    for (int64_t row = member->first; row < member->first + member->rows; ++row) {
        float *const y = (float *)batch->product.buffer[0].data + row * batch->product.row_stride;
        const int64_t target = (batch->range.first + row) * job->c.row_step;
        float added[ACTIVATION_SEGMENT];
        for (int64_t column = begin; column < end; column += ACTIVATION_SEGMENT) {
            const int n = (int)min_int64(ACTIVATION_SEGMENT, end - column);
            if (bias != NULL) {
                plain_load(bias->buffer[0].data, (enum opaq_element)bias->proto.dtype, column, 1, n, added);
                for (int i = 0; i < n; ++i) {
                    y[column + i] += added[i];
                }
            }
            if (job->result == GROUPED_STORE) {
                plain_store(job->c.data, job->c.dtype, target + column, 1, n, y + column);
            }
        }
    }
}

/* ---- running ---- */

static enum opaq_status run_batch(struct work *work, struct batch *batch, struct opaq_error *error) {
    const struct grouped_product *job = batch->job;
    const bool is_whole = batch->source == NULL && !job->a.is_weighted;
    TRY(choose_x(work, batch, error));
    TRY(work_matrix(work, batch->range.count, weight_rows(job), OPAQ_F32, &batch->product, error));
    const struct packed_batch run = {.a = {.plain = quant_matrix_make(&batch->x)},
                                     .first = is_whole ? batch->range.first : 0,
                                     .rows = batch->range.count,
                                     .source = batch->source,
                                     .members = batch->members,
                                     .count = batch->count,
                                     .wanted = (enum packed_precision)job->precision,
                                     .y = batch->product.buffer[0].data,
                                     .y_step = batch->product.row_stride,
                                     .partner = partner_of(job),
                                     .finish = job->result == GROUPED_ACTIVATE                     ? activate
                                               : job->result == GROUPED_STORE || job->bias != NULL ? conclude
                                                                                                   : NULL,
                                     .argument = batch};
    void *const memory = arena_take(&work->arena, packed_batch_bytes(&run));
    if (work->is_measuring) {
        return OPAQ_OK;
    }
    packed_batch_run(&run, memory, work->execution->parallel);
    if (job->result == GROUPED_COMBINE) {
        const struct quant_matrix results = quant_matrix_make(&batch->product);
        rows_add(&batch->range, &results, job->is_weighted, &job->sums, work->execution->parallel);
    }
    return OPAQ_OK;
}

/* Allocates a batch's arrays in the arena; for the CPU this is host memory. */
static void take_arrays(struct work *work, const struct grouped_product *job, int64_t rows,
                        struct batch *batch) {
    const int64_t members = min_int64(rows, job->groups->count);
    const bool has_source = job->a.order != ROWS_SORTED && !job->a.is_weighted;
    batch->source = arena_take_array(&work->arena, has_source ? rows : 0, sizeof *batch->source);
    batch->source = has_source ? batch->source : NULL;
    batch->group = arena_take_array(&work->arena, members, sizeof *batch->group);
    batch->weights = arena_take_array(&work->arena, members, sizeof *batch->weights);
    batch->members = arena_take_array(&work->arena, members, sizeof *batch->members);
}

enum opaq_status grouped_tiles_workspace(const struct grouped_product *job, size_t *bytes,
                                         struct opaq_error *error) {
    const struct opaq_execution execution = {.device = job->a.view.proto.device};
    struct work work = {.backend = &cpu_backend, .execution = &execution, .is_measuring = true};
    const int64_t rows = min_int64(job->groups->rows, BATCH_ROWS);
    struct packed_member member;
    struct operand stack;
    struct operand weight;
    struct batch batch = {.job = job, .range = {job->groups, 0, rows}};
    (void)stack_of(job, &stack);
    const bool can_take = stack_operand(&stack, weight_rows(job), 0, &weight);
    assert(can_take);
    (void)can_take;
    take_arrays(&work, job, rows, &batch);
    member =
        (struct packed_member){.b = weight.gemm, .rows = rows}; /* while measuring, one member represents all */
    batch.members = &member;
    batch.count = min_int64(rows, job->groups->count);
    TRY(run_batch(&work, &batch, error));
    *bytes = work.arena.most;
    return OPAQ_OK;
}

enum opaq_status grouped_tiles_run(struct work *work, const struct grouped_product *job,
                                   struct opaq_error *error) {
    const int64_t all = groups_total(job->groups);
    struct batch batch = {.job = job, .range = {job->groups, 0, 0}};
    struct operand stack;
    (void)stack_of(job, &stack);
    take_arrays(work, job, min_int64(job->groups->rows, BATCH_ROWS), &batch);
    const size_t mark = work->arena.used;
    for (; batch.range.first < all; batch.range.first += batch.range.count) {
        work->arena.used = mark;
        batch.range.count = min_int64(BATCH_ROWS, all - batch.range.first);
        choose_members(&batch);
        choose_weights(&batch, &stack);
        TRY(run_batch(work, &batch, error));
    }
    return OPAQ_OK;
}
