/* test_hiding.c: operators and functions on memory that they cannot read. All tests that call operators also
 * run on the hiding back end (support_op.c); here are the calls without an operator: quantize, dequantize,
 * amax, noise, delayed scaling and runners on views of hidden memory. */
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "opaq/opaq.h"
#include "support_hiding.h"
#include "support_quant.h"
#include "support_runner_layer.h"
#include "support_spec.h"

enum { ROWS = 67, WHOLE_ROWS = 80, COLUMNS = 96, MEMORY = 1 << 20 };

static struct opaq_view hidden_view(struct hiding *hiding, const struct opaq_view *view) {
    struct opaq_view hidden = *view;
    hidden.proto.device = hiding_device;
    for (int i = 0; i < opaq_proto_buffer_count(&view->proto); ++i) {
        hidden.buffer[i].data = hiding_copy(hiding, view->buffer[i].data, view->buffer[i].bytes);
    }
    return hidden;
}

static void check_buffers(const struct hiding *hiding, const struct opaq_view *hidden,
                          const struct opaq_view *expected, const char *what) {
    for (int i = 0; i < opaq_proto_buffer_count(&expected->proto); ++i) {
        CHECK_BYTES(hiding_host(hiding, hidden->buffer[i].data), expected->buffer[i].data,
                    expected->buffer[i].bytes, "%s, buffer %d", what, i);
    }
}

static bool same_sum(double a, double b) { return a == b || (isnan(a) && isnan(b)); }

