/* test_cli_header.c: headers of safetensors files. Files of the safetensors package (0.8) are read and written
 * again with the same bytes. Invalid headers: tests/python/test_cli_hostile.py. */
#include <stdlib.h>

#include "check.h"
#include "cli/read/st_header.h"

#define ENTRY(name, dtype, shape, begin, end) \
    "\"" name "\":{\"dtype\":\"" dtype "\",\"shape\":[" shape "],\"data_offsets\":[" #begin "," #end "]}"

/* save() of a [2, 4] tensor of each of PyTorch's dtypes, of one without dimensions and one without elements. */
static const char of_safetensors[] =
    "{\"__metadata__\":{\"format\":\"pt\"}," ENTRY("uint64", "U64", "2,4", 0, 64) "," ENTRY("int64", "I64", "2,4", 64, 128) "," ENTRY(
        "float64",
        "F64", "2,4", 128,
        192) "," ENTRY("complex64", "C64", "2,4", 192,
                       256) "," ENTRY("empty", "F32", "3,0,5", 256,
                                      256) "," ENTRY("float32", "F32", "2,4", 256,
                                                     288) "," ENTRY("scalar", "F32", "", 288,
                                                                    292) "," ENTRY("uint32", "U32", "2,4", 292,
                                                                                   324) "," ENTRY("int32",
                                                                                                  "I32", "2,4",
                                                                                                  324,
                                                                                                  356) "," ENTRY("bfloat16",
                                                                                                                 "BF16",
                                                                                                                 "2,4",
                                                                                                                 356,
                                                                                                                 372) "," ENTRY("float16",
                                                                                                                                "F16",
                                                                                                                                "2,4",
                                                                                                                                372, 388) "," ENTRY("uint16",
                                                                                                                                                    "U16",
                                                                                                                                                    "2,4",
                                                                                                                                                    388, 404) "," ENTRY("int16",
                                                                                                                                                                        "I16", "2,4", 404, 420) "," ENTRY("float8_e5m2fnuz", "F8_E5M2FNUZ", "2,4", 420, 428) "," ENTRY("float8_e4m3fnuz", "F8_E4M3FNUZ",
                                                                                                                                                                                                                                                                       "2,4",
                                                                                                                                                                                                                                                                       428,
                                                                                                                                                                                                                                                                       436) "," ENTRY("float8_e8m0fnu",
                                                                                                                                                                                                                                                                                      "F8_E8M0",
                                                                                                                                                                                                                                                                                      "2,4",
                                                                                                                                                                                                                                                                                      436, 444) "," ENTRY("float8_e4m3fn",
                                                                                                                                                                                                                                                                                                          "F8_E4M3", "2,4", 444, 452) "," ENTRY("float8_e5m2", "F8_E5M2", "2,4", 452,
                                                                                                                                                                                                                                                                                                                                                460) "," ENTRY("int8", "I8", "2,4", 460, 468) "," ENTRY("uint8",
                                                                                                                                                                                                                                                                                                                                                                                                        "U8",
                                                                                                                                                                                                                                                                                                                                                                                                        "2,4",
                                                                                                                                                                                                                                                                                                                                                                                                        468,
                                                                                                                                                                                                                                                                                                                                                                                                        476) "," ENTRY("float4_e2m1fn_x2",
                                                                                                                                                                                                                                                                                                                                                                                                                       "F4",
                                                                                                                                                                                                                                                                                                                                                                                                                       "2,8",
                                                                                                                                                                                                                                                                                                                                                                                                                       476,
                                                                                                                                                                                                                                                                                                                                                                                                                       484) "," ENTRY("bool",
                                                                                                                                                                                                                                                                                                                                                                                                                                      "BOOL",
                                                                                                                                                                                                                                                                                                                                                                                                                                      "2,4",
                                                                                                                                                                                                                                                                                                                                                                                                                                      484,
                                                                                                                                                                                                                                                                                                                                                                                                                                      492) "}";

