/* test_kernel_force.c: kernels have unique names; forcing one makes operations use it and changes nothing else;
 * unknown names and kernels that cannot run are errors that change nothing. */
#include <stdlib.h>
#include <string.h>

#include "check.h"
#include "cpu/gemm/gemm_run.h"
#include "cpu/gemm/packed.h"
#include "cpu/gemm/packed_prepare.h"
#include "cpu/gemm/plain_convert.h"
#include "cpu/moe/activation_table.h"
#include "cpu/quant/quant_table.h"
#include "opaq/opaq.h"
#include "support_spec.h"

static void names_are_unique(void) {
    int count = 0;
    for (const char *name = opaq_kernel_at(0, NULL); name != NULL; name = opaq_kernel_at(++count, NULL)) {
        for (int i = 0; i < count; ++i) {
            if (strcmp(opaq_kernel_at(i, NULL), name) == 0) {
                CHECK_FAIL("kernels %d and %d are both called %s", i, count, name);
            }
        }
    }
    CHECK(count > 30);
    CHECK(opaq_kernel_at(-1, NULL) == NULL);
}

/* Whether the kernel is in use for any purpose. `name` is a pointer from opaq_kernel_at. */
static bool is_used(const char *name) {
    for (int f = 0; f < OPAQ_FORMAT_COUNT; ++f) {
        if (quantize_kernel((enum opaq_format)f)->name == name ||
            dequantize_kernel((enum opaq_format)f)->name == name ||
            both_kernel((enum opaq_format)f)->name == name) {
            return true;
        }
    }
    for (int k = 0; k < PACKED_FORMAT_COUNT * PACKED_PRECISION_COUNT; ++k) {
        const struct packed_kernel *kernel = packed_kernel((enum packed_format)(k / PACKED_PRECISION_COUNT),
                                                           (enum packed_precision)(k % PACKED_PRECISION_COUNT));
        if (kernel != NULL && kernel->name == name) {
            return true;
        }
    }
    if (gemm_pairs_best() != NULL && gemm_pairs_best()->name == name) {
        return true;
    }
    return amax_kernel()->name == name || decode_row_kernel()->name == name ||
           packed_prepare_best()->name == name || gemm_kernel_name() == name ||
           activation_table_best()->name == name || plain_table_best()->name == name;
}

static void each_can_be_forced(void) {
    struct opaq_error error;
    int can_run;
    int count = 0;
    for (const char *name = opaq_kernel_at(0, &can_run); name != NULL;
         name = opaq_kernel_at(++count, &can_run)) {
        const enum opaq_status status = opaq_kernel_force(name, &error);
        CHECK_EQ_INT(status, can_run ? OPAQ_OK : OPAQ_ERROR_UNSUPPORTED);
        if (can_run && !is_used(name)) {
            CHECK_FAIL("%s is forced, but not used", name);
        }
    }
    CHECK_EQ_INT(opaq_kernel_force("", &error), OPAQ_OK);
    CHECK_EQ_STR(opaq_kernel_forced(), "");
}

static void several_and_none(void) {
    struct opaq_error error;
    const struct opaq_spec spec = spec_of("nvfp4+tiled");
    CHECK_EQ_INT(opaq_kernel_force("gemm_ref, packed_nvfp4_near_ref", &error), OPAQ_OK);
    CHECK_EQ_STR(gemm_kernel_name(), "gemm_ref");
    CHECK_EQ_STR(opaq_linear_kernel(&spec, NULL, OPAQ_BF16, OPAQ_PRECISION_NEAR), "packed_nvfp4_near_ref");
    CHECK_EQ_INT(opaq_kernel_force("gemm_ref,gemm_fast", &error), OPAQ_ERROR_ARGUMENT);
    CHECK(strstr(error.text, "kernel_force: there is no kernel \"gemm_fast\"") == error.text);
    CHECK_EQ_STR(opaq_kernel_forced(), "gemm_ref, packed_nvfp4_near_ref");
    CHECK_EQ_INT(opaq_kernel_force(NULL, &error), OPAQ_OK);
    if (opaq_cpu_features() & OPAQ_CPU_AVX2) {
        CHECK(strcmp(gemm_kernel_name(), "gemm_ref") != 0);
    }
}

static const struct test_case tests[] = {TEST(names_are_unique), TEST(each_can_be_forced),
                                         TEST(several_and_none)};
TEST_MAIN(tests)
