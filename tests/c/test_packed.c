/* test_packed.c: products with tiled weights, every table this machine can run, against sums in double of the decoded
 * operands.
 *
 * The bound, with u = 2^-24 and A = the sum of |x w|: (K / 8 + 16) u A where floats are multiplied, (blocks +
 * 4) u A where integers are; a few of the smallest floats where sums are subnormal; with bf16, the error of
 * flushing subnormals to zero by packed.h. Also: a row's bits do not depend on the other rows nor on the tiles
 * of a task; with 4-bit weights they equal the reference's (except with bf16); and only columns n < N are
 * written. It is long because all tests share one definition of the product. */
#include <float.h>
#include <math.h>
#include <stdlib.h>
#include <string.h>

#include "../cases/packed_cases.h"
#include "../cases/packed_operands.h"
#include "base/float_bits.h"
#include "check.h"
#include "format/element_codec.h"
#include "opaq/cpu.h"

/* ---- the definition ---- */

/* Not multiplied with the scale of its block. */
static double element_value(const struct packed_case_weight *w, int64_t n, int64_t k) {
    const uint8_t code = w->code[n * w->weight.columns + k];
    return packed_is_4_bit(w->weight.format) ? (double)decode_e2m1(code)
           : w->weight.is_e5m2               ? (double)decode_e5m2(code)
                                             : (double)decode_e4m3(code);
}

static double scale_value(const struct packed_case_weight *w, int64_t n, int64_t k) {
    const int64_t block = k / w->per;
    switch (w->weight.format) {
    case PACKED_NVFP4:
        return (double)decode_e4m3(w->code_scale[n * w->blocks + block]);
    case PACKED_MXFP4:
    case PACKED_MXFP8:
        return (double)decode_e8m0(w->code_scale[n * w->blocks + block]);
    case PACKED_FP8BLK:
        return (double)w->block_scale[n / 128 * w->blocks + block];
    default:
        return 1.0;
    }
}

static double row_value(const struct packed_case_rows *x, int64_t m, int64_t k) {
    const int64_t i = m * x->rows.padded + k;
    const int64_t block = m * (x->rows.padded / x->per) + k / x->per;
    switch (x->rows.precision) {
    case PACKED_NEAR:
        return (double)x->q16[i] * (double)x->row_scale[m];
    case PACKED_FAST:
        return (double)x->q8[i] * (double)x->row_scale[m];
    case PACKED_FAST32:
        return (double)x->q8[i] * (double)x->block_scale[block];
    case PACKED_CODES:
        return 0.5 * (double)x->q8[i] * (double)x->block_scale[block];
    case PACKED_BF16:
        return (double)packed_widened(x->bf16[i]);
    default:
        return (double)x->f32[i];
    }
}

static double *doubles(int64_t count) { return packed_allocate(count * (int64_t)sizeof(double)); }

static float *floats(int64_t count) { return packed_allocate(count * (int64_t)sizeof(float)); }

/* The expected y, and the bound on its error. */
struct expected {
    double *y; /* [M][N] */
    double *bound;
};

static struct expected expected_make(const struct packed_case_weight *w, const struct packed_case_rows *x) {
    const int64_t rows = x->rows.rows;
    const int64_t n_count = w->weight.rows;
    const int64_t k_count = w->weight.columns;
    double *const wide_w = doubles(n_count * k_count);
    double *const wide_x = doubles(rows * k_count);
    const struct expected e = {doubles(rows * n_count), doubles(rows * n_count)};
    const bool is_bf16 = x->rows.precision == PACKED_BF16;
    const bool is_float = is_bf16 || x->rows.precision == PACKED_EXACT;
    const double roundings = is_float ? (double)k_count / 8.0 + 16.0 : (double)w->blocks + 4.0;
    for (int64_t i = 0; i < n_count * k_count; ++i) {
        wide_w[i] = element_value(w, i / k_count, i % k_count) * scale_value(w, i / k_count, i % k_count);
    }
    for (int64_t i = 0; i < rows * k_count; ++i) {
        wide_x[i] = row_value(x, i / k_count, i % k_count);
    }
    for (int64_t i = 0; i < rows * n_count; ++i) {
        const int64_t m = i / n_count;
        const int64_t n = i % n_count;
        double sum = 0.0;
        double size = 0.0;
        double flushed = 0.0;
        for (int64_t k = 0; k < k_count; ++k) {
            flushed += is_bf16 ? fabs(wide_w[n * k_count + k]) + fabs(scale_value(w, n, k)) : 0.0;
            const double product = wide_x[m * k_count + k] * wide_w[n * k_count + k];
            sum += product;
            size += fabs(product);
        }
        const double factor =
            (double)w->weight.factor * (w->row_factor == NULL ? 1.0 : (double)w->row_factor[n]);
        e.y[i] = sum * factor;
        const double row_scale = x->row_scale == NULL ? 1.0 : (double)x->row_scale[m];
        const int64_t blocks = k_count / 16 + 2;
        e.bound[i] = roundings * ldexp(size * fabs(factor), -24) + ldexp(flushed * fabs(factor), -126) +
                     (double)blocks * ldexp(1.0 + fabs(factor * row_scale), -149);
    }
    free(wide_w);
    free(wide_x);
    return e;
}

