/* test_device_order.c: products whose sums may be added up in any order, on a back end's table. On a GPU with cuBLASLt they are its
 * products where it takes them: near the CPU's, for each kind of operand, with bias, earlier contents and gaps, from two threads
 * and in a CUDA graph. Elsewhere, and where it does not take them, they have the bytes of the fixed order. Without cuBLASLt
 * (OPAQ_CUBLASLT_LIBRARY can name its file) a note says so. With OPAQ_TEST_DEVICE as support_device.h says. */
#define _DEFAULT_SOURCE /* setenv */
#include <math.h>
#include <pthread.h>
#include <stdlib.h>

#include "check.h"
#include "support_hiding.h"
#include "support_tensor.h"

#include "../cases/gemm_operands.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

enum { BIAS = 1, ADDS = 2, GAPS = 4, A_TRANSPOSED = 8, B_TRANSPOSED = 16 };

struct order_case {
    const char *a, *b; /* gemm_cases.h; A_TRANSPOSED, B_TRANSPOSED: the plain operand is stored transposed */
    enum opaq_element c;
    int64_t m, n, k;
    int flags;
    enum opaq_precision precision;
    bool is_taken; /* cuBLASLt may take it */
    double limit;  /* of the difference's norm, as a fraction of the result's */
};

enum { GAP = 16 }; /* elements after each row */

/* ---- one product ---- */

/* The tensors of a product on the host, and their copies on the device. */
struct product {
    struct gemm_case_operand made[2];
    struct quant_job jobs[2]; /* of the copies */
    struct gemm_job host, device;
    struct tensor bias, c, expected;
};

/* A plain operand of which `keep` columns of each stored row are used. */
static void use_columns(struct gemm_case_operand *o, int64_t rows, int64_t columns, bool is_transposed) {
    struct quant_matrix stored = quant_matrix_make(&o->x);
    o->operand.plain = is_transposed ? quant_matrix_transposed(stored) : stored;
    o->operand.plain.rows = rows;
    o->operand.plain.columns = columns;
}

static void side_make(struct product *p, struct hiding *hiding, const struct order_case *one, int index) {
    struct gemm_case_operand *const o = &p->made[index];
    const char *const text = index == 0 ? one->a : one->b;
    const int64_t rows = index == 0 ? one->m : one->n;
    const bool is_transposed = (one->flags & (index == 0 ? A_TRANSPOSED : B_TRANSPOSED)) != 0;
    const bool is_plain = strcmp(text, "bf16") == 0 || strcmp(text, "f16") == 0 || strcmp(text, "f32") == 0;
    const int64_t gap = is_plain && (one->flags & GAPS) ? GAP : 0;
    gemm_case_operand_make(o, text, is_transposed ? one->k : rows, (is_transposed ? rows : one->k) + gap);
    struct tensor x = {o->x};
    tensor_fill(&x, FILL_NORMAL, (uint64_t)index + 1);
    gemm_case_operand_quantize(o, true, NULL);
    struct gemm_operand *const to = index == 0 ? &p->device.a : &p->device.b;
    if (is_plain) {
        use_columns(o, rows, one->k, is_transposed);
        *to = o->operand;
        to->plain.data = hiding_copy(hiding, o->x.buffer[0].data, o->x.buffer[0].bytes);
    } else {
        struct opaq_view q = o->q;
        for (int i = 0; i < opaq_proto_buffer_count(&q.proto); ++i) {
            q.buffer[i].data = hiding_copy(hiding, q.buffer[i].data, q.buffer[i].bytes);
        }
        quant_job_make(&o->x, &q, q.proto.spec.usage, &p->jobs[index]);
        *to = o->operand;
        to->spec = &p->jobs[index].spec;
        to->copy = &p->jobs[index].copy[0];
    }
    *(index == 0 ? &p->host.a : &p->host.b) = o->operand;
}

