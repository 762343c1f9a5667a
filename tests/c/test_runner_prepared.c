/* test_runner_prepared.c: a runner made from a call of linear, mlp or moe gives the bytes of the call, for
 * weights of every format and for plain ones that it quantizes, and does not use the caller's tensors
 * afterwards. */
#include <stdlib.h>

#include "check.h"
#include "support_runner_layer.h"
#include "support_spec.h"

static const enum opaq_runner_kind kinds[] = {OPAQ_RUNNER_LINEAR, OPAQ_RUNNER_MLP, OPAQ_RUNNER_MOE};

/* Quantizers of weights; the last ones have both copies, of which a runner keeps one. */
static const char *const formats[] = {"fp8",
                                      "fp8.e5m2+pow2",
                                      "fp8+eps=0.25",
                                      "fp8row",
                                      "fp8blk1",
                                      "fp8blk2",
                                      "mxfp8",
                                      "mxfp8+2d",
                                      "mxfp8.e5m2+swizzle",
                                      "mxfp4",
                                      "mxfp4+rule=ocp",
                                      "nvfp4",
                                      "nvfp4+rowscaled",
                                      "nvfp4+4over6",
                                      "nvfp4+rht",
                                      "nvfp4+2d",
                                      "nvfp4+swizzle",
                                      "nvfp4+rule=modelopt",
                                      "nvfp4+global+rule=modelopt",
                                      "nvfp4+global+rowscaled+rule=compressed-tensors",
                                      "fp8+rule=modelopt",
                                      "fp8+both",
                                      "fp8blk2+both+pow2",
                                      "mxfp8+both",
                                      "nvfp4+both+rht",
                                      RUNNER_TILED_FORMATS};
enum { FORMAT_COUNT = sizeof formats / sizeof formats[0] };

/* Creates a runner of a call that gives `result`, or fails with the call's error. 0 if there is none. */
static int64_t create(const struct runner_layer *layer, const struct runner_inputs *inputs,
                      struct op_result *result, const char *what) {
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_error expected = {OPAQ_OK, ""};
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 0;
    runner_values(layer, inputs, values);
    const enum opaq_status called = op_call(runner_op(layer->kind)->name, values, NULL, result, &expected);
    runner_values(layer, NULL, values);
    const enum opaq_status created = opaq_runner_create(runner_op(layer->kind), values, NULL, &handle, &error);
    if (called != created || (called == OPAQ_OK) != (handle != 0)) {
        CHECK_FAIL("%s: the call says \"%s\", the runner \"%s\"", what, expected.text, error.text);
    } else if (called != OPAQ_OK && strstr(error.text, expected.text) == NULL) {
        CHECK_FAIL("%s: \"%s\" does not say \"%s\"", what, error.text, expected.text);
    }
    return handle;
}

/* The runner gives the call's result, after the layer is freed. */
static void check_runner(struct runner_layer *layer, enum opaq_element dtype, const char *format,
                         const char *what) {
    const enum opaq_runner_kind kind = layer->kind;
    struct runner_inputs *inputs = runner_inputs_make(dtype);
    struct op_result expected;
    struct opaq_runner_info info = {0};
    const int64_t handle = create(layer, inputs, &expected, what);
    runner_layer_free(layer);
    if (handle == 0) {
        op_result_free(&expected);
        runner_inputs_free(inputs);
        return;
    }
    CHECK_EQ_INT(opaq_runner_query(handle, &info, NULL), OPAQ_OK);
    CHECK_EQ_INT(info.kind, kind);
    CHECK_EQ_INT(info.in_features, RUNNER_H);
    CHECK_EQ_INT(info.out_features, kind == OPAQ_RUNNER_LINEAR ? RUNNER_N : RUNNER_H);
    CHECK_EQ_INT(info.experts, kind == OPAQ_RUNNER_MOE ? RUNNER_E : 0);
    CHECK_EQ_INT(info.multiplications,
                 kind == OPAQ_RUNNER_LINEAR ? RUNNER_N * RUNNER_H : 3 * RUNNER_I * RUNNER_H);
    CHECK(info.bytes > 0 && (strncmp(info.kernel, "gemm_", 5) == 0 ||
                             (strstr(format, "tiled") != NULL && strncmp(info.kernel, "packed_", 7) == 0)));
    CHECK_EQ_STR(info.format, format);
    for (int run = 0; run < 2; ++run) {
        struct op_result got;
        struct opaq_error error = {OPAQ_OK, ""};
        if (runner_run(kind, handle, inputs, NULL, &got, &error) != OPAQ_OK) {
            CHECK_FAIL("%s: %s", what, error.text);
            continue;
        }
        if (op_result_difference(&got, &expected, 0) >= 0) {
            CHECK_FAIL("%s: the runner's bytes are not the operator's", what);
        }
        op_result_free(&got);
    }
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    op_result_free(&expected);
    runner_inputs_free(inputs);
}

