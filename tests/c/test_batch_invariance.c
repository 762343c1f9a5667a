/* test_batch_invariance.c: a row of linear, mlp or moe, or of the gradient of their input through a packed
 * weight, has the same bytes alone and in every batch, on any number of threads: for weights of every format,
 * in rows and in tiles, every precision, and every quantizer of activations whose scales cover one row or a
 * block of it, or are given. If one scale covers the batch, rows do depend on it. */
#include <stdlib.h>

#include "check.h"
#include "support_experts.h"
#include "support_quant.h"
#include "support_spec.h"

enum { ROWS = 64, N = 83, K = 270, THREADS = 4, TENSORS_LIMIT = 5 };

/* Those with a tiled form come first. */
static const char *const formats[] = {"fp8",   "fp8.e5m2", "fp8row",          "fp8blk2",  "mxfp8",
                                      "mxfp4", "nvfp4",    "nvfp4+rowscaled", "nvfp4+2d", "fp8blk1"};
enum { FORMATS = 10, TILED_FORMATS = 9 };
static const char *const precisions[] = {"exact", "near", "fast", "fast32"};
static const char *const quantizers[] = {"fp8row", "fp8blk1", "mxfp8", "mxfp4", "nvfp4+rowscaled"};
static const enum opaq_element dtypes[] = {OPAQ_BF16, OPAQ_F32, OPAQ_F16};

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* ---- comparing ---- */

/* A call for ROWS rows, which also runs with a part of them. */
struct call {
    const char *op, *plan;
    const struct opaq_value *value;
    struct opaq_tensor
        *by_row[TENSORS_LIMIT]; /* the arguments that have the batch's rows, NULL-terminated if fewer */
    int64_t *shape;             /* or NULL: sizes, of which the first counts rows */
};

static struct opaq_pool *pools[THREADS];
static long long compared;

/* Returns an empty result on failure. */
static struct op_result run_rows(const struct call *call, int64_t first, int64_t rows,
                                 const struct opaq_parallel *parallel) {
    struct opaq_tensor whole[TENSORS_LIMIT];
    struct op_result result;
    struct opaq_error error = {OPAQ_OK, ""};
    const struct op_settings settings = {.parallel = parallel};
    for (int i = 0; i < TENSORS_LIMIT && call->by_row[i] != NULL; ++i) {
        struct opaq_tensor *part = call->by_row[i];
        whole[i] = *part;
        part->data = (char *)part->data + op_tensor_bytes(part) / ROWS * (size_t)first;
        part->shape[0] = rows * (part->shape[0] / ROWS); /* h has one row per choice */
    }
    if (call->shape != NULL) {
        call->shape[0] = rows;
    }
    if (op_call(call->op, call->value, &settings, &result, &error) != OPAQ_OK) {
        CHECK_FAIL("%s, \"%s\": %s", call->op, call->plan, error.text);
        memset(&result, 0, sizeof result);
    }
    for (int i = 0; i < TENSORS_LIMIT && call->by_row[i] != NULL; ++i) {
        *call->by_row[i] = whole[i];
    }
    return result;
}

/* Number of rows of a batch that differ from `alone`. */
static int differing(const struct call *call, int64_t first, int64_t rows, int threads, const char *alone,
                     size_t row_bytes) {
    const struct opaq_parallel parallel = opaq_pool_parallel(pools[threads - 1]);
    struct op_result batch = run_rows(call, first, rows, &parallel);
    const char *y = batch.outputs.count == 1 ? batch.outputs.tensor[0].data : NULL;
    int found = 0;
    for (int64_t r = 0; r < rows; ++r) {
        found += y == NULL ||
                 memcmp(y + (size_t)r * row_bytes, alone + (size_t)(first + r) * row_bytes, row_bytes) != 0;
    }
    compared += rows;
    op_result_free(&batch);
    return found;
}

/* Number of rows that differ in any batch; an error is a failed check and counts none. */
static int compare(const struct call *call) {
    static const int64_t sizes[] = {1, 2, 3, 5, 8, 16, 17, 33, 64};
    char *alone = NULL;
    size_t row_bytes = 0;
    int found = 0;
    for (int64_t r = 0; r < ROWS; ++r) {
        struct op_result one = run_rows(call, r, 1, NULL);
        if (one.outputs.count != 1) {
            free(alone);
            return 0;
        }
        row_bytes = op_tensor_bytes(&one.outputs.tensor[0]);
        alone = alone == NULL ? malloc(ROWS * row_bytes) : alone;
        if (alone == NULL) {
            exit(1);
        }
        memcpy(alone + (size_t)r * row_bytes, one.outputs.tensor[0].data, row_bytes);
        op_result_free(&one);
    }
    for (int i = 0; i < COUNT(sizes); ++i) {
        for (int t = 1; t <= THREADS; ++t) { /* threads; each run has other rows */
            found +=
                differing(call, (ROWS - sizes[i]) * (t - 1) / (THREADS - 1), sizes[i], t, alone, row_bytes);
        }
    }
    free(alone);
    return found;
}