static void expected_free(struct expected *e) {
    free(e->y);
    free(e->bound);
}

static bool is_as_expected(float actual, double y, double bound) {
    if (isnan(y)) {
        return isnan(actual);
    }
    if (fabs(y) > (double)FLT_MAX) {
        return isinf(actual) && (actual > 0.0f) == (y > 0.0);
    }
    return fabs((double)actual - y) <= bound;
}

/* ---- running ---- */

static const struct packed_table *const *runnable(int i) {
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    for (int t = 0; t < count; ++t) {
        if ((tables[t]->features & ~opaq_cpu_features()) == 0 && i-- == 0) {
            return &tables[t];
        }
    }
    return NULL;
}

/* Runs tiles in pieces of `step` (0: all at once); y is [M][y_step], the other elements must stay unchanged. */
static void run(const struct packed_kernel *kernel, const struct packed_weight *weight,
                const struct packed_rows *x, int64_t step, float *y, int64_t y_step) {
    const int64_t tiles = ceil_div(weight->rows, packed_tile_rows(weight->format));
    void *const panel = packed_allocate(packed_panel_bytes(kernel, x->rows));
    for (int64_t begin = 0; begin < tiles; begin += step == 0 ? tiles : step) {
        kernel->run(weight, x, begin, step == 0 ? tiles : min_int64(begin + step, tiles), y, y_step, panel);
    }
    free(panel);
}

/* Runs row m of x alone. */
static struct packed_rows one_row(const struct packed_case_rows *x, int64_t m) {
    struct packed_rows one = x->rows;
    one.rows = 1;
    one.f32 = x->f32 == NULL ? NULL : x->f32 + m * one.padded;
    one.bf16 = x->bf16 == NULL ? NULL : x->bf16 + m * one.padded;
    one.q16 = x->q16 == NULL ? NULL : x->q16 + m * one.padded;
    one.q8 = x->q8 == NULL ? NULL : x->q8 + m * one.padded;
    one.correction = x->correction == NULL ? NULL : x->correction + m * (one.padded / 16);
    one.row_scale = x->row_scale == NULL ? NULL : x->row_scale + m;
    one.block_scale = x->block_scale == NULL ? NULL : x->block_scale + m * (one.padded / x->per);
    return one;
}

static void check_values(const struct packed_kernel *kernel, const struct packed_case_weight *w,
                         const struct packed_case_rows *x, const struct expected *e, const float *y,
                         int64_t y_step) {
    const int64_t n_count = w->weight.rows;
    for (int64_t i = 0; i < x->rows.rows * n_count; ++i) {
        const float actual = y[i / n_count * y_step + i % n_count];
        if (!is_as_expected(actual, e->y[i], e->bound[i])) {
            CHECK_FAIL("%s, %lld x %lld x %lld, y[%lld][%lld] is %.9g, expected %.9g within %.3g", kernel->name,
                       (long long)x->rows.rows, (long long)n_count, (long long)w->weight.columns,
                       (long long)(i / n_count), (long long)(i % n_count), (double)actual, e->y[i],
                       e->bound[i]);
            return;
        }
    }
}

static void check_untouched(const struct packed_kernel *kernel, const float *y, int64_t rows, int64_t columns,
                            int64_t y_step) {
    for (int64_t m = 0; m < rows; ++m) {
        for (int64_t n = columns; n < y_step; ++n) {
            if (float_to_bits(y[m * y_step + n]) != 0xA5A5A5A5u) {
                CHECK_FAIL("%s wrote y[%lld][%lld] of %lld columns", kernel->name, (long long)m, (long long)n,
                           (long long)columns);
                return;
            }
        }
    }
}

