/* test_stored_errors.c: invalid stored rows. Each error has its status, names the operation and the numbers,
 * and writes nothing. */
#include "check.h"
#include "support_spec.h"
#include "support_stored.h"

struct bad {
    const char *spec; /* of 300 rows and 70 columns */
    const char *what; /* the part that is wrong */
    int32_t dtype;    /* 0: correct */
    int rank;         /* -2: correct */
    int64_t shape[4];
    int64_t first;
    enum opaq_status status;
    const char *says;
};

static const struct bad bads[] = {
    /* dtypes */
    {"nvfp4", "data", OPAQ_DTYPE_F32, -2, {0}, 0, OPAQ_ERROR_ARGUMENT, "data holds f32, expected uint8"},
    {"nvfp4", "scale", OPAQ_DTYPE_F32, -2, {0}, 0, OPAQ_ERROR_ARGUMENT, "scale holds f32, expected uint8"},
    {"mxfp8", "scale", OPAQ_DTYPE_BF16, -2, {0}, 0, OPAQ_ERROR_ARGUMENT, "scale holds bf16, expected uint8"},
    {"fp8row", "scale", OPAQ_DTYPE_U8, -2, {0}, 0, OPAQ_ERROR_ARGUMENT, "holds uint8, expected f32"},
    {"fp8blk1", "scale", OPAQ_DTYPE_F16, -2, {0}, 0, OPAQ_ERROR_ARGUMENT, "holds f16, expected f32"},
    {"fp8blk2", "scale", OPAQ_DTYPE_I64, -2, {0}, 0, OPAQ_ERROR_ARGUMENT, "holds int64, expected f32"},
    {"fp8", "scale", 99, -2, {0}, 0, OPAQ_ERROR_ARGUMENT, "holds another dtype, expected f32"},
    {"nvfp4", "global", OPAQ_DTYPE_BF16, -2, {0}, 0, OPAQ_ERROR_ARGUMENT, "global holds bf16, expected f32"},
    /* shapes */
    {"nvfp4", "data", 0, 2, {300, 70}, 0, OPAQ_ERROR_SHAPE, "data has the shape [300,70], expected rows of 35"},
    {"mxfp8", "data", 0, 2, {70, 300}, 0, OPAQ_ERROR_SHAPE, "data has the shape [70,300], expected rows of 70"},
    {"mxfp8", "scale", 0, 2, {300, 2}, 0, OPAQ_ERROR_SHAPE, "scale has the shape [300,2], expected rows of 3"},
    {"mxfp8",
     "scale",
     0,
     2,
     {299, 3},
     0,
     OPAQ_ERROR_SHAPE,
     "[299,3], expected [300,3] for 300 rows and 70 col"},
    {"mxfp8", "scale", 0, 2, {1, 3}, 0, OPAQ_ERROR_SHAPE, "[1,3], expected [300,3]"},
    {"fp8blk2", "scale", 0, 2, {300, 1}, 0, OPAQ_ERROR_SHAPE, "[300,1], expected [3,1]"},
    {"fp8blk2", "scale", 0, 0, {0}, 0, OPAQ_ERROR_SHAPE, "shape [], expected [3,1]"},
    {"fp8", "scale", 0, 1, {300}, 0, OPAQ_ERROR_SHAPE, "shape [300], expected [1,1]"},
    {"fp8row", "scale", 0, 1, {299}, 0, OPAQ_ERROR_SHAPE, "shape [299], expected [300,1]"},
    {"nvfp4", "global", 0, 1, {300}, 0, OPAQ_ERROR_SHAPE, "global has the shape [300], expected [1,1]"},
    {"nvfp4+rowscaled", "global", 0, 1, {2}, 0, OPAQ_ERROR_SHAPE, "shape [2], expected [300,1]"},
    {"nvfp4", "scale", 0, 9, {0}, 0, OPAQ_ERROR_SHAPE, "scale has rank 9, expected 0 to 8"},
    {"nvfp4", "data", 0, 2, {-1, 35}, 0, OPAQ_ERROR_OVERFLOW, "data has negative sizes"},
    {"nvfp4",
     "data",
     0,
     4,
     {0, INT64_C(1) << 40, INT64_C(1) << 40, 35},
     0,
     OPAQ_ERROR_OVERFLOW,
     "more than 2^62 rows"},
    /* present and absent parts */
    {"nvfp4", "data", 0, -1, {0}, 0, OPAQ_ERROR_ARGUMENT, "data is missing"},
    {"nvfp4", "scale", 0, -1, {0}, 0, OPAQ_ERROR_ARGUMENT, "scale is missing"},
    {"nvfp4", "global", 0, -1, {0}, 0, OPAQ_ERROR_ARGUMENT, "global is missing"},
    {"mxfp4", "global", OPAQ_DTYPE_F32, 1, {1}, 0, OPAQ_ERROR_ARGUMENT, "global is given (rank 1), but mxfp4"},
    /* rows */
    {"mxfp8", "data", 0, 2, {300, 70}, 1, OPAQ_ERROR_SHAPE, "300 rows from row 1 on, of a tensor with 300"},
    {"mxfp8", "data", 0, 2, {301, 70}, 0, OPAQ_ERROR_SHAPE, "301 rows from row 0 on"},
    {"mxfp8", "data", 0, 2, {2, 70}, -1, OPAQ_ERROR_SHAPE, "2 rows from row -1 on"},
    {"fp8blk2", "data", 0, 2, {128, 70}, 64, OPAQ_ERROR_SHAPE, "rows 64 to 192 cut a block in two"},
    {"fp8blk2", "data", 0, 2, {100, 70}, 0, OPAQ_ERROR_SHAPE, "rows 0 to 100 cut a block in two"},
    {"nvfp4+2d", "data", 0, 2, {16, 35}, 8, OPAQ_ERROR_SHAPE, "multiples of 16 rows"},
};