/* The format that a runner reports: the rowwise copy. */
static const char *rowwise(const char *format, char *text, size_t capacity) {
    struct opaq_spec spec = spec_of(format);
    spec.usage = OPAQ_ROWWISE;
    (void)opaq_spec_print(&spec, text, capacity, NULL);
    return text;
}

static void buffers_of_every_format(void) {
    char text[OPAQ_SPEC_TEXT_BYTES];
    char what[1100];
    for (int k = 0; k < 3; ++k) {
        for (int f = 0; f < FORMAT_COUNT; ++f) {
            const char *words = k == 0  ? (f % 2 ? "x=mxfp8" : "")
                                : f % 2 ? "act=silu x=mxfp8 h=nvfp4"
                                        : "act=silu";
            struct runner_layer layer = runner_layer_make(kinds[k], OPAQ_BF16, formats[f], words);
            (void)snprintf(what, sizeof what, "%s \"%s\"", runner_op(kinds[k])->name, layer.plan);
            check_runner(&layer, OPAQ_BF16, rowwise(formats[f], text, sizeof text), what);
        }
    }
}

/* Quantized once at creation, to the bytes that the operator computes in each call. */
static void plain_weights_that_the_plan_quantizes(void) {
    for (int k = 0; k < 3; ++k) {
        for (int f = 0; f < FORMAT_COUNT; ++f) {
            char text[OPAQ_SPEC_TEXT_BYTES];
            char words[256];
            struct opaq_spec kept = spec_of(formats[f]);
            kept.usage = OPAQ_ROWWISE;
            if (kinds[k] == OPAQ_RUNNER_MOE && kept.format == OPAQ_FP8) {
                const uint16_t tiled = kept.options & OPAQ_TILED;
                kept = spec_of(kept.element == OPAQ_E5M2 ? "fp8row.e5m2" : "fp8row");
                kept.options |= tiled;
            } else if (kinds[k] == OPAQ_RUNNER_MOE && kept.format == OPAQ_NVFP4) {
                kept.options |= OPAQ_ROWSCALED;
            }
            if (opaq_spec_print(&kept, text, sizeof text, NULL) != OPAQ_OK) {
                continue; /* a stack that cannot be kept this way: see below */
            }
            (void)snprintf(words, sizeof words, "%sw=%s", k == 0 ? "x=fp8 " : "act=gelu_tanh ", formats[f]);
            struct runner_layer layer = runner_layer_make(kinds[k], f % 2 ? OPAQ_F32 : OPAQ_F16, "", words);
            check_runner(&layer, OPAQ_F16, text, words);
        }
    }
}

static void plain_weights_that_stay_plain(void) {
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    static const char *const names[] = {"f32", "bf16", "f16"};
    for (int k = 0; k < 3; ++k) {
        for (int d = 0; d < 3; ++d) {
            struct runner_layer layer =
                runner_layer_make(kinds[k], dtypes[d], "", k == 0 ? "" : "act=silu_clamp limit=7 x=mxfp8");
            check_runner(&layer, dtypes[d], names[d], names[d]);
        }
    }
}

