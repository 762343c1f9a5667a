/* test_packed_backward.c: gradients through weights that stay packed, in rows and in tiles: of inputs against
 * double within the bound of a forward, and byte for byte equal to those through the dequantized weights if
 * float32 or float16 is multiplied; of the router and the biases; with inputs that the forward quantizes, and
 * that the backward uses unquantized; and workspaces far smaller than a copy of the weight. */
#include <stdlib.h>

#include "check.h"
#include "support_experts_reference.h"
#include "support_hiding.h"
#include "support_linear.h"
#include "support_product.h"
#include "support_quant.h"
#include "support_spec.h"

/* Those with a tiled form come first. */
static const char *const formats[] = {"nvfp4", "nvfp4+2d", "nvfp4+rowscaled", "mxfp4",   "mxfp8",  "mxfp8.e5m2",
                                      "fp8",   "fp8.e5m2", "fp8row",          "fp8blk2", "fp8blk1"};
enum { FORMATS = 11, TILED_FORMATS = 10 };
static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F32, OPAQ_F16};

struct text {
    char text[64];
};

/* The quantizer of case `i`: every format in rows, then those with a tiled form in tiles. */
enum { QUANTIZERS = FORMATS + TILED_FORMATS };
static struct text quantizer_of(int i) {
    struct text made;
    (void)snprintf(made.text, sizeof made.text, "%s%s", formats[i % FORMATS], i < FORMATS ? "" : "+tiled");
    return made;
}

static struct tensor packed(const struct tensor *plain, const char *text) {
    const struct opaq_spec spec = spec_of(text);
    return quantized(plain, &spec, NULL);
}

/* ---- linear ---- */

static void check_linear(int64_t m, int64_t n, int64_t k, const char *text, enum opaq_element dtype) {
    struct linear_layer layer = linear_layer_make(m, n, k, dtype);
    struct tensor w = packed(&layer.w, text);
    struct tensor floats = dequantized(&w, OPAQ_ROWWISE);
    const struct linear_given by_codes = {.w = &w};
    const struct linear_given by_floats = {.w = &floats};
    struct linear_text plan;
    (void)snprintf(plan.text, sizeof plan.text, "w_given=%s grad=xb", text);
    struct linear_step step = linear_step(&layer, plan.text, &by_codes);
    struct linear_step expected = linear_step(&layer, "grad=xb", &by_floats);
    linear_check_same(&step.backward, &expected.backward, LINEAR_DBIAS, plan.text);
    if (dtype != OPAQ_BF16) {
        linear_check_same(&step.backward, &expected.backward, LINEAR_DX, plan.text);
    }
    struct product_matrix dy = product_matrix_of(&layer.dy, OPAQ_ROWWISE);
    struct product_matrix across = product_matrix_of(&floats, OPAQ_COLUMNWISE);
    (void)product_check(&op_result_row(&step.backward, LINEAR_DX).tensor[0], &dy, &across, NULL, NULL,
                        plan.text);
    product_matrix_free(&dy);
    product_matrix_free(&across);
    linear_step_free(&step);
    linear_step_free(&expected);
    tensor_free(&floats);
    tensor_free(&w);
    linear_layer_free(&layer);
}

static void linear_layers(void) {
    /* the last one takes several panels of columns */
    static const int64_t sizes[][3] = {
        {1, 53, 70}, {5, 300, 270}, {37, 31, 140}, {64, 257, 128}, {40, 24, 1100}};
    for (int i = 0; i < QUANTIZERS; ++i) {
        for (int s = 0; s < 5; ++s) {
            for (int d = 0; d < 3; ++d) {
                check_linear(sizes[s][0], sizes[s][1], sizes[s][2], quantizer_of(i).text, dtypes[d]);
            }
        }
    }
}

static void empty_sizes(void) {
    for (int i = 0; i < QUANTIZERS; i += 5) {
        check_linear(0, 32, 64, quantizer_of(i).text, OPAQ_BF16);
        check_linear(3, 0, 64, quantizer_of(i).text, OPAQ_BF16);
        check_linear(3, 32, 0, quantizer_of(i).text, OPAQ_BF16);
    }
}

/* ---- experts ---- */

static const char *const names[] = {"dx", "drouter", "dgate_up", "ddown", "dgate_up_bias", "ddown_bias"};

/* For a packed layer: the gradients of everything except the weights. `inputs`: the quantizer of the forward's
 * inputs, if any. */
