/* test_dispatch.c: the choice of a kernel, on artificial tables, and the names of all entries. */
#include "check.h"
#include "cpu/kernel_family.h"
#include "cpu/quant/quant_table.h"
#include "cpu/quant/ref/quant_table_ref.h"
#include "support_spec.h"

static void nothing(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end) {
    (void)job;
    (void)copy;
    (void)r;
    (void)r_end;
}

static const struct quant_table wide = {
    .name = "wide",
    .features = OPAQ_CPU_AVX2 | OPAQ_CPU_AVX512,
    .quantize = {[OPAQ_NVFP4] = {"quantize_nvfp4_wide", nothing}},
};
static const struct quant_table narrow = {
    .name = "narrow",
    .features = OPAQ_CPU_AVX2,
    .quantize =
        {[OPAQ_NVFP4] = {"quantize_nvfp4_narrow", nothing}, [OPAQ_MXFP8] = {"quantize_mxfp8_narrow", nothing}},
    .dequantize = {[OPAQ_FP8] = {"dequantize_fp8_narrow", nothing}},
};
static const struct quant_table bare = {.name = "bare", .features = 0, .amax = {"amax_bare", amax_ref}};

static const struct quant_table *const all[] = {&wide, &narrow, &bare, &quant_table_ref};

static size_t quantize_offset(enum opaq_format format) {
    return offsetof(struct quant_table, quantize) + (size_t)format * sizeof(struct quant_kernel);
}

static size_t dequantize_offset(enum opaq_format format) {
    return offsetof(struct quant_table, dequantize) + (size_t)format * sizeof(struct quant_kernel);
}

static const char *chosen(uint32_t features, size_t offset) {
    const struct kernel_family family = {.tables = all, .table_count = 4};
    const struct quant_table *table = kernel_family_table(&family, offset, features);
    return table->name;
}

static void first_table_with_features_and_entry(void) {
    const uint32_t both = OPAQ_CPU_AVX2 | OPAQ_CPU_AVX512;
    CHECK_EQ_STR(chosen(both, quantize_offset(OPAQ_NVFP4)), "wide");
    CHECK_EQ_STR(chosen(both | 0x80000000u, quantize_offset(OPAQ_NVFP4)), "wide");
    CHECK_EQ_STR(chosen(~0u, quantize_offset(OPAQ_NVFP4)), "wide");
}

static void missing_features_skip_a_table(void) {
    CHECK_EQ_STR(chosen(OPAQ_CPU_AVX2, quantize_offset(OPAQ_NVFP4)), "narrow");
    /* half of the features that `wide` needs */
    CHECK_EQ_STR(chosen(OPAQ_CPU_AVX512, quantize_offset(OPAQ_NVFP4)), "ref");
    CHECK_EQ_STR(chosen(OPAQ_CPU_NEON, quantize_offset(OPAQ_NVFP4)), "ref");
    CHECK_EQ_STR(chosen(0, quantize_offset(OPAQ_NVFP4)), "ref");
}

static void empty_entries_fall_through(void) {
    CHECK_EQ_STR(chosen(~0u, quantize_offset(OPAQ_MXFP8)), "narrow");
    CHECK_EQ_STR(chosen(~0u, quantize_offset(OPAQ_MXFP4)), "ref");
    CHECK_EQ_STR(chosen(~0u, dequantize_offset(OPAQ_FP8)), "narrow");
    CHECK_EQ_STR(chosen(~0u, dequantize_offset(OPAQ_NVFP4)), "ref");
    CHECK_EQ_STR(chosen(~0u, offsetof(struct quant_table, amax)), "bare");
    CHECK_EQ_STR(chosen(0, offsetof(struct quant_table, amax)), "bare");
}

/* The last table is used without a check: it is complete and needs no features. */
static void the_last_table_is_unconditional(void) {
    const struct kernel_family one = {.tables = all, .table_count = 1};
    const struct kernel_family last = {.tables = &all[3], .table_count = 1};
    CHECK(kernel_family_table(&one, quantize_offset(OPAQ_MXFP4), 0) == &wide);
    CHECK(kernel_family_table(&last, quantize_offset(OPAQ_MXFP4), 0) == &quant_table_ref);
}

