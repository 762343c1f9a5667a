/* test_experts_errors.c: every error of mlp, moe and their training operators: a status, and a text that begins
 * with the operator's name and contains the numbers. */
#include "check.h"
#include "support_experts.h"
#include "support_linear.h"
#include "support_quant.h"
#include "support_spec.h"

enum { TOKENS = 6, CHOICES = 2, EXPERTS = 3, HIDDEN = 16, INNER = 10 };

static const struct experts_sizes moe_sizes = {TOKENS, CHOICES, EXPERTS, HIDDEN, INNER};
static const struct experts_sizes mlp_sizes = {TOKENS, -1, 1, HIDDEN, INNER};

/* The arguments of a valid call, new for each case, and the tensors they point to. */
static struct experts_layer moe, mlp;
static struct experts_arguments args;
static struct opaq_tensor h;
static _Alignas(64) char h_memory[2 * TOKENS * CHOICES * 2 * INNER];
static const int64_t random_numbers[2] = {1, 2};
static const float scales[EXPERTS] = {1, 2, 3};
static const int64_t *const no_sizes = NULL;

static void tensors_make(void) {
    moe = experts_layer_make(&moe_sizes, "", OPAQ_BF16);
    mlp = experts_layer_make(&mlp_sizes, "", OPAQ_BF16);
}

static void tensors_free(void) {
    experts_layer_free(&moe);
    experts_layer_free(&mlp);
}

static void arguments_make(const char *op, const char *plan, const struct experts_given *given) {
    const bool is_moe = strncmp(op, "moe", 3) == 0;
    struct experts_given all = *given;
    h = (struct opaq_tensor){.data = h_memory,
                             .dtype = OPAQ_DTYPE_BF16,
                             .rank = is_moe ? 3 : 2,
                             .shape = {TOKENS, is_moe ? CHOICES : 2 * INNER, 2 * INNER},
                             .strides = {is_moe ? CHOICES * 2 * INNER : 2 * INNER, is_moe ? 2 * INNER : 1, 1}};
    all.h = &h;
    experts_arguments(op, is_moe ? &moe : &mlp, plan, &all, &args);
}

/* Everything on another device: the call is consistent, but this build has no back end for it. */
static void move_to_cuda(void) {
    struct opaq_tensor *const all[] = {&args.x,          &args.dy,           &args.h,
                                       &args.ids,        &args.weights,      args.gate_up.tensor,
                                       args.down.tensor, &args.gate_up_bias, &args.down_bias};
    for (int i = 0; i < 9; ++i) {
        all[i]->device = (struct opaq_device){OPAQ_DEVICE_CUDA, 1};
    }
}

static const struct experts_given usual = {.random = random_numbers};

