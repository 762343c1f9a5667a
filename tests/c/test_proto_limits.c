/* test_proto_limits.c: invalid prototypes: negative and huge sizes, ranks, dtypes, devices, and fields of
 * structs that the library did not make. Every refusal has its status and its numbers, and writes only the
 * error. */
#include "check.h"
#include "support_spec.h"
#include "support_tensor.h"

static const int64_t two_62 = (int64_t)1 << 62;

/* Makes a prototype and expects the status; the text must contain `says`. */
static void expect(const int64_t *shape, int rank, enum opaq_element dtype, const char *spec_or_null,
                   struct opaq_device device, enum opaq_status expected, const char *says) {
    struct opaq_proto before;
    struct opaq_proto proto;
    struct opaq_spec spec;
    struct opaq_error error;
    memset(&before, 0xA5, sizeof before);
    memset(&proto, 0xA5, sizeof proto);
    error.text[0] = '\0';
    if (spec_or_null != NULL) {
        spec = spec_of(spec_or_null);
    }
    const struct opaq_spec *given = spec_or_null == NULL ? NULL : &spec;
    const enum opaq_status status = opaq_proto_make(shape, rank, dtype, given, device, &proto, &error);
    if (status != expected || (expected != OPAQ_OK && strstr(error.text, says) == NULL)) {
        CHECK_FAIL("rank %d of %s: %s, expected %s with \"%s\": %s", rank,
                   spec_or_null ? spec_or_null : "plain", opaq_status_name(status), opaq_status_name(expected),
                   says, error.text);
    }
    CHECK_EQ_INT(opaq_proto_make(shape, rank, dtype, given, device, &before, NULL), expected);
    CHECK_BYTES(&proto, &before, sizeof proto, "with and without an error argument");
    if (expected != OPAQ_OK) {
        CHECK_EQ_INT(proto.rank, (int32_t)0xA5A5A5A5);
    }
}

static void negative_sizes(void) {
    static const int64_t shapes[][3] = {{-1, 2, 3}, {2, -7, 3}, {2, 3, INT64_MIN}};
    static const char *const says[] = {"dimension 0 is -1", "dimension 1 is -7",
                                       "dimension 2 is -9223372036854775808"};
    for (int i = 0; i < 3; ++i) {
        expect(shapes[i], 3, OPAQ_F32, NULL, tensor_cpu, OPAQ_ERROR_SHAPE, says[i]);
        expect(shapes[i], 3, OPAQ_F32, "nvfp4+both", tensor_cpu, OPAQ_ERROR_SHAPE, says[i]);
    }
}

static void ranks(void) {
    static const int64_t ones[9] = {1, 1, 1, 1, 1, 1, 1, 1, 1};
    expect(ones, 8, OPAQ_F32, "nvfp4", tensor_cpu, OPAQ_OK, "");
    expect(ones, 9, OPAQ_F32, "nvfp4", tensor_cpu, OPAQ_ERROR_SHAPE, "rank is 9");
    expect(ones, 9, OPAQ_F32, NULL, tensor_cpu, OPAQ_ERROR_SHAPE, "rank is 9");
    expect(ones, -1, OPAQ_F32, NULL, tensor_cpu, OPAQ_ERROR_SHAPE, "rank is -1");
    expect(NULL, 0, OPAQ_F32, NULL, tensor_cpu, OPAQ_OK, "");
    expect(NULL, 0, OPAQ_F32, "fp8", tensor_cpu, OPAQ_ERROR_SHAPE, "rank is 0, expected 1 to 8");
    expect(NULL, 2, OPAQ_F32, NULL, tensor_cpu, OPAQ_ERROR_ARGUMENT, "shape is NULL");
}

static void dtypes_and_devices(void) {
    const int64_t shape[1] = {4};
    static const struct opaq_device bad[] = {{0, 1}, {0, -1}, {1, -1}, {2, 0}, {-1, 0}};
    for (int dtype = -1; dtype <= OPAQ_ELEMENT_COUNT; ++dtype) {
        const int good = dtype == OPAQ_F16 || dtype == OPAQ_BF16 || dtype == OPAQ_F32;
        expect(shape, 1, (enum opaq_element)dtype, NULL, tensor_cpu, good ? OPAQ_OK : OPAQ_ERROR_ARGUMENT,
               "dtype is");
    }
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        expect(shape, 1, OPAQ_F32, NULL, bad[i], OPAQ_ERROR_ARGUMENT, "device is (");
    }
    expect(shape, 1, OPAQ_F32, "fp8", (struct opaq_device){OPAQ_DEVICE_CUDA, INT32_MAX}, OPAQ_OK, "");
}