/* Quantize, dequantize, amax and noise by one spec. */
static void check_spec(const struct opaq_spec *spec, int64_t rows, enum opaq_element dtype,
                       enum tensor_fill fill) {
    struct hiding hiding = hiding_make(MEMORY);
    struct tensor x = tensor_make(rows, COLUMNS, dtype, NULL);
    tensor_fill(&x, fill, 5);
    struct tensor q = quantized(&x, spec, NULL);
    struct tensor y = dequantized(&q, 0);
    struct tensor empty_q = quantized_like(&x, spec);
    struct tensor empty_y = plain_like(&q);
    struct opaq_quantize_args args = args_for(spec);
    struct opaq_noise noise;
    struct opaq_noise hidden_noise;
    struct opaq_error error;
    CHECK_EQ_INT(opaq_noise_measure(&x.view, &q.view, 0, NULL, &noise, NULL), OPAQ_OK);
    const struct opaq_view hidden_x = hidden_view(&hiding, &x.view);
    const struct opaq_view hidden_q = hidden_view(&hiding, &empty_q.view);
    const struct opaq_view hidden_y = hidden_view(&hiding, &empty_y.view);
    if (args.scale != NULL) {
        args.scale = hiding_copy(&hiding, args.scale, sizeof *args.scale);
    }
    hiding_hide(&hiding);
    CHECK_EQ_INT(opaq_quantize(&hidden_x, &args, NULL, &hidden_q, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_dequantize(&hidden_q, 0, NULL, &hidden_y, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_noise_measure(&hidden_x, &hidden_q, 0, NULL, &hidden_noise, &error), OPAQ_OK);
    hiding_reveal(&hiding);
    check_buffers(&hiding, &hidden_q, &q.view, spec_text(spec).text);
    check_buffers(&hiding, &hidden_y, &y.view, spec_text(spec).text);
    if (!same_sum(noise.signal, hidden_noise.signal) || !same_sum(noise.noise, hidden_noise.noise)) {
        CHECK_FAIL("%s: noise %g of %g, expected %g of %g", spec_text(spec).text, hidden_noise.noise,
                   hidden_noise.signal, noise.noise, noise.signal);
    }
    for (int usage = OPAQ_ROWWISE; usage <= OPAQ_COLUMNWISE; usage <<= 1) {
        const int64_t count = opaq_amax_count(&q.view.proto, (enum opaq_usage)usage);
        float expected[WHOLE_ROWS + COLUMNS];
        if (count == 0 || (spec->options & OPAQ_GLOBAL)) {
            continue;
        }
        float *const amax = hiding_copy(&hiding, NULL, sizeof expected);
        CHECK_EQ_INT(opaq_amax(&x.view, spec, (enum opaq_usage)usage, NULL, expected, count, NULL), OPAQ_OK);
        hiding_hide(&hiding);
        CHECK_EQ_INT(opaq_amax(&hidden_x, spec, (enum opaq_usage)usage, NULL, amax, count, NULL), OPAQ_OK);
        hiding_reveal(&hiding);
        CHECK_BYTES(hiding_host(&hiding, amax), expected, (size_t)count * sizeof *amax, "%s amax",
                    spec_text(spec).text);
    }
    tensor_free(&empty_y);
    tensor_free(&empty_q);
    tensor_free(&y);
    tensor_free(&q);
    tensor_free(&x);
    hiding_free(&hiding);
}

static void views_of_every_spec(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    hiding_install();
    for (int i = 0; i < list.count; ++i) {
        check_spec(&list.spec[i], ROWS, OPAQ_BF16, FILL_NORMAL);
    }
    hiding_remove();
    CHECK(list.count > 50);
    spec_list_free(&list);
}

/* A sample of all specs with other parameters, each with another dtype and kind of data than its neighbours. */
static void parameters_and_data(void) {
    static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F32, OPAQ_BF16, OPAQ_F16, OPAQ_BF16};
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    const int wanted = 500;
    const int step = list.count / wanted + 1;
    int count = 0;
    hiding_install();
    for (int i = 0; i < list.count; i += step, ++count) {
        check_spec(&list.spec[i], count % 3 == 0 ? ROWS : WHOLE_ROWS, dtypes[count % 5],
                   (enum tensor_fill)(count % FILL_COUNT));
    }
    hiding_remove();
    CHECK(count > wanted / 2);
    printf("  %d of %d specs\n", count, list.count);
    spec_list_free(&list);
}

/* Noise is measured in host memory, which a CUDA graph cannot hold. */
static void noise_in_a_capture(void) {
    const struct opaq_spec spec = spec_of("mxfp8");
    struct hiding hiding = hiding_make(MEMORY);
    struct tensor x = tensor_make(ROWS, COLUMNS, OPAQ_BF16, NULL);
    tensor_fill(&x, FILL_NORMAL, 5);
    struct tensor q = quantized(&x, &spec, NULL);
    const struct opaq_view hidden_x = hidden_view(&hiding, &x.view);
    const struct opaq_view hidden_q = hidden_view(&hiding, &q.view);
    struct opaq_error error = {OPAQ_OK, ""};
    struct opaq_noise noise;
    bool is_refusing;
    hiding_install();
    hiding_hide(&hiding);
    void *const stream = hiding_begin(&is_refusing);
    const enum opaq_status status = opaq_noise_measure(&hidden_x, &hidden_q, 0, NULL, &noise, &error);
    hiding_end(stream);
    hiding_reveal(&hiding);
    hiding_remove();
    CHECK_EQ_INT(status, is_refusing ? OPAQ_ERROR_UNSUPPORTED : OPAQ_OK);
    CHECK(!is_refusing || strstr(error.text, "while a CUDA graph is captured") != NULL);
    tensor_free(&q);
    tensor_free(&x);
    hiding_free(&hiding);
}

static void delayed_scaling(void) {
    float history[4][3] = {{1, 2, 3}, {4, 5, 6}, {7, 8, 9}, {0.5f, 0.25f, 20}};
    float scale[3] = {1, 1, 1};
    struct hiding hiding = hiding_make(MEMORY);
    const struct opaq_execution execution = {.device = hiding_device};
    struct opaq_delayed_state hidden = {hiding_copy(&hiding, history, sizeof history),
                                        hiding_copy(&hiding, scale, sizeof scale), 4, 3};
    struct opaq_delayed_state state = {history[0], scale, 4, 3};
    hiding_install();
    hiding_hide(&hiding);
    CHECK_EQ_INT(opaq_delayed_update(&hidden, NULL, OPAQ_E4M3, 1, OPAQ_AMAX_MAX, &execution, NULL), OPAQ_OK);
    hiding_reveal(&hiding);
    hiding_remove();
    CHECK_EQ_INT(opaq_delayed_update(&state, NULL, OPAQ_E4M3, 1, OPAQ_AMAX_MAX, NULL, NULL), OPAQ_OK);
    CHECK_BYTES(hiding_host(&hiding, hidden.amax_history), history, sizeof history, "the history");
    CHECK_BYTES(hiding_host(&hiding, hidden.scale), scale, sizeof scale, "the scales");
    hiding_free(&hiding);
}

/* Copies a list of tensors. */
static void hide_values(struct hiding *hiding, const struct opaq_op *op, int first,
                        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT],
                        struct opaq_tensor tensors[OPAQ_OP_ARGUMENT_LIMIT][OPAQ_BUFFER_LIMIT]) {
    for (int i = first; i < op->argument_count; ++i) {
        const enum opaq_argument_kind kind = op->argument[i].kind;
        const int64_t count = kind == OPAQ_ARGUMENT_TENSOR_LIST                               ? values[i].count
                              : kind < OPAQ_ARGUMENT_TENSOR_LIST && values[i].tensors != NULL ? 1
                                                                                              : 0;
        for (int64_t t = 0; t < count; ++t) {
            tensors[i][t] = hiding_tensor(hiding, &values[i].tensors[t]);
        }
        if (count > 0) {
            values[i].tensors = tensors[i];
        }
    }
}