static void product_make(struct product *p, struct hiding *hiding, const struct order_case *one) {
    memset(p, 0, sizeof *p);
    const int64_t width = one->n + (one->flags & GAPS ? GAP : 0);
    side_make(p, hiding, one, 0);
    side_make(p, hiding, one, 1);
    p->bias = tensor_make(1, one->n, one->c, NULL);
    p->c = tensor_make(one->m, width, one->c, NULL);
    p->expected = tensor_make(one->m, width, OPAQ_F32, NULL);
    tensor_fill(&p->bias, FILL_NORMAL, 3);
    tensor_fill(&p->c, FILL_NORMAL, 4);
    for (int64_t i = 0; i < one->m * width; ++i) {
        tensor_set(&p->expected, i / width, i % width, (float)tensor_get(&p->c, i / width, i % width));
    }
    p->device.accumulate = p->host.accumulate = (one->flags & ADDS) != 0;
    p->device.precision = p->host.precision = one->precision;
    p->device.c = quant_matrix_make(&p->c.view);
    p->host.c = quant_matrix_make(&p->expected.view);
    p->device.c.columns = p->host.c.columns = one->n;
    p->device.c.data = hiding_copy(hiding, p->c.view.buffer[0].data, p->c.view.buffer[0].bytes);
    if (one->flags & BIAS) {
        p->device.bias_dtype = p->host.bias_dtype = one->c;
        p->host.bias = p->bias.view.buffer[0].data;
        p->device.bias = hiding_copy(hiding, p->host.bias, p->bias.view.buffer[0].bytes);
    }
    void *const workspace = gemm_case_allocate(cpu_backend.product_workspace(&p->host));
    CHECK_EQ_INT(cpu_backend.product(&p->host, workspace, &(struct opaq_execution){.device = tensor_cpu}, NULL),
                 OPAQ_OK);
    free(workspace);
}

static void product_free(struct product *p) {
    gemm_case_operand_free(&p->made[0]);
    gemm_case_operand_free(&p->made[1]);
    tensor_free(&p->bias);
    tensor_free(&p->c);
    tensor_free(&p->expected);
}

/* Runs it on the device, in this order; false if the back end needs no more memory for any order than for the fixed one. */
static bool product_run(struct product *p, struct hiding *hiding, bool any_order) {
    const struct backend *device;
    struct opaq_error error = {OPAQ_OK, ""};
    bool is_refusing;
    hiding_install();
    CHECK_EQ_INT(backend_of(hiding_device, &device, NULL), OPAQ_OK);
    p->device.any_order = false;
    const size_t fixed = device->product_workspace(&p->device);
    p->device.any_order = any_order;
    const size_t bytes = device->product_workspace(&p->device);
    void *const workspace = hiding_take(hiding, bytes);
    memcpy(hiding_host(hiding, p->device.c.data), p->c.view.buffer[0].data, p->c.view.buffer[0].bytes);
    hiding_hide(hiding);
    const struct opaq_execution execution = {.device = hiding_device, .stream = hiding_begin(&is_refusing)};
    CHECK_EQ_INT(device->product(&p->device, workspace, &execution, &error), OPAQ_OK);
    hiding_end(execution.stream);
    CHECK_EQ_STR(error.text, "");
    hiding_reveal(hiding);
    hiding_remove();
    return bytes > fixed;
}

/* ---- checks ---- */

static struct tensor result_of(const struct product *p, const struct hiding *hiding) {
    struct tensor c = tensor_make(p->c.view.proto.shape[0], p->c.view.proto.shape[1],
                                  (enum opaq_element)p->c.view.proto.dtype, NULL);
    memcpy(c.view.buffer[0].data, hiding_host(hiding, p->device.c.data), c.view.buffer[0].bytes);
    return c;
}

/* Compares with the CPU's product, by norm and by each element, and the gaps with what was there. */
static void check_near(const struct order_case *one, const struct product *p, const struct tensor *c,
                       const char *what) {
    double size = 0.0;
    double off = 0.0;
    double worst = 0.0;
    for (int64_t i = 0; i < one->m * one->n; ++i) {
        const double expected = (double)tensor_get(&p->expected, i / one->n, i % one->n);
        const double found = (double)tensor_get(c, i / one->n, i % one->n);
        const double error = isnan(found) ? HUGE_VAL : fabs(found - expected);
        size += expected * expected;
        off += error * error;
        worst = fmax(worst, error);
    }
    const double typical = sqrt(size / (double)(one->m * one->n));
    if (!(sqrt(off) <= one->limit * sqrt(size)) || !(worst <= 16.0 * one->limit * typical)) {
        CHECK_FAIL("%s: %.3g off by norm, %.3g at most, of elements of about %.3g; expected %.3g", what,
                   sqrt(off / size), worst, typical, one->limit);
    }
    for (int64_t r = 0; r < one->m; ++r) {
        for (int64_t k = one->n; k < p->c.view.proto.shape[1]; ++k) {
            if (tensor_get(c, r, k) != tensor_get(&p->c, r, k)) {
                CHECK_FAIL("%s: written beyond row %lld", what, (long long)r);
                return;
            }
        }
    }
}

