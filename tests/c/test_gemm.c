/* test_gemm.c: the matrix product against its definition, a plain loop over the operands as dequantize returns
 * them, bit for bit; that definition against double arithmetic, within the bound that gemm_run.h states; and
 * all tile kernels, also those for pairs of bf16, and numbers of threads against each other. The file is long
 * because all tests share one definition. */
#include <fenv.h>
#include <math.h>
#include <stdlib.h>

#include "check.h"
#include "cpu/quant/ref/quant_table_ref.h"
#include "opaq/cpu.h"
#include "support_float.h"
#include "support_tensor.h"

#include "../cases/gemm_cases.h"
#include "../cases/gemm_operands.h"

/* ---- operands ---- */

struct operand {
    struct gemm_case_operand made;
    struct gemm_operand operand;
    float *decoded; /* rows x depth */
    float *values;  /* the values of dequantization, where `decoded` lacks `factor`; or NULL */
    float factor;
    int64_t depth;
};

static float *floats(int64_t count) { return gemm_case_allocate((size_t)count * sizeof(float)); }

static int64_t place(const struct quant_matrix *m, int64_t r, int64_t c) {
    return r * m->row_step + c * m->column_step;
}

static float value_at(const struct quant_matrix *m, int64_t r, int64_t c) {
    const int64_t i = place(m, r, c);
    return m->dtype == OPAQ_F32 ? ((const float *)m->data)[i]
                                : opaq_element_decode(m->dtype, ((const uint16_t *)m->data)[i]);
}

static void decode_plain_operand(struct operand *o) {
    const struct quant_matrix *plain = &o->operand.plain;
    o->depth = plain->columns;
    o->decoded = floats(plain->rows * o->depth);
    for (int64_t i = 0; i < plain->rows * o->depth; ++i) {
        o->decoded[i] = value_at(plain, i / o->depth, i % o->depth);
    }
}

/* Dequantizes with the reference, without undoing a transform. */
static void decode_copy_operand(struct operand *o) {
    struct quant_copy copy = *o->operand.copy;
    const bool left_transformed = copy.is_hadamard && !o->operand.undo_hadamard;
    const int64_t rows = o->operand.plain.rows;
    const int64_t columns = o->operand.plain.columns;
    o->depth = left_transformed ? (columns + 15) / 16 * 16 : columns;
    o->decoded = floats(rows * o->depth);
    copy.is_hadamard = copy.is_hadamard && !left_transformed;
    copy.operand = (struct quant_matrix){o->decoded, OPAQ_F32, rows, o->depth, o->depth, 1};
    dequantize_ref(&o->made.job, &copy, 0, rows);
}

/* Dequantizes with the reference, transposed. */
static float *decode_transposed(const struct operand *o, const struct quant_job *job, struct quant_copy copy) {
    const int64_t rows = o->operand.plain.rows;
    float *const transposed = floats(rows * o->depth);
    float *const stored = floats(rows * o->depth);
    copy.operand = (struct quant_matrix){stored, OPAQ_F32, o->depth, rows, rows, 1};
    dequantize_ref(job, &copy, 0, o->depth);
    for (int64_t i = 0; i < rows * o->depth; ++i) {
        transposed[i % rows * o->depth + i / rows] = stored[i];
    }
    free(stored);
    return transposed;
}

static void decode_across_operand(struct operand *o) {
    o->depth = o->operand.plain.columns;
    o->decoded = decode_transposed(o, &o->made.job, *o->operand.copy);
}

/* The values that are decoded for a plain a of bf16: without the factor that all elements share. */
static void divide_by_factor(struct operand *o) {
    static float one = 1.0f;
    struct quant_job job = o->made.job;
    struct quant_copy copy = *o->operand.copy;
    float factor = 0.0f;
    if (job.spec.format == OPAQ_FP8) {
        factor = *(const float *)copy.scale;
        copy.scale = &one;
    } else if (job.spec.format == OPAQ_NVFP4 && copy.amax_step == 0) {
        const bool is_global = (job.spec.options & OPAQ_GLOBAL) != 0;
        factor = !is_global                            ? *copy.amax * (1.0f / (6.0f * (float)job.spec.e4m3_max))
                 : job.spec.rule == OPAQ_RULE_MODELOPT ? *copy.amax
                                                       : 1.0f / *copy.amax;
        job.spec.options |= OPAQ_GLOBAL; /* scales times the global one */
        job.spec.rule = OPAQ_RULE_MODELOPT;
        copy.amax = &one;
    }
    if (fabsf(factor) > 0x1p-100f && fabsf(factor) < 0x1p100f) {
        o->values = o->decoded;
        o->factor = factor;
        o->decoded = decode_transposed(o, &job, copy);
    }
}

