/* test_view.c: borrowed memory: strides with equal distances of rows and others; buffers that are missing, too
 * small or misaligned; a tensor in one allocation. */
#include <stdlib.h>

#include "check.h"
#include "support_spec.h"
#include "support_tensor.h"

/* ---- plain tensors and their strides ---- */

struct stride_case {
    int rank;
    int64_t shape[4];
    int64_t strides[4];
    int64_t row_stride; /* 0: refused */
    size_t bytes;       /* needed, of float32 */
    const char *says;
};

static const struct stride_case stride_cases[] = {
    /* contiguous */
    {1, {5}, {1}, 5, 20, NULL},
    {2, {3, 5}, {5, 1}, 5, 60, NULL},
    {4, {2, 3, 4, 5}, {60, 20, 5, 1}, 5, 480, NULL},
    /* padded rows: the last row needs no padding after it */
    {2, {3, 5}, {8, 1}, 8, (2 * 8 + 5) * 4, NULL},
    {3, {2, 3, 5}, {24, 8, 1}, 8, (5 * 8 + 5) * 4, NULL},
    {4, {2, 1, 3, 5}, {24, 999, 8, 1}, 8, (5 * 8 + 5) * 4, NULL},
    {3, {4, 1, 5}, {7, 3, 1}, 7, (3 * 7 + 5) * 4, NULL},
    {3, {1, 4, 5}, {-9, 7, 1}, 7, (3 * 7 + 5) * 4, NULL},
    /* the stride of a dimension of size 1 is not used */
    {2, {1, 5}, {-3, 1}, 5, 20, NULL},
    {2, {1, 5}, {0, 1}, 5, 20, NULL},
    {2, {5, 1}, {1, 77}, 1, 20, NULL},
    {2, {5, 1}, {6, 0}, 6, (4 * 6 + 1) * 4, NULL},
    {1, {1}, {123}, 1, 4, NULL},
    {4, {1, 1, 1, 5}, {INT64_MIN, INT64_MAX, -1, 1}, 5, 20, NULL},
    /* strides of empty tensors are not used */
    {2, {0, 5}, {-1, 7}, 5, 0, NULL},
    {2, {5, 0}, {3, 9}, 0, 0, ""},
    {3, {2, 0, 5}, {1, 2, 3}, 5, 0, NULL},
    /* refused */
    {2, {3, 5}, {1, 3}, 0, 4096, "the last stride is 3, expected 1"},
    {2, {3, 5}, {5, -1}, 0, 4096, "the last stride is -1, expected 1"},
    {2, {3, 5}, {5, 0}, 0, 4096, "the last stride is 0, expected 1"},
    {1, {5}, {2}, 0, 4096, "the last stride is 2, expected 1"},
    {2, {3, 5}, {-5, 1}, 0, 4096, "common distance"},
    {2, {3, 5}, {INT64_MIN, 1}, 0, 4096, "common distance"},
    {3, {2, 3, 5}, {5, 10, 1}, 0, 4096, "common distance"},
    {3, {2, 3, 5}, {16, 5, 1}, 0, 4096, "common distance"},
    {3, {2, 3, 5}, {0, 5, 1}, 0, 4096, "common distance"},
    {4, {2, 2, 2, 2}, {16, 4, 2, 1}, 0, 4096, "common distance"},
    {2, {3, 5}, {4, 1}, 0, 4096, "rows of 5 elements lie 4 elements apart"},
    {2, {3, 5}, {0, 1}, 0, 4096, "rows of 5 elements lie 0 elements apart"},
    {3, {2, 3, 5}, {INT64_MAX, INT64_MAX, 1}, 0, 4096, "common distance"},
    {2, {2, 5}, {(int64_t)1 << 61, 1}, 0, 4096, "2^62"},
    {2, {3, 5}, {(int64_t)1 << 61, 1}, 0, 4096, "view"},
};

static float memory[1024];

static void expect_strides(const struct stride_case *c, size_t bytes, int good, const char *says) {
    struct opaq_view view;
    struct opaq_view before;
    struct opaq_error error;
    memset(&view, 0xA5, sizeof view);
    memset(&before, 0xA5, sizeof before);
    error.text[0] = '\0';
    const enum opaq_status status =
        opaq_view_plain(c->shape, c->strides, c->rank, OPAQ_F32, tensor_cpu, memory, bytes, &view, &error);
    if ((status == OPAQ_OK) != good || (says != NULL && strstr(error.text, says) == NULL)) {
        CHECK_FAIL("strides (%lld, %lld, ...) of (%lld, %lld, ...): %s, expected %s: %s",
                   (long long)c->strides[0], (long long)c->strides[1], (long long)c->shape[0],
                   (long long)c->shape[1], opaq_status_name(status), good ? "OK" : says, error.text);
    }
    if (status != OPAQ_OK) {
        CHECK_BYTES(&view, &before, sizeof view, "a refused view was written");
    } else {
        CHECK_EQ_INT(view.row_stride, c->row_stride);
        CHECK_EQ_INT(opaq_view_check(&view, NULL), OPAQ_OK);
        CHECK(view.buffer[0].data == memory && view.buffer[0].bytes == bytes);
    }
}

