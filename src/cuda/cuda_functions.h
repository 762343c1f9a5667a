/* cuda/cuda_functions.h: the functions behind CUDA's table, by the files that define them. What each does is said in
 * backend/backend.h. Depends on cuda_device.h. */
#ifndef OPAQ_CUDA_CUDA_FUNCTIONS_H
#define OPAQ_CUDA_CUDA_FUNCTIONS_H

#include "cuda/cuda_device.h"

extern const struct backend cuda_backend;

#define CUDA_RUN const struct opaq_execution *execution, struct opaq_error *error

/* cuda_memory.cu */
enum opaq_status cuda_allocate(struct opaq_device device, size_t bytes, void **memory,
                               struct opaq_error *error);
void cuda_release(struct opaq_device device, void *memory);
enum opaq_status cuda_zero(void *memory, size_t bytes, CUDA_RUN);
enum opaq_status cuda_copy(const struct opaq_tensor *from, void *to, CUDA_RUN);
enum opaq_status cuda_fill(const float *value, int64_t count, float *to, CUDA_RUN);

/* quant/quantize_run.cu, amax.cu, dequantize.cu, remap.cu, noise.cu, delayed_scaling.cu */
enum opaq_status cuda_quantize(const struct quant_job *job, const struct quantize_figures *figures, CUDA_RUN);
enum opaq_status cuda_dequantize(const struct quant_job *job, CUDA_RUN);
enum opaq_status cuda_amax(const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored,
                           int64_t step, float *amax, CUDA_RUN);
enum opaq_status cuda_remap(const struct remap_job *job, CUDA_RUN);
enum opaq_status cuda_compare_figures(const struct quant_job *a, const struct quant_job *b, bool *are_equal,
                                      CUDA_RUN);
enum opaq_status cuda_noise(const struct quant_job *job, struct opaq_noise *noise, CUDA_RUN);
enum opaq_status cuda_delayed_update(const struct opaq_delayed_state *state, const float *recorded,
                                     const float *reduced, const struct delayed_rule *rule, CUDA_RUN);

/* The same for the rows of one group: the jobs are made for as many rows as there are in all. */
enum opaq_status quantize_group(const struct quant_job *job, const struct quantize_figures *figures,
                                const struct group_part *group, CUDA_RUN);
enum opaq_status dequantize_group(const struct quant_job *job, const struct group_part *group, CUDA_RUN);
enum opaq_status amax_group(const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored,
                            int64_t step, float *amax, const struct group_part *group, CUDA_RUN);

/* gemm/product.cu, column_sum.cu */
size_t cuda_product_workspace(const struct gemm_job *job);
enum opaq_status cuda_product(const struct gemm_job *job, void *workspace, CUDA_RUN);
enum opaq_status cuda_column_sum(const struct row_groups *groups, const struct quant_matrix *rows,
                                 const struct opaq_view *sums, CUDA_RUN);

/* What of a product belongs to a group: rows of a and c (c's from the group's first on), or the terms of the sums. */
enum product_part { PRODUCT_WHOLE, PRODUCT_ROWS, PRODUCT_TERMS };
size_t product_group_workspace(const struct gemm_job *job, enum product_part part);
enum opaq_status product_group(const struct gemm_job *job, const struct group_part *group,
                               enum product_part part, void *workspace, CUDA_RUN);

/* moe/grouped_product.cu */
enum opaq_status cuda_grouped_product_workspace(const struct grouped_product *job, size_t *bytes,
                                                struct opaq_error *error);
enum opaq_status cuda_grouped_product(const struct grouped_product *job, void *workspace, CUDA_RUN);
enum opaq_status cuda_grouped_gradient_workspace(const struct grouped_gradient *job, size_t *bytes,
                                                 struct opaq_error *error);
enum opaq_status cuda_grouped_gradient(const struct grouped_gradient *job, void *workspace, CUDA_RUN);
enum opaq_status cuda_row_dot_workspace(const struct row_dot *job, size_t *bytes, struct opaq_error *error);
enum opaq_status cuda_row_dot(const struct row_dot *job, void *workspace, CUDA_RUN);

/* moe/route.cu, rows.cu, activation.cu */
enum opaq_status cuda_route(const struct route_job *job, CUDA_RUN);
enum opaq_status cuda_split(const struct split_job *job, CUDA_RUN);
enum opaq_status cuda_gather_rows(const struct row_groups *groups, const struct quant_matrix *from,
                                  enum row_order order, bool is_weighted, const struct quant_matrix *to,
                                  CUDA_RUN);
enum opaq_status cuda_weigh_rows(const struct row_groups *groups, const struct quant_matrix *rows, CUDA_RUN);
enum opaq_status cuda_convert_rows(const struct quant_matrix *from, const struct quant_matrix *to, CUDA_RUN);
enum opaq_status cuda_activate(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                               const struct quant_matrix *h, const struct quant_matrix *a, CUDA_RUN);
enum opaq_status cuda_activate_backward(const struct row_groups *groups, const struct opaq_experts_plan *plan,
                                        const struct quant_matrix *h, const struct quant_matrix *da,
                                        const struct quant_matrix *dh, CUDA_RUN);

#endif
