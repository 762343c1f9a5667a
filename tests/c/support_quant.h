/* support_quant.h: quantizing in one line, for tests that compare whole tensors. Depends on support_tensor.h. */
#ifndef SUPPORT_QUANT_H
#define SUPPORT_QUANT_H

#include "support_tensor.h"

/* A plain float32 tensor like x, or like a quantized one. */
struct tensor plain_like(const struct tensor *tensor);

/* A tensor for x quantized with a spec, its memory still 0xA5. */
struct tensor quantized_like(const struct tensor *x, const struct opaq_spec *spec);

/* What every spec can be run with: a scale for the delayed ones, random bits for the stochastic ones. */
struct opaq_quantize_args args_for(const struct opaq_spec *spec);

/* x quantized, with args_for(spec) or the arguments given. Ends the test program if that is refused. */
struct tensor quantized(const struct tensor *x, const struct opaq_spec *spec,
                        const struct opaq_quantize_args *args);
struct tensor quantized_on(const struct tensor *x, const struct opaq_spec *spec,
                           const struct opaq_quantize_args *args, const struct opaq_parallel *parallel);

/* Back to float32. */
struct tensor dequantized(const struct tensor *q, int usage);

/* x with rows and columns exchanged; the same dtype. */
struct tensor transposed(const struct tensor *x);

/* The first buffer in which two tensors of one prototype differ, -1 if none does. */
int first_difference(const struct tensor *a, const struct tensor *b);

#endif
