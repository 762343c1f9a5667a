/* test_device_product.c: products of a back end's table on its device, for every pair of operands: within the bound of gemm_run.h
 * of the product in double, infinities and NaN where the CPU has them, and every row with the same bits in every batch. Runs on
 * the CPU's table, and once more with OPAQ_TEST_DEVICE (support_device.h). */
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "support_device.h"
#include "support_hiding.h"
#include "support_tensor.h"

#include "../cases/gemm_cases.h"
#include "../cases/gemm_operands.h"

#define COUNT(array) ((int)(sizeof(array) / sizeof(array)[0]))

/* ---- operands ---- */

/* An operand on the host, and its copy on the device. */
struct placed_operand {
    struct gemm_case_operand made;
    struct quant_job job;
    struct gemm_operand placed;
    double *values; /* rows x depth */
    int64_t depth;
};

static struct quant_matrix matrix_make(int64_t rows, int64_t columns) {
    struct quant_matrix m = {NULL, OPAQ_F32, rows, columns, columns, 1};
    m.data = gemm_case_allocate((size_t)(rows * columns) * sizeof(float));
    return m;
}

static void multiply_on_cpu(const struct gemm_job *job) {
    void *const workspace = gemm_case_allocate(cpu_backend.product_workspace(job));
    CHECK_EQ_INT(cpu_backend.product(job, workspace, &(struct opaq_execution){.device = tensor_cpu}, NULL),
                 OPAQ_OK);
    free(workspace);
}

/* What the CPU decodes: the product with the identity, which has one term that is not 0. */
static void decode(struct placed_operand *o, bool is_a) {
    struct gemm_operand operand = o->made.operand;
    const bool is_left =
        operand.copy != NULL && operand.copy->is_hadamard && !operand.undo_hadamard; /* in whole groups */
    const int64_t rows = operand.plain.rows;
    o->depth = is_left ? (operand.plain.columns + 15) / 16 * 16 : operand.plain.columns;
    operand.plain.columns = o->depth;
    struct gemm_operand identity = {.plain = matrix_make(o->depth, o->depth)};
    for (int64_t i = 0; i < o->depth * o->depth; ++i) {
        ((float *)identity.plain.data)[i] = i / o->depth == i % o->depth ? 1.0f : 0.0f;
    }
    struct gemm_job job = {.a = is_a ? operand : identity,
                           .b = is_a ? identity : operand,
                           .c = is_a ? matrix_make(rows, o->depth) : matrix_make(o->depth, rows)};
    multiply_on_cpu(&job);
    o->values = calloc((size_t)(rows * o->depth) + 1, sizeof *o->values);
    for (int64_t i = 0; i < rows * o->depth; ++i) {
        o->values[i] = (double)((float *)job.c.data)[is_a ? i : i % o->depth * rows + i / o->depth];
    }
    free(job.c.data);
    free(identity.plain.data);
}

/* `change` is called on the tensor before it is quantized; NULL: nothing is. */
static void placed_make_by(struct placed_operand *o, struct hiding *hiding, const char *text, int64_t rows,
                           int64_t columns, enum tensor_fill fill, uint64_t seed, bool undo_hadamard,
                           void (*change)(struct tensor *x)) {
    memset(o, 0, sizeof *o);
    gemm_case_operand_make(&o->made, text, rows, columns);
    struct tensor x = {o->made.x};
    tensor_fill(&x, fill, seed);
    if (change != NULL) {
        change(&x);
    }
    gemm_case_operand_quantize(&o->made, undo_hadamard, NULL);
    o->placed = o->made.operand;
    if (o->placed.copy == NULL) {
        o->placed.plain.data = hiding_copy(hiding, o->made.x.buffer[0].data, o->made.x.buffer[0].bytes);
        return;
    }
    struct opaq_view q = o->made.q;
    for (int i = 0; i < opaq_proto_buffer_count(&q.proto); ++i) {
        q.buffer[i].data = hiding_copy(hiding, q.buffer[i].data, q.buffer[i].bytes);
    }
    quant_job_make(&o->made.x, &q, q.proto.spec.usage, &o->job);
    o->placed.spec = &o->job.spec;
    o->placed.copy = &o->job.copy[0];
}

