/* test_op_rearrange.c: convert, slice_rows and gather_rows against quantizing again and against dequantized rows. */
#include <stdlib.h>

#include "check.h"
#include "support_op.h"

static void compare(const struct tensor *actual, const struct tensor *expected, const char *what) {
    for (int i = 0; i < opaq_proto_buffer_count(&expected->view.proto); ++i) {
        CHECK_BYTES(actual->view.buffer[i].data, expected->view.buffer[i].data, tensor_bytes(expected, i),
                    "%s, buffer %d", what, i);
    }
}

static struct tensor quantized(const struct tensor *x, const char *spec) {
    struct tensor q =
        tensor_make(opaq_proto_rows(&x->view.proto), opaq_proto_columns(&x->view.proto), OPAQ_BF16, spec);
    CHECK_EQ_INT(opaq_quantize(&x->view, NULL, NULL, &q.view, NULL), OPAQ_OK);
    return q;
}

static enum opaq_status convert(const struct tensor *from, const char *from_spec, const char *to_spec,
                                struct tensor *to, struct opaq_error *error) {
    const struct op_tensors buffers = op_tensors_of(from);
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
        op_list_value(&buffers), op_text_value(from_spec), op_text_value(to_spec),
        op_sizes_value(from->view.proto.shape, 2), op_int_value(OPAQ_DTYPE_BF16)};
    return op_run_into("convert", values, to, error);
}

/* If a copy can be derived without rounding, it equals the one that quantizing makes. */
static void convert_equals_quantizing(void) {
    static const char *const pairs[][2] = {
        {"fp8", "fp8+both"},
        {"fp8", "fp8+columnwise"},
        {"fp8+columnwise", "fp8+both"},
        {"fp8.e5m2+both", "fp8.e5m2"},
        {"fp8blk2", "fp8blk2+both"},
        {"fp8blk2+columnwise+pow2", "fp8blk2+pow2"},
        {"fp8blk1+both", "fp8blk1+columnwise"},
        {"fp8row+both", "fp8row"},
        {"mxfp8+2d", "mxfp8+both+2d"},
        {"mxfp8+columnwise+2d", "mxfp8+2d"},
        {"mxfp8+both", "mxfp8+both+swizzle"},
        {"mxfp8+both+swizzle", "mxfp8+columnwise"},
        {"mxfp4+2d", "mxfp4+both+2d"},
        {"mxfp4+both", "mxfp4+columnwise+swizzle"},
        {"mxfp4+columnwise+2d+swizzle", "mxfp4+2d"},
        {"nvfp4+2d", "nvfp4+both+2d"},
        {"nvfp4+columnwise+2d", "nvfp4+2d+swizzle"},
        {"nvfp4+both+rht", "nvfp4+columnwise+rht"},
        {"nvfp4+both+rowscaled", "nvfp4+rowscaled"},
        {"nvfp4+both+rowscaled", "nvfp4+columnwise+rowscaled"},
        {"nvfp4+both+rowscaled+global+rule=modelopt", "nvfp4+rowscaled+swizzle+global+rule=modelopt"},
        {"nvfp4", "nvfp4+swizzle"},
        {"nvfp4", "nvfp4+tiled"},
        {"nvfp4+tiled", "nvfp4"},
        {"nvfp4+swizzle", "nvfp4+tiled"},
        {"mxfp4", "mxfp4+tiled"},
        {"mxfp4+tiled", "mxfp4+swizzle"},
        {"mxfp8", "mxfp8+tiled"},
        {"mxfp8+tiled", "mxfp8"},
        {"fp8", "fp8+tiled"},
        {"fp8row+tiled", "fp8row"},
        {"fp8blk2", "fp8blk2+tiled"},
    };
    static const int64_t shapes[][2] = {{1, 1}, {37, 53}, {128, 160}, {0, 32}, {5, 0}, {150, 40}};
    for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
        struct tensor x = tensor_make(shapes[s][0], shapes[s][1], OPAQ_BF16, NULL);
        tensor_fill(&x, FILL_OUTLIERS, 9);
        for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; ++i) {
            struct opaq_error error = {OPAQ_OK, ""};
            struct tensor from = quantized(&x, pairs[i][0]);
            struct tensor expected = quantized(&x, pairs[i][1]);
            struct tensor to = tensor_make(shapes[s][0], shapes[s][1], OPAQ_BF16, pairs[i][1]);
            CHECK_EQ_INT(convert(&from, pairs[i][0], pairs[i][1], &to, &error), OPAQ_OK);
            CHECK_EQ_STR(error.text, "");
            compare(&to, &expected, pairs[i][1]);
            tensor_free(&from);
            tensor_free(&expected);
            tensor_free(&to);
        }
        tensor_free(&x);
    }
}

