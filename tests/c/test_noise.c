/* test_noise.c: opaq_noise_measure against sums over the dequantized tensor; threads; errors. */
#include <math.h>

#include "check.h"
#include "support_float.h"
#include "support_quant.h"
#include "support_spec.h"

static int is_close(double actual, double expected) {
    return fabs(actual - expected) <= 1e-12 * fabs(expected);
}

/* The definition, element by element. */
static struct opaq_noise expected_noise(const struct tensor *x, const struct tensor *q, int usage) {
    struct tensor y = dequantized(q, usage);
    struct opaq_noise sum = {0.0, 0.0};
    for (int64_t r = 0; r < opaq_proto_rows(&x->view.proto); ++r) {
        for (int64_t c = 0; c < opaq_proto_columns(&x->view.proto); ++c) {
            const double value = (double)tensor_get(x, r, c);
            const double difference = value - (double)tensor_get(&y, r, c);
            sum.signal += value * value;
            sum.noise += difference * difference;
        }
    }
    tensor_free(&y);
    return sum;
}

static void measures_every_copy_of_every_spec(void) {
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count; ++i) {
        const struct opaq_spec *spec = &list.spec[i];
        struct tensor x = tensor_make(70, 300, dtypes[i % 3], NULL); /* partial blocks in both directions */
        tensor_fill(&x, i % 2 ? FILL_OUTLIERS : FILL_NORMAL, (uint64_t)i);
        struct tensor q = quantized(&x, spec, NULL);
        for (int usage = 0; usage <= OPAQ_COLUMNWISE; ++usage) {
            struct opaq_noise noise;
            if (usage != 0 && (spec->usage & usage) == 0) {
                CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, usage, NULL, &noise, NULL),
                             OPAQ_ERROR_ARGUMENT);
                continue;
            }
            const struct opaq_noise expected = expected_noise(&x, &q, usage);
            CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, usage, NULL, &noise, NULL), OPAQ_OK);
            if (!is_close(noise.signal, expected.signal) || !is_close(noise.noise, expected.noise)) {
                (void)CHECK_FAIL("%s, usage %d: %.17g %.17g, expected %.17g %.17g", spec_text(spec).text, usage,
                                 noise.signal, noise.noise, expected.signal, expected.noise);
            }
        }
        tensor_free(&q);
        tensor_free(&x);
    }
    spec_list_free(&list);
}

static void threads_do_not_matter(void) {
    const struct opaq_spec spec = spec_of("nvfp4");
    struct tensor x = tensor_make(261, 300, OPAQ_BF16, NULL);
    tensor_fill(&x, FILL_NORMAL, 1);
    struct tensor q = quantized(&x, &spec, NULL);
    struct opaq_noise alone;
    struct opaq_noise together;
    CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, 0, NULL, &alone, NULL), OPAQ_OK);
    for (int threads = 2; threads <= 7; threads += 5) {
        struct opaq_pool *pool;
        CHECK_EQ_INT(opaq_pool_create(threads, &pool, NULL), OPAQ_OK);
        const struct opaq_parallel parallel = opaq_pool_parallel(pool);
        const struct opaq_execution execution = {.parallel = &parallel};
        CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, 0, &execution, &together, NULL), OPAQ_OK);
        CHECK(alone.signal == together.signal && alone.noise == together.noise);
        opaq_pool_destroy(pool);
    }
    tensor_free(&q);
    tensor_free(&x);
}

static void decibels(void) {
    const struct opaq_noise twenty = {.signal = 400.0, .noise = 4.0};
    const struct opaq_noise none = {.signal = 4.0, .noise = 0.0};
    CHECK(is_close(opaq_noise_sqnr(&twenty), 20.0));
    CHECK(opaq_noise_sqnr(&none) > 1e300);
    struct tensor x = tensor_make(3, 40, OPAQ_F32, NULL);
    const struct opaq_spec spec = spec_of("mxfp8");
    tensor_fill(&x, FILL_NORMAL, 1);
    tensor_set(&x, 1, 7, support_nan());
    struct tensor q = quantized(&x, &spec, NULL);
    struct opaq_noise noise;
    CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, 0, NULL, &noise, NULL), OPAQ_OK);
    CHECK(isnan(opaq_noise_sqnr(&noise)));
    tensor_free(&q);
    tensor_free(&x);
}

static void an_empty_tensor_has_none(void) {
    const struct opaq_spec spec = spec_of("fp8row");
    struct tensor x = tensor_make(0, 40, OPAQ_F32, NULL);
    struct tensor q = quantized(&x, &spec, NULL);
    struct opaq_noise noise = {1.0, 1.0};
    CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, 0, NULL, &noise, NULL), OPAQ_OK);
    CHECK(noise.signal == 0.0 && noise.noise == 0.0);
    tensor_free(&q);
    tensor_free(&x);
}

static void refuses_what_does_not_fit(void) {
    const struct opaq_spec spec = spec_of("nvfp4");
    struct tensor x = tensor_make(4, 32, OPAQ_F32, NULL);
    struct tensor other = tensor_make(4, 48, OPAQ_F32, NULL);
    tensor_fill(&x, FILL_NORMAL, 1);
    struct tensor q = quantized(&x, &spec, NULL);
    struct opaq_noise noise = {7.0, 7.0};
    struct opaq_error error;
    CHECK_EQ_INT(opaq_noise_measure(NULL, &q.view, 0, NULL, &noise, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_STR(error.text, "noise: x is NULL");
    CHECK_EQ_INT(opaq_noise_measure(&x.view, &x.view, 0, NULL, &noise, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_STR(error.text, "noise: q is a plain tensor, expected a quantized one");
    CHECK_EQ_INT(opaq_noise_measure(&other.view, &q.view, 0, NULL, &noise, &error), OPAQ_ERROR_SHAPE);
    CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, 3, NULL, &noise, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_STR(error.text, "noise: usage is 3, expected 0 or one that the tensor has (1)");
    CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, 0, NULL, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_STR(error.text, "noise: the place for the result is NULL");
    CHECK(noise.signal == 7.0 && noise.noise == 7.0);
    tensor_free(&q);
    tensor_free(&other);
    tensor_free(&x);
}

static const struct test_case tests[] = {TEST(measures_every_copy_of_every_spec), TEST(threads_do_not_matter),
                                         TEST(decibels), TEST(an_empty_tensor_has_none),
                                         TEST(refuses_what_does_not_fit)};
TEST_MAIN(tests)
