/* test_never_slower.c: no kernel is slower than the reference's, at any shape: odd sizes, every table that this
 * machine can run, the case lists of the other tests and the benchmarks.
 *
 * A sample is a number of calls that takes long enough to measure; both sides alternate, and the best sample of
 * each counts. A kernel is slower if it takes a quarter more time than the reference and, for tensors of a few
 * elements, some microseconds more. It fails after three such results in a row, so that other load on the
 * machine does not fail the test. Not for builds with sanitizers, whose times are not comparable. */
#include <stdbool.h>
#include <stdlib.h>
#include <time.h>

#include "../cases/gemm_cases.h"
#include "../cases/gemm_operands.h"
#include "../cases/packed_operands.h"
#include "../cases/quant_cases.h"
#include "check.h"
#include "cpu/quant/ref/quant_table_ref.h"
#include "opaq/cpu.h"
#include "support_quant.h"
#include "support_spec.h"
#include "support_tensor.h"

static const int64_t few_sizes[] = {1, 2, 3, 5, 8, 17, 33};
static const int64_t odd_sizes[] = {1, 7, 16, 31, 65, 130, 257};
enum { SIZE_COUNT = 7, SAMPLES = 3, TRIES = 3, MOST_CALLS = 1 << 12 };

static const double factor = 1.25;
static const double sample_s = 20e-6;
static const double slack_s = 4e-6; /* per call */

/* ---- timing ---- */

/* The function to call, with the kernels of one side. */
struct contest {
    void (*call)(const struct contest *contest, bool is_reference);
    const void *argument;
};

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static double sample(const struct contest *contest, bool is_reference, int calls) {
    const double start = now();
    for (int i = 0; i < calls; ++i) {
        contest->call(contest, is_reference);
    }
    return (now() - start) / calls;
}

/* Seconds per call: the reference's, the other's. */
struct times {
    double reference;
    double other;
};

static struct times measure(const struct contest *contest) {
    struct times best = {1e9, 1e9};
    const double once = sample(contest, true, 1);
    const int calls = once > sample_s                ? 1
                      : once * MOST_CALLS < sample_s ? MOST_CALLS
                                                     : (int)(sample_s / once) + 1;
    for (int i = 0; i < SAMPLES; ++i) {
        const double reference = sample(contest, true, calls);
        const double other = sample(contest, false, calls);
        best.reference = reference < best.reference ? reference : best.reference;
        best.other = other < best.other ? other : best.other;
    }
    return best;
}

static bool is_slower(struct times times) { return times.other > factor * times.reference + slack_s; }

/* The case, for the message. */
struct what {
    const char *kernel;
    const char *text; /* sizes of the operands */
    int64_t size[3];
};

static void check_contest(const struct contest *contest, const struct what *what) {
    struct times times = measure(contest);
    for (int i = 1; i < TRIES && is_slower(times); ++i) {
        times = measure(contest);
    }
    if (is_slower(times)) {
        CHECK_FAIL("%s %s, %lld x %lld x %lld: %.2f us, the reference takes %.2f us", what->kernel, what->text,
                   (long long)what->size[0], (long long)what->size[1], (long long)what->size[2],
                   times.other * 1e6, times.reference * 1e6);
    }
}

static bool can_run(uint32_t features) { return (features & ~opaq_cpu_features()) == 0; }

/* ---- products with tiled weights ---- */

struct product {
    const struct packed_kernel *reference;
    const struct packed_kernel *kernel;
    const struct packed_weight *weight;
    const struct packed_rows *x;
    int64_t tiles;
    float *y;
    void *panel;
};

static void run_product(const struct contest *contest, bool is_reference) {
    const struct product *p = contest->argument;
    const struct packed_kernel *kernel = is_reference ? p->reference : p->kernel;
    kernel->run(p->weight, p->x, 0, p->tiles, p->y, p->weight->rows, p->panel);
}

/* One weight, every number of rows, every kernel of one precision. */
static void check_products(const struct packed_case_weight *w, enum packed_precision precision) {
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    const enum packed_format format = w->weight.format;
    const int64_t tile_rows = packed_tile_rows(format);
    const struct packed_kernel *const reference = &tables[count - 1]->kernel[format][precision];
    for (int m = 0; m < SIZE_COUNT; ++m) {
        struct packed_case_rows x;
        packed_case_rows_make(&x, precision, format, few_sizes[m], w->weight.columns, PACKED_FILL_USUAL, 2);
        float *const y = packed_allocate(few_sizes[m] * w->weight.rows * (int64_t)sizeof(float));
        for (int t = 0; t + 1 < count; ++t) {
            const struct packed_kernel *const kernel = &tables[t]->kernel[format][precision];
            if (kernel->run == NULL || !can_run(tables[t]->features)) {
                continue;
            }
            const int64_t bytes =
                kernel->panel_bytes > reference->panel_bytes ? kernel->panel_bytes : reference->panel_bytes;
            void *const panel = packed_allocate(bytes);
            const struct product product = {
                reference, kernel, &w->weight, &x.rows, ceil_div(w->weight.rows, tile_rows), y, panel};
            const struct contest contest = {run_product, &product};
            const struct what what = {kernel->name, "", {few_sizes[m], w->weight.rows, w->weight.columns}};
            check_contest(&contest, &what);
            free(panel);
        }
        free(y);
        packed_case_rows_free(&x);
    }
}

