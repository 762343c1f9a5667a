/* test_experts_plan.c: the text of a plan of an MLP or a mixture: every word, in any order, each at most once,
 * the numbers of every activation, errors that name the word and its position; and the outputs of the operators
 * for a plan. */
#include <stdlib.h>

#include "check.h"
#include "opaq/experts.h"
#include "support_op.h"
#include "support_spec.h"

static struct opaq_experts_plan plan_of(const char *text) {
    struct opaq_experts_plan plan;
    struct opaq_error error = {OPAQ_OK, ""};
    memset(&plan, 0, sizeof plan);
    if (opaq_experts_plan_parse(text, strlen(text), &plan, &error) != OPAQ_OK) {
        CHECK_FAIL("\"%s\": %s", text, error.text);
    }
    CHECK_EQ_STR(error.text, ""); /* a success writes no error */
    return plan;
}

static void refuse(const char *text, size_t length, enum opaq_status status, const char *part) {
    struct opaq_experts_plan plan;
    struct opaq_experts_plan untouched;
    struct opaq_error error = {OPAQ_OK, ""};
    memset(&plan, 0x5A, sizeof plan);
    memset(&untouched, 0x5A, sizeof untouched);
    const enum opaq_status found = opaq_experts_plan_parse(text, length, &plan, &error);
    if (found != status || error.status != status || strncmp(error.text, "plan: ", 6) != 0 ||
        strstr(error.text, part) == NULL) {
        CHECK_FAIL("status %d, expected %d; \"%s\" does not say \"%s\"", (int)found, (int)status, error.text,
                   part);
    }
    for (const char *p = error.text; *p != '\0'; ++p) {
        CHECK(*p >= ' ' && *p <= '~');
    }
    CHECK_BYTES(&plan, &untouched, sizeof plan, "%s: the plan", error.text);
    CHECK_EQ_INT(opaq_experts_plan_parse(text, length, &plan, NULL), status);
}

/* ---- words ---- */

static void check_form(const struct opaq_form *form, const char *expected) {
    if (expected == NULL) {
        CHECK_EQ_INT(form->kind, OPAQ_FORM_PLAIN);
        return;
    }
    CHECK_EQ_INT(form->kind, OPAQ_FORM_QUANTIZED);
    CHECK_EQ_STR(spec_text(&form->spec).text, expected);
}

static void the_empty_text_is_the_plain_plan(void) {
    const struct opaq_experts_plan plan = plan_of("");
    const struct opaq_form forms[] = {plan.x, plan.h, plan.w, plan.dy, plan.gate_up_given, plan.down_given};
    for (int i = 0; i < 6; ++i) {
        check_form(&forms[i], NULL);
    }
    CHECK(plan.activation == OPAQ_SILU && plan.gradients == 0 && plan.weights_on_input == 0);
    CHECK(plan.backward == OPAQ_BACKWARD_QUANTIZED && plan.experts == 0 && plan.first == 0);
    CHECK(plan.limit == -1.0f && plan.alpha == 1.0f && plan.beta == 0.0f);
}

