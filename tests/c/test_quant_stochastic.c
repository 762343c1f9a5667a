/* test_quant_stochastic.c: stochastic rounding is reproducible, depends on seed, offset and position, and is
 * unbiased. docs/formats.md, "Stochastic rounding" and "Random bits". */
#include <math.h>

#include "base/philox.h"
#include "check.h"
#include "support_quant.h"
#include "support_spec.h"

static void for_stochastic_specs(void (*check)(const struct opaq_spec *spec, const char *what)) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count; ++i) {
        if (list.spec[i].options & OPAQ_STOCHASTIC) {
            check(&list.spec[i], spec_text(&list.spec[i]).text);
        }
    }
    spec_list_free(&list);
}

static struct tensor with_random(const struct tensor *x, const struct opaq_spec *spec, uint64_t seed,
                                 uint64_t offset) {
    struct opaq_quantize_args args = args_for(spec);
    args.random = (struct opaq_random){seed, offset};
    return quantized(x, spec, &args);
}

static void check_seeds(const struct opaq_spec *spec, const char *what) {
    static const struct opaq_random others[] = {{8, 9},
                                                {7, 10},
                                                {7, 9 + ((uint64_t)1 << 32)},
                                                {7 + ((uint64_t)1 << 32), 9},
                                                {9, 7},
                                                {7, ((uint64_t)1 << 63) - 1}};
    struct tensor x = tensor_make(48, 64, OPAQ_F32, NULL);
    tensor_fill(&x, FILL_NORMAL, 2);
    struct tensor first = with_random(&x, spec, 7, 9);
    struct tensor again = with_random(&x, spec, 7, 9);
    CHECK(first_difference(&first, &again) < 0);
    for (size_t i = 0; i < sizeof others / sizeof others[0]; ++i) {
        struct tensor other = with_random(&x, spec, others[i].seed, others[i].offset);
        for (int usage = 1; usage <= 2; ++usage) { /* the codes of each copy differ, the scales do not */
            const int data = opaq_proto_find(&first.view.proto, OPAQ_ROLE_DATA, (enum opaq_usage)usage);
            const int scale = opaq_proto_find(&first.view.proto, OPAQ_ROLE_SCALE, (enum opaq_usage)usage);
            if (data >= 0) {
                const size_t bytes = first.view.buffer[data].bytes;
                if (memcmp(first.view.buffer[data].data, other.view.buffer[data].data, bytes) == 0) {
                    CHECK_FAIL("%s: usage %d does not depend on random %zu", what, usage, i);
                }
                CHECK_BYTES(other.view.buffer[scale].data, first.view.buffer[scale].data,
                            first.view.buffer[scale].bytes, "%s: scales of usage %d", what, usage);
            }
        }
        tensor_free(&other);
    }
    tensor_free(&again);
    tensor_free(&first);
    tensor_free(&x);
}

static void seeds_and_offsets(void) { for_stochastic_specs(check_seeds); }

/* The same number at many positions, with a 1 in each row and column block of 16 to fix the scales: the mean
 * must be the number. A uniform byte makes rounding up 1/256 of a step too rare at most; the remaining
 * deviation is random, at most five standard deviations of at most half a step each. */
static void check_mean(const struct opaq_spec *spec, const char *what) {
    static const float numbers[] = {0.3f, -0.71f, 0.013f};
    if ((spec->options & OPAQ_HADAMARD) && (spec->usage & OPAQ_COLUMNWISE)) {
        return; /* the transformed numbers are not all alike */
    }
    for (int n = 0; n < 3; ++n) {
        struct tensor x = tensor_make(96, 96, OPAQ_F32, NULL);
        for (int64_t k = 0; k < 96 * 96; ++k) {
            tensor_set(&x, k / 96, k % 96, (k / 96 + k % 96) % 16 == 0 ? 1.0f : numbers[n]);
        }
        struct tensor q = with_random(&x, spec, (uint64_t)n, 0);
        for (int usage = 1; usage <= 2; ++usage) {
            if ((spec->usage & usage) == 0) {
                continue;
            }
            struct tensor y = dequantized(&q, usage);
            double sum = 0.0;
            double low = 1e30;
            double high = -1e30;
            int count = 0;
            for (int64_t k = 0; k < 96 * 96; ++k) {
                if ((k / 96 + k % 96) % 16 != 0) {
                    const double value = (double)tensor_get(&y, k / 96, k % 96);
                    sum += value;
                    low = fmin(low, value);
                    high = fmax(high, value);
                    ++count;
                }
            }
            const double step = high - low; /* the two neighbouring codes, or the code itself if the number is
                                             * one */
            const double off = fabs(sum / count - (double)numbers[n]);
            if (!(off <= step / 256.0 + 5.0 * 0.5 * step / sqrt((double)count) + 1e-6)) {
                CHECK_FAIL("%s: the mean of %g is off by %g of a step", what, (double)numbers[n], off / step);
            }
            tensor_free(&y);
        }
        tensor_free(&q);
        tensor_free(&x);
    }
}

