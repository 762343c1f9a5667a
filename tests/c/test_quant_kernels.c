/* test_quant_kernels.c: what opaq_quantize and opaq_dequantize run on this machine, on a pool, against the
 * reference's kernels called one after another, byte for byte, on the list the benchmark walks. */
#include <stdlib.h>

#include "base/fp_environment.h"
#include "check.h"
#include "op/amax_op.h"
#include "quant/quant_table_ref.h"
#include "quant/scale_rules.h"
#include "support_tensor.h"

#include "../cases/quant_cases.h"

/* The steps of opaq_quantize in their plainest form: no threads, no dispatch. */
static void quantize_by_reference(const struct tensor *x, const struct opaq_random *random, struct tensor *q) {
    struct quant_job job;
    quant_job_make(&x->view, &q->view, q->view.proto.spec.usage, &job);
    job.random = *random;
    for (int i = 0; i < opaq_proto_buffer_count(&q->view.proto); ++i) {
        struct opaq_buffer buffer;
        (void)opaq_proto_buffer(&q->view.proto, i, &buffer, NULL);
        memset(q->view.buffer[i].data, 0, buffer.role == OPAQ_ROLE_SCALE ? buffer.bytes : 0);
    }
    for (int i = 0; i < job.copy_count; ++i) {
        const struct quant_copy *copy = &job.copy[i];
        if (job.spec.format == OPAQ_FP8) {
            float amax;
            amax_ref(copy, &job.spec, 0, copy->operand.rows, &amax, 0);
            const struct fp8_scale scale = fp8_scale_from_amax(&job.spec, amax, FLT_MAX);
            job.tensor_scale = scale.apply;
            *(float *)copy->scale = scale.stored;
        } else if (copy->amax != NULL) {
            amax_ref(copy, &job.spec, 0, copy->operand.rows, copy->amax, copy->amax_step);
            for (int64_t k = 0; k < (copy->amax_step == 0 ? 1 : copy->operand.rows); ++k) {
                copy->amax[k] = nvfp4_stored(&job.spec, copy->amax[k]);
            }
        }
        const int64_t panel = quant_panel_rows(copy);
        for (int64_t r = 0; r < copy->operand.rows; r += panel) {
            const int64_t end = r + panel < copy->operand.rows ? r + panel : copy->operand.rows;
            quant_table_ref.quantize[job.spec.format].run(&job, copy, r, end);
        }
    }
}

static void dequantize_by_reference(const struct tensor *q, int usage, struct tensor *y) {
    struct quant_job job;
    quant_job_make(&y->view, &q->view, usage, &job);
    quant_table_ref.dequantize[job.spec.format].run(&job, &job.copy[0], 0, job.copy[0].operand.rows);
}

static void compare(const struct tensor *actual, const struct tensor *expected, const char *spec,
                    const int64_t *shape, enum tensor_fill fill, const char *what) {
    const int count = opaq_proto_buffer_count(&expected->view.proto);
    for (int i = 0; i < count; ++i) {
        CHECK_BYTES(actual->view.buffer[i].data, expected->view.buffer[i].data, tensor_bytes(expected, i),
                    "%s of %s, %lld x %lld, fill %d, buffer %d", what, spec, (long long)shape[0],
                    (long long)shape[1], (int)fill, i);
    }
}

static void run_case(const struct quant_case *one, const int64_t *shape, enum tensor_fill fill,
                     const struct opaq_parallel *parallel) {
    const struct opaq_random random = {.seed = 0x123456789ABCDEFu, .offset = 77};
    const struct opaq_quantize_args args = {.random = random, .parallel = parallel};
    struct opaq_error error;
    struct tensor x = tensor_make(shape[0], shape[1], one->dtype, NULL);
    struct tensor actual = tensor_make(shape[0], shape[1], one->dtype, one->spec);
    struct tensor expected = tensor_make(shape[0], shape[1], one->dtype, one->spec);
    tensor_fill(&x, fill, 1);
    quantize_by_reference(&x, &random, &expected);
    if (opaq_quantize(&x.view, &args, &actual.view, &error) != OPAQ_OK) {
        CHECK_FAIL("%s: %s", one->spec, error.text);
    }
    compare(&actual, &expected, one->spec, shape, fill, "quantize");
    for (int usage = OPAQ_ROWWISE; usage <= OPAQ_COLUMNWISE; ++usage) {
        if (usage & expected.view.proto.spec.usage) {
            struct tensor y = tensor_make(shape[0], shape[1], one->dtype, NULL);
            struct tensor z = tensor_make(shape[0], shape[1], one->dtype, NULL);
            dequantize_by_reference(&expected, usage, &y);
            if (opaq_dequantize(&expected.view, usage, parallel, &z.view, &error) != OPAQ_OK) {
                CHECK_FAIL("%s: %s", one->spec, error.text);
            }
            compare(&z, &y, one->spec, shape, fill, "dequantize");
            tensor_free(&y);
            tensor_free(&z);
        }
    }
    tensor_free(&x);
    tensor_free(&actual);
    tensor_free(&expected);
}

static void every_case_equals_the_reference(void) {
    struct opaq_pool *pool = NULL;
    CHECK_EQ_INT(opaq_pool_create(3, &pool, NULL), OPAQ_OK);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    for (int i = 0; i < QUANT_CASE_COUNT; ++i) {
        for (int s = 0; s < QUANT_CASE_SHAPE_COUNT; ++s) {
            for (int fill = 0; fill < FILL_COUNT; ++fill) {
                run_case(&quant_cases[i], quant_case_shapes[s], (enum tensor_fill)fill, &parallel);
            }
        }
    }
    printf("  %d quantizers x %d shapes x %d kinds of data\n", QUANT_CASE_COUNT, QUANT_CASE_SHAPE_COUNT,
           FILL_COUNT);
    opaq_pool_destroy(pool);
}

static const struct test_case tests[] = {TEST(every_case_equals_the_reference)};
TEST_MAIN(tests)