static void placed_make(struct placed_operand *o, struct hiding *hiding, const char *text, int64_t rows,
                        int64_t columns, enum tensor_fill fill, uint64_t seed, bool undo_hadamard) {
    placed_make_by(o, hiding, text, rows, columns, fill, seed, undo_hadamard, NULL);
}

static void placed_free(struct placed_operand *o) {
    gemm_case_operand_free(&o->made);
    free(o->values);
}

/* ---- products on the device ---- */

static size_t bytes_for(int64_t m, int64_t n, int64_t k) {
    return (size_t)(m * k + n * k + m * n) * 8 + ((size_t)64 << 10) + ((size_t)16 << 20);
}

/* The product of the first m rows of a, plus a bias in float32 if there is one, in memory of the device that can be read
 * afterwards. */
static const float *multiply_and_add(struct hiding *hiding, const struct placed_operand *a,
                                     const struct placed_operand *b, int64_t m, const float *bias) {
    const int64_t n = b->placed.plain.rows;
    const struct backend *device;
    struct opaq_error error = {OPAQ_OK, ""};
    hiding_install();
    CHECK_EQ_INT(backend_of(hiding_device, &device, NULL), OPAQ_OK);
    struct gemm_job job = {.a = a->placed, .b = b->placed, .c = {NULL, OPAQ_F32, m, n, n, 1}};
    job.a.plain.rows = m;
    job.bias = bias == NULL ? NULL : hiding_copy(hiding, bias, (size_t)n * sizeof *bias);
    job.bias_dtype = OPAQ_F32;
    job.c.data = hiding_copy(hiding, NULL, (size_t)(m * n) * sizeof(float));
    float *const c = hiding_host(hiding, job.c.data);
    void *const workspace = hiding_take(hiding, device->product_workspace(&job));
    memset(c, 0xA5, (size_t)(m * n) * sizeof(float));
    hiding_hide(hiding);
    CHECK_EQ_INT(device->product(&job, workspace, &(struct opaq_execution){.device = hiding_device}, &error),
                 OPAQ_OK);
    CHECK_EQ_STR(error.text, "");
    hiding_reveal(hiding);
    hiding_remove();
    return c;
}

static const float *multiply(struct hiding *hiding, const struct placed_operand *a,
                             const struct placed_operand *b, int64_t m) {
    return multiply_and_add(hiding, a, b, m, NULL);
}

/* ---- against the product in double ---- */

static double bound_of(int64_t depth) {
    const int64_t blocks = (depth + 255) / 256;
    const int factors = 10; /* five for each operand's factor that is left out of the sums */
    return (double)((depth < 256 ? depth : 256) + blocks + 2 + factors) * 0x1p-24;
}

static void check_bound(const struct placed_operand *a, const struct placed_operand *b, const float *c,
                        const char *what) {
    const int64_t depth = a->depth < b->depth ? a->depth : b->depth;
    const int64_t n = b->placed.plain.rows;
    for (int64_t i = 0; i < a->placed.plain.rows * n; ++i) {
        double exact = 0.0;
        double size = 0.0;
        for (int64_t k = 0; k < depth; ++k) {
            const double product = a->values[i / n * a->depth + k] * b->values[i % n * b->depth + k];
            exact += product;
            size += fabs(product);
        }
        if (!(fabs((double)c[i] - exact) <= bound_of(depth) * size + 0x1p-126)) {
            CHECK_FAIL("%s: element %lld, %lld is %.9g, expected %.9g within %.3g", what, (long long)(i / n),
                       (long long)(i % n), (double)c[i], exact, bound_of(depth) * size);
            return;
        }
    }
}

static void check_case(const struct gemm_case *one, const int64_t *shape, bool undo) {
    char what[128];
    struct placed_operand a;
    struct placed_operand b;
    struct hiding hiding = hiding_make(bytes_for(shape[0], shape[1], shape[2]));
    placed_make(&a, &hiding, one->a, shape[0], shape[2], FILL_OUTLIERS, 1, undo);
    placed_make(&b, &hiding, one->b, shape[1], shape[2], FILL_NORMAL, 2, undo);
    decode(&a, true);
    decode(&b, false);
    snprintf(what, sizeof what, "%s by %s, %lld x %lld x %lld%s", one->a, one->b, (long long)shape[0],
             (long long)shape[1], (long long)shape[2], undo ? ", undone" : "");
    check_bound(&a, &b, multiply(&hiding, &a, &b, shape[0]), what);
    placed_free(&a);
    placed_free(&b);
    hiding_free(&hiding);
}

