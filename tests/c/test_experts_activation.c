/* test_experts_activation.c: activations of an MLP, compared with formulas in double: every activation in every
 * dtype, on all bf16 numbers and on many others, with the roundings that docs/experts.md specifies; its
 * gradient; nonfinite numbers; and that the reference's derivatives are correct. */
#include <float.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_experts.h"
#include "support_float.h"

/* Limits are exact in every dtype, so that clamping and rounding commute. */
static const char *const plans[] = {"act=silu",
                                    "act=silu_clamp limit=2.5",
                                    "act=silu_clamp limit=6 alpha=-0.75 beta=0.3",
                                    "act=swiglu_oai",
                                    "act=swiglu_oai limit=1 alpha=0.1 beta=-2",
                                    "act=swiglu_oai_packed",
                                    "act=swiglu_oai_packed limit=0.5 alpha=9",
                                    "act=silu_step limit=7",
                                    "act=silu_step limit=0.75",
                                    "act=gelu",
                                    "act=gelu_tanh",
                                    "act=relu2",
                                    "act=silu_no_mul",
                                    "act=gelu_no_mul",
                                    "act=gelu_tanh_no_mul",
                                    "act=relu2_no_mul"};
enum { PLANS = sizeof plans / sizeof plans[0] };

static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};

/* A double as a float; values beyond the largest float become infinity, which the C conversion does not
 * guarantee. */
static float to_float(double value) {
    return fabs(value) >= 0x1.ffffffp127 ? (float)copysign((double)INFINITY, value) : (float)value;
}

static double rounded(enum opaq_element dtype, double value) {
    const float single = to_float(value);
    return dtype == OPAQ_F32
               ? (double)single
               : (double)opaq_element_decode(dtype, opaq_element_encode(dtype, single, OPAQ_IEEE));
}

struct interval {
    double low, high;
};

/* An interval around a value with a relative and an absolute error. */
static struct interval around(double value, double relative, double absolute) {
    const double error = fabs(value) * relative + absolute;
    return (struct interval){value - error, value + error};
}

static struct interval round_interval(enum opaq_element dtype, struct interval x) {
    return (struct interval){rounded(dtype, x.low), rounded(dtype, x.high)};
}

/* Widens a bound by float32 rounding; infinity stays. */
static double outward(double bound, double sign) {
    return isfinite(bound) ? bound + sign * (fabs(bound) * 0x1p-23 + 0x1p-149) : bound;
}

static struct interval multiply(struct interval a, struct interval b) {
    const double p[4] = {a.low * b.low, a.low * b.high, a.high * b.low, a.high * b.high};
    struct interval result = {p[0], p[0]};
    for (int i = 1; i < 4; ++i) {
        result.low = fmin(result.low, p[i]);
        result.high = fmax(result.high, p[i]);
    }
    return (struct interval){outward(result.low, -1.0), outward(result.high, 1.0)};
}

/* Bound on the error of a float32 computation of the gate: some roundings, and those of the exponent's
 * argument, whose effect is proportional to the argument. */
static double gate_error(const struct opaq_experts_plan *plan, double g) {
    const bool is_tanh = plan->activation == OPAQ_GELU_TANH || plan->activation == OPAQ_GELU_TANH_NO_MUL;
    const double argument = is_tanh ? 1.6 * fabs(g + 0.044715 * g * g * g) : fabs((double)plan->alpha * g);
    return (8.0 + 6.0 * fmin(argument, 200.0)) * 0x1p-24;
}

/* If the exponential overflows, the gate is 0 although a float could represent it: below |g| 2^-127. */
static double underflow(const struct opaq_experts_plan *plan, double g) {
    return fmin(fabs(g), 200.0 / fabs((double)plan->alpha)) * 0x1p-127 + 0x1p-149;
}

static bool is_rounded_once(const struct opaq_experts_plan *plan) {
    return plan->activation == OPAQ_SWIGLU_OAI || plan->activation == OPAQ_SWIGLU_OAI_PACKED ||
           !opaq_activation_is_gated((enum opaq_activation)plan->activation);
}