static void right_on_average(void) { for_stochastic_specs(check_mean); }

/* Random byte of (r, c) by the text of docs/formats.md. */
static uint32_t random_of(uint64_t seed, uint64_t offset, int columnwise, int64_t r, int64_t c, int64_t n) {
    const uint64_t g = (uint64_t)(r * ((n + 15) / 16) + c / 16);
    const struct philox_block counter = {{(uint32_t)g, (uint32_t)(g >> 32), (uint32_t)offset,
                                          (uint32_t)(offset >> 32) + (columnwise ? 0x80000000u : 0)}};
    const struct philox_block block = philox(counter, (uint32_t)seed, (uint32_t)(seed >> 32));
    return block.word[c % 16 / 4] >> (c % 4 * 8) & 255;
}

/* fp8 with a given scale of 1, so that the code depends on x and the random bits only. */
static void bits_depend_on_the_documented_position(void) {
    enum { ROWS = 19, COLUMNS = 37 };
    const uint64_t seed = 0x1234567890ABCDEFu;
    const uint64_t offset = 0x0FEDCBA987654321u;
    const float one = 1.0f;
    struct tensor x = tensor_make(ROWS, COLUMNS, OPAQ_F32, NULL);
    struct tensor q = tensor_make(ROWS, COLUMNS, OPAQ_F32, "fp8+both+delayed+sr");
    tensor_fill(&x, FILL_NORMAL, 4);
    const struct opaq_quantize_args args = {.scale = &one, .random = {seed, offset}};
    CHECK_EQ_INT(opaq_quantize(&x.view, &args, NULL, &q.view, NULL), OPAQ_OK);
    const uint8_t *data = q.view.buffer[0].data;
    const uint8_t *transpose = q.view.buffer[1].data;
    for (int r = 0; r < ROWS; ++r) {
        for (int c = 0; c < COLUMNS; ++c) {
            const uint32_t expected = opaq_element_encode_stochastic(OPAQ_E4M3, tensor_get(&x, r, c),
                                                                     random_of(seed, offset, 0, r, c, COLUMNS));
            CHECK_EQ_INT(data[r * COLUMNS + c], expected);
            CHECK_EQ_INT(transpose[c * ROWS + r], expected);
        }
    }
    tensor_free(&q);
    /* fp8row columnwise has separate bits, by column; the scale is fixed by a 448 in each row and column */
    struct tensor p = tensor_make(ROWS, ROWS, OPAQ_F32, "fp8row+both+sr");
    struct tensor y = tensor_make(ROWS, ROWS, OPAQ_F32, NULL);
    tensor_fill(&y, FILL_NORMAL, 5);
    for (int i = 0; i < ROWS; ++i) {
        tensor_set(&y, i, i, 448.0f);
    }
    const struct opaq_quantize_args only_random = {.random = {seed, offset}};
    CHECK_EQ_INT(opaq_quantize(&y.view, &only_random, NULL, &p.view, NULL), OPAQ_OK);
    for (int k = 0; k < 2 * ROWS * ROWS; ++k) {
        const int columnwise = k / (ROWS * ROWS);
        const int r = k / ROWS % ROWS;
        const int c = k % ROWS;
        const uint8_t *codes = p.view.buffer[2 * columnwise].data;
        const float value = columnwise ? tensor_get(&y, c, r) : tensor_get(&y, r, c);
        CHECK_EQ_INT(
            codes[r * ROWS + c],
            opaq_element_encode_stochastic(OPAQ_E4M3, value, random_of(seed, offset, columnwise, r, c, ROWS)));
    }
    tensor_free(&y);
    tensor_free(&p);
    tensor_free(&x);
}

static const struct test_case tests[] = {TEST(seeds_and_offsets), TEST(right_on_average),
                                         TEST(bits_depend_on_the_documented_position)};
TEST_MAIN(tests)
