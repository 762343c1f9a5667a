/* definition/activation_formulas.h: activations of single numbers and of segments, in loops that compilers
 * vectorize. The exponential is our own, so that results are the same on every machine. Depends on plain_row.h,
 * backend/grouped.h. */
#ifndef OPAQ_DEFINITION_ACTIVATION_FORMULAS_H
#define OPAQ_DEFINITION_ACTIVATION_FORMULAS_H

#include <math.h>

#include "backend/grouped.h"
#include "definition/plain_row.h"

/* Maximum number of elements that are activated at once. */
enum { ACTIVATION_SEGMENT = 256 };

/* e^x to about one unit in the last place: x = n ln 2 + r, with ln 2 in two parts and a polynomial for e^r, whose
 * coefficients are those of the Taylor series. 2^n is multiplied in two steps, because n reaches beyond the exponents
 * of a float at both ends. NaN stays NaN. */
OPAQ_DEVICE static inline float exponential(float x) {
    const float inside = x > 90.0f     ? 90.0f
                         : x < -105.0f ? -105.0f
                                       : x; /* the result is infinite or 0 beyond this range */
    const float turns = inside * 1.44269504f;
    const float shifter = 12582912.0f; /* 1.5 * 2^23: adding it rounds to an integer */
    const float n = turns + shifter - shifter;
    const float r = (inside - n * 0.693359375f) - n * -2.12194440e-4f;
    float e = 1.0f / 5040.0f;
    e = e * r + 1.0f / 720.0f;
    e = e * r + 1.0f / 120.0f;
    e = e * r + 1.0f / 24.0f;
    e = e * r + 1.0f / 6.0f;
    e = e * r + 0.5f;
    e = e * r * r + r + 1.0f;
    const int32_t whole = n == n ? (int32_t)n : 0;
    const int32_t half = whole / 2;
    const float low = float_from_bits((uint32_t)(half + 127) << 23);
    const float high = float_from_bits((uint32_t)(whole - half + 127) << 23);
    return e * low * high;
}

OPAQ_DEVICE static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

OPAQ_DEVICE static inline float at_most(float x, float limit) { return x > limit ? limit : x; }
OPAQ_DEVICE static inline float within(float x, float limit) {
    return x > limit ? limit : x < -limit ? -limit : x;
}

/* gelu's tanh: (1 + tanh z) / 2 is sigmoid(2 z). */
OPAQ_DEVICE static inline float tanh_argument(float g) { return 1.59576912f * (g + 0.044715f * g * g * g); }

OPAQ_DEVICE static inline float round_to(enum opaq_element dtype, float x) {
    return dtype == OPAQ_BF16  ? decode_bf16(encode_bf16_ieee(x))
           : dtype == OPAQ_F16 ? plain_decode_f16(encode_f16_ieee(x))
                               : x;
}

/* The activated gate before the multiplication, unrounded. */
OPAQ_DEVICE static inline __attribute__((always_inline)) float activated(const struct opaq_experts_plan *plan,
                                                                         enum opaq_activation kind, float g) {
    switch (kind) {
    case OPAQ_SILU:
    case OPAQ_SILU_STEP:
    case OPAQ_SILU_NO_MUL:
        return g / (1.0f + exponential(-g));
    case OPAQ_SILU_CLAMP:
    case OPAQ_SWIGLU_OAI:
    case OPAQ_SWIGLU_OAI_PACKED: {
        const float gate = at_most(g, plan->limit);
        return gate / (1.0f + exponential(-plan->alpha * gate));
    }
    case OPAQ_GELU:
    case OPAQ_GELU_NO_MUL:
        return (float)(0.5 * (double)g * erfc(-0.70710678118654752 * (double)g));
    case OPAQ_GELU_TANH:
    case OPAQ_GELU_TANH_NO_MUL:
        return g * sigmoid(tanh_argument(g));
    case OPAQ_RELU2:
    case OPAQ_RELU2_NO_MUL: {
        const float positive = g < 0.0f ? 0.0f : g;
        return positive * positive;
    }
    }
    return g;
}

OPAQ_DEVICE static inline bool has_limit(const struct opaq_experts_plan *plan) { return plan->limit > 0.0f; }

/* The factor that the gate is multiplied with. */
OPAQ_DEVICE static inline float factor_of(const struct opaq_experts_plan *plan, float u) {
    return (has_limit(plan) ? within(u, plan->limit) : u) + plan->beta;
}

