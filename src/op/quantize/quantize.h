/* op/quantize/quantize.h: quantizes checked views. Depends on backend.h. */
#ifndef OPAQ_OP_QUANTIZE_QUANTIZE_H
#define OPAQ_OP_QUANTIZE_QUANTIZE_H

#include "backend/backend.h"

/* Quantizes x into `out`: valid views of one shape on the work's device that share no byte. Checks that the figures go
 * with the spec. */
enum opaq_status quantize_view(struct work *work, const struct opaq_view *x,
                               const struct quantize_figures *figures, const struct opaq_view *out,
                               struct opaq_error *error);

/* Dequantizes the copy that `usage` names, 0 for either. */
enum opaq_status dequantize_view(struct work *work, const struct opaq_view *q, int usage,
                                 const struct opaq_view *y, struct opaq_error *error);

/* The amax of x under a spec, whose usage is `usage`. */
enum opaq_status amax_view(struct work *work, const struct opaq_view *x, const struct opaq_spec *spec,
                           enum opaq_usage usage, bool is_stored, float *amax, struct opaq_error *error);

#endif