static void every_word_is_read(void) {
    struct opaq_experts_plan plan =
        plan_of("x=nvfp4+rht h=fp8row w=mxfp8+both dy=nvfp4+rht+sr act=silu_clamp limit=2.5 alpha=0.5 "
                "beta=-3 grad=xrgdbc backward=dequantized experts=256 first=32 weights=input");
    check_form(&plan.x, "nvfp4+rht");
    check_form(&plan.h, "fp8row");
    check_form(&plan.w, "mxfp8+both");
    check_form(&plan.dy, "nvfp4+rht+sr");
    check_form(&plan.gate_up_given, NULL);
    check_form(&plan.down_given, NULL);
    CHECK_EQ_INT(plan.activation, OPAQ_SILU_CLAMP);
    CHECK(plan.limit == 2.5f && plan.alpha == 0.5f && plan.beta == -3.0f);
    CHECK_EQ_INT(plan.gradients, 63);
    CHECK_EQ_INT(plan.backward, OPAQ_BACKWARD_DEQUANTIZED);
    CHECK(plan.experts == 256 && plan.first == 32 && plan.weights_on_input == 1);
    CHECK_EQ_INT(plan.precision, OPAQ_PRECISION_EXACT);
    static const char *const precisions[] = {"precision=exact", "precision=near", "precision=fast",
                                             "precision=fast32"};
    for (int i = 0; i < 4; ++i) {
        CHECK_EQ_INT(plan_of(precisions[i]).precision, i);
    }
    CHECK_EQ_INT(plan.order, OPAQ_ORDER_FIXED);
    CHECK_EQ_INT(plan_of("order=any").order, OPAQ_ORDER_ANY);
    CHECK_EQ_INT(plan_of("order=fixed").order, OPAQ_ORDER_FIXED);
    plan = plan_of("gate_up_given=nvfp4+rowscaled down_given=mxfp4+swizzle x=fp8+delayed h=fp8+delayed "
                   "backward=high_precision");
    check_form(&plan.gate_up_given, "nvfp4+rowscaled");
    check_form(&plan.down_given, "mxfp4+swizzle");
    check_form(&plan.x, "fp8+delayed");
    check_form(&plan.h, "fp8+delayed");
    check_form(&plan.w, NULL);
    CHECK_EQ_INT(plan.backward, OPAQ_BACKWARD_HIGH_PRECISION);
    plan = plan_of("gate_up_given=fp8+delayed");
    check_form(&plan.gate_up_given, "fp8+delayed"); /* unchanged */
    CHECK_EQ_INT(plan_of("down_given=fp8 grad=xrbc").gradients,
                 OPAQ_EXPERTS_X | OPAQ_EXPERTS_ROUTER | OPAQ_EXPERTS_GATE_UP_BIAS | OPAQ_EXPERTS_DOWN_BIAS);
}

static void letters_are_bits(void) {
    static const struct {
        const char *text;
        int bit;
    } letters[] = {{"grad=x", OPAQ_EXPERTS_X},
                   {"grad=r", OPAQ_EXPERTS_ROUTER},
                   {"grad=g", OPAQ_EXPERTS_GATE_UP},
                   {"grad=d", OPAQ_EXPERTS_DOWN},
                   {"grad=b", OPAQ_EXPERTS_GATE_UP_BIAS},
                   {"grad=c", OPAQ_EXPERTS_DOWN_BIAS}};
    for (int i = 0; i < 6; ++i) {
        CHECK_EQ_INT(plan_of(letters[i].text).gradients, letters[i].bit);
    }
    CHECK_EQ_INT(plan_of("grad=cbdgrx").gradients, 63);
}

/* All words, in many orders: the same value each time. */
static void order_does_not_count(void) {
    static const char *const words[] = {
        "x=fp8",   "w=mxfp8",       "dy=nvfp4+sr",         "h=fp8row", "act=swiglu_oai",
        "limit=3", "alpha=1.5",     "beta=0.25",           "grad=gx",  "experts=9",
        "first=8", "weights=input", "backward=dequantized"};
    enum { WORDS = sizeof words / sizeof words[0] };
    struct opaq_experts_plan first;
    memset(&first, 0, sizeof first);
    for (int rotation = 0; rotation < WORDS; ++rotation) {
        for (int step = 1; step < WORDS; ++step) { /* 13 words: every step reaches them all */
            char text[OPAQ_EXPERTS_PLAN_TEXT_BYTES] = "";
            for (int i = 0; i < WORDS; ++i) {
                const size_t length = strlen(text);
                (void)snprintf(text + length, sizeof text - length, "%s%s", i ? " " : "",
                               words[(rotation + i * step) % WORDS]);
            }
            const struct opaq_experts_plan plan = plan_of(text);
            if (rotation == 0 && step == 1) {
                first = plan;
            }
            CHECK_BYTES(&plan, &first, sizeof plan, "%s", text);
        }
    }
}

/* ---- activations and their numbers ---- */

