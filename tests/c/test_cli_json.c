/* test_cli_json.c: JSON from files, as json_read accepts and rejects it. */
#include <stdlib.h>

#include "check.h"
#include "cli/cli_memory.h"
#include "cli/read/json.h"

/* Reads a valid text; NULL after a failed check. */
static yyjson_doc *read_text(const char *text) {
    yyjson_doc *document = NULL;
    struct opaq_error error = {OPAQ_OK, ""};
    if (json_read(text, strlen(text), "f", &document, &error) != OPAQ_OK) {
        CHECK_FAIL("%s: %s", text, error.text);
    }
    return document;
}

static void refuses(const char *text, size_t length, enum opaq_status status, const char *sentence) {
    yyjson_doc *document = NULL;
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(json_read(text, length, "f", &document, &error), status);
    CHECK_EQ_STR(error.text, sentence);
    CHECK(document == NULL);
}

static void refuses_invalid_json(void) {
    static const char zero[] = "{}\0";
    static const char wrong[] = "{\"\xFF\":1}";
    refuses("", 0, OPAQ_ERROR_TEXT, "f: invalid JSON: input length is 0 at byte 0 of 0");
    refuses("{", 1, OPAQ_ERROR_TEXT, "f: invalid JSON: unexpected end of data at byte 1 of 1");
    refuses("{}x", 3, OPAQ_ERROR_TEXT, "f: invalid JSON: unexpected content after document at byte 2 of 3");
    refuses(zero, 3, OPAQ_ERROR_TEXT, "f: invalid JSON: unexpected content after document at byte 2 of 3");
    refuses(wrong, strlen(wrong), OPAQ_ERROR_TEXT,
            "f: invalid JSON: invalid UTF-8 encoding in string at byte 2 of 7");
    static const char *const texts[] = {"[1,]", "[01]",  "[1.]",    "[.5]",  "[+1]", "[NaN]",    "[Infinity]",
                                        "[1e]", "['a']", "{a:1}",   "/**/1", "[1}",  "\"\n\"",   "[1 2]",
                                        "tru",  "[0x1]", "\"\\x\"", "nul",   "-",    "\"\\u12\""};
    for (size_t i = 0; i < sizeof texts / sizeof texts[0]; ++i) {
        yyjson_doc *document = NULL;
        struct opaq_error error = {OPAQ_OK, ""};
        if (json_read(texts[i], strlen(texts[i]), "f", &document, &error) != OPAQ_ERROR_TEXT) {
            CHECK_FAIL("%s was read", texts[i]);
        }
    }
}

static void refuses_duplicate_keys(void) {
    static const char *const twice = "f: duplicate key \"a\" in an object";
    refuses("{\"a\":1,\"b\":2,\"a\":3}", 19, OPAQ_ERROR_TEXT, twice);
    refuses("{\"a\":1,\"\\u0061\":3}", 18, OPAQ_ERROR_TEXT, twice);
    refuses("[1,{\"x\":[{\"a\":1,\"a\":1}]}]", 25, OPAQ_ERROR_TEXT, twice);
    /* keys with a common prefix differ, also where the rest begins with a zero byte */
    yyjson_doc_free(read_text("{\"a\":1,\"ab\":2,\"a\\u0000\":3,\"\":4,\"b\":{\"a\":1}}"));
}

static void depth_ends_at_the_limit(void) {
    char text[2 * JSON_DEPTH_LIMIT + 3];
    for (int depth = JSON_DEPTH_LIMIT - 1; depth <= JSON_DEPTH_LIMIT + 1; ++depth) {
        memset(text, '[', (size_t)depth);
        memset(text + depth, ']', (size_t)depth);
        text[2 * depth] = '\0';
        if (depth <= JSON_DEPTH_LIMIT) {
            yyjson_doc_free(read_text(text));
        } else {
            refuses(text, strlen(text), OPAQ_ERROR_LIMIT,
                    "f: JSON is nested deeper than 64 levels at byte 64 of 130");
        }
    }
    /* brackets in strings do not count, and quotes may be escaped */
    yyjson_doc *const document =
        read_text("[\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[["
                  "\\\"[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[[\\\\\",[]]");
    yyjson_doc_free(document);
}