static const char *name_of(const struct order_case *one, char what[128]) {
    (void)snprintf(what, 128, "%s by %s, %lld x %lld x %lld, c %s, flags %d, precision %d", one->a, one->b,
                   (long long)one->m, (long long)one->n, (long long)one->k, opaq_element_info(one->c)->name,
                   one->flags, (int)one->precision);
    return what;
}

static struct hiding hiding_of(const struct order_case *one) {
    const int64_t elements = (one->m + one->n) * (one->k + GAP) + one->m * (one->n + GAP) + one->n;
    return hiding_make((size_t)elements * 8 + ((size_t)48 << 20));
}

static atomic_int taken, not_taken;

/* What has no bytes in common with the fixed order was added up in another one. */
static void check_order(const struct order_case *one, struct product *p, struct hiding *hiding) {
    char what[128];
    const bool is_taken = product_run(p, hiding, true);
    struct tensor any = result_of(p, hiding);
    check_near(one, p, &any, name_of(one, what));
    hiding->used = hiding->copied;
    (void)product_run(p, hiding, false);
    struct tensor fixed = result_of(p, hiding);
    const size_t bytes = any.view.buffer[0].bytes;
    const bool is_same = memcmp(any.view.buffer[0].data, fixed.view.buffer[0].data, bytes) == 0;
    taken += is_taken;
    not_taken += !is_taken;
    CHECK(!is_taken || one->is_taken);
    if (!is_taken && !is_same) {
        CHECK_FAIL("%s: not the bytes of the fixed order", what);
    }
    if (is_taken && is_same && one->c == OPAQ_F32) { /* thousands of sums cannot all be rounded alike */
        CHECK_FAIL("%s: cuBLASLt did not take it", what);
    }
    tensor_free(&any);
    tensor_free(&fixed);
}

static void check_case(const struct order_case *one) {
    struct hiding hiding = hiding_of(one);
    struct product p;
    product_make(&p, &hiding, one);
    check_order(one, &p, &hiding);
    product_free(&p);
    hiding_free(&hiding);
}

/* ---- cases ---- */

#define EXACT OPAQ_PRECISION_EXACT
#define BF16_SUMS 0x1p-17 /* float32 sums of exact products */
#define FP8_SUMS 0x1p-10  /* of fp8 tensor cores */
#define FAST_SUMS 0x1p-9
#define BF16_RESULT 0x1p-8 /* rounded once, or twice where something is added */
#define F16_RESULT 0x1p-11

