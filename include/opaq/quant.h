/* opaq/quant.h: quantizing and dequantizing. Depends on execution.h. Arithmetic: docs/formats.md.
 *
 * The bytes are defined: the same input gives the same bytes on every machine, with any number of threads,
 * whatever rounding mode or flush-to-zero setting the caller runs under. */
#ifndef OPAQ_QUANT_H
#define OPAQ_QUANT_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/execution.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Counter-based: the random bits of an element depend only on these two numbers and on its position in the
 * tensor. */
struct opaq_random {
    uint64_t seed;
    uint64_t offset; /* below 2^63 */
};

/* Further inputs and outputs of a quantization; the addresses are on the tensors' device. All zero is a valid
 * default. */
struct opaq_quantize_args {
    const float *scale;           /* OPAQ_DELAYED: the scale to use, one float; x is multiplied with it, or
                                     divided by it under the rules compressed-tensors and modelopt */
    const float *amax_rowwise;    /* given instead of computed, e.g. after a reduction over ranks: */
    const float *amax_columnwise; /* opaq_amax_count() floats; fp8 (current) and nvfp4 only. With OPAQ_GLOBAL
                                     they are the global scales themselves */
    float *amax;                  /* fp8: receives the amax, one float; may be NULL */
    struct opaq_random random;    /* OPAQ_STOCHASTIC */
};

/* Fills every buffer of `out`, padding included, from the plain tensor `x` of the same shape. `args` may be
 * NULL. `out` must not overlap `x`. */
OPAQ_API enum opaq_status opaq_quantize(const struct opaq_view *x, const struct opaq_quantize_args *args,
                                        const struct opaq_execution *execution, const struct opaq_view *out,
                                        struct opaq_error *error);

/* Dequantizes the copy that `usage` names (0: rowwise if there is one, else columnwise) into the plain tensor
 * `y`. The Hadamard transform of a columnwise copy is undone. */
OPAQ_API enum opaq_status opaq_dequantize(const struct opaq_view *q, int usage,
                                          const struct opaq_execution *execution, const struct opaq_view *y,
                                          struct opaq_error *error);

/* The number of floats in amax_rowwise (or _columnwise) for a tensor: 1 for fp8, 1 or the number of rows
 * (columns) for nvfp4, 0 for formats without given amaxes. */
OPAQ_API int64_t opaq_amax_count(const struct opaq_proto *proto, enum opaq_usage usage);

/* Computes these amaxes as opaq_quantize would for a tensor like `proto`: the columnwise ones after the
 * Hadamard transform if there is one. To share them between ranks, reduce with max and pass the result to
 * opaq_quantize. Not for OPAQ_GLOBAL, whose floats are not amaxes. */
OPAQ_API enum opaq_status opaq_amax(const struct opaq_view *x, const struct opaq_spec *spec,
                                    enum opaq_usage usage, const struct opaq_execution *execution, float *amax,
                                    int64_t count, struct opaq_error *error);

/* Delayed scaling: how the next scale is computed from the history. */
enum opaq_amax_algorithm { OPAQ_AMAX_MAX = 0, OPAQ_AMAX_MOST_RECENT = 1 };

struct opaq_delayed_state {
    float *amax_history; /* [length][count]; row 0 is the amax since the last update */
    float *scale;        /* [count] */
    int64_t length;      /* at least 1 */
    int64_t count;       /* number of tensors */
};

/* Rolls the history, whose newest amax is reduced_amax[i] if given and not 0, else amax_history[0][i], and sets
 * scale = largest(element) * 2^-margin / amax; the scale is unchanged if that amax is 0 or not finite.
 * OPAQ_AMAX_MAX: the largest of the newest amax and of rows 1 to length - 1 before the roll, `length` amaxes. */
OPAQ_API enum opaq_status opaq_delayed_update(const struct opaq_delayed_state *state, const float *reduced_amax,
                                              enum opaq_element element, int margin,
                                              enum opaq_amax_algorithm algorithm,
                                              const struct opaq_execution *execution, struct opaq_error *error);

/* The number of consecutive rows of a rowwise copy that share a scale or a tile. A tensor can only be split, as
 * a stack of weights is into experts, at multiples of it. 0 if the spec is not valid. */
OPAQ_API int64_t opaq_rows_together(const struct opaq_spec *spec);

/* The name of the kernel that serves a spec on this machine: "quantize_nvfp4_ref". NULL for an invalid spec. */
OPAQ_API const char *opaq_quantize_kernel(const struct opaq_spec *spec);
OPAQ_API const char *opaq_dequantize_kernel(const struct opaq_spec *spec);

#ifdef __cplusplus
}
#endif

#endif