static void check(const struct call *call) {
    const int found = compare(call);
    if (found != 0) {
        CHECK_FAIL("%s, \"%s\": %d rows in batches differ from those alone", call->op, call->plan, found);
    }
}

/* ---- weights ---- */

/* A weight as operators take it, aligned as the tile kernels require. */
struct weight {
    struct tensor tensor;
    void *memory[OPAQ_BUFFER_LIMIT];
};

static struct weight weight_make(const struct tensor *plain, const char *format) {
    const struct opaq_spec spec = spec_of(format);
    struct tensor q = quantized(plain, &spec, NULL);
    struct weight weight = {{q.view}, {NULL}};
    for (int i = 0; i < opaq_proto_buffer_count(&q.view.proto); ++i) {
        if (posix_memalign(&weight.memory[i], 64, q.view.buffer[i].bytes) != 0) {
            exit(1);
        }
        memcpy(weight.memory[i], q.view.buffer[i].data, q.view.buffer[i].bytes);
        weight.tensor.view.buffer[i].data = weight.memory[i];
    }
    tensor_free(&q);
    return weight;
}

static void weight_free(struct weight *weight) {
    for (int i = 0; i < OPAQ_BUFFER_LIMIT; ++i) {
        free(weight->memory[i]);
    }
}

/* ---- linear ---- */

struct linear_case {
    struct tensor x, w, bias;
};

static struct linear_case linear_case_make(enum opaq_element dtype) {
    struct linear_case c = {tensor_make(ROWS, K, dtype, NULL), tensor_make(N, K, dtype, NULL),
                            tensor_make(1, N, dtype, NULL)};
    tensor_fill(&c.x, FILL_OUTLIERS, 1);
    tensor_fill(&c.w, FILL_NORMAL, 2);
    tensor_fill(&c.bias, FILL_NORMAL, 3);
    return c;
}

static void linear_case_free(struct linear_case *c) {
    tensor_free(&c->x);
    tensor_free(&c->w);
    tensor_free(&c->bias);
}

/* Number of rows that differ. input_scale: NULL or one number. */
static int compare_linear(const struct linear_case *c, const struct tensor *w, const char *plan,
                          const float *input_scale) {
    static const int64_t shape[2] = {N, K};
    struct opaq_tensor x = op_tensors_of(&c->x).tensor[0];
    struct opaq_tensor bias = op_tensors_of(&c->bias).tensor[0];
    const struct op_tensors list = op_tensors_of(w);
    const struct opaq_tensor scale = {.data = (void *)(uintptr_t)input_scale,
                                      .dtype = OPAQ_DTYPE_F32,
                                      .rank = 1,
                                      .shape = {1},
                                      .strides = {1}};
    bias.rank = 1;
    bias.shape[0] = N;
    bias.strides[0] = 1;
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        op_tensor_value(&x),      op_list_value(&list), op_tensor_value(&bias),
        op_sizes_value(shape, 2), op_text_value(plan),  op_tensor_value(input_scale == NULL ? NULL : &scale)};
    const struct call call = {"linear", plan, values, {&x}, NULL};
    return compare(&call);
}

static void check_linear(const struct linear_case *c, const struct tensor *w, const float *input_scale,
                         const char *format, const char *words) {
    char plan[128];
    (void)snprintf(plan, sizeof plan, "%s%s%s", format, *format != 0 && *words != 0 ? " " : "", words);
    const int found = compare_linear(c, w, plan, input_scale);
    if (found != 0) {
        CHECK_FAIL("linear, \"%s\": %d rows in batches differ from those alone", plan, found);
    }
}

/* Every quantizer of activations, and given scales. */
static void check_quantizers(const struct linear_case *c, const struct tensor *w, const char *format) {
    static const float scale = 0.75f;
    static const float amax = 90.0f;
    char words[64];
    for (int q = 0; q < COUNT(quantizers); ++q) {
        (void)snprintf(words, sizeof words, "x=%s", quantizers[q]);
        check_linear(c, w, NULL, format, words);
    }
    check_linear(c, w, &scale, format, "x=fp8+delayed");
    check_linear(c, w, &amax, format, "x=nvfp4");
}

