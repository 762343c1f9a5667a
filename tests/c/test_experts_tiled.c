/* test_experts_tiled.c: the experts' operators with tiled weights: in every precision each expert gives the
 * same bytes as linear with that expert's weight alone, for any number of threads and any memory; and the same
 * numbers as weights in rows, within the roundings of the precision. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_experts_reference.h"
#include "support_quant.h"
#include "support_spec.h"

/* Formats in which an expert's rows are quantized the same alone and in a stack. */
static const char *const formats[] = {"nvfp4+rowscaled+tiled", "mxfp4+tiled", "mxfp8+tiled", "fp8row+tiled",
                                      "fp8blk2+tiled"};
static const char *const precisions[] = {"", " precision=exact", " precision=near", " precision=fast",
                                         " precision=fast32"};
enum { FORMATS = 5, PRECISIONS = 5 };

/* One choice per token, of weight 1: a token's sum is its expert's result. */
static struct experts_layer layer_make(const struct experts_sizes *size, const char *plan,
                                       enum opaq_element dtype) {
    struct experts_layer layer = experts_layer_make(size, plan, dtype);
    for (int64_t t = 0; layer.is_routed && t < size->tokens; ++t) {
        tensor_set(&layer.weights, t, 0, 1.0f);
    }
    return layer;
}

/* A copy of a tensor's buffers, aligned as tiles require; the caller frees it. */
static struct tensor aligned(const struct tensor *from, size_t shift, void *memory[OPAQ_BUFFER_LIMIT]) {
    struct tensor copy = {from->view};
    for (int i = 0; i < opaq_proto_buffer_count(&from->view.proto); ++i) {
        const size_t bytes = from->view.buffer[i].bytes;
        if (posix_memalign(&memory[i], 64, bytes + 64) != 0) {
            exit(1);
        }
        copy.view.buffer[i].data = (char *)memory[i] + shift;
        memcpy(copy.view.buffer[i].data, from->view.buffer[i].data, bytes);
    }
    return copy;
}

static struct tensor call_linear(const struct tensor *x, const struct tensor *w, const struct tensor *bias,
                                 const char *plan) {
    const struct op_tensors x_tensor = op_tensors_of(x);
    const struct op_tensors list = op_tensors_of(w);
    const int64_t w_shape[2] = {opaq_proto_rows(&w->view.proto), opaq_proto_columns(&w->view.proto)};
    struct opaq_tensor row = op_tensors_of(bias).tensor[0];
    row.rank = 1;
    row.shape[0] = w_shape[0];
    row.strides[0] = 1;
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(x_tensor.tensor),
                                                              op_list_value(&list), op_tensor_value(&row),
                                                              op_sizes_value(w_shape, 2), op_text_value(plan)};
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    struct tensor y =
        tensor_make(opaq_proto_rows(&x->view.proto), w_shape[0], (enum opaq_element)x->view.proto.dtype, NULL);
    if (op_call("linear", values, NULL, &result, &error) != OPAQ_OK) {
        CHECK_FAIL("linear, \"%s\": %s", plan, error.text);
        return y;
    }
    memcpy(y.view.buffer[0].data, result.outputs.tensor[0].data, tensor_bytes(&y, 0));
    op_result_free(&result);
    return y;
}

/* Matrix e of a stack, quantized separately, times x. */
static struct tensor multiply(const struct tensor *x, const struct tensor *stack, const struct tensor *biases,
                              int64_t e, int64_t rows, const char *format, const char *words) {
    const struct opaq_spec spec = spec_of(format);
    void *memory[OPAQ_BUFFER_LIMIT] = {NULL};
    char plan[160];
    struct tensor part = experts_rows(stack, e * rows, rows);
    struct tensor bias = experts_rows(biases, e, 1);
    struct tensor q = quantized(&part, &spec, NULL);
    struct tensor w = aligned(&q, 0, memory);
    (void)snprintf(plan, sizeof plan, "w_given=%s%s", format, words);
    struct tensor y = call_linear(x, &w, &bias, plan);
    for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
        free(memory[i]);
    }
    tensor_free(&part);
    tensor_free(&bias);
    tensor_free(&q);
    return y;
}

