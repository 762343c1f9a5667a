/* test_op_table.c: the operator table: schemas, outputs without data, quantize and dequantize by name, and errors that
 * name the operator, the argument and the numbers. */
#include <stdlib.h>

#include "check.h"
#include "support_op.h"

static void schemas_come_from_the_rows(void) {
    char text[OPAQ_OP_SCHEMA_BYTES];
    CHECK_EQ_INT(opaq_op_schema(opaq_op_find("quantize"), text, sizeof text, NULL), OPAQ_OK);
    CHECK_EQ_STR(text, "quantize(Tensor x, str quantizer, Tensor? scale=None, Tensor? amax_rowwise=None, "
                       "Tensor? amax_columnwise=None, Tensor? random=None) -> Tensor[]");
    CHECK_EQ_INT(opaq_op_schema(opaq_op_find("dequantize"), text, sizeof text, NULL), OPAQ_OK);
    CHECK_EQ_STR(text,
                 "dequantize(Tensor[] buffers, str quantizer, SymInt[] shape, ScalarType dtype, int usage=0) "
                 "-> Tensor");
    for (int i = 0; i < opaq_op_count(); ++i) {
        CHECK(opaq_op_find(opaq_op_at(i)->name) == opaq_op_at(i));
        CHECK_EQ_INT(opaq_op_schema(opaq_op_at(i), text, sizeof text, NULL), OPAQ_OK);
        CHECK_EQ_INT(opaq_op_schema(opaq_op_at(i), text, strlen(text), NULL), OPAQ_ERROR_BUFFER);
    }
    CHECK(opaq_op_at(-1) == NULL && opaq_op_at(opaq_op_count()) == NULL);
    CHECK(opaq_op_find("quantise") == NULL && opaq_op_find(NULL) == NULL);
    CHECK_EQ_INT(opaq_op_schema(NULL, text, sizeof text, NULL), OPAQ_ERROR_ARGUMENT);
}

