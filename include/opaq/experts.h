/* opaq/experts.h: how an MLP, or a mixture of them, is computed, as a plain value. Depends on linear.h. Text:
 * docs/experts.md.
 *
 *     h = x gate_up^T + bias        gate_up[2I,H] (or [I,H] for an activation without a gate)
 *     a = activation(h)
 *     y = a down^T + bias           down[H,I]
 *
 * The operators mlp and moe, and their forward and backward, take the plan as a text. */
#ifndef OPAQ_EXPERTS_H
#define OPAQ_EXPERTS_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/linear.h"

#ifdef __cplusplus
extern "C" {
#endif

/* g: the gate, u: the value it multiplies. Files and plans store names, never these numbers. */
enum opaq_activation {
    OPAQ_SILU = 0,              /* silu(g) u */
    OPAQ_SILU_CLAMP = 1,        /* g at most limit, u within +-limit: g sigmoid(alpha g) (u + beta) */
    OPAQ_SWIGLU_OAI = 2,        /* as SILU_CLAMP, but rounded once; g and u are interleaved in h */
    OPAQ_SWIGLU_OAI_PACKED = 3, /* as SWIGLU_OAI, but g and u are the two halves of h */
    OPAQ_SILU_STEP = 4,         /* silu(g) at most limit, u within +-limit: silu(g) u */
    OPAQ_GELU = 5,
    OPAQ_GELU_TANH = 6,
    OPAQ_RELU2 = 7, /* the square of max(g, 0) */
    OPAQ_SILU_NO_MUL = 8,
    OPAQ_GELU_NO_MUL = 9,
    OPAQ_GELU_TANH_NO_MUL = 10,
    OPAQ_RELU2_NO_MUL = 11
};
#define OPAQ_ACTIVATION_COUNT 12

/* "silu_clamp"; NULL for another number. */
OPAQ_API const char *opaq_activation_name(enum opaq_activation activation);

/* Whether h is twice as wide as a. */
OPAQ_API int opaq_activation_is_gated(enum opaq_activation activation);

/* Bits. */
enum opaq_experts_gradient {
    OPAQ_EXPERTS_X = 1,
    OPAQ_EXPERTS_ROUTER = 2,
    OPAQ_EXPERTS_GATE_UP = 4,
    OPAQ_EXPERTS_DOWN = 8,
    OPAQ_EXPERTS_GATE_UP_BIAS = 16,
    OPAQ_EXPERTS_DOWN_BIAS = 32
};

struct opaq_experts_plan {
    struct opaq_form x, h, w, dy;               /* plain, or how this layer quantizes it; usages are ignored */
    struct opaq_form gate_up_given, down_given; /* plain, or how the argument is quantized */
    int32_t activation;                         /* enum opaq_activation */
    int32_t gradients;                          /* enum opaq_experts_gradient */
    int32_t backward;                           /* enum opaq_backward */
    int32_t precision;                          /* enum opaq_precision */
    int32_t order;                              /* enum opaq_order */
    int32_t weights_on_input;                   /* router weights multiply the input instead of the output */
    float limit, alpha, beta;                   /* parameters of the activation */
    int64_t experts; /* number of experts of the whole model; 0: as many as the stack holds */
    int64_t first;   /* index of the stack's first expert in the whole model */
};

/* "act=silu x=nvfp4 h=nvfp4 gate_up_given=nvfp4 down_given=nvfp4". Words in any order, separated by one space,
 * each at most once. */
#define OPAQ_EXPERTS_PLAN_TEXT_BYTES 960
OPAQ_API enum opaq_status opaq_experts_plan_parse(const char *text, size_t length,
                                                  struct opaq_experts_plan *plan, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