static void operand_make(struct operand *o, const char *text, int64_t rows, int64_t columns,
                         enum tensor_fill fill, uint64_t seed, bool undo_hadamard) {
    gemm_case_operand_make(&o->made, text, rows, columns);
    struct tensor x = {o->made.x};
    tensor_fill(&x, fill, seed);
    gemm_case_operand_quantize(&o->made, undo_hadamard, NULL);
    o->operand = o->made.operand;
    o->values = NULL;
    o->factor = 1.0f;
    if (o->operand.copy == NULL) {
        decode_plain_operand(o);
    } else if (o->operand.is_across) {
        decode_across_operand(o);
    } else {
        decode_copy_operand(o);
    }
}

static void operand_free(struct operand *o) {
    gemm_case_operand_free(&o->made);
    free(o->decoded);
    free(o->values);
}

/* ---- the definition ---- */

static float defined_total(const float *a, const float *b, int64_t depth) {
    float total = 0.0f;
    for (int64_t k = 0; k < depth; k += 256) {
        float sum = 0.0f;
        for (int64_t i = k; i < depth && i < k + 256; ++i) {
            sum = fmaf(a[i], b[i], sum);
        }
        total += sum;
    }
    return total;
}

/* Rounded to a dtype, every NaN the positive quiet one. */
static uint32_t rounded(float value, enum opaq_element dtype) {
    const uint32_t canonical = dtype == OPAQ_F32 ? 0x7FC00000u : dtype == OPAQ_BF16 ? 0x7FC0u : 0x7E00u;
    return isnan(value)        ? canonical
           : dtype == OPAQ_F32 ? support_bits(value)
                               : opaq_element_encode(dtype, value, OPAQ_IEEE);
}

static void put_bits(const struct quant_matrix *m, int64_t r, int64_t c, uint32_t bits) {
    const int64_t i = place(m, r, c);
    if (m->dtype == OPAQ_F32) {
        ((float *)m->data)[i] = support_float(bits);
    } else {
        ((uint16_t *)m->data)[i] = (uint16_t)bits;
    }
}

/* Writes the result that gemm_run must leave in job->c to `expected`, a matrix of the same layout. */
static void run_definition(const struct operand *a, const struct operand *b, const struct gemm_job *job,
                           const struct quant_matrix *expected) {
    const struct quant_matrix bias = {.dtype = job->bias_dtype, .column_step = 1};
    for (int64_t i = 0; i < job->c.rows; ++i) {
        for (int64_t j = 0; j < job->c.columns; ++j) {
            float value = defined_total(a->decoded + i * a->depth, b->decoded + j * b->depth,
                                        a->depth < b->depth ? a->depth : b->depth);
            value *= b->factor == 0.0f ? 1.0f : b->factor;
            if (job->bias != NULL) {
                value += bias.dtype == OPAQ_F32
                             ? ((const float *)job->bias)[j]
                             : opaq_element_decode(bias.dtype, ((const uint16_t *)job->bias)[j]);
            }
            if (job->accumulate) {
                value += value_at(&job->c, i, j);
            }
            put_bits(expected, i, j, rounded(value, expected->dtype));
        }
    }
}

/* ---- running ---- */

static const int thread_counts[] = {1, 2, 5};
enum { THREAD_CASES = sizeof thread_counts / sizeof thread_counts[0] };
static struct opaq_pool *pools[THREAD_CASES];

static void pools_end(void) {
    for (int i = 0; i < THREAD_CASES; ++i) {
        opaq_pool_destroy(pools[i]);
    }
}

