/* bench_packed.c: speed of products with tiled weights, relative to this machine's peak rates.
 *
 * Weights are cold: every run takes the next of several copies that together exceed the caches. In each round a
 * case and its limit (reading as many bytes in eight or four streams, or as many multiply-adds of floats or
 * bytes) are timed alternately; the share is the median of the rounds (bench_rounds.h). Times are the best of
 * all rounds; the spread is the median divided by the best. With few threads, products with many rows are timed
 * on a part of the weight. Each case has a required share of its limit (must) and a target (aim). Converting
 * the rows of x, bf16 in memory, is not included in the figures of products: it has its own cases, compared
 * with the time of the product. With --hot a small weight stays in the second-level cache, which shows the time
 * of the instructions alone, without limits. Prints a table; --json FILE writes the same as JSON. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

#include "bench_options.h"
#include "bench_peaks.h"
#include "bench_rounds.h"
#include "bench_time.h"

#include "../tests/cases/packed_cases.h"
#include "../tests/cases/packed_operands.h"

enum {
    COLD_ROWS = 4096,
    HOT_ROWS = 128,
    COLUMNS = PACKED_CASE_COLUMNS,
    SLICE_ROWS = 2048, /* weight rows per thread where x has many rows: fewer are slower */
    FEW_ROWS = 8,
    COLD_BYTES = 300 << 20,
    TURNS = 2, /* of a case, per round */
    /* products with few rows of x take little time, so they get more turns and rounds */
    FEW_ROWS_TURNS = 8,
    FEW_ROWS_ROUNDS = 4,
};

static const char *const limit_names[] = {"read", "fma", "bytes", "f32 gemm", "x of M=1", "product"};

/* The limit for products of floats: this share of the peak rate of multiply-adds. */
static const double gemm_share = 0.9;

struct settings {
    int rounds;
    int threads;  /* 0: first one thread, then one per processor */
    int64_t rows; /* of the weight */
    const char *only;
    const char *table;
    const char *json;
};

/* Copies of one format's weight, with codes and scales in separate buffers as in a tensor. */
struct weight_copies {
    struct packed_case_weight made;
    int64_t rows;
    int64_t data_bytes;
    int64_t scale_bytes;
    int64_t copies;
    uint8_t *data;
    uint8_t *scale;
    int64_t next;
};

/* One case on one number of threads. */
struct measurement {
    const struct packed_case *from;
    int64_t weight_rows; /* rows of the weight that are timed */
    const struct packed_kernel *kernel;
    struct weight_copies *weight_copies;
    struct packed_case_rows x;
    uint16_t *plain; /* of LIMIT_PRODUCT: the source and the destination of the conversion */
    void *memory;
    const struct measurement *product; /* of LIMIT_ONE_ROW and LIMIT_PRODUCT: the product that the time is
                                        * compared with */
    struct rounds rounds;
};

static void stop(const char *what) {
    fprintf(stderr, "bench_packed: %s\n", what);
    exit(1);
}

/* ---- operands ---- */

static struct weight_copies *weight_copies_of(enum packed_format format, int64_t rows) {
    static struct weight_copies stocks[PACKED_FORMAT_COUNT];
    struct weight_copies *const weight_copies = &stocks[format];
    if (weight_copies->copies > 0) {
        return weight_copies;
    }
    const int64_t elements = rows * COLUMNS;
    packed_case_weight_make(&weight_copies->made, format, false, rows, COLUMNS, PACKED_FILL_USUAL, 1);
    weight_copies->rows = rows;
    weight_copies->data_bytes = packed_is_4_bit(format) ? elements / 2 : elements;
    weight_copies->scale_bytes = weight_copies->made.code_scale == NULL ? 0 : rows * weight_copies->made.blocks;
    weight_copies->copies =
        rows == HOT_ROWS ? 1 : COLD_BYTES / (weight_copies->data_bytes + weight_copies->scale_bytes) + 1;
    weight_copies->data = packed_allocate(weight_copies->copies * weight_copies->data_bytes);
    weight_copies->scale = packed_allocate(weight_copies->copies * weight_copies->scale_bytes);
    for (int64_t i = 0; i < weight_copies->copies; ++i) {
        memcpy(weight_copies->data + i * weight_copies->data_bytes, weight_copies->made.tiled,
               (size_t)weight_copies->data_bytes);
        if (weight_copies->scale_bytes > 0) {
            memcpy(weight_copies->scale + i * weight_copies->scale_bytes, weight_copies->made.tiled_scale,
                   (size_t)weight_copies->scale_bytes);
        }
    }
    return weight_copies;
}