/* A call of the backward operator of a runner, whose dy is `dy`. Returns the operator. */
static const struct opaq_op *set_backward(enum opaq_runner_kind kind, int64_t handle,
                                          const struct opaq_tensor *dy, const struct opaq_tensor *activations,
                                          struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT]) {
    static const char *const names[] = {"linear_gemm_backward", "mlp_gemm_backward", "moe_gemm_backward"};
    const struct opaq_op *op = opaq_op_find(names[kind]);
    const int count = op->argument_count - 2;
    memset(values, 0, OPAQ_OP_ARGUMENT_LIMIT * sizeof *values);
    values[0] = op_tensor_value(dy);
    for (int i = 1; i < count; ++i) {
        values[i] = op_tensor_value(&activations[i - 1]);
    }
    values[count].integer = handle;
    values[count + 1].integer = RUNNER_H;
    return op;
}

/* The gradients of a runner on the CPU; dy is `y`. */
static void call_backward(enum opaq_runner_kind kind, const struct opaq_value *bound,
                          const struct runner_inputs *inputs, const struct op_result *y,
                          struct op_result *gradients) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 0;
    CHECK_EQ_INT(opaq_runner_create(runner_op(kind), bound, NULL, &handle, &error), OPAQ_OK);
    const struct opaq_op *op = set_backward(kind, handle, &y->outputs.tensor[0], inputs->tensors, values);
    CHECK_EQ_INT(op_call(op->name, values, NULL, gradients, &error), OPAQ_OK);
    CHECK_EQ_STR(error.text, "");
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
}

/* The same on hidden memory, into `hidden`. */
static void run_backward(enum opaq_runner_kind kind, struct hiding *hiding, int64_t handle,
                         const struct opaq_tensor *dy, const struct opaq_tensor *activations,
                         const struct opaq_outputs *hidden) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_error error = {OPAQ_OK, ""};
    size_t bytes = 0;
    const struct opaq_op *op = set_backward(kind, handle, dy, activations, values);
    CHECK_EQ_INT(opaq_op_workspace(op, values, &bytes, &error), OPAQ_OK);
    const struct opaq_span workspace = {hiding_take(hiding, bytes), bytes};
    CHECK_EQ_INT(opaq_op_run(op, values, hidden, workspace, NULL, &error), OPAQ_OK);
    CHECK_EQ_STR(error.text, "");
}

