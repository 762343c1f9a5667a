/* test_plan_edit.c: words of a plan's text are read and changed one at a time; the result is canonical. */
#include "check.h"
#include "opaq/linear.h"
#include "opaq/plan_text.h"

static void words_are_set(void) {
    static const struct {
        const char *plan, *key, *value, *made;
    } all[] = {
        {"", "x", "mxfp8", "x=mxfp8"},
        {"", "cache", "", "cache"},
        {"", "cache", NULL, ""},
        {"x=mxfp8", "x", NULL, ""},
        {"x=mxfp8 grad=xw", "x", "nvfp4+rht", "x=nvfp4+rht grad=xw"},
        {"grad=xw w=mxfp8", "x", "mxfp8", "x=mxfp8 w=mxfp8 grad=xw"}, /* canonical order */
        {"", "w", "nvfp4+sr+rht", "w=nvfp4+rht+sr"},                  /* a quantizer has one canonical text */
        {"w=nvfp4+sr+rht", "grad", "x", "w=nvfp4+rht+sr grad=x"},     /* also that of an existing word */
        {"w_given=nvfp4+tiled", "precision", "exact", "w_given=nvfp4+tiled"}, /* defaults are omitted */
        {"w_given=nvfp4+tiled", "precision", "near", "w_given=nvfp4+tiled precision=near"},
        {"w_given=nvfp4", "order", "fixed", "w_given=nvfp4"},
        {"first=1 w=mxfp8", "order", "any", "w=mxfp8 order=any first=1"},
        {"x=mxfp8 order=fixed", "grad", "x", "x=mxfp8 grad=x"},
        {"x=fp8+delayed history=max margin=0", "reduce", "", "x=fp8+delayed reduce"},
        {"act=silu experts=8", "first", "0", "act=silu experts=8"},
        {"grad=x", "x", "fp9", "x=fp9 grad=x"}, /* the operator rejects it */
        {"cache x=fp8 w=fp8", "bias_later", "", "x=fp8 w=fp8 cache bias_later"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        char made[OPAQ_PLAN_TEXT_BYTES] = "?";
        struct opaq_error error = {OPAQ_OK, ""};
        CHECK_EQ_INT(opaq_plan_set(all[i].plan, all[i].key, all[i].value, made, sizeof made, &error), OPAQ_OK);
        CHECK_EQ_STR(made, all[i].made);
        CHECK_EQ_STR(error.text, "");
    }
}

static void words_are_read(void) {
    static const struct {
        const char *plan, *key, *value;
    } all[] = {
        {"x=mxfp8 grad=xw cache", "grad", "xw"},
        {"x=mxfp8 grad=xw cache", "cache", "cache"},
        {"x=mxfp8 grad=xw cache", "w", ""},
        {"", "x", ""},
        {"x_given=fp8", "x", ""},
        {"x=mxfp8 order=any", "order", "any"},
        {"grad=x reduce", "reduce", "reduce"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        char value[OPAQ_PLAN_TEXT_BYTES] = "?";
        CHECK_EQ_INT(opaq_plan_get(all[i].plan, all[i].key, value, sizeof value, NULL), OPAQ_OK);
        CHECK_EQ_STR(value, all[i].value);
    }
}

static void a_text_may_be_changed_in_place(void) {
    char plan[OPAQ_PLAN_TEXT_BYTES] = "grad=xw x=mxfp8";
    CHECK_EQ_INT(opaq_plan_set(plan, "w", "mxfp8", plan, sizeof plan, NULL), OPAQ_OK);
    CHECK_EQ_STR(plan, "x=mxfp8 w=mxfp8 grad=xw");
    struct opaq_linear_plan parsed;
    CHECK_EQ_INT(opaq_linear_plan_parse(plan, strlen(plan), &parsed, NULL), OPAQ_OK);
}

static void wrong_words_are_refused(void) {
    static const struct {
        const char *plan, *key, *value, *says;
    } all[] = {
        {"", "z", "1", "plan: there is no word \"z\""},
        {"z=1", "x", "fp8", "plan: \"z=1\" at position 0: unknown"},
        {"x=fp8 x=fp8", "w", "fp8", "plan: \"x=fp8\" at position 6: came before"},
        {"x=fp8  w=fp8", "grad", "x", "plan: \"\" at position 6: expected a word"},
        {"x=fp8 ", "grad", "x", "plan: the text ends in a space"},
        {"cache=1", "grad", "x", "plan: \"cache=1\" at position 0: takes no value"},
        {"grad", "x", "fp8", "plan: \"grad\" at position 0: expected a value"},
        {"", "x", "", "plan: \"x=\": expected a value without spaces, got \"\""},
        {"", "grad", "x w", "plan: \"grad=\": expected a value without spaces, got \"x w\""},
        {NULL, "x", "fp8", "plan_set: plan is NULL"},
        {"", NULL, "fp8", "plan_set: key is NULL"},
    };
    for (size_t i = 0; i < sizeof all / sizeof all[0]; ++i) {
        char made[OPAQ_PLAN_TEXT_BYTES] = "?";
        struct opaq_error error = {OPAQ_OK, ""};
        CHECK(opaq_plan_set(all[i].plan, all[i].key, all[i].value, made, sizeof made, &error) != OPAQ_OK);
        CHECK_EQ_STR(error.text, all[i].says);
        CHECK_EQ_STR(made, "?");
    }
    char made[OPAQ_PLAN_TEXT_BYTES];
    struct opaq_error error = {OPAQ_OK, ""};
    CHECK_EQ_INT(opaq_plan_set("", "x", "fp8", made, 5, &error), OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_plan_set("", "x", "fp8", NULL, 5, &error), OPAQ_ERROR_ARGUMENT);
    CHECK_EQ_INT(opaq_plan_get("x=fp8", "x", made, 3, &error), OPAQ_ERROR_BUFFER);
    CHECK_EQ_INT(opaq_plan_get("x=fp8", "q", made, sizeof made, &error), OPAQ_ERROR_TEXT);
}

static void long_texts_are_refused(void) {
    char value[OPAQ_PLAN_TEXT_BYTES + 8];
    char made[OPAQ_PLAN_TEXT_BYTES];
    memset(value, 'x', sizeof value);
    value[sizeof value - 1] = '\0';
    CHECK_EQ_INT(opaq_plan_set("", "grad", value, made, sizeof made, NULL), OPAQ_ERROR_TEXT);
    CHECK_EQ_INT(opaq_plan_get(value, "grad", made, sizeof made, NULL), OPAQ_ERROR_TEXT);
    value[OPAQ_PLAN_TEXT_BYTES - 2] = '\0'; /* fits alone, but not after "grad=" */
    CHECK_EQ_INT(opaq_plan_set("", "grad", value, made, sizeof made, NULL), OPAQ_ERROR_TEXT);
}

static const struct test_case tests[] = {TEST(words_are_set), TEST(words_are_read),
                                         TEST(a_text_may_be_changed_in_place), TEST(wrong_words_are_refused),
                                         TEST(long_texts_are_refused)};
TEST_MAIN(tests)