/* The layer's y, computed expert by expert. */
static struct tensor composed(const struct experts_layer *layer, const char *format, const char *precision,
                              const char *x_form, const char *h_form) {
    const struct opaq_experts_plan plan = experts_plan_of("");
    struct tensor y = tensor_make_proto(&layer->x.view.proto);
    char words[2][96];
    (void)snprintf(words[0], sizeof words[0], "%s%s%s", precision, x_form[0] ? " x=" : "", x_form);
    (void)snprintf(words[1], sizeof words[1], "%s%s%s", precision, h_form[0] ? " x=" : "", h_form);
    memset(y.view.buffer[0].data, 0, tensor_bytes(&y, 0));
    for (int64_t e = 0; e < layer->size.experts; ++e) {
        struct reference_group group = reference_group_of(layer, &plan, e);
        struct tensor x = reference_gather(layer, &group, &layer->x, REFERENCE_TOKENS);
        struct tensor h =
            multiply(&x, &layer->gate_up, &layer->gate_up_bias, e, layer->width, format, words[0]);
        struct tensor a = experts_activated(&h, "");
        struct tensor part =
            multiply(&a, &layer->down, &layer->down_bias, e, layer->size.hidden, format, words[1]);
        for (int64_t i = 0; i < group.count; ++i) {
            for (int64_t c = 0; c < layer->size.hidden; ++c) {
                tensor_set(&y, group.slot[i], c, tensor_get(&part, i, c));
            }
        }
        tensor_free(&x);
        tensor_free(&h);
        tensor_free(&a);
        tensor_free(&part);
        reference_group_free(&group);
    }
    return y;
}

static void check_case(const struct experts_sizes *size, const char *format, const char *precision,
                       const char *x_form, const char *h_form, enum opaq_element dtype) {
    char plan[256];
    (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s%s%s%s%s%s", format, format, precision,
                   x_form[0] ? " x=" : "", x_form, h_form[0] ? " h=" : "", h_form);
    const char *op = size->choices < 0 ? "mlp" : "moe";
    const struct opaq_spec spec = spec_of(format);
    struct experts_layer layer = layer_make(size, plan, dtype);
    struct tensor expected = composed(&layer, format, precision, x_form, h_form);
    struct tensor q[2] = {quantized(&layer.gate_up, &spec, NULL), quantized(&layer.down, &spec, NULL)};
    void *memory[2][OPAQ_BUFFER_LIMIT] = {{NULL}};
    struct tensor weights[2] = {aligned(&q[0], 0, memory[0]), aligned(&q[1], 0, memory[1])};
    const struct experts_given given = {.gate_up = &weights[0], .down = &weights[1]};
    struct experts_arguments arguments;
    struct op_result result = experts_call(op, &layer, plan, &given);
    experts_arguments(op, &layer, plan, &given, &arguments);
    if (CHECK_EQ_INT(result.outputs.count, 1)) {
        CHECK_BYTES(result.outputs.tensor[0].data, expected.view.buffer[0].data, tensor_bytes(&expected, 0),
                    "%s, \"%s\"", op, plan);
        experts_check_again(op, arguments.value, &result, plan);
    }
    op_result_free(&result);
    for (int w = 0; w < 2; ++w) {
        for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
            free(memory[w][i]);
        }
        tensor_free(&q[w]);
    }
    tensor_free(&expected);
    experts_layer_free(&layer);
}

static void experts_are_linear(void) {
    static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F32, OPAQ_F16};
    static const struct experts_sizes moe = {13, 1, 3, 128, 64}; /* whole tiles of every kind */
    static const struct experts_sizes mlp = {9, -1, 1, 77, 35};
    for (int f = 0; f < FORMATS; ++f) {
        for (int p = 0; p < PRECISIONS; ++p) {
            check_case(&moe, formats[f], precisions[p], "", "", dtypes[(f + p) % 3]);
            check_case(&mlp, formats[f], precisions[p], "", "", dtypes[(f + p + 1) % 3]);
        }
        check_case(&moe, formats[f], "", "nvfp4", "mxfp4", dtypes[f % 3]);
        check_case(&moe, formats[f], " precision=fast", "mxfp4", "nvfp4", dtypes[(f + 1) % 3]);
        check_case(&moe, formats[f], "", "fp8", "mxfp8", dtypes[f % 3]);
    }
}