static void quantize_and_dequantize_by_name(void) {
    const int64_t shape[2] = {37, 53};
    const char *specs[] = {"fp8+both",   "fp8row",     "fp8blk1+both", "fp8blk2",
                           "mxfp8+both", "mxfp4+both", "nvfp4+both"};
    for (size_t s = 0; s < sizeof specs / sizeof specs[0]; ++s) {
        struct tensor x = tensor_make(shape[0], shape[1], OPAQ_BF16, NULL);
        struct tensor q = tensor_make(shape[0], shape[1], OPAQ_BF16, specs[s]);
        struct tensor expected = tensor_make(shape[0], shape[1], OPAQ_BF16, specs[s]);
        struct tensor y = tensor_make(shape[0], shape[1], OPAQ_F32, NULL);
        struct tensor z = tensor_make(shape[0], shape[1], OPAQ_F32, NULL);
        struct opaq_error error = {OPAQ_OK, ""};
        tensor_fill(&x, FILL_OUTLIERS, 3);
        const struct op_tensors x_tensors = op_tensors_of(&x);
        const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(&x_tensors.tensor[0]),
                                                                  op_text_value(specs[s])};
        CHECK_EQ_INT(op_run_into("quantize", values, &q, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        CHECK_EQ_INT(opaq_quantize(&x.view, NULL, NULL, &expected.view, NULL), OPAQ_OK);
        for (int i = 0; i < opaq_proto_buffer_count(&q.view.proto); ++i) {
            CHECK_BYTES(q.view.buffer[i].data, expected.view.buffer[i].data, tensor_bytes(&q, i),
                        "%s buffer %d", specs[s], i);
        }
        const struct op_tensors q_tensors = op_tensors_of(&q);
        const struct opaq_value back[OPAQ_OP_ARGUMENT_LIMIT] = {
            op_list_value(&q_tensors), op_text_value(specs[s]), op_sizes_value(shape, 2),
            op_int_value(OPAQ_DTYPE_F32), op_int_value(0)};
        CHECK_EQ_INT(op_run_into("dequantize", back, &y, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        CHECK_EQ_INT(opaq_dequantize(&q.view, 0, NULL, &z.view, NULL), OPAQ_OK);
        CHECK_BYTES(y.view.buffer[0].data, z.view.buffer[0].data, tensor_bytes(&y, 0), "%s dequantized",
                    specs[s]);
        tensor_free(&x);
        tensor_free(&q);
        tensor_free(&expected);
        tensor_free(&y);
        tensor_free(&z);
    }
}

static void refuse(const char *op, const struct opaq_value *values, enum opaq_status status, const char *part) {
    struct opaq_outputs outputs;
    struct opaq_error error = {OPAQ_OK, ""};
    const struct opaq_op *row = opaq_op_find(op);
    enum opaq_status found = opaq_op_outputs(row, values, &outputs, &error);
    if (found == OPAQ_OK) { /* then running it must fail */
        static _Alignas(64) uint8_t memory[OPAQ_OP_OUTPUT_LIMIT][8192];
        for (int i = 0; i < outputs.count; ++i) {
            outputs.tensor[i].data = memory[i];
        }
        found = opaq_op_run(row, values, &outputs, (struct opaq_span){NULL, 0}, NULL, &error);
    }
    CHECK_EQ_INT(found, status);
    if (strstr(error.text, part) == NULL || strncmp(error.text, op, strlen(op)) != 0) {
        CHECK_FAIL("\"%s\" does not begin with %s or does not say \"%s\"", error.text, op, part);
    }
}

static void bad_arguments_are_named(void) {
    float data[64] = {0.0f};
    struct opaq_tensor x = {
        .data = data, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {4, 16}, .strides = {16, 1}};
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(&x), op_text_value("nvfp4+foo")};
    refuse("quantize", values, OPAQ_ERROR_TEXT, "unknown option \"foo\" at position 6");
    values[1] = op_text_value("nvfp4");
    values[0].tensors = NULL;
    refuse("quantize", values, OPAQ_ERROR_ARGUMENT, "x is missing");
    values[0] = op_tensor_value(&x);
    x.dtype = OPAQ_DTYPE_U8;
    refuse("quantize", values, OPAQ_ERROR_ARGUMENT, "x is uint8, expected f32, bf16 or f16");
    x.dtype = OPAQ_DTYPE_F32;
    x.rank = 9;
    refuse("quantize", values, OPAQ_ERROR_SHAPE, "9 dimensions");
    x.rank = 2;
    x.strides[1] = 2;
    refuse("quantize", values, OPAQ_ERROR_BUFFER, "last stride is 2");
    x.strides[1] = 1;
    x.strides[0] = -16;
    refuse("quantize", values, OPAQ_ERROR_OVERFLOW, "negative");
    x.strides[0] = 16;
    x.shape[0] = (int64_t)1 << 61;
    refuse("quantize", values, OPAQ_ERROR_OVERFLOW, "2^62");
    x.shape[0] = 4;
    values[1] = op_text_value("nvfp4+sr");
    refuse("quantize", values, OPAQ_ERROR_ARGUMENT, "random is missing");
    int64_t numbers[3] = {1, 2, 3};
    struct opaq_tensor random = {.dtype = OPAQ_DTYPE_I64, .rank = 1, .shape = {2}, .strides = {1}};
    values[5] = op_tensor_value(&random); /* NULL, then misaligned */
    refuse("quantize", values, OPAQ_ERROR_ARGUMENT, "random is int64 of rank 1, expected two");
    random.data = (char *)numbers + 4;
    refuse("quantize", values, OPAQ_ERROR_ARGUMENT, "random is int64 of rank 1, expected two");
    values[5] = (struct opaq_value){0};
    x.device.type = OPAQ_DEVICE_CUDA;
    values[1] = op_text_value("nvfp4");
    refuse("quantize", values, OPAQ_ERROR_UNSUPPORTED, "cuda:0");
}

static void bad_buffers_are_named(void) {
    const int64_t shape[2] = {4, 16};
    uint8_t bytes[4096] = {0};
    struct op_tensors list = {.count = 0};
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_list_value(&list), op_text_value("nvfp4"),
                                                        op_sizes_value(shape, 2), op_int_value(OPAQ_DTYPE_BF16),
                                                        op_int_value(0)};
    refuse("dequantize", values, OPAQ_ERROR_ARGUMENT, "buffers is empty");
    list.count = 3;
    for (int i = 0; i < 3; ++i) {
        list.tensor[i] = (struct opaq_tensor){
            .data = bytes, .dtype = OPAQ_DTYPE_U8, .rank = 2, .shape = {4, 8}, .strides = {8, 1}};
    }
    values[0] = op_list_value(&list);
    refuse("dequantize", values, OPAQ_ERROR_SHAPE,
           "\"_rowwise_scale_inv\" is uint8[4,8], expected uint8[128,4]");
    list.count = 2;
    values[0] = op_list_value(&list);
    refuse("dequantize", values, OPAQ_ERROR_ARGUMENT, "got 2 buffers, expected 3");
    values[3] = op_int_value(OPAQ_DTYPE_U8);
    refuse("dequantize", values, OPAQ_ERROR_ARGUMENT, "dtype");
}

/* The caller's allocation is checked like an argument. */
static void bad_outputs_are_named(void) {
    static _Alignas(64) uint8_t memory[3][8192];
    float data[64] = {0.0f};
    const struct opaq_tensor x = {
        .data = data, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {4, 16}, .strides = {16, 1}};
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(&x), op_text_value("nvfp4")};
    const struct opaq_span none = {NULL, 0};
    const struct opaq_op *op = opaq_op_find("quantize");
    struct opaq_outputs good;
    struct opaq_error error = {OPAQ_OK, ""};
    size_t bytes = 1;
    CHECK_EQ_INT(opaq_op_workspace(op, values, &bytes, &error), OPAQ_OK);
    CHECK_EQ_INT(bytes, 0);
    CHECK_EQ_INT(opaq_op_outputs(op, values, &good, &error), OPAQ_OK);
    for (int i = 0; i < good.count; ++i) {
        good.tensor[i].data = memory[i];
    }
    CHECK_EQ_INT(opaq_op_run(op, values, &good, none, NULL, &error), OPAQ_OK);
    for (int kind = 0; kind < 8; ++kind) {
        struct opaq_outputs bad = good;
        const char *expected[] = {"got 0 outputs, expected 3",
                                  "another device",
                                  "is NULL",
                                  "not aligned",
                                  "overlaps an argument or another output",
                                  "overlaps an argument or another output",
                                  "expected uint8[128,4]",
                                  "expected f32[1]"};
        bad.count = kind == 0 ? 0 : bad.count;
        bad.tensor[0].device.type = kind == 1 ? OPAQ_DEVICE_CUDA : OPAQ_DEVICE_CPU;
        bad.tensor[1].data = kind == 2 ? NULL : kind == 4 ? memory[0] + 8 : bad.tensor[1].data;
        bad.tensor[2].data = kind == 3 ? memory[2] + 1 : bad.tensor[2].data;
        bad.tensor[0].data = kind == 5 ? (void *)data : bad.tensor[0].data;
        bad.tensor[1].shape[0] = kind == 6 ? 64 : bad.tensor[1].shape[0];
        bad.tensor[2].dtype = kind == 7 ? OPAQ_DTYPE_BF16 : bad.tensor[2].dtype;
        const enum opaq_status status = opaq_op_run(op, values, &bad, none, NULL, &error);
        if (status == OPAQ_OK || strstr(error.text, expected[kind]) == NULL) {
            CHECK_FAIL("kind %d: status %d, \"%s\" does not say \"%s\"", kind, (int)status, error.text,
                       expected[kind]);
        }
    }
}

