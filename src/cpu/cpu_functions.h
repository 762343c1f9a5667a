/* cpu/cpu_functions.h: the functions of the CPU's table, by the files that define them. They are documented in
 * backend/backend.h. Depends on backend.h. */
#ifndef OPAQ_CPU_CPU_FUNCTIONS_H
#define OPAQ_CPU_CPU_FUNCTIONS_H

#include "backend/backend.h"

/* cpu_memory.c */
enum opaq_status cpu_allocate(struct opaq_device device, size_t bytes, void **memory, struct opaq_error *error);
void cpu_release(struct opaq_device device, void *memory);
enum opaq_status cpu_zero(void *memory, size_t bytes, const struct opaq_execution *execution,
                          struct opaq_error *error);
enum opaq_status cpu_copy(const struct opaq_tensor *from, void *to, const struct opaq_execution *execution,
                          struct opaq_error *error);
enum opaq_status cpu_fill(const float *value, int64_t count, float *to, const struct opaq_execution *execution,
                          struct opaq_error *error);

/* quant/quantize_run.c, amax_run.c, remap_run.c, noise.c, delayed_scaling.c */
enum opaq_status cpu_quantize(const struct quant_job *job, const struct quantize_figures *figures,
                              const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_dequantize(const struct quant_job *job, const struct opaq_execution *execution,
                                struct opaq_error *error);
enum opaq_status cpu_amax(const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored,
                          int64_t step, float *amax, const struct opaq_execution *execution,
                          struct opaq_error *error);
enum opaq_status cpu_remap(const struct remap_job *job, const struct opaq_execution *execution,
                           struct opaq_error *error);
enum opaq_status cpu_compare_figures(const struct quant_job *a, const struct quant_job *b, bool *are_equal,
                                     const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_noise(const struct quant_job *job, struct opaq_noise *noise,
                           const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_delayed_update(const struct opaq_delayed_state *state, const float *recorded,
                                    const float *reduced, const struct delayed_rule *rule,
                                    const struct opaq_execution *execution, struct opaq_error *error);

/* quant/amax_run.c, for quantize_run.c: the amax of a checked tensor, on all threads. Fills the one float (step 0) or
 * the floats per operand row (step 1) at `amax`. */
void amax_compute(const struct quant_copy *copy, const struct opaq_spec *spec,
                  const struct opaq_parallel *parallel, float *amax, int64_t step);

/* gemm/product_run.c, column_sum.c */
size_t cpu_product_workspace(const struct gemm_job *job);
enum opaq_status cpu_product(const struct gemm_job *job, void *workspace,
                             const struct opaq_execution *execution, struct opaq_error *error);
const char *cpu_product_kernel(const struct opaq_spec *w, const struct opaq_spec *x, enum opaq_element x_dtype,
                               int32_t precision);
enum opaq_status cpu_column_sum(const struct row_groups *groups, const struct quant_matrix *rows,
                                const struct opaq_view *sums, const struct opaq_execution *execution,
                                struct opaq_error *error);

/* moe/grouped_product.c */
enum opaq_status cpu_grouped_product_workspace(const struct grouped_product *job, size_t *bytes,
                                               struct opaq_error *error);
enum opaq_status cpu_grouped_product(const struct grouped_product *job, void *workspace,
                                     const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_grouped_gradient_workspace(const struct grouped_gradient *job, size_t *bytes,
                                                struct opaq_error *error);
enum opaq_status cpu_grouped_gradient(const struct grouped_gradient *job, void *workspace,
                                      const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_row_dot_workspace(const struct row_dot *job, size_t *bytes, struct opaq_error *error);
enum opaq_status cpu_row_dot(const struct row_dot *job, void *workspace, const struct opaq_execution *execution,
                             struct opaq_error *error);

/* moe/route.c, rows.c, activation.c */
enum opaq_status cpu_route(const struct route_job *job, const struct opaq_execution *execution,
                           struct opaq_error *error);
enum opaq_status cpu_split(const struct split_job *job, const struct opaq_execution *execution,
                           struct opaq_error *error);
enum opaq_status cpu_gather_rows(const struct row_groups *groups, const struct quant_matrix *from,
                                 enum row_order order, bool is_weighted, const struct quant_matrix *to,
                                 const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_weigh_rows(const struct row_groups *groups, const struct quant_matrix *rows,
                                const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_convert_rows(const struct quant_matrix *from, const struct quant_matrix *to,
                                  const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_activate(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                              const struct quant_matrix *h, const struct quant_matrix *a,
                              const struct opaq_execution *execution, struct opaq_error *error);
enum opaq_status cpu_activate_backward(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                                       const struct quant_matrix *h, const struct quant_matrix *da,
                                       const struct quant_matrix *dh, const struct opaq_execution *execution,
                                       struct opaq_error *error);

/* kernel_tables.c */
const char *cpu_kernel_at(int index, bool *can_run);

#endif
