/* test_quant_invariance.c: conditions that must not change a byte: threads, the caller's floating-point
 * settings, strides of the input, its number of dimensions, the usage of a call. For every spec. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_float.h"
#include "support_quant.h"
#include "support_spec.h"

/* Calls `check` for every spec, on outliers or on subnormals, huge numbers, NaNs or infinities in turn. */
static void for_every_spec_once(int64_t rows, int64_t columns, int is_special,
                                void (*check)(const struct tensor *x, const struct opaq_spec *spec,
                                              const char *what)) {
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count; ++i) {
        const struct spec_text text = spec_text(&list.spec[i]);
        struct tensor x = tensor_make(rows, columns, dtypes[i % 3], NULL);
        tensor_fill(&x, is_special ? (enum tensor_fill)(i / 3 % FILL_COUNT) : FILL_OUTLIERS, (uint64_t)i);
        check(&x, &list.spec[i], text.text);
        tensor_free(&x);
    }
    spec_list_free(&list);
}

static void for_every_spec(int64_t rows, int64_t columns,
                           void (*check)(const struct tensor *x, const struct opaq_spec *spec,
                                         const char *what)) {
    for_every_spec_once(rows, columns, 1, check);
    for_every_spec_once(rows, columns, 0, check);
}

static int check_same(const struct tensor *a, const struct tensor *b, const char *what, const char *how) {
    const int differs = first_difference(a, b);
    return differs < 0 ? 1 : CHECK_FAIL("%s: %s: buffer %d differs", what, how, differs);
}

/* ---- threads ---- */

/* Several panels in each direction, partial ones too, and more elements than one thread gets. */
enum { LARGE_ROWS = 261, LARGE_COLUMNS = 131 };

static struct opaq_pool *pools[4];

static void check_threads(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    struct tensor expected = quantized(x, spec, NULL);
    struct tensor expected_y = dequantized(&expected, 0);
    for (int i = 0; i < 4; ++i) {
        const struct opaq_parallel parallel = opaq_pool_parallel(pools[i]);
        const struct opaq_execution execution = {.parallel = &parallel};
        struct tensor q = quantized_on(x, spec, NULL, &parallel);
        struct tensor y = plain_like(&q);
        CHECK_EQ_INT(opaq_dequantize(&q.view, 0, &execution, &y.view, NULL), OPAQ_OK);
        (void)check_same(&q, &expected, what, "threads");
        (void)check_same(&y, &expected_y, what, "threads, back");
        tensor_free(&y);
        tensor_free(&q);
    }
    tensor_free(&expected_y);
    tensor_free(&expected);
}

static void threads_do_not_matter(void) {
    static const int counts[4] = {1, 2, 3, 7};
    for (int i = 0; i < 4; ++i) {
        CHECK_EQ_INT(opaq_pool_create(counts[i], &pools[i], NULL), OPAQ_OK);
    }
    for_every_spec_once(LARGE_ROWS, LARGE_COLUMNS, 1, check_threads);
    for (int i = 0; i < 4; ++i) {
        opaq_pool_destroy(pools[i]);
    }
}

/* A caller's threads may cut the range anywhere and run it in any order: here one by one, from the end. */
static void run_backwards(void *context, int64_t count, const struct opaq_body *body) {
    ++*(int *)context;
    for (int64_t i = count - 1; i >= 0; --i) {
        body->call(body->argument, i, i + 1);
    }
}

static void check_backwards(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    int runs = 0;
    const struct opaq_parallel parallel = {run_backwards, &runs};
    struct tensor expected = quantized(x, spec, NULL);
    struct tensor q = quantized_on(x, spec, NULL, &parallel);
    (void)check_same(&q, &expected, what, "backwards");
    CHECK(runs > 0);
    tensor_free(&q);
    tensor_free(&expected);
}

static void pieces_do_not_matter(void) { for_every_spec_once(LARGE_ROWS, LARGE_COLUMNS, 0, check_backwards); }

/* ---- floating-point settings ---- */

static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};

/* Setting i: a rounding mode, the last four with flush-to-zero as well. */
static struct float_setting change_setting(int i) {
    const struct float_setting before = float_setting_get();
    (void)fesetround(modes[i % 4]);
    if (i >= 4) {
        (void)float_setting_flush_to_zero();
    }
    return before;
}

static int setting_is(struct float_setting expected) {
    const struct float_setting now = float_setting_get();
    return now.rounding == expected.rounding && now.control == expected.control;
}