static const struct order_case cases[] = {
    {"bf16", "bf16", OPAQ_F32, 64, 96, 1024, 0, EXACT, true, BF16_SUMS},
    {"bf16", "bf16", OPAQ_F32, 1, 256, 2048, BIAS, EXACT, true, BF16_SUMS},
    {"bf16", "bf16", OPAQ_BF16, 37, 264, 520, BIAS | GAPS, EXACT, true, BF16_RESULT},
    {"bf16", "bf16", OPAQ_BF16, 128, 128, 512, BIAS | ADDS, EXACT, true, BF16_RESULT},
    {"bf16", "bf16", OPAQ_F32, 130, 192, 640, ADDS | GAPS, EXACT, true, BF16_SUMS},
    {"bf16", "bf16", OPAQ_F32, 72, 160, 1024, B_TRANSPOSED, EXACT, true, BF16_SUMS}, /* dx = dy w */
    {"bf16", "bf16", OPAQ_F32, 256, 160, 616, A_TRANSPOSED | B_TRANSPOSED | ADDS, EXACT, true,
     BF16_SUMS}, /* dw = dy^T x */
    {"bf16", "bf16", OPAQ_BF16, 40, 80, 512, A_TRANSPOSED | B_TRANSPOSED | GAPS, EXACT, true, BF16_RESULT},
    {"f16", "f16", OPAQ_F32, 64, 96, 1024, 0, EXACT, true, BF16_SUMS},
    {"f16", "f16", OPAQ_F16, 21, 72, 768, BIAS, EXACT, true, F16_RESULT},
    {"fp8", "fp8", OPAQ_F32, 64, 96, 1024, 0, EXACT, true, FP8_SUMS},
    {"fp8", "fp8", OPAQ_F32, 19, 512, 2048, 0, OPAQ_PRECISION_FAST, true, FAST_SUMS},
    {"fp8", "fp8", OPAQ_BF16, 33, 272, 1040, BIAS, EXACT, true, BF16_RESULT},
    {"fp8.e5m2", "fp8", OPAQ_F32, 48, 128, 1024, ADDS | GAPS, EXACT, true, FP8_SUMS},
    {"fp8+columnwise", "fp8.e5m2+columnwise", OPAQ_F32, 64, 96, 1024, 0, EXACT, true, FP8_SUMS},
    {"fp8row", "fp8row", OPAQ_F32, 68, 96, 1024, 0, EXACT, true, FP8_SUMS},
    {"fp8row", "fp8row", OPAQ_BF16, 77, 256, 1024, BIAS | GAPS, OPAQ_PRECISION_FAST32, true, BF16_RESULT},
    {"fp8blk1", "fp8blk2", OPAQ_F32, 72, 256, 1024, 0, EXACT, true, FP8_SUMS},
    {"fp8blk1", "fp8blk2", OPAQ_BF16, 136, 384, 1536, BIAS, EXACT, true, BF16_RESULT},
    {"fp8blk1+columnwise", "fp8blk1+columnwise", OPAQ_F32, 128, 256, 1024, ADDS, EXACT, true, FP8_SUMS},
    {"fp8blk1+columnwise", "fp8blk2+columnwise", OPAQ_F32, 128, 256, 1024, 0, EXACT, true, FP8_SUMS},
    /* decoded to bf16 beforehand */
    {"bf16", "nvfp4", OPAQ_F32, 128, 96, 512, 0, EXACT, true, BF16_SUMS},
    {"bf16", "nvfp4", OPAQ_BF16, 300, 264, 520, BIAS | GAPS, EXACT, true, BF16_RESULT},
    {"bf16", "nvfp4+global+rule=compressed-tensors", OPAQ_F32, 256, 96, 512, ADDS, EXACT, true, BF16_SUMS},
    {"bf16", "nvfp4+swizzle", OPAQ_F32, 264, 128, 512, ADDS | GAPS, EXACT, true, BF16_SUMS},
    {"bf16", "nvfp4+tiled", OPAQ_F32, 256, 72, 512, 0, EXACT, true, BF16_SUMS},
    {"bf16", "across nvfp4", OPAQ_F32, 256, 96, 512, 0, EXACT, true, BF16_SUMS}, /* dx = dy w */
    {"bf16", "mxfp4", OPAQ_BF16, 512, 128, 512, BIAS | ADDS, EXACT, true, BF16_RESULT},
    {"bf16", "mxfp8.e5m2", OPAQ_F32, 256, 96, 512, 0, EXACT, true, BF16_SUMS},
    {"bf16", "fp8", OPAQ_F32, 257, 96, 512, ADDS, EXACT, true, BF16_SUMS},
    {"mxfp8", "bf16", OPAQ_F32, 256, 96, 512, 0, EXACT, true, BF16_SUMS},
    {"mxfp8", "mxfp8", OPAQ_F32, 256, 128, 512, BIAS, EXACT, true, BF16_SUMS},
    {"mxfp8+columnwise", "mxfp8+columnwise", OPAQ_F32, 320, 128, 256, ADDS, EXACT, true, BF16_SUMS},
    {"nvfp4", "nvfp4+2d", OPAQ_F32, 256, 128, 512, 0, EXACT, true, BF16_SUMS},
    {"nvfp4+columnwise+rht", "nvfp4+columnwise+rht", OPAQ_F32, 256, 128, 512, ADDS, EXACT, true, BF16_SUMS},
    /* what cuBLASLt does not take */
    {"f32", "f32", OPAQ_F32, 16, 32, 256, 0, EXACT, false, BF16_SUMS},
    {"bf16", "nvfp4", OPAQ_F32, 127, 32, 256, 0, EXACT, false, BF16_SUMS},
    {"f32", "nvfp4", OPAQ_F32, 256, 32, 256, 0, EXACT, false, BF16_SUMS},
    {"bf16", "nvfp4+rowscaled", OPAQ_F32, 256, 32, 256, 0, EXACT, false, BF16_SUMS},
    {"bf16", "fp8row", OPAQ_F32, 256, 32, 256, 0, EXACT, false, BF16_SUMS},
    {"bf16", "bf16", OPAQ_F32, 16, 33, 256, 0, EXACT, false, BF16_SUMS},
    {"bf16", "bf16", OPAQ_F32, 16, 32, 252, 0, EXACT, false, BF16_SUMS},
    {"bf16", "bf16", OPAQ_F16, 16, 32, 256, 0, EXACT, false, F16_RESULT},
    {"fp8", "fp8", OPAQ_F32, 16, 64, 256, 0, EXACT, false, FP8_SUMS}, /* few rows */
    {"fp8row", "fp8row", OPAQ_F32, 64, 64, 256, 0, EXACT, false, FP8_SUMS},
    {"fp8", "fp8", OPAQ_F32, 24, 40, 256, 0, EXACT, false, FP8_SUMS},
    {"fp8", "fp8", OPAQ_F32, 24, 32, 256, BIAS, EXACT, false, FP8_SUMS},
    {"fp8.e5m2", "fp8.e5m2", OPAQ_F32, 24, 32, 256, 0, EXACT, false, FP8_SUMS},
    {"fp8", "fp8row", OPAQ_F32, 72, 32, 256, 0, EXACT, false, FP8_SUMS},
    {"fp8blk2", "fp8blk2", OPAQ_F32, 128, 128, 256, 0, EXACT, false, FP8_SUMS},
    {"fp8blk1", "fp8blk2", OPAQ_F32, 73, 128, 256, 0, EXACT, false, FP8_SUMS},
};

