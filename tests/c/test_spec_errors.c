/* test_spec_errors.c: invalid texts of specs. The message names the part and its position; only the error is
 * written. Grammar: docs/spec.md. */
#include <stdbool.h>

#include "check.h"
#include "support_spec.h"

struct bad_text {
    const char *text;
    enum opaq_status status;
    int position; /* -1: the message has no position, because two parts contradict each other */
    const char *names[2];
};

static const struct bad_text bad_texts[] = {
    /* the format */
    {"", OPAQ_ERROR_TEXT, 0, {"unknown format \"\"", "nvfp4"}},
    {"+", OPAQ_ERROR_TEXT, 0, {"unknown format \"\"", NULL}},
    {".e4m3", OPAQ_ERROR_TEXT, 0, {"unknown format \"\"", NULL}},
    {"nvfp", OPAQ_ERROR_TEXT, 0, {"unknown format \"nvfp\"", "expected fp8, fp8row"}},
    {"nvfp44", OPAQ_ERROR_TEXT, 0, {"unknown format \"nvfp44\"", NULL}},
    {" nvfp4", OPAQ_ERROR_TEXT, 0, {"unknown format \" nvfp4\"", NULL}},
    {"nvfp4 ", OPAQ_ERROR_TEXT, 0, {"unknown format \"nvfp4 \"", NULL}},
    {"nvfp4\n", OPAQ_ERROR_TEXT, 0, {"unknown format \"nvfp4?\"", NULL}},
    {"\xC3\xA9", OPAQ_ERROR_TEXT, 0, {"unknown format \"??\"", NULL}},
    /* the element */
    {"fp8.", OPAQ_ERROR_TEXT, 4, {"unknown element \"\"", "e4m3 or e5m2"}},
    {"fp8.e2m1", OPAQ_ERROR_TEXT, 4, {"unknown element \"e2m1\"", "e4m3 or e5m2"}},
    {"nvfp4.e4m3", OPAQ_ERROR_TEXT, 6, {"unknown element \"e4m3\"", "expected e2m1"}},
    {"fp8.e4m3.e5m2", OPAQ_ERROR_TEXT, 4, {"unknown element \"e4m3.e5m2\"", NULL}},
    {"mxfp8.f16+2d", OPAQ_ERROR_TEXT, 6, {"unknown element \"f16\"", NULL}},
    /* options */
    {"nvfp4+", OPAQ_ERROR_TEXT, 6, {"unknown option \"\"", NULL}},
    {"nvfp4++2d", OPAQ_ERROR_TEXT, 6, {"unknown option \"\"", NULL}},
    {"nvfp4+2d+", OPAQ_ERROR_TEXT, 9, {"unknown option \"\"", NULL}},
    {"nvfp4+2d+rth",
     OPAQ_ERROR_TEXT,
     9,
     {"unknown option \"rth\"", "nvfp4 takes rowwise, columnwise, both, 2d"}},
    {"nvfp4+2d +sr", OPAQ_ERROR_TEXT, 6, {"unknown option \"2d \"", NULL}},
    {"nvfp4+2d\t", OPAQ_ERROR_TEXT, 6, {"unknown option \"2d?\"", NULL}},
    {"nvfp4+\xE2\x82\xAC", OPAQ_ERROR_TEXT, 6, {"unknown option \"???\"", NULL}},
    {"nvfp4+both=1", OPAQ_ERROR_TEXT, 6, {"unknown option \"both=1\"", NULL}},
    {"nvfp4+=", OPAQ_ERROR_TEXT, 6, {"unknown option \"=\"", NULL}},
    {"fp8+rht", OPAQ_ERROR_TEXT, 4, {"\"rht\"", "fp8 takes rowwise, columnwise, both, delayed, pow2"}},
    {"fp8+both+rht=0x0001", OPAQ_ERROR_TEXT, 9, {"\"rht=0x0001\"", NULL}},
    {"fp8blk1+2d", OPAQ_ERROR_TEXT, 8, {"\"2d\"", "fp8blk1 takes"}},
    {"fp8row+delayed", OPAQ_ERROR_TEXT, 7, {"\"delayed\"", "fp8row takes"}},
    {"mxfp8+pow2", OPAQ_ERROR_TEXT, 6, {"\"pow2\"", "mxfp8 takes"}},
    {"mxfp4+rowscaled", OPAQ_ERROR_TEXT, 6, {"\"rowscaled\"", NULL}},
    {"mxfp4+4over6", OPAQ_ERROR_TEXT, 6, {"\"4over6\"", NULL}},
    {"fp8+swizzle", OPAQ_ERROR_TEXT, 4, {"\"swizzle\"", NULL}},
    {"nvfp4+delayed", OPAQ_ERROR_TEXT, 6, {"\"delayed\"", NULL}},
    {"mxfp8+global", OPAQ_ERROR_TEXT, 6, {"\"global\"", "mxfp8 takes"}},
    /* values */
    {"nvfp4+2d=1", OPAQ_ERROR_TEXT, 9, {"unexpected value \"1\"", NULL}},
    {"nvfp4+sr=", OPAQ_ERROR_TEXT, 9, {"unexpected value \"\"", NULL}},
    {"nvfp4+rht=", OPAQ_ERROR_TEXT, 10, {"bad sign mask \"\"", "hexadecimal"}},
    {"nvfp4+rht=d7e8", OPAQ_ERROR_TEXT, 10, {"bad sign mask \"d7e8\"", NULL}},
    {"nvfp4+rht=0x", OPAQ_ERROR_TEXT, 10, {"bad sign mask", NULL}},
    {"nvfp4+rht=0x123", OPAQ_ERROR_TEXT, 10, {"bad sign mask", NULL}},
    {"nvfp4+rht=0x12345", OPAQ_ERROR_TEXT, 10, {"bad sign mask", NULL}},
    {"nvfp4+rht=0x12g4", OPAQ_ERROR_TEXT, 10, {"bad sign mask \"0x12g4\"", NULL}},
    {"nvfp4+rht=0X1234", OPAQ_ERROR_TEXT, 10, {"bad sign mask", NULL}},
    {"nvfp4+rht=0xD7E8", OPAQ_ERROR_TEXT, 10, {"bad sign mask \"0xD7E8\"", NULL}},
    {"nvfp4+rht=0x+123", OPAQ_ERROR_TEXT, 10, {"bad sign mask \"0x\"", NULL}},
    {"nvfp4+4over6=", OPAQ_ERROR_TEXT, 13, {"unknown error mode \"\"", "mae or mse"}},
    {"nvfp4+4over6=rms", OPAQ_ERROR_TEXT, 13, {"unknown error mode \"rms\"", NULL}},
    {"nvfp4+e4m3max", OPAQ_ERROR_TEXT, 13, {"e4m3max", "448 or 256"}},
    {"nvfp4+e4m3max=", OPAQ_ERROR_TEXT, 14, {"e4m3max", "448 or 256"}},
    {"nvfp4+e4m3max=449", OPAQ_ERROR_TEXT, 14, {"\"449\"", "448 or 256"}},
    {"nvfp4+e4m3max=0448", OPAQ_ERROR_TEXT, 14, {"\"0448\"", NULL}},
    {"fp8+rule", OPAQ_ERROR_TEXT, 8, {"rule", "compressed-tensors"}},
    {"fp8+rule=", OPAQ_ERROR_TEXT, 9, {"unknown rule \"\"", NULL}},
    {"mxfp8+rule=floor", OPAQ_ERROR_TEXT, 11, {"unknown rule \"floor\"", NULL}},
    {"fp8+eps", OPAQ_ERROR_TEXT, 7, {"bad number \"\"", NULL}},
    {"fp8+eps=", OPAQ_ERROR_TEXT, 8, {"bad number \"\"", NULL}},
    {"fp8+eps=-1", OPAQ_ERROR_TEXT, 8, {"bad number \"-1\"", NULL}},
    {"fp8+eps=1.", OPAQ_ERROR_TEXT, 8, {"bad number \"1.\"", NULL}},
    {"fp8+eps=.5", OPAQ_ERROR_TEXT, 8, {"bad number \".5\"", NULL}},
    {"fp8+eps=1e", OPAQ_ERROR_TEXT, 8, {"bad number \"1e\"", NULL}},
    {"fp8+eps=1e-", OPAQ_ERROR_TEXT, 8, {"bad number \"1e-\"", NULL}},
    {"fp8+eps=1E5", OPAQ_ERROR_TEXT, 8, {"bad number \"1E5\"", NULL}},
    {"fp8+eps=1,5", OPAQ_ERROR_TEXT, 8, {"bad number \"1,5\"", NULL}},
    {"fp8+eps=0x1p3", OPAQ_ERROR_TEXT, 8, {"bad number \"0x1p3\"", NULL}},
    {"fp8+eps= 1", OPAQ_ERROR_TEXT, 8, {"bad number \" 1\"", NULL}},
    {"fp8+eps=nan", OPAQ_ERROR_TEXT, 8, {"bad number \"nan\"", NULL}},
    {"fp8+eps=inf", OPAQ_ERROR_TEXT, 8, {"bad number \"inf\"", NULL}},
    {"fp8+eps=1e39", OPAQ_ERROR_TEXT, 8, {"bad number \"1e39\"", "finite"}},
    {"fp8+eps=1e99999999999999999999", OPAQ_ERROR_TEXT, 8, {"bad number", "finite"}},
    /* twice */
    {"fp8+both+both", OPAQ_ERROR_TEXT, 9, {"twice", "\"both\""}},
    {"fp8+rowwise+columnwise", OPAQ_ERROR_TEXT, 12, {"twice", "\"columnwise\""}},
    {"nvfp4+rht+sr+rht=0x0001", OPAQ_ERROR_TEXT, 13, {"twice", "\"rht=0x0001\""}},
    {"nvfp4+4over6+4over6=mse", OPAQ_ERROR_TEXT, 13, {"twice", NULL}},
    {"fp8+eps=1+eps=1", OPAQ_ERROR_TEXT, 10, {"twice", "\"eps=1\""}},
    {"fp8+rule=te+rule=te", OPAQ_ERROR_TEXT, 12, {"twice", "\"rule=te\""}},
    {"nvfp4+e4m3max=448+e4m3max=448", OPAQ_ERROR_TEXT, 18, {"twice", NULL}},
    {"fp8+sr+sr", OPAQ_ERROR_TEXT, 7, {"twice", "\"sr\""}},
    /* combinations that are not allowed: both parts are named */
    {"nvfp4+2d+rht", OPAQ_ERROR_SPEC, -1, {"2d", "rht"}},
    {"nvfp4+2d+rowscaled", OPAQ_ERROR_SPEC, -1, {"2d", "rowscaled"}},
    {"nvfp4+4over6+rht", OPAQ_ERROR_SPEC, -1, {"\"4over6\"", "\"rht\""}},
    {"nvfp4+4over6+sr", OPAQ_ERROR_SPEC, -1, {"\"4over6\"", "\"sr\""}},
    {"nvfp4+e4m3max=256", OPAQ_ERROR_SPEC, -1, {"e4m3max=256", "4over6"}},
    {"fp8+delayed+pow2", OPAQ_ERROR_SPEC, -1, {"\"delayed\"", "\"pow2\""}},
    {"fp8+delayed+eps=1", OPAQ_ERROR_SPEC, -1, {"\"delayed\"", "\"eps\""}},
    {"nvfp4+eps=1", OPAQ_ERROR_SPEC, -1, {"nvfp4", "eps"}},
    {"mxfp8+eps=1", OPAQ_ERROR_SPEC, -1, {"mxfp8", "eps"}},
    {"fp8+e4m3max=448", OPAQ_ERROR_SPEC, -1, {"e4m3max", "fp8"}},
    {"fp8+rule=ocp", OPAQ_ERROR_SPEC, -1, {"fp8", "ocp"}},
    {"nvfp4+rule=rceil", OPAQ_ERROR_SPEC, -1, {"nvfp4", "rceil"}},
    {"fp8.e5m2+rule=modelopt", OPAQ_ERROR_SPEC, -1, {"modelopt", "e5m2"}},
    {"mxfp8.e5m2+rule=compressed-tensors", OPAQ_ERROR_SPEC, -1, {"compressed-tensors", "e5m2"}},
    {"fp8+rule=compressed-tensors+sr", OPAQ_ERROR_SPEC, -1, {"compressed-tensors", "\"sr\""}},
    {"fp8+eps=1+rule=modelopt", OPAQ_ERROR_SPEC, -1, {"modelopt", "eps"}},
    {"nvfp4+4over6+rule=modelopt", OPAQ_ERROR_SPEC, -1, {"modelopt", "4over6"}},
    {"mxfp4+2d+rule=modelopt", OPAQ_ERROR_SPEC, -1, {"modelopt", "2d"}},
    {"nvfp4+global", OPAQ_ERROR_SPEC, -1, {"\"te\"", "\"global\""}},
    {"nvfp4+rht+global", OPAQ_ERROR_SPEC, -1, {"\"te\"", "\"global\""}},
    {"nvfp4+2d+global+rule=modelopt", OPAQ_ERROR_SPEC, -1, {"modelopt", "\"2d\""}},
    {"nvfp4+sr+global+rule=compressed-tensors", OPAQ_ERROR_SPEC, -1, {"compressed-tensors", "\"sr\""}},
};

