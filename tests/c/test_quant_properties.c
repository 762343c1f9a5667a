/* test_quant_properties.c: properties of quantization that hold for every kernel: errors within the rounding of
 * the codes, stability of requantizing, scaling by powers of two, columns like rows. See docs/formats.md. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_quant.h"
#include "support_spec.h"

/* ---- error bounds ---- */

/* Dense, so that bounds can be computed in double; columns of `x` become rows with OPAQ_COLUMNWISE. */
struct matrix {
    int64_t rows;
    int64_t columns;
    double *value;
};

static struct matrix matrix_of(const struct tensor *x, int usage) {
    const int64_t rows = opaq_proto_rows(&x->view.proto);
    const int64_t columns = opaq_proto_columns(&x->view.proto);
    const int flip = usage == OPAQ_COLUMNWISE;
    struct matrix m = {flip ? columns : rows, flip ? rows : columns,
                       malloc((size_t)(rows * columns) * sizeof(double))};
    if (m.value == NULL) {
        exit(1);
    }
    for (int64_t r = 0; r < m.rows; ++r) {
        for (int64_t c = 0; c < m.columns; ++c) {
            m.value[r * m.columns + c] = (double)(flip ? tensor_get(x, c, r) : tensor_get(x, r, c));
        }
    }
    return m;
}

/* In groups of 16 along each row, by the definition of the Sylvester matrix: entry (i, j) is (-1)^popcount(i & j). */
static void hadamard(struct matrix *m, unsigned mask) {
    for (int64_t g = 0; g < m->rows * m->columns; g += 16) {
        double in[16];
        for (int i = 0; i < 16; ++i) {
            in[i] = mask >> i & 1 ? -m->value[g + i] : m->value[g + i];
        }
        for (int i = 0; i < 16; ++i) {
            double sum = 0.0;
            for (int j = 0; j < 16; ++j) {
                sum += __builtin_popcount((unsigned)(i & j)) % 2 ? -in[j] : in[j];
            }
            m->value[g + i] = sum / 4.0;
        }
    }
}

static double amax_of(const struct matrix *m, int64_t r, int64_t c, int64_t block_rows, int64_t block_columns) {
    double amax = 0.0;
    for (int64_t i = r - r % block_rows; i < m->rows && i < r - r % block_rows + block_rows; ++i) {
        for (int64_t j = c - c % block_columns; j < m->columns && j < c - c % block_columns + block_columns;
             ++j) {
            amax = fmax(amax, fabs(m->value[i * m->columns + j]));
        }
    }
    return amax;
}

/* Rows and columns that share a scale; "Arithmetic" of docs/formats.md. */
static void block_of(const struct opaq_spec *s, const struct matrix *m, int64_t block[2]) {
    static const int64_t whole = -1;
    static const int64_t sizes[OPAQ_FORMAT_COUNT][2] = {{-1, -1}, {1, -1}, {1, 128}, {128, 128},
                                                        {1, 32},  {1, 32}, {1, 16}};
    block[0] = sizes[s->format][0];
    block[1] = sizes[s->format][1];
    block[0] = s->options & OPAQ_2D ? block[1] : block[0];
    block[0] = block[0] == whole ? m->rows : block[0];
    block[1] = block[1] == whole ? m->columns : block[1];
}

/* Bound on the distance of the result from x, with b the block's amax and a the tensor's (or row's). Rounding
 * to nearest has an error of half a step, stochastic rounding of a whole one. A step is at most
 * 2^-mantissa_bits of the value, and at least that of the subnormals, `unit` as a fraction of the largest code;
 * its fraction of b depends on how much of the code range the scale leaves unused. */
