/* cuda/moe/rows.cu: moving rows between the order of tokens or slots and the sorted order of groups; dot products of
 * rows. */
#include "cuda/moe/row_kernels.h"
#include "definition/segment_ref.h"
#include "definition/sorted_rows.h"

enum { PART = 256 }; /* terms of a dot product that are summed separately */

static __device__ int64_t span_first(const struct row_span *span) {
    return span->group < 0 ? 0 : group_begin(&span->groups, span->group);
}

static __device__ int64_t span_rows(const struct row_span *span) {
    return span->group < 0 ? groups_total(&span->groups) : group_rows(&span->groups, span->group);
}

/* One element; bit for bit where nothing changes it. */
static __device__ void move_element(const struct quant_matrix *from, int64_t from_row,
                                    const struct quant_matrix *to, int64_t to_row, int64_t c, float weight) {
    const int64_t source = from_row * from->row_step + c;
    const int64_t target = to_row * to->row_step + c;
    if (from->dtype != to->dtype || weight != 1.0f) {
        const float value = matrix_at(from, source) * weight;
        segment_store(to, to_row, c, 1, &value);
    } else if (to->dtype == OPAQ_F32) {
        ((uint32_t *)to->data)[target] = ((const uint32_t *)from->data)[source];
    } else {
        ((uint16_t *)to->data)[target] = ((const uint16_t *)from->data)[source];
    }
}

struct move_arguments {
    struct row_span span;
    struct quant_matrix from, to;
    enum row_order order;
    bool is_weighted;
};

static __global__ void gather_kernel(struct move_arguments job) {
    const struct row_groups *groups = &job.span.groups;
    const int64_t first = span_first(&job.span);
    const int64_t rows = span_rows(&job.span);
    const int64_t columns = job.to.columns;
    for (int64_t i = thread_index(); i < rows * columns; i += thread_count()) {
        const int64_t sorted = first + i / columns;
        const float weight = job.is_weighted ? groups->weight[slot_of(groups, sorted)] : 1.0f;
        move_element(&job.from, row_in_order(groups, sorted, job.order), &job.to, i / columns, i % columns,
                     weight);
    }
}

enum opaq_status gather_span(const struct row_span *span, const struct quant_matrix *from, enum row_order order,
                             bool is_weighted, const struct quant_matrix *to,
                             const struct opaq_execution *execution, struct opaq_error *error) {
    const struct move_arguments job = {*span, *from, *to, order, is_weighted};
    const int64_t count = span->groups.rows * to->columns;
    return count == 0 ? OPAQ_OK
                      : launch("gather_rows", gather_kernel, blocks_for(count, THREADS), THREADS, job,
                               execution, error);
}

enum opaq_status cuda_gather_rows(const struct row_groups *groups, const struct quant_matrix *from,
                                  enum row_order order, bool is_weighted, const struct quant_matrix *to,
                                  const struct opaq_execution *execution, struct opaq_error *error) {
    const struct row_span all = {*groups, -1};
    return gather_span(&all, from, order, is_weighted, to, execution, error);
}

static __global__ void scatter_kernel(struct move_arguments job) {
    const int64_t columns = job.from.columns;
    const int64_t count = groups_total(&job.span.groups) * columns;
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        move_element(&job.from, i / columns, &job.to, slot_of(&job.span.groups, i / columns), i % columns,
                     1.0f);
    }
}

enum opaq_status scatter_rows(const struct row_groups *groups, const struct quant_matrix *from,
                              const struct quant_matrix *to, const struct opaq_execution *execution,
                              struct opaq_error *error) {
    const struct move_arguments job = {{*groups, -1}, *from, *to, ROWS_BY_SLOT, false};
    const int64_t count = groups->rows * from->columns;
    return count == 0 ? OPAQ_OK
                      : launch("scatter_rows", scatter_kernel, blocks_for(count, THREADS), THREADS, job,
                               execution, error);
}

static __global__ void weigh_kernel(struct move_arguments job) {
    const struct row_groups *groups = &job.span.groups;
    const int64_t columns = job.to.columns;
    const int64_t count = groups_total(groups) * columns;
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        const int64_t row = i / columns;
        ((float *)job.to.data)[row * job.to.row_step + i % columns] *= groups->weight[slot_of(groups, row)];
    }
}

enum opaq_status cuda_weigh_rows(const struct row_groups *groups, const struct quant_matrix *rows,
                                 const struct opaq_execution *execution, struct opaq_error *error) {
    const struct move_arguments job = {{*groups, -1}, *rows, *rows, ROWS_SORTED, true};
    const int64_t count = groups->rows * rows->columns;
    return count == 0
               ? OPAQ_OK
               : launch("weigh_rows", weigh_kernel, blocks_for(count, THREADS), THREADS, job, execution, error);
}

static __global__ void convert_kernel(struct move_arguments job) {
    const int64_t columns = job.to.columns;
    for (int64_t i = thread_index(); i < job.to.rows * columns; i += thread_count()) {
        move_element(&job.from, i / columns, &job.to, i / columns, i % columns, 1.0f);
    }
}

