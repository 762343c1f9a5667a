/* test_linear_plan.c: a plan's text: every word, in any order, each at most once, errors that name the word and
 * its position. */
#include <stdlib.h>

#include "check.h"
#include "opaq/linear.h"
#include "support_op.h"
#include "support_spec.h"

static struct opaq_linear_plan plan_of(const char *text) {
    struct opaq_linear_plan plan;
    struct opaq_error error = {OPAQ_OK, ""};
    memset(&plan, 0, sizeof plan);
    if (opaq_linear_plan_parse(text, strlen(text), &plan, &error) != OPAQ_OK) {
        CHECK_FAIL("\"%s\": %s", text, error.text);
    }
    CHECK_EQ_STR(error.text, ""); /* a success writes no error */
    return plan;
}

/* ---- text ---- */

static void check_form(const struct opaq_form *form, const char *expected) {
    if (expected == NULL) {
        CHECK_EQ_INT(form->kind, OPAQ_FORM_PLAIN);
        return;
    }
    CHECK_EQ_INT(form->kind, OPAQ_FORM_QUANTIZED);
    CHECK_EQ_STR(spec_text(&form->spec).text, expected);
}

static void the_empty_text_is_the_plain_plan(void) {
    const struct opaq_linear_plan plan = plan_of("");
    const struct opaq_form forms[] = {plan.x,  plan.w,       plan.dy,      plan.y,
                                      plan.dx, plan.x_given, plan.w_given, plan.dy_given};
    for (int i = 0; i < 8; ++i) {
        check_form(&forms[i], NULL);
    }
    CHECK(plan.gradients == 0 && plan.saved == 0 && plan.options == 0 && plan.margin == 0);
    CHECK(plan.backward == OPAQ_BACKWARD_QUANTIZED && plan.algorithm == OPAQ_AMAX_MAX);
}

static void every_word_is_read(void) {
    struct opaq_linear_plan plan = plan_of(
        "x=fp8+delayed w=fp8.e4m3+delayed dy=fp8.e5m2+delayed y=fp8+both dx=fp8.e5m2+columnwise grad=xwb "
        "backward=dequantized history=most_recent margin=-3 cache bias_later main_grad=add reduce");
    check_form(&plan.x, "fp8+delayed");
    check_form(&plan.w, "fp8+delayed");
    check_form(&plan.dy, "fp8.e5m2+delayed");
    check_form(&plan.y, "fp8+both");
    check_form(&plan.dx, "fp8.e5m2+columnwise");
    check_form(&plan.x_given, NULL);
    CHECK_EQ_INT(plan.gradients, OPAQ_GRADIENT_X | OPAQ_GRADIENT_W | OPAQ_GRADIENT_BIAS);
    CHECK_EQ_INT(plan.backward, OPAQ_BACKWARD_DEQUANTIZED);
    CHECK_EQ_INT(plan.algorithm, OPAQ_AMAX_MOST_RECENT);
    CHECK_EQ_INT(plan.margin, -3);
    CHECK_EQ_INT(plan.options,
                 OPAQ_LINEAR_CACHE | OPAQ_LINEAR_BIAS_LATER | OPAQ_LINEAR_ADD | OPAQ_LINEAR_REDUCE);
    plan = plan_of("x_given=mxfp8 w_given=nvfp4+both dy_given=mxfp8.e5m2+columnwise save=wx grad=bw "
                   "backward=high_precision history=max margin=64 main_grad=set");
    check_form(&plan.x_given, "mxfp8");
    check_form(&plan.w_given, "nvfp4+both");
    check_form(&plan.dy_given, "mxfp8.e5m2+columnwise");
    CHECK_EQ_INT(plan.saved, OPAQ_GRADIENT_X | OPAQ_GRADIENT_W);
    CHECK_EQ_INT(plan.gradients, OPAQ_GRADIENT_W | OPAQ_GRADIENT_BIAS);
    CHECK_EQ_INT(plan.backward, OPAQ_BACKWARD_HIGH_PRECISION);
    CHECK_EQ_INT(plan.algorithm, OPAQ_AMAX_MAX);
    CHECK_EQ_INT(plan.options, OPAQ_LINEAR_SET);
    CHECK_EQ_INT(plan.order, OPAQ_ORDER_FIXED);
    CHECK_EQ_INT(plan_of("order=any").order, OPAQ_ORDER_ANY);
    CHECK_EQ_INT(plan_of("order=fixed").order, OPAQ_ORDER_FIXED);
    CHECK_EQ_INT(plan_of("grad=x").gradients, OPAQ_GRADIENT_X);
    CHECK_EQ_INT(plan_of("save=w").saved, OPAQ_GRADIENT_W);
    for (int margin = -64; margin <= 64; ++margin) {
        char text[32];
        (void)snprintf(text, sizeof text, "margin=%d", margin);
        CHECK_EQ_INT(plan_of(text).margin, margin);
    }
    CHECK_EQ_INT(plan_of("margin=00").margin, 0);
    CHECK_EQ_INT(plan_of("margin=-0").margin, 0);
}