/* Checks values, unchanged elements, and that pieces and single rows give the same bits. */
static void check_kernel(const struct packed_kernel *kernel, const struct packed_case_weight *w,
                         const struct packed_case_rows *x, const struct expected *e) {
    const int64_t rows = x->rows.rows;
    const int64_t n_count = w->weight.rows;
    const int64_t y_step = n_count + 3;
    const size_t bytes = (size_t)(rows * y_step) * sizeof(float);
    float *const y = floats(rows * y_step);
    run(kernel, &w->weight, &x->rows, 0, y, y_step);
    check_values(kernel, w, x, e, y, y_step);
    check_untouched(kernel, y, rows, n_count, y_step);
    for (int64_t step = 1; step <= 5; step += 2) {
        float *const pieces = floats(rows * y_step);
        run(kernel, &w->weight, &x->rows, step, pieces, y_step);
        CHECK_BYTES(pieces, y, bytes, "%s, %lld x %lld x %lld, pieces of %lld tiles", kernel->name,
                    (long long)rows, (long long)n_count, (long long)w->weight.columns, (long long)step);
        free(pieces);
    }
    for (int64_t m = 0; m < rows && rows > 1; m += rows > 20 ? 7 : 1) {
        const struct packed_rows one = one_row(x, m);
        float *const alone = floats(y_step);
        run(kernel, &w->weight, &one, 0, alone, y_step);
        CHECK_BYTES(alone, y + m * y_step, (size_t)y_step * sizeof(float),
                    "%s, %lld x %lld x %lld, row %lld alone", kernel->name, (long long)rows, (long long)n_count,
                    (long long)w->weight.columns, (long long)m);
        free(alone);
    }
    free(y);
}

/* Compares bits; all NaNs are equal. */
static void check_like_reference(const struct packed_kernel *kernel, const struct packed_case_weight *w,
                                 const struct packed_case_rows *x) {
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    const int64_t n_count = w->weight.rows;
    float *const y = floats(x->rows.rows * n_count);
    float *const reference = floats(x->rows.rows * n_count);
    run(kernel, &w->weight, &x->rows, 0, y, n_count);
    run(&tables[count - 1]->kernel[w->weight.format][x->rows.precision], &w->weight, &x->rows, 0, reference,
        n_count);
    for (int64_t i = 0; i < x->rows.rows * n_count; ++i) {
        if (!(isnan(y[i]) && isnan(reference[i])) && float_to_bits(y[i]) != float_to_bits(reference[i])) {
            CHECK_FAIL("%s, %lld x %lld x %lld, y[%lld][%lld] is %a, the reference's %a", kernel->name,
                       (long long)x->rows.rows, (long long)n_count, (long long)w->weight.columns,
                       (long long)(i / n_count), (long long)(i % n_count), (double)y[i], (double)reference[i]);
            break;
        }
    }
    free(y);
    free(reference);
}

/* Every kernel for the format and precision. */
static void check_operands(const struct packed_case_weight *w, const struct packed_case_rows *x) {
    struct expected e = expected_make(w, x);
    const struct packed_table *const *table;
    for (int i = 0; (table = runnable(i)) != NULL; ++i) {
        const struct packed_kernel *kernel = &(*table)->kernel[w->weight.format][x->rows.precision];
        if (kernel->run != NULL) {
            check_kernel(kernel, w, x, &e);
            if (packed_is_4_bit(w->weight.format) && x->rows.precision != PACKED_BF16) {
                check_like_reference(kernel, w, x);
            }
        }
    }
    expected_free(&e);
}

static void check_rows(const struct packed_case_weight *w, enum packed_precision precision, int64_t rows,
                       enum packed_fill fill, uint64_t seed) {
    struct packed_case_rows x;
    packed_case_rows_make(&x, precision, w->weight.format, rows, w->weight.columns, fill, seed);
    check_operands(w, &x);
    packed_case_rows_free(&x);
}

static bool is_combination(int format, int precision) {
    return packed_is_4_bit((enum packed_format)format) || precision == PACKED_EXACT || precision == PACKED_BF16;
}