/* Parses, expects an error, and checks the spec and the message. */
static void refuses(const char *text, size_t length, const struct bad_text *bad) {
    struct opaq_spec before;
    struct opaq_spec spec;
    struct opaq_error error;
    memset(&before, 0xA5, sizeof before);
    memset(&spec, 0xA5, sizeof spec);
    memset(&error, 0, sizeof error);
    const enum opaq_status status = opaq_spec_parse(text, length, &spec, &error);
    if (status != bad->status || error.status != bad->status) {
        CHECK_FAIL("\"%s\": status %s, expected %s: %s", bad->text, opaq_status_name(status),
                   opaq_status_name(bad->status), error.text);
        return;
    }
    char at[32] = "";
    if (bad->position >= 0) {
        (void)snprintf(at, sizeof at, "at position %d;", bad->position);
    }
    if (strstr(error.text, at) == NULL) {
        CHECK_FAIL("\"%s\": no \"%s\" in: %s", bad->text, at, error.text);
    }
    for (int i = 0; i < 2; ++i) {
        if (bad->names[i] != NULL && strstr(error.text, bad->names[i]) == NULL) {
            CHECK_FAIL("\"%s\": no \"%s\" in: %s", bad->text, bad->names[i], error.text);
        }
    }
    for (const char *p = error.text; *p != '\0'; ++p) {
        CHECK(*p >= ' ' && *p <= '~'); /* one printable line, whatever the text contained */
    }
    CHECK_BYTES(&spec, &before, sizeof spec, "\"%s\" wrote to the spec", bad->text);
    CHECK_EQ_INT(opaq_spec_parse(text, length, &spec, NULL), bad->status);
}