/* More rows than kernels process at a time, and than a mixture sums up at a time. */
static void long_groups(void) {
    static const int64_t rows[] = {511, 513, 1024, 1030};
    for (int i = 0; i < 4; ++i) {
        const struct experts_sizes size = {rows[i], 1, 1, 32, 32};
        for (int f = i % 2; f < 4; f += 2) {
            check_case(&size, formats[f], precisions[(i + f) % PRECISIONS], "", "", OPAQ_BF16);
        }
    }
}

/* Tiles in unaligned memory are read with other kernels: other roundings, the same numbers. In `exact` sums
 * differ by their order only; `near` rounds activations to 2^-16 of a row's largest, `fast` to 2^-8. */
static void memory_and_precision_change_roundings_only(void) {
    static const double allowed[] = {1e-5, 1e-5, 2e-4, 4e-2, 4e-2}; /* of the largest result; two products */
    static const struct experts_sizes size = {29, 1, 3, 128, 64};
    for (int f = 0; f < FORMATS; ++f) {
        char rows_format[64];
        (void)snprintf(rows_format, sizeof rows_format, "%.*s", (int)(strlen(formats[f]) - strlen("+tiled")),
                       formats[f]);
        const struct opaq_spec tiled = spec_of(formats[f]);
        const struct opaq_spec plain = spec_of(rows_format);
        char plan[256];
        (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s", rows_format, rows_format);
        struct experts_layer layer = layer_make(&size, plan, OPAQ_F32);
        struct tensor q[2] = {quantized(&layer.gate_up, &plain, NULL), quantized(&layer.down, &plain, NULL)};
        struct tensor t[2] = {quantized(&layer.gate_up, &tiled, NULL), quantized(&layer.down, &tiled, NULL)};
        const struct experts_given rows = {.gate_up = &q[0], .down = &q[1]};
        struct op_result expected = experts_call("moe", &layer, plan, &rows);
        double largest = 0.0;
        for (int64_t i = 0; i < 29 * 128 && expected.outputs.count == 1; ++i) {
            largest = fmax(largest, fabs((double)((const float *)expected.outputs.tensor[0].data)[i]));
        }
        for (int p = 0; p < 2 * PRECISIONS; ++p) {
            void *memory[2][OPAQ_BUFFER_LIMIT] = {{NULL}};
            const size_t shift = p % 2 ? 32 : 0;
            struct tensor weights[2] = {aligned(&t[0], shift, memory[0]), aligned(&t[1], shift, memory[1])};
            const struct experts_given given = {.gate_up = &weights[0], .down = &weights[1]};
            (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s%s", formats[f], formats[f],
                           precisions[p / 2]);
            struct op_result result = experts_call("moe", &layer, plan, &given);
            double worst = 0.0;
            for (int64_t i = 0; i < 29 * 128 && result.outputs.count == 1; ++i) {
                worst = fmax(worst, fabs((double)((const float *)result.outputs.tensor[0].data)[i] -
                                         (double)((const float *)expected.outputs.tensor[0].data)[i]));
            }
            const double bound =
                shift != 0 ? 0.0 : allowed[p / 2]; /* unaligned: the kernels for rows, with the same bits */
            if (!(worst <= bound * largest)) {
                CHECK_FAIL("\"%s\", %zu bytes off: %.3g off, of %.3g", plan, shift, worst, largest);
            }
            op_result_free(&result);
            for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
                free(memory[0][i]);
                free(memory[1][i]);
            }
        }
        op_result_free(&expected);
        for (int i = 0; i < 2; ++i) {
            tensor_free(&q[i]);
            tensor_free(&t[i]);
        }
        experts_layer_free(&layer);
    }
}