/* A different number for each expert, which no format of stacks can store, and arguments that differ between
 * calls. */
static void weights_that_cannot_be_kept(void) {
    static const struct {
        enum opaq_runner_kind kind;
        const char *words, *text;
    } cases[] = {{OPAQ_RUNNER_MOE, "act=silu w=nvfp4+2d", "quantize it first"},
                 {OPAQ_RUNNER_MOE, "act=silu w=nvfp4+sr", "rounds stochastically"},
                 {OPAQ_RUNNER_MLP, "act=silu w=fp8+delayed", "delayed scaling"},
                 {OPAQ_RUNNER_LINEAR, "w=nvfp4+sr", "linear: the plan rounds stochastically (sr)"},
                 {OPAQ_RUNNER_LINEAR, "w=fp8+delayed", "linear: w= takes a scale (delayed)"}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        struct runner_layer layer = runner_layer_make(cases[i].kind, OPAQ_BF16, "", cases[i].words);
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        struct opaq_error error = {OPAQ_OK, ""};
        int64_t handle = 0;
        runner_values(&layer, NULL, values);
        CHECK(opaq_runner_create(runner_op(cases[i].kind), values, NULL, &handle, &error) != OPAQ_OK);
        if (strstr(error.text, cases[i].text) == NULL || strstr(error.text, "runner_create: ") != error.text) {
            CHECK_FAIL("\"%s\" does not say \"%s\"", error.text, cases[i].text);
        }
        runner_layer_free(&layer);
    }
}

static void refuse(int line, const struct opaq_op *op, const struct opaq_value *values, enum opaq_status status,
                   const char *text) {
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 4711;
    const int before = opaq_runner_count();
    const enum opaq_status got = opaq_runner_create(op, values, NULL, &handle, &error);
    if (got != status || strstr(error.text, "runner_create: ") != error.text ||
        strstr(error.text, text) == NULL || handle != 4711 || opaq_runner_count() != before) {
        CHECK_FAIL("line %d: %s \"%s\", expected %s \"%s\"", line, opaq_status_name(got), error.text,
                   opaq_status_name(status), text);
    }
}

/* Rows of an expert that are not whole tiles. */
static void experts_that_share_tiles(void) {
    static const int64_t up_shape[3] = {2, 40, 32};
    static const int64_t down_shape[3] = {2, 32, 20};
    static const char *const plans[][2] = {{"act=silu w=fp8+tiled", "its tiles have 32"},
                                           {"act=silu w=mxfp4+tiled", "its tiles have 16"},
                                           {"act=silu w=fp8blk2+tiled", "its blocks have 128"}};
    struct tensor up = tensor_make(2 * 40, 32, OPAQ_BF16, NULL);
    struct tensor down = tensor_make(2 * 32, 20, OPAQ_BF16, NULL);
    struct op_tensors lists[2] = {op_tensors_of(&up), op_tensors_of(&down)};
    for (int i = 0; i < 2; ++i) {
        const int64_t *shape = i == 0 ? up_shape : down_shape;
        lists[i].tensor[0].rank = 3;
        memcpy(lists[i].tensor[0].shape, shape, 3 * sizeof *shape);
        memcpy(lists[i].tensor[0].strides, (int64_t[]){shape[1] * shape[2], shape[2], 1}, 3 * sizeof *shape);
    }
    for (int i = 0; i < 3; ++i) {
        const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {[3] = op_list_value(&lists[0]),
                                                                  [4] = op_list_value(&lists[1]),
                                                                  [7] = op_sizes_value(up_shape, 3),
                                                                  [8] = op_sizes_value(down_shape, 3),
                                                                  [9] = op_text_value(plans[i][0])};
        refuse(__LINE__, runner_op(OPAQ_RUNNER_MOE), values, OPAQ_ERROR_UNSUPPORTED, plans[i][1]);
    }
    tensor_free(&up);
    tensor_free(&down);
}

