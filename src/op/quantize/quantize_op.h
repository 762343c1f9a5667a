/* op/quantize/quantize_op.h: quantize and dequantize behind the door: for views that were checked, of one shape, on the CPU, and
 * that share no byte. Depends on quant. */
#ifndef OPAQ_OP_QUANTIZE_QUANTIZE_OP_H
#define OPAQ_OP_QUANTIZE_QUANTIZE_OP_H

#include "backend/quant_job.h"

enum opaq_status quantize_checked(const struct opaq_view *x, const struct opaq_quantize_args *args,
                                  const struct opaq_view *out, struct opaq_error *error);

enum opaq_status dequantize_checked(const struct opaq_view *q, int usage, const struct opaq_parallel *parallel,
                                    const struct opaq_view *y, struct opaq_error *error);

/* The same for copies whose places are known. */
void dequantize_job(const struct quant_job *job, const struct opaq_parallel *parallel);

#endif