static const struct {
    const char *name;
    bool gated, takes_limit, takes_factors;
    float limit, alpha, beta; /* without words; limit 0: a limit must be given */
} known[] = {{"silu", true, false, false, -1, 1, 0},
             {"silu_clamp", true, true, true, 0, 1, 0},
             {"swiglu_oai", true, true, true, 7, 1.702f, 1},
             {"swiglu_oai_packed", true, true, true, 7, 1.702f, 1},
             {"silu_step", true, true, false, 0, 1, 0},
             {"gelu", true, false, false, -1, 1, 0},
             {"gelu_tanh", true, false, false, -1, 1, 0},
             {"relu2", true, false, false, -1, 1, 0},
             {"silu_no_mul", false, false, false, -1, 1, 0},
             {"gelu_no_mul", false, false, false, -1, 1, 0},
             {"gelu_tanh_no_mul", false, false, false, -1, 1, 0},
             {"relu2_no_mul", false, false, false, -1, 1, 0}};

static void activations_have_names(void) {
    CHECK_EQ_INT(sizeof known / sizeof known[0], OPAQ_ACTIVATION_COUNT);
    for (int i = 0; i < OPAQ_ACTIVATION_COUNT; ++i) {
        CHECK_EQ_STR(opaq_activation_name((enum opaq_activation)i), known[i].name);
        CHECK_EQ_INT(opaq_activation_is_gated((enum opaq_activation)i), known[i].gated);
    }
    CHECK(opaq_activation_name((enum opaq_activation)OPAQ_ACTIVATION_COUNT) == NULL);
    CHECK(opaq_activation_name((enum opaq_activation) - 1) == NULL);
}

static void activations_have_numbers(void) {
    for (int i = 0; i < OPAQ_ACTIVATION_COUNT; ++i) {
        char text[96];
        char expected[96];
        (void)snprintf(text, sizeof text, "act=%s", known[i].name);
        if (known[i].limit == 0.0f) {
            (void)snprintf(expected, sizeof expected, "act=%s does not go without limit=", known[i].name);
            refuse(text, strlen(text), OPAQ_ERROR_TEXT, expected);
        } else {
            const struct opaq_experts_plan plan = plan_of(text);
            CHECK_EQ_INT(plan.activation, i);
            CHECK(plan.limit == known[i].limit && plan.alpha == known[i].alpha && plan.beta == known[i].beta);
        }
        (void)snprintf(text, sizeof text, "limit=0.125 act=%s", known[i].name);
        if (known[i].takes_limit) {
            CHECK(plan_of(text).limit == 0.125f);
        } else {
            (void)snprintf(expected, sizeof expected, "plan: limit=0.125 does not go with act=%s",
                           known[i].name);
            refuse(text, strlen(text), OPAQ_ERROR_TEXT, expected);
        }
        for (int factor = 0; factor < 2; ++factor) {
            (void)snprintf(text, sizeof text, "act=%s %s%s=-2.5", known[i].name,
                           known[i].takes_limit ? "limit=1 " : "", factor ? "beta" : "alpha");
            if (known[i].takes_factors) {
                const struct opaq_experts_plan plan = plan_of(text);
                CHECK(plan.alpha == (factor ? known[i].alpha : -2.5f));
                CHECK(plan.beta == (factor ? -2.5f : known[i].beta));
            } else {
                (void)snprintf(expected, sizeof expected, "plan: alpha= and beta= do not go with act=%s",
                               known[i].name);
                refuse(text, strlen(text), OPAQ_ERROR_TEXT, expected);
            }
        }
    }
}

