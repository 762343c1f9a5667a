/* test_api_null.c: every exported function with each pointer NULL in turn, and with invalid values: enums out
 * of range, broken prototypes, specs and views. None crashes, and those that can fail return an error. Also
 * runs under AddressSanitizer and UndefinedBehaviorSanitizer. */
#include <stdlib.h>

#include "check.h"
#include "support_tensor.h"

enum { GARBAGE_COUNT = 6 };
static const int garbage[GARBAGE_COUNT] = {-1, 77, 99, 255, 0x7FFFFFFF, (int)0x80000000u};

/* Memory of one byte repeated, or a valid prototype with one field broken. */
static struct opaq_proto bad_proto(int index) {
    static const int64_t shape[2] = {4, 32};
    struct opaq_spec spec;
    struct opaq_proto proto;
    (void)opaq_spec_make(OPAQ_NVFP4, &spec, NULL);
    (void)opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, &proto, NULL);
    switch (index) {
    case 0:
        memset(&proto, 0xFF, sizeof proto);
        break;
    case 1:
        memset(&proto, 0x5A, sizeof proto);
        break;
    case 2:
        proto.rank = 1000000;
        break;
    case 3:
        proto.rank = -5;
        break;
    case 4:
        proto.spec.format = 200;
        break;
    case 5:
        proto.spec.element = 200;
        break;
    case 6:
        proto.spec.options = 0xFFFF;
        break;
    case 7:
        proto.dtype = 99;
        break;
    case 8:
        proto.shape[0] = INT64_MIN;
        break;
    default:
        proto.is_quantized = 7;
        break;
    }
    return proto;
}
enum { BAD_PROTOS = 10 };

static int is_refused(enum opaq_status status) { return status != OPAQ_OK; }

