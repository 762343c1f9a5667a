/* cpu/quant/amax_run.h: the amax of a checked tensor, on all threads. Depends on quant. */
#ifndef OPAQ_CPU_QUANT_AMAX_RUN_H
#define OPAQ_CPU_QUANT_AMAX_RUN_H

#include "backend/quant_job.h"

/* Fills the one float (step 0) or the floats per operand row (step 1) at `amax`. */
void amax_compute(const struct quant_copy *copy, const struct opaq_spec *spec,
                  const struct opaq_parallel *parallel, float *amax, int64_t step);

#endif