static void check_shape(int64_t rows, int64_t n_count, int64_t k_count, enum packed_fill fill, uint64_t seed) {
    for (int format = 0; format < PACKED_FORMAT_COUNT; ++format) {
        const int kinds = packed_is_4_bit((enum packed_format)format) ? 1 : 2;
        for (int is_e5m2 = 0; is_e5m2 < kinds; ++is_e5m2) {
            struct packed_case_weight w;
            packed_case_weight_make(&w, (enum packed_format)format, is_e5m2, n_count, k_count, fill, seed);
            for (int precision = 0; precision < PACKED_PRECISION_COUNT; ++precision) {
                if (is_combination(format, precision)) {
                    check_rows(&w, (enum packed_precision)precision, rows, fill, seed + 1);
                }
            }
            packed_case_weight_free(&w);
        }
    }
}

/* ---- tests ---- */

static void small_shapes_are_within_the_bound(void) {
    static const int64_t shapes[][2] = {{1, 1},    {16, 64},  {15, 16},  {17, 31},  {33, 100}, {64, 65},
                                        {70, 128}, {130, 40}, {48, 200}, {31, 333}, {150, 192}};
    for (int i = 0; i < (int)(sizeof shapes / sizeof shapes[0]); ++i) {
        for (int64_t m = 1; m <= 9; ++m) {
            check_shape(m, shapes[i][0], shapes[i][1], (enum packed_fill)(i % PACKED_FILL_COUNT),
                        (uint64_t)(i + m));
        }
    }
}

static void many_rows_are_within_the_bound(void) {
    static const int64_t rows[] = {10, 12, 13, 16, 17, 23, 64, 130};
    for (int i = 0; i < (int)(sizeof rows / sizeof rows[0]); ++i) {
        check_shape(rows[i], 83, 150, (enum packed_fill)(i % PACKED_FILL_COUNT), (uint64_t)i);
    }
}

/* Kernels keep the sums of a few hundred rows at a time. */
static void hundreds_of_rows_are_within_the_bound(void) {
    check_shape(257, 20, 70, PACKED_FILL_USUAL, 11);
    check_shape(530, 40, 33, PACKED_FILL_USUAL, 12);
}

/* And not those of all tiles if there are many rows and many tiles. */
static void hundreds_of_both_are_within_the_bound(void) {
    struct packed_case_weight w;
    packed_case_weight_make(&w, PACKED_NVFP4, false, 520, 130, PACKED_FILL_USUAL, 13);
    check_rows(&w, PACKED_EXACT, 256, PACKED_FILL_USUAL, 14);
    packed_case_weight_free(&w);
}

static void many_columns_are_within_the_bound(void) {
    static const int64_t columns[] = {511, 513, 1024, 1100, 4160};
    for (int i = 0; i < (int)(sizeof columns / sizeof columns[0]); ++i) {
        for (int64_t m = 1; m <= 17; m += 8) {
            check_shape(m, 37, columns[i], (enum packed_fill)((i + m) % PACKED_FILL_COUNT), (uint64_t)i);
        }
    }
}

/* As many columns as the benchmark has, with one or more tiles and a partial one, and not all of the hundreds
 * of rows. */
static void timed_cases_are_within_the_bound(void) {
    for (int i = 0; i < PACKED_CASE_COUNT; ++i) {
        const struct packed_case *one = &packed_cases[i];
        struct packed_case_weight w;
        packed_case_weight_make(&w, one->format, false, one->rows > 8 ? 17 : 50, PACKED_CASE_COLUMNS,
                                PACKED_FILL_USUAL, 1);
        if (one->limit != LIMIT_PRODUCT) {
            check_rows(&w, one->precision, min_int64(one->rows, 200), PACKED_FILL_USUAL, 2);
        }
        packed_case_weight_free(&w);
    }
}

/* Kernels read rows of tiles in sequence and keep the sums of some; with many columns not all of them at
 * once. */
static void tall_weights_are_within_the_bound(void) {
    check_shape(1, 2200, 70, PACKED_FILL_USUAL, 21);
    check_shape(8, 600, 20, PACKED_FILL_WIDE, 22);
    check_shape(8, 70, 4200, PACKED_FILL_USUAL, 23);
}

static void every_fill_is_within_the_bound(void) {
    for (int fill = 0; fill < PACKED_FILL_COUNT; ++fill) {
        for (int64_t m = 1; m <= 12; m += 11) {
            check_shape(m, 80, 256, (enum packed_fill)fill, 100 + (uint64_t)fill);
        }
    }
}