static struct opaq_parallel pool_at(int i) {
    if (pools[0] == NULL) {
        for (int j = 0; j < THREAD_CASES; ++j) {
            CHECK_EQ_INT(opaq_pool_create(thread_counts[j], &pools[j], NULL), OPAQ_OK);
        }
        CHECK_EQ_INT(atexit(pools_end), 0);
    }
    return opaq_pool_parallel(pools[i]);
}

static size_t matrix_bytes(const struct quant_matrix *m) {
    const size_t entry = m->dtype == OPAQ_F32 ? 4 : 2;
    const int64_t last = place(m, m->rows - 1, m->columns - 1);
    return m->rows == 0 || m->columns == 0 ? 0 : (size_t)(last + 1) * entry;
}

/* A table, optionally with kernels for pairs. */
struct kernels {
    const struct gemm_table *table, *pairs;
};
enum { KERNELS_LIMIT = 16 };

/* All tables that this machine can run. */
static int find_kernels(struct kernels *found) {
    int count;
    int pairs_count;
    int used = 0;
    const struct gemm_table *const *tables = gemm_tables(&count);
    const struct gemm_table *const *pairs = gemm_pairs_tables(&pairs_count);
    for (int t = 0; t < count; ++t) {
        for (int p = -1; p < pairs_count && (tables[t]->features & ~opaq_cpu_features()) == 0; ++p) {
            if (p < 0 || (t == count - 1 && (pairs[p]->features & ~opaq_cpu_features()) == 0)) {
                CHECK(used < KERNELS_LIMIT);
                found[used++] = (struct kernels){tables[t], p < 0 ? NULL : pairs[p]};
            }
        }
    }
    return used;
}

/* Kernels for pairs may flush subnormal numbers to 0: a separate test compares their results. */
static bool may_flush;

/* Every table that this machine can run, without and with pools of each size, must leave the definition's
 * result in c. c has its former contents before each run, and the definition's result afterwards. */
static void check_job(const struct operand *a, const struct operand *b, struct gemm_job *job,
                      const char *what) {
    const size_t bytes = matrix_bytes(&job->c);
    const struct quant_matrix c = job->c;
    struct quant_matrix expected = c;
    struct kernels kernels[KERNELS_LIMIT];
    const int count = find_kernels(kernels);
    expected.data = gemm_case_allocate(bytes);
    memcpy(expected.data, c.data, bytes);
    run_definition(a, b, job, &expected);
    void *workspace = gemm_case_allocate(gemm_workspace_bytes(job));
    for (int t = 0; t < count; ++t) {
        const struct gemm_table *const pairs = kernels[t].pairs;
        for (int p = -1; p < THREAD_CASES && !(may_flush && pairs != NULL && pairs->features != 0); ++p) {
            const struct opaq_parallel parallel = p < 0 ? (struct opaq_parallel){0} : pool_at(p);
            job->c.data = gemm_case_allocate(bytes);
            memcpy(job->c.data, c.data, bytes);
            gemm_run_with(kernels[t].table, pairs, job, workspace, p < 0 ? NULL : &parallel);
            CHECK_BYTES(job->c.data, expected.data, bytes, "%s, %lld x %lld x %lld, %s, pool %d", what,
                        (long long)c.rows, (long long)c.columns, (long long)job->a.plain.columns,
                        pairs != NULL ? pairs->name : kernels[t].table->name, p);
            free(job->c.data);
        }
    }
    memcpy(c.data, expected.data, bytes);
    job->c = c;
    free(expected.data);
    free(workspace);
}

/* A contiguous c of a dtype. */
static struct quant_matrix matrix_make(int64_t rows, int64_t columns, enum opaq_element dtype) {
    struct quant_matrix m = {NULL, dtype, rows, columns, columns, 1};
    m.data = gemm_case_allocate(matrix_bytes(&m));
    return m;
}

/* The factor in the bound. */
static double rounding_count(int64_t depth) {
    const int64_t blocks = (depth + 255) / 256;
    return (double)((depth < 256 ? depth : 256) + blocks + 2);
}

