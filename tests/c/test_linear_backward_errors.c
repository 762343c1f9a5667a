/* test_linear_backward_errors.c: every error of the linear operators' backward and of delayed_update: a status,
 * and a text that begins with the operator's name and contains the numbers. A failed call changes nothing. */
#include "check.h"
#include "support_linear.h"

enum { M = 6, N = 10, K = 16 };

/* The arguments of a valid call, new for each case, and the tensors they point to. */
static struct linear_layer layer;
static struct linear_state state;
static struct op_result forward;
static struct linear_arguments args;
static struct opaq_tensor main_grad;
static float main_grad_numbers[N][K];

static const struct linear_state good_state = {.scale_fwd = {1, 2, 4}, .scale_bwd = {1, 2}};

static void tensors_make(void) {
    layer = linear_layer_make(M, N, K, OPAQ_BF16);
    main_grad = (struct opaq_tensor){
        .data = main_grad_numbers, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {N, K}, .strides = {K, 1}};
}

static void tensors_free(void) {
    op_result_free(&forward);
    linear_layer_free(&layer);
}

static void backward_arguments(const char *plan) {
    const struct linear_given given = {.state = strncmp(plan, "x=fp8+delayed", 13) == 0 ? &state : NULL,
                                       .main_grad = strstr(plan, "main_grad") != NULL ? &main_grad : NULL};
    op_result_free(&forward);
    state = good_state;
    forward = linear_forward(&layer, plan, &given);
    linear_backward_arguments(&layer, plan, &given, &forward, &args);
}

static void refuse(int line, const char *op, enum opaq_status status, const char *part) {
    static const float zeros[N][K];
    linear_refuse(line, op, args.value, status, part);
    CHECK_BYTES(&state, &good_state, sizeof state, "line %d: the state", line);
    CHECK_BYTES(main_grad_numbers, zeros, sizeof zeros, "line %d: main_grad", line);
}