static struct interval expected(const struct opaq_experts_plan *plan, enum opaq_element dtype, double g,
                                double u) {
    struct interval gate = around(reference_gate(plan, g), gate_error(plan, g), underflow(plan, g));
    gate = is_rounded_once(plan) ? gate : round_interval(dtype, gate);
    const struct interval factor = around(reference_factor(plan, u), 0x1p-24, 0x1p-149);
    return round_interval(dtype, multiply(gate, factor));
}

static void check_value(const char *plan, enum opaq_element dtype, double g, double u, float found) {
    const struct opaq_experts_plan parsed = experts_plan_of(plan);
    const struct interval want = expected(&parsed, dtype, g, u);
    const double exact = reference_gate(&parsed, g);
    const double gate = is_rounded_once(&parsed) ? (double)to_float(exact) : rounded(dtype, exact);
    const bool is_nan = isnan(gate * reference_factor(&parsed, u));
    const bool good = is_nan ? isnan(found) : (double)found >= want.low && (double)found <= want.high;
    if (!good) {
        CHECK_FAIL("%s, %s: of %.9g and %.9g it is %.9g, expected %.9g to %.9g", plan,
                   opaq_element_info(dtype)->name, g, u, (double)found, want.low, want.high);
    }
}

/* ---- values ---- */

/* Sets h with one pair in each row, or one number. */
static struct tensor pairs_make(const struct opaq_experts_plan *plan, enum opaq_element dtype, int64_t rows) {
    return tensor_make(rows, opaq_activation_is_gated((enum opaq_activation)plan->activation) ? 2 : 1, dtype,
                       NULL);
}

static double pair_factor(const struct tensor *h, int64_t row) {
    return opaq_proto_columns(&h->view.proto) == 2 ? (double)tensor_get(h, row, 1) : 1.0;
}

static void check_pairs(const char *plan, const struct tensor *h) {
    struct tensor a = experts_activated(h, plan);
    for (int64_t r = 0; r < opaq_proto_rows(&h->view.proto); ++r) {
        check_value(plan, (enum opaq_element)h->view.proto.dtype, (double)tensor_get(h, r, 0),
                    pair_factor(h, r), tensor_get(&a, r, 0));
    }
    tensor_free(&a);
}

static const float factors[] = {1.0f,   -0.5f, 3.25f, 100.0f,  -7.0f,   0.0f, 2.5f,
                                -2.75f, 0.75f, 1e-3f, -512.0f, 0.3125f, 7.5f};
enum { FACTORS = sizeof factors / sizeof factors[0] };

/* Each finite bf16 and f16 number as a gate. */
static void all_numbers_of_two_bytes(void) {
    enum { CODES = 1 << 16 };
    for (int d = 1; d < 3; ++d) {
        for (int i = 0; i < PLANS; ++i) {
            const struct opaq_experts_plan plan = experts_plan_of(plans[i]);
            struct tensor h = pairs_make(&plan, dtypes[d], CODES);
            int64_t rows = 0;
            for (uint32_t code = 0; code < CODES; ++code) {
                const float g = opaq_element_decode(dtypes[d], code);
                if (isfinite(g)) {
                    tensor_set(&h, rows, 0, g);
                    tensor_set(&h, rows, opaq_proto_columns(&h.view.proto) - 1,
                               opaq_proto_columns(&h.view.proto) == 2 ? factors[code % FACTORS] : g);
                    ++rows;
                }
            }
            struct tensor finite = experts_rows(&h, 0, rows);
            check_pairs(plans[i], &finite);
            tensor_free(&finite);
            tensor_free(&h);
        }
    }
}

/* Numbers of all sizes, and around the limits. */
static void many_numbers_of_four_bytes(void) {
    enum { ROWS = 4000 };
    static const double sizes[] = {1.0, 8.0, 60.0, 400.0, 1e-4, 1e-20, 1e12, 3.0};
    const int64_t shape[2] = {ROWS, 2};
    struct tensor normal = experts_tensor(shape, 2, OPAQ_F32, 1.0, 17);
    for (int i = 0; i < PLANS; ++i) {
        const struct opaq_experts_plan plan = experts_plan_of(plans[i]);
        struct tensor h = pairs_make(&plan, OPAQ_F32, ROWS);
        for (int64_t r = 0; r < ROWS; ++r) {
            const double size = sizes[r % 8];
            double g = size * (double)tensor_get(&normal, r, 0);
            if (r % 10 == 9 && plan.limit > 0.0f) {
                g = (double)plan.limit * (1.0 + (double)(r % 7 - 3) * 0x1p-23);
            }
            for (int64_t c = 0; c < opaq_proto_columns(&h.view.proto); ++c) {
                tensor_set(&h, r, c, (float)(c == 0 ? g : 4.0 * (double)tensor_get(&normal, r, 1)));
            }
        }
        check_pairs(plans[i], &h);
        tensor_free(&h);
    }
    tensor_free(&normal);
}