static void elements_and_tables(void) {
    float values[4] = {1, 2, 3, 4};
    uint32_t codes[4] = {1, 2, 3, 4};
    const uint32_t random[4] = {0};
    for (int i = 0; i < GARBAGE_COUNT; ++i) {
        const int g = garbage[i];
        const enum opaq_element element = (enum opaq_element)g;
        CHECK(opaq_element_info(element) == NULL);
        (void)opaq_element_decode(element, 0xFFFFFFFFu);
        (void)opaq_element_encode(element, 1.0f, (enum opaq_overflow)g);
        (void)opaq_element_encode(OPAQ_E4M3, 1e9f, (enum opaq_overflow)g);
        (void)opaq_element_encode_stochastic(element, 1.0f, 0xFFFFFFFFu);
        opaq_element_decode_array(element, codes, 4, values);
        opaq_element_encode_array(element, values, 4, (enum opaq_overflow)g, codes);
        opaq_element_encode_stochastic_array(element, values, random, 4, codes);
        CHECK(opaq_format_row((enum opaq_format)g) == NULL);
        CHECK(opaq_rule_name((enum opaq_rule)g) == NULL);
        CHECK(opaq_layout_name((enum opaq_layout)g) == NULL && opaq_layout_row(g) == NULL);
        CHECK(opaq_layout_find((enum opaq_layout)g, (enum opaq_format)g) == NULL);
        CHECK_EQ_INT(opaq_layout_shape("R", (enum opaq_format)g, 1, 1, NULL), 0);
        CHECK(opaq_activation_name((enum opaq_activation)g) == NULL);
        CHECK(opaq_activation_is_gated((enum opaq_activation)g) == 0);
        CHECK_EQ_STR(opaq_status_name((enum opaq_status)g), "UNKNOWN");
        CHECK(opaq_op_at(g) == NULL);
        CHECK(opaq_kernel_at(g, NULL) == NULL || (g > 0 && g < 100));
        const struct opaq_extent extents[] = {
            {(enum opaq_dim)g, 1, 1}, {OPAQ_DIM_ROWS, g, 1}, {OPAQ_DIM_ROWS, 1, g}, {OPAQ_DIM_ROWS, 0, 0}};
        for (int k = 0; k < 4; ++k) {
            CHECK(opaq_extent_eval(&extents[k], 100, 100) >= -1);
            CHECK(opaq_extent_eval(&extents[k], INT64_MAX, INT64_MIN) >= -1);
        }
    }
    CHECK(opaq_option_name((enum opaq_option)3) == NULL && opaq_option_name((enum opaq_option)0) == NULL);
    opaq_element_decode_array(OPAQ_F32, NULL, 4, values);
    opaq_element_decode_array(OPAQ_F32, codes, 4, NULL);
    opaq_element_encode_array(OPAQ_F32, NULL, 4, OPAQ_SATURATE, codes);
    opaq_element_encode_array(OPAQ_F32, values, 4, OPAQ_SATURATE, NULL);
    opaq_element_encode_stochastic_array(OPAQ_F32, NULL, random, 4, codes);
    opaq_element_encode_stochastic_array(OPAQ_F32, values, NULL, 4, codes);
    opaq_element_encode_stochastic_array(OPAQ_F32, values, random, 4, NULL);
    CHECK_EQ_INT(opaq_extent_eval(NULL, 1, 1), -1);
    CHECK(opaq_format_find(NULL) == -1 && opaq_layout_number(NULL) == -1 && opaq_op_find(NULL) == NULL);
    uint8_t bytes[512] = {0};
    CHECK(is_refused(opaq_scale_swizzle(NULL, 128, 4, bytes, NULL)));
    CHECK(is_refused(opaq_scale_swizzle(bytes, 128, 4, NULL, NULL)));
    CHECK(is_refused(opaq_scale_unswizzle(NULL, 128, 4, bytes, NULL)));
    CHECK(is_refused(opaq_scale_unswizzle(bytes, 128, 4, NULL, NULL)));
    CHECK(is_refused(opaq_scale_swizzle(bytes, INT64_MIN, INT64_MAX, bytes, NULL)));
    char text[8];
    CHECK_EQ_INT(opaq_cpu_describe(~0u, NULL, 100), opaq_cpu_describe(~0u, text, sizeof text));
    CHECK(opaq_version() != NULL && opaq_kernel_forced() != NULL);
    (void)opaq_cpu_features();
    CHECK_EQ_INT(opaq_cpu_check(NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_device_check((struct opaq_device){OPAQ_DEVICE_CPU, 0}, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_device_check((struct opaq_device){-1, 7}, NULL), OPAQ_ERROR_UNSUPPORTED);
    CHECK_EQ_INT(opaq_device_check((struct opaq_device){2, 0}, NULL), OPAQ_ERROR_UNSUPPORTED);
    CHECK_EQ_INT(opaq_fail(NULL, OPAQ_ERROR_TEXT, "%d", 1), OPAQ_ERROR_TEXT);
    CHECK_EQ_INT(opaq_kernel_force(NULL, NULL), OPAQ_OK);
    CHECK(is_refused(opaq_kernel_force("unknown", NULL)));
}

static void specs(void) {
    struct opaq_spec spec;
    struct opaq_spec bad;
    const struct opaq_spec *shared;
    char text[OPAQ_SPEC_TEXT_BYTES];
    memset(&bad, 0xFF, sizeof bad);
    CHECK_EQ_INT(opaq_spec_make(OPAQ_FP8, &spec, NULL), OPAQ_OK);
    CHECK(is_refused(opaq_spec_make(OPAQ_FP8, NULL, NULL)) &&
          is_refused(opaq_spec_make((enum opaq_format)99, &bad, NULL)));
    CHECK(is_refused(opaq_spec_check(NULL, NULL)) && is_refused(opaq_spec_check(&bad, NULL)));
    CHECK(is_refused(opaq_spec_parse(NULL, 3, &spec, NULL)) &&
          is_refused(opaq_spec_parse("fp8", 3, NULL, NULL)));
    CHECK(is_refused(opaq_spec_print(NULL, text, sizeof text, NULL)) &&
          is_refused(opaq_spec_print(&spec, NULL, sizeof text, NULL)) &&
          is_refused(opaq_spec_print(&bad, text, sizeof text, NULL)));
    CHECK(is_refused(opaq_spec_intern(NULL, 3, &shared, NULL)) &&
          is_refused(opaq_spec_intern("fp8", 3, NULL, NULL)));
    CHECK(!opaq_spec_equal(NULL, &spec) && !opaq_spec_equal(&spec, NULL) && !opaq_spec_equal(NULL, NULL));
    CHECK(opaq_spec_hash(NULL) == 0 && opaq_spec_hash(&bad) != 0);
    CHECK(opaq_rows_together(NULL) == 0 && opaq_rows_together(&bad) == 0);
    CHECK(opaq_quantize_kernel(NULL) == NULL && opaq_quantize_kernel(&bad) == NULL);
    CHECK(opaq_dequantize_kernel(NULL) == NULL && opaq_dequantize_kernel(&bad) == NULL);
    CHECK(opaq_linear_kernel(&bad, NULL, OPAQ_F32, OPAQ_PRECISION_EXACT) == NULL &&
          opaq_linear_kernel(NULL, &bad, OPAQ_F32, OPAQ_PRECISION_EXACT) == NULL);
    const struct opaq_device unknown = {99, 0};
    CHECK(opaq_device_linear_kernel(unknown, NULL, NULL, OPAQ_F32, OPAQ_PRECISION_EXACT) == NULL);
    for (int i = 0; i < GARBAGE_COUNT; ++i) {
        (void)opaq_linear_kernel(NULL, NULL, (enum opaq_element)garbage[i], OPAQ_PRECISION_FAST);
        CHECK_EQ_INT(opaq_spec_parse("nvfp4+tiled", 11, &spec, NULL), OPAQ_OK);
        (void)opaq_linear_kernel(&spec, NULL, (enum opaq_element)garbage[i], OPAQ_PRECISION_FAST);
        CHECK(opaq_linear_kernel(&spec, NULL, OPAQ_F32, (enum opaq_precision)garbage[i]) == NULL);
    }
    struct opaq_linear_plan linear;
    struct opaq_experts_plan experts;
    CHECK(is_refused(opaq_linear_plan_parse(NULL, 1, &linear, NULL)) &&
          is_refused(opaq_linear_plan_parse("", 0, NULL, NULL)));
    CHECK(is_refused(opaq_experts_plan_parse(NULL, 1, &experts, NULL)) &&
          is_refused(opaq_experts_plan_parse("act=silu", 8, NULL, NULL)));
}

/* Calls every query of a prototype. Returns how many calls succeeded. */
static int query_all(const struct opaq_proto *proto) {
    struct opaq_proto copy;
    struct opaq_buffer buffer;
    struct opaq_view view;
    struct opaq_stored stored;
    struct opaq_span spans[OPAQ_BUFFER_LIMIT] = {{NULL, 0}};
    char text[OPAQ_PROTO_TEXT_BYTES];
    size_t bytes;
    _Alignas(64) static unsigned char memory[4096];
    memset(&stored, 0, sizeof stored);
    (void)opaq_proto_rows(proto);
    (void)opaq_proto_columns(proto);
    const int count = opaq_proto_buffer_count(proto);
    CHECK(count >= 0 && count <= OPAQ_BUFFER_LIMIT);
    for (int i = 0; i < GARBAGE_COUNT; ++i) {
        (void)opaq_proto_find(proto, (enum opaq_role)garbage[i], (enum opaq_usage)garbage[i]);
        (void)opaq_amax_count(proto, (enum opaq_usage)garbage[i]);
    }
    (void)opaq_proto_equal(proto, proto);
    if (proto != NULL) {
        copy = *proto;
    }
    return !is_refused(opaq_proto_check(proto, NULL)) +
           !is_refused(opaq_proto_buffer(proto, 0, &buffer, NULL)) +
           !is_refused(opaq_proto_bytes(proto, &bytes, NULL)) +
           !is_refused(opaq_proto_update_usage(proto == NULL ? NULL : &copy, OPAQ_BOTH, NULL)) +
           !is_refused(opaq_proto_print(proto, text, sizeof text, NULL)) +
           !is_refused(opaq_view_quantized(proto, spans, count, &view, NULL)) +
           !is_refused(opaq_view_bind_bytes(proto, &bytes, NULL)) +
           !is_refused(opaq_view_bind(proto, memory, sizeof memory, &view, NULL)) +
           !is_refused(opaq_stored_describe(proto, 1, &stored, NULL)) +
           !is_refused(opaq_stored_check(proto, 0, &stored, NULL));
}

static void prototypes(void) {
    static const int64_t shape[OPAQ_RANK_LIMIT] = {4, 32};
    struct opaq_proto proto;
    struct opaq_spec spec;
    struct opaq_buffer buffer;
    struct opaq_view view;
    struct opaq_stored stored;
    char text[OPAQ_PROTO_TEXT_BYTES];
    size_t bytes;
    CHECK_EQ_INT(query_all(NULL), 0);
    for (int i = 0; i < BAD_PROTOS; ++i) {
        proto = bad_proto(i);
        const int accepted = query_all(&proto);
        if (accepted != 0) {
            CHECK_FAIL("%d calls took bad prototype %d", accepted, i);
        }
    }
    CHECK(opaq_proto_rows(NULL) == 0 && opaq_proto_columns(NULL) == 0);
    (void)opaq_spec_make(OPAQ_NVFP4, &spec, NULL);
    CHECK_EQ_INT(opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, &proto, NULL), OPAQ_OK);
    CHECK(!opaq_proto_equal(NULL, &proto) && !opaq_proto_equal(&proto, NULL));
    CHECK(is_refused(opaq_proto_make(NULL, 2, OPAQ_F32, &spec, tensor_cpu, &proto, NULL)));
    CHECK(is_refused(opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, NULL, NULL)));
    CHECK(is_refused(opaq_proto_parse(NULL, 3, &proto, NULL)) &&
          is_refused(opaq_proto_parse("f32[1] cpu", 10, NULL, NULL)));
    CHECK(is_refused(opaq_proto_buffer(&proto, 0, NULL, NULL)) &&
          is_refused(opaq_proto_buffer(&proto, 99, &buffer, NULL)) &&
          is_refused(opaq_proto_buffer(&proto, -1, &buffer, NULL)));
    CHECK(is_refused(opaq_proto_bytes(&proto, NULL, NULL)));
    CHECK(is_refused(opaq_proto_print(&proto, NULL, sizeof text, NULL)));
    CHECK(is_refused(opaq_view_bind_bytes(&proto, NULL, NULL)));
    CHECK_EQ_INT(opaq_view_bind_bytes(&proto, &bytes, NULL), OPAQ_OK);
    CHECK(is_refused(opaq_view_bind(&proto, NULL, bytes, &view, NULL)));
    CHECK(is_refused(opaq_view_bind(&proto, text, 0, NULL, NULL)));
    CHECK(is_refused(opaq_view_quantized(&proto, NULL, 3, &view, NULL)));
    CHECK(is_refused(opaq_view_plain(NULL, NULL, 2, OPAQ_F32, tensor_cpu, text, 4, &view, NULL)));
    CHECK(is_refused(opaq_view_plain(shape, NULL, 2, OPAQ_F32, tensor_cpu, NULL, 512, &view, NULL)));
    CHECK(is_refused(opaq_view_plain(shape, NULL, 2, OPAQ_F32, tensor_cpu, text, 512, NULL, NULL)));
    CHECK(is_refused(opaq_stored_describe(&proto, 1, NULL, NULL)));
    memset(&stored, 0xFF, sizeof stored);
    CHECK(is_refused(opaq_stored_check(&proto, 0, &stored, NULL)) &&
          is_refused(opaq_stored_check(&proto, 0, NULL, NULL)));
    for (int i = 0; i < GARBAGE_COUNT; ++i) {
        CHECK(is_refused(opaq_proto_make(shape, garbage[i], OPAQ_F32, &spec, tensor_cpu, &proto, NULL)) ||
              garbage[i] == 7);
        CHECK(is_refused(
            opaq_proto_make(shape, 2, (enum opaq_element)garbage[i], &spec, tensor_cpu, &proto, NULL)));
        CHECK(is_refused(
            opaq_proto_make(shape, 2, OPAQ_F32, &spec, (struct opaq_device){garbage[i], 0}, &proto, NULL)));
    }
}

