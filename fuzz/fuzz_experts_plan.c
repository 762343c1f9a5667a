/* fuzz_experts_plan.c: any bytes as the text of a plan of an MLP or a mixture, or words joined to one. An error
 * is one printable line; an accepted plan is the same when it is parsed again and in any order of its words,
 * its numbers are valid for its activation, and its outputs are its gradients. libFuzzer; the first byte
 * chooses. */
#include "fuzz_words.h"

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size);

static int same_plan(const struct opaq_experts_plan *a, const struct opaq_experts_plan *b) {
    return same_form(&a->x, &b->x) && same_form(&a->h, &b->h) && same_form(&a->w, &b->w) &&
           same_form(&a->dy, &b->dy) && same_form(&a->gate_up_given, &b->gate_up_given) &&
           same_form(&a->down_given, &b->down_given) && a->activation == b->activation &&
           a->gradients == b->gradients && a->backward == b->backward && a->precision == b->precision &&
           a->order == b->order && a->weights_on_input == b->weights_on_input && a->limit == b->limit &&
           a->alpha == b->alpha && a->beta == b->beta && a->experts == b->experts && a->first == b->first;
}

static void expect_any_order(const char *text, size_t length, const struct opaq_experts_plan *plan) {
    char reversed[OPAQ_EXPERTS_PLAN_TEXT_BYTES];
    struct opaq_experts_plan same;
    reverse_words(text, length, reversed);
    expect(opaq_experts_plan_parse(reversed, length, &same, NULL) == OPAQ_OK && same_plan(plan, &same));
}

/* The rules of docs/experts.md about a plan's values. */
static void expect_consistent(const struct opaq_experts_plan *plan) {
    const int32_t act = plan->activation;
    const int has_limit = act >= OPAQ_SILU_CLAMP && act <= OPAQ_SILU_STEP;
    const int given = is_quantized(&plan->gate_up_given) || is_quantized(&plan->down_given);
    expect(act >= 0 && act < OPAQ_ACTIVATION_COUNT);
    expect(has_limit ? plan->limit > 0.0f : plan->limit == -1.0f);
    expect((has_limit && act != OPAQ_SILU_STEP) || (plan->alpha == 1.0f && plan->beta == 0.0f));
    expect(plan->alpha == plan->alpha && plan->beta == plan->beta);
    expect(plan->gradients >= 0 && plan->gradients < 64);
    expect(plan->precision >= OPAQ_PRECISION_EXACT && plan->precision <= OPAQ_PRECISION_FAST32);
    expect(!given ||
           (!is_quantized(&plan->w) && (plan->gradients & (OPAQ_EXPERTS_GATE_UP | OPAQ_EXPERTS_DOWN)) == 0));
    expect(plan->experts >= 0 && plan->experts <= INT32_MAX && plan->first >= 0 && plan->first <= INT32_MAX);
    expect(plan->experts == 0 || plan->first < plan->experts);
    const struct opaq_form *forms[] = {&plan->x,         &plan->h, &plan->w, &plan->dy, &plan->gate_up_given,
                                       &plan->down_given};
    for (int i = 0; i < 6; ++i) {
        expect(forms[i]->kind == OPAQ_FORM_PLAIN ||
               (is_quantized(forms[i]) && opaq_spec_check(&forms[i]->spec, NULL) == OPAQ_OK));
    }
}

static int plan_argument(const struct opaq_op *op) {
    int i = 0;
    while (strcmp(op->argument[i].name, "plan") != 0) {
        ++i;
    }
    return i;
}