static void strides(void) {
    for (size_t i = 0; i < sizeof stride_cases / sizeof stride_cases[0]; ++i) {
        const struct stride_case *c = &stride_cases[i];
        const int good = c->says == NULL || c->says[0] == '\0';
        expect_strides(c, c->bytes, good, good ? NULL : c->says);
        if (good && c->bytes > 0) {
            expect_strides(c, c->bytes - 1, 0, "bytes");
        }
    }
}

static void without_strides_it_is_contiguous(void) {
    static const int64_t shape[3] = {2, 3, 5};
    struct opaq_view view;
    CHECK_EQ_INT(opaq_view_plain(shape, NULL, 3, OPAQ_F32, tensor_cpu, memory, 120, &view, NULL), OPAQ_OK);
    CHECK_EQ_INT(view.row_stride, 5);
    CHECK_EQ_INT(opaq_view_plain(shape, NULL, 3, OPAQ_F32, tensor_cpu, memory, 119, &view, NULL),
                 OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_view_plain(NULL, NULL, 0, OPAQ_F32, tensor_cpu, memory, 4, &view, NULL), OPAQ_OK);
    CHECK_EQ_INT(view.row_stride, 1);
}

static void unsuitable_plain_memory(void) {
    static const int64_t shape[2] = {3, 5};
    struct opaq_view view;
    struct opaq_error error;
    char *misaligned = (char *)memory + 2;
    CHECK_EQ_INT(opaq_view_plain(shape, NULL, 2, OPAQ_F32, tensor_cpu, NULL, 60, &view, &error),
                 OPAQ_ERROR_BUFFER);
    CHECK(strstr(error.text, "60") != NULL && strstr(error.text, "NULL") != NULL);
    CHECK_EQ_INT(opaq_view_plain(shape, NULL, 2, OPAQ_F32, tensor_cpu, memory, 59, &view, &error),
                 OPAQ_ERROR_BUFFER);
    CHECK(strstr(error.text, "3 rows of 5 elements need 60 bytes, the buffer has 59") != NULL);
    CHECK_EQ_INT(opaq_view_plain(shape, NULL, 2, OPAQ_F32, tensor_cpu, misaligned, 60, &view, &error),
                 OPAQ_ERROR_BUFFER);
    CHECK(strstr(error.text, "aligned") != NULL && strstr(error.text, "4") != NULL);
    CHECK_EQ_INT(opaq_view_plain(shape, NULL, 2, OPAQ_BF16, tensor_cpu, misaligned, 30, &view, &error),
                 OPAQ_OK);
    CHECK_EQ_INT(opaq_view_plain(shape, NULL, 2, OPAQ_BF16, tensor_cpu, misaligned + 1, 30, &view, &error),
                 OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_view_plain(shape, NULL, 2, OPAQ_F32, tensor_cpu, memory, 60, NULL, &error),
                 OPAQ_ERROR_ARGUMENT);
    static const int64_t empty[2] = {3, 0};
    CHECK_EQ_INT(opaq_view_plain(empty, NULL, 2, OPAQ_F32, tensor_cpu, NULL, 0, &view, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_view_check(NULL, &error), OPAQ_ERROR_ARGUMENT);
}

/* ---- quantized tensors ---- */

static struct opaq_proto proto_of(const char *text) {
    struct opaq_proto proto;
    struct opaq_error error;
    if (opaq_proto_parse(text, strlen(text), &proto, &error) != OPAQ_OK) {
        printf("  %s\n", error.text);
        exit(1);
    }
    return proto;
}

/* Each buffer in turn NULL, a byte too small, and misaligned if possible. */
static void every_buffer_is_checked(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int s = 0; s < list.count; ++s) {
        const int64_t shape[2] = {20, 40};
        struct opaq_proto proto;
        CHECK_EQ_INT(opaq_proto_make(shape, 2, OPAQ_F32, &list.spec[s], tensor_cpu, &proto, NULL), OPAQ_OK);
        struct tensor q = tensor_make_proto(&proto);
        CHECK_EQ_INT(opaq_view_check(&q.view, NULL), OPAQ_OK);
        const int count = opaq_proto_buffer_count(&proto);
        for (int i = 0; i < count; ++i) {
            struct opaq_buffer buffer;
            struct opaq_error error;
            struct opaq_view view = q.view;
            (void)opaq_proto_buffer(&proto, i, &buffer, NULL);
            view.buffer[i].data = NULL;
            CHECK_EQ_INT(opaq_view_check(&view, &error), OPAQ_ERROR_BUFFER);
            CHECK(strstr(error.text, buffer.name) != NULL && strstr(error.text, "NULL") != NULL);
            view = q.view;
            --view.buffer[i].bytes;
            CHECK_EQ_INT(opaq_view_check(&view, &error), OPAQ_ERROR_BUFFER);
            CHECK(strstr(error.text, buffer.name) != NULL);
            view = q.view;
            view.buffer[i].data = (char *)view.buffer[i].data + 1;
            CHECK_EQ_INT(opaq_view_check(&view, &error), buffer.entry_bytes == 1 ? OPAQ_OK : OPAQ_ERROR_BUFFER);
            CHECK(buffer.entry_bytes == 1 || strstr(error.text, "aligned") != NULL);
            CHECK_EQ_INT(opaq_view_check(&view, NULL), buffer.entry_bytes == 1 ? OPAQ_OK : OPAQ_ERROR_BUFFER);
        }
        tensor_free(&q);
    }
    spec_list_free(&list);
}

