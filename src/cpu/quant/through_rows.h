/* cpu/quant/through_rows.h: quantizing into tiles, and dequantizing from them, with kernels that know rows. Depends on
 * quant_table.h. */
#ifndef OPAQ_CPU_QUANT_THROUGH_ROWS_H
#define OPAQ_CPU_QUANT_THROUGH_ROWS_H

#include "cpu/quant/quant_table.h"

/* Whether a tiled copy can go through rows: they are not too long for a strip, and random bits, which depend on where an
 * element is, do not make codes. */
bool through_rows_can_run(const struct quant_job *job, const struct quant_copy *copy, bool is_quantizing);

/* What the kernel does with rows [r, r_end) of the tiled copy. */
void quantize_through_rows(const struct quant_kernel *kernel, const struct quant_job *job,
                           const struct quant_copy *copy, int64_t r, int64_t r_end);
void dequantize_through_rows(const struct quant_kernel *kernel, const struct quant_job *job,
                             const struct quant_copy *copy, int64_t r, int64_t r_end);

#endif