static double bound_of(const struct opaq_spec *s, double x, double b, double a) {
    const double steps = s->options & OPAQ_STOCHASTIC ? 1.0 : 0.5;
    const double relative = s->element == OPAQ_E2M1 ? 0.5 : s->element == OPAQ_E5M2 ? 0.25 : 0.125;
    const double unit = s->element == OPAQ_E2M1 ? 0.5 : s->element == OPAQ_E5M2 ? 0x1p-16 : 0x1p-9;
    const double largest = s->element == OPAQ_E2M1 ? 6.0 : s->element == OPAQ_E5M2 ? 57344.0 : 448.0;
    const double slack = 1.0 + 0x1p-17; /* float32 arithmetic, and modelopt's rounded logarithm */
    double per_code = b / largest;      /* value of one code unit, at most */
    double cut = 0.0;                   /* error of saturation */
    switch ((enum opaq_format)s->format) {
    case OPAQ_FP8:
    case OPAQ_FP8ROW:
    case OPAQ_FP8BLK1:
    case OPAQ_FP8BLK2:
        per_code = s->options & OPAQ_DELAYED ? 1.0 / 3.0 : s->options & OPAQ_POW2 ? 2.0 * per_code : per_code;
        break;
    case OPAQ_MXFP8:
    case OPAQ_MXFP4: /* a power of two: up to twice as large as needed, or too small and saturating */
        per_code *= 2.0;
        if (s->rule ==
            OPAQ_RULE_OCP) { /* b lies in [2^emax, 2^(emax+1)) units, the largest code is 1.75 or 1.5 2^emax */
            cut = s->element == OPAQ_E2M1 ? b / 4.0 : b / 8.0;
        } else if (s->rule == OPAQ_RULE_COMPRESSED_TENSORS) { /* b lies in [0.875 2^emax, 1.75 2^emax) units */
            cut = s->element == OPAQ_E2M1 ? b / 7.0 : 0.0;
        }
        break;
    case OPAQ_NVFP4: {
        /* E4M3 holds the scale to 2^-4 of itself, or to half a subnormal step, which is `grain` of the scale's unit */
        const double grain = 0x1p-10 * a / (6.0 * s->e4m3_max);
        per_code = (s->options & OPAQ_4OVER6 ? b / 4.0 : b / 6.0) * (1.0 + 0x1p-4) + 2.0 * grain;
        cut = b * 0x1p-4 + 6.0 * grain;
        break;
    }
    }
    return (fmax(steps * fmax(fabs(x) * relative, unit * per_code), cut)) * slack;
}

static void check_bounds(const struct opaq_spec *s, const struct tensor *x, const struct tensor *q, int usage) {
    struct tensor y = dequantized(q, usage);
    struct matrix in = matrix_of(x, usage);
    struct matrix out = matrix_of(&y, usage);
    const int rht = (s->options & OPAQ_HADAMARD) && usage == OPAQ_COLUMNWISE;
    if (rht) { /* the error arises after the transform, which also rounds the values to bf16 */
        hadamard(&in, s->hadamard_mask);
        hadamard(&out, s->hadamard_mask);
    }
    int64_t block[2];
    block_of(s, &in, block);
    const double tensor_amax = amax_of(&in, 0, 0, in.rows, in.columns);
    int bad = 0;
    for (int64_t r = 0; r < in.rows && !bad; ++r) {
        const double a = s->options & OPAQ_ROWSCALED ? amax_of(&in, r, 0, 1, in.columns) : tensor_amax;
        double b = 0.0;
        for (int64_t c = 0; c < in.columns && !bad; ++c) {
            b = c % block[1] == 0 ? amax_of(&in, r, c, block[0], block[1]) : b;
            const double v = in.value[r * in.columns + c];
            const double w = out.value[r * in.columns + c];
            const double bound = bound_of(s, v, b, a) + (rht ? fabs(v) * 0x1p-8 + b * 0x1p-17 : 0.0);
            bad = !(fabs(v - w) <= bound);
            if (bad) {
                CHECK_FAIL(
                    "%s usage %d (%lld, %lld): %g became %g, off by %g, allowed %g (block %g, tensor %g)",
                    spec_text(s).text, usage, (long long)r, (long long)c, v, w, fabs(v - w), bound, b, a);
            }
        }
    }
    free(in.value);
    free(out.value);
    tensor_free(&y);
}