/* Weights quantized in the call may be tiled too, and the backward reads tiles as any other format. */
static void weights_tiled_in_the_call(void) {
    static const struct experts_sizes size = {21, 2, 3, 40, 24};
    for (int f = 0; f < FORMATS; ++f) {
        char plan[128];
        char rows_plan[128];
        (void)snprintf(plan, sizeof plan, "w=%s backward=dequantized grad=xrbc", formats[f]);
        (void)snprintf(rows_plan, sizeof rows_plan, "w=%.*s backward=dequantized grad=xrbc",
                       (int)(strlen(formats[f]) - strlen("+tiled")), formats[f]);
        struct experts_layer layer = experts_layer_make(&size, plan, OPAQ_F32);
        struct tensor h = experts_forward_h(&layer, rows_plan, NULL);
        struct op_result expected = experts_backward(&layer, rows_plan, NULL, &h);
        struct op_result result = experts_backward(&layer, plan, NULL, &h);
        experts_check_same(&result, &expected, plan);
        op_result_free(&expected);
        op_result_free(&result);
        tensor_free(&h);
        experts_layer_free(&layer);
    }
}

/* Tiled activations give the same results as activations in rows. */
static void tiled_activations(void) {
    static const char *const texts[] = {"nvfp4", "mxfp4", "mxfp8", "fp8row", "nvfp4+rowscaled", "fp8"};
    static const char *const weights[] = {"", " w=nvfp4+tiled", " w=mxfp4+tiled", " w=mxfp8"};
    static const struct experts_sizes sizes[] = {{21, 2, 3, 40, 24}, {1060, 1, 1, 16, 8}, {5, -1, 1, 70, 33}};
    for (int s = 0; s < 3; ++s) {
        for (int i = 0; i < 6 * 4; ++i) {
            char plan[2][128];
            (void)snprintf(plan[0], sizeof plan[0], "x=%s h=%s%s", texts[i / 4], texts[(i / 4 + 1) % 6],
                           weights[i % 4]);
            (void)snprintf(plan[1], sizeof plan[1], "x=%s+tiled h=%s+tiled%s", texts[i / 4],
                           texts[(i / 4 + 1) % 6], weights[i % 4]);
            struct experts_layer layer = experts_layer_make(&sizes[s], plan[0], OPAQ_BF16);
            struct op_result expected = experts_call(layer.is_routed ? "moe" : "mlp", &layer, plan[0], NULL);
            struct op_result result = experts_call(layer.is_routed ? "moe" : "mlp", &layer, plan[1], NULL);
            experts_check_same(&result, &expected, plan[1]);
            op_result_free(&expected);
            op_result_free(&result);
            experts_layer_free(&layer);
        }
    }
}

/* All experts at once, as mlp and moe run with tiled inputs, and one by one, as their training counterparts
 * run. */
static void check_at_once(const struct experts_sizes *size, const char *format, const char *words,
                          const struct experts_given *how) {
    char plan[256];
    (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s %s", format, format, words);
    const struct opaq_spec spec = spec_of(format);
    struct experts_layer layer = experts_layer_make(size, plan, size->hidden % 3 == 0 ? OPAQ_F32 : OPAQ_BF16);
    struct tensor q[2] = {quantized(&layer.gate_up, &spec, NULL), quantized(&layer.down, &spec, NULL)};
    void *memory[2][OPAQ_BUFFER_LIMIT] = {{NULL}};
    struct tensor weights[2] = {aligned(&q[0], 0, memory[0]), aligned(&q[1], 0, memory[1])};
    struct experts_given given = *how;
    given.gate_up = &weights[0];
    given.down = &weights[1];
    struct op_result once = experts_call(layer.is_routed ? "moe" : "mlp", &layer, plan, &given);
    struct op_result each = experts_call(layer.is_routed ? "moe_forward" : "mlp_forward", &layer, plan, &given);
    if (CHECK_EQ_INT(once.outputs.count, 1) && CHECK_EQ_INT(each.outputs.count, 2)) {
        CHECK_BYTES(once.outputs.tensor[0].data, each.outputs.tensor[0].data,
                    op_tensor_bytes(&once.outputs.tensor[0]), "\"%s\", %lld rows", plan,
                    (long long)size->tokens);
    }
    op_result_free(&once);
    op_result_free(&each);
    for (int w = 0; w < 2; ++w) {
        for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
            free(memory[w][i]);
        }
        tensor_free(&q[w]);
    }
    experts_layer_free(&layer);
}

