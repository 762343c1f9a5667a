/* test_cli_weight_error.c: the error figures, on numbers with known results. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "cli/report/weight_error.h"

static struct weight_error error_of(const float *original, const float *quantized, size_t count) {
    struct error_sums *const sums = malloc(sizeof *sums);
    struct weight_error error;
    error_sums_clear(sums);
    error_sums_add(sums, original, quantized, count, 0);
    weight_error_of(sums, &error);
    free(sums);
    return error;
}

static int is_near(double actual, double expected) { return fabs(actual - expected) <= 1e-12 * fabs(expected); }

static void simple_figures(void) {
    const float original[] = {3, -4, 0, 0};
    const float quantized[] = {3, -4, 0.5F, 0};
    const struct weight_error error = error_of(original, quantized, 4);
    CHECK(is_near(error.sqnr, 20)); /* 25 / 0.25 */
    CHECK(is_near(error.cosine, 25 / (5 * sqrt(25.25))));
    CHECK(is_near(error.relative, 0.1));
    CHECK(is_near(error.rms, 2.5));
    CHECK(error.largest == 0.5);
    CHECK_EQ_INT(error.largest_at, 2);
    CHECK_EQ_INT(error.exact, 3);
    CHECK_EQ_INT(error.elements, 4);
}

static void zero_weights(void) {
    const float zeros[4] = {0, -0.0F, 0, 0};
    const float others[4] = {0, 0, 1, 0};
    const struct weight_error equal = error_of(zeros, zeros, 4);
    CHECK(isinf(equal.sqnr) && equal.sqnr > 0);
    CHECK(equal.cosine == 1);
    CHECK_EQ_INT(equal.largest_at, -1);
    const struct weight_error lost = error_of(others, zeros, 4);
    CHECK(lost.sqnr == 0);
    CHECK(lost.cosine == 0);
    const struct weight_error made = error_of(zeros, others, 4);
    CHECK(isinf(made.sqnr) && made.sqnr < 0);
    CHECK(isinf(made.relative));
    const struct weight_error nothing = error_of(zeros, zeros, 0);
    CHECK(isinf(nothing.sqnr) && nothing.sqnr > 0);
    CHECK(nothing.rms == 0);
}

static void counts_nonfinite(void) {
    const float original[] = {1, NAN, INFINITY, 2, NAN};
    const float quantized[] = {1, NAN, 5, -INFINITY, 3};
    struct error_sums *const sums = malloc(sizeof *sums);
    error_sums_clear(sums);
    error_sums_add(sums, original, quantized, 5, 0);
    struct weight_error error;
    weight_error_of(sums, &error);
    CHECK_EQ_INT(error.original_not_finite, 3);
    CHECK_EQ_INT(error.quantized_not_finite, 2);
    CHECK_EQ_INT(sums->skipped, 4);
    CHECK_EQ_INT(sums->agreeing, 1);
    CHECK_EQ_INT(error.exact, 1);
    CHECK(error.rms == 1);
    free(sums);
}

enum { COUNT = 1000 };

static void fill(float *original, float *quantized) {
    uint32_t state = 1;
    for (int i = 0; i < COUNT; ++i) {
        state = state * 1664525U + 1013904223U;
        original[i] = (float)(int32_t)state / 2147483648.0F;
        quantized[i] = rintf(original[i] * 8) / 8;
    }
}

static void joins_chunks(void) {
    float original[COUNT];
    float quantized[COUNT];
    fill(original, quantized);
    struct error_sums *const sums = malloc(2 * sizeof *sums);
    const size_t first = 317;
    error_sums_clear(&sums[0]);
    error_sums_clear(&sums[1]);
    error_sums_add(&sums[0], original, quantized, first, 0);
    error_sums_add(&sums[1], original + first, quantized + first, COUNT - first, (int64_t)first);
    error_sums_join(&sums[0], &sums[1]);
    struct weight_error joined;
    weight_error_of(&sums[0], &joined);
    const struct weight_error whole = error_of(original, quantized, COUNT);
    CHECK(is_near(joined.sqnr, whole.sqnr));
    CHECK(joined.largest == whole.largest);
    CHECK_EQ_INT(joined.largest_at, whole.largest_at);
    CHECK_EQ_INT(joined.exact, whole.exact);
    CHECK_BYTES(joined.histogram, whole.histogram, sizeof whole.histogram, "the histogram");
    free(sums);
}

static void takes_the_first_of_equal_errors(void) {
    const float original[] = {0, 1, 1, 1};
    const float quantized[] = {0, 2, 0, 2};
    CHECK_EQ_INT(error_of(original, quantized, 4).largest_at, 1);
}

static void fills_the_histogram(void) {
    /* rms 1; errors of 2^-1.75 and 2^-1.25 are in adjacent half octaves, tiny and huge ones in the outer
     * bins */
    const float original[] = {1, 1, 1, 1};
    const float quantized[] = {1 + 0.297F, 1 - 0.42F, 1.0F - 0x1p-22F, 1e7F};
    const struct weight_error error = error_of(original, quantized, 4);
    CHECK_EQ_INT(error.histogram[0], 1);
    CHECK_EQ_INT(error.histogram[2 * ERROR_OCTAVES - 4], 1);
    CHECK_EQ_INT(error.histogram[2 * ERROR_OCTAVES - 3], 1);
    CHECK_EQ_INT(error.histogram[ERROR_BINS - 1], 1);
}

static const struct test_case tests[] = {
    TEST(simple_figures),
    TEST(zero_weights),
    TEST(counts_nonfinite),
    TEST(joins_chunks),
    TEST(takes_the_first_of_equal_errors),
    TEST(fills_the_histogram),
};
TEST_MAIN(tests)