static void errors_stay_within_bounds(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    struct tensor x = tensor_make(48, 160, OPAQ_F32, NULL);
    for (int fill = FILL_NORMAL; fill <= FILL_OUTLIERS; ++fill) {
        tensor_fill(&x, (enum tensor_fill)fill, 7);
        for (int i = 0; i < list.count; ++i) {
            struct opaq_spec spec = list.spec[i];
            if (fill == FILL_OUTLIERS && (spec.options & OPAQ_DELAYED)) {
                continue; /* a given scale may saturate */
            }
            struct tensor q = quantized(&x, &spec, NULL);
            for (int usage = 1; usage <= 2; ++usage) {
                if (spec.usage & usage) {
                    check_bounds(&spec, &x, &q, usage);
                }
            }
            tensor_free(&q);
        }
    }
    tensor_free(&x);
    spec_list_free(&list);
}

/* ---- quantizing dequantized values ---- */

/* Numbers below 1 in magnitude with a 1 in every 16 along rows and columns, so that every block's amax is 1. */
static struct tensor with_regular_ones(int64_t rows, int64_t columns, uint64_t seed) {
    struct tensor x = tensor_make(rows, columns, OPAQ_F32, NULL);
    tensor_fill(&x, FILL_NORMAL, seed);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            const float sign = (r + c) % 32 == 0 ? 1.0f : -1.0f;
            tensor_set(&x, r, c, (r + c) % 16 == 0 ? sign : tensor_get(&x, r, c) / 8.0f);
        }
    }
    return x;
}

/* The specs for which requantizing must return the same bytes, and why:
 * - fp8 formats with pow2, and MX under every rule: the amax 1 times a power of two is a code (256, 32768 or 4), so it
 *   comes back as 1 exactly, gives the same scale again, and every value is a code times a power of two. Stochastic
 *   rounding does not change codes either, with any random bits.
 * - fp8 with the first amax given: the scale is the same, and a code that was rounded twice by up to 2^-24 is still
 *   nearest to itself. Not with sr, which those roundings affect; not without the amax, whose last bit may change.
 * - nvfp4 with the first amaxes given, for the same reason; a block's largest code is 6, so b * (G / 6) is the old scale
 *   up to roundings that E4M3 removes. Not with sr; not with rht, which rounds to bf16; not with 4over6, where both
 *   candidates may be exact the second time; not if blocks are so small that their scales are subnormal in E4M3.
 * - For e2m1 under compressed-tensors and modelopt only the values: a negative zero becomes code 0 (or 8). Likewise for
 *   e4m3 under compressed-tensors with a given scale, which may be so large that there are negative zeros. */
enum again { NOTHING, SAME_VALUES, SAME_BYTES };

static enum again requantized_result(const struct opaq_spec *s) {
    const int by_comparison = s->rule == OPAQ_RULE_COMPRESSED_TENSORS || s->rule == OPAQ_RULE_MODELOPT;
    if (s->format == OPAQ_MXFP8 || s->format == OPAQ_MXFP4 || (s->options & OPAQ_POW2)) {
        return by_comparison && s->element == OPAQ_E2M1 ? SAME_VALUES : SAME_BYTES;
    }
    if (s->options & (OPAQ_STOCHASTIC | OPAQ_HADAMARD | OPAQ_4OVER6)) {
        return NOTHING;
    }
    if (s->format == OPAQ_FP8) {
        const int drops_zeros = s->rule == OPAQ_RULE_COMPRESSED_TENSORS && (s->options & OPAQ_DELAYED);
        return drops_zeros ? SAME_VALUES : SAME_BYTES;
    }
    return s->format != OPAQ_NVFP4 ? NOTHING : by_comparison ? SAME_VALUES : SAME_BYTES;
}

/* Whether two float32 tensors have the same values; zeros of both signs are equal. */
static int same_values(const struct tensor *a, const struct tensor *b) {
    const int64_t rows = opaq_proto_rows(&a->view.proto);
    const int64_t columns = opaq_proto_columns(&a->view.proto);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            if (tensor_get(a, r, c) != tensor_get(b, r, c)) {
                return 0;
            }
        }
    }
    return 1;
}