static void all_experts_at_once_equal_one_by_one(void) {
    static const struct experts_sizes sizes[] = {
        {1, 3, 7, 96, 64},    {40, 2, 5, 64, 96}, {19, 2, 3, 128, 128},  {700, 3, 4, 32, 32},
        {2500, 1, 2, 32, 32}, {3, -1, 1, 50, 48}, {1100, -1, 1, 33, 32}, {9, -1, 1, 40, 24},
        {0, 2, 3, 64, 32},    {0, -1, 1, 64, 32}};
    static const char *const more[] = {"", " precision=fast", " weights=input precision=near",
                                       " precision=fast32"};
    struct opaq_pool *pool;
    struct opaq_error error;
    if (!CHECK_EQ_INT(opaq_pool_create(3, &pool, &error), OPAQ_OK)) {
        return;
    }
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    int turn = 0;
    for (int s = 0; s < (int)(sizeof sizes / sizeof sizes[0]); ++s) {
        for (int a = 0; a < OPAQ_ACTIVATION_COUNT; ++a) {
            char words[160];
            const struct experts_given how = {.no_gate_up_bias = turn % 3 == 0,
                                              .no_down_bias = turn % 4 == 0,
                                              .parallel = turn % 2 == 0 ? &parallel : NULL};
            const char *extra = more[turn % 4];
            extra = sizes[s].choices < 0 && strstr(extra, "weights") != NULL ? " precision=near" : extra;
            (void)snprintf(words, sizeof words, "%s%s", experts_activations[a], extra);
            const bool has_blocks =
                sizes[s].choices < 0 || sizes[s].hidden % 128 == 0; /* whole blocks, for fp8blk2 */
            check_at_once(&sizes[s], formats[turn % (has_blocks ? FORMATS : FORMATS - 1)], words, &how);
            turn += 1 + (a % 5 == 4);
        }
    }
    opaq_pool_destroy(pool);
}

/* 2^60 rows without a column: the weight has no bytes, but more rows than are supported. */
static void weights_with_too_many_rows(void) {
    static _Alignas(64) char somewhere[64];
    const int64_t w_shape[2] = {(int64_t)1 << 60, 0};
    const struct opaq_spec spec = spec_of("nvfp4+tiled");
    struct tensor w;
    struct opaq_error error = {OPAQ_OK, ""};
    size_t bytes = 7;
    memset(&w, 0, sizeof w);
    CHECK_EQ_INT(opaq_proto_make(w_shape, 2, OPAQ_BF16, &spec, tensor_cpu, &w.view.proto, &error), OPAQ_OK);
    for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
        w.view.buffer[i].data = somewhere;
    }
    const struct op_tensors list = op_tensors_of(&w);
    const struct opaq_tensor x = {
        .data = somewhere, .dtype = OPAQ_DTYPE_BF16, .rank = 2, .shape = {2, 0}, .strides = {0, 1}};
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        op_tensor_value(&x),
        op_list_value(&list),
        {.count = 0},
        op_sizes_value(w_shape, 2),
        op_text_value("w_given=nvfp4+tiled precision=near")};
    CHECK_EQ_INT(opaq_op_workspace(opaq_op_find("linear"), values, &bytes, &error), OPAQ_ERROR_OVERFLOW);
    CHECK_EQ_STR(error.text, "linear: a tiled weight of 1152921504606846976 rows, at most 2^48 are possible");
}

static const struct test_case tests[] = {
    TEST(experts_are_linear),        TEST(long_groups),       TEST(memory_and_precision_change_roundings_only),
    TEST(weights_tiled_in_the_call), TEST(tiled_activations), TEST(all_experts_at_once_equal_one_by_one),
    TEST(weights_with_too_many_rows)};
TEST_MAIN(tests)
