/* test_quant_kernels.c: every table of kernels that this machine can run, and opaq_quantize, opaq_dequantize
 * and opaq_amax with them on a pool, compared with the reference's kernels called in sequence, byte for byte:
 * on the benchmark's case list and on every spec. The file is long because all tests share one way to run
 * kernels. */
#include <math.h>
#include <stdlib.h>

#include "base/fp_environment.h"
#include "check.h"
#include "cpu/cpu_functions.h"
#include "cpu/kernel_family.h"
#include "cpu/quant/ref/quant_table_ref.h"
#include "definition/decode_ref.h"
#include "definition/scale_rules.h"
#include "opaq/cpu.h"
#include "support_quant.h"
#include "support_spec.h"
#include "support_tensor.h"

#include "../cases/quant_cases.h"

/* A table, and the tables that serve the entries it lacks. */
struct kernels {
    const struct quant_table *const *tables;
    int count;
};

static struct kernels reference_kernels(void) {
    static const struct quant_table *const reference[] = {&quant_table_ref};
    return (struct kernels){reference, 1};
}

/* The i-th table that this machine can run, the fastest first; false after the last one, which is the one
 * before the reference. */
static bool kernels_at(int i, struct kernels *kernels) {
    int count;
    const struct quant_table *const *tables = quant_tables(&count);
    for (int t = 0; t + 1 < count; ++t) {
        if ((tables[t]->features & ~opaq_cpu_features()) == 0 && i-- == 0) {
            *kernels = (struct kernels){tables + t, count - t};
            return true;
        }
    }
    return false;
}

static const struct quant_table *table_at(struct kernels kernels, size_t offset) {
    const struct kernel_family family = {.tables = kernels.tables, .table_count = kernels.count};
    return kernel_family_table(&family, offset, opaq_cpu_features());
}

/* ---- the steps of opaq_quantize in their simplest form: no threads, no dispatch ---- */

struct given {
    const float *amax;  /* for both copies, instead of the computed ones */
    const float *scale; /* fp8: instead of the one computed from the amax */
    struct opaq_random random;
};

static void settle(struct kernels kernels, struct quant_job *job, const struct given *given, int i) {
    const struct quant_copy *copy = &job->copy[i];
    const struct amax_kernel *amax = &table_at(kernels, offsetof(struct quant_table, amax))->amax;
    if (job->spec.format == OPAQ_FP8) {
        float value = 0.0f;
        if (copy->operand.columns > 0) {
            amax->run(copy, &job->spec, 0, copy->operand.rows, &value, 0);
        }
        value = given->amax != NULL ? *given->amax : value;
        const struct fp8_scale scale = given->scale != NULL ? fp8_scale_given(&job->spec, *given->scale)
                                                            : fp8_scale_from_amax(&job->spec, value, FLT_MAX);
        job->tensor_scale = scale.apply;
        *(float *)copy->scale = scale.stored;
    } else if (copy->amax != NULL) {
        const int64_t count = copy->amax_step == 0 ? 1 : copy->operand.rows;
        memset(copy->amax, 0, (size_t)count * sizeof *copy->amax);
        if (copy->operand.columns > 0) {
            amax->run(copy, &job->spec, 0, copy->operand.rows, copy->amax, copy->amax_step);
        }
        for (int64_t k = 0; k < count; ++k) {
            copy->amax[k] = given->amax != NULL ? *given->amax : nvfp4_stored(&job->spec, copy->amax[k]);
        }
    }
}

/* Both copies in one pass over x; false if the table has no kernel for it. */
static bool run_both(struct kernels kernels, const struct quant_job *job) {
    const size_t offset = offsetof(struct quant_table, both) + job->spec.format * sizeof(struct both_kernel);
    const struct both_kernel *kernel = &table_at(kernels, offset)->both[job->spec.format];
    const struct quant_matrix *x = &job->copy[0].operand;
    if (job->copy_count < 2 || x->columns == 0 || kernel->run == NULL || !kernel->covers(job)) {
        return false;
    }
    for (int64_t r = 0; kernel->amaxes != NULL && r < x->rows; r += QUANT_BOTH_ROWS) {
        kernel->amaxes->find(job, r, min_int64(r + QUANT_BOTH_ROWS, x->rows));
    }
    if (kernel->amaxes != NULL && !kernel->amaxes->amaxes_in_range(job)) {
        return false;
    }
    for (int64_t r = 0; r < x->rows; r += QUANT_BOTH_ROWS) {
        kernel->run(job, r, min_int64(r + QUANT_BOTH_ROWS, x->rows));
    }
    if (kernel->amaxes != NULL) {
        kernel->amaxes->finish(job);
    }
    return true;
}