/* Few rows and many; depths of whole and of broken parts, blocks and groups. */
static void every_pair_is_within_the_bound(void) {
    static const int64_t shapes[][3] = {
        {5, 37, 290}, {13, 40, 144}, {9, 35, 256}, {21, 66, 288}, {131, 72, 160}};
    for (int i = 0; i < GEMM_CASE_COUNT; ++i) {
        for (int s = 0; s < COUNT(shapes); ++s) {
            check_case(&gemm_cases[i], shapes[s], true);
        }
        if (strstr(gemm_cases[i].a, "rht") != NULL || strstr(gemm_cases[i].b, "rht") != NULL) {
            check_case(&gemm_cases[i], shapes[0], false);
            check_case(&gemm_cases[i], shapes[2], false);
        }
    }
}

static void long_sums_are_within_the_bound(void) {
    static const struct gemm_case cases[] = {{"bf16", "nvfp4", false}, {"fp8blk1", "fp8blk2", false}};
    static const int64_t shapes[][3] = {{3, 24, 2336}, {40, 24, 1184}, {13, 70, 4224}};
    for (int i = 0; i < COUNT(cases); ++i) {
        for (int s = 0; s < COUNT(shapes); ++s) {
            check_case(&cases[i], shapes[s], true);
        }
    }
}

/* ---- slices of weights that are read across their rows ---- */

enum { PERIOD = 128 };

/* Makes each column of a stored weight equal to the one PERIOD before. */
static void repeat_columns(struct tensor *x) {
    const int64_t rows = opaq_proto_rows(&x->view.proto);
    const int64_t columns = opaq_proto_columns(&x->view.proto);
    for (int64_t r = 0; r < rows; ++r) {
        for (int64_t c = PERIOD; c < columns; ++c) {
            tensor_set(x, r, c, tensor_get(x, r, c - PERIOD));
        }
    }
}

/* A result does not depend on the column of the weight that it is computed from, nor on the number of columns. */
static void check_slices(const struct gemm_case *one, int64_t m, int64_t k) {
    const int64_t n = 3 * PERIOD;
    const int64_t some = 100;
    struct placed_operand a;
    struct placed_operand b;
    struct hiding hiding = hiding_make(bytes_for(2 * m, n, k));
    placed_make(&a, &hiding, one->a, m, k, FILL_OUTLIERS, 1, true);
    placed_make_by(&b, &hiding, one->b, n, k, FILL_NORMAL, 2, true, repeat_columns);
    const float *const c = multiply(&hiding, &a, &b, m);
    test_device_hash(c, (size_t)(m * n) * sizeof *c);
    float bias[3 * PERIOD];
    for (int64_t j = 0; j < n; ++j) {
        bias[j] = (float)(j * 37 % 101) - 50.0f;
    }
    const float *const added = multiply_and_add(&hiding, &a, &b, m, bias);
    for (int64_t i = 0; i < m * n; ++i) {
        if (added[i] != c[i] + bias[i % n]) {
            CHECK_FAIL("%s by %s: the bias of column %lld", one->a, one->b, (long long)(i % n));
            break;
        }
    }
    b.placed.plain.rows = some;
    const float *const first = multiply(&hiding, &a, &b, m);
    for (int64_t i = 0; i < m; ++i) {
        CHECK_BYTES(c + i * n, first + i * some, (size_t)some * sizeof *c, "%s by %s: %lld of %lld columns",
                    one->a, one->b, (long long)some, (long long)n);
        for (int64_t p = 1; p < n / PERIOD; ++p) {
            CHECK_BYTES(c + i * n + p * PERIOD, c + i * n, PERIOD * sizeof *c, "%s by %s: columns from %lld on",
                        one->a, one->b, (long long)(p * PERIOD));
        }
    }
    placed_free(&a);
    placed_free(&b);
    hiding_free(&hiding);
}