/* The distance from double arithmetic of a c in float32 without bias. */
static void check_bound(const struct operand *a, const struct operand *b, const struct quant_matrix *c,
                        const char *what) {
    const int64_t depth = a->depth < b->depth ? a->depth : b->depth;
    const double roundings = rounding_count(depth) + (b->values != NULL ? 5 : 0);
    const float *const other = b->values != NULL ? b->values : b->decoded;
    for (int64_t i = 0; i < c->rows; ++i) {
        for (int64_t j = 0; j < c->columns; ++j) {
            double exact = 0.0;
            double size = 0.0;
            for (int64_t k = 0; k < depth; ++k) {
                const double product = (double)a->decoded[i * a->depth + k] * (double)other[j * b->depth + k];
                exact += product;
                size += fabs(product);
            }
            const double allowed = roundings * 0x1p-24 * size;
            const double error = fabs((double)value_at(c, i, j) - exact);
            if (!(error <= allowed)) {
                CHECK_FAIL("%s: element %lld, %lld is %g from %g, allowed are %g", what, (long long)i,
                           (long long)j, error, exact, allowed);
                return;
            }
        }
    }
}

/* ---- tests ---- */

static void run_case(const struct gemm_case *one, const int64_t *shape, enum tensor_fill fill, bool undo) {
    char what[128];
    struct operand a;
    struct operand b;
    operand_make(&a, one->a, shape[0], shape[2], fill, 1, undo);
    operand_make(&b, one->b, shape[1], shape[2], fill, 2, undo);
    if (b.operand.is_across && strcmp(one->a, "bf16") == 0) {
        divide_by_factor(&b);
    }
    may_flush = fill > FILL_OUTLIERS;
    struct gemm_job job = {.a = a.operand, .b = b.operand, .c = matrix_make(shape[0], shape[1], OPAQ_F32)};
    snprintf(what, sizeof what, "%s by %s, fill %d%s", one->a, one->b, (int)fill, undo ? ", undone" : "");
    check_job(&a, &b, &job, what);
    if (fill <= FILL_OUTLIERS) {
        check_bound(&a, &b, &job.c, what);
    }
    free(job.c.data);
    operand_free(&a);
    operand_free(&b);
}

static bool is_hadamard(const struct gemm_case *one) {
    return strstr(one->a, "rht") != NULL || strstr(one->b, "rht") != NULL;
}

/* Without undoing, the transform is useful for a pair only, but the result is defined for all. */
static void every_case_is_as_defined(void) {
    for (int i = 0; i < GEMM_CASE_COUNT; ++i) {
        for (int s = 0; s < GEMM_TEST_SHAPE_COUNT; ++s) {
            run_case(&gemm_cases[i], gemm_test_shapes[s], FILL_NORMAL, true);
            if (is_hadamard(&gemm_cases[i])) {
                run_case(&gemm_cases[i], gemm_test_shapes[s], FILL_NORMAL, false);
            }
        }
    }
    printf("  %d pairs of operands x %d shapes\n", GEMM_CASE_COUNT, GEMM_TEST_SHAPE_COUNT);
}

static void every_kind_of_data_is_as_defined(void) {
    static const int64_t shape[3] = {35, 37, 290};
    for (int i = 0; i < GEMM_CASE_COUNT; ++i) {
        for (int fill = FILL_OUTLIERS; fill < FILL_COUNT; ++fill) {
            run_case(&gemm_cases[i], shape, (enum tensor_fill)fill, true);
        }
    }
}

/* Several panels of columns, several tasks of rows, and a depth that makes panels narrower. */
static void large_shapes_are_as_defined(void) {
    static const int64_t shapes[][3] = {{70, 1100, 40}, {300, 530, 300}, {40, 450, 5000}, {2, 600, 1030}};
    static const struct gemm_case pairs[] = {{"f32", "f32", false},
                                             {"bf16", "nvfp4", false},
                                             {"bf16", "across nvfp4", false},
                                             {"f32", "across mxfp8+tiled", false},
                                             {"bf16", "across fp8+tiled", false}};
    for (int s = 0; s < 4; ++s) {
        for (int i = 0; i < 5; ++i) {
            run_case(&pairs[i], shapes[s], FILL_NORMAL, true);
        }
    }
}

