/* bench_gemm.c: speed of matrix products per pair of operands and shape, relative to this machine's limits.
 *
 * In a round a case and its limits are timed alternately. The floor is the longer of two times: that of the
 * fused multiply-adds alone (in registers, on all threads), and that of copying as many bytes as the operands
 * and the result have. The share of the floor is the median of the rounds (bench_rounds.h). Times are the best
 * of all rounds; the spread is the median divided by the best. Prints a table; --json FILE writes the same as
 * JSON. */
#include <stdbool.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <unistd.h>

#include "opaq/opaq.h"

#include "bench_numbers.h"
#include "bench_options.h"
#include "bench_peaks.h"
#include "bench_rounds.h"
#include "bench_time.h"

#include "../tests/cases/gemm_cases.h"
#include "../tests/cases/gemm_operands.h"

struct settings {
    int rounds;
    int threads;
    const char *filter;
    const char *shape; /* "MxNxK", or "" for all */
    const char *json;
};

struct bench_case {
    const struct gemm_case *from;
    struct gemm_case_operand a;
    struct gemm_case_operand b;
    struct opaq_view c;
    struct gemm_job job;
    double operations;
    double bytes; /* of the operands and the result */
    struct rounds rounds;
};

enum { TURNS = 2 /* of a case, per round */ };

static void stop(const char *what) {
    fprintf(stderr, "bench_gemm: %s\n", what);
    exit(1);
}

/* ---- cases ---- */

/* Approximately normal numbers; one in a thousand is twenty times as large. */
static void fill(const struct opaq_view *x, uint64_t seed) {
    const int64_t count = opaq_proto_rows(&x->proto) * opaq_proto_columns(&x->proto);
    uint64_t state = seed;
    for (int64_t i = 0; i < count; ++i) {
        float value = nearly_normal(&state);
        value = i % 1009 == 0 ? value * 20.0f : value;
        if (x->proto.dtype == OPAQ_F32) {
            ((float *)x->buffer[0].data)[i] = value;
        } else {
            ((uint16_t *)x->buffer[0].data)[i] =
                (uint16_t)opaq_element_encode((enum opaq_element)x->proto.dtype, value, OPAQ_IEEE);
        }
    }
}

static void prepare_operand(struct gemm_case_operand *o, const char *text, int64_t rows, int64_t columns,
                            const struct opaq_parallel *parallel) {
    gemm_case_operand_make(o, text, rows, columns);
    fill(&o->x, (uint64_t)rows);
    gemm_case_operand_quantize(o, false, parallel);
    if (o->operand.copy != NULL) { /* the plain memory is no longer needed */
        gemm_case_tensor_free(&o->x);
    }
}

static double operand_bytes(const struct gemm_case_operand *o) {
    const struct opaq_view *view = o->operand.copy != NULL ? &o->q : &o->x;
    size_t bytes = 0;
    (void)opaq_proto_bytes(&view->proto, &bytes, NULL);
    return (double)bytes;
}

/* If only one side has a Hadamard transform (+rht), the product undoes it. */
static void prepare(struct bench_case *one, const struct gemm_case *from, const int64_t *shape,
                    const struct opaq_parallel *parallel) {
    one->from = from;
    prepare_operand(&one->a, from->a, shape[0], shape[2], parallel);
    prepare_operand(&one->b, from->b, shape[1], shape[2], parallel);
    const bool pair = strstr(from->a, "rht") != NULL && strstr(from->b, "rht") != NULL;
    one->a.operand.undo_hadamard = !pair;
    one->b.operand.undo_hadamard = !pair;
    one->c = gemm_case_tensor(shape[0], shape[1], OPAQ_BF16, NULL);
    one->job = (struct gemm_job){.a = one->a.operand, .b = one->b.operand, .c = quant_matrix_make(&one->c)};
    one->operations = 2.0 * (double)shape[0] * (double)shape[1] * (double)shape[2];
    one->bytes = operand_bytes(&one->a) + operand_bytes(&one->b) + 2.0 * (double)shape[0] * (double)shape[1];
    one->rounds.count = 0;
}

static void release(struct bench_case *one) {
    gemm_case_operand_free(&one->a);
    gemm_case_operand_free(&one->b);
    gemm_case_tensor_free(&one->c);
}