enum passes { ONE_PASS_PER_COPY, ONE_PASS };

static bool quantize_with(struct kernels kernels, const struct tensor *x, const struct given *given,
                          enum passes passes, struct tensor *q) {
    struct quant_job job;
    quant_job_make(&x->view, &q->view, q->view.proto.spec.usage, &job);
    job.random = given->random;
    for (int i = 0; i < opaq_proto_buffer_count(&q->view.proto); ++i) {
        struct opaq_buffer buffer;
        (void)opaq_proto_buffer(&q->view.proto, i, &buffer, NULL);
        memset(q->view.buffer[i].data, 0, buffer.role == OPAQ_ROLE_SCALE ? buffer.bytes : 0);
    }
    const size_t offset =
        offsetof(struct quant_table, quantize) + job.spec.format * sizeof(struct quant_kernel);
    const struct quant_kernel *kernel = &table_at(kernels, offset)->quantize[job.spec.format];
    for (int i = 0; i < job.copy_count; ++i) {
        settle(kernels, &job, given, i);
    }
    if (passes == ONE_PASS) {
        return run_both(kernels, &job);
    }
    for (int i = 0; i < job.copy_count; ++i) {
        const struct quant_copy *copy = &job.copy[i];
        const int64_t panel = quant_panel_rows(copy);
        const bool is_empty = copy->operand.columns == 0 && job.spec.format != OPAQ_FP8ROW;
        for (int64_t r = 0; r < copy->operand.rows && !is_empty; r += panel) {
            const int64_t end = r + panel < copy->operand.rows ? r + panel : copy->operand.rows;
            kernel->run(&job, copy, r, end);
        }
    }
    return true;
}

static void dequantize_with(struct kernels kernels, const struct tensor *q, int usage, struct tensor *y) {
    struct quant_job job;
    quant_job_make(&y->view, &q->view, usage, &job);
    const size_t offset =
        offsetof(struct quant_table, dequantize) + job.spec.format * sizeof(struct quant_kernel);
    table_at(kernels, offset)
        ->dequantize[job.spec.format]
        .run(&job, &job.copy[0], 0, job.copy[0].operand.columns == 0 ? 0 : job.copy[0].operand.rows);
}

/* ---- comparing ---- */

/* The case, for the message. */
struct what {
    const char *table;
    const char *spec;
    const char *data;
};

static void compare(const struct tensor *actual, const struct tensor *expected, const char *how,
                    const struct what *what) {
    const int count = opaq_proto_buffer_count(&expected->view.proto);
    const struct opaq_proto *proto = &expected->view.proto;
    for (int i = 0; i < count; ++i) {
        CHECK_BYTES(actual->view.buffer[i].data, expected->view.buffer[i].data, tensor_bytes(expected, i),
                    "%s: %s of %s, %lld x %lld of %s, %s, buffer %d", what->table, how, what->spec,
                    (long long)opaq_proto_rows(proto), (long long)opaq_proto_columns(proto),
                    opaq_element_info((enum opaq_element)proto->dtype)->name, what->data, i);
    }
}

static void check_back(const struct tensor *x, const struct tensor *q, int usage, struct what what) {
    struct tensor y = tensor_make_proto(&x->view.proto);
    dequantize_with(reference_kernels(), q, usage, &y);
    struct kernels kernels;
    for (int i = 0; kernels_at(i, &kernels); ++i) {
        struct tensor z = tensor_make_proto(&x->view.proto);
        dequantize_with(kernels, q, usage, &z);
        what.table = kernels.tables[0]->name;
        compare(&z, &y, usage == OPAQ_ROWWISE ? "dequantize" : "dequantize columnwise", &what);
        tensor_free(&z);
    }
    tensor_free(&y);
}

