/* support_quant.h: quantizes in one call, for tests that compare whole tensors. Depends on support_tensor.h. */
#ifndef SUPPORT_QUANT_H
#define SUPPORT_QUANT_H

#include "support_tensor.h"

/* A plain float32 tensor of the shape of x. */
struct tensor plain_like(const struct tensor *tensor);

/* A tensor for x quantized with a spec, its memory filled with 0xA5. */
struct tensor quantized_like(const struct tensor *x, const struct opaq_spec *spec);

/* Arguments that suffice for any spec: a scale for delayed ones, random bits for stochastic ones. */
struct opaq_quantize_args args_for(const struct opaq_spec *spec);

/* x quantized with args_for(spec) or with the given arguments. Ends the test program on an error. */
struct tensor quantized(const struct tensor *x, const struct opaq_spec *spec,
                        const struct opaq_quantize_args *args);
struct tensor quantized_on(const struct tensor *x, const struct opaq_spec *spec,
                           const struct opaq_quantize_args *args, const struct opaq_parallel *parallel);

/* Dequantizes to float32. */
struct tensor dequantized(const struct tensor *q, int usage);

/* The transpose of x, in the same dtype. */
struct tensor transposed(const struct tensor *x);

/* Index of the first buffer in which two tensors of one prototype differ, -1 if they are equal. */
int first_difference(const struct tensor *a, const struct tensor *b);

#endif