/* Plain operands that are not contiguous: padded rows, transposed, every second column. */
static void operands_may_have_any_strides(void) {
    static const int64_t steps[][2] = {{70, 1}, {1, 70}, {140, 2}, {-70, 1}};
    const int64_t rows = 34;
    const int64_t columns = 66;
    for (int dtype = OPAQ_F16; dtype <= OPAQ_F32; ++dtype) {
        struct tensor all = tensor_make(70 * 2, 70, (enum opaq_element)dtype, NULL);
        tensor_fill(&all, FILL_NORMAL, 3);
        for (int s = 0; s < 4; ++s) {
            struct operand side;
            struct operand b;
            memset(&side, 0, sizeof side);
            operand_make(&b, "mxfp8", 21, columns, FILL_NORMAL, 4, true);
            const int64_t first = steps[s][0] < 0 ? 70 * (rows - 1) : 0;
            side.operand.plain =
                (struct quant_matrix){(char *)all.view.buffer[0].data + first * (dtype == OPAQ_F32 ? 4 : 2),
                                      (enum opaq_element)dtype,
                                      rows,
                                      columns,
                                      steps[s][0],
                                      steps[s][1]};
            decode_plain_operand(&side);
            struct gemm_job job = {.a = side.operand, .b = b.operand, .c = matrix_make(rows, 21, OPAQ_F32)};
            check_job(&side, &b, &job, "strided a");
            free(job.c.data);
            job = (struct gemm_job){.a = b.operand, .b = side.operand, .c = matrix_make(21, rows, OPAQ_F32)};
            check_job(&b, &side, &job, "strided b");
            free(job.c.data);
            operand_free(&side);
            operand_free(&b);
        }
        tensor_free(&all);
    }
}

/* Padded rows, transposed, every third element; the bytes between elements stay unchanged. */
static void results_may_have_any_strides(void) {
    static const int64_t shapes[][3] = {{3, 45, 50}, {45, 67, 50}};
    for (int s = 0; s < 2; ++s) {
        const int64_t *shape = shapes[s];
        const int64_t steps[][2] = {{shape[1] + 3, 1}, {1, shape[0] + 5}, {3 * shape[1], 3}};
        struct operand a;
        struct operand b;
        operand_make(&a, "bf16", shape[0], shape[2], FILL_NORMAL, 5, true);
        operand_make(&b, "fp8row", shape[1], shape[2], FILL_NORMAL, 6, true);
        for (int dtype = OPAQ_F16; dtype <= OPAQ_F32; ++dtype) {
            for (int i = 0; i < 3; ++i) {
                struct gemm_job job = {.a = a.operand, .b = b.operand};
                job.c = (struct quant_matrix){
                    NULL, (enum opaq_element)dtype, shape[0], shape[1], steps[i][0], steps[i][1]};
                job.c.data = gemm_case_allocate(matrix_bytes(&job.c));
                check_job(&a, &b, &job, "strided c");
                free(job.c.data);
            }
        }
        operand_free(&a);
        operand_free(&b);
    }
}

static void bias_and_former_contents_are_added(void) {
    static const int64_t shapes[][3] = {{7, 45, 300}, {45, 67, 300}, {4, 5, 0}, {40, 5, 0}};
    for (int s = 0; s < 4; ++s) {
        const int64_t *shape = shapes[s];
        struct operand a;
        struct operand b;
        operand_make(&a, "mxfp8", shape[0], shape[2], FILL_NORMAL, 7, true);
        operand_make(&b, "nvfp4", shape[1], shape[2], FILL_NORMAL, 8, true);
        for (int dtype = OPAQ_F16; dtype <= OPAQ_F32; ++dtype) {
            for (int bias_dtype = OPAQ_F16; bias_dtype <= OPAQ_F32; ++bias_dtype) {
                for (int which = 1; which <= 3; ++which) {
                    struct tensor bias = tensor_make(1, shape[1], (enum opaq_element)bias_dtype, NULL);
                    struct tensor c = tensor_make(shape[0], shape[1], (enum opaq_element)dtype, NULL);
                    tensor_fill(&bias, FILL_NORMAL, 9);
                    tensor_fill(&c, FILL_OUTLIERS, 10);
                    struct gemm_job job = {.a = a.operand,
                                           .b = b.operand,
                                           .c = quant_matrix_make(&c.view),
                                           .bias = which & 1 ? bias.view.buffer[0].data : NULL,
                                           .bias_dtype = (enum opaq_element)bias_dtype,
                                           .accumulate = (which & 2) != 0};
                    check_job(&a, &b, &job, "bias and accumulate");
                    tensor_free(&bias);
                    tensor_free(&c);
                }
            }
        }
        operand_free(&a);
        operand_free(&b);
    }
}