static void check_experts(const struct experts_sizes *size, const char *text, const char *words,
                          const char *inputs, enum opaq_element dtype) {
    static const int wanted[] = {EXPERTS_DX, EXPERTS_DROUTER, EXPERTS_DGATE_UP_BIAS, EXPERTS_DDOWN_BIAS};
    char plan[256];
    char forward[320];
    char plain_plan[128];
    struct experts_layer layer = experts_layer_make(size, words, dtype);
    const char *grad = layer.is_routed ? "xrbc" : "xbc";
    (void)snprintf(plan, sizeof plan, "%s%sgate_up_given=%s down_given=%s grad=%s", words, words[0] ? " " : "",
                   text, text, grad);
    (void)snprintf(forward, sizeof forward, "%s%s%s", plan, inputs[0] ? " " : "", inputs);
    (void)snprintf(plain_plan, sizeof plain_plan, "%s%sgrad=%s", words, words[0] ? " " : "", grad);
    struct tensor gate_up = packed(&layer.gate_up, text);
    struct tensor down = packed(&layer.down, text);
    const struct experts_given given = {.gate_up = &gate_up, .down = &down};
    struct tensor h = experts_forward_h(&layer, forward, &given);
    struct op_result result = experts_backward(&layer, plan, &given, &h);
    struct tensor floats[2] = {dequantized(&gate_up, OPAQ_ROWWISE), dequantized(&down, OPAQ_ROWWISE)};
    tensor_free(&layer.gate_up);
    tensor_free(&layer.down);
    layer.gate_up = floats[0];
    layer.down = floats[1];
    const struct experts_given same_dtype = {.w_dtype = (int32_t)dtype}; /* those of the biases */
    struct op_result by_floats = experts_backward(&layer, plain_plan, &same_dtype, &h);
    struct reference_gradients expected = reference_backward_numbers(&layer, plan, &given, &h);
    for (int i = 0; i < 4 && result.outputs.count > 0; ++i) {
        const int g = wanted[i];
        char what[384];
        if (g == EXPERTS_DROUTER && !layer.is_routed) {
            continue;
        }
        (void)snprintf(what, sizeof what, "%s, \"%s\", %s", experts_backward_name(&layer), forward, names[g]);
        const int output = experts_output_of(&layer, g);
        (void)numbers_check(&op_result_row(&result, output).tensor[0], &expected.gradient[g], what);
        if (dtype != OPAQ_BF16) {
            linear_check_same(&result, &by_floats, output, what);
        }
    }
    reference_gradients_free(&expected);
    op_result_free(&result);
    op_result_free(&by_floats);
    tensor_free(&h);
    tensor_free(&gate_up);
    tensor_free(&down);
    experts_layer_free(&layer);
}

static const struct experts_sizes mlp = {37, -1, 1, 70, 44};
static const struct experts_sizes wide = {37, -1, 1, 1100, 24};   /* several panels of columns */
static const struct experts_sizes mixture = {13, 3, 4, 128, 128}; /* whole tiles and blocks of every kind */

static void mlps(void) {
    for (int i = 0; i < QUANTIZERS; ++i) {
        check_experts(&mlp, quantizer_of(i).text, i % 2 ? "act=gelu_tanh" : "", "", dtypes[i % 3]);
        check_experts(&mlp, quantizer_of(i).text, "act=swiglu_oai", "", dtypes[(i + 1) % 3]);
        check_experts(&wide, quantizer_of(i).text, "", "", dtypes[(i + 2) % 3]);
    }
}

static void mixtures(void) {
    for (int i = 0; i < QUANTIZERS; ++i) {
        check_experts(&mixture, quantizer_of(i).text, i % 2 ? "weights=input" : "", "", dtypes[i % 3]);
        check_experts(&mixture, quantizer_of(i).text, "act=relu2_no_mul", "", dtypes[(i + 1) % 3]);
    }
}

/* The backward ignores the quantizers of inputs: it is straight-through, at the h that the forward kept. */
static void quantized_inputs(void) {
    static const char *const inputs[] = {"x=nvfp4 h=nvfp4", "x=mxfp8 h=mxfp4", "x=fp8row h=fp8"};
    for (int i = 0; i < QUANTIZERS; i += 3) {
        check_experts(&mlp, quantizer_of(i).text, "", inputs[i % 3], dtypes[i % 3]);
        check_experts(&mixture, quantizer_of(i).text, "", inputs[i % 3], dtypes[(i + 1) % 3]);
    }
}

/* Scales of the inputs from a checkpoint: the training operators accept them as mlp and moe do, and give the
 * same y. */