static void check_settings(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    struct tensor expected = quantized(x, spec, NULL);
    struct tensor expected_y = dequantized(&expected, 0);
    struct tensor q = quantized_like(x, spec);
    struct tensor y = plain_like(&q);
    const struct opaq_quantize_args args = args_for(spec);
    for (int i = 1; i < 8; ++i) {
        const struct float_setting before = change_setting(i);
        const struct float_setting set = float_setting_get();
        const enum opaq_status first = opaq_quantize(&x->view, &args, NULL, &q.view, NULL);
        const enum opaq_status second = opaq_dequantize(&q.view, 0, NULL, &y.view, NULL);
        const int kept = setting_is(set);
        float_setting_put(before);
        CHECK(first == OPAQ_OK && second == OPAQ_OK);
        if (!kept) {
            CHECK_FAIL("%s: setting %d is not restored", what, i);
        }
        (void)check_same(&q, &expected, what, "floating-point settings");
        (void)check_same(&y, &expected_y, what, "floating-point settings, back");
    }
    tensor_free(&y);
    tensor_free(&q);
    tensor_free(&expected_y);
    tensor_free(&expected);
}

static void settings_do_not_matter(void) { for_every_spec(20, 50, check_settings); }

/* Threads inherit the settings of the thread that started them. */
static void settings_of_pool_threads_do_not_matter(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    const struct float_setting before = change_setting(5);
    struct opaq_pool *pool = NULL;
    const enum opaq_status status = opaq_pool_create(3, &pool, NULL);
    float_setting_put(before);
    CHECK_EQ_INT(status, OPAQ_OK);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    struct tensor x = tensor_make(LARGE_ROWS, LARGE_COLUMNS, OPAQ_F32, NULL);
    tensor_fill(&x, FILL_TINY, 3);
    for (int i = 0; i < list.count; ++i) {
        struct tensor expected = quantized(&x, &list.spec[i], NULL);
        struct tensor q = quantized_on(&x, &list.spec[i], NULL, &parallel);
        (void)check_same(&q, &expected, spec_text(&list.spec[i]).text, "a pool with other settings");
        tensor_free(&q);
        tensor_free(&expected);
    }
    tensor_free(&x);
    opaq_pool_destroy(pool);
    spec_list_free(&list);
}

/* The other operations: the same bits, and the settings are restored. */
static void settings_and_other_operations(void) {
    struct tensor x = tensor_make(40, 40, OPAQ_F32, NULL);
    tensor_fill(&x, FILL_TINY, 9);
    const struct opaq_spec spec = spec_of("nvfp4+both+rht+rowscaled");
    float expected[40] = {0};
    float actual[40] = {0};
    CHECK_EQ_INT(opaq_amax(&x.view, &spec, OPAQ_COLUMNWISE, NULL, expected, 40, NULL), OPAQ_OK);
    for (int i = 1; i < 8; ++i) {
        float history[2][3] = {{support_float(1), 3.0f, support_float(0x00400000u)}, {0.0f, 0.0f, 0.0f}};
        float scale[3] = {1.0f, 1.0f, 1.0f};
        const struct opaq_delayed_state state = {history[0], scale, 2, 3};
        const struct float_setting before = change_setting(i);
        const struct float_setting set = float_setting_get();
        const enum opaq_status first = opaq_amax(&x.view, &spec, OPAQ_COLUMNWISE, NULL, actual, 40, NULL);
        const enum opaq_status second =
            opaq_delayed_update(&state, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL);
        const uint32_t code = opaq_element_encode_stochastic(OPAQ_BF16, support_float(0x00012345u), 0xFFFF);
        const uint32_t nearest = opaq_element_encode(OPAQ_BF16, support_float(0x00012345u), OPAQ_SATURATE);
        const float smallest = opaq_element_decode(OPAQ_BF16, 1);
        const int kept = setting_is(set);
        float_setting_put(before);
        CHECK(first == OPAQ_OK && second == OPAQ_OK && kept);
        CHECK_BYTES(actual, expected, sizeof actual, "amax under setting %d", i);
        CHECK_EQ_INT(support_bits(scale[0]), 0x7F7FFFFF); /* 448 / 2^-149 is beyond the largest float */
        CHECK_EQ_INT(support_bits(scale[1]), 0x43155555); /* 448 / 3 */
        CHECK_EQ_INT(support_bits(scale[2]), 0x7F7FFFFF); /* 448 / 2^-127 */
        CHECK_EQ_INT(support_bits(history[1][0]), 1);
        CHECK_EQ_INT(code, 2);
        CHECK_EQ_INT(nearest, 1);
        CHECK_EQ_INT(support_bits(smallest), 0x00010000);
    }
    tensor_free(&x);
}

/* ---- strides ---- */