/* Each code of a scale in a separate row, times one weight and one x: nothing is rounded, not even with the
 * smallest or largest scale. */
static void check_scales_one_by_one(enum packed_format format, enum packed_precision precision, int64_t rows,
                                    float factor) {
    struct packed_case_weight w;
    struct packed_case_rows x;
    packed_case_weight_make(&w, format, false, 256, 70, PACKED_FILL_USUAL, 2);
    packed_case_rows_make(&x, precision, format, rows, 70, PACKED_FILL_USUAL, 3);
    memset(w.code, 0, (size_t)(256 * 70));
    w.weight.factor = factor;
    for (int64_t n = 0; n < 256; ++n) {
        w.code[n * 70 + 33] = format == PACKED_MXFP8 ? 0x38 : 2; /* 1.0 */
        memset(w.code_scale + n * w.blocks, (int)n, (size_t)w.blocks);
    }
    for (int64_t m = 0; m < rows; ++m) {
        if (precision == PACKED_EXACT) {
            x.f32[m * x.rows.padded + 33] = 1.0f;
        } else if (precision == PACKED_BF16) {
            x.bf16[m * x.rows.padded + 33] = packed_cut(1.0f);
        } else if (precision == PACKED_NEAR) {
            x.q16[m * x.rows.padded + 33] = 1;
        } else {
            x.q8[m * x.rows.padded + 33] = precision == PACKED_CODES ? 2 : 1;
        }
        if (x.row_scale != NULL) {
            x.row_scale[m] = 1.0f;
        }
        for (int64_t b = 0; x.block_scale != NULL && b < x.rows.padded / x.per; ++b) {
            x.block_scale[m * (x.rows.padded / x.per) + b] = 1.0f;
        }
    }
    if (x.q8 != NULL) {
        packed_case_correct(&x);
    }
    packed_case_tile(&w);
    struct expected e = expected_make(&w, &x);
    memset(e.bound, 0, (size_t)(rows * 256) * sizeof(double));
    const struct packed_table *const *table;
    for (int i = 0; (table = runnable(i)) != NULL; ++i) {
        const struct packed_kernel *kernel = &(*table)->kernel[format][precision];
        float *const y = floats(rows * 256);
        if (kernel->run != NULL) {
            run(kernel, &w.weight, &x.rows, 0, y, 256);
            check_values(kernel, &w, &x, &e, y, 256);
        }
        free(y);
    }
    expected_free(&e);
    packed_case_rows_free(&x);
    packed_case_weight_free(&w);
}

static void every_scale_is_exact(void) {
    for (int64_t m = 1; m <= 9; m += 8) {
        for (int precision = 0; precision < PACKED_PRECISION_COUNT; ++precision) {
            check_scales_one_by_one(PACKED_NVFP4, (enum packed_precision)precision, m, 1.0f);
            check_scales_one_by_one(PACKED_MXFP4, (enum packed_precision)precision, m, 1.0f);
            check_scales_one_by_one(PACKED_MXFP4, (enum packed_precision)precision, m, 0x1p30f);
        }
        check_scales_one_by_one(PACKED_MXFP8, PACKED_BF16, m, 1.0f);
        check_scales_one_by_one(PACKED_MXFP8, PACKED_BF16, m, 0x1p30f);
        check_scales_one_by_one(PACKED_MXFP8, PACKED_EXACT, m, 1.0f);
        check_scales_one_by_one(PACKED_MXFP8, PACKED_EXACT, m, 0x1p30f);
    }
}

/* A NaN code of a weight or a scale makes its own row of the weight NaN, and no other. */
static void nan_stays_in_its_row(void) {
    for (int format = 0; format < PACKED_FORMAT_COUNT; ++format) {
        for (int precision = 0; precision < PACKED_PRECISION_COUNT; ++precision) {
            for (int64_t m = 1; m <= 20 && is_combination(format, precision); m += 9) {
                struct packed_case_weight w;
                struct packed_case_rows x;
                packed_case_weight_make(&w, (enum packed_format)format, false, 70, 650, PACKED_FILL_USUAL, 4);
                packed_case_rows_make(&x, (enum packed_precision)precision, (enum packed_format)format, m, 650,
                                      PACKED_FILL_USUAL, 5);
                if (w.code_scale != NULL) {
                    const uint8_t nan = format == PACKED_NVFP4 ? 0x7F : 0xFF;
                    w.code_scale[3 * w.blocks] = nan;
                    w.code_scale[37 * w.blocks + w.blocks - 1] = nan;
                }
                if (!packed_is_4_bit((enum packed_format)format)) {
                    w.code[69 * 650 + 649] = 0x7F;
                    w.code[64 * 650] = 0xFF;
                }
                packed_case_tile(&w);
                check_operands(&w, &x);
                packed_case_rows_free(&x);
                packed_case_weight_free(&w);
            }
        }
    }
}

