/* test_grouped_linear_errors.c: every error of grouped_linear, its backward and linear: a status, and a text
 * that begins with the operator's name and contains the numbers. */
#include "check.h"
#include "support_linear.h"

enum { TOKENS = 6, EXPERTS = 3, HIDDEN = 16, INNER = 10 };

static const int64_t random_numbers[2] = {1, 2};
static const float scale = 1;

/* The arguments of a valid call, new for each case, and the tensors they point to. */
struct grouped {
    struct opaq_value value[OPAQ_OP_ARGUMENT_LIMIT];
    struct opaq_tensor x, dy, splits, bias, w, random;
    int64_t w_shape[3], counts[EXPERTS];
};
static struct grouped grouped;

static void grouped_make(bool is_backward, const char *plan) {
    static uint16_t x[TOKENS][HIDDEN];
    static uint16_t dy[TOKENS][INNER];
    static uint16_t w[EXPERTS][INNER][HIDDEN];
    static uint16_t bias[EXPERTS][INNER];
    grouped = (struct grouped){
        .x =
            {.data = x, .dtype = OPAQ_DTYPE_BF16, .rank = 2, .shape = {TOKENS, HIDDEN}, .strides = {HIDDEN, 1}},
        .dy =
            {.data = dy, .dtype = OPAQ_DTYPE_BF16, .rank = 2, .shape = {TOKENS, INNER}, .strides = {INNER, 1}},
        .splits =
            {.data = grouped.counts, .dtype = OPAQ_DTYPE_I64, .rank = 1, .shape = {EXPERTS}, .strides = {1}},
        .bias = {.data = bias,
                 .dtype = OPAQ_DTYPE_BF16,
                 .rank = 2,
                 .shape = {EXPERTS, INNER},
                 .strides = {INNER, 1}},
        .w = {.data = w,
              .dtype = OPAQ_DTYPE_BF16,
              .rank = 3,
              .shape = {EXPERTS, INNER, HIDDEN},
              .strides = {INNER * HIDDEN, HIDDEN, 1}},
        .random = {.data = (void *)(uintptr_t)random_numbers,
                   .dtype = OPAQ_DTYPE_I64,
                   .rank = 1,
                   .shape = {2},
                   .strides = {1}},
        .w_shape = {EXPERTS, INNER, HIDDEN},
        .counts = {1, 3, 2}};
    const struct opaq_value forward[] = {op_tensor_value(&grouped.x),         op_tensor_value(&grouped.splits),
                                         {.tensors = &grouped.w, .count = 1}, op_tensor_value(&grouped.bias),
                                         op_sizes_value(grouped.w_shape, 3),  op_text_value(plan),
                                         op_tensor_value(&grouped.random)};
    const struct opaq_value backward[] = {op_tensor_value(&grouped.dy),
                                          op_tensor_value(&grouped.x),
                                          op_tensor_value(&grouped.splits),
                                          {.tensors = &grouped.w, .count = 1},
                                          op_sizes_value(grouped.w_shape, 3),
                                          op_int_value(OPAQ_DTYPE_BF16),
                                          op_text_value(plan),
                                          op_tensor_value(&grouped.random)};
    memcpy(grouped.value, is_backward ? backward : forward, is_backward ? sizeof backward : sizeof forward);
}

#define DATA_PLUS(tensor, bytes) ((tensor).data = (char *)(tensor).data + (bytes))

