/* cpu/gemm/packed_run.h: a product whose b is a tiled weight, on the kernels of packed.h. Depends on product.h. */
#ifndef OPAQ_CPU_GEMM_PACKED_RUN_H
#define OPAQ_CPU_GEMM_PACKED_RUN_H

#include <stddef.h>

#include "backend/product.h"
#include "cpu/gemm/packed.h"
#include "opaq/parallel.h"

/* Whether these kernels support the product and are the fastest: b is tiled, its memory aligned, nothing is added to
 * c, a is contiguous along its rows, and this processor has a kernel besides the reference. */
bool packed_can_run(const struct gemm_job *job, enum packed_precision wanted);

/* The same, if b's memory is aligned. */
bool packed_could_run(const struct gemm_job *job, enum packed_precision wanted);

/* The precision of a product: `wanted` if a is plain, or a more accurate one if there is no kernel for it.
 * EXACT becomes BF16 if a is bf16 and this processor has a kernel; CODES if a and b are 4-bit codes of one
 * format. */
enum packed_precision packed_precision_of(const struct gemm_job *job, enum packed_precision wanted);

/* The scratch memory that packed_run needs, aligned to 64; depends on the shapes, formats, a's type and the precision
 * only. */
size_t packed_workspace_bytes(const struct gemm_job *job, enum packed_precision wanted);

void packed_run(const struct gemm_job *job, enum packed_precision wanted, void *workspace,
                const struct opaq_parallel *parallel);

/* Which kernel packed_run uses for a tiled weight and activations that are quantized (a) or not (NULL: of `dtype`);
 * NULL if packed_can_run returns false. */
const char *packed_kernel_name(const struct opaq_spec *b, const struct opaq_spec *a, enum opaq_element dtype,
                               enum packed_precision wanted);

#endif