/* Every byte is unchanged. */
static void check_untouched(const struct tensor *q, const struct tensor *before, const char *what) {
    for (int i = 0; i < opaq_proto_buffer_count(&q->view.proto); ++i) {
        CHECK_BYTES(q->view.buffer[i].data, before->view.buffer[i].data, q->view.buffer[i].bytes, "%s", what);
    }
}

static void check_refused(enum opaq_status status, enum opaq_status expected, const struct opaq_error *error,
                          const char *operation, const char *says) {
    if (status != expected || error->status != expected ||
        strncmp(error->text, operation, strlen(operation)) != 0 || strstr(error->text, says) == NULL) {
        CHECK_FAIL("%s, expected %s from \"%s\" with \"%s\": %s", opaq_status_name(status),
                   opaq_status_name(expected), operation, says, error->text);
    }
}

static void refuse(const struct bad *bad) {
    struct tensor q = sample_of(300, 70, bad->spec, 1);
    struct tensor before = sample_of(300, 70, bad->spec, 1);
    struct rows rows = rows_exported(&q, 0, 300);
    struct rows wrong = rows;
    struct opaq_error error = {OPAQ_OK, ""};
    struct opaq_tensor *tensor = rows_part(&wrong, bad->what[0] == 'd' ? 0 : bad->what[0] == 's' ? 1 : 2);
    tensor->dtype = bad->dtype != 0 ? bad->dtype : tensor->dtype;
    if (bad->rank >= 0 && bad->rank <= 4) {
        rows_shape(tensor, bad->rank, bad->shape);
    } else if (bad->rank != -2) {
        tensor->rank = bad->rank;
    }
    check_refused(opaq_stored_import(&q.view, bad->first, &wrong.stored, &error), bad->status, &error,
                  "stored_import: ", bad->says);
    CHECK_EQ_INT(opaq_stored_import(&q.view, bad->first, &wrong.stored, NULL), bad->status);
    check_untouched(&q, &before, bad->says);
    /* an export fails likewise for these rows, shapes and types */
    for (int i = 0; i < 3; ++i) {
        if (rows_part_bytes(&rows, i) > 0) {
            memset(rows_part(&rows, i)->data, 0xA5, rows_part_bytes(&rows, i));
        }
    }
    const int64_t count = bad->what[0] == 'd' && bad->rank == 2 ? bad->shape[0] : 300;
    const enum opaq_status status = opaq_stored_export(&q.view, bad->first, count, &wrong.stored, &error);
    if (status == OPAQ_OK || strncmp(error.text, "stored_export: ", 15) != 0) {
        CHECK_FAIL("exported although %s: %s", bad->says, error.text);
    }
    for (int i = 0; i < 3; ++i) {
        const uint8_t *bytes = rows_part(&rows, i)->data;
        for (size_t k = 0; k < rows_part_bytes(&rows, i); ++k) {
            if (bytes[k] != 0xA5) {
                CHECK_FAIL("%s: part %d was written to", bad->says, i);
                break;
            }
        }
    }
    rows_free(&rows);
    tensor_free(&before);
    tensor_free(&q);
}

static void wrong_parts_are_refused(void) {
    for (size_t i = 0; i < sizeof bads / sizeof bads[0]; ++i) {
        refuse(&bads[i]);
    }
}