/* Supplies memory for opaq_op_call, some of it invalid. */
enum { GIVE_WELL, GIVE_NOTHING, GIVE_AN_INPUT, GIVE_LITTLE, GIVE_OTHER_SHAPE, GIVE_AN_ERROR, GIVE_KINDS };

struct given_memory {
    int kind;
    int calls;
    void *input; /* the memory of an argument */
    _Alignas(64) uint8_t output[4096];
    _Alignas(64) uint8_t workspace[1 << 20];
};

static enum opaq_status give(void *context, struct opaq_outputs *outputs, size_t bytes,
                             struct opaq_span *workspace, struct opaq_error *error) {
    struct given_memory *given = context;
    ++given->calls;
    if (given->kind == GIVE_AN_ERROR) {
        return opaq_fail(error, OPAQ_ERROR_MEMORY, "linear: none left");
    }
    CHECK(bytes > 0 && bytes <= sizeof given->workspace);
    outputs->tensor[0].data = given->kind == GIVE_NOTHING    ? NULL
                              : given->kind == GIVE_AN_INPUT ? given->input
                                                             : given->output;
    outputs->tensor[0].shape[0] -= given->kind == GIVE_OTHER_SHAPE;
    *workspace = (struct opaq_span){given->workspace, given->kind == GIVE_LITTLE ? bytes - 1 : bytes};
    return OPAQ_OK;
}