/* A NaN result of two NaNs depends on the compiler. */
static void make_nans_alike(float *values, int n) {
    for (int i = 0; i < n; ++i) {
        values[i] = float_is_nan(values[i]) ? float_nan() : values[i];
    }
}

/* Rows as a product decodes them: each code's value times its factor, bit for bit. */
static void check_decoded_rows(const struct tensor *x, const struct tensor *q, int usage, struct what what) {
    enum { AT_ONCE = 256 };
    struct quant_job job;
    struct kernels kernels;
    quant_job_make(&x->view, &q->view, usage, &job);
    const struct quant_copy *copy = &job.copy[0];
    const int length = (int)min_int64(copy->block_columns, SEGMENT);
    for (int i = 0; kernels_at(i, &kernels); ++i) {
        const struct decode_row_kernel *kernel =
            &table_at(kernels, offsetof(struct quant_table, decode_row))->decode_row;
        for (int64_t row = 0; kernel->run != NULL && row < copy->operand.rows; row += 1 + row % 7) {
            for (int64_t k = 0; k < copy->operand.columns; k += AT_ONCE) {
                const int n = (int)min_int64(AT_ONCE, copy->operand.columns - k);
                uint8_t codes[AT_ONCE];
                uint8_t packed[AT_ONCE] = {0};
                float actual[AT_ONCE];
                float expected[AT_ONCE];
                copy_load_codes(copy, row, k, n, codes);
                for (int c = 0; c < n; ++c) {
                    packed[c / 2] = (uint8_t)(packed[c / 2] | codes[c] << (c % 2 * 4));
                }
                for (int c = 0; c < n; c += length) {
                    decode_codes(&job.spec, codes + c, (int)min_int64(length, n - c),
                                 decode_factor(&job.spec, copy, row, k + c), expected + c);
                }
                kernel->run(&job.spec, copy, row, k, copy->is_packed ? packed : codes, n, actual);
                make_nans_alike(actual, n);
                make_nans_alike(expected, n);
                CHECK_BYTES(actual, expected, (size_t)n * sizeof *actual, "%s: %s, %s, row %lld, column %lld",
                            kernel->name, what.spec, what.data, (long long)row, (long long)k);
            }
        }
    }
}

/* Quantizes and dequantizes one tensor with every table and with the reference. */
static void check_tables(const struct tensor *x, const struct opaq_spec *spec, const struct given *given,
                         struct what what) {
    struct tensor expected = quantized_like(x, spec);
    (void)quantize_with(reference_kernels(), x, given, ONE_PASS_PER_COPY, &expected);
    struct kernels kernels;
    for (int i = 0; kernels_at(i, &kernels); ++i) {
        struct tensor actual = quantized_like(x, spec);
        (void)quantize_with(kernels, x, given, ONE_PASS_PER_COPY, &actual);
        what.table = kernels.tables[0]->name;
        compare(&actual, &expected, "quantize", &what);
        tensor_free(&actual);
        actual = quantized_like(x, spec);
        if (quantize_with(kernels, x, given, ONE_PASS, &actual)) {
            compare(&actual, &expected, "quantize in one pass", &what);
        }
        tensor_free(&actual);
    }
    for (int usage = OPAQ_ROWWISE; usage <= OPAQ_COLUMNWISE; ++usage) {
        if (usage & spec->usage) {
            check_back(x, &expected, usage, what);
            check_decoded_rows(x, &expected, usage, what);
        }
    }
    tensor_free(&expected);
}

/* ---- the case list ---- */

static const char *const fill_names[FILL_COUNT] = {"normal", "outliers", "zero",    "tiny",
                                                   "huge",   "nan",      "infinity"};

