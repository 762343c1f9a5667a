/* test_proto_text.c: a prototype's text: canonical, parsed to the same value, and refused in any other form. */
#include "check.h"
#include "support_spec.h"
#include "support_tensor.h"

static void round_trips(const struct opaq_proto *proto) {
    char text[OPAQ_PROTO_TEXT_BYTES];
    struct opaq_proto back;
    struct opaq_error error;
    memset(&back, 0xA5, sizeof back);
    if (opaq_proto_print(proto, text, sizeof text, &error) != OPAQ_OK ||
        opaq_proto_parse(text, strlen(text), &back, &error) != OPAQ_OK) {
        CHECK_FAIL("%s", error.text);
    } else if (!opaq_proto_equal(proto, &back)) {
        CHECK_FAIL("\"%s\" is parsed to another value", text);
    }
}

static void every_spec_comes_back(void) {
    static const enum opaq_element dtypes[] = {OPAQ_F16, OPAQ_BF16, OPAQ_F32};
    static const struct opaq_device devices[] = {
        {OPAQ_DEVICE_CPU, 0}, {OPAQ_DEVICE_CUDA, 0}, {OPAQ_DEVICE_CUDA, INT32_MAX}};
    static const int64_t shape[OPAQ_RANK_LIMIT] = {1, 0, 12, 345, 6, 7, 8, 9};
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    for (int i = -1; i < list.count; ++i) {
        struct opaq_proto proto;
        struct opaq_error error;
        const int rank = i < 0 ? 0 : 1 + i % OPAQ_RANK_LIMIT;
        if (opaq_proto_make(shape, rank, dtypes[(i + 1) % 3], i < 0 ? NULL : &list.spec[i],
                            devices[(i + 1) % 3], &proto, &error) != OPAQ_OK) {
            CHECK_FAIL("%s", error.text);
            continue;
        }
        round_trips(&proto);
    }
    spec_list_free(&list);
}

static const struct {
    const char *text;
    int64_t rows;
    int64_t columns;
} texts[] = {
    {"bf16[4,128] nvfp4+2d cuda:0", 4, 128},
    {"bf16[4,128] cpu", 4, 128},
    {"f32[] cpu", 1, 1},
    {"f16[0] cuda:7", 1, 0},
    {"f16[2,3,4] cpu", 6, 4},
    {"f32[1,1,1,1,1,1,1,33] mxfp4+rule=ocp cpu", 1, 33},
    {"f32[7] fp8.e5m2+both+pow2+eps=2.5e-1 cuda:2147483647", 1, 7},
    {"bf16[4611686018427387900] fp8 cpu", 1, 4611686018427387900},
};

static void texts_are_canonical(void) {
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; ++i) {
        struct opaq_proto proto;
        struct opaq_error error;
        char text[OPAQ_PROTO_TEXT_BYTES];
        if (opaq_proto_parse(texts[i].text, strlen(texts[i].text), &proto, &error) != OPAQ_OK) {
            CHECK_FAIL("%s: %s", texts[i].text, error.text);
            continue;
        }
        CHECK_EQ_INT(opaq_proto_rows(&proto), texts[i].rows);
        CHECK_EQ_INT(opaq_proto_columns(&proto), texts[i].columns);
        CHECK_EQ_INT(opaq_proto_print(&proto, text, sizeof text, NULL), OPAQ_OK);
        CHECK_EQ_STR(text, texts[i].text);
    }
}

/* The longest text fits the limit of the header. */
static void longest_text_fits(void) {
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    const int64_t zero_and_long[OPAQ_RANK_LIMIT] = {0, 1 << 30, 1, 1, 1, 1, 1, (int64_t)1 << 30};
    size_t longest = 0;
    for (int i = 0; i < list.count; ++i) {
        struct opaq_proto proto;
        char text[OPAQ_PROTO_TEXT_BYTES];
        const struct opaq_device device = {OPAQ_DEVICE_CUDA, INT32_MAX};
        if (opaq_proto_make(zero_and_long, 8, OPAQ_BF16, &list.spec[i], device, &proto, NULL) == OPAQ_OK &&
            CHECK_EQ_INT(opaq_proto_print(&proto, text, sizeof text, NULL), OPAQ_OK)) {
            longest = strlen(text) > longest ? strlen(text) : longest;
        }
    }
    CHECK(longest > 50 && longest < OPAQ_PROTO_TEXT_BYTES);
    spec_list_free(&list);
}