static struct packed_weight next_weight(struct weight_copies *weight_copies) {
    struct packed_weight weight = weight_copies->made.weight;
    const int64_t i = weight_copies->next++ % weight_copies->copies;
    weight.data = weight_copies->data + i * weight_copies->data_bytes;
    weight.scale = weight_copies->scale + i * weight_copies->scale_bytes;
    return weight;
}

/* The kernel of the named table, or the one that this machine uses. */
static const struct packed_kernel *kernel_of(const struct packed_case *from, const char *table) {
    int count;
    const struct packed_table *const *tables = packed_tables(&count);
    if (table[0] == '\0') {
        return packed_kernel(from->format, from->precision);
    }
    for (int i = 0; i < count; ++i) {
        const struct packed_kernel *kernel = &tables[i]->kernel[from->format][from->precision];
        if (strcmp(tables[i]->name, table) == 0 && kernel->run != NULL &&
            (tables[i]->features & ~opaq_cpu_features()) == 0) {
            return kernel;
        }
    }
    return NULL;
}

/* ---- timing ---- */

struct product {
    const struct packed_kernel *kernel;
    struct packed_weight weight;
    const struct packed_rows *x;
    float *y;
    int64_t tiles;
    int64_t y_step;
};

/* Runs a piece in units of the kernel. Each thread keeps its scratch memory. */
static void product_piece(void *argument, int64_t begin, int64_t end) {
    static _Thread_local void *panel;
    static _Thread_local int64_t panel_bytes;
    const struct product *product = argument;
    const int64_t unit = product->kernel->unit;
    if (panel == NULL || panel_bytes < product->kernel->panel_bytes) {
        free(panel);
        panel_bytes = product->kernel->panel_bytes;
        panel = packed_allocate(panel_bytes);
    }
    product->kernel->run(&product->weight, product->x, begin * unit, min_int64(end * unit, product->tiles),
                         product->y, product->y_step, panel);
}

static double operations_of(const struct measurement *one) {
    return 2.0 * (double)(one->from->rows * one->weight_rows) * COLUMNS;
}

/* Bytes of the weight that are read. */
static double bytes_of(const struct measurement *one) {
    return (double)(one->weight_copies->data_bytes + one->weight_copies->scale_bytes) *
           (double)one->weight_rows / (double)one->weight_copies->rows;
}

static double time_product(const struct measurement *one, const struct opaq_parallel *parallel, float *y) {
    const int64_t tile_rows = packed_tile_rows(one->from->format);
    struct product product = {one->kernel, next_weight(one->weight_copies), &one->x.rows,
                              y,           one->weight_rows / tile_rows,    one->weight_copies->rows};
    const struct opaq_body body = {product_piece, &product};
    const double start = now();
    parallel->run(parallel->context, ceil_div(product.tiles, one->kernel->unit), &body);
    return now() - start;
}

static double time_preparing(const struct measurement *one, const struct opaq_parallel *parallel) {
    const struct packed_case *from = one->from;
    const struct gemm_operand operand = {.plain = {.data = one->plain,
                                                   .dtype = OPAQ_BF16,
                                                   .rows = from->rows,
                                                   .columns = COLUMNS,
                                                   .row_step = COLUMNS,
                                                   .column_step = 1}};
    struct packed_rows made;
    const double start = now();
    packed_rows_make(&operand, 0, from->rows, COLUMNS, from->format, from->precision, one->memory, parallel,
                     &made);
    return now() - start;
}