static void operations(void) {
    struct tensor x = tensor_make(4, 32, OPAQ_F32, NULL);
    struct tensor q = tensor_make(4, 32, OPAQ_F32, "nvfp4");
    struct tensor y = tensor_make(4, 32, OPAQ_F32, NULL);
    struct opaq_noise noise;
    struct opaq_view none;
    struct opaq_stored stored;
    const struct opaq_parallel no_run = {NULL, NULL};
    const struct opaq_execution execution = {.parallel = &no_run};
    float amax;
    tensor_fill(&x, FILL_NORMAL, 1);
    memset(&none, 0xFF, sizeof none);
    memset(&stored, 0, sizeof stored);
    CHECK_EQ_INT(opaq_quantize(&x.view, NULL, &execution, &q.view, NULL), OPAQ_OK);
    const struct opaq_view *views[] = {NULL, &none};
    for (int i = 0; i < 2; ++i) {
        CHECK(is_refused(opaq_view_check(views[i], NULL)));
        CHECK(is_refused(opaq_quantize(views[i], NULL, NULL, &q.view, NULL)) &&
              is_refused(opaq_quantize(&x.view, NULL, NULL, views[i], NULL)));
        CHECK(is_refused(opaq_dequantize(views[i], 0, NULL, &y.view, NULL)) &&
              is_refused(opaq_dequantize(&q.view, 0, NULL, views[i], NULL)));
        CHECK(is_refused(opaq_noise_measure(views[i], &q.view, 0, NULL, &noise, NULL)) &&
              is_refused(opaq_noise_measure(&x.view, views[i], 0, NULL, &noise, NULL)));
        CHECK(is_refused(opaq_amax(views[i], &q.view.proto.spec, OPAQ_ROWWISE, NULL, &amax, 1, NULL)));
        CHECK(is_refused(opaq_stored_import(views[i], 0, &stored, NULL)) &&
              is_refused(opaq_stored_export(views[i], 0, 4, &stored, NULL)));
    }
    CHECK_EQ_INT(opaq_dequantize(&q.view, 0, &execution, &y.view, NULL), OPAQ_OK);
    CHECK(is_refused(opaq_noise_measure(&x.view, &q.view, 0, NULL, NULL, NULL)));
    CHECK(opaq_noise_sqnr(NULL) == 0.0);
    CHECK(is_refused(opaq_amax(&x.view, NULL, OPAQ_ROWWISE, NULL, &amax, 1, NULL)) &&
          is_refused(opaq_amax(&x.view, &q.view.proto.spec, OPAQ_ROWWISE, NULL, NULL, 1, NULL)));
    CHECK(is_refused(opaq_stored_import(&q.view, 0, NULL, NULL)) &&
          is_refused(opaq_stored_import(&q.view, 0, &stored, NULL)) &&
          is_refused(opaq_stored_export(&q.view, 0, 4, NULL, NULL)) &&
          is_refused(opaq_stored_export(&q.view, INT64_MIN, INT64_MAX, &stored, NULL)));
    float history[2] = {1, 1};
    float scale = 1;
    const struct opaq_delayed_state states[] = {{NULL, &scale, 2, 1},
                                                {history, NULL, 2, 1},
                                                {history, &scale, 0, 1},
                                                {history, &scale, INT64_MAX, INT64_MAX}};
    CHECK(is_refused(opaq_delayed_update(NULL, NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL)));
    for (int i = 0; i < 4; ++i) {
        CHECK(is_refused(opaq_delayed_update(&states[i], NULL, OPAQ_E4M3, 0, OPAQ_AMAX_MAX, NULL, NULL)));
    }
    for (int i = 0; i < GARBAGE_COUNT; ++i) {
        const struct opaq_delayed_state state = {history, &scale, 2, 1};
        CHECK(is_refused(
            opaq_delayed_update(&state, NULL, (enum opaq_element)garbage[i], 0, OPAQ_AMAX_MAX, NULL, NULL)));
        CHECK(is_refused(
            opaq_delayed_update(&state, NULL, OPAQ_E4M3, 0, (enum opaq_amax_algorithm)garbage[i], NULL, NULL)));
        CHECK(is_refused(opaq_dequantize(&q.view, garbage[i], NULL, &y.view, NULL)));
        CHECK(is_refused(opaq_noise_measure(&x.view, &q.view, garbage[i], NULL, &noise, NULL)));
        CHECK(is_refused(
            opaq_amax(&x.view, &q.view.proto.spec, (enum opaq_usage)garbage[i], NULL, &amax, 1, NULL)));
    }
    tensor_free(&y);
    tensor_free(&q);
    tensor_free(&x);
}

