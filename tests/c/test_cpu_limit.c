/* test_cpu_limit.c: with an unknown name in OPAQ_CPU every function that runs kernels fails with a message that
 * says so; without it they work. One test in a separate process, because a valid environment is cached. */
#include <stdlib.h>

#include "check.h"
#include "opaq/cpu.h"
#include "opaq/kernel.h"
#include "opaq/noise.h"
#include "support_op.h"

enum { ROWS = 4, COLUMNS = 32, FUNCTIONS = 8 };

static enum opaq_status run_function(int which, const struct tensor *x, const struct tensor *q,
                                     const struct tensor *y, struct opaq_error *error) {
    const struct opaq_op *op = opaq_op_find("quantize");
    const struct op_tensors tensors = op_tensors_of(x);
    const struct opaq_value values[OPAQ_OP_ARGUMENT_LIMIT] = {op_tensor_value(tensors.tensor),
                                                              op_text_value("nvfp4")};
    struct opaq_noise noise;
    float amax;
    struct op_result result;
    enum opaq_status status;
    switch (which) {
    case 0:
        return opaq_quantize(&x->view, NULL, NULL, &q->view, error);
    case 1:
        return opaq_dequantize(&q->view, 0, NULL, &y->view, error);
    case 2:
        return opaq_amax(&x->view, &q->view.proto.spec, OPAQ_ROWWISE, NULL, &amax, 1, error);
    case 3:
        return opaq_noise_measure(&x->view, &q->view, 0, NULL, &noise, error);
    case 4:
        return opaq_kernel_force("", error);
    case 5:
        status = op_call("quantize", values, NULL, &result, error);
        if (status == OPAQ_OK) {
            op_result_free(&result);
        }
        return status;
    case 6: /* fails with out of memory if it gets past the check */
        status = opaq_op_call(op, values, NULL, NULL, error);
        return status != OPAQ_OK && strstr(error->text, "memory is NULL") != NULL ? OPAQ_OK : status;
    default:
        return opaq_cpu_check(error);
    }
}

static void an_unknown_name_is_an_error_everywhere(void) {
    struct tensor x = tensor_make(ROWS, COLUMNS, OPAQ_F32, NULL);
    struct tensor y = tensor_make(ROWS, COLUMNS, OPAQ_F32, NULL);
    struct tensor q = tensor_make(ROWS, COLUMNS, OPAQ_F32, "nvfp4");
    tensor_fill(&x, FILL_NORMAL, 1);
    memset(q.view.buffer[0].data, 0, tensor_bytes(&q, 0));
    for (int is_right = 0; is_right < 2; ++is_right) {
        CHECK_EQ_INT(setenv("OPAQ_CPU", is_right ? "" : "sse9", 1), 0);
        for (int i = 0; i < FUNCTIONS; ++i) {
            struct opaq_error error = {OPAQ_OK, ""};
            const enum opaq_status status = run_function(i, &x, &q, &y, &error);
            if (status != (is_right ? OPAQ_OK : OPAQ_ERROR_ARGUMENT) ||
                (!is_right && strstr(error.text, "OPAQ_CPU is \"sse9\", expected one of: ref") == NULL)) {
                CHECK_FAIL("function %d, OPAQ_CPU %s: status %d, \"%s\"", i, is_right ? "empty" : "unknown",
                           (int)status, error.text);
            }
        }
    }
    tensor_free(&x);
    tensor_free(&y);
    tensor_free(&q);
}

static const struct test_case tests[] = {TEST(an_unknown_name_is_an_error_everywhere)};
TEST_MAIN(tests)