static void check_strided(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    const int64_t rows = opaq_proto_rows(&x->view.proto);
    const int64_t columns = opaq_proto_columns(&x->view.proto);
    struct tensor wide = tensor_make(rows, columns + 7, (enum opaq_element)x->view.proto.dtype, NULL);
    tensor_fill(&wide, FILL_INFINITY, 1); /* the padding between the rows must not affect the result */
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            tensor_set(&wide, r, c, tensor_get(x, r, c));
        }
    }
    struct tensor strided = wide;
    strided.view.proto = x->view.proto; /* rows lie columns + 7 apart */
    struct tensor expected = quantized(x, spec, NULL);
    struct tensor q = quantized(&strided, spec, NULL);
    (void)check_same(&q, &expected, what, "strided");
    /* dequantizing into it does not change the padding */
    struct tensor gaps = tensor_make(rows, columns + 7, OPAQ_F32, NULL);
    struct tensor y = dequantized(&expected, 0);
    const struct tensor whole = gaps;
    gaps.view.proto = y.view.proto;
    CHECK_EQ_INT(opaq_dequantize(&q.view, 0, NULL, &gaps.view, NULL), OPAQ_OK);
    for (int64_t r = 0; r < rows; ++r) {
        const float *row = (const float *)gaps.view.buffer[0].data + r * (columns + 7);
        const float *contiguous = (const float *)y.view.buffer[0].data + r * columns;
        CHECK_BYTES(row, contiguous, (size_t)columns * 4, "%s: strided output, row %lld", what, (long long)r);
        for (int k = 0; k < 7; ++k) {
            CHECK_EQ_INT(support_bits(row[columns + k]), 0xA5A5A5A5);
        }
    }
    gaps = whole;
    tensor_free(&y);
    tensor_free(&gaps);
    tensor_free(&q);
    tensor_free(&expected);
    tensor_free(&wide);
}

static void strides_do_not_matter(void) { for_every_spec(37, 45, check_strided); }

/* The initial contents of the output do not matter: every byte is written. */
static void check_overwrites(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    const struct opaq_quantize_args args = args_for(spec);
    struct tensor expected = quantized(x, spec, NULL);
    struct tensor q = quantized_like(x, spec);
    for (int i = 0; i < opaq_proto_buffer_count(&q.view.proto); ++i) {
        memset(q.view.buffer[i].data, 0x3C, q.view.buffer[i].bytes);
    }
    CHECK_EQ_INT(opaq_quantize(&x->view, &args, NULL, &q.view, NULL), OPAQ_OK);
    (void)check_same(&q, &expected, what, "other memory before");
    tensor_free(&q);
    tensor_free(&expected);
}

static void every_byte_is_written(void) {
    for_every_spec(35, 47, check_overwrites);
    for_every_spec(129, 1, check_overwrites);
    for_every_spec(1, 129, check_overwrites);
}

/* ---- shape ---- */

static void check_flattened(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    struct tensor expected = quantized(x, spec, NULL);
    static const int64_t shapes[][5] = {{3, 7, 40, 0, 0}, {1, 21, 1, 40, 0}, {7, 1, 3, 1, 40}};
    for (int i = 0; i < 3; ++i) {
        struct tensor deep = *x;
        deep.view.proto.rank = 3 + i;
        memcpy(deep.view.proto.shape, shapes[i], sizeof shapes[i]);
        struct tensor q = quantized(&deep, spec, NULL);
        (void)check_same(&q, &expected, what, "more dimensions");
        tensor_free(&q);
    }
    tensor_free(&expected);
}

static void leading_dimensions_are_rows(void) { for_every_spec(21, 40, check_flattened); }

/* A tensor and the same one padded with zeros to whole blocks agree on the part they share. Not with sr, whose
 * random bits depend on the width. */
static void check_ragged(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    const int64_t rows = opaq_proto_rows(&x->view.proto);
    const int64_t columns = opaq_proto_columns(&x->view.proto);
    if (spec->options & OPAQ_STOCHASTIC) {
        return;
    }
    struct tensor padded = tensor_make((rows + 127) / 128 * 128, (columns + 127) / 128 * 128,
                                       (enum opaq_element)x->view.proto.dtype, NULL);
    memset(padded.view.buffer[0].data, 0, padded.view.buffer[0].bytes);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = 0; c < columns; ++c) {
            tensor_set(&padded, r, c, tensor_get(x, r, c));
        }
    }
    struct tensor q = quantized(x, spec, NULL);
    struct tensor p = quantized(&padded, spec, NULL);
    for (int usage = 1; usage <= 2; ++usage) {
        if (spec->usage & usage) {
            struct tensor from_q = dequantized(&q, usage);
            struct tensor from_p = dequantized(&p, usage);
            int same = 1;
            for (int64_t k = 0; k < rows * columns && same; ++k) {
                same = support_bits(tensor_get(&from_q, k / columns, k % columns)) ==
                       support_bits(tensor_get(&from_p, k / columns, k % columns));
            }
            if (!same) {
                CHECK_FAIL("%s: usage %d of a padded tensor differs", what, usage);
            }
            tensor_free(&from_p);
            tensor_free(&from_q);
        }
    }
    tensor_free(&p);
    tensor_free(&q);
    tensor_free(&padded);
}