static void messages_name_part_and_position(void) {
    for (size_t i = 0; i < sizeof bad_texts / sizeof bad_texts[0]; ++i) {
        refuses(bad_texts[i].text, strlen(bad_texts[i].text), &bad_texts[i]);
    }
    printf("  %zu texts\n", sizeof bad_texts / sizeof bad_texts[0]);
}

static void the_text_ends_at_its_length(void) {
    static const struct bad_text cut = {"nvfp4+2d cut", OPAQ_ERROR_TEXT, 6, {"unknown option \"2\"", NULL}};
    struct opaq_spec spec;
    CHECK_EQ_INT(opaq_spec_parse("nvfp4+2d", 5, &spec, NULL), OPAQ_OK);
    CHECK_EQ_STR(spec_text(&spec).text, "nvfp4");
    refuses("nvfp4+2d", 7, &cut);
}

static void embedded_nul_is_a_character(void) {
    static const struct bad_text in_format = {
        "nvfp4\\0", OPAQ_ERROR_TEXT, 0, {"\"nvfp4?\"", "; the length 6 counts the terminator of the string"}};
    static const struct bad_text in_option = {"fp8+sr\\0", OPAQ_ERROR_TEXT, 4, {"\"sr?\"", NULL}};
    static const struct bad_text in_number = {"fp8+eps=1\\02", OPAQ_ERROR_TEXT, 8, {"\"1?2\"", NULL}};
    static const struct bad_text in_mask = {"nvfp4+rht=0x12\\04", OPAQ_ERROR_TEXT, 10, {"\"0x12?4\"", NULL}};
    refuses("nvfp4", 6, &in_format);
    refuses("fp8+sr", 7, &in_option);
    refuses("fp8+eps=1\0002", 11, &in_number);
    refuses("nvfp4+rht=0x12\0004", 16, &in_mask);
}