static void quantized_again(const struct tensor *x, const struct opaq_spec *spec) {
    const enum again expected = requantized_result(spec);
    if (expected == NOTHING || spec->usage == OPAQ_BOTH) { /* the two copies have different values */
        return;
    }
    float amax = 0.0f;
    struct opaq_quantize_args args = args_for(spec);
    args.amax = spec->format == OPAQ_FP8 ? &amax : NULL;
    struct tensor q = quantized(x, spec, &args);
    struct tensor y = dequantized(&q, 0);
    const int stored = opaq_proto_find(&q.view.proto, OPAQ_ROLE_AMAX, (enum opaq_usage)spec->usage);
    const float **given = spec->usage == OPAQ_ROWWISE ? &args.amax_rowwise : &args.amax_columnwise;
    if (spec->format == OPAQ_FP8 && !(spec->options & OPAQ_DELAYED)) {
        *given = &amax;
    } else if (stored >= 0) {
        *given = q.view.buffer[stored].data;
    }
    args.amax = NULL;
    args.random.seed = 999;
    struct tensor again = quantized(&y, spec, &args);
    struct tensor z = dequantized(&again, 0);
    if (expected == SAME_BYTES && first_difference(&q, &again) >= 0) {
        CHECK_FAIL("%s: buffer %d changes when quantized again", spec_text(spec).text,
                   first_difference(&q, &again));
    }
    if (!same_values(&y, &z)) {
        CHECK_FAIL("%s: values change when quantized again", spec_text(spec).text);
    }
    tensor_free(&z);
    tensor_free(&again);
    tensor_free(&y);
    tensor_free(&q);
}

static void codes_come_back(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    struct tensor ones = with_regular_ones(50, 150, 3);
    struct tensor random = tensor_make(50, 150, OPAQ_F32, NULL);
    tensor_fill(&random, FILL_NORMAL, 5);
    int seen = 0;
    for (int i = 0; i < list.count; ++i) {
        quantized_again(&ones, &list.spec[i]);
        if (list.spec[i].format == OPAQ_FP8 ? !(list.spec[i].options & OPAQ_POW2)
                                            : list.spec[i].format == OPAQ_NVFP4) {
            quantized_again(&random, &list.spec[i]); /* these do not need an amax of 1 */
        }
        seen += requantized_result(&list.spec[i]) != NOTHING && list.spec[i].usage != OPAQ_BOTH;
    }
    printf("  %d specs\n", seen);
    tensor_free(&random);
    tensor_free(&ones);
    spec_list_free(&list);
}

/* ---- powers of two ---- */

/* MX: 2^k times the input gives scale bytes larger by k and the same data, as long as no exponent is near its
 * limits. Under modelopt also no amax may lie within a few ulp above a power of two times the largest code. */
static void mx_follows_powers_of_two(void) {
    static const int shifts[] = {1, -1, 7, -13, 40, -40};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    struct tensor x = tensor_make(40, 100, OPAQ_F32, NULL);
    struct tensor shifted = tensor_make(40, 100, OPAQ_F32, NULL);
    tensor_fill(&x, FILL_OUTLIERS, 11);
    for (int i = 0; i < list.count; ++i) {
        const struct opaq_spec *spec = &list.spec[i];
        if (spec->format != OPAQ_MXFP8 && spec->format != OPAQ_MXFP4) {
            continue;
        }
        struct tensor q = quantized(&x, spec, NULL);
        const int shift = shifts[i % 6];
        for (int64_t k = 0; k < 40 * 100; ++k) {
            tensor_set(&shifted, k / 100, k % 100, ldexpf(tensor_get(&x, k / 100, k % 100), shift));
        }
        struct tensor p = quantized(&shifted, spec, NULL);
        for (int k = 0; k < opaq_proto_buffer_count(&q.view.proto); ++k) {
            struct opaq_buffer buffer;
            (void)opaq_proto_buffer(&q.view.proto, k, &buffer, NULL);
            uint8_t *expected = q.view.buffer[k].data;
            for (size_t byte = 0; buffer.role == OPAQ_ROLE_SCALE && byte < buffer.bytes; ++byte) {
                expected[byte] = (uint8_t)(expected[byte] == 0 ? 0 : expected[byte] + shift); /* 0 is padding */
            }
            CHECK_BYTES(p.view.buffer[k].data, expected, buffer.bytes, "%s %s times 2^%d", spec_text(spec).text,
                        buffer.name, shift);
        }
        tensor_free(&p);
        tensor_free(&q);
    }
    tensor_free(&shifted);
    tensor_free(&x);
    spec_list_free(&list);
}