/* One round of a case. */
static void time_case(struct bench_case *one, struct peaks *peaks, const struct opaq_parallel *parallel,
                      bool counts) {
    void *workspace = gemm_case_allocate(gemm_workspace_bytes(&one->job));
    for (int turn = 0; turn < TURNS; ++turn) {
        const double computing = peaks_sample(peaks, PEAK_FMA, one->operations, parallel);
        const double moving = peaks_sample(peaks, PEAK_COPY, one->bytes, parallel);
        const double start = now();
        gemm_run(&one->job, workspace, parallel);
        const double seconds = now() - start;
        if (counts) {
            rounds_turn(&one->rounds, turn, seconds, computing > moving ? computing : moving);
        }
    }
    free(workspace);
}

static void report(const struct bench_case *one, const int64_t *shape, const struct peaks *peaks, FILE *json,
                   bool is_first) {
    double spread;
    const double seconds = rounds_best(&one->rounds, &spread);
    const struct figure share = rounds_figure(&one->rounds, 1.0, false);
    const double rate = peaks->best[PEAK_FMA];
    const bool is_compute = rate > 0.0 && one->operations / rate > one->bytes / peaks->best[PEAK_COPY];
    printf("%-20s %-20s %5lld x %5lld x %5lld %9.1f %9.3f %-7s %7.3f %5.2f-%4.2f %7.2f\n", one->from->a,
           one->from->b, (long long)shape[0], (long long)shape[1], (long long)shape[2],
           one->operations / seconds * 1e-9, seconds * 1e3, is_compute ? "compute" : "memory", share.value,
           share.low, share.high, spread);
    if (json != NULL) {
        fprintf(json,
                "%s\n    {\"a\": \"%s\", \"b\": \"%s\", \"m\": %lld, \"n\": %lld, \"k\": %lld, "
                "\"kernel\": \"%s\", \"seconds\": %.9f, \"operations_per_second\": %.1f, "
                "\"bytes_moved\": %.0f, \"floor\": \"%s\", \"share_of_floor\": %.5f, "
                "\"median_over_best\": %.4f, ",
                is_first ? "" : ",", one->from->a, one->from->b, (long long)shape[0], (long long)shape[1],
                (long long)shape[2], gemm_kernel_name(), seconds, one->operations / seconds, one->bytes,
                is_compute ? "compute" : "memory", share.value, spread);
        figure_json(json, &share);
        fprintf(json, "}");
    }
}

/* ---- the program ---- */

static void progress(int done, int all) {
    if (isatty(STDERR_FILENO)) {
        const int filled = 40 * done / all;
        fprintf(stderr, "\r[%.*s%*s] %d/%d%s", filled, "########################################", 40 - filled,
                "", done, all, done == all ? "\r\033[K" : "");
    }
}

static void usage(FILE *stream) {
    fprintf(stream, "usage: bench_gemm [options]\n"
                    "Times c = a b^T for pairs of operands and shapes of the shared case list, c in bf16.\n\n"
                    "  --rounds N     rounds over the cases of a shape, at most 100 (default 5)\n"
                    "  --threads N    0 for one per processor (default 0)\n"
                    "  --only TEXT    only pairs of which one contains TEXT\n"
                    "  --shape MxNxK  only that shape, which need not be in the list\n"
                    "  --json FILE    also write the figures as JSON\n");
}

static void read_shape(const char *text, int64_t *shape) {
    const char *at = text;
    for (int i = 0; i < 3; ++i) {
        char *end;
        const long long value = strtoll(at, &end, 10);
        if (end == at || value < 1 || value > 1 << 20 || *end != (i < 2 ? 'x' : '\0')) {
            fprintf(stderr, "bench_gemm: --shape is \"%s\", expected three numbers like 512x1024x1024\n", text);
            exit(2);
        }
        shape[i] = value;
        at = end + 1;
    }
}

static struct settings read_arguments(int argc, char **argv) {
    struct settings s = {5, 0, "", "", NULL};
    const struct bench_option options[] = {
        {"--rounds", &s.rounds, 1, ROUND_LIMIT, NULL},
        {"--threads", &s.threads, 0, 1024, NULL},
        {"--only", NULL, 0, 0, &s.filter},
        {"--shape", NULL, 0, 0, &s.shape},
        {"--json", NULL, 0, 0, &s.json},
    };
    bench_options_read(argc, argv, "bench_gemm", usage, options, sizeof options / sizeof options[0]);
    return s;
}