static enum opaq_status allocate_nothing(void *context, struct opaq_outputs *outputs, size_t bytes,
                                         struct opaq_span *workspace, struct opaq_error *error) {
    (void)context, (void)outputs, (void)bytes, (void)workspace, (void)error;
    return OPAQ_OK;
}

/* Calls every query of one row with one set of values; `give` supplies no memory. */
static void query_op(const struct opaq_op *op, const struct opaq_value *values) {
    const struct opaq_memory memory = {allocate_nothing, NULL};
    struct opaq_outputs outputs;
    struct opaq_form form;
    int64_t handle;
    size_t bytes;
    for (int i = -1; i <= OPAQ_OP_RESULT_LIMIT; ++i) {
        (void)opaq_op_form(op, values, i, &form, NULL);
    }
    memset(&outputs, 0, sizeof outputs);
    (void)opaq_op_outputs(op, values, &outputs, NULL);
    (void)opaq_op_workspace(op, values, &bytes, NULL);
    (void)opaq_op_run(op, values, &outputs, (struct opaq_span){NULL, 0}, NULL, NULL);
    (void)opaq_op_call(op, values, &memory, NULL, NULL);
    (void)opaq_runner_create(op, values, NULL, &handle, NULL);
}

static void operators(void) {
    static const char *const texts[] = {"", "nvfp4", "x=nvfp4 w=nvfp4", "act=silu", "?"};
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor tensors[3];
    const int64_t sizes[4] = {-1, INT64_MAX, INT64_MIN, 3};
    char text[OPAQ_OP_SCHEMA_BYTES];
    struct opaq_form form;
    size_t bytes;
    memset(tensors, 0, sizeof tensors);
    tensors[1].dtype = 99;
    tensors[1].rank = 2;
    tensors[1].shape[0] = INT64_MAX;
    tensors[1].shape[1] = INT64_MIN;
    tensors[1].strides[0] = INT64_MIN;
    memset(&tensors[2], 0xFF, sizeof tensors[2]);
    query_op(NULL, NULL);
    CHECK(opaq_op_changes(NULL) == 0 && is_refused(opaq_op_schema(NULL, text, sizeof text, NULL)));
    for (int i = 0; i < opaq_op_count(); ++i) {
        const struct opaq_op *op = opaq_op_at(i);
        CHECK(is_refused(opaq_op_schema(op, NULL, sizeof text, NULL)));
        query_op(op, NULL);
        memset(values, 0, sizeof values);
        query_op(op, values);
        CHECK(is_refused(opaq_op_form(op, values, 0, NULL, NULL)) &&
              is_refused(opaq_op_outputs(op, values, NULL, NULL)) &&
              is_refused(opaq_op_workspace(op, values, NULL, NULL)));
        for (int t = 0; t < 3 * 5; ++t) {
            for (int k = 0; k < OPAQ_OP_ARGUMENT_LIMIT; ++k) {
                const char *word = texts[t / 3];
                values[k] = (struct opaq_value){.tensors = &tensors[t % 3], .text = word, .sizes = sizes};
                values[k].count =
                    k < op->argument_count && op->argument[k].kind == OPAQ_ARGUMENT_TEXT
                        ? (int64_t)strlen(word)
                        : (k < op->argument_count && op->argument[k].kind == OPAQ_ARGUMENT_TENSOR_LIST ? 1 : 4);
                values[k].integer = garbage[t % GARBAGE_COUNT];
            }
            query_op(op, values);
            (void)opaq_op_form(op, values, 0, NULL, NULL);
            (void)opaq_op_outputs(op, values, NULL, NULL);
            (void)opaq_op_workspace(op, values, NULL, NULL);
            (void)opaq_op_run(op, values, NULL, (struct opaq_span){NULL, 0}, NULL, NULL);
            CHECK(is_refused(opaq_op_call(op, values, NULL, NULL, NULL)));
            (void)opaq_runner_create(op, values, NULL, NULL, NULL);
            for (int k = 0; k < op->argument_count; ++k) { /* each pointer NULL in turn, with a count */
                const struct opaq_value kept = values[k];
                values[k].tensors = NULL;
                values[k].text = NULL;
                values[k].sizes = NULL;
                query_op(op, values);
                values[k] = kept;
            }
        }
    }
    CHECK(is_refused(opaq_op_form(NULL, values, 0, &form, NULL)));
    CHECK(is_refused(opaq_op_workspace(NULL, values, &bytes, NULL)));
}

