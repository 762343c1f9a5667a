/* cpu/moe/activation.h: what stands between the two products of an MLP, and its gradient. Depends on definition. Specification:
 * docs/experts.md. */
#ifndef OPAQ_CPU_MOE_ACTIVATION_H
#define OPAQ_CPU_MOE_ACTIVATION_H

#include "backend/quant_job.h"
#include "definition/activation_formulas.h"
#include "opaq/experts.h"
#include "opaq/parallel.h"

/* a[rows, I] from h[rows, 2I or I], both contiguous along their rows. h and a hold one dtype. */
void activation_forward(const struct opaq_experts_plan *plan, const struct quant_matrix *h,
                        const struct quant_matrix *a, const struct opaq_parallel *parallel);

/* The same for at most ACTIVATION_STRETCH gates and factors (of which nothing is read where there are none) in float32, which
 * become what `dtype` holds of them. `to`: n elements of dtype. */
void activation_stretch(const struct opaq_experts_plan *plan, enum opaq_element dtype, float *g, float *u,
                        int n, void *to);

/* dh from h and da, which is float32. */
void activation_backward(const struct opaq_experts_plan *plan, const struct quant_matrix *h,
                         const struct quant_matrix *da, const struct quant_matrix *dh,
                         const struct opaq_parallel *parallel);

#endif