#define GROUPED(plan, change, status, part)                                                           \
    do {                                                                                              \
        grouped_make(false, plan);                                                                    \
        change;                                                                                       \
        linear_refuse(__LINE__, "grouped_linear", grouped.value, OPAQ_ERROR_##status, part);          \
        grouped_make(true, plan);                                                                     \
        change;                                                                                       \
        linear_refuse(__LINE__, "grouped_linear_backward", grouped.value, OPAQ_ERROR_##status, part); \
    } while (0)

static void grouped_calls(void) {
    static const int32_t narrow[EXPERTS] = {1, -3, 2};
    for (int is_backward = 0; is_backward < 2; ++is_backward) {
        struct op_result result;
        struct opaq_error error = {OPAQ_OK, ""};
        grouped_make(is_backward, "x=fp8 w=fp8 dy=nvfp4+sr grad=xwb");
        CHECK_EQ_INT(op_call(is_backward ? "grouped_linear_backward" : "grouped_linear", grouped.value, NULL,
                             &result, &error),
                     OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        op_result_free(&result);
    }
    GROUPED("", grouped.splits.dtype = OPAQ_DTYPE_F32, ARGUMENT,
            "splits is f32[3], expected int32 or int64 [3]");
    GROUPED("", grouped.splits.rank = 2, ARGUMENT, "splits is int64[3,0], expected int32 or int64 [3]");
    GROUPED("", grouped.splits.shape[0] = 2, ARGUMENT, "splits is int64[2], expected int32 or int64 [3]");
    GROUPED("", grouped.splits.strides[0] = -1, OVERFLOW, "the strides of splits are negative");
    GROUPED("", grouped.splits.device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
            "splits is on another device than the first tensor");
    GROUPED("", grouped.splits.data = NULL, BUFFER, "splits is NULL");
    GROUPED("", DATA_PLUS(grouped.splits, 1), BUFFER, "splits is not aligned to its elements");
    GROUPED("", grouped.counts[1] = 2, ARGUMENT, "splits make 5 rows, expected the 6 of x");
    GROUPED("", grouped.counts[2] = 3, ARGUMENT, "splits has 3 at 2, expected 0 to 2");
    GROUPED("", grouped.counts[0] = -1, ARGUMENT, "splits has -1 at 0, expected 0 to 6");
    GROUPED("", grouped.counts[1] = INT64_MAX, ARGUMENT,
            "splits has 9223372036854775807 at 1, expected 0 to 5");
    GROUPED("", grouped.counts[0] = INT64_MIN, ARGUMENT,
            "splits has -9223372036854775808 at 0, expected 0 to 6");
    GROUPED("", (grouped.splits.dtype = OPAQ_DTYPE_I32, grouped.splits.data = (void *)(uintptr_t)narrow),
            ARGUMENT, "splits has -3 at 1, expected 0 to 5");
    GROUPED("", grouped.x.data = NULL, BUFFER, "x: view: 6 rows of 16 elements need 192 bytes");
    GROUPED("", grouped.w.data = NULL, BUFFER, "w: view: ");
    GROUPED("", grouped.w.shape[0] = 2, SHAPE, "w has the shape [2,10,16], expected [3,10,16]");
    GROUPED("", grouped.w.dtype = OPAQ_DTYPE_F16, ARGUMENT,
            "x holds bf16, but w holds f16; expected x in f16, or w in bf16 or f32");
    GROUPED("", grouped.w.device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
            "w is on another device than the first tensor");
    GROUPED("", (grouped.w.shape[2] = grouped.w_shape[2] = 15, grouped.w.strides[1] = 16), SHAPE,
            "x has 16 features, expected the 15 of w");
    GROUPED("", grouped.x.dtype = OPAQ_DTYPE_U8, ARGUMENT, "uint8, expected f32, bf16 or f16");
    GROUPED("x=fp8+sr", grouped.value[grouped.value[6].tensors == NULL ? 7 : 6].tensors = NULL, ARGUMENT,
            "random is missing, but the plan rounds stochastically (sr)");
    GROUPED("w=fp8+sr", grouped.random.shape[0] = 1, ARGUMENT,
            "random is int64 of rank 1, expected two contiguous int64");
    static const char *const refused[] = {"y=fp8",         "dx=fp8",
                                          "x_given=fp8",   "dy_given=fp8",
                                          "save=x",        "w=fp8 cache",
                                          "bias_later",    "main_grad=add",
                                          "reduce",        "x=fp8+delayed",
                                          "w=fp8+delayed", "dy=fp8+delayed",
                                          "margin=1",      "history=most_recent"};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; ++i) {
        GROUPED(refused[i], (void)0, UNSUPPORTED,
                "the plan has words beside x=, w=, w_given=, dy=, grad= and backward=, or delayed scaling");
    }
    GROUPED("act=silu", (void)0, TEXT, "plan: \"act=silu\" at position 0: unknown");
    GROUPED("w_given=nvfp4", (void)0, ARGUMENT, "w: got 1 buffers, expected 3");
}

static void grouped_ranks(void) {
    grouped_make(false, "");
    grouped.value[4].count = 2;
    linear_refuse(__LINE__, "grouped_linear", grouped.value, OPAQ_ERROR_SHAPE,
                  "w_shape has 2 sizes, expected three, experts, out features and in features");
    grouped_make(true, "grad=x");
    grouped.value[4].count = 2;
    linear_refuse(__LINE__, "grouped_linear_backward", grouped.value, OPAQ_ERROR_SHAPE,
                  "w_shape has 2 sizes, expected three");
    grouped_make(false, "");
    grouped.x.rank = 0;
    linear_refuse(__LINE__, "grouped_linear", grouped.value, OPAQ_ERROR_SHAPE,
                  "x has 0 dimensions, too few for the shape of y");
    grouped_make(true, "grad=x");
    grouped.x.rank = grouped.dy.rank = 0;
    grouped.w_shape[2] = grouped.w.shape[2] = 1;
    linear_refuse(__LINE__, "grouped_linear_backward", grouped.value, OPAQ_ERROR_SHAPE,
                  "x has no dimensions, expected at least one");
    grouped_make(true, "grad=x");
    grouped.dy.shape[1] = 9;
    linear_refuse(__LINE__, "grouped_linear_backward", grouped.value, OPAQ_ERROR_SHAPE,
                  "dy has the shape [6,9], expected [6,10]");
    grouped_make(true, "grad=x");
    grouped.dy.data = NULL;
    linear_refuse(__LINE__, "grouped_linear_backward", grouped.value, OPAQ_ERROR_BUFFER, "dy: view: ");
    grouped_make(true, "grad=w");
    grouped.value[5] = op_int_value(OPAQ_DTYPE_I32);
    linear_refuse(__LINE__, "grouped_linear_backward", grouped.value, OPAQ_ERROR_ARGUMENT,
                  "w_dtype is int32, expected f32, bf16 or f16");
    grouped_make(false, "");
    grouped.bias.shape[1] = 9;
    linear_refuse(__LINE__, "grouped_linear", grouped.value, OPAQ_ERROR_SHAPE,
                  "bias has the shape [3,9], expected [3,10]");
    grouped_make(false, "");
    grouped.bias.data = NULL;
    linear_refuse(__LINE__, "grouped_linear", grouped.value, OPAQ_ERROR_BUFFER, "bias: view: ");
}

/* linear gets the first matrix of the stack. */
static void linear_make(const char *plan) {
    grouped_make(false, plan);
    grouped.w.rank = 2;
    grouped.w.shape[0] = grouped.w_shape[0] = INNER;
    grouped.w.shape[1] = grouped.w_shape[1] = HIDDEN;
    grouped.w.strides[0] = HIDDEN;
    grouped.w.strides[1] = 1;
    grouped.bias.rank = 1;
    grouped.bias.shape[0] = INNER;
    grouped.bias.strides[0] = 1;
    grouped.random = (struct opaq_tensor){
        .data = (void *)(uintptr_t)&scale, .dtype = OPAQ_DTYPE_F32, .rank = 1, .shape = {1}, .strides = {1}};
    const struct opaq_value values[] = {op_tensor_value(&grouped.x),
                                        {.tensors = &grouped.w, .count = 1},
                                        op_tensor_value(&grouped.bias),
                                        op_sizes_value(grouped.w_shape, 2),
                                        op_text_value(plan),
                                        op_tensor_value(strstr(plan, "fp8") ? &grouped.random : NULL)};
    memset(grouped.value, 0, sizeof grouped.value);
    memcpy(grouped.value, values, sizeof values);
}

#define LINEAR(plan, change, status, part)                                           \
    do {                                                                             \
        linear_make(plan);                                                           \
        change;                                                                      \
        linear_refuse(__LINE__, "linear", grouped.value, OPAQ_ERROR_##status, part); \
    } while (0)

static void linear_calls(void) {
    static const char *const refused[] = {"grad=x",
                                          "save=x",
                                          "y=mxfp8",
                                          "dy=mxfp8",
                                          "dx=mxfp8",
                                          "x_given=mxfp8",
                                          "dy_given=mxfp8",
                                          "w=mxfp8 cache",
                                          "bias_later",
                                          "main_grad=set",
                                          "reduce",
                                          "margin=-1",
                                          "history=most_recent",
                                          "backward=dequantized"};
    for (size_t i = 0; i < sizeof refused / sizeof refused[0]; ++i) {
        LINEAR(refused[i], (void)0, ARGUMENT,
               "the plan has words beside x=, w= and w_given=, which linear_forward takes");
    }
    LINEAR("act=silu", (void)0, TEXT, "plan: \"act=silu\" at position 0: unknown");
    LINEAR("x=nvfp4+sr", (void)0, ARGUMENT,
           "the plan rounds stochastically (sr), for which linear_forward takes random numbers");
    LINEAR("w=mxfp4+sr", (void)0, ARGUMENT, "the plan rounds stochastically (sr)");
    LINEAR("", grouped.value[0].tensors = NULL, ARGUMENT, "x is missing");
    LINEAR("", grouped.x.rank = 0, SHAPE, "x has 0 dimensions, too few for the shape of y");
    LINEAR("", grouped.x.shape[1] = 15, SHAPE, "x of shape [6,15] has 15 features, expected the 16 of w");
    LINEAR("", grouped.value[3].count = 1, SHAPE, "");
    LINEAR("", grouped.value[3].count = 3, SHAPE,
           "w_shape has 3 sizes, expected two, out features and in features");
    LINEAR("", grouped.value[1].count = 2, ARGUMENT, "w has 2 tensors, expected one plain tensor");
    LINEAR("", grouped.w.shape[0] = 9, SHAPE, "w has the shape [9,16], expected [10,16]");
    LINEAR("", grouped.bias.shape[0] = 9, SHAPE, "bias has the shape [9], expected [10]");
    LINEAR("", grouped.bias.device.type = OPAQ_DEVICE_CUDA, ARGUMENT, "bias is on another device");
    LINEAR("w_given=mxfp8", (void)0, ARGUMENT, "w: got 1 buffers, expected 2");
    LINEAR("w_given=nvfp4+columnwise", grouped.value[1].count = 3, SHAPE, "w: buffer \"");
    LINEAR("x=fp8+delayed", grouped.value[5].tensors = NULL, ARGUMENT,
           "input_scale is missing, but x= is delayed");
    LINEAR("x=mxfp8", (grouped.value[5].tensors = &grouped.random), ARGUMENT,
           "input_scale is given, but x= has no scale for a whole tensor");
    LINEAR("x=fp8", grouped.random.shape[0] = 2, ARGUMENT,
           "input_scale is 2 x f32, expected 1 contiguous f32 on the cpu");
    LINEAR("x=fp8", grouped.random.data = NULL, BUFFER, "input_scale is NULL");
}

static const struct test_case tests[] = {TEST(grouped_calls), TEST(grouped_ranks), TEST(linear_calls)};
TEST_MAIN(tests)