static void run_case(const struct quant_case *one, const int64_t *shape, enum tensor_fill fill,
                     const struct opaq_parallel *parallel) {
    const struct given given = {.random = {.seed = 0x123456789ABCDEFu, .offset = 77}};
    const struct opaq_quantize_args args = {.random = given.random};
    const struct opaq_execution execution = {.parallel = parallel};
    const struct opaq_spec spec = spec_of(one->spec);
    const struct what what = {"op", one->spec, fill_names[fill]};
    struct opaq_error error;
    struct tensor x = tensor_make(shape[0], shape[1], one->dtype, NULL);
    struct tensor actual = quantized_like(&x, &spec);
    struct tensor expected = quantized_like(&x, &spec);
    tensor_fill(&x, fill, 1);
    (void)quantize_with(reference_kernels(), &x, &given, ONE_PASS_PER_COPY, &expected);
    if (opaq_quantize(&x.view, &args, &execution, &actual.view, &error) != OPAQ_OK) {
        CHECK_FAIL("%s: %s", one->spec, error.text);
    }
    compare(&actual, &expected, "quantize", &what);
    for (int usage = OPAQ_ROWWISE; usage <= OPAQ_COLUMNWISE; ++usage) {
        if (usage & spec.usage) {
            struct tensor y = tensor_make(shape[0], shape[1], one->dtype, NULL);
            struct tensor z = tensor_make(shape[0], shape[1], one->dtype, NULL);
            dequantize_with(reference_kernels(), &expected, usage, &y);
            if (opaq_dequantize(&expected.view, usage, &execution, &z.view, &error) != OPAQ_OK) {
                CHECK_FAIL("%s: %s", one->spec, error.text);
            }
            compare(&z, &y, "dequantize", &what);
            tensor_free(&y);
            tensor_free(&z);
        }
    }
    tensor_free(&x);
    tensor_free(&actual);
    tensor_free(&expected);
}

