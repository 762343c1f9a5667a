/* test_pattern.c: the names that a pattern matches, the messages for invalid patterns, and that time and memory
 * are bounded. */
#include <stdlib.h>

#include "check.h"
#include "opaq/pattern.h"

static const struct {
    const char *pattern;
    const char *name;
    int matches;
} cases[] = {
    {"lm_head", "lm_head", 1},
    {"lm_head", "lm_head.x", 0},
    {"lm_head", "model.lm_head", 0},
    {"*.self_attn.*", "model.layers.0.self_attn.q_proj", 1},
    {"*.self_attn.*", "self_attn.q_proj", 0},
    {"*", "", 1},
    {"", "", 1},
    {"", "a", 0},
    {"a?c", "abc", 1},
    {"a?c", "ac", 0},
    {"a?c",
     "a\xC3\xA9"
     "c",
     1}, /* one character of two bytes */
    {"layers.[0-3].x", "layers.2.x", 1},
    {"layers.[!0-3].x", "layers.2.x", 0},
    {"a[b", "a[b", 1},
    {"a.b", "axb", 0},
    {"**a**", "bab", 1},
    {"re:.*mlp.gate$", "model.layers.0.mlp.gate", 1},
    {"re:.*mlp.gate$", "model.layers.0.mlp.gate_proj", 0},
    {"re:model", "model.layers", 1}, /* matched from the beginning, not to the end */
    {"re:layers", "model.layers", 0},
    {"re:visual.*", "visual", 1},
    {"re:.*lm_head", "lm_head", 1},
    {"re:.*layers\\.[0-3]\\.", "model.layers.3.x", 1},
    {"re:.*layers\\.[0-3]\\.", "model.layers.13.x", 0},
    {"re:^model\\.layers\\.(0|1|31)\\.", "model.layers.31.x", 1},
    {"re:^model\\.layers\\.(0|1|31)\\.", "model.layers.3.x", 0},
    {"re:(?:a|b)+c{2,3}d", "abaccd", 1},
    {"re:(?:a|b)+c{2,3}d", "abacd", 0},
    {"re:(?:a|b)+c{2,3}d", "abaccccd", 0},
    {"re:a{0}b", "b", 1},
    {"re:a{,2}b", "aab", 1},
    {"re:a{2,}b$", "aaaab", 1},
    {"re:a{x}", "a{x}", 1},
    {"re:^(?!.*experts).*proj", "model.q_proj", 1},
    {"re:^(?!.*experts).*proj", "model.experts.q_proj", 0},
    {"re:(?=.*a)(?!.*(?!x)b).*c", "zac", 1},
    {"re:(?=.*a)(?!.*(?!x)b).*c", "zabc", 0},
    {"re:a|b", "b", 1},
    {"re:a|", "zzz", 1},
    {"re:\\d+\\.\\w*\\b", "12.ab c", 1},
    {"re:[^\\W\\d]+$", "abc", 1},
    {"re:[^\\W\\d]+$", "ab1", 0},
    {"re:[]a-]+$", "]-a", 1},
    {"re:.*?q_proj$", "a.q_proj", 1},
    {"re:(?P<n>a)b", "ab", 1},
    {"re:(a*)*b", "aaab", 1},
    {"re:()*x", "x", 1},
    {"re:\\Aab\\Z", "ab", 1},
};

static int matches(const char *pattern, const char *name) {
    struct opaq_patterns *list = NULL;
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(opaq_patterns_create(&list, NULL), OPAQ_OK);
    if (!CHECK_EQ_INT(opaq_patterns_add(list, pattern, &error), OPAQ_OK)) {
        printf("  %s\n", error.text);
    }
    const int64_t found = opaq_patterns_find(list, name);
    opaq_patterns_destroy(list);
    return found == 0;
}

static void names_are_found(void) {
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        CHECK(matches(cases[i].pattern, cases[i].name) == cases[i].matches ||
              CHECK_FAIL("%s and %s", cases[i].pattern, cases[i].name));
    }
}