static enum opaq_status parse(const char *json, uint64_t data_bytes, struct st_header *header,
                              struct opaq_error *error) {
    return st_header_parse(json, strlen(json), ST_LENGTH_BYTES + strlen(json) + data_bytes, "f", header, error);
}

static void writes_what_safetensors_writes(void) {
    struct st_header header;
    struct opaq_error error = {OPAQ_OK, ""};
    if (!CHECK_EQ_INT(parse(of_safetensors, 492, &header, &error), OPAQ_OK)) {
        CHECK_FAIL("%s", error.text);
        return;
    }
    CHECK_EQ_INT(header.count, 22);
    CHECK_EQ_INT(header.metadata_count, 1);
    /* from tensors in any order */
    for (size_t i = 0; i < header.count / 2; ++i) {
        const struct st_tensor last = header.tensors[header.count - 1 - i];
        header.tensors[header.count - 1 - i] = header.tensors[i];
        header.tensors[i] = last;
    }
    struct text bytes = {0};
    st_header_write(header.tensors, header.count, header.metadata, header.metadata_count, &bytes);
    const size_t length = strlen(of_safetensors);
    const size_t padded = (length + 7) / 8 * 8;
    if (CHECK_EQ_INT(bytes.length, ST_LENGTH_BYTES + padded)) {
        uint64_t found = 0;
        const uint8_t *const first = (const uint8_t *)bytes.bytes;
        CHECK_EQ_INT(st_header_length(first, bytes.length + 492, "f", &found, &error), OPAQ_OK);
        CHECK_EQ_INT(found, padded);
        CHECK_BYTES(bytes.bytes + ST_LENGTH_BYTES, of_safetensors, length, "header");
        for (size_t i = ST_LENGTH_BYTES + length; i < bytes.length; ++i) {
            CHECK_EQ_INT(bytes.bytes[i], ' ');
        }
    }
    text_free(&bytes);
    st_header_free(&header);
}

static void names_and_metadata_come_back(void) {
    static const char json[] =
        "{\"__metadata__\":{\"b\":\"\\\"\\\\/\\n\\u0001\",\"a\":\"\"},"
        "\"\xE9\x87\x8D \\\\ \\\" '\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]}}";
    struct st_header header;
    struct st_header again;
    struct opaq_error error = {OPAQ_OK, ""};
    struct text bytes = {0};
    if (!CHECK_EQ_INT(parse(json, 1, &header, &error), OPAQ_OK)) {
        CHECK_FAIL("%s", error.text);
        return;
    }
    CHECK_EQ_STR(header.tensors[0].name, "\xE9\x87\x8D \\ \" '");
    CHECK_EQ_STR(header.metadata[0].value, "\"\\/\n\x01");
    st_header_write(header.tensors, 1, header.metadata, 2, &bytes);
    const uint64_t length = bytes.length - ST_LENGTH_BYTES;
    CHECK_EQ_INT(st_header_parse(bytes.bytes + ST_LENGTH_BYTES, length, bytes.length + 1, "f", &again, &error),
                 OPAQ_OK);
    CHECK_EQ_STR(again.tensors[0].name, header.tensors[0].name);
    CHECK_EQ_STR(again.metadata[0].key, "b");
    CHECK_EQ_STR(again.metadata[0].value, header.metadata[0].value);
    CHECK_EQ_STR(again.metadata[1].value, "");
    text_free(&bytes);
    st_header_free(&header);
    st_header_free(&again);
}

static void empty_files_are_valid(void) {
    struct text bytes = {0};
    st_header_write(NULL, 0, NULL, 0, &bytes);
    CHECK_EQ_INT(bytes.length, 16);
    CHECK_BYTES(bytes.bytes, "\x08\0\0\0\0\0\0\0{}      ", 16, "an empty file");
    text_free(&bytes);
}

