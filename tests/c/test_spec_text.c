/* test_spec_text.c: one value, one text. Every valid spec is printed and parsed again, under any locale,
 * rounding mode and flush-to-zero setting; combinations that docs/spec.md forbids are refused. Invalid texts:
 * test_spec_errors.c. */
#include <fenv.h>
#include <locale.h>
#include <stdlib.h>

#include "check.h"
#include "support_float.h"
#include "support_spec.h"

/* 1 if the spec equals its parsed text. */
static int round_trips(const struct opaq_spec *spec, const char *how) {
    char text[OPAQ_SPEC_TEXT_BYTES];
    struct opaq_spec back;
    struct opaq_error error = {OPAQ_OK, ""};
    if (opaq_spec_print(spec, text, sizeof text, &error) != OPAQ_OK) {
        return CHECK_FAIL("%s: print: %s", how, error.text);
    }
    if (opaq_spec_parse(text, strlen(text), &back, &error) != OPAQ_OK) {
        return CHECK_FAIL("%s: parse: %s", how, error.text);
    }
    if (!opaq_spec_equal(spec, &back) || opaq_spec_hash(spec) != opaq_spec_hash(&back)) {
        return CHECK_FAIL("%s: \"%s\" read back is \"%s\"", how, text, spec_text(&back).text);
    }
    return 1;
}

static void every_spec_comes_back(void) {
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    for (int i = 0; i < list.count; ++i) {
        CHECK_EQ_INT(opaq_spec_check(&list.spec[i], NULL), OPAQ_OK);
        (void)round_trips(&list.spec[i], "plain");
    }
    printf("  %d specs\n", list.count);
    spec_list_free(&list);
}

static int compare_texts(const void *a, const void *b) { return strcmp(a, b); }

static void texts_are_unique(void) {
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    struct spec_text *texts = malloc((size_t)list.count * sizeof *texts);
    for (int i = 0; texts != NULL && i < list.count; ++i) {
        texts[i] = spec_text(&list.spec[i]);
    }
    qsort(texts, (size_t)list.count, sizeof *texts, compare_texts);
    for (int i = 1; i < list.count; ++i) {
        if (strcmp(texts[i - 1].text, texts[i].text) == 0) {
            CHECK_FAIL("two specs print as \"%s\"", texts[i].text);
        }
    }
    free(texts);
    spec_list_free(&list);
}

/* The library's check, compared with the tables of docs/spec.md on valid and invalid fields. */
static void check_agrees_with_documentation(void) {
    struct opaq_spec s;
    memset(&s, 0, sizeof s);
    long long seen = 0;
    for (int fields = 0; fields < 8 * 8 * 5 * 6; ++fields) {
        for (int options = 0; options < 512; ++options) {
            s.format = (uint8_t)(fields % 8);
            s.element = (uint8_t)(fields / 8 % 8);
            s.usage = (uint8_t)(fields / 64 % 5);
            s.rule = (uint8_t)(fields / 320);
            s.options = (uint16_t)options;
            s.hadamard_mask = options & OPAQ_HADAMARD ? 0x1234 : 0;
            s.error_mode = options & OPAQ_4OVER6 ? OPAQ_ERROR_MODE_MSE : 0;
            s.e4m3_max = s.format == OPAQ_NVFP4 ? 448 : 0;
            if ((opaq_spec_check(&s, NULL) == OPAQ_OK) != spec_is_valid(&s)) {
                CHECK_FAIL("format %d element %d usage %d rule %d options 0x%x: check says %s", s.format,
                           s.element, s.usage, s.rule, s.options, spec_is_valid(&s) ? "no" : "yes");
            }
            ++seen;
        }
    }
    printf("  %lld combinations\n", seen);
}

static void check_parameters_against_documentation(void) {
    static const uint16_t maxima[] = {0, 1, 256, 448, 65535};
    const float epsilons[] = {0.0f,      -0.0f,      1.0f,          -1.0f,
                              0x1p-149f, -0x1p-149f, support_nan(), support_infinity()};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count; ++i) {
        for (int k = 0; k < 2 * 4 * 5 * 8 * 2; ++k) {
            struct opaq_spec s = list.spec[i];
            s.hadamard_mask = k % 2 ? 0x00FF : 0;
            s.error_mode = (uint8_t)(k / 2 % 4);
            s.e4m3_max = maxima[k / 8 % 5];
            s.epsilon = epsilons[k / 40 % 8];
            s.reserved = (uint8_t)(k / 320);
            if ((opaq_spec_check(&s, NULL) == OPAQ_OK) != spec_is_valid(&s)) {
                CHECK_FAIL("%s with mask 0x%x mode %d e4m3max %d eps %g reserved %d: check says %s",
                           spec_text(&list.spec[i]).text, s.hadamard_mask, s.error_mode, s.e4m3_max,
                           (double)s.epsilon, s.reserved, spec_is_valid(&s) ? "no" : "yes");
            }
        }
    }
    spec_list_free(&list);
}