/* The derivative of `activated`. */
OPAQ_DEVICE static inline float activation_slope(const struct opaq_experts_plan *plan, float g) {
    switch ((enum opaq_activation)plan->activation) {
    case OPAQ_SILU:
    case OPAQ_SILU_STEP:
    case OPAQ_SILU_NO_MUL: {
        const float s = sigmoid(g);
        const bool is_cut = plan->activation == OPAQ_SILU_STEP && g * s > plan->limit;
        return is_cut ? 0.0f : s * (1.0f + g * (1.0f - s));
    }
    case OPAQ_SILU_CLAMP:
    case OPAQ_SWIGLU_OAI:
    case OPAQ_SWIGLU_OAI_PACKED: {
        const float s = sigmoid(plan->alpha * g);
        return g > plan->limit ? 0.0f : s * (1.0f + plan->alpha * g * (1.0f - s));
    }
    case OPAQ_GELU:
    case OPAQ_GELU_NO_MUL: {
        const double x = (double)g;
        return (float)(0.5 * erfc(-0.70710678118654752 * x) + x * 0.39894228040143268 * exp(-0.5 * x * x));
    }
    case OPAQ_GELU_TANH:
    case OPAQ_GELU_TANH_NO_MUL: {
        const float s = sigmoid(tanh_argument(g));
        return s + g * s * (1.0f - s) * 1.59576912f * (1.0f + 3.0f * 0.044715f * g * g);
    }
    case OPAQ_RELU2:
    case OPAQ_RELU2_NO_MUL:
        return g < 0.0f ? 0.0f : 2.0f * g;
    }
    return 1.0f;
}

/* Replaces gate and factor by their gradients; the factor of an activation without a gate is unspecified. */
OPAQ_DEVICE static inline void activation_gradient(const struct opaq_experts_plan *plan, float upstream,
                                                   float *g, float *u) {
    const bool is_gated = activation_is_gated((enum opaq_activation)plan->activation);
    const float gate = *g;
    float value = activated(plan, (enum opaq_activation)plan->activation, gate);
    value = plan->activation == OPAQ_SILU_STEP ? at_most(value, plan->limit) : value;
    *g = upstream * (is_gated ? factor_of(plan, *u) : 1.0f) * activation_slope(plan, gate);
    *u = has_limit(plan) && within(*u, plan->limit) != *u ? 0.0f : upstream * value;
}

OPAQ_DEVICE static inline bool is_rounded_once(const struct opaq_experts_plan *plan) {
    return plan->activation == OPAQ_SWIGLU_OAI || plan->activation == OPAQ_SWIGLU_OAI_PACKED;
}

/* `dtype` is a constant in each loop, so that compilers vectorize it. Every NaN becomes the canonical one. */
OPAQ_DEVICE static inline void round_segment(enum opaq_element dtype, int n, float *x) {
    if (dtype == OPAQ_BF16) {
        for (int i = 0; i < n; ++i) {
            x[i] = round_to(OPAQ_BF16, x[i]);
        }
    } else if (dtype == OPAQ_F16) {
        for (int i = 0; i < n; ++i) {
            x[i] = round_to(OPAQ_F16, x[i]);
        }
    } else {
        for (int i = 0; i < n; ++i) {
            x[i] = float_is_nan(x[i]) ? float_nan() : x[i];
        }
    }
}

/* `kind` is a constant in each call, so that compilers vectorize the loops. */
OPAQ_DEVICE static inline __attribute__((always_inline)) void apply(
    const struct opaq_experts_plan *plan, enum opaq_activation kind, enum opaq_element dtype,
    const float *__restrict__ g, const float *__restrict__ u, int n, float *__restrict__ a) {
    const bool is_gated = activation_is_gated(kind);
    const bool rounds = is_gated && !is_rounded_once(plan);
    for (int i = 0; i < n; ++i) {
        a[i] = activated(plan, kind, g[i]);
    }
    if (rounds) {
        round_segment(dtype, n, a);
    }
    for (int i = 0; kind == OPAQ_SILU_STEP && i < n; ++i) {
        a[i] = at_most(a[i], plan->limit);
    }
    for (int i = 0; is_gated && i < n; ++i) {
        a[i] *= factor_of(plan, u[i]);
    }
}

OPAQ_DEVICE static inline void apply_any(const struct opaq_experts_plan *plan, enum opaq_element dtype,
                                         const float *g, const float *u, int n, float *a) {
    const enum opaq_activation kind = (enum opaq_activation)plan->activation;
    switch (kind) {
    case OPAQ_SILU:
        apply(plan, OPAQ_SILU, dtype, g, u, n, a);
        break;
    case OPAQ_SILU_CLAMP:
        apply(plan, OPAQ_SILU_CLAMP, dtype, g, u, n, a);
        break;
    case OPAQ_SWIGLU_OAI:
    case OPAQ_SWIGLU_OAI_PACKED:
        apply(plan, OPAQ_SWIGLU_OAI, dtype, g, u, n, a);
        break;
    default:
        apply(plan, kind, dtype, g, u, n, a);
    }
}

/* Rounds gates and factors to `dtype` and stores the activations. */
OPAQ_DEVICE static inline void activate_segment(const struct opaq_experts_plan *plan, enum opaq_element dtype,
                                                float *g, float *u, int n, void *to) {
    float a[ACTIVATION_SEGMENT];
    const bool is_gated = activation_is_gated((enum opaq_activation)plan->activation);
    round_segment(dtype, n, g);
    if (is_gated) {
        round_segment(dtype, n, u);
    }
    apply_any(plan, dtype, g, u, n, a);
    plain_row_store(to, dtype, 0, 1, n, a);
}

#endif