/* A weight with padded rows and a bias of every other element are copied together. */
static void strided_tensors_are_copied(void) {
    static float memory[RUNNER_N][RUNNER_H + 5];
    static float bias_memory[RUNNER_N];
    static float together[RUNNER_N][RUNNER_H];
    struct runner_inputs *inputs = runner_inputs_make(OPAQ_F32);
    const int64_t shape[2] = {RUNNER_N, RUNNER_H};
    for (int r = 0; r < RUNNER_N; ++r) {
        bias_memory[r] = (float)r;
        for (int c = 0; c < RUNNER_H; ++c) {
            memory[r][c] = together[r][c] = (float)((r * 31 + c * 7) % 23) - 11.0f;
        }
    }
    struct opaq_tensor w = {.data = memory,
                            .dtype = OPAQ_DTYPE_F32,
                            .rank = 2,
                            .shape = {RUNNER_N, RUNNER_H},
                            .strides = {RUNNER_H + 5, 1}};
    struct opaq_tensor bias = {
        .data = bias_memory, .dtype = OPAQ_DTYPE_F32, .rank = 1, .shape = {RUNNER_N}, .strides = {1}};
    float scale_memory = 3.5f;
    struct opaq_tensor scale = {
        .data = &scale_memory, .dtype = OPAQ_DTYPE_F32, .rank = 1, .shape = {1}, .strides = {1}};
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(&inputs->tensors[0]),
                                                        {.tensors = &w, .count = 1},
                                                        op_tensor_value(&bias),
                                                        op_sizes_value(shape, 2),
                                                        op_text_value("x=nvfp4"),
                                                        op_tensor_value(&scale)};
    struct op_result expected;
    struct op_result got;
    struct opaq_error error = {OPAQ_OK, ""};
    int64_t handle = 0;
    CHECK_EQ_INT(op_call("linear", values, NULL, &expected, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_runner_create(opaq_op_find("linear"), values, NULL, &handle, &error), OPAQ_OK);
    memset(memory, 0xEE, sizeof memory);
    memset(bias_memory, 0xEE, sizeof bias_memory);
    scale_memory = 0;
    CHECK_EQ_INT(runner_run(OPAQ_RUNNER_LINEAR, handle, inputs, NULL, &got, &error), OPAQ_OK);
    CHECK(op_result_difference(&got, &expected, 0) < 0);
    CHECK_EQ_STR(error.text, "");
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    op_result_free(&got);
    op_result_free(&expected);
    runner_inputs_free(inputs);
}

