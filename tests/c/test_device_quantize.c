/* test_device_quantize.c: quantize, dequantize and amax on the test device in the role of CUDA, compared with
 * the CPU byte for byte: on the case list of the benchmark, in every shape and with every kind of data. With
 * OPAQ_TEST_DEVICE it is the CUDA back end, otherwise the CPU's table. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "opaq/opaq.h"
#include "support_hiding.h"
#include "support_quant.h"
#include "support_spec.h"

#include "../cases/quant_cases.h"

enum { MEMORY = 2 << 20 };

static struct opaq_view device_view(struct hiding *hiding, const struct opaq_view *view) {
    struct opaq_view placed = *view;
    placed.proto.device = hiding_device;
    for (int i = 0; i < opaq_proto_buffer_count(&view->proto); ++i) {
        placed.buffer[i].data = hiding_copy(hiding, view->buffer[i].data, view->buffer[i].bytes);
    }
    return placed;
}

static void compare(const struct hiding *hiding, const struct opaq_view *actual,
                    const struct opaq_view *expected, const char *how, const struct quant_case *one, int fill) {
    for (int i = 0; i < opaq_proto_buffer_count(&expected->proto); ++i) {
        CHECK_BYTES(hiding_host(hiding, actual->buffer[i].data), expected->buffer[i].data,
                    expected->buffer[i].bytes, "%s of %s, %lld x %lld of %s, data %d, buffer %d", how,
                    one->spec, (long long)opaq_proto_rows(&expected->proto),
                    (long long)opaq_proto_columns(&expected->proto), opaq_element_info(one->dtype)->name, fill,
                    i);
    }
}

static void check_status(enum opaq_status status, const struct quant_case *one,
                         const struct opaq_error *error) {
    if (status != OPAQ_OK) {
        CHECK_FAIL("%s: %s", one->spec, error->text);
    }
}

static void check_back(struct hiding *hiding, const struct tensor *q, const struct opaq_view *device_q,
                       const struct quant_case *one, int usage, int fill) {
    struct opaq_error error;
    struct tensor y = plain_like(q);
    const struct opaq_view device_y = device_view(hiding, &y.view);
    check_status(opaq_dequantize(&q->view, usage, NULL, &y.view, &error), one, &error);
    hiding_hide(hiding);
    check_status(opaq_dequantize(device_q, usage, NULL, &device_y, &error), one, &error);
    hiding_reveal(hiding);
    compare(hiding, &device_y, &y.view, "dequantize", one, fill);
    tensor_free(&y);
}

/* With computed figures or (`is_given`) with figures in the device's memory. */
static void check_case(struct hiding *hiding, const struct quant_case *one, const int64_t *shape, int fill,
                       bool is_given) {
    const struct opaq_spec spec = spec_of(one->spec);
    const float figures[2] = {3.25f, 0.75f};
    struct opaq_quantize_args args = {.random = {.seed = 0x123456789ABCDEFu, .offset = 77}};
    struct opaq_error error;
    struct tensor x = tensor_make(shape[0], shape[1], one->dtype, NULL);
    struct tensor q = quantized_like(&x, &spec);
    tensor_fill(&x, (enum tensor_fill)fill, 1);
    hiding->used = 0;
    hiding->copied = 0;
    const struct opaq_view device_x = device_view(hiding, &x.view);
    const struct opaq_view device_q = device_view(hiding, &q.view);
    float *const amax = hiding_copy(hiding, figures, sizeof figures);
    float expected_amax = -1.0f;
    float *const device_amax = hiding_copy(hiding, &expected_amax, sizeof expected_amax);
    struct opaq_quantize_args device_args = args;
    if (is_given) {
        args.amax_rowwise = spec.usage & OPAQ_ROWWISE ? figures : NULL;
        args.amax_columnwise = spec.usage & OPAQ_COLUMNWISE ? figures : NULL;
        device_args.amax_rowwise = spec.usage & OPAQ_ROWWISE ? amax : NULL;
        device_args.amax_columnwise = spec.usage & OPAQ_COLUMNWISE ? amax : NULL;
    }
    if (spec.format == OPAQ_FP8) {
        args.amax = &expected_amax;
        device_args.amax = device_amax;
    }
    check_status(opaq_quantize(&x.view, &args, NULL, &q.view, &error), one, &error);
    hiding_hide(hiding);
    check_status(opaq_quantize(&device_x, &device_args, NULL, &device_q, &error), one, &error);
    hiding_reveal(hiding);
    compare(hiding, &device_q, &q.view, is_given ? "quantize with a given amax" : "quantize", one, fill);
    CHECK_BYTES(hiding_host(hiding, device_amax), &expected_amax, sizeof expected_amax, "the amax of %s",
                one->spec);
    for (int usage = OPAQ_ROWWISE; !is_given && usage <= OPAQ_COLUMNWISE; ++usage) {
        if (usage & spec.usage) {
            check_back(hiding, &q, &device_q, one, usage, fill);
        }
    }
    tensor_free(&x);
    tensor_free(&q);
}