static const struct {
    const char *canonical;
    const char *other;
} aliases[] = {
    {"fp8", "fp8.e4m3"},
    {"nvfp4+2d", "NVFP4+2D"},
    {"nvfp4+4over6=mse", "Nvfp4+4OVER6=MSE"},
    {"mxfp8.e5m2+columnwise+rule=ocp", "MXFP8.E5M2+Columnwise+RULE=OCP"},
    {"fp8", "fp8+rowwise"},
    {"fp8", "fp8+rule=te"},
    {"fp8", "fp8+eps=0"},
    {"fp8", "fp8.e4m3+rule=te+eps=0.000e0+rowwise"},
    {"fp8", "fp8+eps=0e-5"},
    {"fp8.e5m2+columnwise+pow2+sr+eps=2.5e-1", "fp8.e5m2+eps=0.25+sr+pow2+columnwise"},
    {"fp8.e5m2+columnwise+pow2+sr+eps=2.5e-1", "fp8.e5m2+sr+eps=25e-2+columnwise+pow2"},
    {"fp8row+eps=1e1", "fp8row+eps=10"},
    {"fp8row+eps=1.5", "fp8row+eps=0001.5000"},
    {"fp8blk1+both+pow2+eps=1e-12", "fp8blk1+eps=0.000000000001+both+pow2"},
    {"mxfp8+rule=ocp", "mxfp8.e4m3+rule=ocp"},
    {"mxfp8+2d+sr+swizzle", "mxfp8+swizzle+sr+2d"},
    {"mxfp4", "mxfp4.e2m1+rowwise"},
    {"nvfp4", "nvfp4+e4m3max=448"},
    {"nvfp4", "nvfp4.e2m1+rule=te+e4m3max=448+rowwise"},
    {"nvfp4+rht", "nvfp4+rht=0xd7e8"},
    {"nvfp4+rht=0x0000", "nvfp4+rht=0x0000+rowwise"},
    {"nvfp4+both+rht+sr+rowscaled+swizzle", "nvfp4+swizzle+rowscaled+sr+rht+both"},
    {"nvfp4+rowscaled+swizzle+global+rule=modelopt", "nvfp4+rule=modelopt+global+swizzle+rowscaled"},
    {"fp8+delayed+rule=compressed-tensors", "fp8+rule=compressed-tensors+delayed"},
    {"nvfp4+4over6", "nvfp4+4over6=mae"},
    {"nvfp4+4over6", "nvfp4+e4m3max=256+4over6"},
    {"nvfp4+4over6=mse+e4m3max=448", "nvfp4+e4m3max=448+4over6=mse"},
    {"nvfp4+2d+4over6=mse", "nvfp4+4over6=mse+e4m3max=256+2d"},
};

static void other_writings_are_the_same_value(void) {
    for (size_t i = 0; i < sizeof aliases / sizeof aliases[0]; ++i) {
        const struct opaq_spec a = spec_of(aliases[i].canonical);
        const struct opaq_spec b = spec_of(aliases[i].other);
        CHECK_EQ_STR(spec_text(&a).text, aliases[i].canonical);
        CHECK_EQ_STR(spec_text(&b).text, aliases[i].canonical);
        CHECK(opaq_spec_equal(&a, &b));
    }
}

/* The parts of a canonical text, rotated and reversed: every order reads as the same value. */
static void any_order_of_options(void) {
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    for (int i = 0; i < list.count; ++i) {
        char text[OPAQ_SPEC_TEXT_BYTES];
        const char *part[16];
        int count = 0;
        memcpy(text, spec_text(&list.spec[i]).text, sizeof text);
        for (char *p = strtok(text, "+"); p != NULL && count < 16; p = strtok(NULL, "+")) {
            part[count++] = p;
        }
        for (int turn = 0; turn < 2 * (count - 1); ++turn) {
            char other[OPAQ_SPEC_TEXT_BYTES];
            size_t length = (size_t)snprintf(other, sizeof other, "%s", part[0]);
            for (int k = 0; k + 1 < count; ++k) {
                const int place = turn % 2 ? count - 2 - k : k;
                length += (size_t)snprintf(other + length, sizeof other - length, "+%s",
                                           part[1 + (place + turn / 2) % (count - 1)]);
            }
            struct opaq_spec back;
            memset(&back, 0, sizeof back);
            if (opaq_spec_parse(other, length, &back, NULL) != OPAQ_OK ||
                !opaq_spec_equal(&back, &list.spec[i])) {
                CHECK_FAIL("\"%s\" is not \"%s\"", other, spec_text(&list.spec[i]).text);
            }
        }
    }
    spec_list_free(&list);
}