/* A valid call with one change. */
#define BACKWARD(plan, change, status, part)                            \
    do {                                                                \
        backward_arguments(plan);                                       \
        change;                                                         \
        refuse(__LINE__, "linear_backward", OPAQ_ERROR_##status, part); \
    } while (0)
#define CHANGING(plan, change, status, part)                                     \
    do {                                                                         \
        backward_arguments(plan);                                                \
        change;                                                                  \
        refuse(__LINE__, "linear_backward_changing", OPAQ_ERROR_##status, part); \
    } while (0)

#define DATA_PLUS(tensor, bytes) ((tensor).data = (char *)(tensor).data + (bytes))

static const char plain[] = "grad=xwb";
static const char saved[] = "x=nvfp4 w=mxfp8 dy=nvfp4+sr grad=xwb";

static void gradients(void) {
    static const int64_t bad_w[2] = {N + 1, K};
    tensors_make();
    BACKWARD(plain, args.value[0].count = 0, ARGUMENT, "dy is empty");
    BACKWARD("", args.value[0] = op_int_value(0), ARGUMENT, "dy is empty"); /* also without outputs */
    BACKWARD(plain, args.value[0].count = 2, ARGUMENT, "dy has 2 tensors, expected one plain tensor");
    BACKWARD(plain, args.value[1].count = 0, ARGUMENT, "x has 0 tensors, expected one plain tensor");
    BACKWARD(plain, args.value[2].count = 0, ARGUMENT, "w has 0 tensors, expected one plain tensor");
    BACKWARD(plain, args.dy.tensor[0].shape[1] = 9, SHAPE, "dy has the shape [6,9], expected [6,10]");
    BACKWARD(plain, args.x.tensor[0].shape[0] = 5, SHAPE, "x has the shape [5,16], expected [6,16]");
    BACKWARD(plain, args.value[4] = op_sizes_value(bad_w, 2), SHAPE,
             "dy has the shape [6,10], expected [6,11]");
    BACKWARD(plain, args.dy.tensor[0].dtype = OPAQ_DTYPE_U8, ARGUMENT,
             "dy holds uint8, expected f32, bf16 or f16");
    BACKWARD(plain, args.value[5] = op_int_value(OPAQ_DTYPE_U8), ARGUMENT, "x_dtype is uint8");
    BACKWARD(plain, args.value[6] = op_int_value(99), ARGUMENT, "w_dtype is another dtype");
    BACKWARD(plain, args.dy.tensor[0].data = NULL, BUFFER, "dy: view: ");
    BACKWARD(plain, args.w.tensor[0].device.type = OPAQ_DEVICE_CUDA, ARGUMENT, "w is on another device");
    BACKWARD(saved, args.value[1].count = 1, ARGUMENT, "x: got 1 buffers, expected 3");
    BACKWARD(saved, args.w.tensor[0].shape[0] = 3, SHAPE, "w: buffer \"_columnwise_data\" is uint8[3,16]");
    BACKWARD(saved, args.value[7] = op_text_value("x=fp8 w=fp8 grad=q"), TEXT,
             "plan: \"grad=q\" at position 12");
    BACKWARD(saved, args.value[8].tensors = NULL, ARGUMENT,
             "random is missing, but the plan rounds stochastically (sr)");
    BACKWARD("x=nvfp4+sr grad=w save=x", args.value[8].tensors = NULL, ARGUMENT, "random is missing");
    BACKWARD("w=nvfp4+sr grad=x save=w", args.value[8].tensors = NULL, ARGUMENT, "random is missing");
    BACKWARD("dx=nvfp4+sr grad=x", args.value[8].tensors = NULL, ARGUMENT, "random is missing");
    BACKWARD(saved, args.random.dtype = OPAQ_DTYPE_F32, ARGUMENT,
             "random is f32 of rank 1, expected two contiguous int64");
    BACKWARD(saved, args.random.rank = 2, ARGUMENT, "random is int64 of rank 2");
    BACKWARD(saved, args.random.shape[0] = 3, ARGUMENT, "expected two contiguous int64");
    BACKWARD(saved, args.random.strides[0] = 2, ARGUMENT, "expected two contiguous int64");
    BACKWARD(saved, args.random.data = NULL, ARGUMENT, "expected two contiguous int64");
    BACKWARD(saved, DATA_PLUS(args.random, 4), ARGUMENT, "expected two contiguous int64");
    BACKWARD(saved, args.random.device.type = OPAQ_DEVICE_CUDA, ARGUMENT, "on the cpu");
    tensors_free();
}

/* If nothing is rounded in the backward, the random numbers are optional. */
static void random_numbers_that_are_not_needed(void) {
    static const char *const plans[] = {
        "x=nvfp4+sr w=mxfp4+sr grad=xw", "y=fp8+sr grad=xw",
        "x=nvfp4+sr w=mxfp4+sr dy=nvfp4+sr grad=xw save=xw backward=high_precision",
        "dy=nvfp4+sr grad=xw backward=dequantized"};
    tensors_make();
    for (int i = 0; i < 4; ++i) {
        struct op_result with;
        struct op_result without;
        backward_arguments(plans[i]);
        CHECK_EQ_INT(op_call("linear_backward", args.value, NULL, &with, NULL), OPAQ_OK);
        args.value[8].tensors = NULL;
        CHECK_EQ_INT(op_call("linear_backward", args.value, NULL, &without, NULL), OPAQ_OK);
        linear_check_same(&with, &without, LINEAR_DX, plans[i]);
        linear_check_same(&with, &without, LINEAR_DW, plans[i]);
        op_result_free(&with);
        op_result_free(&without);
    }
    tensors_free();
}

static void a_functional_operator_changes_nothing(void) {
    tensors_make();
    BACKWARD("grad=w main_grad=add", (void)0, ARGUMENT,
             "the plan changes main_grad, which linear_backward_changing does");
    BACKWARD("x=fp8+delayed grad=x", (void)0, ARGUMENT, "the plan changes delayed scaling's state");
    BACKWARD("dy=fp8+delayed grad=x", (void)0, ARGUMENT, "the plan changes delayed scaling's state");
    backward_arguments("dy=fp8+delayed grad=b"); /* it has no effect */
    struct op_result result;
    CHECK_EQ_INT(op_call("linear_backward", args.value, NULL, &result, NULL), OPAQ_OK);
    op_result_free(&result);
    tensors_free();
}

static void main_gradients(void) {
    static const char *const plan = "grad=xw main_grad=add";
    struct opaq_tensor other;
    tensors_make();
    const struct opaq_tensor good = main_grad;
    other = good;
#define MAIN_GRAD(change, status, part) \
    CHANGING(plan, (other = good, change, args.value[10].tensors = &other), status, part)
    MAIN_GRAD(other.shape[0] = 9, SHAPE, "main_grad has the shape [9,16], expected [10,16]");
    MAIN_GRAD(other.rank = 1, SHAPE, "main_grad has the shape [10], expected [10,16]");
    MAIN_GRAD(other.dtype = OPAQ_DTYPE_U8, ARGUMENT, "main_grad holds uint8");
    MAIN_GRAD(other.data = NULL, BUFFER, "main_grad: view: ");
    MAIN_GRAD(DATA_PLUS(other, 2), BUFFER, "main_grad: view: the data is not aligned");
    MAIN_GRAD(other.strides[0] = 8, BUFFER, "rows of 16 elements lie 8 elements apart");
    MAIN_GRAD(other.strides[0] = 0, BUFFER, "rows of 16 elements lie 0 elements apart");
    MAIN_GRAD(other.strides[0] = -16, OVERFLOW, "the strides of main_grad are negative");
    MAIN_GRAD(other.strides[1] = 2, BUFFER, "main_grad: ");
    MAIN_GRAD(other.device.type = OPAQ_DEVICE_CUDA, ARGUMENT, "main_grad is on another device");
    MAIN_GRAD(other.data = args.w.tensor[0].data, BUFFER,
              "main_grad, which is changed, overlaps another argument");
    MAIN_GRAD((other.data = args.dy.tensor[0].data, other.dtype = OPAQ_DTYPE_BF16), BUFFER,
              "overlaps another argument");
#undef MAIN_GRAD
    CHANGING(plan, args.value[10].tensors = NULL, ARGUMENT,
             "main_grad is missing, but the plan has \"main_grad=\"");
    CHANGING(plan, args.value[7] = op_text_value(plain), ARGUMENT,
             "main_grad is given, but the plan has no \"main_grad=\"");
    tensors_free();
}

static void delayed_state(void) {
    static const char *const plan = "x=fp8+delayed w=fp8+delayed dy=fp8.e5m2+delayed grad=xw";
    tensors_make();
    CHANGING(plan, args.value[9].tensors = NULL, ARGUMENT, "amax is missing, but the plan is delayed");
    CHANGING(plan, args.value[7] = op_text_value("x=fp8 w=fp8 dy=fp8.e5m2+delayed grad=xw"), ARGUMENT,
             "amax is given, but the plan is not delayed");
    CHANGING(plan, args.amax.shape[0] = 2, ARGUMENT, "amax is 2 x f32, expected 3");
    CHANGING(plan, args.amax.data = NULL, BUFFER, "amax is NULL");
    CHANGING(plan, args.value[11].tensors = NULL, ARGUMENT, "scale_fwd is missing");
    CHANGING(plan, args.value[12].tensors = NULL, SHAPE, "amax_history_fwd is missing, expected [length,3]");
    CHANGING(plan, args.value[13].tensors = NULL, ARGUMENT, "scale_bwd is missing");
    CHANGING(plan, args.value[14].tensors = NULL, SHAPE, "amax_history_bwd is missing, expected [length,2]");
    CHANGING(plan, args.scale[0].shape[0] = 1, ARGUMENT, "scale_fwd is 1 x f32, expected 3");
    CHANGING(plan, args.scale[1].data = NULL, BUFFER, "scale_bwd is NULL");
    CHANGING(plan, args.scale[1].dtype = OPAQ_DTYPE_F16, ARGUMENT, "scale_bwd is 2 x f16");
    CHANGING(plan, args.history[0].shape[1] = 2, SHAPE, "amax_history_fwd is [3,2], expected [length,3]");
    CHANGING(plan, args.history[0].rank = 1, SHAPE, "amax_history_fwd is [3], expected [length,3]");
    CHANGING(plan, args.history[1].shape[0] = 0, SHAPE, "amax_history_bwd is [0,2], expected [length,2]");
    CHANGING(plan, args.history[0].data = NULL, BUFFER, "amax_history_fwd is NULL");
    CHANGING(plan, DATA_PLUS(args.history[0], 1), BUFFER, "amax_history_fwd is not aligned");
    CHANGING(plan, args.history[0].dtype = OPAQ_DTYPE_BF16, ARGUMENT, "amax_history_fwd is 9 x bf16");
    CHANGING(plan, (args.history[0].strides[0] = 1, args.history[0].strides[1] = 3), ARGUMENT,
             "not contiguous");
    CHANGING(plan, (args.history[0].strides[0] = 0, args.history[0].strides[1] = 4), ARGUMENT,
             "not contiguous");
    CHANGING(plan, args.history[0].shape[0] = (int64_t)1 << 62, SHAPE,
             "amax_history_fwd is [4611686018427387904,3], expected [length,3]");
    CHANGING(plan, args.history[0].shape[0] = INT64_MAX, SHAPE, "amax_history_fwd is [9223372036854775807,3]");
    CHANGING(plan, args.history[0].data = args.scale[0].data, BUFFER,
             "scale_fwd, which is changed, overlaps another argument");
    CHANGING(plan, args.scale[1].data = args.scale[0].data, BUFFER, "overlaps another argument");
    CHANGING(plan, args.amax.data = args.history[1].data, BUFFER,
             "amax_history_bwd, which is changed, overlaps");
    tensors_free();
}

static void updates(void) {
    static const char *const plan = "x=fp8+delayed dy=fp8.e5m2+delayed grad=xw";
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
    tensors_make();
    for (int kind = 0; kind < 10; ++kind) {
        static const struct {
            enum opaq_status status;
            const char *part;
        } expected[] = {
            {OPAQ_ERROR_SHAPE, "scale is missing, amax_history [3,3]; expected [3]"},
            {OPAQ_ERROR_SHAPE, "scale is [3], amax_history missing"},
            {OPAQ_ERROR_SHAPE, "scale is [3], amax_history [3,2]"},
            {OPAQ_ERROR_SHAPE, "scale is [1], amax_history [3,3]"},
            {OPAQ_ERROR_SHAPE, "amax_history [0,3]"},
            {OPAQ_ERROR_ARGUMENT, "nothing in the plan's forward is delayed"},
            {OPAQ_ERROR_TEXT, "plan: \"x=fp9\" at position 0"},
            {OPAQ_ERROR_ARGUMENT, "scale is 3 x bf16"},
            {OPAQ_ERROR_BUFFER, "amax_history is NULL"},
            {OPAQ_ERROR_BUFFER, "scale, which is changed, overlaps another argument"},
        };
        struct op_result result;
        struct opaq_error error = {OPAQ_OK, ""};
        backward_arguments(plan);
        memset(values, 0, sizeof values);
        values[0] = op_text_value(kind == 5 ? "x=fp8 dy=fp8+delayed" : kind == 6 ? "x=fp9" : plan);
        values[1].tensors = kind == 0 ? NULL : &args.scale[0];
        values[2].tensors = kind == 1 ? NULL : &args.history[0];
        args.history[0].shape[1] = kind == 2 ? 2 : 3;
        args.scale[0].shape[0] = kind == 3 ? 1 : 3;
        args.history[0].shape[0] = kind == 4 ? 0 : 3;
        args.scale[0].dtype = kind == 7 ? OPAQ_DTYPE_BF16 : OPAQ_DTYPE_F32;
        args.history[0].data = kind == 8 ? NULL : kind == 9 ? args.scale[0].data : args.history[0].data;
        const enum opaq_status status = op_call("delayed_update", values, NULL, &result, &error);
        if (status != expected[kind].status || strncmp(error.text, "delayed_update: ", 16) != 0 ||
            strstr(error.text, expected[kind].part) == NULL) {
            CHECK_FAIL("kind %d: status %d, \"%s\" does not say \"%s\"", kind, (int)status, error.text,
                       expected[kind].part);
        }
        CHECK_BYTES(&state, &good_state, sizeof state, "kind %d: the state", kind);
    }
    tensors_free();
}

static const struct test_case tests[] = {TEST(gradients),
                                         TEST(random_numbers_that_are_not_needed),
                                         TEST(a_functional_operator_changes_nothing),
                                         TEST(main_gradients),
                                         TEST(delayed_state),
                                         TEST(updates)};
TEST_MAIN(tests)