static void quantized_views(void) {
    const struct opaq_proto proto = proto_of("f32[20,40] nvfp4+both cpu");
    const struct opaq_proto plain = proto_of("f32[20,40] cpu");
    struct tensor q = tensor_make_proto(&proto);
    struct opaq_view view;
    struct opaq_error error;
    CHECK_EQ_INT(opaq_view_quantized(&proto, q.view.buffer, 6, &view, &error), OPAQ_OK);
    CHECK_BYTES(&view.buffer, &q.view.buffer, sizeof view.buffer, "spans");
    CHECK_EQ_INT(opaq_view_quantized(&proto, q.view.buffer, 5, &view, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "got 5 buffers") != NULL && strstr(error.text, "expected 6") != NULL);
    CHECK_EQ_INT(opaq_view_quantized(&proto, q.view.buffer, 7, &view, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_view_quantized(&proto, q.view.buffer, -1, &view, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_view_quantized(&proto, NULL, 6, &view, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_view_quantized(&proto, q.view.buffer, 6, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_view_quantized(NULL, q.view.buffer, 6, &view, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_view_quantized(&plain, q.view.buffer, 1, &view, &error), OPAQ_ERROR_ARGUMENT);
    tensor_free(&q);
}

/* ---- one allocation ---- */

static void bind_lays_buffers_out(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int s = -1; s < list.count; ++s) {
        const int64_t shape[2] = {s % 2 ? 19 : 0, 35};
        struct opaq_proto proto;
        size_t bytes = 0;
        CHECK_EQ_INT(
            opaq_proto_make(shape, 2, OPAQ_F16, s < 0 ? NULL : &list.spec[s], tensor_cpu, &proto, NULL),
            OPAQ_OK);
        CHECK_EQ_INT(opaq_view_bind_bytes(&proto, &bytes, NULL), OPAQ_OK);
        void *block = NULL;
        CHECK_EQ_INT(posix_memalign(&block, 64, bytes + 64), 0);
        struct opaq_view view;
        CHECK_EQ_INT(opaq_view_bind(&proto, block, bytes, &view, NULL), OPAQ_OK);
        CHECK_EQ_INT(opaq_view_check(&view, NULL), OPAQ_OK);
        size_t offset = 0;
        for (int i = 0; i < opaq_proto_buffer_count(&proto); ++i) {
            struct opaq_buffer buffer;
            (void)opaq_proto_buffer(&proto, i, &buffer, NULL);
            CHECK_EQ_INT(view.buffer[i].bytes, buffer.bytes);
            CHECK(buffer.bytes == 0 || view.buffer[i].data == (char *)block + offset);
            offset += (buffer.bytes + 63) / 64 * 64;
        }
        CHECK_EQ_INT(bytes, offset);
        struct opaq_error error;
        const struct opaq_view before = view;
        if (bytes > 0) {
            CHECK_EQ_INT(opaq_view_bind(&proto, block, bytes - 1, &view, &error), OPAQ_ERROR_BUFFER);
            CHECK_EQ_INT(opaq_view_bind(&proto, NULL, bytes, &view, &error), OPAQ_ERROR_BUFFER);
            CHECK(strstr(error.text, "NULL") != NULL);
        }
        CHECK_EQ_INT(opaq_view_bind(&proto, (char *)block + 32, bytes, &view, &error), OPAQ_ERROR_BUFFER);
        CHECK(strstr(error.text, "not aligned") != NULL);
        CHECK_BYTES(&view, &before, sizeof view, "a refused bind wrote to the view");
        free(block);
    }
    spec_list_free(&list);
}

static void bind_refuses_null(void) {
    const struct opaq_proto proto = proto_of("f32[4] cpu");
    struct opaq_view view;
    struct opaq_error error;
    size_t bytes;
    CHECK_EQ_INT(opaq_view_bind_bytes(NULL, &bytes, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_view_bind_bytes(&proto, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_view_bind(NULL, memory, 64, &view, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_view_bind(&proto, memory, 64, NULL, &error), OPAQ_ERROR_ARGUMENT);
}

static const struct test_case tests[] = {TEST(strides),
                                         TEST(without_strides_it_is_contiguous),
                                         TEST(unsuitable_plain_memory),
                                         TEST(every_buffer_is_checked),
                                         TEST(quantized_views),
                                         TEST(bind_lays_buffers_out),
                                         TEST(bind_refuses_null)};
TEST_MAIN(tests)