static void naturals(void) {
    static const struct {
        const char *text;
        bool is_natural;
        uint64_t number;
    } rows[] = {
        {"0", true, 0},
        {"9223372036854775807", true, INT64_MAX},
        {"9223372036854775808", true, (uint64_t)INT64_MAX + 1},
        {"18446744073709551609", true, UINT64_MAX - 6},
        {"18446744073709551616", false, 0},
        {"99999999999999999999999999", false, 0},
        {"-1", false, 0},
        {"-0", false, 0},
        {"1.0", false, 0},
        {"1e3", false, 0},
        {"1e999", false, 0},
        {"\"1\"", false, 0},
        {"null", false, 0},
        {"true", false, 0},
        {"[1]", false, 0},
    };
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        yyjson_doc *const document = read_text(rows[i].text);
        uint64_t number = 0;
        if (json_natural(yyjson_doc_get_root(document), &number) != rows[i].is_natural ||
            number != rows[i].number) {
            CHECK_FAIL("%s is read as %" PRIu64, rows[i].text, number);
        }
        yyjson_doc_free(document);
    }
    uint64_t number = 0;
    CHECK(!json_natural(NULL, &number));
}

static void texts(void) {
    yyjson_doc *const document = read_text(
        "{\"a\":\"x\",\"n\":1.50,\"z\":\"x\\u0000\",\"l\":[],\"e\":\"\",\"c\":\"\\u001b\",\"d\":\"\\u007f\","
        "\"k\":\"\\u0085\",\"o\":\"\\u00a0\\u00e9\\u4e2d\"}");
    yyjson_val *const root = yyjson_doc_get_root(document);
    CHECK_EQ_STR(json_member_text(root, "a"), "x");
    CHECK_EQ_STR(json_text(yyjson_obj_get(root, "n")), "1.50");
    CHECK(json_member_text(root, "n") == NULL);
    CHECK(json_member_text(root, "z") == NULL && json_member_text(root, "l") == NULL);
    CHECK(json_member_text(root, "missing") == NULL && json_member_text(NULL, "a") == NULL);
    CHECK(json_text(NULL) == NULL);
    static const char *const unclean[] = {"n", "z", "l", "e", "c", "d", "k", "missing"};
    for (size_t i = 0; i < sizeof unclean / sizeof unclean[0]; ++i) {
        if (json_is_clean(yyjson_obj_get(root, unclean[i]))) {
            CHECK_FAIL("%s is clean", unclean[i]);
        }
    }
    CHECK(json_is_clean(yyjson_obj_get(root, "a")) && json_is_clean(yyjson_obj_get(root, "o")));
    yyjson_doc_free(document);
}

static void messages_are_printable(void) {
    /* a key cannot send control characters to the terminal, nor half a character where it is cut */
    struct text text = {0};
    text_print(&text, "{\"\\u001b\\u009b%0150d\xC3\xA9\":1,", 0);
    text_print(&text, "\"\\u001b\\u009b%0150d\xC3\xA9\":1}", 0);
    yyjson_doc *document = NULL;
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(json_read(text.bytes, text.length, "f", &document, &error), OPAQ_ERROR_TEXT);
    CHECK(strncmp(error.text, "f: duplicate key \"???000", 24) == 0);
    text_free(&text);
    (void)opaq_fail(&error, OPAQ_ERROR_TEXT, "%.1s|%s|%s", "\xC3\xA9", "\xF0\x9F\x98\x80", "a\tb\x7F\x80");
    CHECK_EQ_STR(error.text, "?|\xF0\x9F\x98\x80|a?b??");
}

static const struct test_case tests[] = {
    TEST(refuses_invalid_json),
    TEST(refuses_duplicate_keys),
    TEST(depth_ends_at_the_limit),
    TEST(naturals),
    TEST(texts),
    TEST(messages_are_printable),
};
TEST_MAIN(tests)