/* Times the limit once; 0 if the case has none. */
static double time_limit(const struct measurement *one, struct peaks *peaks,
                         const struct opaq_parallel *parallel, float *y) {
    if (one->product != NULL) {
        return time_product(one->product, parallel, y);
    }
    if (peaks->memory == NULL || one->from->limit == LIMIT_ONE_ROW || one->from->limit == LIMIT_PRODUCT) {
        return 0.0;
    }
    return one->from->limit == LIMIT_READ    ? peaks_sample(peaks, PEAK_READ, bytes_of(one), parallel)
           : one->from->limit == LIMIT_BYTES ? peaks_sample(peaks, PEAK_BYTES, operations_of(one), parallel)
                                             : peaks_sample(peaks, PEAK_FMA, operations_of(one), parallel);
}

/* One round of a case. */
static void time_case(struct measurement *one, struct peaks *peaks, const struct opaq_parallel *parallel,
                      float *y, bool counts) {
    const int turns = one->from->rows <= FEW_ROWS ? FEW_ROWS_TURNS : TURNS;
    for (int turn = 0; turn < turns; ++turn) {
        const double limit = time_limit(one, peaks, parallel, y);
        const double seconds =
            one->plain != NULL ? time_preparing(one, parallel) : time_product(one, parallel, y);
        if (counts) {
            rounds_turn(&one->rounds, turn, seconds, limit);
        }
    }
}

/* ---- reporting ---- */

static bool is_less_better(const struct packed_case *from) {
    return from->limit == LIMIT_ONE_ROW || from->limit == LIMIT_PRODUCT;
}

/* The figure that is compared with must and aim; 0 if the limit is unknown. */
static struct figure share_of(const struct measurement *one) {
    const double factor = one->from->limit == LIMIT_GEMM ? 1.0 / gemm_share
                          : one->from->limit == LIMIT_PRODUCT && one->product != NULL
                              ? (double)one->product->weight_rows / COLD_ROWS
                              : 1.0;
    return rounds_figure(&one->rounds, factor, is_less_better(one->from));
}

static const char *verdict_of(const struct packed_case *from, double share) {
    const bool reaches_aim = is_less_better(from) ? share <= from->aim : share >= from->aim;
    const bool reaches_must = is_less_better(from) ? share <= from->must : share >= from->must;
    return share <= 0.0 ? "unknown" : reaches_aim ? "aim" : reaches_must ? "must" : "MISSED";
}

static void report(const struct measurement *one, int threads, FILE *json, bool *is_first) {
    double spread;
    const double seconds = rounds_best(&one->rounds, &spread);
    const bool is_product = one->from->limit != LIMIT_PRODUCT;
    const char *kernel = is_product ? one->kernel->name : packed_prepare_best()->name;
    const double operations = is_product ? operations_of(one) : 0.0;
    const double bytes = is_product ? bytes_of(one) : 2.0 * (double)one->from->rows * COLUMNS;
    const struct figure share = share_of(one);
    const char *verdict = verdict_of(one->from, share.value);
    printf("%-13s %4lld %2d %10.1f %7.2f %8.1f %7.3f %5.2f-%4.2f %6.2f  %-9s %5.2f %5.2f %-8s %6.2f  %s\n",
           one->from->name, (long long)one->from->rows, threads, seconds * 1e6, bytes / seconds * 1e-9,
           operations / seconds * 1e-9, share.value, share.low, share.high, share.minima,
           limit_names[one->from->limit], one->from->must, one->from->aim, verdict, spread, kernel);
    if (json != NULL) {
        fprintf(json,
                "%s\n    {\"case\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %d, \"kernel\": \"%s\", "
                "\"threads\": %d, "
                "\"seconds\": %.9f, \"bytes_per_second\": %.1f, \"operations_per_second\": %.1f, "
                "\"limit\": \"%s\", \"share\": %.5f, \"must\": %.2f, \"aim\": %.2f, \"verdict\": \"%s\", "
                "\"median_over_best\": %.4f, \"rounds\": %d, ",
                *is_first ? "" : ",", one->from->name, (long long)one->from->rows, (long long)one->weight_rows,
                COLUMNS, kernel, threads, seconds, bytes / seconds, operations / seconds,
                limit_names[one->from->limit], share.value, one->from->must, one->from->aim, verdict, spread,
                one->rounds.count);
        figure_json(json, &share);
        fprintf(json, "}");
    }
    *is_first = false;
}