/* 2^62 bytes are allowed, one element more is not. */
static void sizes_at_the_limit(void) {
    const int64_t plain[2] = {2, two_62 / 8};
    const int64_t more[2] = {2, two_62 / 8 + 1};
    expect(plain, 2, OPAQ_F32, NULL, tensor_cpu, OPAQ_OK, "");
    expect(more, 2, OPAQ_F32, NULL, tensor_cpu, OPAQ_ERROR_OVERFLOW, "2^62");
    expect((int64_t[]){two_62 / 2}, 1, OPAQ_BF16, NULL, tensor_cpu, OPAQ_OK, "");
    expect((int64_t[]){two_62 / 2 + 1}, 1, OPAQ_BF16, NULL, tensor_cpu, OPAQ_ERROR_OVERFLOW, "2^62");
    expect((int64_t[]){INT64_MAX}, 1, OPAQ_BF16, NULL, tensor_cpu, OPAQ_ERROR_OVERFLOW, "2^62");
}

/* Each buffer fits, or nearly, but their sum does not; and products that wrap around to a small number. */
static void quantized_sizes_at_the_limit(void) {
    static const char *const specs[] = {"fp8+both",   "fp8row+both", "fp8blk1+both", "fp8blk2+both",
                                        "mxfp8+both", "mxfp4+both",  "nvfp4+both",   "nvfp4+both+rowscaled"};
    for (size_t i = 0; i < sizeof specs / sizeof specs[0]; ++i) {
        static const int64_t huge[][3] = {{1, 1, (int64_t)1 << 62},
                                          {1, (int64_t)1 << 62, 1},
                                          {(int64_t)1 << 62, 1, 1},
                                          {1, (int64_t)1 << 31, (int64_t)1 << 32},
                                          {1, (int64_t)1 << 32, (int64_t)1 << 32},
                                          {(int64_t)1 << 32, (int64_t)1 << 32, 1},
                                          {(int64_t)1 << 32, (int64_t)1 << 32, 0},
                                          {3, 3, INT64_MAX},
                                          {INT64_MAX, INT64_MAX, INT64_MAX},
                                          {1, 1, INT64_MAX}};
        for (size_t k = 0; k < sizeof huge / sizeof huge[0]; ++k) {
            struct opaq_error error;
            struct opaq_proto proto;
            const struct opaq_spec spec = spec_of(specs[i]);
            const enum opaq_status status =
                opaq_proto_make(huge[k], 3, OPAQ_BF16, &spec, tensor_cpu, &proto, &error);
            if (status != OPAQ_ERROR_OVERFLOW) {
                CHECK_FAIL("%s [%lld,%lld,%lld]: %s", specs[i], (long long)huge[k][0], (long long)huge[k][1],
                           (long long)huge[k][2], opaq_status_name(status));
            }
        }
    }
    expect((int64_t[]){two_62 - 4}, 1, OPAQ_BF16, "fp8", tensor_cpu, OPAQ_OK, "");
    expect((int64_t[]){two_62 / 2 - 2}, 1, OPAQ_BF16, "fp8+both", tensor_cpu, OPAQ_OK, "");
    expect((int64_t[]){two_62 / 2 - 1}, 1, OPAQ_BF16, "fp8+both", tensor_cpu, OPAQ_ERROR_OVERFLOW,
           "_scale_inv");
}

/* Two codes share a byte, so the bytes fit when the elements do not: opaq/proto.h specifies an error. */
static void packed_elements_are_counted(void) {
    const int64_t shape[2] = {((int64_t)1 << 31) + 128, (int64_t)1 << 31};
    expect(shape, 2, OPAQ_BF16, "mxfp4", tensor_cpu, OPAQ_ERROR_OVERFLOW, "2^62");
    expect(shape, 2, OPAQ_BF16, "nvfp4", tensor_cpu, OPAQ_ERROR_OVERFLOW, "2^62");
}