/* One special value in a row of a, at several positions of the contraction, against ones. */
static void special_values_propagate(void) {
    const float infinity = support_infinity();
    const float values[4] = {support_nan(), infinity, -infinity, support_float(0xFFC12345u)};
    const int64_t columns = 300;
    for (int64_t rows = 2; rows <= 40; rows += 38) {
        for (int v = 0; v < 4; ++v) {
            for (int64_t k = 0; k < columns; k += 299) {
                struct operand a;
                struct operand b;
                operand_make(&a, "f32", rows, columns, FILL_NORMAL, 11, true);
                operand_make(&b, "f32", 3, columns, FILL_NORMAL, 12, true);
                for (int64_t i = 0; i < 3 * columns; ++i) {
                    ((float *)b.made.x.buffer[0].data)[i] = 1.0f;
                }
                ((float *)a.made.x.buffer[0].data)[columns + k] = values[v];
                struct gemm_job job = {.a = a.operand, .b = b.operand, .c = matrix_make(rows, 3, OPAQ_F32)};
                void *workspace = gemm_case_allocate(gemm_workspace_bytes(&job));
                gemm_run(&job, workspace, NULL);
                for (int64_t i = 0; i < rows * 3; ++i) {
                    const float actual = ((const float *)job.c.data)[i];
                    if (i / 3 != 1) {
                        CHECK(isfinite(actual));
                    } else {
                        CHECK_EQ_INT(support_bits(actual),
                                     isnan(values[v]) ? 0x7FC00000u : support_bits(values[v]));
                    }
                }
                free(workspace);
                free(job.c.data);
                operand_free(&a);
                operand_free(&b);
            }
        }
    }
}

/* The transform is orthogonal, so two operands that were both transformed have the same product as before, up
 * to rounding: that of the two sums, and that of the inverse transform, in which each of five steps rounds
 * numbers that are no larger than a quarter of the group's sum. */
static void hadamard_pair_needs_no_undoing(void) {
    static const char text[] = "nvfp4+columnwise+rht";
    static const int64_t shapes[][3] = {{5, 9, 16}, {17, 20, 100}, {40, 33, 333}};
    for (int s = 0; s < 3; ++s) {
        const int64_t *shape = shapes[s];
        struct operand side[2][2]; /* a, b; transformed and not */
        struct quant_matrix c[2];
        for (int undo = 0; undo < 2; ++undo) {
            operand_make(&side[0][undo], text, shape[0], shape[2], FILL_NORMAL, 13, undo != 0);
            operand_make(&side[1][undo], text, shape[1], shape[2], FILL_NORMAL, 14, undo != 0);
            c[undo] = matrix_make(shape[0], shape[1], OPAQ_F32);
            struct gemm_job job = {.a = side[0][undo].operand, .b = side[1][undo].operand, .c = c[undo]};
            check_job(&side[0][undo], &side[1][undo], &job, text);
        }
        const int64_t depth = side[0][0].depth;
        CHECK_EQ_INT(depth % 16, 0);
        const double roundings = rounding_count(depth);
        for (int64_t i = 0; i < shape[0]; ++i) {
            for (int64_t j = 0; j < shape[1]; ++j) {
                double size = 0.0;
                double group_size = 0.0;
                for (int64_t group = 0; group < depth; group += 16) {
                    double a = 0.0;
                    double b = 0.0;
                    for (int64_t k = group; k < group + 16; ++k) {
                        a += fabs((double)side[0][0].decoded[i * depth + k]);
                        b += fabs((double)side[1][0].decoded[j * depth + k]);
                    }
                    group_size += a * b;
                }
                size = 2.0 * group_size; /* the sum of absolute products, either way, is no larger than a * b */
                const double allowed = 0x1p-24 * (roundings * size + 12.0 * group_size);
                const double distance = fabs((double)value_at(&c[0], i, j) - (double)value_at(&c[1], i, j));
                CHECK(distance <= allowed);
            }
        }
        for (int undo = 0; undo < 2; ++undo) {
            operand_free(&side[0][undo]);
            operand_free(&side[1][undo]);
            free(c[undo].data);
        }
    }
}