static void plain_weights(void) {
    for (int d = 0; d < COUNT(dtypes); ++d) {
        struct linear_case c = linear_case_make(dtypes[d]);
        check_linear(&c, &c.w, NULL, "", "");
        check_quantizers(&c, &c.w, "");
        check_linear(&c, &c.w, NULL, "w=mxfp8", "x=mxfp8"); /* quantized in the call */
        linear_case_free(&c);
    }
}

static void quantized_weights(int count, const char *order) {
    for (int f = 0; f < count; ++f) {
        struct linear_case c = linear_case_make(dtypes[f % COUNT(dtypes)]);
        char format[64];
        (void)snprintf(format, sizeof format, "w_given=%s%s", formats[f], order);
        struct weight w = weight_make(&c.w, format + strlen("w_given="));
        check_linear(&c, &w.tensor, NULL, format, "");
        check_quantizers(&c, &w.tensor, format);
        weight_free(&w);
        linear_case_free(&c);
    }
}

static void weights_in_rows(void) { quantized_weights(FORMATS, ""); }

static void tiled_weights(void) { quantized_weights(TILED_FORMATS, "+tiled"); }

/* Every precision with every dtype: these are different kernels. */
static void precisions_of_tiled_weights(void) {
    for (int d = 0; d < COUNT(dtypes); ++d) {
        struct linear_case c = linear_case_make(dtypes[d]);
        for (int f = 0; f < TILED_FORMATS; ++f) {
            char format[64];
            (void)snprintf(format, sizeof format, "w_given=%s+tiled", formats[f]);
            struct weight w = weight_make(&c.w, format + strlen("w_given="));
            for (int p = 0; p < COUNT(precisions); ++p) {
                char words[32];
                (void)snprintf(words, sizeof words, "precision=%s", precisions[p]);
                check_linear(&c, &w.tensor, NULL, format, words);
            }
            weight_free(&w);
        }
        linear_case_free(&c);
    }
}

/* The exception: one amax for the batch. If these rows were equal, the test could not detect a difference. */
static void one_scale_for_the_batch_depends_on_it(void) {
    static const char *const wide[] = {"x=fp8", "x=nvfp4", "x=fp8blk2"};
    struct linear_case c = linear_case_make(OPAQ_BF16);
    for (int i = 0; i < COUNT(wide); ++i) {
        CHECK(compare_linear(&c, &c.w, wide[i], NULL) > 0);
    }
    linear_case_free(&c);
}

/* ---- the gradient of linear's input ---- */

static void check_linear_backward(const struct linear_case *c, const struct tensor *w, const char *plan,
                                  enum opaq_element dtype) {
    static const int64_t w_shape[2] = {N, K};
    int64_t x_shape[2] = {ROWS, K};
    struct tensor dy = tensor_make(ROWS, N, dtype, NULL);
    tensor_fill(&dy, FILL_OUTLIERS, 4);
    struct op_tensors gradient = op_tensors_of(&dy);
    const struct op_tensors list = op_tensors_of(w);
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        op_list_value(&gradient),   {.count = 0},
        op_list_value(&list),       op_sizes_value(x_shape, 2),
        op_sizes_value(w_shape, 2), op_int_value((int64_t)c->x.view.proto.dtype),
        op_int_value(dtype),        op_text_value(plan)};
    const struct call call = {"linear_backward", plan, values, {&gradient.tensor[0]}, x_shape};
    check(&call);
    tensor_free(&dy);
}

static void input_gradients_of_linear(void) {
    for (int i = 0; i < FORMATS + TILED_FORMATS; ++i) {
        char plan[96];
        (void)snprintf(plan, sizeof plan, "w_given=%s%s grad=x", formats[i % FORMATS],
                       i < FORMATS ? "" : "+tiled");
        char format[64];
        (void)snprintf(format, sizeof format, "%s%s", formats[i % FORMATS], i < FORMATS ? "" : "+tiled");
        for (int d = 0; d < COUNT(dtypes); ++d) {
            struct linear_case c = linear_case_make(dtypes[d]);
            struct weight w = weight_make(&c.w, format);
            check_linear_backward(&c, &w.tensor, plan, dtypes[d]);
            weight_free(&w);
            linear_case_free(&c);
        }
    }
}

/* ---- experts ---- */