/* Numbers that need all nine digits, and halfway cases of short ones. */
static void epsilon_keeps_every_bit(const char *how) {
    struct opaq_spec spec = spec_of("fp8");
    uint32_t bits = 1;
    for (int i = 0; i < 3000; ++i) {
        bits = bits * 1664525u + 1013904223u;
        spec.epsilon = support_float(bits % 0x7F800000u);
        if (!round_trips(&spec, how)) {
            return;
        }
    }
    for (uint32_t i = 1; i < 0x7F800000u; i += 0x100001u) {
        spec.epsilon = support_float(i);
        (void)round_trips(&spec, how);
    }
}

static void epsilon_round_trips(void) { epsilon_keeps_every_bit("plain"); }

/* Compares texts and values under a setting with those under the default one. */
static void same_texts(const struct spec_list *list, const struct spec_text *expected, const char *how) {
    for (int i = 0; i < list->count; ++i) {
        const struct spec_text text = spec_text(&list->spec[i]);
        if (strcmp(text.text, expected[i].text) != 0) {
            CHECK_FAIL("%s: \"%s\" instead of \"%s\"", how, text.text, expected[i].text);
        }
        (void)round_trips(&list->spec[i], how);
    }
    struct opaq_spec tie; /* 2^24 + 1, halfway between two floats: rounded to even in every mode */
    CHECK_EQ_INT(opaq_spec_parse("fp8+eps=16777217", 16, &tie, NULL), OPAQ_OK);
    CHECK(tie.epsilon == 16777216.0f);
    CHECK_EQ_INT(opaq_spec_parse("fp8+eps=0.1", 11, &tie, NULL), OPAQ_OK);
    CHECK(tie.epsilon == 0.1f);
}

/* spec_text before and after `set` and `reset` change the setting. */
static struct spec_text *texts_of(const struct spec_list *list) {
    struct spec_text *texts = malloc((size_t)list->count * sizeof *texts);
    for (int i = 0; texts != NULL && i < list->count; ++i) {
        texts[i] = spec_text(&list->spec[i]);
    }
    return texts;
}

static void rounding_modes_do_not_matter(void) {
    static const int modes[] = {FE_TONEAREST, FE_UPWARD, FE_DOWNWARD, FE_TOWARDZERO};
    static const char *const names[] = {"to nearest", "upward", "downward", "toward zero"};
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    struct spec_text *expected = texts_of(&list);
    for (int i = 0; i < 4; ++i) {
        CHECK_EQ_INT(fesetround(modes[i]), 0);
        same_texts(&list, expected, names[i]);
        epsilon_keeps_every_bit(names[i]);
        CHECK_EQ_INT(fegetround(), modes[i]);
        (void)fesetround(FE_TONEAREST);
    }
    free(expected);
    spec_list_free(&list);
}

static void flush_to_zero_does_not_matter(void) {
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    struct spec_text *expected = texts_of(&list);
    const struct float_setting saved = float_setting_get();
    if (!float_setting_flush_to_zero()) {
        printf("  skipped: no flush-to-zero on this processor\n");
    } else {
        same_texts(&list, expected, "flush to zero");
        epsilon_keeps_every_bit("flush to zero");
    }
    float_setting_put(saved);
    free(expected);
    spec_list_free(&list);
}

static void locales_do_not_matter(void) {
    static const char *const names[] = {"de_DE.UTF-8", "de_DE.utf8", "de_DE",
                                        "fr_FR.UTF-8", "fr_FR.utf8", "fr_FR"};
    const char *found = NULL;
    for (size_t i = 0; i < sizeof names / sizeof names[0] && found == NULL; ++i) {
        found = setlocale(LC_ALL, names[i]) == NULL ? NULL : names[i];
    }
    if (found == NULL || localeconv()->decimal_point[0] != ',') {
        (void)setlocale(LC_ALL, "C");
        printf("  skipped: no locale with a decimal comma is installed\n");
        return;
    }
    (void)setlocale(LC_ALL, "C");
    struct spec_list list = spec_list_make(SPEC_PARAMETERS);
    struct spec_text *expected = texts_of(&list);
    (void)setlocale(LC_ALL, found);
    same_texts(&list, expected, "decimal comma");
    epsilon_keeps_every_bit("decimal comma");
    (void)setlocale(LC_ALL, "C");
    free(expected);
    spec_list_free(&list);
}

static const struct test_case tests[] = {TEST(every_spec_comes_back),
                                         TEST(texts_are_unique),
                                         TEST(check_agrees_with_documentation),
                                         TEST(check_parameters_against_documentation),
                                         TEST(other_writings_are_the_same_value),
                                         TEST(any_order_of_options),
                                         TEST(epsilon_round_trips),
                                         TEST(rounding_modes_do_not_matter),
                                         TEST(flush_to_zero_does_not_matter),
                                         TEST(locales_do_not_matter)};
TEST_MAIN(tests)