/* ---- the program ---- */

/* Makes the source of the conversion: plain numbers. */
static void plain_make(struct measurement *one) {
    const int64_t count = one->from->rows * COLUMNS;
    uint64_t state = 1;
    one->plain = packed_allocate(count * (int64_t)sizeof *one->plain);
    one->memory = packed_allocate((int64_t)packed_rows_bytes(one->from->precision, one->from->rows, COLUMNS));
    for (int64_t i = 0; i < count; ++i) {
        one->plain[i] = packed_cut(packed_random_float(&state));
    }
}

/* The product of the same name with `rows` rows of x. */
static const struct measurement *product_with_rows(const struct measurement *all, int count,
                                                   const struct measurement *of, int64_t rows) {
    for (int i = 0; i < count; ++i) {
        if (all[i].from->rows == rows && all[i].from->limit != LIMIT_PRODUCT &&
            strcmp(all[i].from->name, of->from->name) == 0) {
            return &all[i];
        }
    }
    return NULL;
}

/* Runs the selected cases on one number of threads. */
static void run_threads(const struct settings *s, int threads, FILE *json, bool *is_first) {
    static struct measurement all[PACKED_CASE_COUNT];
    static float *y;
    struct opaq_pool *pool;
    struct opaq_error error;
    int count = 0;
    if (opaq_pool_create(threads, &pool, &error) != OPAQ_OK) {
        stop(error.text);
    }
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    y = y == NULL ? packed_allocate(PACKED_CASE_MOST_ROWS * s->rows * (int64_t)sizeof(float)) : y;
    static struct peaks peaks;
    if (s->rows == COLD_ROWS && peaks.memory == NULL) {
        peaks = peaks_make();
    }
    memset(peaks.best, 0, sizeof peaks.best);
    for (int i = 0; i < PACKED_CASE_COUNT; ++i) {
        const struct packed_kernel *kernel = kernel_of(&packed_cases[i], s->table);
        const bool is_wanted = s->rows == COLD_ROWS ||
                               (packed_cases[i].rows <= FEW_ROWS && packed_cases[i].limit != LIMIT_PRODUCT);
        if (is_wanted && strstr(packed_cases[i].name, s->only) != NULL && kernel != NULL &&
            (strstr(kernel->name, "_ref") == NULL || strcmp(s->table, "ref") == 0)) {
            struct measurement *one = &all[count++];
            memset(one, 0, sizeof *one);
            one->from = &packed_cases[i];
            one->kernel = kernel;
            one->weight_rows =
                packed_cases[i].rows <= FEW_ROWS ? s->rows : min_int64(SLICE_ROWS * threads, s->rows);
            one->weight_copies = weight_copies_of(packed_cases[i].format, s->rows);
            if (packed_cases[i].limit == LIMIT_PRODUCT) {
                plain_make(one);
            } else {
                packed_case_rows_make(&one->x, packed_cases[i].precision, packed_cases[i].format,
                                      packed_cases[i].rows, COLUMNS, PACKED_FILL_USUAL, 2);
            }
        }
    }
    for (int i = 0; i < count; ++i) {
        if (is_less_better(all[i].from)) {
            all[i].product = product_with_rows(all, count, &all[i],
                                               all[i].from->limit == LIMIT_ONE_ROW ? 1 : all[i].from->rows);
        }
    }
    for (int round = -1; round < FEW_ROWS_ROUNDS * s->rounds; ++round) { /* round -1 warms up */
        for (int i = 0; i < count; ++i) {
            if (round % FEW_ROWS_ROUNDS <= 0 || all[i].from->rows <= FEW_ROWS) {
                time_case(&all[i], &peaks, &parallel, y, round >= 0);
            }
        }
    }
    printf("%d threads: read %.2f GB/s, fma %.1f GFLOP/s, bytes %.1f GOP/s\n", threads,
           peaks.best[PEAK_READ] * 1e-9, peaks.best[PEAK_FMA] * 1e-9, peaks.best[PEAK_BYTES] * 1e-9);
    for (int i = 0; i < count; ++i) {
        report(&all[i], threads, json, is_first);
    }
    for (int i = 0; i < count; ++i) {
        packed_case_rows_free(&all[i].x);
        free(all[i].plain);
        free(all[i].memory);
    }
    printf("\n");
    opaq_pool_destroy(pool);
}

