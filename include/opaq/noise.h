/* opaq/noise.h: what quantizing did to a tensor, in numbers. Depends on execution.h. */
#ifndef OPAQ_NOISE_H
#define OPAQ_NOISE_H

#include "opaq/execution.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sums over all elements, in double: of squares of x, and of squares of the differences to what is stored. */
struct opaq_noise {
    double signal;
    double noise;
};

/* The noise of the copy that `usage` names (0: rowwise if there is one, else columnwise) against the plain tensor
 * `x` of the same shape. The sums are the same with any number of threads. NaN if either has one. */
OPAQ_API enum opaq_status opaq_noise_measure(const struct opaq_view *x, const struct opaq_view *q, int usage,
                                             const struct opaq_execution *execution, struct opaq_noise *noise,
                                             struct opaq_error *error);

/* The signal-to-noise ratio in decibels; infinite without noise; 0 for NULL. */
OPAQ_API double opaq_noise_sqnr(const struct opaq_noise *noise);

#ifdef __cplusplus
}
#endif

#endif
