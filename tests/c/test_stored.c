/* test_stored.c: rows of quantized tensors as checkpoints store them: exported and imported, in pieces, in
 * other layouts. */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_spec.h"
#include "support_stored.h"

static void clear(const struct tensor *q) {
    for (int i = 0; i < opaq_proto_buffer_count(&q->view.proto); ++i) {
        if (q->view.buffer[i].bytes > 0) {
            memset(q->view.buffer[i].data, 0, q->view.buffer[i].bytes);
        }
    }
}

static struct tensor zeroed_like(const struct tensor *q) {
    struct tensor made = tensor_make_proto(&q->view.proto);
    clear(&made);
    return made;
}

static void check_same(const struct tensor *actual, const struct tensor *expected, const char *what) {
    const int buffer = first_difference(actual, expected);
    if (buffer >= 0) {
        CHECK_FAIL("%s %s: buffer %d differs", spec_text(&actual->view.proto.spec).text, what, buffer);
    }
}

/* ---- export and import ---- */

static int64_t cd(int64_t a, int64_t b) { return (a + b - 1) / b; }
static int64_t ru(int64_t a, int64_t b) { return cd(a, b) * b; }

/* The scale entry (r, c) of the table "Buffers" in docs/formats.md, without swizzle. */
static int64_t scale_place(const struct opaq_proto *proto, int64_t r, int64_t c) {
    const int64_t rows = opaq_proto_rows(proto);
    const int64_t columns = opaq_proto_columns(proto);
    switch ((enum opaq_format)proto->spec.format) {
    case OPAQ_FP8:
        return 0;
    case OPAQ_FP8ROW:
        return r;
    case OPAQ_FP8BLK1:
        return c * ru(rows, 4) + r;
    case OPAQ_FP8BLK2:
        return r * ru(cd(columns, 128), 4) + c;
    case OPAQ_MXFP8:
    case OPAQ_MXFP4:
        return r * ru(cd(columns, 32), 4) + c;
    case OPAQ_NVFP4:
        return r * ru(cd(columns, 16), 4) + c;
    }
    return -1;
}

static void check_exported(const struct tensor *q, struct rows *rows) {
    const struct opaq_proto *proto = &q->view.proto;
    const struct opaq_tensor *data = &rows->stored.data;
    const struct opaq_tensor *scale = &rows->stored.scale;
    const int64_t row_bytes = data->shape[1];
    const int64_t stored_bytes = proto->spec.format == OPAQ_MXFP4   ? ru(row_bytes, 16)
                                 : proto->spec.format == OPAQ_NVFP4 ? ru(row_bytes, 8)
                                                                    : row_bytes;
    for (int64_t r = 0; r < data->shape[0] && row_bytes > 0; ++r) {
        CHECK_BYTES((const uint8_t *)data->data + r * row_bytes,
                    (const uint8_t *)q->view.buffer[0].data + r * stored_bytes, (size_t)row_bytes, "%s row",
                    spec_text(&proto->spec).text);
    }
    const size_t size = scale->dtype == OPAQ_DTYPE_U8 ? 1 : 4;
    const int64_t scale_columns = scale->rank == 1 ? 1 : scale->shape[1];
    const int index = opaq_proto_find(proto, OPAQ_ROLE_SCALE, OPAQ_ROWWISE);
    for (int64_t r = 0; r < scale->shape[0]; ++r) {
        for (int64_t c = 0; c < scale_columns && !(proto->spec.options & OPAQ_SWIZZLED); ++c) {
            CHECK_BYTES((const char *)scale->data + (size_t)(r * scale_columns + c) * size,
                        (const char *)q->view.buffer[index].data + (size_t)scale_place(proto, r, c) * size,
                        size, "%s scale", spec_text(&proto->spec).text);
        }
    }
}

static const int64_t shapes[][2] = {{1, 1}, {5, 37}, {130, 260}, {128, 128}, {200, 31}, {0, 32}, {5, 0}};

static void every_quantizer_exports_and_imports(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    int seen = 0;
    for (int i = 0; i < list.count; ++i) {
        for (size_t s = 0; s < sizeof shapes / sizeof shapes[0]; ++s) {
            if (list.spec[i].usage != OPAQ_ROWWISE) {
                continue;
            }
            struct tensor q = sample(shapes[s][0], shapes[s][1], &list.spec[i], 3);
            struct rows rows = rows_exported(&q, 0, shapes[s][0]);
            struct tensor again = zeroed_like(&q);
            check_exported(&q, &rows);
            rows_import(&again, 0, &rows.stored);
            check_same(&again, &q, "imported");
            tensor_free(&again);
            rows_free(&rows);
            tensor_free(&q);
            ++seen;
        }
    }
    printf("  %d tensors\n", seen);
    spec_list_free(&list);
}