/* All words, in many orders: the same value each time. */
static void order_does_not_count(void) {
    static const char *const words[] = {"x=fp8",       "w=mxfp8",
                                        "dy=nvfp4+sr", "y=fp8row",
                                        "dx=mxfp4",    "grad=wxb",
                                        "save=xw",     "cache",
                                        "margin=7",    "bias_later",
                                        "reduce",      "main_grad=set",
                                        "history=max", "backward=dequantized",
                                        "order=any"};
    enum { WORDS = sizeof words / sizeof words[0] };
    struct opaq_linear_plan first;
    memset(&first, 0, sizeof first);
    for (int rotation = 0; rotation < WORDS; ++rotation) {
        for (int step = 1; step < WORDS; step += 2) {
            char text[OPAQ_LINEAR_PLAN_TEXT_BYTES] = "";
            if (step % 3 == 0 || step % 5 == 0) { /* would not reach every word */
                continue;
            }
            for (int i = 0; i < WORDS; ++i) {
                const size_t length = strlen(text);
                (void)snprintf(text + length, sizeof text - length, "%s%s", i ? " " : "",
                               words[(rotation + i * step) % WORDS]);
            }
            const struct opaq_linear_plan plan = plan_of(text);
            if (rotation == 0 && step == 1) {
                first = plan;
            }
            CHECK_BYTES(&plan, &first, sizeof plan, "%s", text);
        }
    }
}

static void refuse(const char *text, size_t length, enum opaq_status status, const char *part) {
    struct opaq_linear_plan plan;
    struct opaq_linear_plan untouched;
    struct opaq_error error = {OPAQ_OK, ""};
    memset(&plan, 0x5A, sizeof plan);
    memset(&untouched, 0x5A, sizeof untouched);
    const enum opaq_status found = opaq_linear_plan_parse(text, length, &plan, &error);
    if (found != status || error.status != status || strncmp(error.text, "plan: ", 6) != 0 ||
        strstr(error.text, part) == NULL) {
        CHECK_FAIL("status %d, expected %d; \"%s\" does not say \"%s\"", (int)found, (int)status, error.text,
                   part);
    }
    for (const char *p = error.text; *p != '\0'; ++p) {
        CHECK(*p >= ' ' && *p <= '~');
    }
    CHECK_BYTES(&plan, &untouched, sizeof plan, "%s: the plan", error.text);
    CHECK_EQ_INT(opaq_linear_plan_parse(text, length, &plan, NULL), status);
}