static void run_under_settings(const char *a_text, const char *b_text, enum tensor_fill fill) {
    static const int roundings[] = {FE_UPWARD, FE_TOWARDZERO, FE_TONEAREST};
    struct operand a;
    struct operand b;
    operand_make(&a, a_text, 35, 60, fill, 15, true);
    operand_make(&b, b_text, 20, 60, FILL_NORMAL, 16, true);
    struct gemm_job job = {.a = a.operand, .b = b.operand, .c = matrix_make(35, 20, OPAQ_F32)};
    struct quant_matrix expected = matrix_make(35, 20, OPAQ_F32);
    void *workspace = gemm_case_allocate(gemm_workspace_bytes(&job));
    run_definition(&a, &b, &job, &expected);
    for (int i = 0; i < 3; ++i) {
        const struct float_setting before = float_setting_get();
        (void)fesetround(roundings[i]);
        (void)float_setting_flush_to_zero();
        gemm_run(&job, workspace, NULL);
        const int after = fegetround();
        float_setting_put(before);
        CHECK_EQ_INT(after, roundings[i]);
        CHECK_BYTES(job.c.data, expected.data, matrix_bytes(&expected), "%s by %s, fill %d, rounding %d",
                    a_text, b_text, (int)fill, i);
    }
    free(workspace);
    free(job.c.data);
    free(expected.data);
    operand_free(&a);
    operand_free(&b);
}

/* The caller's rounding mode and flush-to-zero have no effect and are restored. */
static void settings_do_not_matter(void) {
    static const char *const texts[] = {"f32", "f16", "fp8", "mxfp8.e5m2", "nvfp4", "nvfp4+rowscaled"};
    for (int i = 0; i < 6; ++i) {
        run_under_settings(texts[i], "f32", FILL_TINY);
        run_under_settings(texts[i], texts[i], FILL_NORMAL);
    }
}

/* Subnormal numbers in a, in b and in sums: kernels for pairs may treat them as 0, within the bound that
 * gemm_run.h states. */
static void subnormal_numbers_are_within_the_bound(void) {
    static const char *const texts[] = {"across nvfp4", "across mxfp8", "across mxfp4", "across fp8"};
    enum { M = 40, N = 33, K = 300 };
    int pairs_count;
    const struct gemm_table *const *pairs = gemm_pairs_tables(&pairs_count);
    for (int t = 0; t < 4; ++t) {
        struct operand a;
        struct operand b;
        operand_make(&a, "bf16", M, K, FILL_NORMAL, 5, true);
        for (int64_t i = 0; i < (int64_t)M * K; ++i) { /* down to 2^-133 and beyond */
            ((uint16_t *)a.made.x.buffer[0].data)[i] =
                (uint16_t)opaq_element_encode(OPAQ_BF16, a.decoded[i] * 0x1p-126f, OPAQ_IEEE);
        }
        free(a.decoded);
        decode_plain_operand(&a);
        operand_make(&b, texts[t], N, K, FILL_NORMAL, 6, true);
        divide_by_factor(&b);
        struct gemm_job job = {.a = a.operand, .b = b.operand, .c = matrix_make(M, N, OPAQ_F32)};
        void *workspace = gemm_case_allocate(gemm_workspace_bytes(&job));
        for (int p = 0; p < pairs_count; ++p) {
            if ((pairs[p]->features & ~opaq_cpu_features()) != 0) {
                continue;
            }
            gemm_run_with(gemm_table_best(), pairs[p], &job, workspace, NULL);
            for (int64_t i = 0; i < (int64_t)M * N; ++i) {
                double exact = 0.0;
                double size = 0.0;
                for (int64_t k = 0; k < K; ++k) {
                    const double p_k = (double)a.decoded[i / N * K + k];
                    const double q_k = (double)b.decoded[i % N * K + k];
                    exact += p_k * q_k * (double)b.factor;
                    size += fabs(q_k) + fabs(p_k) + 2;
                }
                const double error = fabs((double)value_at(&job.c, i / N, i % N) - exact);
                if (!(error <= 0x1p-126 * size * fabs((double)b.factor) + fabs(exact) * 0x1p-14 + 0x1p-149)) {
                    CHECK_FAIL("%s, %s: element %lld is %g from %g", texts[t], pairs[p]->name, (long long)i,
                               error, exact);
                    break;
                }
            }
        }
        free(workspace);
        free(job.c.data);
        operand_free(&a);
        operand_free(&b);
    }
}