static void usage(FILE *stream) {
    fprintf(stream,
            "usage: bench_packed [options]\n"
            "Times y = x w^T for tiled weights w, 4096 x 4096, and preparing x apart.\n\n"
            "  --rounds N     rounds over all cases, at most 100 (default 8); four times that for few rows\n"
            "  --threads N    0 for one, and then one per processor (default 0)\n"
            "  --only TEXT    only cases whose name contains TEXT\n"
            "  --table NAME   the kernels of that table instead of the fastest\n"
            "  --hot 1        128 rows of the weight, which stay in a cache, and few rows of x\n"
            "  --json FILE    also write the figures as JSON\n");
}

static struct settings read_arguments(int argc, char **argv) {
    struct settings s = {8, 0, COLD_ROWS, "", "", NULL};
    int is_hot = 0;
    const struct bench_option options[] = {
        {"--rounds", &s.rounds, 1, ROUND_LIMIT, NULL},
        {"--threads", &s.threads, 0, 1024, NULL},
        {"--hot", &is_hot, 0, 1, NULL},
        {"--only", NULL, 0, 0, &s.only},
        {"--table", NULL, 0, 0, &s.table},
        {"--json", NULL, 0, 0, &s.json},
    };
    bench_options_read(argc, argv, "bench_packed", usage, options, sizeof options / sizeof options[0]);
    s.rows = is_hot ? HOT_ROWS : COLD_ROWS;
    return s;
}

static int processors(void) {
    struct opaq_pool *pool;
    struct opaq_error error;
    if (opaq_pool_create(0, &pool, &error) != OPAQ_OK) {
        stop(error.text);
    }
    const int threads = opaq_pool_threads(pool);
    opaq_pool_destroy(pool);
    return threads;
}

int main(int argc, char **argv) {
    const struct settings s = read_arguments(argc, argv);
    char features[128];
    bool is_first = true;
    FILE *json = s.json == NULL ? NULL : fopen(s.json, "w");
    if (s.json != NULL && json == NULL) {
        stop("the JSON file cannot be written");
    }
    (void)opaq_cpu_describe(opaq_cpu_features(), features, sizeof features);
    printf("opaq %s, %d rounds, %lld x %d, cpu: %s\n\n", opaq_version(), s.rounds, (long long)s.rows, COLUMNS,
           features);
    printf("%-13s %4s %2s %10s %7s %8s %7s %10s %6s  %-9s %5s %5s %-8s %6s  %s\n", "case", "M", "T", "best us",
           "GB/s", "GOP/s", "share", "quartiles", "minima", "of", "must", "aim", "reached", "spread", "kernel");
    if (json != NULL) {
        fprintf(json, "{\n  \"version\": \"%s\", \"rounds\": %d,\n  \"cpu\": \"%s\", \"results\": [",
                opaq_version(), s.rounds, features);
    }
    run_threads(&s, s.threads == 0 ? 1 : s.threads, json, &is_first);
    if (s.threads == 0 && processors() > 1) {
        run_threads(&s, processors(), json, &is_first);
    }
    if (json != NULL) {
        fprintf(json, "\n  ]\n}\n");
        fclose(json);
    }
    return 0;
}
