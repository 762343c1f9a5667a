/* cpu/moe/activation.h: the activation of an MLP and its gradient. Depends on definition. Specification:
 * docs/experts.md. */
#ifndef OPAQ_CPU_MOE_ACTIVATION_H
#define OPAQ_CPU_MOE_ACTIVATION_H

#include "backend/quant_job.h"
#include "definition/activation_formulas.h"
#include "opaq/experts.h"
#include "opaq/parallel.h"

/* Computes a[rows, I] from h[rows, 2I or I], both contiguous along their rows and of one dtype. */
void activation_forward(const struct opaq_experts_plan *plan, const struct quant_matrix *h,
                        const struct quant_matrix *a, const struct opaq_parallel *parallel);

/* The same for at most ACTIVATION_SEGMENT gates and factors in float32, which are rounded to `dtype` in place.
 * `u` is not read for an activation without a gate. `to`: n elements of dtype. */
void activation_segment(const struct opaq_experts_plan *plan, enum opaq_element dtype, float *g, float *u,
                        int n, void *to);

/* Computes dh from h and da (float32). */
void activation_backward(const struct opaq_experts_plan *plan, const struct quant_matrix *h,
                         const struct quant_matrix *da, const struct quant_matrix *dh,
                         const struct opaq_parallel *parallel);

#endif