static void products_with_tiles(void) {
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    for (int format = 0; format < PACKED_FORMAT_COUNT; ++format) {
        for (int i = 0; i < SIZE_COUNT * SIZE_COUNT; ++i) {
            struct packed_case_weight w;
            packed_case_weight_make(&w, (enum packed_format)format, false, odd_sizes[i / SIZE_COUNT],
                                    odd_sizes[i % SIZE_COUNT], PACKED_FILL_USUAL, 1);
            for (int precision = 0; precision < PACKED_PRECISION_COUNT; ++precision) {
                if (tables[count - 1]->kernel[format][precision].run != NULL) {
                    check_products(&w, (enum packed_precision)precision);
                }
            }
            packed_case_weight_free(&w);
        }
    }
}

/* ---- other products ---- */

struct gemm {
    const struct gemm_table *reference;
    const struct gemm_table *table;
    const struct gemm_job *job;
    void *workspace;
};

static void run_gemm(const struct contest *contest, bool is_reference) {
    const struct gemm *g = contest->argument;
    gemm_run_with(is_reference ? g->reference : g->table, NULL, g->job, g->workspace, NULL);
}

static void check_gemm(const struct gemm_case *from, const int64_t *size) {
    int count;
    const struct gemm_table *const *tables = gemm_tables(&count);
    struct gemm_case_operand operand[2];
    const char *const text[2] = {from->a, from->b};
    for (int i = 0; i < 2; ++i) {
        gemm_case_operand_make(&operand[i], text[i], size[i], size[2]);
        struct tensor x = {operand[i].x};
        tensor_fill(&x, FILL_NORMAL, 1);
        gemm_case_operand_quantize(&operand[i], true, NULL);
    }
    struct opaq_view c = gemm_case_tensor(size[0], size[1], OPAQ_F32, NULL);
    const bool is_pair = strstr(from->a, "rht") != NULL && strstr(from->b, "rht") != NULL;
    operand[0].operand.undo_hadamard = !is_pair;
    operand[1].operand.undo_hadamard = !is_pair;
    const struct gemm_job job = {.a = operand[0].operand, .b = operand[1].operand, .c = quant_matrix_make(&c)};
    void *const workspace = gemm_case_allocate(gemm_workspace_bytes(&job));
    for (int t = 0; t + 1 < count; ++t) {
        if (can_run(tables[t]->features)) {
            const struct gemm gemm = {tables[count - 1], tables[t], &job, workspace};
            const struct contest contest = {run_gemm, &gemm};
            const struct what what = {tables[t]->name, from->b, {size[0], size[1], size[2]}};
            check_contest(&contest, &what);
        }
    }
    free(workspace);
    gemm_case_tensor_free(&c);
    gemm_case_operand_free(&operand[0]);
    gemm_case_operand_free(&operand[1]);
}

static void other_products(void) {
    for (int i = 0; i < GEMM_CASE_COUNT; ++i) {
        for (int k = 0; gemm_cases[i].is_timed && k < SIZE_COUNT * SIZE_COUNT * SIZE_COUNT; ++k) {
            const int64_t size[3] = {few_sizes[k / SIZE_COUNT / SIZE_COUNT],
                                     odd_sizes[k / SIZE_COUNT % SIZE_COUNT], odd_sizes[k % SIZE_COUNT]};
            check_gemm(&gemm_cases[i], size);
        }
    }
}

/* ---- quantizers ---- */

struct conversion {
    void (*reference)(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);
    void (*run)(const struct quant_job *job, const struct quant_copy *copy, int64_t r, int64_t r_end);
    const struct quant_job *job;
};

static void run_conversion(const struct contest *contest, bool is_reference) {
    const struct conversion *c = contest->argument;
    for (int i = 0; i < c->job->copy_count; ++i) {
        const struct quant_copy *copy = &c->job->copy[i];
        if (quant_copy_is_narrow(copy)) { /* the library uses the reference for it: nothing to compare */
            continue;
        }
        (is_reference ? c->reference : c->run)(c->job, copy, 0, copy->operand.rows);
    }
}

struct largest {
    const struct amax_kernel *reference;
    const struct amax_kernel *kernel;
    const struct quant_job *job;
};

