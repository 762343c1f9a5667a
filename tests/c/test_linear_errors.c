/* test_linear_errors.c: every error of linear_forward: a status, and a text that begins with the operator's
 * name and contains the numbers. */
#include "check.h"
#include "support_linear.h"

enum { M = 6, N = 10, K = 16 };

/* The arguments of a valid call, new for each case, and the tensors they point to. */
static struct linear_layer layer;
static struct linear_state state;
static struct linear_arguments args;
static const int64_t *const no_sizes = NULL;

static void tensors_make(void) { layer = linear_layer_make(M, N, K, OPAQ_BF16); }
static void tensors_free(void) { linear_layer_free(&layer); }

static void forward_arguments(const char *plan) {
    const struct linear_given given = {.state = strstr(plan, "delayed") != NULL ? &state : NULL};
    linear_forward_arguments(&layer, plan, &given, &args);
}

/* A valid call with one change. */
#define FORWARD(plan, change, status, part)                                               \
    do {                                                                                  \
        forward_arguments(plan);                                                          \
        change;                                                                           \
        linear_refuse(__LINE__, "linear_forward", args.value, OPAQ_ERROR_##status, part); \
    } while (0)

#define DATA_PLUS(tensor, bytes) ((tensor).data = (char *)(tensor).data + (bytes))

static void plain_inputs(void) {
    static const int64_t x9[9] = {1, 1, 1, 1, 1, 1, 1, 1, K};
    static const int64_t bad_w[3] = {N, K + 1, 1};
    static const int64_t negative[2] = {-M, K};
    tensors_make();
    FORWARD("", args.value[0].count = 0, ARGUMENT, "x is empty");
    FORWARD("", args.value[0].count = -1, ARGUMENT, "x is missing");
    FORWARD("", args.value[0].tensors = NULL, ARGUMENT, "x is missing");
    FORWARD("", args.value[1].tensors = NULL, ARGUMENT, "w is missing");
    FORWARD("", args.value[1] = op_int_value(0), ARGUMENT, "w has 0 tensors, expected one plain tensor");
    FORWARD("", args.value[0].count = 2, ARGUMENT, "x has 2 tensors, expected one plain tensor");
    FORWARD("", args.x.tensor[0].rank = 1, SHAPE, "x has the shape [6], expected [6,16]");
    FORWARD("", args.x.tensor[0].rank = 9, SHAPE, "x has 9 dimensions, at most 8 are allowed");
    FORWARD("", args.x.tensor[0].rank = -1, SHAPE, "x has -1 dimensions");
    FORWARD("", args.x.tensor[0].shape[0] = 7, SHAPE, "x has the shape [7,16], expected [6,16]");
    FORWARD("", args.w.tensor[0].shape[1] = 15, SHAPE, "w has the shape [10,15], expected [10,16]");
    FORWARD("", args.bias.shape[0] = 9, SHAPE, "bias has the shape [9], expected [10]");
    FORWARD("", args.bias.rank = 0, SHAPE, "bias has the shape [], expected [10]");
    FORWARD("", args.x.tensor[0].dtype = OPAQ_DTYPE_F16, ARGUMENT, "x holds f16, expected bf16 or f32");
    FORWARD("", args.w.tensor[0].dtype = OPAQ_DTYPE_U8, ARGUMENT, "w holds uint8, expected bf16 or f32");
    FORWARD("", args.w.tensor[0].dtype = OPAQ_DTYPE_F16, ARGUMENT,
            "x holds bf16, but w holds f16; expected x in f16, or w in bf16 or f32");
    FORWARD("", args.w.tensor[0].dtype = OPAQ_DTYPE_F64, ARGUMENT, "w holds float64, expected bf16 or f32");
    FORWARD("", args.bias.dtype = -1, ARGUMENT, "bias holds another dtype, expected bf16 or f32");
    FORWARD("", args.value[5] = op_int_value(OPAQ_DTYPE_F32), ARGUMENT, "x holds bf16, expected f32");
    FORWARD("", args.value[5] = op_int_value(OPAQ_DTYPE_I64), ARGUMENT,
            "dtype is int64, expected f32, bf16 or f16");
    FORWARD("", args.x.tensor[0].data = NULL, BUFFER, "x: view: 6 rows of 16 elements need 192 bytes");
    FORWARD("", args.w.tensor[0].data = NULL, BUFFER, "and is NULL");
    FORWARD("", args.bias.data = NULL, BUFFER, "bias: view: ");
    FORWARD("", DATA_PLUS(args.x.tensor[0], 1), BUFFER, "x: view: the data is not aligned");
    FORWARD("", args.x.tensor[0].strides[1] = 2, BUFFER, "x: ");
    FORWARD("", args.x.tensor[0].strides[0] = 15, BUFFER, "rows of 16 elements lie 15 elements apart");
    FORWARD("", args.bias.strides[0] = 2, BUFFER, "bias: ");
    FORWARD("", args.w.tensor[0].strides[0] = -16, OVERFLOW, "the strides of w are negative");
    FORWARD("",
            (args.x.tensor[0].device.type = args.w.tensor[0].device.type = args.bias.device.type =
                 OPAQ_DEVICE_CUDA),
            UNSUPPORTED, "cuda:0: this installation has no CUDA back end");
    FORWARD("", args.w.tensor[0].device.type = OPAQ_DEVICE_CUDA, ARGUMENT, "w is on another device");
    FORWARD("", args.bias.device.index = 1, ARGUMENT, "bias is on another device");
    FORWARD("", args.value[3].count = 0, SHAPE, "x_shape has 0 dimensions");
    FORWARD("", args.value[3] = op_sizes_value(x9, 9), SHAPE, "x_shape has 9 dimensions");
    FORWARD("", args.value[3] = op_sizes_value(no_sizes, 2), ARGUMENT, "x_shape is missing");
    FORWARD("", args.value[3].count = -2, ARGUMENT, "x_shape is missing");
    FORWARD("", args.value[3] = op_sizes_value(negative, 2), SHAPE, "-6");
    FORWARD("", args.value[4].count = 1, SHAPE, "w_shape is [10], expected two sizes");
    FORWARD("", args.value[4].count = 0, SHAPE, "");
    FORWARD("", args.value[4] = op_sizes_value(bad_w, 3), SHAPE, "w_shape is [10,17,1], expected two sizes");
    FORWARD("", args.value[4] = op_sizes_value(bad_w, 2), SHAPE,
            "x of shape [6,16] has 16 features, expected the 17 of w");
    tensors_free();
}

static void plans_and_scales(void) {
    static const char *const plan = "x=fp8+delayed w=fp8";
    static char many[OPAQ_LINEAR_PLAN_TEXT_BYTES + 1];
    memset(many, 'x', sizeof many - 1);
    tensors_make();
    FORWARD("", args.value[6].text = NULL, ARGUMENT, "plan is missing");
    FORWARD("", args.value[6].count = -1, ARGUMENT, "plan is missing");
    FORWARD("x=fp8 x_given=fp8", (void)0, TEXT, "plan: \"x=\" does not go with \"x_given=\"");
    FORWARD("x=fp9", (void)0, TEXT, "plan: \"x=fp9\" at position 0");
    FORWARD(many, (void)0, TEXT, "plan: the text has 640 characters, at most 639 are allowed");
    FORWARD(plan, args.value[7].tensors = NULL, ARGUMENT, "scale is missing, but the plan is delayed");
    FORWARD(plan, args.value[6] = op_text_value("x=fp8"), ARGUMENT,
            "scale is given, but the plan is not delayed");
    FORWARD(plan, args.scale[0].shape[0] = 2, ARGUMENT,
            "scale is 2 x f32, expected 3 contiguous f32 on the cpu");
    FORWARD(plan, args.scale[0].shape[0] = -3, ARGUMENT, "scale is -1 x f32");
    FORWARD(plan, args.scale[0].dtype = OPAQ_DTYPE_BF16, ARGUMENT, "scale is 3 x bf16");
    FORWARD(plan, args.scale[0].strides[0] = 2, ARGUMENT, "not contiguous");
    FORWARD(plan, args.scale[0].strides[0] = 0, ARGUMENT, "not contiguous");
    FORWARD(plan, args.scale[0].device.type = OPAQ_DEVICE_CUDA, ARGUMENT, "on another device");
    FORWARD(plan, args.scale[0].data = NULL, BUFFER, "scale is NULL");
    FORWARD(plan, DATA_PLUS(args.scale[0], 2), BUFFER, "scale is not aligned");
    tensors_free();
}

static void quantized_inputs(void) {
    static const char *const plan = "x_given=nvfp4 w_given=mxfp8+both";
    tensors_make();
    struct tensor x = linear_quantized(&layer.x, "nvfp4", OPAQ_ROWWISE, LINEAR_STREAM_X, 1.0f);
    struct tensor w = linear_quantized(&layer.w, "mxfp8", OPAQ_BOTH, LINEAR_STREAM_W, 1.0f);
    for (int kind = 0; kind < 9; ++kind) {
        static const struct {
            enum opaq_status status;
            const char *part;
        } expected[] = {
            {OPAQ_ERROR_ARGUMENT, "x: got 2 buffers, expected 3"},
            {OPAQ_ERROR_ARGUMENT, "w: got 2 buffers, expected 4"},
            {OPAQ_ERROR_ARGUMENT, "w: got 0 buffers, expected 4"},
            {OPAQ_ERROR_SHAPE, "x: buffer \"_rowwise_data\" is uint8[6,7], expected uint8[6,8]"},
            {OPAQ_ERROR_SHAPE, "x: buffer \"_rowwise_data\" is int64[6,8], expected uint8[6,8]"},
            {OPAQ_ERROR_BUFFER, "x: buffer \"_rowwise_data\" is not contiguous"},
            {OPAQ_ERROR_BUFFER, "w: buffer \"_columnwise_data\" is NULL"},
            {OPAQ_ERROR_BUFFER, "x: buffer \"_amax_rowwise\" is not aligned"},
            {OPAQ_ERROR_ARGUMENT, "w: buffer \"_rowwise_scale_inv\" is on another device"},
        };
        forward_arguments(plan);
        args.x = op_tensors_of(&x);
        args.w = op_tensors_of(&w);
        args.value[0].count = kind == 0 ? 2 : 3;
        args.value[1].count = kind == 1 ? 2 : kind == 2 ? 0 : 4;
        args.x.tensor[0].shape[1] = kind == 3 ? 7 : 8;
        args.x.tensor[0].dtype = kind == 4 ? OPAQ_DTYPE_I64 : OPAQ_DTYPE_U8;
        args.x.tensor[0].strides[0] = kind == 5 ? 9 : 8;
        args.w.tensor[2].data = kind == 6 ? NULL : args.w.tensor[2].data;
        args.x.tensor[2].data = (char *)args.x.tensor[2].data + (kind == 7);
        args.w.tensor[1].device.type = kind == 8 ? OPAQ_DEVICE_CUDA : OPAQ_DEVICE_CPU;
        linear_refuse(__LINE__, "linear_forward", args.value, expected[kind].status, expected[kind].part);
    }
    tensor_free(&x);
    tensor_free(&w);
    tensors_free();
}

/* ---- sizes that overflow ---- */

static struct opaq_tensor unreadable(int32_t dtype, int64_t rows, int64_t columns) {
    static _Alignas(64) char somewhere[64]; /* never read: sizes are checked first */
    return (struct opaq_tensor){
        .data = somewhere, .dtype = dtype, .rank = 2, .shape = {rows, columns}, .strides = {columns, 1}};
}

static void refuse_workspace(int line, const char *plan, const int64_t x[2], const int64_t w[2], int32_t dtype,
                             const char *part) {
    const struct opaq_tensor scale = {
        .data = &state, .dtype = OPAQ_DTYPE_F32, .rank = 1, .shape = {1}, .strides = {1}};
    struct opaq_outputs outputs;
    struct opaq_error error = {OPAQ_OK, ""};
    size_t bytes = 7;
    forward_arguments(plan);
    args.x.tensor[0] = unreadable(dtype, x[0], x[1]);
    args.w.tensor[0] = unreadable(dtype, w[0], w[1]);
    args.x.tensor[1] = args.w.tensor[1] = scale;
    args.value[0].count = args.value[1].count = dtype == OPAQ_DTYPE_U8 ? 2 : 1;
    args.value[2].tensors = NULL;
    args.value[3] = op_sizes_value(x, 2);
    args.value[4] = op_sizes_value(w, 2);
    const struct opaq_op *op = opaq_op_find("linear_forward");
    enum opaq_status status = opaq_op_outputs(op, args.value, &outputs, &error);
    if (status == OPAQ_OK) {
        status = opaq_op_workspace(op, args.value, &bytes, &error);
        CHECK_EQ_INT(bytes, 0);
    }
    if (status != OPAQ_ERROR_OVERFLOW || strncmp(error.text, "linear_forward: ", 16) != 0 ||
        strstr(error.text, part) == NULL) {
        CHECK_FAIL("line %d: status %d, \"%s\" does not say \"%s\"", line, (int)status, error.text, part);
    }
}

static void sizes_that_do_not_fit(void) {
    const int64_t big = (int64_t)1 << 62;
    const int64_t fitting = (int64_t)1 << 60;
    tensors_make();
    const struct {
        const char *plan;
        int64_t x[2], w[2];
        int32_t dtype;
        const char *part;
    } cases[] = {
        {"", {big, big}, {1, big}, OPAQ_DTYPE_BF16, ""},
        {"", {big, 2}, {2, 2}, OPAQ_DTYPE_BF16, ""},
        {"", {big / 2, 1}, {8, 1}, OPAQ_DTYPE_BF16, ""},
        {"", {4, 1}, {big, 1}, OPAQ_DTYPE_BF16, ""},
        {"", {2, big / 2}, {1, big / 2}, OPAQ_DTYPE_BF16, ""},
        {"", {1, fitting}, {1, fitting}, OPAQ_DTYPE_BF16, "a product over 1152921504606846976 elements"},
        {"x=fp8", {1, fitting}, {1, fitting}, OPAQ_DTYPE_BF16, "a product over 1152921504606846976 elements"},
        {"x_given=fp8 w_given=fp8",
         {1, big / 2},
         {1, big / 2},
         OPAQ_DTYPE_U8,
         "a product over 2305843009213693952 elements"},
        {"x=nvfp4 w=mxfp8", {big / 2, 1}, {1, 1}, OPAQ_DTYPE_BF16, ""},
        {"x=fp8 y=fp8", {big / 2, 1}, {1, 1}, OPAQ_DTYPE_BF16, "the workspace would have more than 2^62 bytes"},
        {"x=fp8row w=fp8row", {big / 2, 1}, {1, 1}, OPAQ_DTYPE_BF16, ""},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        refuse_workspace(__LINE__ + (int)i, cases[i].plan, cases[i].x, cases[i].w, cases[i].dtype,
                         cases[i].part);
    }
    tensors_free();
}

/* ---- entry point ---- */

static void workspaces_and_outputs(void) {
    static _Alignas(64) char memory[OPAQ_OP_OUTPUT_LIMIT][4096];
    static _Alignas(64) char scratch[1 << 16];
    const struct opaq_op *op = opaq_op_find("linear_forward");
    struct opaq_outputs good;
    struct opaq_error error = {OPAQ_OK, ""};
    size_t needed = 0;
    tensors_make();
    forward_arguments("x=nvfp4 w=mxfp8 grad=xwb");
    CHECK_EQ_INT(opaq_op_outputs(op, args.value, &good, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_op_workspace(op, args.value, &needed, &error), OPAQ_OK);
    CHECK(needed > 0 && needed < sizeof scratch - 64);
    CHECK_EQ_INT(opaq_op_workspace(op, args.value, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_op_outputs(op, args.value, NULL, &error), OPAQ_ERROR_ARGUMENT);
    for (int i = 0; i < good.count; ++i) {
        CHECK(op_tensor_bytes(&good.tensor[i]) <= sizeof memory[i]);
        good.tensor[i].data = memory[i];
    }
    const struct {
        struct opaq_span workspace;
        enum opaq_status status;
    } cases[] = {
        {{scratch, needed}, OPAQ_OK},
        {{scratch, sizeof scratch}, OPAQ_OK},
        {{scratch, needed - 1}, OPAQ_ERROR_BUFFER},
        {{scratch, 0}, OPAQ_ERROR_BUFFER},
        {{NULL, 0}, OPAQ_ERROR_BUFFER},
        {{NULL, needed}, OPAQ_ERROR_BUFFER},
        {{scratch + 32, needed}, OPAQ_ERROR_BUFFER},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        memset(memory, 0x5A, sizeof memory);
        CHECK_EQ_INT(opaq_op_run(op, args.value, &good, cases[i].workspace, NULL, &error), cases[i].status);
        if (cases[i].status != OPAQ_OK) {
            char text[128];
            (void)snprintf(text, sizeof text,
                           "linear_forward: needs a workspace of %zu bytes aligned to 64, got %zu", needed,
                           cases[i].workspace.data == NULL ? 0 : cases[i].workspace.bytes);
            CHECK_EQ_STR(error.text, text);
            CHECK_EQ_INT(memory[0][0], 0x5A);
        }
    }
    const struct opaq_span workspace = {scratch, needed};
    struct opaq_outputs bad = good;
    bad.count -= 1;
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, workspace, NULL, &error), OPAQ_ERROR_ARGUMENT);
    bad = good;
    bad.tensor[0].data = args.x.tensor[0].data; /* y overlaps x */
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, workspace, NULL, &error), OPAQ_ERROR_BUFFER);
    CHECK(strstr(error.text, "linear_forward: output 0 overlaps an argument or another output") == error.text);
    bad = good;
    bad.tensor[2].data = bad.tensor[1].data; /* two tensors of x_saved overlap */
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, workspace, NULL, &error), OPAQ_ERROR_BUFFER);
    bad = good;
    bad.tensor[0].shape[0] = M - 1;
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, workspace, NULL, &error), OPAQ_ERROR_SHAPE);
    CHECK_EQ_INT(opaq_op_run(op, args.value, NULL, workspace, NULL, &error), OPAQ_ERROR_ARGUMENT);
    bad = good;
    memset(bad.first, 0x7F, sizeof bad.first); /* the caller's values are not read */
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, workspace, NULL, &error), OPAQ_OK);
    tensors_free();
}

static const struct test_case tests[] = {TEST(plain_inputs), TEST(plans_and_scales), TEST(quantized_inputs),
                                         TEST(sizes_that_do_not_fit), TEST(workspaces_and_outputs)};
TEST_MAIN(tests)
