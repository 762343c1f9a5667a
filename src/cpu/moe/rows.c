/* cpu/moe/rows.c: copies rows between token or slot order and the sorted order of groups. */
#include "cpu/moe/rows.h"

#include <string.h>

#include "base/checked.h"
#include "base/parallel_run.h"
#include "cpu/cpu_functions.h"
#include "cpu/gemm/plain_convert.h"

enum { PART = 256 }; /* columns converted at a time */

struct row_task {
    const struct row_range *range;
    const struct quant_matrix *from;
    const struct quant_matrix *to;
    enum row_order order;
    bool is_weighted;
    const struct rows_dot *dot;
    float *result;
};

static float weight_of(const struct row_range *range, bool is_weighted, int64_t i) {
    const struct row_groups *groups = range->groups;
    return is_weighted ? groups->weight[slot_of(groups, range->first + i)] : 1.0f;
}

static void move_row(const struct quant_matrix *from, int64_t from_row, const struct quant_matrix *to,
                     int64_t to_row, float weight) {
    float values[PART];
    if (from->dtype == to->dtype && weight == 1.0f && to->columns > 0) {
        const char *const start =
            (const char *)from->data + plain_bytes(from->dtype, from_row * from->row_step);
        memcpy((char *)to->data + plain_bytes(to->dtype, to_row * to->row_step), start,
               (size_t)plain_bytes(to->dtype, to->columns));
        return;
    }
    for (int64_t c = 0; c < to->columns; c += PART) {
        const int n = (int)min_int64(PART, to->columns - c);
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
        const int64_t row = row_in_order(task->range->groups, task->range->first + i, task->order);
        move_row(task->from, row, task->to, i, weight_of(task->range, task->is_weighted, i));
    }
}

void rows_gather(const struct row_range *range, const struct quant_matrix *from, enum row_order order,
                 bool is_weighted, const struct quant_matrix *to, const struct opaq_parallel *parallel) {
    struct row_task task = {.range = range, .from = from, .to = to, .order = order, .is_weighted = is_weighted};
    const struct opaq_body body = {gather_rows, &task};
    parallel_run(parallel_if_worth(parallel, range->count * to->columns), range->count, &body);
}

static void scatter_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    for (int64_t i = begin; i < end; ++i) {
        move_row(task->from, i, task->to, slot_of(task->range->groups, task->range->first + i), 1.0f);
    }
}

void rows_scatter(const struct row_range *range, const struct quant_matrix *from, const struct quant_matrix *to,
                  const struct opaq_parallel *parallel) {
    struct row_task task = {.range = range, .from = from, .to = to};
    const struct opaq_body body = {scatter_rows, &task};
    parallel_run(parallel_if_worth(parallel, range->count * from->columns), range->count, &body);
}

/* n elements from element `start` on as floats: in place if they are floats, else converted into `values`. */
static const float *floats_at(const struct quant_matrix *matrix, int64_t start, int n, float *values) {
    if (matrix->dtype == OPAQ_F32) {
        return (const float *)matrix->data + start;
    }
    plain_load(matrix->data, matrix->dtype, start, 1, n, values);
    return values;
}

/* Unit: PART columns. Tasks are split by columns, not rows, because several rows may belong to one token. */
static void add_columns(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    const struct row_range *range = task->range;
    const int64_t columns = task->from->columns;
    float memory[PART];
    for (int64_t i = 0; i < range->count; ++i) {
        const float weight = weight_of(range, task->is_weighted, i);
        const int64_t token = row_in_order(range->groups, range->first + i, ROWS_BY_TOKEN);
        for (int64_t c = begin * PART; c < min_int64(end * PART, columns); c += PART) {
            const int n = (int)min_int64(PART, columns - c);
            const float *const values = floats_at(task->from, i * task->from->row_step + c, n, memory);
            float *const sum = (float *)task->to->data + token * columns + c;
            for (int k = 0; k < n; ++k) {
                sum[k] += weight * values[k];
            }
        }
    }
}