/* ---- columns are rows of the transposed tensor ---- */

/* Compares bytes if the copy is stored transposed, otherwise (MX formats) values. Not with rht, which only
 * columns have; sr draws other bits for columns (and fp8 the same as for its rows), so not with sr either. */
static void columnwise_is_rowwise_of_transposed(void) {
    static const int64_t sizes[][2] = {{40, 100}, {1, 200}, {200, 1}, {129, 130}, {16, 16}};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count; ++i) {
        struct opaq_spec rowwise = list.spec[i];
        struct opaq_spec columnwise = list.spec[i];
        if (rowwise.usage != OPAQ_ROWWISE || (rowwise.options & (OPAQ_HADAMARD | OPAQ_STOCHASTIC))) {
            continue;
        }
        columnwise.usage = OPAQ_COLUMNWISE;
        for (int k = 0; k < 5; ++k) {
            struct tensor x = tensor_make(sizes[k][0], sizes[k][1], OPAQ_BF16, NULL);
            tensor_fill(&x, FILL_OUTLIERS, (uint64_t)(i + k));
            struct tensor xt = transposed(&x);
            struct tensor a = quantized(&x, &columnwise, NULL);
            struct tensor b = quantized(&xt, &rowwise, NULL);
            if (rowwise.format == OPAQ_MXFP8 || rowwise.format == OPAQ_MXFP4) {
                struct tensor from_a = dequantized(&a, 0);
                struct tensor from_b = dequantized(&b, 0);
                struct tensor transposed_b = transposed(&from_b);
                CHECK_BYTES(from_a.view.buffer[0].data, transposed_b.view.buffer[0].data,
                            tensor_bytes(&from_a, 0), "%s of %lld x %lld", spec_text(&columnwise).text,
                            (long long)sizes[k][0], (long long)sizes[k][1]);
                tensor_free(&transposed_b);
                tensor_free(&from_b);
                tensor_free(&from_a);
            } else if (first_difference(&a, &b) >= 0) {
                CHECK_FAIL("%s of %lld x %lld: buffer %d differs", spec_text(&columnwise).text,
                           (long long)sizes[k][0], (long long)sizes[k][1], first_difference(&a, &b));
            }
            tensor_free(&b);
            tensor_free(&a);
            tensor_free(&xt);
            tensor_free(&x);
        }
    }
    spec_list_free(&list);
}

/* ---- tensors without elements ---- */

/* With 2^40 empty rows or columns: the amax is 0 at once, not after a loop over them. */
static void amax_of_no_elements_is_0(void) {
    static const int64_t sizes[][2] = {{(int64_t)1 << 40, 0}, {0, (int64_t)1 << 40}};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    int compared = 0;
    for (int k = 0; k < 2; ++k) {
        struct tensor x = tensor_make(sizes[k][0], sizes[k][1], OPAQ_BF16, NULL);
        for (int i = 0; i < list.count; ++i) {
            struct opaq_spec spec = list.spec[i];
            for (spec.usage = OPAQ_ROWWISE; spec.usage <= OPAQ_COLUMNWISE; ++spec.usage) {
                const enum opaq_usage usage = (enum opaq_usage)spec.usage;
                struct opaq_proto proto;
                float amax = 1.0f;
                if (opaq_proto_make(sizes[k], 2, OPAQ_BF16, &spec, tensor_cpu, &proto, NULL) == OPAQ_OK &&
                    opaq_amax_count(&proto, usage) == 1 && (spec.options & OPAQ_GLOBAL) == 0) {
                    CHECK_EQ_INT(opaq_amax(&x.view, &spec, usage, NULL, &amax, 1, NULL), OPAQ_OK);
                    CHECK(amax == 0.0f);
                    ++compared;
                }
            }
        }
        tensor_free(&x);
    }
    CHECK(compared > 0);
    spec_list_free(&list);
}

static const struct test_case tests[] = {
    TEST(errors_stay_within_bounds), TEST(codes_come_back), TEST(mx_follows_powers_of_two),
    TEST(columnwise_is_rowwise_of_transposed), TEST(amax_of_no_elements_is_0)};
TEST_MAIN(tests)
