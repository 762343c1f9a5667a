/* opaq/linear.h: how a linear layer is computed, as a plain value. Depends on op.h. Text: docs/linear.md.
 *
 *     forward   y  = x w^T + bias      x[M,K], w[N,K], y[M,N]
 *     backward  dx = dy w              dw = dy^T x              dbias = column sums of dy
 *
 * A plan says which of these are quantized how, which gradients are wanted, and what is kept between the two. The
 * operators linear_forward and linear_backward take it as a text. */
#ifndef OPAQ_LINEAR_H
#define OPAQ_LINEAR_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/op.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Bits. */
enum opaq_gradient { OPAQ_GRADIENT_X = 1, OPAQ_GRADIENT_W = 2, OPAQ_GRADIENT_BIAS = 4 };

/* The operands of the backward pass. */
enum opaq_backward {
    OPAQ_BACKWARD_QUANTIZED = 0,      /* copies quantized along the summed dimension */
    OPAQ_BACKWARD_HIGH_PRECISION = 1, /* x, w and dy unquantized */
    OPAQ_BACKWARD_DEQUANTIZED = 2     /* the operands of the forward, dequantized; dy unquantized */
};

/* Bits. */
enum opaq_linear_option {
    OPAQ_LINEAR_CACHE = 1,      /* the forward returns the whole quantized weight for reuse in later calls */
    OPAQ_LINEAR_BIAS_LATER = 2, /* the caller adds the bias; only its gradient is computed here */
    OPAQ_LINEAR_ADD = 4,        /* dw is added to main_grad ... */
    OPAQ_LINEAR_SET = 8,        /* ... or written into it */
    OPAQ_LINEAR_REDUCE =
        16 /* delayed scaling: only record amaxes; the scales are updated after their reduction across ranks */
};

/* The lowest accuracy you accept for unquantized activations in products with a tiled weight. Where there is no
 * kernel for it, a more accurate one is used. On a GPU, with any order (see below), FAST and FAST32 also allow FP8 tensor cores
 * to add up products of FP8 codes with fewer bits. */
enum opaq_precision {
    OPAQ_PRECISION_EXACT = 0, /* float32, unconverted */
    OPAQ_PRECISION_NEAR = 1,  /* int16, one scale per row */
    OPAQ_PRECISION_FAST = 2,  /* int8, one scale per row */
    OPAQ_PRECISION_FAST32 = 3 /* int8, one scale per 32 columns of a row */
};

/* In which order products may add up their terms. Any order may be faster; the bits of a result then depend on the other
 * rows of its batch. */
enum opaq_order {
    OPAQ_ORDER_FIXED = 0, /* by the sizes of the weight alone */
    OPAQ_ORDER_ANY = 1
};

struct opaq_linear_plan {
    struct opaq_form x, w, dy, y, dx;            /* plain, or how this layer quantizes it; usages are ignored */
    struct opaq_form x_given, w_given, dy_given; /* plain, or how the argument is quantized */
    int32_t gradients;                           /* enum opaq_gradient */
    int32_t
        saved; /* OPAQ_GRADIENT_X, _W: the tensor is saved unquantized and quantized again in the backward */
    int32_t backward;  /* enum opaq_backward */
    int32_t options;   /* enum opaq_linear_option */
    int32_t margin;    /* delayed scaling */
    int32_t algorithm; /* enum opaq_amax_algorithm */
    int32_t precision; /* enum opaq_precision */
    int32_t order;     /* enum opaq_order */
};

/* "x=mxfp8 w=mxfp8 dy=mxfp8.e5m2 grad=xw". Words in any order, separated by one space, each at most once; the
 * empty text is the plan without quantization or gradients. The error names the word and its position. */
#define OPAQ_LINEAR_PLAN_TEXT_BYTES 640
OPAQ_API enum opaq_status opaq_linear_plan_parse(const char *text, size_t length, struct opaq_linear_plan *plan,
                                                 struct opaq_error *error);

/* The name of the kernel that multiplies with a weight on this processor: "packed_nvfp4_fast_avx512" or
 * "gemm_avx512". `w` NULL: a plain weight; `x` NULL: unquantized activations of x_dtype. NULL if a spec is not
 * valid. */
OPAQ_API const char *opaq_linear_kernel(const struct opaq_spec *w, const struct opaq_spec *x,
                                        enum opaq_element x_dtype, enum opaq_precision precision);

/* The same for tensors on a device: "product_nvfp4_mma" on a GPU. NULL also if the device cannot be used. On a GPU the name
 * is that of a family: which of its kernels runs depends on shapes and addresses. */
OPAQ_API const char *opaq_device_linear_kernel(struct opaq_device device, const struct opaq_spec *w,
                                               const struct opaq_spec *x, enum opaq_element x_dtype,
                                               enum opaq_precision precision);

#ifdef __cplusplus
}
#endif

#endif