static void extents(void) {
    const struct opaq_extent e = {OPAQ_DIM_COLUMNS, 32, 4};
    const struct opaq_extent one = {OPAQ_DIM_ONE, 1, 1};
    CHECK_EQ_INT(opaq_extent_eval(&e, -1, 0), 0);
    CHECK_EQ_INT(opaq_extent_eval(&e, 5, 1), 4);
    CHECK_EQ_INT(opaq_extent_eval(&e, 5, 128), 4);
    CHECK_EQ_INT(opaq_extent_eval(&e, 5, 129), 8);
    CHECK_EQ_INT(opaq_extent_eval(&e, 5, -1), -1);
    CHECK_EQ_INT(opaq_extent_eval(&e, 5, INT64_MAX), -1);
    CHECK_EQ_INT(opaq_extent_eval(&e, 5, INT64_MIN), -1);
    CHECK_EQ_INT(opaq_extent_eval(&one, 0, 0), 1);
}

/* A valid prototype with each field changed in turn. */
static void fields_from_elsewhere(void) {
    const int64_t shape[2] = {4, 64};
    const struct opaq_spec spec = spec_of("mxfp8");
    struct opaq_proto good;
    struct opaq_error error;
    CHECK_EQ_INT(opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, &good, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_proto_check(&good, &error), OPAQ_OK);
    CHECK_EQ_INT(opaq_proto_check(NULL, &error), OPAQ_ERROR_ARGUMENT);
    static const int quantized[] = {2, -1, 256};
    for (int i = 0; i < 3; ++i) {
        struct opaq_proto p = good;
        p.is_quantized = quantized[i];
        CHECK_EQ_INT(opaq_proto_check(&p, &error), OPAQ_ERROR_ARGUMENT);
    }
    struct opaq_proto p = good;
    p.is_quantized = 0; /* a plain tensor with a spec */
    CHECK_EQ_INT(opaq_proto_check(&p, &error), OPAQ_ERROR_ARGUMENT);
    p = good;
    p.shape[5] = 1;
    CHECK_EQ_INT(opaq_proto_check(&p, &error), OPAQ_ERROR_SHAPE);
    CHECK(strstr(error.text, "rank is 2, but dimension 5 is set to 1") != NULL);
    p = good;
    p.rank = INT32_MAX;
    CHECK_EQ_INT(opaq_proto_check(&p, &error), OPAQ_ERROR_SHAPE);
    p.rank = INT32_MIN;
    CHECK_EQ_INT(opaq_proto_check(&p, &error), OPAQ_ERROR_SHAPE);
    p = good;
    p.spec.reserved = 1;
    CHECK_EQ_INT(opaq_proto_check(&p, &error), OPAQ_ERROR_SPEC);
    p = good;
    p.spec.format = 200;
    CHECK_EQ_INT(opaq_proto_check(&p, &error), OPAQ_ERROR_SPEC);
    CHECK_EQ_INT(opaq_proto_buffer_count(&p), 0);
}

static void bad_indices_and_null(void) {
    const int64_t shape[2] = {4, 64};
    const struct opaq_spec spec = spec_of("mxfp8");
    struct opaq_proto proto;
    struct opaq_buffer buffer;
    struct opaq_error error;
    size_t bytes;
    CHECK_EQ_INT(opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, &proto, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_proto_buffer(&proto, -1, &buffer, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_proto_buffer(&proto, 2, &buffer, &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "index is 2 of 2") != NULL);
    CHECK_EQ_INT(opaq_proto_buffer(&proto, 0, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_proto_buffer(NULL, 0, &buffer, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_proto_bytes(&proto, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_proto_bytes(NULL, &bytes, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_proto_make(shape, 2, OPAQ_F32, &spec, tensor_cpu, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_proto_buffer_count(NULL), 0);
}

static const struct test_case tests[] = {TEST(negative_sizes),
                                         TEST(ranks),
                                         TEST(dtypes_and_devices),
                                         TEST(sizes_at_the_limit),
                                         TEST(quantized_sizes_at_the_limit),
                                         TEST(packed_elements_are_counted),
                                         TEST(extents),
                                         TEST(fields_from_elsewhere),
                                         TEST(bad_indices_and_null)};
TEST_MAIN(tests)