/* The forms of a backward's outputs, or the error. */
static void expect_forms(const char *name, const char *text, size_t length, enum opaq_status parsed,
                         int32_t gradients) {
    static const int32_t without_router[] = {OPAQ_EXPERTS_X, OPAQ_EXPERTS_GATE_UP, OPAQ_EXPERTS_DOWN,
                                             OPAQ_EXPERTS_GATE_UP_BIAS, OPAQ_EXPERTS_DOWN_BIAS};
    const struct opaq_op *op = opaq_op_find(name);
    struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {{NULL, NULL, NULL, 0, 0}};
    values[plan_argument(op)] = (struct opaq_value){.text = text, .count = (int64_t)length};
    for (int i = 0; i < op->output_count; ++i) {
        const int32_t bit = op->output_count == 6 ? 1 << i : without_router[i];
        struct opaq_form form;
        struct opaq_error error;
        expect(opaq_op_form(op, values, i, &form, &error) == parsed);
        if (parsed == OPAQ_OK) {
            expect(form.kind == (gradients & bit ? OPAQ_FORM_PLAIN : OPAQ_FORM_ABSENT));
        } else {
            expect_refusal(parsed, &error, name);
        }
    }
}

static void fuzz_text(const char *text, size_t length) {
    struct opaq_experts_plan plan = {.gradients = 0};
    struct opaq_experts_plan again;
    struct opaq_error error;
    const enum opaq_status status = opaq_experts_plan_parse(text, length, &plan, &error);
    expect(opaq_experts_plan_parse(text, length, &again, NULL) == status);
    if (status == OPAQ_OK) {
        expect(same_plan(&plan, &again));
        expect_any_order(text, length, &plan);
        expect_consistent(&plan);
    } else {
        expect(status == OPAQ_ERROR_TEXT || status == OPAQ_ERROR_UNSUPPORTED);
        expect_refusal(status, &error, "plan: ");
    }
    expect_forms("moe_backward", text, length, status, plan.gradients);
    expect_forms("mlp_backward", text, length, status, plan.gradients);
}

/* Mostly valid words, so that complete plans result. */
static const char *const words[] = {"act=silu",
                                    "act=silu_clamp",
                                    "act=swiglu_oai",
                                    "act=swiglu_oai_packed",
                                    "act=silu_step",
                                    "act=gelu",
                                    "act=gelu_tanh",
                                    "act=relu2",
                                    "act=silu_no_mul",
                                    "act=gelu_no_mul",
                                    "act=gelu_tanh_no_mul",
                                    "act=relu2_no_mul",
                                    "act=",
                                    "limit=7",
                                    "limit=0.125",
                                    "limit=0",
                                    "limit=-1",
                                    "alpha=1.702",
                                    "alpha=-1e-3",
                                    "beta=1",
                                    "beta=nan",
                                    "x=fp8",
                                    "x=fp8+delayed",
                                    "x=nvfp4+rht",
                                    "h=mxfp4+sr",
                                    "h=fp8.e5m2+delayed",
                                    "h=",
                                    "w=fp8row",
                                    "w=nvfp4+2d",
                                    "w=fp8+delayed",
                                    "gate_up_given=nvfp4+rowscaled",
                                    "gate_up_given=mxfp8+both",
                                    "down_given=fp8blk2",
                                    "down_given=mxfp4",
                                    "dy=fp8.e5m2",
                                    "dy=nvfp4+rht+sr",
                                    "grad=xrgdbc",
                                    "grad=x",
                                    "grad=rbc",
                                    "grad=g",
                                    "grad=",
                                    "backward=high_precision",
                                    "backward=dequantized",
                                    "backward=no",
                                    "experts=8",
                                    "experts=2147483647",
                                    "experts=0",
                                    "first=0",
                                    "first=7",
                                    "first=99999999999",
                                    "weights=input",
                                    "precision=near",
                                    "precision=fast32",
                                    "precision=",
                                    "order=any",
                                    "order=all",
                                    "weights=output",
                                    "save=x",
                                    "nothing",
                                    ""};

int LLVMFuzzerTestOneInput(const uint8_t *data, size_t size) {
    size_t length = 0;
    char *text = text_of_input(data, size, words, sizeof words / sizeof words[0], &length);
    if (text != NULL) {
        fuzz_text(text, length);
        free(text);
    }
    return 0;
}