static void every_byte_value_is_refused_somewhere(void) {
    for (int byte = 0; byte < 256; ++byte) {
        char text[] = "nvfp4+sr+2d";
        struct opaq_spec spec;
        struct opaq_error error;
        text[7] = (char)byte;
        const enum opaq_status status = opaq_spec_parse(text, sizeof text - 1, &spec, &error);
        const bool is_r = byte == 'r' || byte == 'R';
        CHECK_EQ_INT(status, is_r ? OPAQ_OK : OPAQ_ERROR_TEXT);
        CHECK(is_r || strstr(error.text, byte == '+' || byte == '=' ? "position" : "at position 6;") != NULL);
    }
}

static void over_long_texts(void) {
    char text[4096];
    struct opaq_spec spec;
    struct opaq_error error;
    memset(text, '0', sizeof text);
    memcpy(text, "fp8+eps=", 8);
    CHECK_EQ_INT(opaq_spec_parse(text, 127, &spec, &error), OPAQ_OK); /* the allowed length, plus a zero */
    CHECK(spec.epsilon == 0.0f);
    text[8] = '1';
    CHECK_EQ_INT(opaq_spec_parse(text, 127, &spec, &error), OPAQ_ERROR_TEXT); /* 1e118 */
    CHECK(strstr(error.text, "at position 8;") != NULL);
    for (size_t length = 128; length <= sizeof text; length += 1984) {
        CHECK_EQ_INT(opaq_spec_parse(text, length, &spec, &error), OPAQ_ERROR_TEXT);
        char count[32];
        (void)snprintf(count, sizeof count, "%zu characters", length);
        CHECK(strstr(error.text, count) != NULL && strstr(error.text, "127") != NULL);
    }
    const struct opaq_spec *shared;
    CHECK_EQ_INT(opaq_spec_intern(text, sizeof text, &shared, &error), OPAQ_ERROR_TEXT);
}