static void limits_of_numbers(void) {
    static const struct {
        const char *text;
        float value;
    } good[] = {{"7", 7},
                {"1.702", 1.702f},
                {"-0", -0.0f},
                {"0", 0},
                {"-1e-3", -1e-3f},
                {"3.4028234e38", 3.4028234e38f},
                {"-3.4028234e38", -3.4028234e38f},
                {"1e-45", 0x1p-149f},
                {"1e-60", 0},
                {"0000000000000000000000000000000000000001.5", 1.5f}};
    for (size_t i = 0; i < sizeof good / sizeof good[0]; ++i) {
        char text[128];
        (void)snprintf(text, sizeof text, "act=swiglu_oai beta=%s", good[i].text);
        CHECK(plan_of(text).beta == good[i].value);
        (void)snprintf(text, sizeof text, "act=swiglu_oai alpha=%s", good[i].text);
        CHECK(plan_of(text).alpha == good[i].value);
        (void)snprintf(text, sizeof text, "act=swiglu_oai limit=%s", good[i].text);
        if (good[i].value > 0) {
            CHECK(plan_of(text).limit == good[i].value);
        } else {
            refuse(text, strlen(text), OPAQ_ERROR_TEXT,
                   "does not go with act=swiglu_oai, which needs one above 0");
        }
    }
    static const char *const bad[] = {"",      "-",   "+1",  "--1", "1.",  ".5",   "1e",  "1e+5", "1e39",
                                      "-4e38", "nan", "inf", "0x1", "1,5", "1.5f", "1 5", "1-2",  "1e99999"};
    static const char *const names[] = {"limit", "alpha", "beta"};
    for (size_t i = 0; i < sizeof bad / sizeof bad[0]; ++i) {
        for (int n = 0; n < 3; ++n) {
            char text[96];
            char expected[96];
            (void)snprintf(text, sizeof text, "act=swiglu_oai %s=%s", names[n], bad[i]);
            (void)snprintf(expected, sizeof expected,
                           "\"%s=%s\" at position 15: expected a number such as 7 or 1.702", names[n], bad[i]);
            refuse(text, strlen(text), OPAQ_ERROR_TEXT, strchr(bad[i], ' ') ? "at position" : expected);
        }
    }
    char many[160]; /* digits beyond the precision */
    (void)snprintf(many, sizeof many, "act=swiglu_oai beta=%0128d", 1);
    refuse(many, strlen(many), OPAQ_ERROR_TEXT, "at position 15: expected a number");
    CHECK_EQ_INT(plan_of("experts=1").experts, 1);
    CHECK_EQ_INT(plan_of("experts=2147483647").experts, INT32_MAX);
    CHECK_EQ_INT(plan_of("first=2147483647").first, INT32_MAX);
    CHECK_EQ_INT(plan_of("first=0 experts=1").first, 0);
    CHECK_EQ_INT(plan_of("experts=0000000002 first=1").experts, 2);
    static const char *const integers[] = {"",   "-", "2147483648", "-1",          "1.0",
                                           "+1", "x", "0x1",        "99999999999", "1e3"};
    for (size_t i = 0; i < sizeof integers / sizeof integers[0]; ++i) {
        char text[64];
        char expected[128];
        (void)snprintf(text, sizeof text, "experts=%s", integers[i]);
        (void)snprintf(expected, sizeof expected,
                       "\"experts=%s\" at position 0: expected an integer from 1 to 2147483647", integers[i]);
        refuse(text, strlen(text), OPAQ_ERROR_TEXT, expected);
        (void)snprintf(text, sizeof text, "x=fp8 first=%s", integers[i]);
        (void)snprintf(expected, sizeof expected,
                       "\"first=%s\" at position 6: expected an integer from 0 to 2147483647", integers[i]);
        refuse(text, strlen(text), OPAQ_ERROR_TEXT, expected);
    }
    refuse("experts=0", 9, OPAQ_ERROR_TEXT, "\"experts=0\" at position 0: expected an integer from 1 to");
}

/* ---- errors ---- */