static void scales_of_inputs(void) {
    static const float one[] = {0.5f};
    static const float each[] = {0.5f, 0.75f, 1.25f, 2.0f};
    static const struct experts_sizes *const sizes[] = {&mlp, &mixture};
    for (int i = 0; i < 4; ++i) {
        const char *plan = i < 2 ? "x=fp8+delayed h=fp8+delayed gate_up_given=fp8 down_given=fp8"
                                 : "x=nvfp4 h=nvfp4 gate_up_given=mxfp4 down_given=mxfp4";
        struct experts_layer layer = experts_layer_make(sizes[i % 2], "", dtypes[i % 3]);
        struct tensor gate_up = packed(&layer.gate_up, i < 2 ? "fp8" : "mxfp4");
        struct tensor down = packed(&layer.down, i < 2 ? "fp8" : "mxfp4");
        const struct experts_given given = {.gate_up = &gate_up,
                                            .down = &down,
                                            .input_scale = layer.is_routed ? each : one,
                                            .hidden_scale = one,
                                            .input_scales = layer.is_routed ? 4 : 1,
                                            .hidden_scales = 1};
        const struct experts_given without = {.gate_up = &gate_up, .down = &down};
        struct op_result inference = experts_call(layer.is_routed ? "moe" : "mlp", &layer, plan, &given);
        struct op_result training =
            experts_call(layer.is_routed ? "moe_forward" : "mlp_forward", &layer, plan, &given);
        CHECK_EQ_INT(op_result_difference(&inference, &training, EXPERTS_Y), -1);
        if (i >= 2) { /* they have an effect */
            struct op_result other = experts_call(layer.is_routed ? "moe" : "mlp", &layer, plan, &without);
            CHECK(op_result_difference(&inference, &other, EXPERTS_Y) != -1);
            op_result_free(&other);
        }
        op_result_free(&inference);
        op_result_free(&training);
        tensor_free(&gate_up);
        tensor_free(&down);
        experts_layer_free(&layer);
    }
}

/* ---- memory ---- */

static struct opaq_device device; /* of `shaped` tensors */

/* Tensors without contents: a workspace depends on shapes only. */
static struct op_tensors shaped(const int64_t *shape, int rank, const char *text, enum opaq_element dtype) {
    static _Alignas(64) char somewhere[64];
    const struct opaq_spec spec = spec_of(text[0] ? text : "fp8");
    struct tensor tensor;
    memset(&tensor, 0, sizeof tensor);
    CHECK_EQ_INT(opaq_proto_make(shape, rank, dtype, text[0] ? &spec : NULL, device, &tensor.view.proto, NULL),
                 OPAQ_OK);
    tensor.view.row_stride = text[0] ? 0 : shape[rank - 1];
    for (int i = 0; i < opaq_proto_buffer_count(&tensor.view.proto); ++i) {
        struct opaq_buffer buffer;
        CHECK_EQ_INT(opaq_proto_buffer(&tensor.view.proto, i, &buffer, NULL), OPAQ_OK);
        tensor.view.buffer[i] = (struct opaq_span){somewhere, buffer.bytes};
    }
    struct op_tensors made = op_tensors_of(&tensor);
    for (int i = 0; i < made.count; ++i) {
        made.tensor[i].device = device;
    }
    return made;
}

static size_t workspace_of(const char *op, const struct opaq_value *values) {
    struct opaq_error error = {OPAQ_OK, ""};
    size_t bytes = SIZE_MAX;
    if (opaq_op_workspace(opaq_op_find(op), values, &bytes, &error) != OPAQ_OK) {
        CHECK_FAIL("%s: %s", op, error.text);
    }
    return bytes;
}

/* The workspace of linear_backward for m rows and a weight of `rows` x `columns`. */
static void check_linear_workspace(int quantizer, int64_t m, int64_t rows, int64_t columns, size_t limit) {
    const struct text text = quantizer_of(quantizer);
    const int64_t w_shape[2] = {rows, columns};
    const int64_t x_shape[2] = {m, columns};
    const int64_t y_shape[2] = {m, rows};
    const struct op_tensors w = shaped(w_shape, 2, text.text, OPAQ_BF16);
    const struct op_tensors dy = shaped(y_shape, 2, "", quantizer % 2 ? OPAQ_BF16 : OPAQ_F32);
    struct linear_text plan;
    (void)snprintf(plan.text, sizeof plan.text, "w_given=%s grad=xb", text.text);
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_list_value(&dy),
                                                              {.count = 0},
                                                              op_list_value(&w),
                                                              op_sizes_value(x_shape, 2),
                                                              op_sizes_value(w_shape, 2),
                                                              op_int_value(OPAQ_DTYPE_BF16),
                                                              op_int_value(OPAQ_DTYPE_BF16),
                                                              op_text_value(plan.text)};
    const size_t bytes = workspace_of("linear_backward", values);
    if (bytes > limit) {
        CHECK_FAIL("%s, %lld rows: the workspace is %zu bytes", plan.text, (long long)m, bytes);
    }
}