static void lengths(void) {
    static const struct {
        uint8_t first[ST_LENGTH_BYTES];
        uint64_t file_bytes;
        enum opaq_status status;
    } rows[] = {
        {{2}, 10, OPAQ_OK},
        {{2}, 9, OPAQ_ERROR_BUFFER},
        {{0}, 8, OPAQ_OK},
        {{0}, 7, OPAQ_ERROR_BUFFER},
        {{0x00, 0xE1, 0xF5, 0x05}, UINT64_MAX, OPAQ_OK},          /* 100000000 */
        {{0x01, 0xE1, 0xF5, 0x05}, UINT64_MAX, OPAQ_ERROR_LIMIT}, /* one more */
        {{0, 0, 0, 0, 0, 0, 0, 0x80}, UINT64_MAX, OPAQ_ERROR_LIMIT},
        {{255, 255, 255, 255, 255, 255, 255, 255}, 1000, OPAQ_ERROR_LIMIT},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        uint64_t length = 0;
        struct opaq_error error;
        CHECK_EQ_INT(st_header_length(rows[i].first, rows[i].file_bytes, "f", &length, &error), rows[i].status);
    }
}

static void sizes(void) {
    static const struct {
        enum st_dtype dtype;
        int rank;
        int64_t shape[4];
        int fits;
        uint64_t bytes;
    } rows[] = {
        {ST_F32, 0, {0}, 1, 4},
        {ST_F32, 1, {0}, 1, 0},
        {ST_F4, 2, {2, 3}, 1, 3},
        {ST_F4, 1, {3}, 0, 0},
        {ST_F6_E2M3, 1, {4}, 1, 3},
        {ST_F6_E3M2, 1, {2}, 0, 0},
        {ST_U8, 1, {(int64_t)ST_SIZE_LIMIT}, 1, ST_SIZE_LIMIT},
        {ST_U64, 1, {(int64_t)ST_SIZE_LIMIT}, 1, ST_SIZE_LIMIT * 8},
        {ST_U8, 1, {(int64_t)ST_SIZE_LIMIT + 1}, 0, 0},
        {ST_U8, 1, {INT64_MAX}, 0, 0},
        {ST_U8, 2, {(int64_t)1 << 32, (int64_t)1 << 32}, 0, 0},
        {ST_U8, 3, {(int64_t)1 << 62, 4, 1}, 0, 0},
        {ST_U8, 3, {0, (int64_t)1 << 40, (int64_t)1 << 40}, 0, 0}, /* empty, but the product of the other sizes
                                                                    * overflows */
        {ST_U8, 3, {0, (int64_t)1 << 40, 1 << 16}, 1, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        uint64_t bytes = 0;
        CHECK_EQ_INT(st_bytes(rows[i].dtype, rows[i].shape, rows[i].rank, &bytes), rows[i].fits);
        CHECK_EQ_INT(bytes, rows[i].bytes);
    }
}

static void errors_leave_nothing_allocated(void) {
    struct st_header header;
    struct opaq_error error = {OPAQ_OK, ""};
    static const char json[] =
        "{\"a\":{\"dtype\":\"U8\",\"shape\":[1],\"data_offsets\":[0,1]},\"b\":{\"dtype\":\"U8\",\"shape\":[1],"
        "\"data_offsets\":[2,3]}}";
    CHECK_EQ_INT(parse(json, 3, &header, &error), OPAQ_ERROR_BUFFER);
    CHECK_EQ_STR(error.text, "f: b: its bytes begin at 2, but those before it end at 1: there is a gap");
    CHECK(header.tensors == NULL && header.names == NULL && header.metadata == NULL && header.count == 0);
}

static const struct test_case tests[] = {
    TEST(writes_what_safetensors_writes),
    TEST(names_and_metadata_come_back),
    TEST(empty_files_are_valid),
    TEST(lengths),
    TEST(sizes),
    TEST(errors_leave_nothing_allocated),
};
TEST_MAIN(tests)