static void convert_refuses_to_round(void) {
    static const char *const pairs[][3] = {
        {"nvfp4", "nvfp4+both", "has no columnwise copy"},
        {"mxfp8+columnwise", "mxfp8", "has no rowwise copy"},
        {"fp8row", "fp8row+both", "has no columnwise copy"},
        {"fp8", "fp8.e5m2", "would round again"},
        {"mxfp8", "mxfp4", "would round again"},
        {"mxfp8", "mxfp8+rule=ocp", "would round again"},
    };
    struct tensor x = tensor_make(32, 64, OPAQ_BF16, NULL);
    tensor_fill(&x, FILL_NORMAL, 1);
    for (size_t i = 0; i < sizeof pairs / sizeof pairs[0]; ++i) {
        struct opaq_error error = {OPAQ_OK, ""};
        struct tensor from = quantized(&x, pairs[i][0]);
        struct tensor to = tensor_make(32, 64, OPAQ_BF16, pairs[i][1]);
        CHECK_EQ_INT(convert(&from, pairs[i][0], pairs[i][1], &to, &error), OPAQ_ERROR_SPEC);
        CHECK(strstr(error.text, pairs[i][2]) != NULL);
        CHECK_EQ_INT(((const uint8_t *)to.view.buffer[0].data)[0], 0xA5); /* unchanged */
        tensor_free(&from);
        tensor_free(&to);
    }
    tensor_free(&x);
}

static enum opaq_status slice(const struct tensor *from, const char *spec, int64_t start, struct tensor *to,
                              struct opaq_error *error) {
    const struct op_tensors buffers = op_tensors_of(from);
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_list_value(&buffers),
                                                              op_text_value(spec),
                                                              op_sizes_value(from->view.proto.shape, 2),
                                                              op_sizes_value(to->view.proto.shape, 2),
                                                              op_int_value(OPAQ_DTYPE_BF16),
                                                              op_int_value(start)};
    return op_run_into("slice_rows", values, to, error);
}

/* Every copy of the slice dequantizes to the same rows of that copy of the whole tensor. */
static void check_slice_values(const struct tensor *whole, const struct tensor *part, int64_t start,
                               const char *spec) {
    const int64_t rows = opaq_proto_rows(&part->view.proto);
    const int64_t columns = opaq_proto_columns(&part->view.proto);
    for (int usage = OPAQ_ROWWISE; usage <= OPAQ_COLUMNWISE; ++usage) {
        if (usage & part->view.proto.spec.usage) {
            struct tensor all = tensor_make(opaq_proto_rows(&whole->view.proto), columns, OPAQ_F32, NULL);
            struct tensor some = tensor_make(rows, columns, OPAQ_F32, NULL);
            CHECK_EQ_INT(opaq_dequantize(&whole->view, usage, NULL, &all.view, NULL), OPAQ_OK);
            CHECK_EQ_INT(opaq_dequantize(&part->view, usage, NULL, &some.view, NULL), OPAQ_OK);
            CHECK_BYTES(some.view.buffer[0].data, (const float *)all.view.buffer[0].data + start * columns,
                        tensor_bytes(&some, 0), "%s rows from %lld, usage %d", spec, (long long)start, usage);
            tensor_free(&all);
            tensor_free(&some);
        }
    }
}