static void the_first_is_found(void) {
    static const char *const texts[] = {"*.b", "re:a", "a.b", "re:x|y", "*"};
    struct opaq_patterns *list = NULL;
    CHECK_EQ_INT(opaq_patterns_create(&list, NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_patterns_find(list, "a"), -1);
    for (size_t i = 0; i + 1 < sizeof texts / sizeof texts[0]; ++i) {
        CHECK_EQ_INT(opaq_patterns_add(list, texts[i], NULL), OPAQ_OK);
    }
    CHECK_EQ_INT(opaq_patterns_find(list, "a.b"), 0);
    CHECK_EQ_INT(opaq_patterns_find(list, "a.c"), 1);
    CHECK_EQ_INT(opaq_patterns_find(list, "y"), 3);
    CHECK_EQ_INT(opaq_patterns_find(list, "z"), -1);
    for (int i = 0; i < 100; ++i) { /* the table of literals grows */
        CHECK_EQ_INT(opaq_patterns_add(list, texts[i % 4], NULL), OPAQ_OK);
    }
    CHECK_EQ_INT(opaq_patterns_add(list, texts[4], NULL), OPAQ_OK);
    CHECK_EQ_INT(opaq_patterns_find(list, "a.b"), 0);
    CHECK_EQ_INT(opaq_patterns_find(list, "z"), 104);
    opaq_patterns_destroy(list);
    opaq_patterns_destroy(NULL);
}

/* The error for `text` repeated `count` times between `before` and `after`. */
static void refused(const char *before, const char *text, size_t times, const char *after, const char *why) {
    const size_t length = strlen(text);
    char *const pattern = malloc(strlen(before) + times * length + strlen(after) + 1);
    char *at = stpcpy(pattern, before);
    for (size_t i = 0; i < times; ++i) {
        at = stpcpy(at, text);
    }
    stpcpy(at, after);
    struct opaq_patterns *list = NULL;
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(opaq_patterns_create(&list, NULL), OPAQ_OK);
    CHECK(opaq_patterns_add(list, pattern, &error) != OPAQ_OK);
    CHECK(strstr(error.text, why) != NULL || CHECK_FAIL("\"%s\" does not say \"%s\"", error.text, why));
    opaq_patterns_destroy(list);
    free(pattern);
}

static void limits_and_syntax_are_named(void) {
    refused("re:", "(", 20000, "", "has 20000 bytes");
    refused("re:", "(", 4000, "", "nested deeper than 100");
    refused("re:", "[", 4000, "", "without its end, ]");
    refused("re:", "(?:(?:a{10}){10}){100}", 1, "", "more than 4096 states");
    refused("re:((((a{99}){99}){99}){99}", "", 0, "", "more than 4096 states");
    refused("re:a", "{1000}", 1, "{1000}", "repeats nothing");
    refused("re:a{1001}", "", 0, "", "more than 1000 times");
    refused("re:a{3,2}", "", 0, "", "at most less than");
    refused("re:a**", "", 0, "", "repeats nothing");
    refused("re:*", "", 0, "", "repeats nothing");
    refused("re:a*+", "", 0, "", "possessive");
    refused("re:(a)\\1", "", 0, "", "escape that is not supported");
    refused("re:(?<=a)b", "", 0, "", "only (?:");
    refused("re:(?P=a)", "", 0, "", "only (?:");
    refused("re:(?i)a", "", 0, "", "only (?:");
    refused("re:(a", "", 0, "", "without its end, )");
    refused("re:a)", "", 0, "", "without its (");
    refused("re:[b-a]", "", 0, "", "end is before");
    refused("re:[[:digit:]]", "", 0, "", "write \\d");
    refused("re:a\\", "", 0, "", "backslash");
}

/* Backtracking would take exponential time for each. */
static void time_is_bounded(void) {
    char name[2001];
    memset(name, 'a', 1999);
    name[1999] = '!';
    name[2000] = '\0';
    CHECK(!matches("re:(a+)+$", name));
    CHECK(!matches("re:(a|a)*(a|aa)+(a*)*$", name));
    CHECK(!matches("re:(.*)*(.*)*(.*)*(.*)*[x]$", name));
    CHECK(!matches("*a*a*a*a*a*a*a*a*a*a*a*a*a", name));
    CHECK(!matches("re:(?=(a+)+!$)(?!(a*)*!)(a+)+", name));
    CHECK(!matches("re:(((((((((a?){5}){5}){5})*)*)*)*)*)*$", name));
}

static const struct test_case tests[] = {TEST(names_are_found), TEST(the_first_is_found),
                                         TEST(limits_and_syntax_are_named), TEST(time_is_bounded)};
TEST_MAIN(tests)
