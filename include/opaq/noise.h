/* opaq/noise.h: measures the error of a quantized tensor. Depends on execution.h. */
#ifndef OPAQ_NOISE_H
#define OPAQ_NOISE_H

#include "opaq/execution.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Sums over all elements, in double: squares of x, and squares of x minus the dequantized value. */
struct opaq_noise {
    double signal;
    double noise;
};

/* Measures the copy that `usage` names (0: rowwise if there is one, else columnwise) against the plain tensor
 * `x` of the same shape. The sums do not depend on the number of threads. NaN if either tensor contains one. */
OPAQ_API enum opaq_status opaq_noise_measure(const struct opaq_view *x, const struct opaq_view *q, int usage,
                                             const struct opaq_execution *execution, struct opaq_noise *noise,
                                             struct opaq_error *error);

/* The signal-to-noise ratio in decibels; infinite without noise; 0 for NULL. */
OPAQ_API double opaq_noise_sqnr(const struct opaq_noise *noise);

#ifdef __cplusplus
}
#endif

#endif