static void reference_is_complete_and_named(void) {
    char expected[64];
    CHECK_EQ_INT(quant_table_ref.features, 0);
    CHECK_EQ_STR(quant_table_ref.name, "ref");
    for (int i = 0; i < OPAQ_FORMAT_COUNT; ++i) {
        const char *format = opaq_format_row((enum opaq_format)i)->name;
        (void)snprintf(expected, sizeof expected, "quantize_%s_ref", format);
        CHECK_EQ_STR(quant_table_ref.quantize[i].name, expected);
        CHECK(quant_table_ref.quantize[i].run != NULL);
        (void)snprintf(expected, sizeof expected, "dequantize_%s_ref", format);
        CHECK_EQ_STR(quant_table_ref.dequantize[i].name, expected);
        CHECK(quant_table_ref.dequantize[i].run != NULL);
    }
    CHECK_EQ_STR(quant_table_ref.amax.name, "amax_ref");
    CHECK(quant_table_ref.amax.run != NULL);
}

/* "<operation>_<format>_<table>", for each table that this machine uses. */
static void check_name(const char *name, const char *operation, const char *format) {
    char start[64];
    const int length = snprintf(start, sizeof start, "%s_%s_", operation, format);
    if (name == NULL || strncmp(name, start, (size_t)length) != 0 || name[length] == '\0') {
        CHECK_FAIL("kernel is named \"%s\", expected %s...", name == NULL ? "(NULL)" : name, start);
    }
}

static void public_names_follow_the_tables(void) {
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count; ++i) {
        const char *format = opaq_format_row((enum opaq_format)list.spec[i].format)->name;
        check_name(opaq_quantize_kernel(&list.spec[i]), "quantize", format);
        check_name(opaq_dequantize_kernel(&list.spec[i]), "dequantize", format);
    }
    struct opaq_spec bad = spec_of("nvfp4");
    bad.options = OPAQ_DELAYED;
    CHECK(opaq_quantize_kernel(&bad) == NULL && opaq_dequantize_kernel(&bad) == NULL);
    CHECK(opaq_quantize_kernel(NULL) == NULL && opaq_dequantize_kernel(NULL) == NULL);
    spec_list_free(&list);
}

static void chosen_kernels_are_complete(void) {
    for (int i = 0; i < OPAQ_FORMAT_COUNT; ++i) {
        CHECK(quantize_kernel((enum opaq_format)i)->run != NULL);
        CHECK(dequantize_kernel((enum opaq_format)i)->run != NULL);
    }
    CHECK(amax_kernel()->run != NULL && strncmp(amax_kernel()->name, "amax_", 5) == 0);
}

static void features_are_described(void) {
    char text[64];
    CHECK_EQ_INT(opaq_cpu_describe(0, text, sizeof text), 0);
    CHECK_EQ_STR(text, "");
    CHECK_EQ_INT(opaq_cpu_describe(OPAQ_CPU_AVX2 | OPAQ_CPU_NEON, text, sizeof text), 9);
    CHECK_EQ_STR(text, "avx2 neon");
    CHECK_EQ_INT(opaq_cpu_describe(OPAQ_CPU_AVX2 | OPAQ_CPU_NEON, text, 7), 9);
    CHECK_EQ_STR(text, "avx2 n");
    CHECK_EQ_INT(opaq_cpu_describe(OPAQ_CPU_AVX2, NULL, 0), 4);
    CHECK_EQ_INT(opaq_cpu_describe(OPAQ_CPU_NEON | OPAQ_CPU_DOTPROD, text, sizeof text), 12);
    CHECK_EQ_STR(text, "neon dotprod");
    CHECK_EQ_INT(opaq_cpu_features(), opaq_cpu_features());
}

static const struct test_case tests[] = {
    TEST(first_table_with_features_and_entry), TEST(missing_features_skip_a_table),
    TEST(empty_entries_fall_through),          TEST(the_last_table_is_unconditional),
    TEST(reference_is_complete_and_named),     TEST(public_names_follow_the_tables),
    TEST(chosen_kernels_are_complete),         TEST(features_are_described)};
TEST_MAIN(tests)