static void run_largest(const struct contest *contest, bool is_reference) {
    const struct largest *l = contest->argument;
    float amax = 0.0f;
    for (int i = 0; i < l->job->copy_count; ++i) {
        const struct quant_copy *copy = &l->job->copy[i];
        (is_reference ? l->reference : l->kernel)->run(copy, &l->job->spec, 0, copy->operand.rows, &amax, 0);
    }
}

static void check_table(const struct quant_table *table, const struct quant_job *job, const char *spec,
                        bool is_quantizing) {
    const struct quant_table *const reference = &quant_table_ref;
    const int format = job->spec.format;
    const struct quant_kernel *kernel = is_quantizing ? &table->quantize[format] : &table->dequantize[format];
    struct what what = {kernel->name, spec, {job->copy[0].operand.rows, job->copy[0].operand.columns, 1}};
    if (kernel->run != NULL) {
        const struct conversion conversion = {is_quantizing ? reference->quantize[format].run
                                                            : reference->dequantize[format].run,
                                              kernel->run, job};
        const struct contest contest = {run_conversion, &conversion};
        check_contest(&contest, &what);
    }
    if (is_quantizing && table->amax.run != NULL) {
        const struct largest largest = {&reference->amax, &table->amax, job};
        const struct contest contest = {run_largest, &largest};
        what.kernel = table->amax.name;
        check_contest(&contest, &what);
    }
}

static void check_quantizer(const struct quant_case *from, int64_t rows, int64_t columns) {
    int count;
    const struct quant_table *const *tables = quant_tables(&count);
    const struct opaq_spec spec = spec_of(from->spec);
    struct tensor x = tensor_make(rows, columns, from->dtype, NULL);
    tensor_fill(&x, FILL_NORMAL, 1);
    const struct opaq_quantize_args args = args_for(&spec);
    struct tensor q = quantized(&x, &spec, &args); /* so that its scales have different values */
    struct tensor y = plain_like(&x);
    for (int t = 0; t + 1 < count; ++t) {
        if (!can_run(tables[t]->features)) {
            continue;
        }
        struct quant_job job;
        quant_job_make(&x.view, &q.view, spec.usage, &job);
        job.tensor_scale = 1.0f;
        job.random = args.random;
        check_table(tables[t], &job, from->spec, true);
        for (int usage = OPAQ_ROWWISE; usage <= OPAQ_COLUMNWISE; ++usage) {
            if (usage & spec.usage) {
                quant_job_make(&y.view, &q.view, usage, &job);
                check_table(tables[t], &job, from->spec, false);
            }
        }
    }
    tensor_free(&x);
    tensor_free(&q);
    tensor_free(&y);
}

static void quantizers(void) {
    for (int i = 0; i < QUANT_CASE_COUNT; ++i) {
        for (int k = 0; k < SIZE_COUNT * SIZE_COUNT; ++k) {
            check_quantizer(&quant_cases[i], few_sizes[k / SIZE_COUNT], odd_sizes[k % SIZE_COUNT]);
        }
        check_quantizer(&quant_cases[i], 130, 33);
        check_quantizer(&quant_cases[i], 65, 257);
    }
}

/* Weights of a few rows or columns. */
static void narrow_weights(void) {
    static const int64_t shapes[][2] = {{1, 1000}, {1000, 1}, {5, 1000}, {1000, 5}};
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    for (int i = 0; i < PACKED_FORMAT_COUNT * PACKED_PRECISION_COUNT; ++i) {
        const enum packed_format format = (enum packed_format)(i / PACKED_PRECISION_COUNT);
        const enum packed_precision precision = (enum packed_precision)(i % PACKED_PRECISION_COUNT);
        for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; ++k) {
            if (tables[count - 1]->kernel[format][precision].run != NULL) {
                struct packed_case_weight w;
                packed_case_weight_make(&w, format, false, shapes[k][0], shapes[k][1], PACKED_FILL_USUAL, 1);
                check_products(&w, precision);
                packed_case_weight_free(&w);
            }
        }
    }
}

/* Many rows shorter than a block, and many columns shorter than a vector. */
static void narrow_tensors(void) {
    static const int64_t shapes[][2] = {{1000, 1}, {1000, 5}, {1000, 9}, {1000, 17}, {1, 1000}, {5, 1000}};
    for (int i = 0; i < QUANT_CASE_COUNT; ++i) {
        for (size_t k = 0; k < sizeof shapes / sizeof shapes[0]; ++k) {
            check_quantizer(&quant_cases[i], shapes[k][0], shapes[k][1]);
        }
    }
}

static const struct test_case tests[] = {TEST(products_with_tiles), TEST(narrow_weights), TEST(other_products),
                                         TEST(quantizers), TEST(narrow_tensors)};
TEST_MAIN(tests)