static void a_long_refusal_is_cut_and_terminated(void) {
    char text[127];
    struct opaq_spec spec;
    struct opaq_error error;
    memset(&error, 'x', sizeof error);
    memset(text, 'y', sizeof text);
    memcpy(text, "nvfp4+", 6);
    CHECK_EQ_INT(opaq_spec_parse(text, sizeof text, &spec, &error), OPAQ_ERROR_TEXT);
    CHECK(memchr(error.text, '\0', sizeof error.text) != NULL);
    CHECK(strstr(error.text, "at position 6;") != NULL);
}

static void null_arguments(void) {
    struct opaq_spec spec = spec_of("fp8");
    struct opaq_error error;
    char text[OPAQ_SPEC_TEXT_BYTES];
    CHECK_EQ_INT(opaq_spec_parse(NULL, 3, &spec, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_spec_parse("fp8", 3, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_spec_print(NULL, text, sizeof text, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_spec_print(&spec, NULL, 100, &error), OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_spec_check(NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_spec_make(OPAQ_FP8, NULL, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_spec_make((enum opaq_format)OPAQ_FORMAT_COUNT, &spec, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_spec_make((enum opaq_format) - 1, &spec, &error), OPAQ_ERROR_ARGUMENT);
}

/* Every capacity from 0 up: an error that states the required size, without writing a byte, until it fits. */
static void small_buffers_are_refused(void) {
    static const char expected[] = "fp8.e5m2+columnwise+pow2+sr+eps=2.5e-1";
    const struct opaq_spec spec = spec_of(expected);
    for (size_t capacity = 0; capacity < sizeof expected + 4; ++capacity) {
        char buffer[sizeof expected + 4];
        char before[sizeof buffer];
        struct opaq_error error;
        char needed[32];
        memset(buffer, '#', sizeof buffer);
        memset(before, '#', sizeof before);
        (void)snprintf(needed, sizeof needed, "needs %zu bytes", sizeof expected);
        const enum opaq_status status = opaq_spec_print(&spec, buffer, capacity, &error);
        if (capacity < sizeof expected) {
            CHECK_EQ_INT(status, OPAQ_ERROR_BUFFER);
            CHECK(strstr(error.text, needed) != NULL);
            CHECK_BYTES(buffer, before, sizeof buffer, "capacity %zu", capacity);
        } else {
            CHECK_EQ_INT(status, OPAQ_OK);
            CHECK_EQ_STR(buffer, expected);
            CHECK_BYTES(buffer + sizeof expected, before, sizeof buffer - sizeof expected, "beyond the text");
        }
    }
}

static void invalid_specs_are_not_printed(void) {
    struct opaq_spec spec = spec_of("nvfp4");
    char buffer[OPAQ_SPEC_TEXT_BYTES] = "before";
    struct opaq_error error;
    spec.options = OPAQ_DELAYED;
    CHECK_EQ_INT(opaq_spec_print(&spec, buffer, sizeof buffer, &error), OPAQ_ERROR_SPEC);
    CHECK_EQ_STR(buffer, "before");
    CHECK(strstr(error.text, "delayed") != NULL && strstr(error.text, "nvfp4") != NULL);
}

static const struct test_case tests[] = {TEST(messages_name_part_and_position),
                                         TEST(the_text_ends_at_its_length),
                                         TEST(embedded_nul_is_a_character),
                                         TEST(every_byte_value_is_refused_somewhere),
                                         TEST(over_long_texts),
                                         TEST(a_long_refusal_is_cut_and_terminated),
                                         TEST(null_arguments),
                                         TEST(small_buffers_are_refused),
                                         TEST(invalid_specs_are_not_printed)};
TEST_MAIN(tests)