static void errors_name_the_word_and_its_position(void) {
    static const char *const cases[][2] = {
        {" ", "\"\" at position 0: expected a word"},
        {"act=silu ", "\"\" at position 9: expected a word"},
        {"x=fp8  w=fp8", "\"\" at position 6: expected a word"},
        {"act", "\"act\" at position 0: unknown; expected act=, limit=, alpha=, beta=, x=, h=, w=, dy=, "
                "gate_up_given=, down_given=, grad=, backward=, precision=, order=, experts=, first= or "
                "weights=input"},
        {"limit", "\"limit\" at position 0: unknown"},
        {"alpha", "\"alpha\" at position 0: unknown"},
        {"beta", "\"beta\" at position 0: unknown"},
        {"x", "\"x\" at position 0: unknown"},
        {"grad", "\"grad\" at position 0: unknown"},
        {"experts", "\"experts\" at position 0: unknown"},
        {"first", "\"first\" at position 0: unknown"},
        {"backward", "\"backward\" at position 0: unknown"},
        {"weights", "\"weights\" at position 0: unknown"},
        {"weights=", "\"weights=\" at position 0: unknown"},
        {"weights=output", "\"weights=output\" at position 0: unknown"},
        {"=fp8", "\"=fp8\" at position 0: unknown"},
        {"x=fp8 z=fp8", "\"z=fp8\" at position 6: unknown"},
        {"X=fp8", "\"X=fp8\" at position 0: unknown"},
        {"act=",
         "\"act=\" at position 0: expected silu, silu_clamp, swiglu_oai, swiglu_oai_packed, silu_step, gelu, "
         "gelu_tanh, relu2, silu_no_mul, gelu_no_mul, gelu_tanh_no_mul or relu2_no_mul"},
        {"act=Silu", "\"act=Silu\" at position 0: expected silu"},
        {"act=silu_", "\"act=silu_\" at position 0: expected silu"},
        {"act=sil", "\"act=sil\" at position 0: expected silu"},
        {"act=silu=silu", "\"act=silu=silu\" at position 0: expected silu"},
        {"x=", "\"x=\" at position 0: "},
        {"grad=x w=fp9", "\"w=fp9\" at position 7: spec \"fp9\""},
        {"gate_up_given=nvfp4+rth",
         "\"gate_up_given=nvfp4+rth\" at position 0: spec \"nvfp4+rth\": unknown option "
         "\"rth\" at position 6"},
        {"h=nvfp4+2d+rht", "\"2d\" does not go with \"rht\""},
        {"grad=", "\"grad=\" at position 0: expected at least one letter"},
        {"grad=xx", "\"grad=xx\" at position 0: expected letters of xrgdbc, each once"},
        {"grad=xw", "\"grad=xw\" at position 0: expected letters of xrgdbc, each once"},
        {"backward=", "\"backward=\" at position 0: expected high_precision or dequantized"},
        {"backward=quantized", "expected high_precision or dequantized"},
        {"precision=", "\"precision=\" at position 0: expected exact, near, fast or fast32"},
        {"precision=faster", "\"precision=faster\" at position 0: expected exact, near, fast or fast32"},
        {"precision", "\"precision\" at position 0: unknown"},
        {"order=", "\"order=\" at position 0: expected fixed or any"},
        {"order=Any", "\"order=Any\" at position 0: expected fixed or any"},
        {"act=sil\xC3\xA9", "\"act=sil??\" at position 0: expected silu"},
        {"act=silu\tx=fp8", "\"act=silu?x=fp8\" at position 0: expected silu"},
        /* words of linear's plan */
        {"x_given=fp8", "\"x_given=fp8\" at position 0: unknown"},
        {"w_given=fp8", "\"w_given=fp8\" at position 0: unknown"},
        {"dy_given=fp8", "\"dy_given=fp8\" at position 0: unknown"},
        {"y=fp8", "\"y=fp8\" at position 0: unknown"},
        {"dx=fp8", "\"dx=fp8\" at position 0: unknown"},
        {"save=x", "\"save=x\" at position 0: unknown"},
        {"cache", "\"cache\" at position 0: unknown"},
        {"bias_later", "\"bias_later\" at position 0: unknown"},
        {"main_grad=add", "\"main_grad=add\" at position 0: unknown"},
        {"history=max", "\"history=max\" at position 0: unknown"},
        {"margin=1", "\"margin=1\" at position 0: unknown"},
        {"reduce", "\"reduce\" at position 0: unknown"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        refuse(cases[i][0], strlen(cases[i][0]), OPAQ_ERROR_TEXT, cases[i][1]);
    }
    refuse("x=fp8\0", 6, OPAQ_ERROR_TEXT, "\"x=fp8?\" at position 0: ");
    refuse("act=silu\0", 9, OPAQ_ERROR_TEXT, "\"act=silu?\" at position 0: expected silu");
    refuse("grad=x\0", 7, OPAQ_ERROR_TEXT, "expected letters of xrgdbc, each once");
    refuse("experts=5\0", 10, OPAQ_ERROR_TEXT, "expected an integer");
    refuse("beta=5\0", 7, OPAQ_ERROR_TEXT, "expected a number");
}

static void each_word_comes_at_most_once(void) {
    static const char *const words[] = {"x=fp8",
                                        "h=fp8",
                                        "w=fp8",
                                        "dy=fp8",
                                        "gate_up_given=mxfp8",
                                        "act=silu",
                                        "limit=1",
                                        "alpha=1",
                                        "beta=1",
                                        "down_given=mxfp8",
                                        "grad=x",
                                        "experts=4",
                                        "first=1",
                                        "precision=near",
                                        "order=any",
                                        "weights=input",
                                        "backward=dequantized"};
    for (size_t i = 0; i < sizeof words / sizeof words[0]; ++i) {
        char text[128];
        char expected[128];
        const char *between = strncmp(words[i], "first", 5) == 0 ? "experts=5" : "first=2";
        (void)snprintf(text, sizeof text, "%s %s %s", words[i], between, words[i]);
        (void)snprintf(expected, sizeof expected, "\"%s\" at position %zu: came before", words[i],
                       strlen(text) - strlen(words[i]));
        refuse(text, strlen(text), OPAQ_ERROR_TEXT, expected);
    }
    refuse("act=silu act=gelu", 17, OPAQ_ERROR_TEXT, "\"act=gelu\" at position 9: came before");
}

static void contradictions_name_both_words(void) {
    static const char *const cases[][2] = {
        {"w=fp8 gate_up_given=fp8", "\"w=\" does not go with \"gate_up_given=\""},
        {"down_given=fp8 w=fp8", "\"w=\" does not go with \"down_given=\""},
        {"down_given=fp8 w=fp8 gate_up_given=fp8", "\"w=\" does not go with \"gate_up_given=\""},
        {"gate_up_given=fp8 grad=g", "weights that come quantized have no gradient (g, d)"},
        {"gate_up_given=fp8 grad=xd", "weights that come quantized have no gradient (g, d)"},
        {"down_given=fp8 grad=g", "weights that come quantized have no gradient (g, d)"},
        {"experts=4 first=4", "first=4 does not go with experts=4"},
        {"first=9 experts=1", "first=9 does not go with experts=1"},
    };
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        refuse(cases[i][0], strlen(cases[i][0]), OPAQ_ERROR_TEXT, cases[i][1]);
    }
    static const char *const delayed[] = {"w=fp8+delayed", "dy=fp8+delayed", "x=fp8+delayed grad=x",
                                          "h=fp8.e5m2+delayed grad=r"};
    for (int i = 0; i < 4; ++i) {
        refuse(delayed[i], strlen(delayed[i]), OPAQ_ERROR_UNSUPPORTED,
               "delayed scaling goes with scales that are given for x and h, without gradients");
    }
    (void)plan_of("first=9"); /* then there are as many experts as the stack's leading dimension */
    (void)plan_of("gate_up_given=nvfp4 grad=xrbc");
    (void)plan_of("gate_up_given=nvfp4"); /* down is then plain */
}