static void the_workspace_stays_small(void) {
    struct gemm_job job;
    memset(&job, 0, sizeof job);
    for (int64_t k = 1; k <= 65536; k *= 2) {
        for (int64_t rows = 1; rows <= 4096; rows *= 64) {
            job.a.plain = (struct quant_matrix){.rows = rows, .columns = k};
            job.b.plain = (struct quant_matrix){.rows = 10000, .columns = k};
            job.c = (struct quant_matrix){.rows = rows, .columns = 10000};
            job.b.is_across = false;
            CHECK(gemm_workspace_bytes(&job) <= (size_t)8 << 20);
            job.b.is_across = true;
            CHECK(gemm_workspace_bytes(&job) <= (size_t)(k <= 8192 ? 4 << 20 : 512 * k));
        }
    }
    job.b.is_across = false;
    job.c.columns = 0;
    CHECK_EQ_INT(gemm_workspace_bytes(&job), 0);
}

/* The workspace of the largest of several products is sufficient for the others. */
static void the_workspace_grows_with_the_sizes(void) {
    static const int64_t sizes[] = {1,   15,  16,  31,  32,   33,   100,  255,  256,
                                    257, 511, 512, 513, 4095, 4096, 4097, 8193, 131073};
    enum { SIZES = sizeof sizes / sizeof sizes[0] };
    struct gemm_job job;
    memset(&job, 0, sizeof job);
    for (int n = 0; n < 2 * SIZES * SIZES * SIZES; ++n) {
        const int i = n / 2;
        job.b.is_across = n % 2 != 0;
        const int at[3] = {i % SIZES, i / SIZES % SIZES, i / SIZES / SIZES};
        size_t bytes[4];
        for (int grown = 0; grown < 4; ++grown) { /* 3: no dimension */
            int64_t size[3];
            for (int d = 0; d < 3; ++d) {
                size[d] = sizes[at[d] + (d == grown && at[d] + 1 < SIZES)];
            }
            job.a.plain = (struct quant_matrix){.rows = size[0], .columns = size[2]};
            job.b.plain = (struct quant_matrix){.rows = size[1], .columns = size[2]};
            job.c = (struct quant_matrix){.rows = size[0], .columns = size[1]};
            bytes[grown] = gemm_workspace_bytes(&job);
        }
        CHECK(bytes[0] >= bytes[3] && bytes[1] >= bytes[3] && bytes[2] >= bytes[3]);
    }
}

static void the_best_table_is_the_first_that_runs(void) {
    int count;
    const struct gemm_table *const *tables = gemm_tables(&count);
    int i = 0;
    while ((tables[i]->features & ~opaq_cpu_features()) != 0) {
        ++i;
    }
    CHECK(i < count);
    CHECK_EQ_STR(gemm_kernel_name(), tables[i]->name);
    CHECK_EQ_STR(tables[count - 1]->name, "gemm_ref");
    CHECK_EQ_INT(tables[count - 1]->features, 0);
    for (int t = 0; t < count; ++t) {
        CHECK_EQ_INT(GEMM_TILE_COLUMN_LIMIT % tables[t]->tile_columns, 0);
    }
}

static const struct test_case tests[] = {TEST(every_case_is_as_defined),
                                         TEST(every_kind_of_data_is_as_defined),
                                         TEST(large_shapes_are_as_defined),
                                         TEST(operands_may_have_any_strides),
                                         TEST(results_may_have_any_strides),
                                         TEST(bias_and_former_contents_are_added),
                                         TEST(special_values_propagate),
                                         TEST(hadamard_pair_needs_no_undoing),
                                         TEST(settings_do_not_matter),
                                         TEST(subnormal_numbers_are_within_the_bound),
                                         TEST(the_workspace_stays_small),
                                         TEST(the_workspace_grows_with_the_sizes),
                                         TEST(the_best_table_is_the_first_that_runs)};
TEST_MAIN(tests)