void rows_add(const struct row_range *range, const struct quant_matrix *from, bool is_weighted,
              const struct quant_matrix *sums, const struct opaq_parallel *parallel) {
    struct row_task task = {.range = range, .from = from, .to = sums, .is_weighted = is_weighted};
    const struct opaq_body body = {add_columns, &task};
    parallel_run(parallel_if_worth(parallel, range->count * from->columns), ceil_div(from->columns, PART),
                 &body);
}

static void dot_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    const struct row_range *range = task->range;
    const struct quant_matrix *a = task->dot->a;
    const struct quant_matrix *b = task->dot->b;
    float left[PART];
    float right[PART];
    for (int64_t i = begin; i < end; ++i) {
        const enum row_order order = task->dot->b_order;
        const int64_t b_row = order == ROWS_SORTED ? i : row_in_order(range->groups, range->first + i, order);
        float *const result = &task->result[slot_of(range->groups, range->first + i)];
        float total = task->dot->adds ? *result : 0.0f;
        for (int64_t c = 0; c < a->columns; c += PART) {
            const int n = (int)min_int64(PART, a->columns - c);
            float sum = 0.0f;
            plain_load(a->data, a->dtype, i * a->row_step + c, 1, n, left);
            plain_load(b->data, b->dtype, b_row * b->row_step + c, 1, n, right);
            for (int k = 0; k < n; ++k) {
                sum += left[k] * right[k];
            }
            total += sum;
        }
        *result = total;
    }
}

void rows_dot(const struct row_range *range, const struct rows_dot *dot, float *result,
              const struct opaq_parallel *parallel) {
    struct row_task task = {.range = range, .dot = dot, .result = result};
    const struct opaq_body body = {dot_rows, &task};
    parallel_run(parallel_if_worth(parallel, range->count * dot->a->columns), range->count, &body);
}

/* ---- entries of the back end's table ---- */

enum opaq_status cpu_gather_rows(const struct row_groups *groups, const struct quant_matrix *from,
                                 enum row_order order, bool is_weighted, const struct quant_matrix *to,
                                 const struct opaq_execution *execution, struct opaq_error *error) {
    const struct row_range all = {groups, 0, groups_total(groups)};
    (void)error;
    rows_gather(&all, from, order, is_weighted, to, execution->parallel);
    return OPAQ_OK;
}

static void weigh_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    for (int64_t i = begin; i < end; ++i) {
        const float weight = weight_of(task->range, true, i);
        float *const row = (float *)task->to->data + i * task->to->row_step;
        for (int64_t c = 0; c < task->to->columns; ++c) {
            row[c] *= weight;
        }
    }
}

enum opaq_status cpu_weigh_rows(const struct row_groups *groups, const struct quant_matrix *rows,
                                const struct opaq_execution *execution, struct opaq_error *error) {
    const struct row_range all = {groups, 0, groups_total(groups)};
    struct row_task task = {.range = &all, .to = rows};
    const struct opaq_body body = {weigh_rows, &task};
    (void)error;
    parallel_run(parallel_if_worth(execution->parallel, all.count * rows->columns), all.count, &body);
    return OPAQ_OK;
}

static void convert_rows(void *argument, int64_t begin, int64_t end) {
    const struct row_task *task = argument;
    for (int64_t row = begin; row < end; ++row) {
        move_row(task->from, row, task->to, row, 1.0f);
    }
}

enum opaq_status cpu_convert_rows(const struct quant_matrix *from, const struct quant_matrix *to,
                                  const struct opaq_execution *execution, struct opaq_error *error) {
    struct row_task task = {.from = from, .to = to};
    const struct opaq_body body = {convert_rows, &task};
    (void)error;
    parallel_run(parallel_if_worth(execution->parallel, to->rows * to->columns), to->rows, &body);
    return OPAQ_OK;
}