static const char *const every_format[] = {
    "fp8",
    "fp8row",
    "fp8blk1",
    "fp8blk2",
    "mxfp8",
    "mxfp4",
    "nvfp4",
    "mxfp8+swizzle",
    "nvfp4+2d",
    "nvfp4+rowscaled+swizzle",
    "nvfp4+rowscaled+swizzle+global+rule=modelopt",
    "nvfp4+global+rule=compressed-tensors",
};
enum { EVERY_FORMAT = sizeof every_format / sizeof every_format[0] };

static void pieces_make_the_whole(void) {
    static const int64_t cuts[] = {0, 128, 256, 384, 450};
    for (int i = 0; i < EVERY_FORMAT; ++i) {
        struct tensor q = sample_of(450, 77, every_format[i], 5);
        struct tensor again = zeroed_like(&q);
        for (int piece = 3; piece >= 0; --piece) {
            const int64_t end = cuts[piece + 1];
            struct rows rows = rows_exported(&q, cuts[piece], end - cuts[piece]);
            rows_import(&again, cuts[piece], &rows.stored);
            rows_free(&rows);
        }
        check_same(&again, &q, "in pieces");
        tensor_free(&again);
        tensor_free(&q);
    }
}

/* Shards that were quantized separately keep their scales if each row has one. */
static void shards_keep_their_scales(void) {
    static const char *const texts[][2] = {
        {"nvfp4+global+rule=compressed-tensors", "nvfp4+rowscaled+global+rule=compressed-tensors"},
        {"nvfp4+global+rule=modelopt", "nvfp4+rowscaled+swizzle+global+rule=modelopt"},
        {"nvfp4", "nvfp4+rowscaled"},
        {"fp8", "fp8row"},
    };
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; ++i) {
        struct tensor whole = tensor_make(50, 70, OPAQ_F32, texts[i][1]);
        clear(&whole);
        struct tensor parts[2] = {sample_of(20, 70, texts[i][0], 1), sample_of(30, 70, texts[i][0], 2)};
        for (int p = 0; p < 2; ++p) {
            struct rows rows = rows_exported(&parts[p], 0, p == 0 ? 20 : 30);
            rows_import(&whole, p == 0 ? 0 : 20, &rows.stored);
            struct rows back = rows_make(&parts[p], p == 0 ? 20 : 30);
            struct opaq_error error = {OPAQ_OK, ""};
            CHECK_EQ_INT(
                opaq_stored_export(&whole.view, p == 0 ? 0 : 20, p == 0 ? 20 : 30, &back.stored, &error),
                OPAQ_OK);
            for (int k = 0; k < 3; ++k) {
                CHECK_BYTES(rows_part(&back, k)->data, rows_part(&rows, k)->data, rows_part_bytes(&rows, k),
                            "%s part %d", texts[i][1], k);
            }
            rows_free(&back);
            rows_free(&rows);
        }
        struct tensor y = dequantized(&whole, 0);
        for (int p = 0; p < 2; ++p) {
            struct tensor z = dequantized(&parts[p], 0);
            CHECK_BYTES((const float *)y.view.buffer[0].data + (p == 0 ? 0 : 20 * 70), z.view.buffer[0].data,
                        tensor_bytes(&z, 0), "%s shard %d", texts[i][1], p);
            tensor_free(&z);
            tensor_free(&parts[p]);
        }
        /* the whole tensor has no single entry */
        struct rows rows = rows_make(&whole, 50);
        struct opaq_error error = {OPAQ_OK, ""};
        struct opaq_tensor *one = rows_part(&rows, whole.view.proto.spec.format == OPAQ_NVFP4 ? 2 : 1);
        one->rank = 0;
        CHECK_EQ_INT(opaq_stored_export(&whole.view, 0, 50, &rows.stored, &error), OPAQ_ERROR_ARGUMENT);
        CHECK(strstr(error.text, "one entry for all rows, but that of row 0 is") != NULL);
        CHECK_EQ_INT(*(const uint8_t *)rows.stored.data.data, 0xA5);
        rows_free(&rows);
        tensor_free(&y);
        tensor_free(&whole);
    }
}

/* ---- layouts ---- */

/* Imports the same rows from another layout and expects the same tensor. */
static void check_arrangement(const struct tensor *q, const struct opaq_stored *stored, const char *what) {
    struct tensor again = zeroed_like(q);
    rows_import(&again, 0, stored);
    check_same(&again, q, what);
    tensor_free(&again);
}