static void errors_name_the_word_and_its_position(void) {
    static const char *const cases[][2] = {
        {" ", "\"\" at position 0: expected a word"},
        {"cache ", "\"\" at position 6: expected a word"},
        {"x=fp8  w=fp8", "\"\" at position 6: expected a word"},
        {"grad", "\"grad\" at position 0: unknown; expected x=, w="},
        {"x", "\"x\" at position 0: unknown"},
        {"=fp8", "\"=fp8\" at position 0: unknown"},
        {"x=fp8 z=fp8", "\"z=fp8\" at position 6: unknown"},
        {"X=fp8", "\"X=fp8\" at position 0: unknown"},
        {"cache=1", "\"cache=1\" at position 0: unknown"},
        {"main_grad", "\"main_grad\" at position 0: unknown"},
        {"main_grad=", "\"main_grad=\" at position 0: unknown"},
        {"main_grad=adds", "\"main_grad=adds\" at position 0: unknown"},
        {"x=", "\"x=\" at position 0: "},
        {"grad=x w=fp9", "\"w=fp9\" at position 7: spec \"fp9\""},
        {"dy=nvfp4+rth",
         "\"dy=nvfp4+rth\" at position 0: spec \"nvfp4+rth\": unknown option \"rth\" at position 6"},
        {"dy=nvfp4+2d+rht", "\"2d\" does not go with \"rht\""},
        {"grad=", "\"grad=\" at position 0: expected at least one letter"},
        {"grad=xx", "\"grad=xx\" at position 0: expected letters of xwb, each once"},
        {"grad=xy", "\"grad=xy\" at position 0: expected letters of xwb, each once"},
        {"save=xb", "\"save=xb\" at position 0: expected letters of xw, each once"},
        {"save=", "expected at least one letter"},
        {"backward=", "\"backward=\" at position 0: expected high_precision or dequantized"},
        {"backward=quantized", "expected high_precision or dequantized"},
        {"order=", "\"order=\" at position 0: expected fixed or any"},
        {"order=all", "\"order=all\" at position 0: expected fixed or any"},
        {"order", "\"order\" at position 0: unknown"},
        {"history=min", "\"history=min\" at position 0: expected max or most_recent"},
        {"history=", "expected max or most_recent"},
        {"margin=", "\"margin=\" at position 0: expected an integer from -64 to 64"},
        {"margin=-", "expected an integer from -64 to 64"},
        {"margin=65", "\"margin=65\" at position 0: expected an integer from -64 to 64"},
        {"margin=-65", "expected an integer from -64 to 64"},
        {"margin=100", "expected an integer from -64 to 64"},
        {"margin=+5", "expected an integer from -64 to 64"},
        {"margin=1.5", "expected an integer from -64 to 64"},
        {"margin=0x1", "expected an integer from -64 to 64"},
        {"margin=4294967297", "expected an integer from -64 to 64"},
        {"margin=\t5", "\"margin=?5\" at position 0: expected an integer from -64 to 64"},
        {"cach\xC3\xA9", "\"cach??\" at position 0: unknown"},
        {"cache\tx=fp8", "\"cache?x=fp8\" at position 0: unknown"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        refuse(cases[i][0], strlen(cases[i][0]), OPAQ_ERROR_TEXT, cases[i][1]);
    }
    refuse("x=fp8\0", 6, OPAQ_ERROR_TEXT, "\"x=fp8?\" at position 0: ");
    refuse("grad=x\0", 7, OPAQ_ERROR_TEXT, "expected letters of xwb, each once");
    refuse("margin=5\0", 9, OPAQ_ERROR_TEXT, "expected an integer");
}

static void each_word_comes_at_most_once(void) {
    static const char *const words[] = {
        "x=fp8",         "w=fp8",          "dy=fp8", "y=fp8",         "dx=fp8",    "x_given=mxfp8",
        "w_given=mxfp8", "dy_given=mxfp8", "grad=x", "save=x",        "cache",     "history=max",
        "margin=1",      "bias_later",     "reduce", "main_grad=add", "order=any", "backward=dequantized"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; ++i) {
        char text[128];
        char expected[128];
        (void)snprintf(text, sizeof text, "%s margin=2 %s", words[i], words[i]);
        if (strncmp(words[i], "margin", 6) == 0) {
            (void)snprintf(text, sizeof text, "%s reduce %s", words[i], words[i]);
        }
        (void)snprintf(expected, sizeof expected, "\"%s\" at position %zu: came before", words[i],
                       strlen(text) - strlen(words[i]));
        refuse(text, strlen(text), OPAQ_ERROR_TEXT, expected);
    }
    refuse("main_grad=add main_grad=set", 27, OPAQ_ERROR_TEXT, "\"main_grad=set\" at position 14: came before");
    refuse("x=fp8 x=mxfp8", 13, OPAQ_ERROR_TEXT, "\"x=mxfp8\" at position 6: came before");
}

static void contradictions_name_both_words(void) {
    static const char *const cases[][2] = {
        {"x=fp8 x_given=fp8", "\"x=\" does not go with \"x_given=\""},
        {"w_given=fp8 w=mxfp8", "\"w=\" does not go with \"w_given=\""},
        {"dy=fp8 dy_given=fp8", "\"dy=\" does not go with \"dy_given=\""},
        {"cache", "\"cache\" does not go without \"w=\""},
        {"cache w_given=fp8", "\"cache\" does not go without \"w=\""},
        {"x=fp8+delayed save=x", "\"save=x\" does not go with delayed scaling"},
        {"w=fp8+delayed save=xw", "\"save=w\" does not go with delayed scaling"},
        {"x=fp8+delayed w=fp8.e5m2+delayed", "\"w=\" is delayed with the element e5m2"},
        {"x=fp8+delayed y=fp8.e5m2+delayed", "\"y=\" is delayed with the element e5m2"},
        {"w=fp8.e5m2+delayed y=fp8+delayed", "\"y=\" is delayed with the element e4m3"},
        {"dy=fp8.e5m2+delayed dx=fp8+delayed", "\"dx=\" is delayed with the element e4m3"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        refuse(cases[i][0], strlen(cases[i][0]), OPAQ_ERROR_TEXT, cases[i][1]);
    }
    (void)plan_of(
        "x=fp8+delayed w=fp8.e5m2 y=nvfp4 dy=fp8.e5m2+delayed dx=fp8"); /* only delayed ones have to agree */
    (void)plan_of("w=fp8+delayed save=x cache");
}

static void length_limits(void) {
    char text[OPAQ_LINEAR_PLAN_TEXT_BYTES + 8];
    struct opaq_linear_plan plan;
    memset(text, 'q', sizeof text);
    refuse(text, OPAQ_LINEAR_PLAN_TEXT_BYTES - 1, OPAQ_ERROR_TEXT, "qqq...\" at position 0: unknown");
    refuse(text, OPAQ_LINEAR_PLAN_TEXT_BYTES, OPAQ_ERROR_TEXT, "640 characters, at most 639 are allowed");
    refuse(text, SIZE_MAX, OPAQ_ERROR_TEXT, "characters, at most 639");
    refuse(NULL, 0, OPAQ_ERROR_ARGUMENT, "text is NULL");
    CHECK_EQ_INT(opaq_linear_plan_parse("", 0, NULL, NULL), OPAQ_ERROR_ARGUMENT);
    /* the longest possible plan fits */
    const char *longest = "nvfp4.e2m1+columnwise+swizzle+global+rowscaled+e4m3max=448+rule=compressed-tensors";
    (void)snprintf(text, sizeof text,
                   "x=%s w=%s dy=%s y=%s dx=%s grad=xwb save=xw backward=high_precision cache bias_later "
                   "main_grad=add history=most_recent margin=-64 reduce precision=fast32 order=fixed",
                   longest, longest, longest, longest, longest);
    (void)plan_of(text);
    char *exact = malloc(5); /* no terminator: only the length counts */
    if (exact != NULL) {
        memcpy(exact, "x=fp8", 5);
        CHECK_EQ_INT(opaq_linear_plan_parse(exact, 5, &plan, NULL), OPAQ_OK);
    }
    free(exact);
}

static const struct test_case tests[] = {TEST(the_empty_text_is_the_plain_plan),
                                         TEST(every_word_is_read),
                                         TEST(order_does_not_count),
                                         TEST(errors_name_the_word_and_its_position),
                                         TEST(each_word_comes_at_most_once),
                                         TEST(contradictions_name_both_words),
                                         TEST(length_limits)};
TEST_MAIN(tests)