/* Any number of rows: none, one, many, in any rank; also on threads. */
static void inputs_of_any_shape(void) {
    struct runner_layer layer = runner_layer_make(OPAQ_RUNNER_LINEAR, OPAQ_BF16, "nvfp4", "x=nvfp4");
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_pool *pool = NULL;
    int64_t handle = 0;
    CHECK_EQ_INT(opaq_pool_create(3, &pool, NULL), OPAQ_OK);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    const struct opaq_execution execution = {.parallel = &parallel};
    runner_values(&layer, NULL, values);
    CHECK_EQ_INT(opaq_runner_create(opaq_op_find("linear"), values, &execution, &handle, NULL), OPAQ_OK);
    const int64_t shapes[][4] = {
        {1, RUNNER_H}, {0, RUNNER_H}, {200, RUNNER_H}, {RUNNER_H}, {2, 3, 5, RUNNER_H}};
    const int ranks[] = {2, 2, 2, 1, 4};
    for (int i = 0; i < 5; ++i) {
        int64_t rows = 1;
        for (int d = 0; d + 1 < ranks[i]; ++d) {
            rows *= shapes[i][d];
        }
        struct tensor memory = tensor_make(rows, RUNNER_H, OPAQ_BF16, NULL);
        tensor_fill(&memory, FILL_NORMAL, 5);
        struct opaq_tensor x = op_tensors_of(&memory).tensor[0];
        x.rank = ranks[i];
        for (int d = ranks[i] - 1; d >= 0; --d) {
            x.shape[d] = shapes[i][d];
            x.strides[d] = d == ranks[i] - 1 ? 1 : x.strides[d + 1] * x.shape[d + 1];
        }
        struct op_result expected;
        struct op_result got;
        struct opaq_error error = {OPAQ_OK, ""};
        const struct op_settings settings = {.parallel = &parallel};
        const struct opaq_value gemm[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(&x), op_int_value(handle),
                                                                op_int_value(RUNNER_N)};
        values[0] = op_tensor_value(&x);
        CHECK_EQ_INT(op_call("linear", values, NULL, &expected, &error), OPAQ_OK);
        CHECK_EQ_INT(op_call("linear_gemm", gemm, &settings, &got, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        CHECK_EQ_INT(got.outputs.tensor[0].rank, ranks[i]);
        CHECK(op_result_difference(&got, &expected, 0) < 0);
        op_result_free(&got);
        op_result_free(&expected);
        tensor_free(&memory);
    }
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    opaq_pool_destroy(pool);
    runner_layer_free(&layer);
}

/* ---- refusals ---- */

static void errors_of_the_call_are_errors_of_create(void) {
    struct runner_layer layer = runner_layer_make(OPAQ_RUNNER_LINEAR, OPAQ_BF16, "nvfp4", "x=nvfp4");
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    const struct opaq_op *op = opaq_op_find("linear");
    int64_t handle = 0;
    runner_values(&layer, NULL, values);
    refuse(__LINE__, NULL, values, OPAQ_ERROR_ARGUMENT, "op is NULL");
    refuse(__LINE__, op, NULL, OPAQ_ERROR_ARGUMENT, "values is NULL");
    CHECK_EQ_INT(opaq_runner_create(op, values, NULL, NULL, NULL), OPAQ_ERROR_ARGUMENT);
    refuse(__LINE__, opaq_op_find("quantize"), values, OPAQ_ERROR_ARGUMENT,
           "no runners of the operator quantize, expected linear, mlp or moe");
    refuse(__LINE__, opaq_op_find("linear_gemm"), values, OPAQ_ERROR_ARGUMENT, "the operator linear_gemm");
    values[4] = op_text_value("w_given=mxfp8");
    refuse(__LINE__, op, values, OPAQ_ERROR_ARGUMENT, "linear: w: got 3 buffers, expected 2");
    values[4] = op_text_value("w_given=nvfp5");
    refuse(__LINE__, op, values, OPAQ_ERROR_TEXT, "nvfp5");
    values[4] = op_text_value("w_given=nvfp4 grad=x");
    refuse(__LINE__, op, values, OPAQ_ERROR_ARGUMENT, "words beside");
    values[4] = (struct opaq_value){0};
    refuse(__LINE__, op, values, OPAQ_ERROR_ARGUMENT, "plan is missing");
    runner_values(&layer, NULL, values);
    values[1].count = 2;
    refuse(__LINE__, op, values, OPAQ_ERROR_ARGUMENT, "got 2 buffers, expected 3");
    values[1] = (struct opaq_value){.count = 3};
    refuse(__LINE__, op, values, OPAQ_ERROR_ARGUMENT, "w is missing");
    runner_values(&layer, NULL, values);
    const int64_t wrong[3] = {RUNNER_N, RUNNER_H + 16, 1};
    values[3] = op_sizes_value(wrong, 2);
    refuse(__LINE__, op, values, OPAQ_ERROR_SHAPE, "\"_rowwise_data\" is uint8[48,64], expected uint8[48,72]");
    values[3] = op_sizes_value(wrong, 3);
    refuse(__LINE__, op, values, OPAQ_ERROR_SHAPE, "w_shape has 3 sizes, expected two");
    values[3] = op_sizes_value(wrong, 0);
    refuse(__LINE__, op, values, OPAQ_ERROR_SHAPE, "too few for the shape of y");
    runner_values(&layer, NULL, values);
    struct opaq_tensor bias = layer.bias_tensors[0];
    bias.shape[0] = 3;
    values[2] = op_tensor_value(&bias);
    refuse(__LINE__, op, values, OPAQ_ERROR_SHAPE, "bias has the shape [3], expected [48]");
    bias = layer.bias_tensors[0];
    bias.data = NULL;
    refuse(__LINE__, op, values, OPAQ_ERROR_BUFFER, "bias");
    bias = layer.bias_tensors[0];
    bias.device.type = OPAQ_DEVICE_CUDA;
    refuse(__LINE__, op, values, OPAQ_ERROR_ARGUMENT, "bias is on another device than the first tensor");
    values[2] = (struct opaq_value){0}; /* and without a bias it succeeds */
    CHECK_EQ_INT(opaq_runner_create(op, values, NULL, &handle, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    runner_layer_free(&layer);
}

/* The buffers of a quantized stack without elements. */
static struct op_tensors buffers_without_elements(const int64_t shape[3], const char *spec) {
    struct op_tensors made = {.count = 0};
    struct opaq_proto proto;
    struct opaq_spec parsed;
    CHECK_EQ_INT(opaq_spec_parse(spec, strlen(spec), &parsed, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_proto_make(shape, 3, OPAQ_BF16, &parsed, (struct opaq_device){0}, &proto, NULL), OPAQ_OK);
    for (int i = 0; i < opaq_proto_buffer_count(&proto); ++i) {
        struct opaq_tensor *one = &made.tensor[made.count++];
        struct opaq_buffer buffer;
        static float figure;
        CHECK_EQ_INT(opaq_proto_buffer(&proto, i, &buffer, NULL), OPAQ_OK);
        one->data = &figure; /* nvfp4's float; the others have no bytes */
        one->dtype = buffer.entry_bytes == 1 ? OPAQ_DTYPE_U8 : (int32_t)buffer.element;
        one->rank = buffer.rank;
        memcpy(one->shape, buffer.shape, sizeof one->shape);
        memcpy(one->strides, buffer.strides, sizeof one->strides);
    }
    return made;
}

/* No experts of 2^40 x 2^40: whose number of multiplications does not fit. */
static void a_mixture_without_experts(void) {
    static const int64_t up_shape[3] = {0, (int64_t)1 << 40, (int64_t)1 << 40};
    static const int64_t down_shape[3] = {0, (int64_t)1 << 40, (int64_t)1 << 39};
    const struct op_tensors up = buffers_without_elements(up_shape, "nvfp4+tiled");
    const struct op_tensors down = buffers_without_elements(down_shape, "nvfp4+tiled");
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        [3] = op_list_value(&up),
        [4] = op_list_value(&down),
        [7] = op_sizes_value(up_shape, 3),
        [8] = op_sizes_value(down_shape, 3),
        [9] = op_text_value("act=silu gate_up_given=nvfp4+tiled down_given=nvfp4+tiled")};
    refuse(__LINE__, runner_op(OPAQ_RUNNER_MOE), values, OPAQ_ERROR_SHAPE, "0 experts in a moe runner");
}

static const struct test_case tests[] = {TEST(buffers_of_every_format),
                                         TEST(plain_weights_that_the_plan_quantizes),
                                         TEST(plain_weights_that_stay_plain),
                                         TEST(weights_that_cannot_be_kept),
                                         TEST(strided_tensors_are_copied),
                                         TEST(inputs_of_any_shape),
                                         TEST(errors_of_the_call_are_errors_of_create),
                                         TEST(a_mixture_without_experts),
                                         TEST(experts_that_share_tiles)};
TEST_MAIN(tests)