static bool is_wanted(const struct gemm_case *one, const struct settings *s) {
    return one->is_timed && (strstr(one->a, s->filter) != NULL || strstr(one->b, s->filter) != NULL);
}

/* Runs the selected cases of one shape; returns their number. */
static int run_shape(const int64_t *shape, const struct settings *s, const struct opaq_parallel *parallel,
                     struct peaks *peaks, FILE *json, bool is_first) {
    static struct bench_case cases[GEMM_CASE_COUNT];
    int count = 0;
    for (int i = 0; i < GEMM_CASE_COUNT; ++i) {
        if (is_wanted(&gemm_cases[i], s)) {
            prepare(&cases[count++], &gemm_cases[i], shape, parallel);
        }
    }
    for (int round = -1; round < s->rounds; ++round) { /* round -1 warms up */
        for (int i = 0; i < count; ++i) {
            time_case(&cases[i], peaks, parallel, round >= 0);
            progress((round + 1) * count + i + 1, (s->rounds + 1) * count);
        }
    }
    for (int i = 0; i < count; ++i) {
        report(&cases[i], shape, peaks, json, is_first && i == 0);
        release(&cases[i]);
    }
    printf("\n");
    return count;
}

int main(int argc, char **argv) {
    const struct settings s = read_arguments(argc, argv);
    int64_t given_shape[3] = {0, 0, 0};
    struct opaq_pool *pool;
    struct opaq_error error;
    char features[128];
    if (s.shape[0] != '\0') {
        read_shape(s.shape, given_shape);
    }
    if (opaq_pool_create(s.threads, &pool, &error) != OPAQ_OK) {
        stop(error.text);
    }
    FILE *json = s.json == NULL ? NULL : fopen(s.json, "w");
    if (s.json != NULL && json == NULL) {
        stop("the JSON file cannot be written");
    }
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    const int threads = opaq_pool_threads(pool);
    struct peaks peaks = peaks_make();
    if (peaks.memory == NULL) {
        stop("no memory");
    }
    (void)opaq_cpu_describe(opaq_cpu_features(), features, sizeof features);
    printf("opaq %s, %s, %d threads, %d rounds, cpu: %s\n\n", opaq_version(), gemm_kernel_name(), threads,
           s.rounds, features);
    printf("%-20s %-20s %21s %9s %9s %-7s %7s %10s %7s\n", "a", "b", "M x N x K", "GFLOP/s", "best ms", "floor",
           "share", "quartiles", "spread");
    if (json != NULL) {
        fprintf(json,
                "{\n  \"version\": \"%s\", \"kernel\": \"%s\", \"threads\": %d, \"rounds\": %d,\n"
                "  \"cpu\": \"%s\", \"results\": [",
                opaq_version(), gemm_kernel_name(), threads, s.rounds, features);
    }
    int count = 0;
    if (s.shape[0] != '\0') {
        count = run_shape(given_shape, &s, &parallel, &peaks, json, true);
    }
    for (int i = 0; s.shape[0] == '\0' && i < GEMM_BENCH_SHAPE_COUNT; ++i) {
        count += run_shape(gemm_bench_shapes[i], &s, &parallel, &peaks, json, count == 0);
    }
    if (count == 0) {
        stop("no operand's text contains the text of --only");
    }
    printf("multiply and add: %.1f GFLOP/s, copy bandwidth (read + write): %.2f GB/s\n",
           peaks.best[PEAK_FMA] * 1e-9, peaks.best[PEAK_COPY] * 1e-9);
    if (json != NULL) {
        fprintf(json, "\n  ],\n  \"operations_per_second\": %.1f, \"copy_bytes_per_second\": %.1f\n}\n",
                peaks.best[PEAK_FMA], peaks.best[PEAK_COPY]);
        if (fclose(json) != 0) {
            stop("the JSON file cannot be written");
        }
        printf("written: %s\n", s.json);
    }
    free(peaks.memory);
    opaq_pool_destroy(pool);
    return 0;
}