static const struct {
    const char *text;
    enum opaq_status status;
    const char *says;
} bad_texts[] = {
    {"", OPAQ_ERROR_TEXT, "position 0"},
    {"e4m3[4] cpu", OPAQ_ERROR_TEXT, "f16, bf16 or f32 at position 0"},
    {"BF16[4] cpu", OPAQ_ERROR_TEXT, "position 0"},
    {"bf16", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16 [4] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[4", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[4,", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[4,] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[,4] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[4 ,4] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[-4] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[+4] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[04] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[00] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[9223372036854775808] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[99999999999999999999999999] cpu", OPAQ_ERROR_TEXT, "a shape"},
    {"bf16[1,1,1,1,1,1,1,1,1] cpu", OPAQ_ERROR_TEXT, "at most 8"},
    {"bf16[4]", OPAQ_ERROR_TEXT, "a space"},
    {"bf16[4]cpu", OPAQ_ERROR_TEXT, "a space at position 7"},
    {"bf16[4] ", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cpu ", OPAQ_ERROR_TEXT, "cpu"},
    {"bf16[4] cpu:0", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cuda", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cuda:", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cuda:-1", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cuda:00", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cuda:0x", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cuda:2147483648", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cuda:cpu", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cuda:2147483648cpu", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] cpucpu", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] nvfp4", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] nvfp4 ", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4] nvfp4  cpu", OPAQ_ERROR_TEXT, "cpu or cuda"},
    {"bf16[4]  cpu", OPAQ_ERROR_TEXT, "unknown format \"\""},
    {"bf16[4] nvfp4+rth cpu", OPAQ_ERROR_TEXT, "unknown option \"rth\" at position 6"},
    {"bf16[4] nvfp4+2d+rht cpu", OPAQ_ERROR_SPEC, "rht"},
    {"bf16[] nvfp4 cpu", OPAQ_ERROR_SHAPE, "rank is 0"},
    {"bf16[9223372036854775807] cpu", OPAQ_ERROR_OVERFLOW, "2^62"},
    {"bf16[4294967296,4294967296] nvfp4 cpu", OPAQ_ERROR_OVERFLOW, "2^62"},
};

static void other_texts_are_refused(void) {
    for (size_t i = 0; i < sizeof bad_texts / sizeof bad_texts[0]; ++i) {
        struct opaq_proto before;
        struct opaq_proto proto;
        struct opaq_error error;
        memset(&before, 0xA5, sizeof before);
        memset(&proto, 0xA5, sizeof proto);
        error.text[0] = '\0';
        const enum opaq_status status =
            opaq_proto_parse(bad_texts[i].text, strlen(bad_texts[i].text), &proto, &error);
        if (status != bad_texts[i].status || strstr(error.text, bad_texts[i].says) == NULL) {
            CHECK_FAIL("\"%s\": %s, expected %s with \"%s\": %s", bad_texts[i].text, opaq_status_name(status),
                       opaq_status_name(bad_texts[i].status), bad_texts[i].says, error.text);
        }
        CHECK_BYTES(&proto, &before, sizeof proto, "\"%s\" wrote to the prototype", bad_texts[i].text);
        CHECK_EQ_INT(opaq_proto_parse(bad_texts[i].text, strlen(bad_texts[i].text), &proto, NULL),
                     bad_texts[i].status);
    }
}

/* Every prefix of a valid text, and every change of one byte, is either refused or prints as it was read. */
static void damaged_texts(void) {
    static const char whole[] = "bf16[4,128] fp8+both+eps=2.5e-1 cuda:10";
    for (size_t length = 0; length < sizeof whole - 1; ++length) {
        struct opaq_proto proto;
        const enum opaq_status status = opaq_proto_parse(whole, length, &proto, NULL);
        CHECK(length == sizeof whole - 2 ? status == OPAQ_OK : status != OPAQ_OK);
    }
    for (size_t i = 0; i < sizeof whole - 1; ++i) {
        for (int byte = 0; byte < 256; ++byte) {
            char text[sizeof whole];
            struct opaq_proto proto;
            memcpy(text, whole, sizeof whole);
            text[i] = (char)byte;
            if (opaq_proto_parse(text, sizeof whole - 1, &proto, NULL) == OPAQ_OK) {
                round_trips(&proto);
            }
        }
    }
}

static void small_buffers_and_null(void) {
    static const char expected[] = "bf16[4,128] nvfp4+2d cuda:0";
    struct opaq_proto proto;
    struct opaq_error error;
    CHECK_EQ_INT(opaq_proto_parse(expected, strlen(expected), &proto, NULL), OPAQ_OK);
    for (size_t capacity = 0; capacity <= sizeof expected; ++capacity) {
        char buffer[sizeof expected + 1];
        memset(buffer, '#', sizeof buffer);
        const enum opaq_status status = opaq_proto_print(&proto, buffer, capacity, &error);
        CHECK_EQ_INT(status, capacity < sizeof expected ? OPAQ_ERROR_BUFFER : OPAQ_OK);
        CHECK(capacity < sizeof expected ? buffer[0] == '#' && strstr(error.text, "needs 28 bytes") != NULL
                                         : strcmp(buffer, expected) == 0);
    }
    CHECK_EQ_INT(opaq_proto_print(&proto, NULL, 100, &error), OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_proto_print(NULL, (char[8]){0}, 8, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_proto_parse(NULL, 3, &proto, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_proto_parse(expected, 3, NULL, &error), OPAQ_ERROR_ARGUMENT);
}

static void equality_sees_every_field(void) {
    static const char *const different[] = {
        "bf16[4,128] nvfp4 cpu",    "f16[4,128] nvfp4 cpu",
        "bf16[4,129] nvfp4 cpu",    "bf16[4,128,1] nvfp4 cpu",
        "bf16[4,128] nvfp4+2d cpu", "bf16[4,128] nvfp4 cuda:0",
        "bf16[4,128] cpu",          "bf16[5,128] nvfp4 cpu",
        "bf16[4,128] nvfp4 cuda:1", "bf16[4,128] nvfp4+both cpu",
    };
    enum { COUNT = sizeof different / sizeof different[0] };
    for (int i = 0; i < COUNT * COUNT; ++i) {
        const char *a = different[i / COUNT];
        const char *b = different[i % COUNT];
        struct opaq_proto p;
        struct opaq_proto q;
        CHECK_EQ_INT(opaq_proto_parse(a, strlen(a), &p, NULL), OPAQ_OK);
        CHECK_EQ_INT(opaq_proto_parse(b, strlen(b), &q, NULL), OPAQ_OK);
        CHECK_EQ_INT(opaq_proto_equal(&p, &q), a == b);
    }
}

static const struct test_case tests[] = {
    TEST(every_spec_comes_back),    TEST(texts_are_canonical), TEST(longest_text_fits),
    TEST(other_texts_are_refused),  TEST(damaged_texts),       TEST(small_buffers_and_null),
    TEST(equality_sees_every_field)};
TEST_MAIN(tests)