/* ---- numbers that are not finite ---- */

/* Any gate and factor, set by biases: one expert for each pair, and products of zeros. */
static void check_specials(const char *text, enum opaq_element dtype, const float *values, int count) {
    const struct opaq_experts_plan plan = experts_plan_of(text);
    const bool gated = opaq_activation_is_gated((enum opaq_activation)plan.activation) != 0;
    const int64_t pairs = gated ? (int64_t)count * count : count;
    const struct experts_sizes size = {pairs, 1, pairs, 1, 1};
    struct experts_layer layer = experts_layer_make(&size, text, dtype);
    const struct experts_given given = {.no_down_bias = true};
    for (int64_t p = 0; p < pairs; ++p) {
        layer.ids[p] = p;
        tensor_set(&layer.x, p, 0, 0.0f);
        tensor_set(&layer.weights, p, 0, 1.0f);
        tensor_set(&layer.down, p, 0, 1.0f);
        tensor_set(&layer.gate_up_bias, p, 0, values[p % count]);
        if (gated) {
            tensor_set(&layer.gate_up_bias, p, 1, values[p / count]);
        }
    }
    struct op_result result = experts_call("moe", &layer, text, &given);
    for (int64_t p = 0; p < pairs && result.outputs.count == 1; ++p) {
        const double g = (double)tensor_get(&layer.gate_up_bias, p, 0); /* rounded to the dtype */
        const double u = gated ? (double)tensor_get(&layer.gate_up_bias, p, 1) : 1.0;
        memcpy(layer.x.view.buffer[0].data, result.outputs.tensor[0].data, tensor_bytes(&layer.x, 0));
        check_value(text, dtype, g, u, tensor_get(&layer.x, p, 0));
    }
    op_result_free(&result);
    experts_layer_free(&layer);
}

static void special_numbers(void) {
    const float values[] = {support_infinity(), -support_infinity(), support_nan(), 0.0f,    -0.0f, 3.0e38f,
                            -3.0e38f,           0x1p-149f,           -2.0f,         65000.0f};
    for (int d = 0; d < 3; ++d) {
        for (int i = 0; i < PLANS; ++i) {
            check_specials(plans[i], dtypes[d], values, sizeof values / sizeof values[0]);
        }
    }
}

/* ---- gradients ---- */

/* Compares the reference's slopes with differences of the reference, to find errors in the formulas. */
static void slopes_are_derivatives(void) {
    const double step = 0x1p-20;
    for (int i = 0; i < PLANS; ++i) {
        const struct opaq_experts_plan plan = experts_plan_of(plans[i]);
        for (int k = -400; k <= 400; ++k) {
            const double x = (double)k * 0.02517;
            const double edge = fabs(fabs(x) - (double)plan.limit);
            const double gate =
                (reference_gate(&plan, x + step) - reference_gate(&plan, x - step)) / (2.0 * step);
            const double factor =
                (reference_factor(&plan, x + step) - reference_factor(&plan, x - step)) / (2.0 * step);
            const bool is_corner = plan.activation == OPAQ_SILU_STEP &&
                                   fabs(reference_gate(&plan, x) - (double)plan.limit) < 4.0 * step &&
                                   reference_gate_slope(&plan, x) != 0.0;
            if (edge > 4.0 * step && !is_corner) {
                CHECK(fabs(gate - reference_gate_slope(&plan, x)) < step);
                CHECK(fabs(factor - reference_factor_slope(&plan, x)) < step);
            }
        }
    }
}