static void weights_across_their_rows_in_slices(void) {
    static const int64_t shapes[][3] = {{9, 300, 288}, {21, 290, 160}, {70, 129, 144}};
    int cases = 0;
    for (int i = 0; i < GEMM_CASE_COUNT; ++i) {
        if (strstr(gemm_cases[i].b, "across") == NULL) {
            continue;
        }
        ++cases;
        check_case(&gemm_cases[i], shapes[cases % COUNT(shapes)], true);
        check_slices(&gemm_cases[i], 5 + cases % 3 * 16, cases % 2 ? 256 : 272);
    }
    CHECK(cases > 20);
}

/* ---- infinities and NaN ---- */

static int class_of(float value) { return isnan(value) ? 3 : isinf(value) ? (value > 0.0f ? 1 : 2) : 0; }

static void values_that_are_not_finite(void) {
    static const struct gemm_case cases[] = {{"bf16", "bf16", false},       {"bf16", "mxfp8", false},
                                             {"bf16", "mxfp8.e5m2", false}, {"mxfp8", "mxfp8", false},
                                             {"bf16", "fp8row", false},     {"fp8.e5m2", "fp8", false}};
    static const int64_t rows[] = {3, 21};
    for (int i = 0; i < COUNT(cases) * 4; ++i) {
        struct placed_operand a;
        struct placed_operand b;
        const struct gemm_case *one = &cases[i / 4];
        const int64_t m = rows[i % 2];
        const int64_t n = 40;
        const int64_t k = 160;
        struct hiding hiding = hiding_make(bytes_for(m, n, k));
        const enum tensor_fill fill = i / 2 % 2 == 0 ? FILL_NAN : FILL_INFINITY;
        placed_make(&a, &hiding, one->a, m, k, FILL_NORMAL, 1, true);
        placed_make(&b, &hiding, one->b, n, k, fill, 2, true);
        struct gemm_job job = {.a = a.made.operand, .b = b.made.operand, .c = matrix_make(m, n)};
        multiply_on_cpu(&job);
        const float *const expected = job.c.data;
        const float *const c = multiply(&hiding, &a, &b, m);
        for (int64_t e = 0; e < m * n; ++e) {
            if (class_of(c[e]) != class_of(expected[e])) {
                CHECK_FAIL("%s by %s, fill %d: element %lld, %lld is %g, on the CPU %g", one->a, one->b,
                           (int)fill, (long long)(e / n), (long long)(e % n), (double)c[e],
                           (double)expected[e]);
                break;
            }
        }
        free(job.c.data);
        placed_free(&a);
        placed_free(&b);
        hiding_free(&hiding);
    }
}

/* ---- batches ---- */

static void check_batches(const struct gemm_case *one, int64_t n, int64_t k, int64_t most) {
    static const int64_t sizes[] = {1, 3, 8, 17, 64, 129, 513};
    struct placed_operand a;
    struct placed_operand b;
    struct hiding hiding = hiding_make(bytes_for(3 * most, n, k));
    placed_make(&a, &hiding, one->a, most, k, FILL_OUTLIERS, 1, true);
    placed_make(&b, &hiding, one->b, n, k, FILL_NORMAL, 2, true);
    const float *const whole = multiply(&hiding, &a, &b, most);
    test_device_hash(whole, (size_t)(most * n) * sizeof *whole);
    for (int i = 0; i < COUNT(sizes) && sizes[i] <= most; ++i) {
        const float *const c = multiply(&hiding, &a, &b, sizes[i]);
        CHECK_BYTES(c, whole, (size_t)(sizes[i] * n) * sizeof *c, "%s by %s: the first %lld of %lld rows",
                    one->a, one->b, (long long)sizes[i], (long long)most);
    }
    placed_free(&a);
    placed_free(&b);
    hiding_free(&hiding);
}

static void rows_do_not_depend_on_the_batch(void) {
    static const struct gemm_case cases[] = {{"bf16", "bf16", false},
                                             {"bf16", "nvfp4", false},
                                             {"bf16", "mxfp4", false},
                                             {"bf16", "mxfp8", false},
                                             {"fp8blk1", "fp8blk2", false},
                                             {"fp8row", "fp8row", false},
                                             {"nvfp4+rowscaled", "nvfp4", false},
                                             {"bf16", "across nvfp4", false},
                                             {"f32", "nvfp4", false}};
    for (int i = 0; i < COUNT(cases); ++i) {
        check_batches(&cases[i], 40, 272, 130);
    }
    check_batches(&cases[1], 66, 1104, 513);
    static const struct gemm_case swizzled = {"bf16", "nvfp4+swizzle", false};
    check_batches(&swizzled, 161, 384, 65);
    for (int i = 0; i < COUNT(cases);
         ++i) { /* depths of whole sum blocks, few and more than a block of threads has warps */
        check_batches(&cases[i], 37, 384, 65);
        check_batches(&cases[i], 67, 1152, 65);
    }
}