static void length_limits(void) {
    char text[OPAQ_EXPERTS_PLAN_TEXT_BYTES + 8];
    struct opaq_experts_plan plan;
    memset(text, 'q', sizeof text);
    refuse(text, OPAQ_EXPERTS_PLAN_TEXT_BYTES - 1, OPAQ_ERROR_TEXT, "qqq...\" at position 0: unknown");
    refuse(text, OPAQ_EXPERTS_PLAN_TEXT_BYTES, OPAQ_ERROR_TEXT, "960 characters, at most 959 are allowed");
    refuse(text, SIZE_MAX, OPAQ_ERROR_TEXT, "characters, at most 959");
    refuse(NULL, 0, OPAQ_ERROR_ARGUMENT, "text is NULL");
    CHECK_EQ_INT(opaq_experts_plan_parse("", 0, NULL, NULL), OPAQ_ERROR_ARGUMENT);
    /* the longest realistic plan fits */
    const char *longest = "nvfp4+columnwise+swizzle+rowscaled+4over6=mse+e4m3max=256";
    (void)snprintf(text, sizeof text,
                   "x=%s h=%s dy=%s gate_up_given=%s down_given=%s grad=xrbc backward=high_precision "
                   "act=swiglu_oai_packed limit=7.123456 alpha=-1.2345678e-12 beta=-1.2345678e-12 "
                   "experts=2147483647 first=2147483646 weights=input",
                   longest, longest, longest, longest, longest);
    (void)plan_of(text);
    char *exact = malloc(8); /* no terminator: only the length counts */
    if (exact != NULL) {
        memcpy(exact, "act=gelu", 8);
        CHECK_EQ_INT(opaq_experts_plan_parse(exact, 8, &plan, NULL), OPAQ_OK);
    }
    free(exact);
}