static enum opaq_status run_nothing(void *state, const struct opaq_runner_call *call,
                                    struct opaq_error *error) {
    (void)state, (void)call, (void)error;
    return OPAQ_OK;
}

static void runners_and_pools(void) {
    const struct opaq_runner_info info = {.in_features = 4, .out_features = 4};
    const struct opaq_runner_functions functions = {.abi = OPAQ_RUNNER_ABI, .run = run_nothing};
    const struct opaq_runner_functions none = {0};
    struct opaq_runner_info bad = info;
    struct opaq_runner_info found;
    struct opaq_tensor tensor;
    const struct opaq_span no_span = {NULL, 0};
    int64_t handle = 0;
    size_t bytes;
    memset(&tensor, 0xFF, sizeof tensor);
    CHECK(is_refused(opaq_runner_register(NULL, &functions, NULL, &handle, NULL)) &&
          is_refused(opaq_runner_register(&info, NULL, NULL, &handle, NULL)) &&
          is_refused(opaq_runner_register(&info, &none, NULL, &handle, NULL)) &&
          is_refused(opaq_runner_register(&info, &functions, NULL, NULL, NULL)));
    for (int i = 0; i < GARBAGE_COUNT; ++i) {
        bad.kind = garbage[i];
        CHECK(is_refused(opaq_runner_register(&bad, &functions, NULL, &handle, NULL)));
        CHECK(is_refused(opaq_runner_query(garbage[i], &found, NULL)) &&
              is_refused(opaq_runner_destroy(garbage[i], NULL)) &&
              is_refused(opaq_runner_workspace(garbage[i], &tensor, 1, &bytes, NULL)) &&
              is_refused(opaq_runner_run(garbage[i], &tensor, 1, &tensor, no_span, NULL, NULL)));
    }
    CHECK_EQ_INT(opaq_runner_register(&info, &functions, NULL, &handle, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_runner_count(), 1);
    CHECK(is_refused(opaq_runner_query(handle, NULL, NULL)) &&
          is_refused(opaq_runner_workspace(handle, NULL, 1, &bytes, NULL)) &&
          is_refused(opaq_runner_workspace(handle, &tensor, 1, NULL, NULL)) &&
          is_refused(opaq_runner_run(handle, NULL, 1, &tensor, no_span, NULL, NULL)) &&
          is_refused(opaq_runner_run(handle, &tensor, 1, NULL, no_span, NULL, NULL)) &&
          is_refused(opaq_runner_run(handle, &tensor, 1, &tensor, no_span, NULL, NULL)));
    CHECK_EQ_INT(opaq_runner_destroy(handle, NULL), OPAQ_OK);
    struct opaq_pool *pool = NULL;
    CHECK(is_refused(opaq_pool_create(1, NULL, NULL)) && is_refused(opaq_pool_create(-1, &pool, NULL)) &&
          is_refused(opaq_pool_create(100000, &pool, NULL)));
    opaq_pool_destroy(NULL);
    CHECK_EQ_INT(opaq_pool_threads(NULL), 1);
    const struct opaq_parallel parallel = opaq_pool_parallel(NULL);
    CHECK(parallel.run != NULL && parallel.context == NULL);
}

static void patterns(void) {
    struct opaq_patterns *made = NULL;
    CHECK(is_refused(opaq_patterns_create(NULL, NULL)));
    CHECK_EQ_INT(opaq_patterns_create(&made, NULL), OPAQ_OK);
    CHECK(is_refused(opaq_patterns_add(NULL, "a", NULL)) && is_refused(opaq_patterns_add(made, NULL, NULL)));
    CHECK(opaq_patterns_find(NULL, "a") < 0 && opaq_patterns_find(made, NULL) < 0);
    opaq_patterns_destroy(made);
    opaq_patterns_destroy(NULL);
}

static void plans_and_derived_specs(void) {
    char text[OPAQ_PLAN_TEXT_BYTES];
    struct opaq_spec made;
    struct opaq_spec bad;
    memset(&bad, 0xFF, sizeof bad);
    CHECK(is_refused(opaq_plan_set(NULL, "x", "mxfp8", text, sizeof text, NULL)) &&
          is_refused(opaq_plan_set("", NULL, "mxfp8", text, sizeof text, NULL)) &&
          is_refused(opaq_plan_set("", "x", "mxfp8", NULL, sizeof text, NULL)) &&
          is_refused(opaq_plan_set("", "x", "mxfp8", text, 0, NULL)) &&
          is_refused(opaq_plan_set("", "no such word", "", text, sizeof text, NULL)));
    CHECK_EQ_INT(opaq_plan_set("", "x", NULL, text, sizeof text, NULL), OPAQ_OK);
    CHECK(is_refused(opaq_plan_get(NULL, "x", text, sizeof text, NULL)) &&
          is_refused(opaq_plan_get("x=mxfp8", NULL, text, sizeof text, NULL)) &&
          is_refused(opaq_plan_get("x=mxfp8", "x", NULL, sizeof text, NULL)) &&
          is_refused(opaq_plan_get("x=mxfp8", "x", text, 0, NULL)));
    CHECK_EQ_INT(opaq_spec_query(NULL, OPAQ_SPEC_ROWS_PER_SCALE), -1);
    CHECK_EQ_INT(opaq_spec_query(&bad, OPAQ_SPEC_ROWS_PER_SCALE), -1);
    CHECK(is_refused(opaq_spec_derive(NULL, OPAQ_DERIVE_TILED, &made, NULL)) &&
          is_refused(opaq_spec_derive(&bad, OPAQ_DERIVE_TILED, &made, NULL)));
}

static void configurations(void) {
    const struct opaq_config_value object = {.kind = OPAQ_JSON_OBJECT};
    const struct opaq_config_value bad = {-5, 99, NULL, NULL, -1};
    struct opaq_config *config = NULL;
    struct opaq_config_scheme scheme;
    CHECK(is_refused(opaq_config_read(NULL, 1, &config, NULL)) &&
          is_refused(opaq_config_read(&object, 0, &config, NULL)) &&
          is_refused(opaq_config_read(&object, -1, &config, NULL)) &&
          is_refused(opaq_config_read(&object, 1, NULL, NULL)) &&
          is_refused(opaq_config_read(&bad, 1, &config, NULL)));
    CHECK(opaq_config_layout(NULL, 1) == -1 && opaq_config_layout(&object, 0) == -1 &&
          opaq_config_layout(&bad, 1) == -1);
    opaq_config_destroy(NULL);
    CHECK(opaq_config_scheme(NULL, 0) == NULL && opaq_config_target(NULL, 0, 0) == NULL &&
          opaq_config_ignored(NULL, 0) == NULL && opaq_config_weight_name(NULL, 0) == NULL);
    CHECK_EQ_INT(opaq_layout_scheme((enum opaq_layout)99, 0, &scheme), 0);
    CHECK_EQ_INT(opaq_layout_scheme((enum opaq_layout)0, -1, &scheme), 0);
    CHECK_EQ_INT(opaq_layout_scheme((enum opaq_layout)0, 0, NULL), 0);
    CHECK(opaq_layout_method(NULL, OPAQ_ACTIVATIONS_NONE) == NULL &&
          opaq_layout_method(opaq_layout_row(0), (enum opaq_activations) - 1) == NULL);
    CHECK(opaq_config_row((enum opaq_format)99) == NULL);
}

/* Every function in the list of exported symbols must be called above. */
static void every_exported_function_is_called(void) {
    const char *folder = getenv("OPAQ_GOLDEN_DIR");
    char path[1024];
    char line[128];
    static char source[65536];
    if (folder == NULL) {
        printf("  skipped: OPAQ_GOLDEN_DIR is not set, the list of symbols lies beside it\n");
        return;
    }
    (void)snprintf(path, sizeof path, "%s/../c/test_api_null.c", folder);
    FILE *file = fopen(path, "r");
    const size_t length = file == NULL ? 0 : fread(source, 1, sizeof source - 1, file);
    CHECK(length > 0 && length < sizeof source - 1 && fclose(file) == 0);
    (void)snprintf(path, sizeof path, "%s/../../tools/exported_symbols.txt", folder);
    file = fopen(path, "r");
    int count = 0;
    while (CHECK(file != NULL) && fgets(line, sizeof line, file) != NULL) {
        line[strcspn(line, "\n")] = '\0';
        (void)strncat(line, "(", sizeof line - strlen(line) - 1);
        if (strstr(source, line) == NULL) {
            CHECK_FAIL("%s is exported and not called here", line);
        }
        ++count;
    }
    CHECK(count > 80 && fclose(file) == 0);
}

static const struct test_case tests[] = {TEST(elements_and_tables),
                                         TEST(specs),
                                         TEST(prototypes),
                                         TEST(operations),
                                         TEST(operators),
                                         TEST(runners_and_pools),
                                         TEST(patterns),
                                         TEST(plans_and_derived_specs),
                                         TEST(configurations),
                                         TEST(every_exported_function_is_called)};
TEST_MAIN(tests)