static void dimensions_may_be_split_and_of_size_one(void) {
    struct tensor q = sample_of(6, 96, "mxfp4", 1);
    struct rows rows = rows_exported(&q, 0, 6);
    rows_shape(&rows.stored.data, 4, (const int64_t[]){2, 3, 3, 16});
    rows_shape(&rows.stored.scale, 3, (const int64_t[]){2, 3, 3});
    check_arrangement(&q, &rows.stored, "in blocks, stacked");
    rows_shape(&rows.stored.data, 1, (const int64_t[]){6 * 48});
    struct opaq_error error;
    CHECK_EQ_INT(opaq_stored_import(&q.view, 0, &rows.stored, &error), OPAQ_ERROR_SHAPE);
    rows_free(&rows);
    tensor_free(&q);

    q = sample_of(300, 200, "fp8blk2", 1);
    rows = rows_exported(&q, 0, 300);
    rows_shape(&rows.stored.scale, 4, (const int64_t[]){3, 1, 2, 1});
    check_arrangement(&q, &rows.stored, "four dimensions");
    rows_free(&rows);
    tensor_free(&q);

    q = sample_of(7, 30, "fp8row", 1);
    rows = rows_exported(&q, 0, 7);
    rows_shape(&rows.stored.scale, 1, (const int64_t[]){7});
    check_arrangement(&q, &rows.stored, "one dimension");
    rows_free(&rows);
    tensor_free(&q);

    q = sample_of(7, 30, "fp8", 1);
    rows = rows_exported(&q, 0, 7);
    rows.stored.scale.rank = 0;
    check_arrangement(&q, &rows.stored, "a scalar");
    rows_free(&rows);
    tensor_free(&q);
}

/* Two experts of 127 rows have four blocks, and so have 254 rows, but not the same ones. */
static void stacks_do_not_share_blocks(void) {
    struct tensor q = sample_of(254, 128, "fp8blk2", 1);
    struct rows rows = rows_exported(&q, 0, 254);
    struct opaq_error error = {OPAQ_OK, ""};
    rows_shape(&rows.stored.data, 3, (const int64_t[]){2, 127, 128});
    CHECK_EQ_INT(opaq_stored_import(&q.view, 0, &rows.stored, &error), OPAQ_ERROR_SHAPE);
    CHECK(strstr(error.text, "254 rows in stacks of 127, expected stacks of a multiple of 128") != NULL);
    rows_free(&rows);
    tensor_free(&q);
    q = sample_of(256, 128, "fp8blk2", 1);
    rows = rows_exported(&q, 0, 256);
    rows_shape(&rows.stored.data, 3, (const int64_t[]){2, 128, 128});
    check_arrangement(&q, &rows.stored, "two experts");
    rows_free(&rows);
    tensor_free(&q);
}

/* Every part with strides in both dimensions, at an odd address. */
static void memory_may_be_strided_and_unaligned(void) {
    for (int i = 0; i < EVERY_FORMAT; ++i) {
        struct tensor q = sample_of(140, 45, every_format[i], 2);
        struct rows rows = rows_exported(&q, 0, 140);
        for (int columns_apart = 1; columns_apart <= 3; columns_apart += 2) {
            struct rows apart = rows;
            char *memory[3];
            for (int p = 0; p < 3; ++p) {
                struct opaq_tensor *tensor = rows_part(&apart, p);
                const int64_t size = tensor->dtype == OPAQ_DTYPE_U8 ? 1 : 4;
                const int64_t height = tensor->rank < 1 ? 0 : tensor->shape[0];
                const int64_t width = tensor->rank < 2 ? 1 : tensor->shape[1];
                const int64_t step = width * columns_apart + 5;
                memory[p] = malloc((size_t)(height * step * size + 1));
                tensor->data = tensor->rank < 0 ? NULL : memory[p] + 1;
                tensor->strides[0] = step;
                tensor->strides[1] = columns_apart;
                for (int64_t k = 0; k < height * width; ++k) {
                    memcpy(memory[p] + 1 + (k / width * step + k % width * columns_apart) * size,
                           (const char *)rows_part(&rows, p)->data + k * size, (size_t)size);
                }
            }
            check_arrangement(&q, &apart.stored, "strided");
            struct opaq_error error;
            CHECK_EQ_INT(opaq_stored_export(&q.view, 0, 140, &apart.stored, &error), OPAQ_OK);
            check_arrangement(&q, &apart.stored, "strided, exported");
            for (int p = 0; p < 3; ++p) {
                free(memory[p]);
            }
        }
        rows_free(&rows);
        tensor_free(&q);
    }
}

static void the_last_nibble_is_cleared(void) {
    struct tensor q = sample_of(3, 5, "nvfp4", 1);
    struct rows rows = rows_exported(&q, 0, 3);
    for (int r = 0; r < 3; ++r) {
        ((uint8_t *)rows.stored.data.data)[r * 3 + 2] |= 0xF0;
    }
    check_arrangement(&q, &rows.stored, "garbage beyond the last column");
    rows_free(&rows);
    tensor_free(&q);
}