/* ---- outputs by a plan ---- */

static int argument_place(const struct opaq_op *op, const char *name) {
    int i = 0;
    while (strcmp(op->argument[i].name, name) != 0) {
        ++i;
    }
    return i;
}

static void gradients_are_the_outputs(void) {
    static const char letters[2][7] = {"xgdbc", "xrgdbc"};
    for (int is_moe = 0; is_moe < 2; ++is_moe) {
        const struct opaq_op *op = opaq_op_find(is_moe ? "moe_backward" : "mlp_backward");
        const int count = is_moe ? 6 : 5;
        for (int set = 0; set < 1 << count; ++set) {
            struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
            char text[16] = "";
            for (int i = 0; i < count; ++i) {
                if (set >> i & 1) {
                    const size_t length = strlen(text);
                    (void)snprintf(text + length, sizeof text - length, "%s%c",
                                   length ? "" : "grad=", letters[is_moe][i]);
                }
            }
            memset(values, 0, sizeof values);
            values[argument_place(op, "plan")] = op_text_value(text);
            for (int i = 0; i < count; ++i) {
                struct opaq_form form;
                CHECK_EQ_INT(opaq_op_form(op, values, i, &form, NULL), OPAQ_OK);
                CHECK_EQ_INT(form.kind, set >> i & 1 ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT);
            }
        }
    }
}

static void forms_of_bad_plans_say_so(void) {
    static const char *const names[] = {"mlp_backward", "moe_backward"};
    for (int i = 0; i < 2; ++i) {
        const struct opaq_op *op = opaq_op_find(names[i]);
        struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT];
        struct opaq_form form;
        struct opaq_error error = {OPAQ_OK, ""};
        char expected[96];
        memset(values, 0, sizeof values);
        values[argument_place(op, "plan")] = op_text_value("x=fp8 grad=q");
        (void)snprintf(expected, sizeof expected, "%s: plan: \"grad=q\" at position 6: ", names[i]);
        for (int again = 0; again < 2; ++again) { /* invalid texts are not kept */
            CHECK_EQ_INT(opaq_op_form(op, values, 0, &form, &error), OPAQ_ERROR_TEXT);
            CHECK(strncmp(error.text, expected, strlen(expected)) == 0);
        }
    }
}

static const struct test_case tests[] = {TEST(the_empty_text_is_the_plain_plan),
                                         TEST(every_word_is_read),
                                         TEST(letters_are_bits),
                                         TEST(order_does_not_count),
                                         TEST(activations_have_names),
                                         TEST(activations_have_numbers),
                                         TEST(limits_of_numbers),
                                         TEST(errors_name_the_word_and_its_position),
                                         TEST(each_word_comes_at_most_once),
                                         TEST(contradictions_name_both_words),
                                         TEST(length_limits),
                                         TEST(gradients_are_the_outputs),
                                         TEST(forms_of_bad_plans_say_so)};
TEST_MAIN(tests)