static void operations_equal_the_reference(void) {
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

static void every_table_equals_the_reference(void) {
    const struct given given = {.random = {.seed = 0xFEDCBA987654321u, .offset = 99}};
    for (int i = 0; i < QUANT_CASE_COUNT; ++i) {
        const struct opaq_spec spec = spec_of(quant_cases[i].spec);
        for (int s = 0; s < QUANT_CASE_SHAPE_COUNT; ++s) {
            struct tensor x =
                tensor_make(quant_case_shapes[s][0], quant_case_shapes[s][1], quant_cases[i].dtype, NULL);
            for (int fill = 0; fill < FILL_COUNT; ++fill) {
                tensor_fill(&x, (enum tensor_fill)fill, 2);
                check_tables(&x, &spec, &given,
                             (struct what){.spec = quant_cases[i].spec, .data = fill_names[fill]});
            }
            tensor_free(&x);
        }
    }
}

/* ---- every spec ---- */

/* Any bits: NaNs of every kind, subnormals, infinities, and between them values of similar size. */
static void fill_bits(struct tensor *x, uint64_t seed) {
    uint64_t state = seed + 1;
    const bool is_wide = x->view.proto.dtype == OPAQ_F32;
    const int64_t count = opaq_proto_rows(&x->view.proto) * opaq_proto_columns(&x->view.proto);
    for (int64_t i = 0; i < count; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint32_t bits = (uint32_t)(state >> 32);
        const bool is_any = i / 64 % 3 != 0; /* otherwise of similar size, so that scales are in range */
        if (is_wide) {
            ((uint32_t *)x->view.buffer[0].data)[i] = is_any ? bits : (bits & 0x80FFFFFFu) | 0x3F000000u;
        } else {
            const uint32_t like = x->view.proto.dtype == OPAQ_BF16 ? 0x3F00u : 0x3800u;
            const uint32_t free_bits = x->view.proto.dtype == OPAQ_BF16 ? 0x80FFu : 0x87FFu;
            ((uint16_t *)x->view.buffer[0].data)[i] = (uint16_t)(is_any ? bits : (bits & free_bits) | like);
        }
    }
}

static void every_spec_equals_the_reference(void) {
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    static const int64_t shapes[][2] = {{33, 47}, {130, 300}, {17, 1100}, {300, 33}, {64, 128}};
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    for (int i = 0; i < list.count; ++i) {
        const struct spec_text text = spec_text(&list.spec[i]);
        const float scale = 0.37f;
        const struct given given = {.scale = list.spec[i].options & OPAQ_DELAYED ? &scale : NULL,
                                    .random = {.seed = 3, .offset = (uint64_t)i}};
        for (int d = 0; d < 3; ++d) {
            const int64_t *shape = shapes[(i + d) % 5];
            struct tensor x = tensor_make(shape[0], shape[1], dtypes[d], NULL);
            fill_bits(&x, (uint64_t)i);
            check_tables(&x, &list.spec[i], &given, (struct what){.spec = text.text, .data = "any bits"});
            const enum tensor_fill fill = (enum tensor_fill)(i % FILL_COUNT);
            tensor_fill(&x, fill, (uint64_t)i);
            check_tables(&x, &list.spec[i], &given, (struct what){.spec = text.text, .data = fill_names[fill]});
            tensor_free(&x);
        }
    }
    printf("  %d specs\n", list.count);
    spec_list_free(&list);
}

/* Tiled codes, which are computed in strips of rows: partial tiles, several strips in both directions, rows
 * longer than a strip, and few rows per strip. */
static void tiles_equal_the_reference(void) {
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    static const int64_t shapes[][2] = {{37, 531}, {1, 2100},  {130, 70},   {273, 18},
                                        {16, 64},  {40, 6000}, {160, 1056}, {3, 33000}};
    enum { SHAPE_COUNT = sizeof shapes / sizeof shapes[0] };
    struct opaq_pool *pool = NULL;
    CHECK_EQ_INT(opaq_pool_create(2, &pool, NULL), OPAQ_OK);
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    struct spec_list list = spec_list_make(SPEC_DEFAULTS);
    int count = 0;
    for (int i = 0; i < list.count; ++i) {
        struct opaq_spec tiled = list.spec[i];
        tiled.options |= OPAQ_TILED;
        if (opaq_spec_check(&tiled, NULL) != OPAQ_OK || (tiled.options & OPAQ_DELAYED) != 0) {
            continue;
        }
        const struct spec_text text = spec_text(&tiled);
        for (int s = 0; s < SHAPE_COUNT; ++s) {
            const struct quant_case one = {.spec = text.text, .dtype = dtypes[(count + s) % 3]};
            run_case(&one, shapes[s], FILL_OUTLIERS, &parallel);
            run_case(&one, shapes[s], (enum tensor_fill)((count + s) % FILL_COUNT), &parallel);
        }
        ++count;
    }
    printf("  %d specs with tiles\n", count);
    CHECK(count >= 30);
    spec_list_free(&list);
    opaq_pool_destroy(pool);
}

/* Sizes with several strips and runs in both directions, and sizes that are written with non-temporal
 * stores. */
static void large_tensors_equal_the_reference(void) {
    static const struct {
        const char *spec;
        int64_t rows;
        int64_t columns;
    } cases[] = {{"fp8+both", 1088, 4224},
                 {"fp8row+both", 1088, 4224},
                 {"fp8blk1+both", 300, 2600},
                 {"fp8blk2+both", 300, 2600},
                 {"mxfp8+both", 1088, 4224},
                 {"mxfp4+both", 2176, 4224},
                 {"mxfp8+both+2d", 100, 4500},
                 {"nvfp4+both", 2176, 4224},
                 {"nvfp4+both+rht", 1100, 1100},
                 {"nvfp4+both+2d", 1100, 1100},
                 {"nvfp4+both+rht+sr", 600, 1100},
                 {"nvfp4+both+4over6", 1100, 4224},
                 {"nvfp4+both+2d+4over6=mse", 600, 1100},
                 {"fp8+both+sr", 1088, 4224},
                 {"fp8row+both+sr", 300, 2600},
                 {"fp8blk1+both+sr", 300, 2600},
                 {"fp8blk2+both+sr", 300, 2600},
                 {"mxfp8+both+sr", 1088, 4224},
                 {"mxfp4+both+sr", 2176, 4224}};
    const struct given given = {.random = {.seed = 5, .offset = 6}};
    for (size_t i = 0; i < sizeof cases / sizeof cases[0]; ++i) {
        const struct opaq_spec spec = spec_of(cases[i].spec);
        struct tensor x = tensor_make(cases[i].rows, cases[i].columns, OPAQ_BF16, NULL);
        tensor_fill(&x, FILL_OUTLIERS, i);
        check_tables(&x, &spec, &given, (struct what){.spec = cases[i].spec, .data = "large"});
        tensor_free(&x);
    }
}

/* The part that one pass computes of both copies together, and the remaining rows and columns; with any data,
 * and with values of similar size except at one position. */
static void parts_of_both_equal_the_reference(void) {
    static const char *const texts[] = {"fp8+both",           "fp8blk1+both",          "fp8blk1.e5m2+both+pow2",
                                        "fp8row+both",        "fp8row.e5m2+both+pow2", "mxfp8+both",
                                        "mxfp8.e5m2+both",    "mxfp8+both+swizzle",    "mxfp4+both",
                                        "nvfp4+both",         "nvfp4+both+rowscaled",  "nvfp4+both+swizzle",
                                        "nvfp4+both+2d",      "mxfp4+both+2d",         "nvfp4+both+rht",
                                        "mxfp8+both+rule=ocp"};
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    static const float strange[] = {0.0f, 1e-30f, 3e4f, (float)INFINITY, (float)NAN};
    const struct given given = {.random = {.seed = 8, .offset = 9}};
    for (size_t i = 0; i < 3 * sizeof texts / sizeof texts[0]; ++i) {
        const struct opaq_spec spec = spec_of(texts[i / 3]);
        struct tensor x = tensor_make(161, 1100, dtypes[i % 3], NULL);
        for (int fill = 0; fill < FILL_COUNT; ++fill) {
            tensor_fill(&x, (enum tensor_fill)fill, i);
            check_tables(&x, &spec, &given, (struct what){.spec = texts[i / 3], .data = fill_names[fill]});
        }
        for (size_t k = 0; k < sizeof strange / sizeof strange[0]; ++k) {
            const uint32_t code = opaq_element_encode(dtypes[i % 3], strange[k], OPAQ_IEEE);
            tensor_fill(&x, FILL_NORMAL, i + k);
            if (dtypes[i % 3] == OPAQ_F32) {
                ((uint32_t *)x.view.buffer[0].data)[77 * 1100 + 600] = code;
            } else {
                ((uint16_t *)x.view.buffer[0].data)[77 * 1100 + 600] = (uint16_t)code;
            }
            check_tables(&x, &spec, &given, (struct what){.spec = texts[i / 3], .data = "one strange number"});
        }
        tensor_free(&x);
    }
}

/* ---- options that have vectorized kernels ---- */

/* Partial blocks in both directions, slightly more than one strip, fewer rows than a square block, one row or
 * column. */
static const int64_t option_shapes[][2] = {{37, 531}, {1, 2100}, {130, 70}, {15, 257}, {273, 18}, {160, 1056}};
enum { OPTION_SHAPE_COUNT = sizeof option_shapes / sizeof option_shapes[0] };

/* Every dtype, every kind of data, every usage. */
static void check_options(const char *const *texts, int count) {
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    static const char *const usages[] = {"", "+columnwise", "+both"};
    for (int i = 0; i < count * 9; ++i) {
        char text[64];
        (void)snprintf(text, sizeof text, "%s%s", texts[i / 9], usages[i / 3 % 3]);
        const struct opaq_spec spec = spec_of(text);
        const int64_t *shape = option_shapes[(i / 9 + i % 9) % OPTION_SHAPE_COUNT];
        struct tensor x = tensor_make(shape[0], shape[1], dtypes[i % 3], NULL);
        for (int fill = 0; fill <= FILL_COUNT; ++fill) {
            /* the counter of random blocks goes beyond 32 bits, as does the offset */
            const struct given given = {
                .random = {.seed = 0xABCDEF0123456789u, .offset = 0x123456789u * (uint64_t)(i + fill)}};
            if (fill < FILL_COUNT) {
                tensor_fill(&x, (enum tensor_fill)fill, (uint64_t)i);
            } else {
                fill_bits(&x, (uint64_t)i);
            }
            const char *const data = fill < FILL_COUNT ? fill_names[fill] : "any bits";
            check_tables(&x, &spec, &given, (struct what){.spec = text, .data = data});
        }
        tensor_free(&x);
    }
}

static void four_over_six_equals_the_reference(void) {
    static const char *const texts[] = {"nvfp4+4over6",
                                        "nvfp4+4over6=mse",
                                        "nvfp4+4over6+e4m3max=448",
                                        "nvfp4+4over6=mse+e4m3max=448",
                                        "nvfp4+2d+4over6",
                                        "nvfp4+2d+4over6=mse",
                                        "nvfp4+2d+4over6+e4m3max=448",
                                        "nvfp4+rowscaled+4over6",
                                        "nvfp4+rowscaled+4over6=mse",
                                        "nvfp4+swizzle+4over6",
                                        "nvfp4+rowscaled+swizzle+4over6=mse",
                                        "nvfp4+2d+swizzle+4over6=mse"};
    check_options(texts, (int)(sizeof texts / sizeof texts[0]));
}

static void stochastic_rounding_equals_the_reference(void) {
    static const char *const texts[] = {"fp8+sr",
                                        "fp8.e5m2+sr",
                                        "fp8row+sr",
                                        "fp8row.e5m2+pow2+sr",
                                        "fp8blk1+sr",
                                        "fp8blk1.e5m2+sr",
                                        "fp8blk1+pow2+sr",
                                        "fp8blk2+sr",
                                        "fp8blk2.e5m2+pow2+sr",
                                        "mxfp8+sr",
                                        "mxfp8.e5m2+sr",
                                        "mxfp8+swizzle+sr",
                                        "mxfp8+2d+sr",
                                        "mxfp8+sr+rule=ocp",
                                        "mxfp8.e5m2+sr+rule=rceil",
                                        "mxfp4+sr",
                                        "mxfp4+2d+sr",
                                        "mxfp4+swizzle+sr",
                                        "mxfp4+sr+rule=ocp",
                                        "mxfp4+2d+sr+rule=rceil",
                                        "nvfp4+sr",
                                        "nvfp4+2d+sr",
                                        "nvfp4+rowscaled+sr"};
    check_options(texts, (int)(sizeof texts / sizeof texts[0]));
}

/* ---- arguments of callers ---- */

static void special_amaxes_and_scales(void) {
    static const char *const texts[] = {"fp8+both+delayed",
                                        "fp8.e5m2+delayed",
                                        "fp8+delayed+rule=modelopt",
                                        "fp8+delayed+rule=compressed-tensors",
                                        "fp8+both",
                                        "nvfp4+both",
                                        "nvfp4+both+2d",
                                        "nvfp4+both+rht",
                                        "nvfp4+both+4over6",
                                        "nvfp4+both+2d+4over6=mse",
                                        "nvfp4+both+rowscaled+4over6",
                                        "fp8+both+delayed+sr",
                                        "nvfp4+both+rowscaled",
                                        "nvfp4+both+rule=compressed-tensors",
                                        "nvfp4+both+rule=modelopt",
                                        "nvfp4+global+rule=compressed-tensors",
                                        "nvfp4+global+rule=modelopt"};
    static const float values[] = {
        0.0f,      -0.0f,    1.0f,    -1.0f,    448.0f,          0x1p-149f,        0x1p-126f,  -0x1p-130f,
        0x1p-120f, 0x1p100f, FLT_MAX, -FLT_MAX, (float)INFINITY, -(float)INFINITY, (float)NAN, -(float)NAN};
    for (size_t t = 0; t < sizeof texts / sizeof texts[0]; ++t) {
        const struct opaq_spec spec = spec_of(texts[t]);
        for (size_t v = 0; v < sizeof values / sizeof values[0]; ++v) {
            const bool is_delayed = (spec.options & OPAQ_DELAYED) != 0;
            const struct given given = {.amax = is_delayed ? NULL : &values[v],
                                        .scale = is_delayed ? &values[v] : NULL};
            struct tensor x = tensor_make(35, 300, v % 2 ? OPAQ_F32 : OPAQ_BF16, NULL);
            char data[64];
            (void)snprintf(data, sizeof data, "given %a", (double)values[v]);
            fill_bits(&x, v);
            check_tables(&x, &spec, &given, (struct what){.spec = texts[t], .data = data});
            tensor_fill(&x, FILL_NORMAL, v);
            check_tables(&x, &spec, &given, (struct what){.spec = texts[t], .data = data});
            tensor_free(&x);
        }
    }
}

/* ---- amax ---- */

static void check_amaxes(const struct tensor *x, const struct opaq_spec *spec, bool is_columnwise,
                         const char *data) {
    enum { ROW_LIMIT = 300 };
    struct quant_copy copy = {.usage = OPAQ_ROWWISE, .operand = quant_matrix_make(&x->view)};
    if (is_columnwise) {
        copy.operand = quant_matrix_transposed(copy.operand);
        copy.is_hadamard = (spec->options & OPAQ_HADAMARD) != 0;
    }
    const int64_t rows = copy.operand.rows < ROW_LIMIT ? copy.operand.rows : ROW_LIMIT;
    struct kernels kernels;
    for (int i = 0; copy.operand.columns > 0 && kernels_at(i, &kernels); ++i) {
        const struct amax_kernel *kernel = &table_at(kernels, offsetof(struct quant_table, amax))->amax;
        for (int step = 0; step <= 1; ++step) {
            float actual[ROW_LIMIT] = {0};
            float expected[ROW_LIMIT] = {0};
            kernel->run(&copy, spec, rows / 3, rows, actual, step);
            amax_ref(&copy, spec, rows / 3, rows, expected, step);
            CHECK_BYTES(actual, expected, sizeof actual, "%s: %lld x %lld, %s, step %d", kernel->name,
                        (long long)copy.operand.rows, (long long)copy.operand.columns, data, step);
        }
    }
}

static void amaxes_equal_the_reference(void) {
    static const char *const texts[] = {"nvfp4", "nvfp4+rule=modelopt", "nvfp4+columnwise+rht"};
    static const enum opaq_element dtypes[] = {OPAQ_F32, OPAQ_BF16, OPAQ_F16};
    for (int i = 0; i < 3 * 3 * QUANT_CASE_SHAPE_COUNT; ++i) {
        const struct opaq_spec spec = spec_of(texts[i % 3]);
        const int64_t *shape = quant_case_shapes[i / 9];
        struct tensor x = tensor_make(shape[0], shape[1], dtypes[i / 3 % 3], NULL);
        for (int fill = 0; fill <= FILL_COUNT; ++fill) {
            if (fill < FILL_COUNT) {
                tensor_fill(&x, (enum tensor_fill)fill, 4);
            } else {
                fill_bits(&x, 4);
            }
            check_amaxes(&x, &spec, false, fill < FILL_COUNT ? fill_names[fill] : "any bits");
            check_amaxes(&x, &spec, true, fill < FILL_COUNT ? fill_names[fill] : "any bits");
        }
        tensor_free(&x);
    }
}

static void every_format_has_a_case(void) {
    bool is_there[OPAQ_FORMAT_COUNT] = {false};
    for (int i = 0; i < QUANT_CASE_COUNT; ++i) {
        is_there[spec_of(quant_cases[i].spec).format] = true;
    }
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        if (!is_there[format]) {
            CHECK_FAIL("tests/cases/quant_cases.h has no %s", opaq_format_row((enum opaq_format)format)->name);
        }
    }
}

/* The names of the tables, for the output. */
static void tables_are_named(void) {
    struct kernels kernels;
    for (int i = 0; kernels_at(i, &kernels); ++i) {
        printf("  %s\n", kernels.tables[0]->name);
    }
}

static const struct test_case tests[] = {TEST(operations_equal_the_reference),
                                         TEST(every_table_equals_the_reference),
                                         TEST(every_spec_equals_the_reference),
                                         TEST(tiles_equal_the_reference),
                                         TEST(large_tensors_equal_the_reference),
                                         TEST(parts_of_both_equal_the_reference),
                                         TEST(four_over_six_equals_the_reference),
                                         TEST(stochastic_rounding_equals_the_reference),
                                         TEST(special_amaxes_and_scales),
                                         TEST(amaxes_equal_the_reference),
                                         TEST(every_format_has_a_case),
                                         TEST(tables_are_named)};
TEST_MAIN(tests)
