/* cuda/moe/activation.cu: the activation of an MLP and its gradient: one thread per element. */
#include "cuda/cuda_functions.h"
#include "definition/activation_formulas.h"
#include "definition/segment_ref.h"
#include "definition/sorted_rows.h"

struct activation_arguments {
    struct row_groups groups;
    struct opaq_experts_plan plan;
    struct quant_matrix h;
    struct quant_matrix a;  /* or da */
    struct quant_matrix dh; /* gradient only */
};

/* The columns of h or dh that hold the gate and the factor of column c of a. */
struct gate_columns {
    int64_t gate, factor;
};

static __device__ struct gate_columns columns_of(const struct activation_arguments *job, int64_t c) {
    return job->plan.activation == OPAQ_SWIGLU_OAI ? (struct gate_columns){2 * c, 2 * c + 1}
                                                   : (struct gate_columns){c, job->a.columns + c};
}

static __device__ void load_gate(const struct activation_arguments *job, int64_t row,
                                 const struct gate_columns *at, bool is_gated, float *g, float *u) {
    *g = matrix_at(&job->h, row * job->h.row_step + at->gate);
    *u = is_gated ? matrix_at(&job->h, row * job->h.row_step + at->factor) : 0.0f;
}

static __global__ void activate_kernel(struct activation_arguments job) {
    const bool is_gated = activation_is_gated((enum opaq_activation)job.plan.activation);
    const int64_t columns = job.a.columns;
    const int64_t count = groups_total(&job.groups) * columns;
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        const struct gate_columns at = columns_of(&job, i % columns);
        const int64_t row = i / columns;
        float g;
        float u;
        load_gate(&job, row, &at, is_gated, &g, &u);
        activate_segment(&job.plan, job.h.dtype, &g, &u, 1,
                         (char *)job.a.data + plain_bytes(job.a.dtype, row * job.a.row_step + i % columns));
    }
}

static __global__ void activate_backward_kernel(struct activation_arguments job) {
    const bool is_gated = activation_is_gated((enum opaq_activation)job.plan.activation);
    const int64_t columns = job.a.columns;
    const int64_t count = groups_total(&job.groups) * columns;
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        const struct gate_columns at = columns_of(&job, i % columns);
        const int64_t row = i / columns;
        float g;
        float u;
        load_gate(&job, row, &at, is_gated, &g, &u);
        activation_gradient(&job.plan, matrix_at(&job.a, row * job.a.row_step + i % columns), &g, &u);
        segment_store(&job.dh, row, at.gate, 1, &g);
        if (is_gated) {
            segment_store(&job.dh, row, at.factor, 1, &u);
        }
    }
}

enum opaq_status cuda_activate(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                               const struct quant_matrix *h, const struct quant_matrix *a,
                               const struct opaq_execution *execution, struct opaq_error *error) {
    const struct activation_arguments job = {*groups, *plan, *h, *a, *h};
    const int64_t count = groups->rows * a->columns;
    return count == 0 ? OPAQ_OK
                      : launch("activate", activate_kernel, blocks_for(count, THREADS), THREADS, job, execution,
                               error);
}

enum opaq_status cuda_activate_backward(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                                        const struct quant_matrix *h, const struct quant_matrix *da,
                                        const struct quant_matrix *dh, const struct opaq_execution *execution,
                                        struct opaq_error *error) {
    const struct activation_arguments job = {*groups, *plan, *h, *da, *dh};
    const int64_t count = groups->rows * da->columns;
    return count == 0 ? OPAQ_OK
                      : launch("activate_backward", activate_backward_kernel, blocks_for(count, THREADS),
                               THREADS, job, execution, error);
}