static void wrong_tensors_are_refused(void) {
    struct tensor q = sample_of(8, 32, "nvfp4", 1);
    struct tensor plain = tensor_make(8, 32, OPAQ_F32, NULL);
    struct tensor both = sample_of(8, 32, "nvfp4+both", 1);
    struct tensor columnwise = sample_of(8, 32, "nvfp4+columnwise", 1);
    struct rows rows = rows_exported(&q, 0, 8);
    struct opaq_error error = {OPAQ_OK, ""};
    check_refused(opaq_stored_import(NULL, 0, &rows.stored, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_import: ", "the tensor is NULL");
    check_refused(opaq_stored_import(&q.view, 0, NULL, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_import: ", "the stored rows are NULL");
    check_refused(opaq_stored_import(&plain.view, 0, &rows.stored, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_import: ", "is a plain tensor");
    check_refused(opaq_stored_import(&both.view, 0, &rows.stored, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_import: ", "the tensor is both");
    check_refused(opaq_stored_export(&columnwise.view, 0, 8, &rows.stored, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_export: ", "the tensor is columnwise");
    check_refused(opaq_stored_export(&q.view, 0, -1, &rows.stored, &error), OPAQ_ERROR_SHAPE, &error,
                  "stored_export: ", "rows is -1");
    check_refused(opaq_stored_export(&q.view, 0, 7, &rows.stored, &error), OPAQ_ERROR_SHAPE, &error,
                  "stored_export: ", "data has 8 rows, expected 7");
    for (int i = 0; i < 3; ++i) {
        static const char *const says[] = {"data has 128 elements, but its data is NULL",
                                           "scale has 16 elements, but its data is NULL",
                                           "global has 1 elements, but its data is NULL"};
        struct rows wrong = rows;
        rows_part(&wrong, i)->data = NULL;
        check_refused(opaq_stored_import(&q.view, 0, &wrong.stored, &error), OPAQ_ERROR_ARGUMENT, &error,
                      "stored_import: ", says[i]);
        wrong = rows;
        rows_part(&wrong, i)->device.type = OPAQ_DEVICE_CUDA;
        check_refused(opaq_stored_import(&q.view, 0, &wrong.stored, &error), OPAQ_ERROR_UNSUPPORTED, &error,
                      "stored_import: ", "is on cuda:0");
    }
    struct rows wrong = rows;
    rows_shape(&wrong.stored.data, 3, (const int64_t[]){2, 4, 16});
    wrong.stored.data.strides[0] = 65; /* a gap between the two halves */
    check_refused(opaq_stored_import(&q.view, 0, &wrong.stored, &error), OPAQ_ERROR_SHAPE, &error,
                  "stored_import: ", "the strides of data, of the shape [2,4,16], are not those of a matrix");
    wrong.stored.data.strides[0] = -64;
    check_refused(opaq_stored_import(&q.view, 0, &wrong.stored, &error), OPAQ_ERROR_OVERFLOW, &error,
                  "stored_import: ", "negative sizes or strides");
    rows_free(&rows);
    tensor_free(&columnwise);
    tensor_free(&both);
    tensor_free(&plain);
    tensor_free(&q);
}

/* From headers alone: the same results without memory. */
static void checks_need_no_memory(void) {
    struct tensor q = sample_of(256, 128, "fp8blk2", 1);
    struct tensor both = sample_of(8, 32, "nvfp4+both", 1);
    struct rows rows = rows_exported(&q, 0, 128);
    struct opaq_error error = {OPAQ_OK, ""};
    struct opaq_stored headers = rows.stored;
    headers.data.data = NULL;
    headers.scale.data = NULL;
    CHECK(opaq_stored_check(&q.view.proto, 0, &headers, &error) == OPAQ_OK);
    CHECK(opaq_stored_check(&q.view.proto, 128, &headers, &error) == OPAQ_OK);
    check_refused(opaq_stored_check(&q.view.proto, 64, &headers, &error), OPAQ_ERROR_SHAPE, &error,
                  "stored_check: ", "64");
    headers.scale.dtype = OPAQ_DTYPE_F16;
    check_refused(opaq_stored_check(&q.view.proto, 0, &headers, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_check: ", "scale holds");
    headers.scale = rows.stored.scale;
    headers.data.shape[1] = 127;
    check_refused(opaq_stored_check(&q.view.proto, 0, &headers, &error), OPAQ_ERROR_SHAPE, &error,
                  "stored_check: ", "expected rows of 128 entries");
    check_refused(opaq_stored_check(&q.view.proto, 0, NULL, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_check: ", "the stored rows are NULL");
    check_refused(opaq_stored_check(NULL, 0, &headers, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_check: ", "NULL");
    check_refused(opaq_stored_check(&both.view.proto, 0, &headers, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_check: ", "rowwise copy only");
    rows_free(&rows);
    tensor_free(&both);
    tensor_free(&q);
}

static void descriptions_are_refused(void) {
    struct tensor q = sample_of(8, 32, "nvfp4", 1);
    struct tensor both = sample_of(8, 32, "nvfp4+both", 1);
    struct opaq_stored stored;
    struct opaq_error error = {OPAQ_OK, ""};
    check_refused(opaq_stored_describe(NULL, 1, &stored, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_describe: ", "NULL");
    check_refused(opaq_stored_describe(&q.view.proto, 1, NULL, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_describe: ", "stored is NULL");
    check_refused(opaq_stored_describe(&q.view.proto, 9, &stored, &error), OPAQ_ERROR_SHAPE, &error,
                  "stored_describe: ", "rows is 9, expected 0 to 8");
    check_refused(opaq_stored_describe(&both.view.proto, 1, &stored, &error), OPAQ_ERROR_ARGUMENT, &error,
                  "stored_describe: ", "rowwise copy only");
    tensor_free(&both);
    tensor_free(&q);
}

static const struct test_case tests[] = {
    TEST(wrong_parts_are_refused),
    TEST(wrong_tensors_are_refused),
    TEST(checks_need_no_memory),
    TEST(descriptions_are_refused),
};
TEST_MAIN(tests)
