/* test_cublaslt_status.c: what comes of cuBLASLt's statuses, with a library that returns those which a test sets
 * (tests/cuda/fake_cublaslt.h) and an emulated GPU: a problem that is not supported goes to opaq's kernels for good; another
 * failure is an error of the call, or of the query only, and the next call tries again. Needs OPAQ_TEST_DEVICE=emulated and
 * OPAQ_CUBLASLT_LIBRARY. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <stdlib.h>

#include "../cuda/fake_cublaslt.h"
#include "check.h"
#include "support_hiding.h"
#include "support_tensor.h"

enum { M = 32, K = 64, NOT_SUPPORTED = 15, EXECUTION_FAILED = 13, ALLOC_FAILED = 3 };

static struct fake_cublaslt *fake;

static bool is_here(void) {
    const char *const file = getenv("OPAQ_CUBLASLT_LIBRARY");
    void *const library = file == NULL ? NULL : dlopen(file, RTLD_NOW | RTLD_LOCAL);
    void *const symbol = library == NULL ? NULL : dlsym(library, "fake_cublaslt_state");
    fake_cublaslt_state_function *state;
    if (symbol == NULL || getenv("OPAQ_TEST_DEVICE") == NULL) {
        printf("  skipped: OPAQ_CUBLASLT_LIBRARY names no file of this test, or there is no emulated GPU\n");
        return false;
    }
    memcpy(&state, &symbol, sizeof state);
    fake = state();
    return true;
}

/* A bf16 product with `n` weights, which makes the problem a new one, of which element 0 is expected to be K if opaq's kernels
 * computed it. Returns its status, and counts the calls of cuBLASLt from 0 on. */
static enum opaq_status multiply(int64_t n, bool *is_computed, struct opaq_error *error) {
    struct hiding hiding = hiding_make((size_t)48 << 20);
    struct tensor one = tensor_make(M > n ? M : n, K, OPAQ_BF16, NULL);
    const struct backend *device;
    for (int64_t i = 0; i < (M > n ? M : n) * K; ++i) {
        tensor_set(&one, i / K, i % K, 1.0f);
    }
    *error = (struct opaq_error){OPAQ_OK, ""};
    fake->choose_calls = 0;
    fake->matmul_calls = 0;
    hiding_install();
    CHECK_EQ_INT(backend_of(hiding_device, &device, NULL), OPAQ_OK);
    struct gemm_job job = {.c = {NULL, OPAQ_F32, M, n, n, 1}, .any_order = true};
    job.a.plain = quant_matrix_make(&one.view);
    job.a.plain.data = hiding_copy(&hiding, one.view.buffer[0].data, one.view.buffer[0].bytes);
    job.b.plain = job.a.plain;
    job.a.plain.rows = M;
    job.b.plain.rows = n;
    job.c.data = hiding_copy(&hiding, NULL, (size_t)(M * n) * sizeof(float));
    const float *const c = hiding_host(&hiding, job.c.data);
    memset(hiding_host(&hiding, job.c.data), 0, (size_t)(M * n) * sizeof(float));
    void *const workspace = hiding_take(&hiding, device->product_workspace(&job));
    hiding_hide(&hiding);
    const enum opaq_status status =
        device->product(&job, workspace, &(struct opaq_execution){.device = hiding_device}, error);
    hiding_reveal(&hiding);
    hiding_remove();
    *is_computed = c[0] == (float)K;
    tensor_free(&one);
    hiding_free(&hiding);
    return status;
}

static void a_failure_is_an_error_of_one_call(void) {
    struct opaq_error error;
    bool is_computed;
    if (!is_here()) {
        return;
    }
    *fake = (struct fake_cublaslt){.matmul_status = EXECUTION_FAILED};
    CHECK_EQ_INT(multiply(32, &is_computed, &error), OPAQ_ERROR_SYSTEM);
    CHECK_EQ_STR(error.text, "cuBLASLt failed with status 13 at a product of 32 x 32 x 64");
    fake->matmul_status = 0;
    CHECK_EQ_INT(multiply(32, &is_computed, &error), OPAQ_OK);
    CHECK_EQ_INT(fake->matmul_calls, 1);
    CHECK_EQ_INT(fake->choose_calls, 0);
    CHECK(!is_computed);
}

static void an_unsupported_product_goes_to_other_kernels(void) {
    struct opaq_error error;
    bool is_computed;
    if (!is_here()) {
        return;
    }
    *fake = (struct fake_cublaslt){.matmul_status = NOT_SUPPORTED};
    for (int turn = 0; turn < 2; ++turn) {
        CHECK_EQ_INT(multiply(40, &is_computed, &error), OPAQ_OK);
        CHECK_EQ_INT(fake->matmul_calls, turn == 0);
        CHECK(is_computed);
    }
    *fake = (struct fake_cublaslt){.choose_status = NOT_SUPPORTED};
    for (int turn = 0; turn < 2; ++turn) {
        CHECK_EQ_INT(multiply(48, &is_computed, &error), OPAQ_OK);
        CHECK_EQ_INT(fake->choose_calls, turn == 0);
        CHECK(is_computed);
    }
}

static void a_query_that_failed_is_repeated(void) {
    struct opaq_error error;
    bool is_computed;
    if (!is_here()) {
        return;
    }
    *fake = (struct fake_cublaslt){.choose_status = ALLOC_FAILED};
    CHECK_EQ_INT(multiply(56, &is_computed, &error), OPAQ_OK);
    CHECK(is_computed);
    fake->choose_status = 0;
    CHECK_EQ_INT(multiply(56, &is_computed, &error), OPAQ_OK);
    CHECK_EQ_INT(fake->choose_calls, 1);
    CHECK_EQ_INT(fake->matmul_calls, 1);
    CHECK(!is_computed);
}

static const struct test_case tests[] = {TEST(a_failure_is_an_error_of_one_call),
                                         TEST(an_unsupported_product_goes_to_other_kernels),
                                         TEST(a_query_that_failed_is_repeated)};
TEST_MAIN(tests)