static void check_shapes(const int64_t (*shapes)[2], int shape_count, const enum tensor_fill *fills,
                         int fill_count) {
    struct hiding hiding = hiding_make(MEMORY);
    int count = 0;
    hiding_install();
    for (int i = 0; i < QUANT_CASE_COUNT; ++i) {
        for (int s = 0; s < shape_count; ++s) {
            for (int f = 0; f < fill_count; ++f, ++count) {
                check_case(&hiding, &quant_cases[i], shapes[s], (int)fills[f], false);
            }
        }
    }
    hiding_remove();
    hiding_free(&hiding);
    printf("  %d tensors\n", count);
}

static void cases_have_the_bytes_of_the_cpu(void) {
    static const enum tensor_fill all[] = {FILL_NORMAL, FILL_OUTLIERS, FILL_ZERO,    FILL_TINY,
                                           FILL_HUGE,   FILL_NAN,      FILL_INFINITY};
    check_shapes(quant_case_shapes, QUANT_CASE_SHAPE_COUNT, all, FILL_COUNT);
}

/* Shapes for kernels that take whole parts of rows: partial tiles of 128 x 128, rows that are no multiple of 16, columns that are
 * one of 16 only, rows that a block of threads shares and (the last) does not keep in registers. */
static void whole_parts_have_the_bytes_of_the_cpu(void) {
    static const int64_t shapes[][2] = {{144, 160}, {24, 288}, {160, 48}, {3, 2304}};
    static const int64_t longest[][2] = {{1, 16640}};
    static const enum tensor_fill some[] = {FILL_OUTLIERS, FILL_NAN};
    check_shapes(shapes, (int)(sizeof shapes / sizeof shapes[0]), some, 2);
    check_shapes(longest, 1, some, 1);
}

static void given_figures(void) {
    struct hiding hiding = hiding_make(MEMORY);
    hiding_install();
    for (int i = 0; i < QUANT_CASE_COUNT; ++i) {
        const struct opaq_spec spec = spec_of(quant_cases[i].spec);
        const bool takes_one = (spec.format == OPAQ_FP8 || spec.format == OPAQ_NVFP4) &&
                               !(spec.options & (OPAQ_DELAYED | OPAQ_ROWSCALED));
        for (int s = 0; takes_one && s < QUANT_CASE_SHAPE_COUNT; ++s) {
            check_case(&hiding, &quant_cases[i], quant_case_shapes[s], FILL_NORMAL, true);
        }
    }
    hiding_remove();
    hiding_free(&hiding);
}

static const struct test_case tests[] = {TEST(cases_have_the_bytes_of_the_cpu),
                                         TEST(whole_parts_have_the_bytes_of_the_cpu), TEST(given_figures)};
TEST_MAIN(tests)