static void slices_and_gathers(void) {
    static const struct {
        const char *spec;
        int64_t multiple;
    } cases[] = {
        {"fp8+both", 1},
        {"fp8row", 1},
        {"fp8row+both", 1},
        {"fp8blk1", 1},
        {"fp8blk1+both", 128},
        {"fp8blk2+both", 128},
        {"mxfp8", 1},
        {"mxfp8+both", 32},
        {"mxfp8+2d", 32},
        {"mxfp4+both", 32},
        {"mxfp4+both+swizzle", 32},
        {"nvfp4", 1},
        {"nvfp4+both", 16},
        {"nvfp4+both+rht", 16},
        {"nvfp4+both+rowscaled", 16},
        {"nvfp4+rowscaled+swizzle", 1},
        {"nvfp4+both+global+rule=compressed-tensors", 16},
        {"nvfp4+rowscaled+global+rule=compressed-tensors", 1},
        {"fp8+tiled", 1},
        {"fp8row+tiled", 1},
        {"fp8blk2+tiled", 128},
        {"mxfp8+tiled", 1},
        {"mxfp4+tiled", 1},
        {"nvfp4+tiled", 1},
        {"nvfp4+rowscaled+tiled", 1},
    };
    enum { ROWS = 256, COLUMNS = 72, SHARDS = 2 };
    struct tensor x = tensor_make(ROWS, COLUMNS, OPAQ_BF16, NULL);
    tensor_fill(&x, FILL_OUTLIERS, 5);
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        const char *spec = cases[i].spec;
        struct opaq_error error = {OPAQ_OK, ""};
        struct tensor whole = quantized(&x, spec);
        const int64_t start =
            128 / cases[i].multiple * cases[i].multiple - (cases[i].multiple < 128 ? cases[i].multiple : 0);
        struct tensor part = tensor_make(ROWS - start, COLUMNS, OPAQ_BF16, spec);
        CHECK_EQ_INT(slice(&whole, spec, start, &part, &error), OPAQ_OK);
        CHECK_EQ_STR(error.text, "");
        check_slice_values(&whole, &part, start, spec);
        if (cases[i].multiple > 1) {
            struct tensor bad = tensor_make(ROWS - 8, COLUMNS, OPAQ_BF16, spec);
            CHECK_EQ_INT(slice(&whole, spec, 8, &bad, &error), OPAQ_ERROR_SHAPE);
            CHECK(strstr(error.text, "cut a block in two") != NULL);
            tensor_free(&bad);
        }
        CHECK_EQ_INT(slice(&whole, spec, ROWS, &part, &error), OPAQ_ERROR_SHAPE);
        tensor_free(&part);

        /* two halves in sequence, as an all-gather returns them, make the whole again */
        struct op_tensors gathered = {.count = 0};
        for (int s = 0; s < SHARDS; ++s) {
            struct tensor shard = tensor_make(ROWS / SHARDS, COLUMNS, OPAQ_BF16, spec);
            CHECK_EQ_INT(slice(&whole, spec, (int64_t)s * ROWS / SHARDS, &shard, &error), OPAQ_OK);
            const struct op_tensors one = op_tensors_of(&shard);
            for (int b = 0; b < one.count; ++b) {
                if (s == 0) {
                    gathered.tensor[b] = one.tensor[b];
                    gathered.tensor[b].shape[0] *= SHARDS;
                    gathered.tensor[b].data = malloc(tensor_bytes(&shard, b) * SHARDS);
                }
                memcpy((char *)gathered.tensor[b].data + tensor_bytes(&shard, b) * (size_t)s,
                       one.tensor[b].data, tensor_bytes(&shard, b));
            }
            gathered.count = one.count;
            tensor_free(&shard);
        }
        const int64_t shard_shape[2] = {ROWS / SHARDS, COLUMNS};
        const int64_t shape[2] = {ROWS, COLUMNS};
        const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {
            op_list_value(&gathered), op_text_value(spec), op_sizes_value(shard_shape, 2),
            op_sizes_value(shape, 2), op_int_value(OPAQ_DTYPE_BF16)};
        struct tensor again = tensor_make(ROWS, COLUMNS, OPAQ_BF16, spec);
        CHECK_EQ_INT(op_run_into("gather_rows", values, &again, &error), OPAQ_OK);
        compare(&again, &whole, spec);
        for (int b = 0; b < gathered.count; ++b) {
            free(gathered.tensor[b].data);
        }
        tensor_free(&again);
        tensor_free(&whole);
    }
    tensor_free(&x);
}

/* The number of sizes is not truncated to the 32 bits of a rank. */
static void shapes_of_too_many_dimensions(void) {
    static const char *const names[] = {"slice_rows", "gather_rows"};
    const int64_t shape[2] = {32, 64};
    struct tensor x = tensor_make(32, 64, OPAQ_BF16, NULL);
    tensor_fill(&x, FILL_NORMAL, 1);
    struct tensor q = quantized(&x, "mxfp8");
    struct tensor to = tensor_make(32, 64, OPAQ_BF16, "mxfp8");
    const struct op_tensors buffers = op_tensors_of(&q);
    for (int i = 0; i < 2; ++i) {
        struct opaq_error error = {OPAQ_OK, ""};
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_list_value(&buffers), op_text_value("mxfp8"),
                                                            op_sizes_value(shape, 2), op_sizes_value(shape, 2),
                                                            op_int_value(OPAQ_DTYPE_BF16)};
        CHECK_EQ_INT(op_run_into(names[i], values, &to, &error), OPAQ_OK);
        values[2].count += (int64_t)1 << 32;
        CHECK_EQ_INT(op_run_into(names[i], values, &to, &error), OPAQ_ERROR_SHAPE);
        CHECK(strstr(error.text, "shape has 4294967298 dimensions, at most 8 are allowed") != NULL);
    }
    tensor_free(&to);
    tensor_free(&q);
    tensor_free(&x);
}

static const struct test_case tests[] = {TEST(convert_equals_quantizing), TEST(convert_refuses_to_round),
                                         TEST(slices_and_gathers), TEST(shapes_of_too_many_dimensions)};
TEST_MAIN(tests)