/* The product with one row of a, whose data are copied to an address `offset` bytes after a multiple of 64, and whose row step is
 * as an operator finds it for one row: the number of columns. */
static void check_row_at(struct hiding *hiding, const struct placed_operand *a, const struct placed_operand *b,
                         int64_t row, size_t offset, const float *expected, const char *what) {
    struct placed_operand one = *a;
    const struct opaq_view *q = &a->made.q;
    const int64_t n = b->placed.plain.rows;
    struct quant_copy copy;
    if (a->placed.copy == NULL) {
        const int64_t step = a->placed.plain.row_step;
        const size_t bytes = (size_t)a->placed.plain.columns * 2;
        char *const to = (char *)hiding_copy(hiding, NULL, bytes + offset) + offset;
        memcpy(hiding_host(hiding, to), (const char *)a->made.x.buffer[0].data + row * step * 2, bytes);
        one.placed.plain.data = to;
        one.placed.plain.row_step = a->placed.plain.columns;
    } else { /* only row 0: its scales are where they were */
        const size_t bytes = q->buffer[0].bytes;
        char *const to = (char *)hiding_copy(hiding, NULL, bytes + offset) + offset;
        memcpy(hiding_host(hiding, to), q->buffer[0].data, bytes);
        copy = *a->placed.copy;
        copy.data = (uint8_t *)to;
        one.placed.copy = &copy;
    }
    CHECK_BYTES(multiply(hiding, &one, b, 1), expected + row * n, (size_t)n * sizeof *expected,
                "%s: row %lld alone, %zu bytes after a multiple of 64", what, (long long)row, offset);
}

/* A row alone may have an address that no row of the batch has: a batch of rows of 148 values, of which 144 are used, has rows
 * at all multiples of 8 bytes. */
static void rows_do_not_depend_on_their_addresses(void) {
    static const char *const weights[] = {"bf16", "nvfp4", "mxfp8", "fp8row", "fp8blk2", "across nvfp4"};
    static const char *const tokens[] = {"bf16", "mxfp8", "fp8blk1"};
    static const size_t offsets[] = {0, 2, 8, 16, 24};
    const int64_t n = 40;
    const int64_t k = 144;
    const int64_t gap = 4;
    for (int i = 0; i < COUNT(weights) * COUNT(tokens); ++i) {
        const char *const text = tokens[i % COUNT(tokens)];
        const bool is_plain = strcmp(text, "bf16") == 0;
        char what[64];
        struct placed_operand a;
        struct placed_operand b;
        struct hiding hiding = hiding_make(bytes_for(64, n, k));
        placed_make(&a, &hiding, text, 5, is_plain ? k + gap : k, FILL_OUTLIERS, 1, true);
        placed_make(&b, &hiding, weights[i / COUNT(tokens)], n, k, FILL_NORMAL, 2, true);
        a.placed.plain.columns = k;
        snprintf(what, sizeof what, "%s by %s", text, weights[i / COUNT(tokens)]);
        const float *const whole = multiply(&hiding, &a, &b, 5);
        for (int o = 0; o < COUNT(offsets); ++o) {
            check_row_at(&hiding, &a, &b, 0, offsets[o], whole, what);
            if (is_plain) {
                check_row_at(&hiding, &a, &b, 3, offsets[o], whole, what);
            }
        }
        placed_free(&a);
        placed_free(&b);
        hiding_free(&hiding);
    }
}

static const struct test_case tests[] = {
    TEST(every_pair_is_within_the_bound),      TEST(long_sums_are_within_the_bound),
    TEST(weights_across_their_rows_in_slices), TEST(values_that_are_not_finite),
    TEST(rows_do_not_depend_on_the_batch),     TEST(rows_do_not_depend_on_their_addresses)};
TEST_MAIN(tests)
