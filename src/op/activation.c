/* op/activation.c: what stands between the two products of an MLP, and its gradient.
 *
 * A row goes in stretches: gates and factors to float32, the function, and back. The exponential is our own, so that
 * results are the same everywhere and loops become vectors. */
#include "op/activation.h"

#include <math.h>
#include <string.h>

#include "base/checked.h"
#include "base/parallel_run.h"
#include "gemm/plain_row.h"

enum { STRETCH = 256 };

/* e^x to about one unit in the last place: x = n ln 2 + r, with ln 2 in two parts and a polynomial for e^r, whose
 * coefficients are those of the Taylor series. 2^n is multiplied in two steps, because n reaches beyond the exponents of
 * a float at both ends. NaN stays NaN. */
static inline float exponential(float x) {
    const float inside = x > 90.0f ? 90.0f : x < -105.0f ? -105.0f : x; /* infinity and 0 from there on */
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

static inline float sigmoid(float x) { return 1.0f / (1.0f + exponential(-x)); }

static inline float at_most(float x, float limit) { return x > limit ? limit : x; }
static inline float within(float x, float limit) { return x > limit ? limit : x < -limit ? -limit : x; }

/* gelu's tanh: (1 + tanh z) / 2 is sigmoid(2 z). */
static inline float tanh_argument(float g) { return 1.59576912f * (g + 0.044715f * g * g * g); }

static inline float round_to(enum opaq_element dtype, float x) {
    return dtype == OPAQ_BF16  ? decode_bf16(encode_bf16_ieee(x))
           : dtype == OPAQ_F16 ? plain_decode_f16(encode_f16_ieee(x))
                               : x;
}

/* The gate before it is multiplied, unrounded. */
static inline __attribute__((always_inline)) float activated(const struct opaq_experts_plan *plan,
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

/* Its derivative. */
static inline float slope(const struct opaq_experts_plan *plan, float g) {
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

static bool has_limit(const struct opaq_experts_plan *plan) { return plan->limit > 0.0f; }

/* What the gate is multiplied with. */
static inline float factor_of(const struct opaq_experts_plan *plan, float u) {
    return (has_limit(plan) ? within(u, plan->limit) : u) + plan->beta;
}

static bool is_rounded_once(const struct opaq_experts_plan *plan) {
    return plan->activation == OPAQ_SWIGLU_OAI || plan->activation == OPAQ_SWIGLU_OAI_PACKED;
}

/* `kind` is a constant where this is called, so that the loops become vectors. */
static inline __attribute__((always_inline)) void apply(const struct opaq_experts_plan *plan,
                                                        enum opaq_activation kind, enum opaq_element dtype,
                                                        const float *restrict g, const float *restrict u, int n,
                                                        float *restrict a) {
    const bool is_gated = opaq_activation_is_gated(kind) != 0;
    const bool rounds = is_gated && !is_rounded_once(plan);
    for (int i = 0; i < n; ++i) {
        a[i] = activated(plan, kind, g[i]);
    }
    for (int i = 0; rounds && i < n; ++i) {
        a[i] = round_to(dtype, a[i]);
    }
    for (int i = 0; kind == OPAQ_SILU_STEP && i < n; ++i) {
        a[i] = at_most(a[i], plan->limit);
    }
    for (int i = 0; is_gated && i < n; ++i) {
        a[i] *= factor_of(plan, u[i]);
    }
}

static void apply_any(const struct opaq_experts_plan *plan, enum opaq_element dtype, const float *g,
                      const float *u, int n, float *a) {
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

struct activation_task {
    const struct opaq_experts_plan *plan;
    const struct quant_matrix *h;
    const struct quant_matrix *a;  /* or da */
    const struct quant_matrix *dh; /* of the gradient */
};

/* Where a stretch's gates and factors lie in a row of h or dh. */
struct gate_places {
    int64_t gate, factor, step;
};

static struct gate_places places_of(const struct activation_task *task, const struct quant_matrix *matrix,
                                    int64_t row, int64_t column) {
    const int64_t start = row * matrix->row_step;
    if (task->plan->activation == OPAQ_SWIGLU_OAI) {
        return (struct gate_places){start + 2 * column, start + 2 * column + 1, 2};
    }
    return (struct gate_places){start + column, start + task->a->columns + column, 1};
}

static void load(const struct activation_task *task, const struct gate_places *at, int n, float *g, float *u) {
    const bool is_gated = opaq_activation_is_gated((enum opaq_activation)task->plan->activation) != 0;
    plain_row_load(task->h->data, task->h->dtype, at->gate, at->step, n, g);
    if (is_gated) {
        plain_row_load(task->h->data, task->h->dtype, at->factor, at->step, n, u);
    } else {
        memset(u, 0, (size_t)n * sizeof *u);
    }
}

static void forward_rows(void *argument, int64_t begin, int64_t end) {
    const struct activation_task *task = argument;
    float g[STRETCH];
    float u[STRETCH];
    float a[STRETCH];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t c = 0; c < task->a->columns; c += STRETCH) {
            const int n = (int)min_int64(STRETCH, task->a->columns - c);
            const struct gate_places at = places_of(task, task->h, row, c);
            load(task, &at, n, g, u);
            apply_any(task->plan, task->h->dtype, g, u, n, a);
            plain_row_store(task->a->data, task->a->dtype, row * task->a->row_step + c, 1, n, a);
        }
    }
}

static void backward_rows(void *argument, int64_t begin, int64_t end) {
    const struct activation_task *task = argument;
    const struct opaq_experts_plan *plan = task->plan;
    const bool is_gated = opaq_activation_is_gated((enum opaq_activation)plan->activation) != 0;
    float g[STRETCH];
    float u[STRETCH];
    float da[STRETCH];
    for (int64_t row = begin; row < end; ++row) {
        for (int64_t c = 0; c < task->a->columns; c += STRETCH) {
            const int n = (int)min_int64(STRETCH, task->a->columns - c);
            const struct gate_places at = places_of(task, task->h, row, c);
            load(task, &at, n, g, u);
            plain_row_load(task->a->data, task->a->dtype, row * task->a->row_step + c, 1, n, da);
            for (int i = 0; i < n; ++i) {
                const float gate = g[i];
                const float upstream = da[i];
                float value = activated(plan, (enum opaq_activation)plan->activation, gate);
                value = plan->activation == OPAQ_SILU_STEP ? at_most(value, plan->limit) : value;
                g[i] = upstream * (is_gated ? factor_of(plan, u[i]) : 1.0f) * slope(plan, gate);
                u[i] = has_limit(plan) && within(u[i], plan->limit) != u[i] ? 0.0f : upstream * value;
            }
            const struct gate_places to = places_of(task, task->dh, row, c);
            plain_row_store(task->dh->data, task->dh->dtype, to.gate, to.step, n, g);
            if (is_gated) {
                plain_row_store(task->dh->data, task->dh->dtype, to.factor, to.step, n, u);
            }
        }
    }
}

void activation_forward(const struct opaq_experts_plan *plan, const struct quant_matrix *h,
                        const struct quant_matrix *a, const struct opaq_parallel *parallel) {
    struct activation_task task = {plan, h, a, NULL};
    const struct opaq_body body = {forward_rows, &task};
    parallel_run(parallel_if_worth(parallel, a->rows * a->columns), a->rows, &body);
}

void activation_backward(const struct opaq_experts_plan *plan, const struct quant_matrix *h,
                         const struct quant_matrix *da, const struct quant_matrix *dh,
                         const struct opaq_parallel *parallel) {
    struct activation_task task = {plan, h, da, dh};
    const struct opaq_body body = {backward_rows, &task};
    parallel_run(parallel_if_worth(parallel, da->rows * da->columns), da->rows, &body);
}