static void check_experts(const struct experts_sizes *size, const char *format, const char *words,
                          enum opaq_element dtype) {
    char plan[256];
    (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s%s", format, format, words);
    struct experts_layer layer = experts_layer_make(size, plan, dtype);
    struct weight weights[2] = {weight_make(&layer.gate_up, format), weight_make(&layer.down, format)};
    const struct experts_given given = {.gate_up = &weights[0].tensor, .down = &weights[1].tensor};
    const char *op = layer.is_routed ? "moe" : "mlp";
    struct experts_arguments arguments;
    experts_arguments(op, &layer, plan, &given, &arguments);
    const struct call call = {op,
                              plan,
                              arguments.value,
                              {&arguments.x, layer.is_routed ? &arguments.weights : NULL, &arguments.ids},
                              NULL};
    check(&call);
    weight_free(&weights[0]);
    weight_free(&weights[1]);
    experts_layer_free(&layer);
}

static void check_experts_of(const struct experts_sizes *size) {
    for (int f = 0; f < TILED_FORMATS; ++f) {
        char tiled[64];
        char words[64];
        (void)snprintf(tiled, sizeof tiled, "%s+tiled", formats[f]);
        check_experts(size, formats[f], "", dtypes[f % COUNT(dtypes)]);
        for (int p = 0; p < COUNT(precisions); ++p) {
            (void)snprintf(words, sizeof words, " precision=%s", precisions[p]);
            check_experts(size, tiled, words, dtypes[(f + p) % COUNT(dtypes)]);
        }
        (void)snprintf(words, sizeof words, " x=%s h=%s", quantizers[f % COUNT(quantizers)],
                       quantizers[(f + 2) % COUNT(quantizers)]);
        check_experts(size, f % 2 ? formats[f] : tiled, words, dtypes[f % COUNT(dtypes)]);
    }
}

/* dx alone: the router's gradient is a separate output. */
static void check_experts_backward(const struct experts_sizes *size, const char *format, const char *words,
                                   enum opaq_element dtype) {
    char plan[256];
    (void)snprintf(plan, sizeof plan, "gate_up_given=%s down_given=%s grad=x%s", format, format, words);
    struct experts_layer layer = experts_layer_make(size, plan, dtype);
    struct weight weights[2] = {weight_make(&layer.gate_up, format), weight_make(&layer.down, format)};
    struct experts_given given = {.gate_up = &weights[0].tensor, .down = &weights[1].tensor};
    struct tensor h = experts_forward_h(&layer, plan, &given);
    const struct opaq_tensor kept = op_tensors_of(&h).tensor[0];
    given.h = &kept;
    struct experts_arguments arguments;
    experts_arguments(experts_backward_name(&layer), &layer, plan, &given, &arguments);
    const struct call call = {experts_backward_name(&layer),
                              plan,
                              arguments.value,
                              {&arguments.dy, &arguments.x, &arguments.h,
                               layer.is_routed ? &arguments.weights : NULL, &arguments.ids},
                              NULL};
    check(&call);
    tensor_free(&h);
    weight_free(&weights[0]);
    weight_free(&weights[1]);
    experts_layer_free(&layer);
}

static void input_gradients_of_experts(void) {
    static const struct experts_sizes one = {ROWS, -1, 1, 77, 35};
    static const struct experts_sizes several = {ROWS, 2, 3, 128, 64};
    for (int f = 0; f < 2 * TILED_FORMATS; ++f) {
        char format[64];
        (void)snprintf(format, sizeof format, "%s%s", formats[f % TILED_FORMATS],
                       f < TILED_FORMATS ? "" : "+tiled");
        check_experts_backward(&one, format, "", dtypes[f % COUNT(dtypes)]);
        check_experts_backward(&several, format, f % 2 ? " weights=input" : "",
                               dtypes[(f + 1) % COUNT(dtypes)]);
    }
}

static void rows_of_an_mlp(void) {
    static const struct experts_sizes size = {ROWS, -1, 1, 77, 35};
    check_experts_of(&size);
}

static void tokens_of_a_mixture(void) {
    static const struct experts_sizes size = {ROWS, 2, 3, 128, 64}; /* whole tiles of every kind */
    check_experts_of(&size);
}

/* ---- */

static void make_pools(void) {
    for (int t = 0; t < THREADS; ++t) {
        CHECK_EQ_INT(opaq_pool_create(t + 1, &pools[t], NULL), OPAQ_OK);
    }
}

static void end_pools(void) {
    for (int t = 0; t < THREADS; ++t) {
        opaq_pool_destroy(pools[t]);
    }
    CHECK(compared > 0);
    printf("  %lld rows of batches compared with the same rows alone\n", compared);
}

static const struct test_case tests[] = {TEST(make_pools),
                                         TEST(plain_weights),
                                         TEST(weights_in_rows),
                                         TEST(tiled_weights),
                                         TEST(precisions_of_tiled_weights),
                                         TEST(one_scale_for_the_batch_depends_on_it),
                                         TEST(input_gradients_of_linear),
                                         TEST(rows_of_an_mlp),
                                         TEST(tokens_of_a_mixture),
                                         TEST(input_gradients_of_experts),
                                         TEST(end_pools)};
TEST_MAIN(tests)