enum opaq_status cuda_convert_rows(const struct quant_matrix *from, const struct quant_matrix *to,
                                   const struct opaq_execution *execution, struct opaq_error *error) {
    struct move_arguments job;
    memset(&job, 0, sizeof job);
    job.from = *from;
    job.to = *to;
    return to->rows * to->columns == 0
               ? OPAQ_OK
               : launch("convert_rows", convert_kernel, blocks_for(to->rows * to->columns, THREADS), THREADS,
                        job, execution, error);
}

/* ---- sums of tokens ---- */

struct combine_arguments {
    struct row_groups groups;
    struct quant_matrix from, sums;
    bool is_weighted;
    int64_t *places; /* for each slot: its sorted row, or -1 */
};

static __global__ void find_places_kernel(struct combine_arguments job) {
    const int64_t total = groups_total(&job.groups);
    for (int64_t i = thread_index(); i < total; i += thread_count()) {
        job.places[slot_of(&job.groups, i)] = i;
    }
}

/* The next sorted row of a token after `last`; -1 if there is none. */
static __device__ int64_t next_row(const struct combine_arguments *job, int64_t token, int64_t last) {
    int64_t next = -1;
    for (int64_t j = 0; j < job->groups.choices; ++j) {
        const int64_t place = job->places == NULL ? token * job->groups.choices + j
                                                  : job->places[token * job->groups.choices + j];
        next = place > last && (next < 0 || place < next) ? place : next;
    }
    return next;
}

/* One thread per element of the sums. */
static __global__ void combine_kernel(struct combine_arguments job) {
    const struct row_groups *groups = &job.groups;
    const int64_t columns = job.sums.columns;
    const int64_t total = groups_total(groups);
    const int64_t count = groups->rows / groups->choices * columns;
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        const int64_t token = i / columns;
        const int64_t c = i % columns;
        float sum = ((float *)job.sums.data)[i];
        for (int64_t row = next_row(&job, token, -1); row >= 0 && row < total;
             row = next_row(&job, token, row)) {
            const float weight = job.is_weighted ? groups->weight[slot_of(groups, row)] : 1.0f;
            sum += weight * ((const float *)job.from.data)[row * job.from.row_step + c];
        }
        ((float *)job.sums.data)[i] = sum;
    }
}

enum opaq_status combine_rows(const struct row_groups *groups, const struct quant_matrix *from,
                              bool is_weighted, const struct quant_matrix *sums, int64_t *places,
                              const struct opaq_execution *execution, struct opaq_error *error) {
    const struct combine_arguments job = {*groups, *from, *sums, is_weighted, places};
    if (groups->rows * sums->columns == 0) {
        return OPAQ_OK;
    }
    if (places != NULL) {
        TRY(queue_set(places, 0xFF, (size_t)groups->rows * sizeof *places, execution, error));
        TRY(launch("find_places", find_places_kernel, blocks_for(groups->rows, THREADS), THREADS, job,
                   execution, error));
    }
    return launch("combine_rows", combine_kernel,
                  blocks_for(groups->rows / groups->choices * sums->columns, THREADS), THREADS, job, execution,
                  error);
}

/* ---- dot products ---- */

struct dot_arguments {
    struct row_span span;
    struct span_dot dot;
    float *result;
};

static __device__ float part_sum(const struct span_dot *dot, int64_t a_row, int64_t b_row, int64_t c) {
    float sum = 0.0f;
    for (int64_t k = c; k < min_int64(c + PART, dot->a.columns); ++k) {
        sum +=
            matrix_at(&dot->a, a_row * dot->a.row_step + k) * matrix_at(&dot->b, b_row * dot->b.row_step + k);
    }
    return sum;
}

/* One warp per row: each lane sums a part, and the parts are added in order. */
static __global__ void dot_kernel(struct dot_arguments job) {
    const struct row_groups *groups = &job.span.groups;
    const int64_t first = span_first(&job.span);
    const int64_t rows = span_rows(&job.span);
    const int64_t columns = job.dot.a.columns;
    const int lane = (int)threadIdx.x % WARP;
    for (int64_t i = thread_index() / WARP; i < rows; i += thread_count() / WARP) {
        const int64_t sorted = first + i;
        const int64_t b_row = job.dot.is_b_one_row ? 0 : row_in_order(groups, sorted, job.dot.b_order);
        float *const result = &job.result[slot_of(groups, sorted)];
        float total = job.dot.adds ? *result : 0.0f;
        for (int64_t c = 0; c < columns; c += WARP * PART) {
            const int64_t mine = c + (int64_t)lane * PART;
            const float sum = mine < columns ? part_sum(&job.dot, i, b_row, mine) : 0.0f;
            for (int part = 0; part < WARP; ++part) {
                const float other = __shfl_sync(0xFFFFFFFFu, sum, part);
                total = c + (int64_t)part * PART < columns ? total + other : total;
            }
        }
        if (lane == 0) {
            *result = total;
        }
    }
}

enum opaq_status dot_span(const struct row_span *span, const struct span_dot *dot, float *result,
                          const struct opaq_execution *execution, struct opaq_error *error) {
    const struct dot_arguments job = {*span, *dot, result};
    return span->groups.rows == 0
               ? OPAQ_OK
               : launch("dot_rows", dot_kernel, blocks_for(span->groups.rows, THREADS / WARP), THREADS, job,
                        execution, error);
}