/* dx of 4096 x 4096 in a workspace of at most an eighth of the weight in bf16, for any batch. */
static void linear_needs_no_copy_of_the_weight(void) {
    enum { SIZE = 4096 };
    for (int i = 0; i < QUANTIZERS; ++i) {
        for (int64_t m = 1; m <= 4096; m *= 8) {
            check_linear_workspace(i, m, SIZE, SIZE, (size_t)SIZE * SIZE * 2 / 8);
        }
    }
}

/* The workspace of moe_backward for four tokens and 16 experts. */
static void check_experts_workspace(int quantizer, int64_t hidden, int64_t inner, size_t limit) {
    enum { EXPERTS = 16, TOKENS = 4, CHOICES = 2 };
    const struct text text = quantizer_of(quantizer);
    const int64_t up_shape[3] = {EXPERTS, 2 * inner, hidden};
    const int64_t down_shape[3] = {EXPERTS, hidden, inner};
    const int64_t x_shape[2] = {TOKENS, hidden};
    const int64_t h_shape[2] = {TOKENS * CHOICES, 2 * inner};
    const int64_t slots[2] = {TOKENS, CHOICES};
    static int64_t ids[TOKENS * CHOICES];
    const struct op_tensors x = shaped(x_shape, 2, "", OPAQ_BF16);
    const struct op_tensors h = shaped(h_shape, 2, "", OPAQ_BF16);
    const struct op_tensors weights = shaped(slots, 2, "", OPAQ_F32);
    const struct op_tensors up = shaped(up_shape, 3, text.text, OPAQ_BF16);
    const struct op_tensors down = shaped(down_shape, 3, text.text, OPAQ_BF16);
    struct opaq_tensor choices = weights.tensor[0];
    char plan[192];
    choices.dtype = OPAQ_DTYPE_I64;
    choices.data = ids;
    (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s grad=xr", text.text, text.text);
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(x.tensor),
                                                              op_tensor_value(x.tensor),
                                                              op_tensor_value(weights.tensor),
                                                              op_tensor_value(&choices),
                                                              op_tensor_value(h.tensor),
                                                              op_list_value(&up),
                                                              op_list_value(&down),
                                                              {.count = 0},
                                                              op_sizes_value(up_shape, 3),
                                                              op_sizes_value(down_shape, 3),
                                                              op_int_value(OPAQ_DTYPE_BF16),
                                                              op_text_value(plan)};
    const size_t bytes = workspace_of("moe_backward", values);
    if (bytes > limit) {
        CHECK_FAIL("%s: the workspace is %zu bytes", plan, bytes);
    }
}

/* The part of the workspace that does not depend on the number of tokens is at most 5 MiB, for an expert of 48
 * MiB in bf16 and for 16 of them. */
static void experts_need_no_copy_of_their_weights(void) {
    for (int i = 0; i < QUANTIZERS; ++i) {
        check_experts_workspace(i, 4096, 2048, (size_t)5 << 20);
    }
}

/* On a GPU the bound is 32 MiB, besides copies of activations. The weights have 256 MiB in bf16. */
static void a_gpu_needs_no_copy_of_a_weight(void) {
    const size_t limit = (size_t)33 << 20;
    struct hiding hiding = hiding_make(64);
    hiding_install();
    device = hiding_device;
    for (int i = 0; i < QUANTIZERS; ++i) {
        check_linear_workspace(i, 8, 16384, 8192, limit);
        check_experts_workspace(i, 8192, 8192, limit);
    }
    device = tensor_cpu;
    hiding_remove();
    hiding_free(&hiding);
}

static const struct test_case tests[] = {TEST(linear_layers),
                                         TEST(empty_sizes),
                                         TEST(mlps),
                                         TEST(mixtures),
                                         TEST(quantized_inputs),
                                         TEST(scales_of_inputs),
                                         TEST(linear_needs_no_copy_of_the_weight),
                                         TEST(experts_need_no_copy_of_their_weights),
                                         TEST(a_gpu_needs_no_copy_of_a_weight)};
TEST_MAIN(tests)