static void set_x(struct packed_case_rows *x, int64_t m, int64_t k, float value) {
    if (x->bf16 != NULL) {
        x->bf16[m * x->rows.padded + k] = packed_cut(value);
    } else {
        x->f32[m * x->rows.padded + k] = value;
    }
}

/* Infinities and NaNs of x propagate if floats are multiplied; so do numbers near the limits. */
static void check_specials_of_x(enum packed_format format, enum packed_precision precision, int64_t rows) {
    struct packed_case_weight w;
    struct packed_case_rows x;
    packed_case_weight_make(&w, format, false, 40, 130, PACKED_FILL_USUAL, 6);
    packed_case_rows_make(&x, precision, format, rows, 130, PACKED_FILL_USUAL, 7);
    for (int64_t n = 0; n < 40; ++n) { /* so that no product is 0 times infinity */
        w.code[n * 130 + 100] = packed_is_4_bit(format) ? 3 : 0x3A;
    }
    packed_case_tile(&w);
    set_x(&x, 0, 100, -INFINITY);
    set_x(&x, 1, 100, INFINITY);
    set_x(&x, 2, 100, NAN);
    set_x(&x, 3, 100, -0x1p90f);
    for (int64_t k = 0; k < 130; ++k) {
        set_x(&x, 4, k, (float)row_value(&x, 4, k) * 0x1p-120f);
        set_x(&x, 5, k, (float)row_value(&x, 5, k) * 0x1p100f);
    }
    for (int64_t k = 0; precision == PACKED_BF16 && k < 130; ++k) { /* their bound includes subnormal numbers */
        set_x(&x, 6, k, (float)row_value(&x, 6, k) * 0x1p-126f);
        set_x(&x, 7, k, k % 2 == 0 ? 0x1p-133f : -0x1p-130f);
    }
    check_operands(&w, &x);
    packed_case_rows_free(&x);
    packed_case_weight_free(&w);
}

static void specials_of_x_propagate(void) {
    for (int format = 0; format < PACKED_FORMAT_COUNT; ++format) {
        for (int64_t m = 8; m <= 18; m += 10) {
            check_specials_of_x((enum packed_format)format, PACKED_EXACT, m);
            check_specials_of_x((enum packed_format)format, PACKED_BF16, m);
        }
    }
}

/* Each 8-bit code in a separate row times one x: nothing is rounded, and subnormal codes are exact. */
static void every_code_is_exact(void) {
    for (int kind = 0; kind < 4; ++kind) {
        for (int64_t m = 1; m <= 17; m += 8) {
            const bool is_e5m2 = kind % 2 == 1;
            const enum packed_precision precision = kind / 2 == 0 ? PACKED_EXACT : PACKED_BF16;
            struct packed_case_weight w;
            struct packed_case_rows x;
            packed_case_weight_make(&w, PACKED_FP8, is_e5m2, 256, 70, PACKED_FILL_USUAL, 2);
            packed_case_rows_make(&x, precision, PACKED_FP8, m, 70, PACKED_FILL_USUAL, 3);
            w.weight.factor = 1.0f;
            memset(w.code, 0, (size_t)(256 * 70));
            for (int64_t n = 0; n < 256; ++n) {
                w.code[n * 70 + 40 + n % 2] = (uint8_t)n;
            }
            for (int64_t i = 0; i < m; ++i) {
                set_x(&x, i, 40, 1.0f);
                set_x(&x, i, 41, 1.0f);
            }
            packed_case_tile(&w);
            struct expected e = expected_make(&w, &x);
            memset(e.bound, 0, (size_t)(m * 256) * sizeof(double));
            const struct packed_table *const *table;
            for (int i = 0; (table = runnable(i)) != NULL; ++i) {
                const struct packed_kernel *kernel = &(*table)->kernel[PACKED_FP8][precision];
                float *const y = floats(m * 256);
                if (kernel->run != NULL) {
                    run(kernel, &w.weight, &x.rows, 0, y, 256);
                    check_values(kernel, &w, &x, &e, y, 256);
                }
                free(y);
            }
            expected_free(&e);
            packed_case_rows_free(&x);
            packed_case_weight_free(&w);
        }
    }
}