static void every_case_is_near(void) {
    taken = 0;
    not_taken = 0;
    for (int i = 0; i < COUNT(cases); ++i) {
        check_case(&cases[i]);
    }
    printf("  %d products of cuBLASLt, %d of opaq%s\n", (int)taken, (int)not_taken,
           taken == 0 ? ": cuBLASLt is not here, or OPAQ_CUDA_PRODUCT refuses it" : "");
}

/* Each product again, in a graph: a first time with other rows, which no look-up has seen, then as before. */
static void products_are_captured(void) {
    (void)setenv("OPAQ_TEST_CAPTURE", "1", 1);
    for (int i = 0; i < COUNT(cases) && cases[i].is_taken; ++i) {
        struct order_case more = cases[i];
        more.m += 8;
        check_case(&more);
        check_case(&cases[i]);
    }
    (void)unsetenv("OPAQ_TEST_CAPTURE");
}

/* ---- threads ---- */

enum { THREADS = 2, TURNS = 3 };

static void *run_cases(void *number) {
    for (int i = 0; i < TURNS * 6; ++i) {
        struct order_case one = cases[(i * 5 + *(const int *)number) % 35];
        one.m += 16 + 8 * (i % 6); /* new to both threads at about the same time */
        check_case(&one);
    }
    return NULL;
}

static void threads_at_once(void) {
    pthread_t threads[THREADS];
    int numbers[THREADS];
    for (int t = 0; t < THREADS; ++t) {
        numbers[t] = 0;
        CHECK_EQ_INT(pthread_create(&threads[t], NULL, run_cases, &numbers[t]), 0);
    }
    for (int t = 0; t < THREADS; ++t) {
        (void)pthread_join(threads[t], NULL);
    }
}

static const struct test_case tests[] = {TEST(every_case_is_near), TEST(products_are_captured),
                                         TEST(threads_at_once)};
TEST_MAIN(tests)