/* A valid call with one change. */
#define REFUSE_GIVEN(op, plan, given, change, status, part)                 \
    do {                                                                    \
        arguments_make(op, plan, given);                                    \
        change;                                                             \
        linear_refuse(__LINE__, op, args.value, OPAQ_ERROR_##status, part); \
    } while (0)
#define REFUSE(op, plan, change, status, part) REFUSE_GIVEN(op, plan, &usual, change, status, part)
#define BOTH(plan, change, status, part)           \
    do {                                           \
        REFUSE("moe", plan, change, status, part); \
        REFUSE("mlp", plan, change, status, part); \
    } while (0)
#define V(name) (*experts_value(&args, name))
#define DATA_PLUS(tensor, bytes) ((tensor).data = (char *)(tensor).data + (bytes))

/* ---- x, weights, biases ---- */

static void the_calls_are_good(void) {
    static const char *const ops[] = {"mlp",         "moe",          "mlp_forward",
                                      "moe_forward", "mlp_backward", "moe_backward"};
    tensors_make();
    for (int i = 0; i < 6; ++i) {
        struct op_result result;
        struct opaq_error error = {OPAQ_OK, ""};
        arguments_make(ops[i], i < 2 ? "" : "grad=x dy=fp8+sr", &usual);
        CHECK_EQ_INT(op_call(ops[i], args.value, NULL, &result, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        op_result_free(&result);
    }
    tensors_free();
}

static void inputs(void) {
    tensors_make();
    BOTH("", args.value[0].tensors = NULL, ARGUMENT, " is missing");
    REFUSE("mlp", "", V("x").tensors = NULL, ARGUMENT, "x is missing");
    REFUSE("moe", "", V("hidden_states").tensors = NULL, ARGUMENT, "hidden_states is missing");
    BOTH("", args.x.rank = 0, SHAPE, "has 0 dimensions, too few for the shape of y");
    BOTH("", args.x.rank = 9, SHAPE, "has 9 dimensions, at most 8 are allowed");
    BOTH("", args.x.rank = -1, SHAPE, "has -1 dimensions");
    REFUSE("mlp", "", args.x.shape[1] = 15, SHAPE,
           "15 features with gate_up of 1 x [20,16] and down of 1 x [16,10], expected [2I,H] and [H,I] for "
           "act=silu");
    REFUSE("moe", "", args.x.shape[1] = 15, SHAPE,
           "15 features with gate_up of 3 x [20,16] and down of 3 x [16,10], expected [2I,H] and [H,I] for "
           "act=silu");
    BOTH("act=gelu_no_mul", (void)0, SHAPE, "expected [I,H] and [H,I] for act=gelu_no_mul");
    BOTH("", args.x.shape[0] = -6, SHAPE, "-6");
    BOTH("", args.x.dtype = OPAQ_DTYPE_U8, ARGUMENT, "is uint8, expected f32, bf16 or f16");
    BOTH("", args.x.dtype = OPAQ_DTYPE_I32, ARGUMENT, "is int32, expected f32, bf16 or f16");
    BOTH("", args.x.data = NULL, BUFFER,
         "6 rows of 16 elements need 192 bytes, the buffer has 192 and is NULL");
    BOTH("", DATA_PLUS(args.x, 1), BUFFER, "the data is not aligned to its elements' 2 bytes");
    BOTH("", args.x.strides[0] = 15, BUFFER, "rows of 16 elements lie 15 elements apart");
    BOTH("", args.x.strides[1] = 2, BUFFER, "the last stride is 2, expected 1");
    BOTH("", args.x.strides[0] = -16, OVERFLOW, "the strides of ");
    BOTH("", args.x.device.type = OPAQ_DEVICE_CUDA, UNSUPPORTED,
         "the tensors are on cuda:0: this installation has no CUDA back end");
    BOTH("", args.gate_up.tensor[0].device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
         "gate_up is on another device than the first tensor");
    BOTH("", move_to_cuda(), UNSUPPORTED, "the tensors are on cuda:1: this installation has no CUDA back end");
    tensors_free();
}

static void weights(void) {
    static const int64_t odd[3] = {EXPERTS, 2 * INNER + 1, HIDDEN};
    static const int64_t fewer[3] = {EXPERTS - 1, HIDDEN, INNER};
    static const int64_t negative[3] = {-EXPERTS, 2 * INNER, HIDDEN};
    static const int64_t narrow[3] = {EXPERTS, HIDDEN, INNER - 1};
    static const int64_t many[4] = {1, EXPERTS, 2 * INNER, HIDDEN};
    tensors_make();
    BOTH("", V("gate_up").count = 0, ARGUMENT, "gate_up has 0 tensors, expected one plain tensor");
    BOTH("", V("gate_up").count = 2, ARGUMENT, "gate_up has 2 tensors, expected one plain tensor");
    BOTH("", V("gate_up").count = -1, ARGUMENT, "gate_up is missing");
    BOTH("", V("down").tensors = NULL, ARGUMENT, "down is missing");
    BOTH("", V("down") = op_int_value(0), ARGUMENT, "down has 0 tensors, expected one plain tensor");
    REFUSE("moe", "", V("gate_up_shape").count = 2, SHAPE,
           "gate_up_shape has 2 sizes, expected three, experts, out features and in features");
    REFUSE("mlp", "", V("gate_up_shape").count = 1, SHAPE,
           "gate_up_shape has 1 sizes, expected two, out features and in features");
    REFUSE("moe", "", V("gate_up_shape") = op_sizes_value(many, 4), SHAPE,
           "gate_up_shape has 4 sizes, expected three");
    REFUSE("mlp", "", V("gate_up_shape") = op_sizes_value(many, 4), SHAPE,
           "gate_up_shape has 4 sizes, expected two");
    REFUSE("moe", "", V("down_shape") = op_sizes_value(many, 4), SHAPE,
           "down_shape has 4 sizes, expected three");
    BOTH("", V("down_shape").count = 1, SHAPE, "");
    BOTH("", V("down_shape").count = 0, SHAPE, "");
    BOTH("", V("down_shape") = op_sizes_value(no_sizes, 3), ARGUMENT, "down_shape is missing");
    BOTH("", V("gate_up_shape").count = -1, ARGUMENT, "gate_up_shape is missing");
    REFUSE("moe", "", V("gate_up_shape") = op_sizes_value(odd, 3), SHAPE,
           "gate_up has the shape [3,20,16], expected [3,21,16]");
    REFUSE("moe", "", V("gate_up_shape") = op_sizes_value(negative, 3), SHAPE,
           "gate_up has the shape [3,20,16], expected [-3,20,16]");
    REFUSE("moe", "",
           (V("gate_up_shape") = op_sizes_value(negative, 3), args.gate_up.tensor[0].shape[0] = -EXPERTS),
           OVERFLOW, "the strides of gate_up are negative or reach beyond 2^62 bytes");
    REFUSE("moe", "",
           (V("gate_up_shape") = op_sizes_value(odd, 3), args.gate_up.tensor[0].shape[1] = 21,
            args.gate_up.tensor[0].strides[0] = 21 * HIDDEN,
            args.gate_up_bias.shape[1] = args.gate_up_bias.strides[0] = 21),
           SHAPE, "gate_up of 3 x [21,16]");
    REFUSE("moe", "",
           (V("down_shape") = op_sizes_value(fewer, 3), args.down.tensor[0].shape[0] = 2,
            args.down_bias.shape[0] = 2),
           SHAPE, "gate_up of 3 x [20,16] and down of 2 x [16,10]");
    REFUSE("moe", "", (V("down_shape") = op_sizes_value(narrow, 3), args.down.tensor[0].shape[2] = 9), SHAPE,
           "down of 3 x [16,9]");
    BOTH("", args.gate_up.tensor[0].rank = 1, SHAPE, "gate_up has the shape [");
    REFUSE("mlp", "", args.down.tensor[0].shape[0] = 15, SHAPE, "down has the shape [15,10], expected [16,10]");
    BOTH("", args.gate_up.tensor[0].dtype = OPAQ_DTYPE_F16, ARGUMENT,
         "x holds bf16, but gate_up holds f16; expected x in f16, or gate_up in bf16 or f32");
    BOTH("", args.down.tensor[0].dtype = OPAQ_DTYPE_U8, ARGUMENT, "down holds uint8, expected bf16 or f32");
    BOTH("", args.gate_up.tensor[0].data = NULL, BUFFER, "gate_up: view: ");
    BOTH("", DATA_PLUS(args.down.tensor[0], 1), BUFFER, "down: view: the data is not aligned");
    REFUSE("moe", "", args.gate_up.tensor[0].strides[0] = 1000, BUFFER,
           "gate_up: view_plain: the leading strides of this rank-3 tensor are not those of rows at one common "
           "distance");
    BOTH("", args.gate_up.tensor[0].device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
         "gate_up is on another device than the first tensor");
    BOTH("", args.down.tensor[0].device.index = 1, ARGUMENT, "down is on another device than the first tensor");
    REFUSE("moe", "", args.gate_up_bias.shape[0] = 2, SHAPE,
           "gate_up_bias has the shape [2,20], expected [3,20]");
    REFUSE("moe", "", args.down_bias.rank = 1, SHAPE, "down_bias has the shape [3], expected [3,16]");
    REFUSE("mlp", "", args.gate_up_bias.shape[0] = 19, SHAPE, "gate_up_bias has the shape [19], expected [20]");
    REFUSE("mlp", "", args.down_bias.rank = 0, SHAPE, "down_bias has the shape [], expected [16]");
    BOTH("", args.gate_up_bias.dtype = OPAQ_DTYPE_F16, ARGUMENT, "x holds bf16, but gate_up_bias holds f16");
    BOTH("", args.down_bias.data = NULL, BUFFER, "down_bias: view: ");
    BOTH("", args.down_bias.device.type = OPAQ_DEVICE_CUDA, ARGUMENT, "down_bias is on another device");
    tensors_free();
}

/* ---- quantized weights ---- */

/* Both weights of a mixture of `inner`, quantized. */
static void refuse_quantized(int line, const char *text, int64_t experts, int64_t hidden, int64_t inner,
                             enum opaq_status status, const char *part) {
    const struct experts_sizes size = {4, 1, experts, hidden, inner};
    const struct opaq_spec spec = spec_of(text);
    char plan[128];
    static const char *const ops[] = {"moe", "moe_forward", "moe_backward"};
    (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s", text, text);
    struct experts_layer layer = experts_layer_make(&size, plan, OPAQ_BF16);
    struct tensor q[2] = {quantized(&layer.gate_up, &spec, NULL), quantized(&layer.down, &spec, NULL)};
    struct tensor kept = tensor_make(4, 2 * inner, OPAQ_BF16, NULL);
    const struct opaq_tensor kept_tensor = op_tensors_of(&kept).tensor[0];
    const struct experts_given given = {.gate_up = &q[0], .down = &q[1], .h = &kept_tensor};
    memset(layer.ids, 0, 4 * sizeof *layer.ids); /* no slot uses the expert in question */
    for (int i = 0; i < 3; ++i) {
        (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s%s", text, text,
                       i == 2 ? " grad=x" : "");
        experts_arguments(ops[i], &layer, plan, &given, &args);
        linear_refuse(line, ops[i], args.value, status, part);
    }
    tensor_free(&kept);
    tensor_free(&q[0]);
    tensor_free(&q[1]);
    experts_layer_free(&layer);
}

static void quantized_weights(void) {
    tensors_make();
    const struct opaq_spec spec = spec_of("nvfp4");
    struct tensor q[2] = {quantized(&moe.gate_up, &spec, NULL), quantized(&moe.down, &spec, NULL)};
    const struct experts_given given = {.gate_up = &q[0], .down = &q[1]};
    static const char *const plan = "gate_up_given=nvfp4 down_given=nvfp4";
    static const char *const other = "gate_up_given=mxfp8 down_given=nvfp4";
    REFUSE_GIVEN("moe", plan, &given, V("gate_up").count = 2, ARGUMENT, "gate_up: got 2 buffers, expected 3");
    REFUSE_GIVEN("moe", plan, &given, V("down").count = 0, ARGUMENT, "down: got 0 buffers, expected 3");
    REFUSE_GIVEN("moe", "down_given=nvfp4", &given, (void)0, ARGUMENT,
                 "gate_up has 3 tensors, expected one plain tensor");
    REFUSE_GIVEN("moe", other, &given, (void)0, ARGUMENT, "gate_up: got 3 buffers, expected 2");
    REFUSE_GIVEN("moe", plan, &given, args.down.tensor[0].shape[0] = 47, SHAPE,
                 "down: buffer \"_rowwise_data\" is uint8[47,");
    REFUSE_GIVEN("moe", plan, &given, args.gate_up.tensor[1].dtype = OPAQ_DTYPE_F32, SHAPE,
                 "gate_up: buffer \"_rowwise_scale_inv\" is f32[");
    REFUSE_GIVEN("moe", plan, &given, args.gate_up.tensor[1].data = NULL, BUFFER,
                 "gate_up: buffer \"_rowwise_scale_inv\" is NULL");
    REFUSE_GIVEN("moe", plan, &given, DATA_PLUS(args.gate_up.tensor[2], 2), BUFFER,
                 "gate_up: buffer \"_amax_rowwise\" is not aligned");
    REFUSE_GIVEN("moe", plan, &given, args.gate_up.tensor[0].strides[0] = 99, BUFFER,
                 "gate_up: buffer \"_rowwise_data\" is not contiguous");
    REFUSE_GIVEN("moe", plan, &given, args.down.tensor[1].device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
                 "down: buffer \"_rowwise_scale_inv\" is on another device");
    tensor_free(&q[0]);
    tensor_free(&q[1]);
    refuse_quantized(__LINE__, "nvfp4+columnwise", 2, 16, 8, OPAQ_ERROR_UNSUPPORTED, " has no rowwise copy");
    refuse_quantized(__LINE__, "fp8blk2", 2, 128, 32, OPAQ_ERROR_UNSUPPORTED,
                     "gate_up has 64 rows for each expert, expected a multiple of 128");
    refuse_quantized(__LINE__, "fp8blk2", 2, 64, 64, OPAQ_ERROR_UNSUPPORTED,
                     "down has 64 rows for each expert");
    refuse_quantized(__LINE__, "nvfp4+swizzle", 3, 128, 96, OPAQ_ERROR_UNSUPPORTED,
                     "gate_up has 192 rows for each expert");
    refuse_quantized(__LINE__, "mxfp8+swizzle", 2, 32, 64, OPAQ_ERROR_UNSUPPORTED,
                     "down has 32 rows for each expert");
    tensors_free();
}

/* ---- plans ---- */

static void plans(void) {
    static char many[OPAQ_EXPERTS_PLAN_TEXT_BYTES + 1];
    memset(many, 'x', sizeof many - 1);
    tensors_make();
    BOTH("", V("plan").text = NULL, ARGUMENT, "plan is missing");
    BOTH("", V("plan").count = -1, ARGUMENT, "plan is missing");
    BOTH("", V("plan") = op_text_value(many), TEXT,
         "plan: the text has 960 characters, at most 959 are allowed");
    BOTH("", V("plan") = op_text_value("x=fp9"), TEXT, "plan: \"x=fp9\" at position 0");
    BOTH("", V("plan") = op_text_value("act=silu save=x"), TEXT, "plan: \"save=x\" at position 9: unknown");
    BOTH("", V("plan") = op_text_value("w=fp8 down_given=fp8"), TEXT,
         "plan: \"w=\" does not go with \"down_given=\"");
    BOTH("", V("plan") = op_text_value("w=fp8+delayed"), UNSUPPORTED, "plan: delayed scaling goes with scales");
    REFUSE("mlp", "grad=x", (void)0, ARGUMENT, "the plan has grad=, which mlp_forward takes");
    REFUSE("moe", "grad=r", (void)0, ARGUMENT, "the plan has grad=, which moe_forward takes");
    static const char *const routed[] = {"experts=4", "first=1", "weights=input", "grad=r",
                                         "experts=9 first=3 weights=input grad=xr"};
    static const char *const ops[] = {"mlp", "mlp_forward", "mlp_backward"};
    for (int i = 0; i < 15; ++i) {
        REFUSE(ops[i % 3], routed[i / 3], (void)0, ARGUMENT,
               "experts=, first=, weights= and grad=r are for a mixture of experts");
    }
    BOTH("x=fp8+sr", (void)0, ARGUMENT, "the plan rounds stochastically (sr), for which m");
    BOTH("h=nvfp4+sr", (void)0, ARGUMENT, "_forward takes random numbers");
    BOTH("w=mxfp8+sr", (void)0, ARGUMENT, "_forward takes random numbers");
    tensors_free();
}

static void missing_random_numbers(void) {
    static const char *const plans[] = {"x=fp8+sr grad=g", "h=nvfp4+sr grad=d", "w=mxfp8+sr grad=x",
                                        "dy=nvfp4+sr grad=x"};
    static const char *const ops[] = {"mlp_forward", "moe_forward", "mlp_backward", "moe_backward"};
    tensors_make();
    for (int i = 0; i < 16; ++i) {
        const char *op = ops[i % 4];
        const char *plan = plans[i / 4];
        REFUSE(op, plan, V("random").tensors = NULL, ARGUMENT,
               "random is missing, but the plan rounds stochastically (sr)");
        REFUSE(op, plan, args.random.dtype = OPAQ_DTYPE_F32, ARGUMENT,
               "random is f32 of rank 1, expected two contiguous int64");
        REFUSE(op, plan, args.random.rank = 0, ARGUMENT, "random is int64 of rank 0");
        REFUSE(op, plan, args.random.shape[0] = 3, ARGUMENT, "expected two contiguous int64");
        REFUSE(op, plan, args.random.strides[0] = 2, ARGUMENT, "expected two contiguous int64");
        REFUSE(op, plan, args.random.data = NULL, ARGUMENT, "expected two contiguous int64");
        REFUSE(op, plan, args.random.device.type = OPAQ_DEVICE_CUDA, ARGUMENT, "on the cpu");
    }
    tensors_free();
}

/* ---- routers ---- */

static void refuse_id(int line, const char *plan, int64_t id, const char *part) {
    static const char *const ops[] = {"moe", "moe_forward", "moe_backward"};
    for (int i = 0; i < 3; ++i) {
        const int64_t kept = moe.ids[7];
        arguments_make(ops[i], plan, &usual);
        moe.ids[7] = id;
        linear_refuse(line, ops[i], args.value, OPAQ_ERROR_ARGUMENT, part);
        moe.ids[7] = kept;
    }
}

static void routers(void) {
    static const char *const ops[] = {"moe", "moe_forward", "moe_backward"};
    tensors_make();
    for (int i = 0; i < 3; ++i) {
        const char *op = ops[i];
        REFUSE(op, "", V("topk_ids").tensors = NULL, ARGUMENT, "topk_ids is missing");
        REFUSE(op, "", V("topk_weights").tensors = NULL, ARGUMENT, "topk_weights is missing");
        REFUSE(op, "", args.ids.dtype = OPAQ_DTYPE_F32, ARGUMENT,
               "topk_ids holds f32, expected int32 or int64");
        REFUSE(op, "", args.ids.dtype = OPAQ_DTYPE_U8, ARGUMENT,
               "topk_ids holds uint8, expected int32 or int64");
        REFUSE(op, "", args.ids.dtype = 99, ARGUMENT, "topk_ids holds another dtype, expected int32 or int64");
        REFUSE(op, "", args.weights.dtype = OPAQ_DTYPE_I64, ARGUMENT,
               "topk_weights holds int64, expected f32, bf16 or f16");
        REFUSE(op, "", (args.ids.shape[0] = 5, args.weights.shape[0] = 5), SHAPE,
               "topk_ids has the shape [5,2], expected 6 tokens by choices");
        REFUSE(op, "", args.ids.rank = 0, SHAPE, "topk_ids has the shape [], expected 6 tokens by choices");
        REFUSE(op, "", args.ids.rank = 1, SHAPE, "topk_ids has the shape [6], expected 6 tokens by choices");
        REFUSE(op, "", args.ids.shape[1] = -2, SHAPE, "-2");
        REFUSE(op, "", args.ids.shape[1] = 3, SHAPE,
               "topk_weights has the shape [6,2], expected topk_ids' [6,3]");
        REFUSE(op, "", args.weights.shape[0] = 12, SHAPE,
               "topk_weights has the shape [12,2], expected topk_ids' [6,2]");
        REFUSE(op, "", (args.weights.rank = 1, args.weights.shape[0] = 12), SHAPE,
               "topk_weights has the shape [12], expected topk_ids' [6,2]");
        REFUSE(op, "", args.ids.data = NULL, BUFFER, "topk_ids is NULL");
        REFUSE(op, "", DATA_PLUS(args.ids, 4), BUFFER, "topk_ids is not aligned to its elements");
        REFUSE(op, "", args.weights.data = NULL, BUFFER, "topk_weights is NULL");
        REFUSE(op, "", DATA_PLUS(args.weights, 2), BUFFER, "topk_weights is not aligned to its elements");
        REFUSE(op, "", args.ids.strides[0] = -2, OVERFLOW,
               "the strides of topk_ids are negative or reach beyond 2^62 bytes");
        REFUSE(op, "", args.weights.strides[1] = INT64_MAX, OVERFLOW,
               "the strides of topk_weights are negative or reach beyond 2^62 bytes");
        REFUSE(op, "", args.ids.device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
               "topk_ids is on another device than the first tensor");
        REFUSE(op, "", args.weights.device.index = 2, ARGUMENT, "topk_weights is on another device");
        REFUSE(op, "experts=2", (void)0, SHAPE, "a stack of 3 experts from 0 on does not fit into experts=2");
        REFUSE(op, "experts=5 first=3", (void)0, SHAPE,
               "a stack of 3 experts from 3 on does not fit into experts=5");
    }
    refuse_id(__LINE__, "", -2,
              "topk_ids has -2 at token 3, choice 1, expected 0 to 2, or -1 or 3 for no expert");
    refuse_id(__LINE__, "", 4,
              "topk_ids has 4 at token 3, choice 1, expected 0 to 2, or -1 or 3 for no expert");
    refuse_id(__LINE__, "", INT64_MIN, "topk_ids has -9223372036854775808 at token 3, choice 1");
    refuse_id(__LINE__, "", INT64_MAX, "topk_ids has 9223372036854775807 at token 3, choice 1");
    refuse_id(__LINE__, "experts=9 first=2", 10, "expected 0 to 8, or -1 or 9 for no expert");
    refuse_id(__LINE__, "first=2", 6, "expected 0 to 4, or -1 or 5 for no expert");
    const int32_t narrow[TOKENS * CHOICES] = {[11] = INT32_MIN};
    REFUSE("moe", "", (args.ids.data = (void *)(uintptr_t)narrow, args.ids.dtype = OPAQ_DTYPE_I32), ARGUMENT,
           "topk_ids has -2147483648 at token 5, choice 1");
    tensors_free();
}

/* ---- given scales ---- */

static void given_scales(void) {
    const struct experts_given one = {
        .input_scale = scales, .hidden_scale = scales, .input_scales = 1, .hidden_scales = 1};
    const struct experts_given each = {
        .input_scale = scales, .hidden_scale = scales, .input_scales = 3, .hidden_scales = 3};
    tensors_make();
    BOTH("x=fp8+delayed", (void)0, ARGUMENT, "input_scale is missing, but x= is delayed");
    BOTH("h=fp8+delayed", (void)0, ARGUMENT, "hidden_scale is missing, but h= is delayed");
    REFUSE("mlp_forward", "x=fp8+delayed", (void)0, ARGUMENT, "input_scale is missing, but x= is delayed");
    static const char *const stray[] = {"", "x=mxfp8 h=nvfp4", "x=fp8row h=fp8", "x=nvfp4+rowscaled h=fp8",
                                        "x=fp8blk1"};
    for (int i = 0; i < 5; ++i) {
        REFUSE_GIVEN("moe", stray[i], &one, (void)0, ARGUMENT,
                     "input_scale is given, but x= has no scale for a whole tensor");
        REFUSE_GIVEN("mlp", stray[i], &one, (void)0, ARGUMENT,
                     "input_scale is given, but x= has no scale for a whole tensor");
    }
    REFUSE_GIVEN("moe", "x=fp8", &one, (void)0, ARGUMENT,
                 "hidden_scale is given, but h= has no scale for a whole tensor");
    REFUSE_GIVEN("mlp", "x=fp8 h=mxfp4", &one, (void)0, ARGUMENT, "hidden_scale is given, but h= has no scale");
    REFUSE_GIVEN("mlp", "x=fp8 h=fp8", &each, (void)0, ARGUMENT,
                 "input_scale is 3 x f32, expected 1 contiguous f32 on the cpu");
    REFUSE_GIVEN("moe", "x=fp8 h=fp8", &each, args.input_scale.shape[0] = 2, ARGUMENT,
                 "input_scale is 2 x f32, expected 3 contiguous f32 on the cpu");
    REFUSE_GIVEN("moe", "x=fp8 h=fp8", &each, args.hidden_scale.shape[0] = 0, ARGUMENT,
                 "hidden_scale is 0 x f32, expected 3");
    REFUSE_GIVEN("moe", "x=fp8 h=fp8", &each, args.hidden_scale.shape[0] = -3, ARGUMENT,
                 "hidden_scale is -1 x f32, expected 3");
    REFUSE_GIVEN("moe", "x=fp8 h=fp8", &each, args.input_scale.strides[0] = 2, ARGUMENT,
                 "f32, not contiguous, expected 3");
    REFUSE_GIVEN("moe", "x=fp8 h=fp8", &one, args.input_scale.dtype = OPAQ_DTYPE_BF16, ARGUMENT,
                 "input_scale is 1 x bf16, expected 1");
    REFUSE_GIVEN("moe", "x=fp8 h=fp8", &one, args.input_scale.device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
                 "on another device");
    REFUSE_GIVEN("moe", "x=fp8 h=fp8", &one, args.input_scale.data = NULL, BUFFER, "input_scale is NULL");
    REFUSE_GIVEN("mlp", "x=fp8 h=fp8", &one, DATA_PLUS(args.hidden_scale, 1), BUFFER,
                 "hidden_scale is not aligned to its elements");
    tensors_free();
}

/* ---- gradients ---- */

static void gradients(void) {
    static const char *const ops[] = {"mlp_backward", "moe_backward"};
    tensors_make();
    for (int i = 0; i < 2; ++i) {
        const char *op = ops[i];
        const char *rows = i ? "12 x 20" : "6 x 20";
        char expected[96];
        (void)snprintf(expected, sizeof expected, "expected what the forward gave: bf16, %s", rows);
        REFUSE(op, "grad=x", args.dy.shape[0] = 5, SHAPE, "dy has the shape [5,16], expected [6,16]");
        REFUSE(op, "grad=x", args.dy.rank = 1, SHAPE, "dy has the shape [6], expected [6,16]");
        REFUSE(op, "grad=x", args.dy.dtype = OPAQ_DTYPE_I64, ARGUMENT,
               "dy holds int64, expected f32, bf16 or f16");
        REFUSE(op, "grad=x", args.dy.data = NULL, BUFFER, "dy: view: ");
        REFUSE(op, "grad=x", args.dy.strides[1] = 0, BUFFER,
               "dy: view_plain: the last stride is 0, expected 1");
        REFUSE(op, "grad=x", args.dy.device.type = OPAQ_DEVICE_CUDA, UNSUPPORTED,
               "the tensors are on cuda:0: this installation has no CUDA back end");
        REFUSE(op, "grad=x", move_to_cuda(), UNSUPPORTED,
               "the tensors are on cuda:1: this installation has no CUDA back end");
        REFUSE(op, "grad=x", args.x.device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
               " is on another device than the first tensor");
        REFUSE(op, "grad=x", args.h.device.type = OPAQ_DEVICE_CUDA, ARGUMENT,
               "h is on another device than the first tensor");
        REFUSE(op, "grad=x", args.h.dtype = OPAQ_DTYPE_F16, SHAPE, "h is f16[6,");
        REFUSE(op, "grad=x", args.h.dtype = OPAQ_DTYPE_F16, SHAPE, expected);
        REFUSE(op, "grad=x", args.h.shape[0] = 5, SHAPE, expected);
        REFUSE(op, "grad=x", (args.h.rank = 1, args.h.strides[0] = 1), SHAPE, expected);
        REFUSE(op, "grad=x", args.h.rank = 0, SHAPE, expected);
        REFUSE(op, "grad=x", args.h.dtype = OPAQ_DTYPE_U8, ARGUMENT,
               "h holds uint8, expected f32, bf16 or f16");
        REFUSE(op, "grad=x", args.h.data = NULL, BUFFER, "h: view: ");
        REFUSE(op, "grad=x", DATA_PLUS(args.h, 1), BUFFER, "h: view: the data is not aligned");
        REFUSE(op, "grad=gd", V("w_dtype") = op_int_value(OPAQ_DTYPE_U8), ARGUMENT,
               "w_dtype is uint8, expected f32, bf16 or f16");
        REFUSE(op, "grad=g", V("w_dtype") = op_int_value(-5), ARGUMENT, "w_dtype is another dtype");
        REFUSE(op, "grad=x", args.x.dtype = OPAQ_DTYPE_U8, ARGUMENT, "is uint8, expected f32, bf16 or f16");
        REFUSE(op, "grad=xd", V("plan") = op_text_value("down_given=fp8 grad=d"), TEXT,
               "plan: weights that come quantized have no gradient (g, d)");
        REFUSE(op, "x=fp8", V("plan") = op_text_value("x=fp8+delayed grad=x"), UNSUPPORTED,
               "plan: delayed scaling");
        REFUSE(op, "grad=g", V("gate_up_shape").count = 0, SHAPE, "");
        REFUSE(op, "grad=b", V("gate_up_shape").count = 0, SHAPE, "");
    }
    tensors_free();
}

/* ---- sizes that overflow ---- */

static _Alignas(64) char somewhere[64]; /* never read: sizes are checked first */

static struct opaq_tensor unreadable(int32_t dtype, int64_t first, int64_t second, int64_t third) {
    return (struct opaq_tensor){.data = somewhere,
                                .dtype = dtype,
                                .rank = third < 0 ? 2 : 3,
                                .shape = {first, second, third < 0 ? 0 : third},
                                .strides = {0, 0, 0}};
}

/* Tensors without elements, or with one element repeated by strides, of millions of rows: the buffers per slot
 * and expert would be too large. */
static void refuse_sizes(int line, int64_t tokens, int64_t choices, int64_t experts, const char *plan) {
    static const char *const ops[] = {"moe", "moe_forward", "moe_backward"};
    for (int i = 0; i < 3; ++i) {
        char text[64];
        (void)snprintf(text, sizeof text, "act=silu_no_mul%s%s", plan, i == 2 ? " grad=r" : "");
        const struct opaq_tensor none = unreadable(OPAQ_DTYPE_BF16, tokens, 0, -1);
        const struct opaq_tensor ids = unreadable(OPAQ_DTYPE_I64, tokens, choices, -1);
        const struct opaq_tensor router = unreadable(OPAQ_DTYPE_F32, tokens, choices, -1);
        const struct opaq_tensor nothing = unreadable(OPAQ_DTYPE_BF16, tokens, choices, 0);
        const struct experts_given given = {.x = &none,
                                            .dy = &none,
                                            .ids = &ids,
                                            .weights = &router,
                                            .h = &nothing,
                                            .no_gate_up_bias = true,
                                            .no_down_bias = true};
        const struct opaq_op *op = opaq_op_find(ops[i]);
        struct opaq_error error = {OPAQ_OK, ""};
        size_t bytes = 7;
        experts_arguments(ops[i], &moe, text, &given, &args);
        args.gate_up.tensor[0] = args.down.tensor[0] = unreadable(OPAQ_DTYPE_BF16, experts, 0, 0);
        const int64_t shape[3] = {experts, 0, 0};
        V("gate_up_shape") = op_sizes_value(shape, 3);
        V("down_shape") = op_sizes_value(shape, 3);
        const enum opaq_status status = opaq_op_workspace(op, args.value, &bytes, &error);
        if (status != OPAQ_ERROR_OVERFLOW || strstr(error.text, ": ") == NULL ||
            strstr(error.text, "more than 2^62") == NULL) {
            CHECK_FAIL("line %d, %s: status %d, \"%s\", %zu bytes", line, ops[i], (int)status, error.text,
                       bytes);
        }
    }
}

static void sizes_that_do_not_fit(void) {
    const int64_t big = (int64_t)1 << 61;
    tensors_make();
    refuse_sizes(__LINE__, big, 1, 1, "");
    refuse_sizes(__LINE__, big + 1, 1, 1, "");
    refuse_sizes(__LINE__, 2 * big, 1, 1, "");
    refuse_sizes(__LINE__, 1, big, 1, "");
    refuse_sizes(__LINE__, big / 4, 8, 1, "");
    refuse_sizes(__LINE__, (int64_t)1 << 30, (int64_t)1 << 31, 0, "");
    refuse_sizes(__LINE__, 1, 1, big, "");
    refuse_sizes(__LINE__, 1, 1, 2 * big, " weights=input");
    tensors_free();
}

static void sizes_of_the_plan(void) {
    tensors_make();
    const struct opaq_tensor many = unreadable(OPAQ_DTYPE_BF16, ((int64_t)1 << 61) + 1, 0, 0);
    const int64_t shape[3] = {many.shape[0], 0, 0};
    arguments_make("moe", "act=silu_no_mul first=2147483647", &usual);
    args.x.shape[1] = 0;
    args.gate_up.tensor[0] = args.down.tensor[0] = many;
    V("gate_up_shape") = op_sizes_value(shape, 3);
    V("down_shape") = op_sizes_value(shape, 3);
    V("gate_up_bias").tensors = NULL;
    V("down_bias").tensors = NULL;
    linear_refuse(__LINE__, "moe", args.value, OPAQ_ERROR_OVERFLOW,
                  "the workspace would have more than 2^62 bytes");
    tensors_free();
}

/* ---- entry point ---- */

static void workspaces_and_outputs(void) {
    static _Alignas(64) char memory[2][4096];
    static _Alignas(64) char scratch[1 << 18];
    const struct opaq_op *op = opaq_op_find("moe_forward");
    struct opaq_outputs good;
    struct opaq_error error = {OPAQ_OK, ""};
    size_t needed = 0;
    tensors_make();
    arguments_make("moe_forward", "x=nvfp4 w=mxfp8", &usual);
    CHECK_EQ_INT(opaq_op_outputs(op, args.value, &good, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_op_workspace(op, args.value, &needed, &error), OPAQ_OK);
    CHECK(good.count == 2 && needed > 0 && needed < sizeof scratch - 64);
    for (int i = 0; i < 2; ++i) {
        good.tensor[i].data = memory[i];
    }
    CHECK_EQ_INT(opaq_op_run(op, args.value, &good, (struct opaq_span){scratch, needed}, NULL, &error),
                 OPAQ_OK);
    const struct opaq_span bad_spans[] = {
        {scratch, needed - 1}, {scratch, 0}, {NULL, needed}, {scratch + 32, needed}};
    for (int i = 0; i < 4; ++i) {
        CHECK_EQ_INT(opaq_op_run(op, args.value, &good, bad_spans[i], NULL, &error), OPAQ_ERROR_BUFFER);
        CHECK(strstr(error.text, "moe_forward: needs a workspace of ") == error.text);
    }
    struct opaq_outputs bad = good;
    bad.tensor[1].data = args.x.data; /* h overlaps hidden_states */
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, (struct opaq_span){scratch, needed}, NULL, &error),
                 OPAQ_ERROR_BUFFER);
    CHECK_EQ_STR(error.text, "moe_forward: output 1 overlaps an argument or another output");
    bad = good;
    bad.tensor[0].data = (char *)args.ids.data + 8; /* y overlaps topk_ids */
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, (struct opaq_span){scratch, needed}, NULL, &error),
                 OPAQ_ERROR_BUFFER);
    bad = good;
    bad.tensor[1].data = memory[0];
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, (struct opaq_span){scratch, needed}, NULL, &error),
                 OPAQ_ERROR_BUFFER);
    bad = good;
    bad.count = 1;
    CHECK_EQ_INT(opaq_op_run(op, args.value, &bad, (struct opaq_span){scratch, needed}, NULL, &error),
                 OPAQ_ERROR_ARGUMENT);
    tensors_free();
}

static const struct test_case tests[] = {TEST(the_calls_are_good),
                                         TEST(inputs),
                                         TEST(weights),
                                         TEST(quantized_weights),
                                         TEST(plans),
                                         TEST(missing_random_numbers),
                                         TEST(routers),
                                         TEST(given_scales),
                                         TEST(gradients),
                                         TEST(sizes_that_do_not_fit),
                                         TEST(sizes_of_the_plan),
                                         TEST(workspaces_and_outputs)};
TEST_MAIN(tests)