static void ragged_is_padded_with_zeros(void) {
    for_every_spec(35, 45, check_ragged);
    for_every_spec(17, 33, check_ragged);
}

/* ---- requested copies ---- */

static void check_both(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    if (spec->usage != OPAQ_BOTH) {
        return;
    }
    struct tensor both = quantized(x, spec, NULL);
    for (int usage = 1; usage <= 2; ++usage) {
        struct opaq_spec alone = *spec;
        alone.usage = (uint8_t)usage;
        struct tensor one = quantized(x, &alone, NULL);
        for (int role = OPAQ_ROLE_DATA; role <= OPAQ_ROLE_AMAX; ++role) {
            const int a = opaq_proto_find(&both.view.proto, (enum opaq_role)role, (enum opaq_usage)usage);
            const int b = opaq_proto_find(&one.view.proto, (enum opaq_role)role, (enum opaq_usage)usage);
            CHECK((a < 0) == (b < 0));
            if (a >= 0 && b >= 0) {
                CHECK_BYTES(both.view.buffer[a].data, one.view.buffer[b].data, one.view.buffer[b].bytes,
                            "%s: usage %d alone", what, usage);
            }
        }
        tensor_free(&one);
    }
    tensor_free(&both);
}

static void both_copies_equal_separate_ones(void) { for_every_spec(50, 70, check_both); }

/* The value that opaq_quantize stores: the amax, or the scale that the rule computes from it. Written from
 * docs/formats.md. */
static void stored_from_amax(const struct opaq_spec *spec, float *amax, int64_t count) {
    for (int64_t i = 0; (spec->options & OPAQ_GLOBAL) && i < count; ++i) {
        const float divisor = 1.0f / fmaxf(amax[i], 0x1p-126f) * 2688.0f;
        amax[i] = spec->rule == OPAQ_RULE_MODELOPT ? amax[i] / 2688.0f : isfinite(divisor) ? divisor : 1.0f;
    }
}

/* opaq_amax returns the amax that opaq_quantize computes, and passing it as an argument changes nothing. */
static void check_amax(const struct tensor *x, const struct opaq_spec *spec, const char *what) {
    float *amax[3] = {NULL, NULL, NULL};
    struct tensor expected = quantized(x, spec, NULL);
    struct opaq_quantize_args args = args_for(spec);
    float returned = -1.0f;
    struct opaq_spec asked = *spec; /* a global scale is stored, but the amax is the argument */
    asked.options &= (uint16_t)~OPAQ_GLOBAL;
    args.amax = spec->format == OPAQ_FP8 ? &returned : NULL;
    for (int usage = 1; usage <= 2; ++usage) {
        const int64_t count = opaq_amax_count(&expected.view.proto, (enum opaq_usage)usage);
        const int stored = opaq_proto_find(&expected.view.proto, OPAQ_ROLE_AMAX, (enum opaq_usage)usage);
        if (count == 0) {
            continue;
        }
        amax[usage] = malloc((size_t)count * sizeof(float));
        CHECK_EQ_INT(opaq_amax(&x->view, &asked, (enum opaq_usage)usage, NULL, amax[usage], count, NULL),
                     OPAQ_OK);
        stored_from_amax(spec, amax[usage], count);
        if (stored >= 0) {
            CHECK_BYTES(amax[usage], expected.view.buffer[stored].data, (size_t)count * 4,
                        "%s: amax of usage %d", what, usage);
        } else {
            struct tensor q = quantized(x, spec, &args);
            CHECK_BYTES(amax[usage], &returned, 4, "%s: the amax returned", what);
            (void)check_same(&q, &expected, what, "amax returned");
            tensor_free(&q);
        }
    }
    args.amax_rowwise = amax[1];
    args.amax_columnwise = amax[2];
    struct tensor q = quantized(x, spec, &args);
    (void)check_same(&q, &expected, what, "amax given");
    tensor_free(&q);
    tensor_free(&expected);
    free(amax[1]);
    free(amax[2]);
}

static void given_amax_is_the_computed_one(void) { for_every_spec(70, 50, check_amax); }

static const struct test_case tests[] = {
    TEST(threads_do_not_matter),         TEST(pieces_do_not_matter),
    TEST(settings_do_not_matter),        TEST(settings_of_pool_threads_do_not_matter),
    TEST(settings_and_other_operations), TEST(strides_do_not_matter),
    TEST(every_byte_is_written),         TEST(leading_dimensions_are_rows),
    TEST(ragged_is_padded_with_zeros),   TEST(both_copies_equal_separate_ones),
    TEST(given_amax_is_the_computed_one)};
TEST_MAIN(tests)