/* dg = da f g'(g), du = da G(g), rounded once to h's dtype by the library. The slope is a difference of numbers
 * of about |g| + 2, so its error is relative to that. */
static void check_gradient(const char *text, const struct tensor *h, const struct tensor *da) {
    const struct opaq_experts_plan plan = experts_plan_of(text);
    const enum opaq_element dtype = (enum opaq_element)h->view.proto.dtype;
    struct tensor dh = experts_activation_gradient(h, da, text);
    for (int64_t r = 0; r < opaq_proto_rows(&h->view.proto); ++r) {
        const double g = (double)tensor_get(h, r, 0);
        const double u = pair_factor(h, r);
        const double upstream = (double)tensor_get(da, r, 0);
        const double error = gate_error(&plan, g);
        const double factor = reference_factor(&plan, u);
        const double slope = reference_gate_slope(&plan, g);
        const double slope_error = error * (fabs(slope) + 2.0 + fmin(fabs(g), 4.0)) + 0x1p-126;
        const double dg = upstream * factor * slope;
        const double dg_error = fabs(upstream * factor) * slope_error + fabs(dg) * 0x1p-22 + 0x1p-148;
        const struct interval want = round_interval(dtype, (struct interval){dg - dg_error, dg + dg_error});
        const double found = (double)tensor_get(&dh, r, 0);
        if (!(found >= want.low && found <= want.high)) {
            CHECK_FAIL("%s, %s: dg at %.9g, %.9g times %.9g is %.9g, expected %.9g to %.9g", text,
                       opaq_element_info(dtype)->name, g, u, upstream, found, want.low, want.high);
        }
        if (opaq_proto_columns(&h->view.proto) == 2) {
            const struct interval gate = around(reference_gate(&plan, g), error, underflow(&plan, g));
            const struct interval passed = {reference_factor_slope(&plan, u) * upstream,
                                            reference_factor_slope(&plan, u) * upstream};
            const struct interval du = round_interval(dtype, multiply(gate, passed));
            const double second = (double)tensor_get(&dh, r, 1);
            if (!(second >= du.low && second <= du.high)) {
                CHECK_FAIL("%s, %s: du at %.9g, %.9g times %.9g is %.9g, expected %.9g to %.9g", text,
                           opaq_element_info(dtype)->name, g, u, upstream, second, du.low, du.high);
            }
        }
    }
    tensor_free(&dh);
}

static void gradients_in_every_dtype(void) {
    enum { ROWS = 3000 };
    static const double sizes[] = {1.0, 6.0, 2.0, 30.0, 1e-3, 0.25};
    const int64_t shape[2] = {ROWS, 2};
    struct tensor normal = experts_tensor(shape, 2, OPAQ_F32, 1.0, 23);
    struct tensor da = experts_tensor(shape, 1, OPAQ_F32, 1.5, 24);
    struct tensor da_column = tensor_make(ROWS, 1, OPAQ_F32, NULL);
    memcpy(da_column.view.buffer[0].data, da.view.buffer[0].data, tensor_bytes(&da_column, 0));
    for (int i = 0; i < 3 * PLANS; ++i) {
        const char *text = plans[i / 3];
        const struct opaq_experts_plan plan = experts_plan_of(text);
        struct tensor h = pairs_make(&plan, dtypes[i % 3], ROWS);
        for (int64_t r = 0; r < ROWS; ++r) {
            for (int64_t c = 0; c < opaq_proto_columns(&h.view.proto); ++c) {
                const bool at_limit = plan.limit > 0.0f && (r + 3 * c) % 13 == 0;
                const float value = (float)sizes[(r + c) % 6] * tensor_get(&normal, r, c);
                tensor_set(&h, r, c, at_limit ? (r % 2 && c ? -plan.limit : plan.limit) : value);
            }
        }
        check_gradient(text, &h, &da_column);
        tensor_free(&h);
    }
    tensor_free(&da_column);
    tensor_free(&da);
    tensor_free(&normal);
}

static const struct test_case tests[] = {TEST(all_numbers_of_two_bytes), TEST(many_numbers_of_four_bytes),
                                         TEST(special_numbers), TEST(slopes_are_derivatives),
                                         TEST(gradients_in_every_dtype)};
TEST_MAIN(tests)