/* With 8-bit weights, all kernels that multiply floats add in the same order. */
static void eight_bits_have_the_references_bits(void) {
    static const int64_t shapes[][3] = {{1, 70, 300}, {2, 33, 32}, {5, 64, 130}, {8, 100, 96}, {29, 290, 420}};
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    for (int i = 0; i < (int)(sizeof shapes / sizeof shapes[0]); ++i) {
        for (int kind = 0; kind < 6; ++kind) {
            struct packed_case_weight w;
            struct packed_case_rows x;
            const enum packed_format format = (enum packed_format)(PACKED_MXFP8 + kind / 2);
            const size_t bytes = (size_t)(shapes[i][0] * shapes[i][1]) * sizeof(float);
            packed_case_weight_make(&w, format, kind % 2, shapes[i][1], shapes[i][2], PACKED_FILL_USUAL, 8);
            packed_case_rows_make(&x, PACKED_EXACT, format, shapes[i][0], shapes[i][2], PACKED_FILL_USUAL, 9);
            float *const expected = packed_allocate((int64_t)bytes);
            run(&tables[count - 1]->kernel[format][PACKED_EXACT], &w.weight, &x.rows, 0, expected,
                shapes[i][1]);
            const struct packed_table *const *table;
            for (int t = 0; (table = runnable(t)) != NULL; ++t) {
                const struct packed_kernel *kernel = &(*table)->kernel[format][PACKED_EXACT];
                float *const y = packed_allocate((int64_t)bytes);
                if (kernel->run != NULL) {
                    run(kernel, &w.weight, &x.rows, 0, y, shapes[i][1]);
                    CHECK_BYTES(y, expected, bytes, "%s, shape %d, e5m2 %d", kernel->name, i, kind % 2);
                }
                free(y);
            }
            free(expected);
            packed_case_rows_free(&x);
            packed_case_weight_free(&w);
        }
    }
}

static void tables_are_complete(void) {
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    for (int format = 0; format < PACKED_FORMAT_COUNT; ++format) {
        for (int precision = 0; precision < PACKED_PRECISION_COUNT; ++precision) {
            const struct packed_kernel *best =
                packed_kernel((enum packed_format)format, (enum packed_precision)precision);
            CHECK_EQ_INT(best != NULL, is_combination(format, precision));
            for (int t = 0; t < count; ++t) {
                const struct packed_kernel *one = &tables[t]->kernel[format][precision];
                if (one->run != NULL) {
                    CHECK(one->name != NULL && strstr(one->name, tables[t]->name) != NULL);
                    CHECK(one->unit >= 1 && (one->unit & (one->unit - 1)) == 0);
                    CHECK(one->panel_bytes >= 0 && one->panel_bytes <= 1 << 20);
                    CHECK(one->few_bytes >= 0 && one->few_bytes <= 1 << 18 &&
                          one->few_bytes <= one->panel_bytes);
                }
            }
            const struct packed_table *const *table;
            for (int i = 0; best != NULL && (table = runnable(i)) != NULL; ++i) {
                if ((*table)->kernel[format][precision].run != NULL) {
                    CHECK_EQ_STR(best->name, (*table)->kernel[format][precision].name);
                    break;
                }
            }
        }
    }
    CHECK_EQ_STR(tables[count - 1]->name, "ref");
    CHECK_EQ_INT(tables[count - 1]->features, 0);
}

static const struct test_case tests[] = {TEST(small_shapes_are_within_the_bound),
                                         TEST(many_rows_are_within_the_bound),
                                         TEST(hundreds_of_rows_are_within_the_bound),
                                         TEST(hundreds_of_both_are_within_the_bound),
                                         TEST(many_columns_are_within_the_bound),
                                         TEST(timed_cases_are_within_the_bound),
                                         TEST(tall_weights_are_within_the_bound),
                                         TEST(every_fill_is_within_the_bound),
                                         TEST(every_scale_is_exact),
                                         TEST(nan_stays_in_its_row),
                                         TEST(specials_of_x_propagate),
                                         TEST(every_code_is_exact),
                                         TEST(eight_bits_have_the_references_bits),
                                         TEST(tables_are_complete)};
TEST_MAIN(tests)