static bool are_near(const float *a, const float *b, int64_t count) {
    float largest = 0.0f;
    float difference = 0.0f;
    for (int64_t i = 0; i < count; ++i) {
        largest = fmaxf(largest, fabsf(b[i]));
        difference = fmaxf(difference, fabsf(a[i] - b[i]));
    }
    return difference <= 1e-5f * largest;
}

/* A runner made from hidden tensors gives the results of the operator on the CPU, on hidden activations, and their
 * gradients. */
static void check_runner(enum opaq_runner_kind kind, const char *weights, const char *words) {
    const struct opaq_op *op = runner_op(kind);
    struct hiding hiding = hiding_make(8 * MEMORY);
    struct runner_layer layer = runner_layer_make(kind, OPAQ_BF16, weights, words);
    struct runner_inputs *inputs = runner_inputs_make(OPAQ_BF16);
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor tensors[OPAQ_OP_ARGUMENT_LIMIT][OPAQ_BUFFER_LIMIT];
    struct opaq_tensor activations[3];
    struct op_result expected;
    struct op_result gradients;
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 0;
    size_t bytes = 0;
    const int count = kind == OPAQ_RUNNER_MOE ? 3 : 1;
    runner_values(&layer, inputs, values);
    CHECK_EQ_INT(op_call(op->name, values, NULL, &expected, &error), OPAQ_OK);
    runner_values(&layer, NULL, values);
    call_backward(kind, values, inputs, &expected, &gradients);
    hiding_install();
    hide_values(&hiding, op, count, values, tensors);
    for (int i = 0; i < count; ++i) {
        activations[i] = hiding_tensor(&hiding, &inputs->tensors[i]);
    }
    const struct opaq_tensor dy = hiding_tensor(&hiding, &expected.outputs.tensor[0]);
    const struct opaq_tensor output = hiding_tensor(&hiding, &expected.outputs.tensor[0]);
    memset(hiding_host(&hiding, output.data), 0, op_tensor_bytes(&output));
    struct opaq_outputs hidden = gradients.outputs;
    for (int i = 0; i < hidden.count; ++i) {
        hidden.tensor[i] = hiding_tensor(&hiding, &gradients.outputs.tensor[i]);
        memset(hiding_host(&hiding, hidden.tensor[i].data), 0, op_tensor_bytes(&hidden.tensor[i]));
    }
    hiding_hide(&hiding);
    CHECK_EQ_INT(opaq_runner_create(op, values, NULL, &handle, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_runner_workspace(handle, activations, count, &bytes, &error), OPAQ_OK);
    const struct opaq_span workspace = {hiding_take(&hiding, bytes), bytes};
    CHECK_EQ_INT(opaq_runner_run(handle, activations, count, &output, workspace, NULL, &error), OPAQ_OK);
    CHECK_EQ_STR(error.text, "");
    run_backward(kind, &hiding, handle, &dy, activations, &hidden);
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    hiding_reveal(&hiding);
    hiding_remove();
    CHECK_BYTES(hiding_host(&hiding, output.data), expected.outputs.tensor[0].data, op_tensor_bytes(&output),
                "%s, %s %s", op->name, weights, words);
    for (int i = 0; i < hidden.count; ++i) {
        const struct opaq_tensor *gradient = &gradients.outputs.tensor[i];
        const void *got = hiding_host(&hiding, hidden.tensor[i].data);
        if (i == 0 || strstr(weights, "tiled") == NULL) {
            CHECK_BYTES(got, gradient->data, op_tensor_bytes(gradient), "gradient %d of %s, %s %s", i, op->name,
                        weights, words);
        } else { /* float32, and for a tiled weight the CPU adds in another order than a GPU */
            CHECK(are_near(got, gradient->data, op_tensor_elements(gradient)));
        }
    }
    op_result_free(&gradients);
    op_result_free(&expected);
    runner_inputs_free(inputs);
    runner_layer_free(&layer);
    hiding_free(&hiding);
}

static void runners(void) {
    static const char *const given[] = {"",      "fp8row",          "fp8blk2",    "mxfp8",
                                        "mxfp4", "nvfp4+rowscaled", "nvfp4+tiled"};
    static const char *const here[] = {"w=fp8", "w=fp8row", "w=mxfp8", "w=nvfp4", "w=mxfp4"};
    for (int kind = OPAQ_RUNNER_LINEAR; kind <= OPAQ_RUNNER_MOE; ++kind) {
        for (size_t i = 0; i < sizeof given / sizeof given[0]; ++i) {
            check_runner((enum opaq_runner_kind)kind, given[i], "");
        }
        for (size_t i = 0; i < sizeof here / sizeof here[0]; ++i) {
            check_runner((enum opaq_runner_kind)kind, "", here[i]);
        }
    }
}

/* Creation fails with each of its allocations, and succeeds afterwards. */
static void runners_without_memory(void) {
    for (int kind = OPAQ_RUNNER_LINEAR; kind <= OPAQ_RUNNER_MOE; ++kind) {
        const struct opaq_op *op = runner_op((enum opaq_runner_kind)kind);
        struct hiding hiding = hiding_make(8 * MEMORY);
        struct runner_layer layer = runner_layer_make((enum opaq_runner_kind)kind, OPAQ_BF16, "", "w=nvfp4");
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        struct opaq_tensor tensors[OPAQ_OP_ARGUMENT_LIMIT][OPAQ_BUFFER_LIMIT];
        int64_t handle = 0;
        int failures = 0;
        runner_values(&layer, NULL, values);
        hiding_install();
        hide_values(&hiding, op, kind == OPAQ_RUNNER_MOE ? 3 : 1, values, tensors);
        hiding_hide(&hiding);
        for (enum opaq_status status = OPAQ_ERROR_MEMORY; status == OPAQ_ERROR_MEMORY && failures < 100;) {
            struct opaq_error error = {OPAQ_OK, ""};
            hiding_fail_allocation(failures + 1);
            status = opaq_runner_create(op, values, NULL, &handle, &error);
            failures += status == OPAQ_ERROR_MEMORY;
            CHECK(status == OPAQ_OK ||
                  (status == OPAQ_ERROR_MEMORY && strstr(error.text, "no memory for") != NULL));
        }
        hiding_fail_allocation(0);
        CHECK(failures > 0);
        CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
        hiding_reveal(&hiding);
        hiding_remove();
        runner_layer_free(&layer);
        hiding_free(&hiding);
    }
}

/* The device of an execution must be that of the tensors, and a device without a back end is an error. */
static void devices(void) {
    struct tensor x = tensor_make(4, 32, OPAQ_F32, NULL);
    struct tensor q = tensor_make(4, 32, OPAQ_F32, "mxfp8");
    const struct opaq_execution other = {.device = hiding_device};
    struct opaq_error error;
    tensor_fill(&x, FILL_NORMAL, 1);
    CHECK_EQ_INT(opaq_quantize(&x.view, NULL, &other, &q.view, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "quantize: the execution is for device (1, 0)") != NULL);
    x.view.proto.device = hiding_device;
    q.view.proto.device = hiding_device;
    CHECK_EQ_INT(opaq_quantize(&x.view, NULL, &other, &q.view, &error), OPAQ_ERROR_UNSUPPORTED);
    CHECK(strstr(error.text, "cuda:0") != NULL && strstr(error.text, "install") != NULL);
    tensor_free(&q);
    tensor_free(&x);
}

static const struct test_case tests[] = {TEST(views_of_every_spec),
                                         TEST(parameters_and_data),
                                         TEST(noise_in_a_capture),
                                         TEST(delayed_scaling),
                                         TEST(runners),
                                         TEST(runners_without_memory),
                                         TEST(devices)};
TEST_MAIN(tests)