/* It gives the results of the three separate calls, checks the memory that it gets, and requests none after an
 * error. */
static void one_call_does_what_three_do(void) {
    static struct given_memory given;
    float x_data[4 * 16];
    float w_data[8 * 16];
    for (int i = 0; i < 8 * 16; ++i) {
        w_data[i] = (float)(i % 7 - 3);
        x_data[i % (4 * 16)] = (float)(i % 5) * 0.25f;
    }
    const struct opaq_tensor x = {
        .data = x_data, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {4, 16}, .strides = {16, 1}};
    const struct op_tensors w = {
        {{.data = w_data, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {8, 16}, .strides = {16, 1}}}, 1};
    const struct opaq_op *op = opaq_op_find("linear");
    const int64_t shape[2] = {8, 16};
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        op_tensor_value(&x), op_list_value(&w), {0}, op_sizes_value(shape, 2), op_text_value("")};
    const struct opaq_memory memory = {give, &given};
    given.input = x_data;
    struct op_result expected;
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(op_call("linear", values, NULL, &expected, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_op_call(op, values, &memory, NULL, &error), OPAQ_OK);
    CHECK_BYTES(given.output, expected.outputs.tensor[0].data, op_tensor_bytes(&expected.outputs.tensor[0]),
                "linear in one call");
    op_result_free(&expected);
    static const enum opaq_status refused[GIVE_KINDS] = {
        OPAQ_OK, OPAQ_ERROR_BUFFER, OPAQ_ERROR_BUFFER, OPAQ_ERROR_BUFFER, OPAQ_ERROR_SHAPE, OPAQ_ERROR_MEMORY};
    for (given.kind = GIVE_NOTHING; given.kind < GIVE_KINDS; ++given.kind) {
        CHECK_EQ_INT(opaq_op_call(op, values, &memory, NULL, &error), refused[given.kind]);
        CHECK(strncmp(error.text, "linear: ", 8) == 0);
    }
    const int calls = given.calls;
    CHECK_EQ_INT(opaq_op_call(op, values, NULL, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_op_call(op, values, &(struct opaq_memory){NULL, NULL}, NULL, &error),
                 OPAQ_ERROR_ARGUMENT);
    values[4] = op_text_value("nonsense");
    CHECK(opaq_op_call(op, values, &memory, NULL, &error) != OPAQ_OK);
    CHECK_EQ_INT(given.calls, calls);
}

/* Beyond the limit of kept texts, operators parse the text in each call. */
static void texts_beyond_the_limit_still_work(void) {
    float data[64] = {0.0f};
    const struct opaq_tensor x = {
        .data = data, .dtype = OPAQ_DTYPE_F32, .rank = 2, .shape = {4, 16}, .strides = {16, 1}};
    const struct opaq_spec *spec;
    struct opaq_outputs outputs;
    char text[32];
    enum opaq_status status = OPAQ_OK;
    for (int i = 0; status == OPAQ_OK && i <= OPAQ_INTERN_LIMIT; ++i) {
        const int length = snprintf(text, sizeof text, "fp8+eps=%de-9", i + 1);
        status = opaq_spec_intern(text, (size_t)length, &spec, NULL);
    }
    CHECK_EQ_INT(status, OPAQ_ERROR_LIMIT);
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(&x),
                                                              op_text_value("mxfp4+swizzle+rule=ocp")};
    CHECK_EQ_INT(opaq_op_outputs(opaq_op_find("quantize"), values, &outputs, NULL), OPAQ_OK);
}

static const struct test_case tests[] = {TEST(schemas_come_from_the_rows),
                                         TEST(quantize_and_dequantize_by_name),
                                         TEST(bad_arguments_are_named),
                                         TEST(bad_buffers_are_named),
                                         TEST(bad_outputs_are_named),
                                         TEST(one_call_does_what_three_do),
                                         TEST(texts_beyond_the_limit_still_work)};
TEST_MAIN(tests)