/* ---- other scales ---- */

static void scales_come_as_bf16(void) {
    static const char *const texts[] = {"fp8", "fp8row", "fp8blk1", "fp8blk2"};
    for (int i = 0; i < 4; ++i) {
        struct tensor q = sample_of(150, 140, texts[i], 1);
        struct rows rows = rows_exported(&q, 0, 150);
        const size_t count = rows_part_bytes(&rows, 1) / 4;
        uint16_t *half = malloc(count * sizeof *half);
        float *wide = rows.stored.scale.data;
        for (size_t k = 0; k < count; ++k) { /* the upper half of a float32 is a bf16 */
            uint32_t bits;
            memcpy(&bits, &wide[k], 4);
            half[k] = (uint16_t)(bits >> 16);
            bits &= 0xFFFF0000u;
            memcpy(&wide[k], &bits, 4);
        }
        struct tensor expected = zeroed_like(&q);
        rows_import(&expected, 0, &rows.stored);
        struct opaq_stored narrow = rows.stored;
        narrow.scale.dtype = OPAQ_DTYPE_BF16;
        narrow.scale.data = half;
        check_arrangement(&expected, &narrow, "bf16");
        free(half);
        rows_free(&rows);
        tensor_free(&expected);
        tensor_free(&q);
    }
}

static void square_blocks_take_exponents(void) {
    struct tensor q = sample_of(256, 384, "fp8blk2+pow2", 1);
    struct rows rows = rows_exported(&q, 0, 256);
    uint8_t exponent[6];
    float *wide = rows.stored.scale.data;
    wide[0] = 0x1p-127f;
    wide[1] = 0x1p127f;
    wide[2] = 1.0f;
    for (int k = 0; k < 6; ++k) {
        int power;
        (void)frexpf(wide[k], &power);
        exponent[k] = (uint8_t)(power - 1 + 127);
    }
    struct tensor expected = zeroed_like(&q);
    rows_import(&expected, 0, &rows.stored);
    struct opaq_stored narrow = rows.stored;
    narrow.scale.dtype = OPAQ_DTYPE_U8;
    narrow.scale.data = exponent;
    check_arrangement(&expected, &narrow, "e8m0");
    rows_free(&rows);
    tensor_free(&expected);
    tensor_free(&q);
}

/* ---- scales of a whole tensor ---- */

static void a_tensor_has_one_scale(void) {
    static const char *const texts[] = {"fp8", "nvfp4+global+rule=modelopt"};
    for (int i = 0; i < 2; ++i) {
        struct tensor q = sample_of(20, 40, texts[i], 1);
        struct rows rows = rows_exported(&q, 0, 10);
        struct opaq_error error = {OPAQ_OK, ""};
        float *number = i == 0 ? rows.stored.scale.data : rows.stored.global.data;
        struct tensor again = zeroed_like(&q);
        rows_import(&again, 0, &rows.stored);
        rows_import(&again, 10, &rows.stored);
        const float before = *number;
        *number = before * 2.0f;
        CHECK_EQ_INT(opaq_stored_import(&again.view, 10, &rows.stored, &error), OPAQ_ERROR_ARGUMENT);
        CHECK(strstr(error.text, "rows 10 to 20 come with the") != NULL);
        rows_free(&rows);
        rows = rows_exported(&q, 0, 20); /* importing all rows may change it */
        number = i == 0 ? rows.stored.scale.data : rows.stored.global.data;
        *number = before * 2.0f;
        rows_import(&again, 0, &rows.stored);
        rows_free(&rows);
        tensor_free(&again);
        tensor_free(&q);
    }
}

static void square_blocks_have_one_scale(void) {
    struct tensor q = sample_of(40, 64, "nvfp4+2d", 1);
    struct rows rows = rows_exported(&q, 0, 40);
    struct opaq_error error = {OPAQ_OK, ""};
    ((uint8_t *)rows.stored.scale.data)[19 * 4 + 2] ^= 1;
    CHECK_EQ_INT(opaq_stored_import(&q.view, 0, &rows.stored, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "rows 16 and 19 in block 2") != NULL);
    rows_free(&rows);
    tensor_free(&q);
}

static const struct test_case tests[] = {
    TEST(every_quantizer_exports_and_imports),
    TEST(pieces_make_the_whole),
    TEST(shards_keep_their_scales),
    TEST(dimensions_may_be_split_and_of_size_one),
    TEST(stacks_do_not_share_blocks),
    TEST(memory_may_be_strided_and_unaligned),
    TEST(the_last_nibble_is_cleared),
    TEST(scales_come_as_bf16),
    TEST(square_blocks_take_exponents),
    TEST(a_tensor_has_one_scale),
    TEST(square_blocks_have_one_scale),
};
TEST_MAIN(tests)
