/* bench_quant.c: speed of quantize and dequantize per quantizer, relative to this machine's copy bandwidth.
 *
 * In a round a case and its floor are timed alternately, with cold caches; the floor is copying as many bytes,
 * past the caches, as the input and the output have. The share of the floor is the median of the rounds
 * (bench_rounds.h). Times are the best of all rounds; the spread is the median divided by the best. If a
 * quantizer accepts an amax, quantizing is timed a second time with a given amax, that is, without the pass
 * that computes it.
 *
 * Some cases have a required share (must) and a target (aim), for one thread and tensors larger than the
 * caches; they get more rounds. Making both copies at once is compared with making one after the other, in
 * separate rounds. Cases that miss their required value are listed at the end. Prints tables; --json FILE
 * writes the same as JSON.
 *
 * --against LIBRARY compares two builds: the same operation of another libopaq.so replaces the copy, on the
 * same memory and on the calling thread. The physical addresses of the buffers change a time by up to a fifth
 * from process to process, so two processes cannot show a difference of a few percent; two libraries in one
 * process can. The structs of the public headers must be the same in both. With --subject both are shared
 * objects: the address of code that is linked in differs, which alone changes a time by up to a tenth.
 * Comparing a library with a copy of itself shows the error of the method. */
#include <dlfcn.h>
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

#include "../tests/cases/quant_cases.h"

struct settings {
    int rows;
    int columns;
    int rounds;
    int threads;
    const char *filter;
    const char *json;
    const char *against; /* the path of another build's libopaq.so, or NULL */
    const char *subject; /* the path of the libopaq.so that is timed, or NULL for the one that is linked in */
};

/* The timed functions of one build. */
struct library {
    enum opaq_status (*quantize)(const struct opaq_view *x, const struct opaq_quantize_args *args,
                                 const struct opaq_execution *execution, const struct opaq_view *out,
                                 struct opaq_error *error);
    enum opaq_status (*dequantize)(const struct opaq_view *q, int usage, const struct opaq_execution *execution,
                                   const struct opaq_view *y, struct opaq_error *error);
    bool uses_threads; /* false: runs on the calling thread, because all builds accept a NULL pool, whatever its
                       * type */
};
static struct library this_library = {opaq_quantize, opaq_dequantize, true};

enum operation { QUANTIZE, QUANTIZE_GIVEN, DEQUANTIZE, OPERATION_COUNT };
static const char *const operation_names[OPERATION_COUNT] = {"quantize", "quantize, amax given", "dequantize"};

struct bench_case {
    const char *spec;
    enum opaq_element dtype;
    struct opaq_view x;
    struct opaq_view q;
    struct opaq_view y;
    size_t plain_bytes;
    size_t quantized_bytes;
    float *amax[2]; /* by usage minus 1; NULL if the quantizer accepts no amax */
    struct rounds rounds[OPERATION_COUNT];
};

/* Shares of the floor, for inputs of bf16. */
struct target {
    const char *spec;
    enum operation operation;
    double must;
    double aim;
};
static const struct target targets[] = {
    {"fp8", QUANTIZE, 0.25, 0.5},   {"mxfp8", QUANTIZE, 0.25, 0.5},  {"mxfp4", QUANTIZE, 0.25, 0.5},
    {"nvfp4", QUANTIZE, 0.25, 0.5}, {"nvfp4", DEQUANTIZE, 0.5, 0.8},
};
static const double both_must = 1.3;
static const double both_aim = 1.45;
enum {
    TURNS = 2,        /* of a case, per round */
    TARGET_ROUNDS = 5 /* factor on the rounds of cases that have targets */
};

static void stop(const char *what, const struct opaq_error *error) {
    fprintf(stderr, "bench_quant: %s%s%s\n", what, error == NULL ? "" : ": ", error == NULL ? "" : error->text);
    exit(1);
}

static struct opaq_view allocate(const struct settings *s, enum opaq_element dtype,
                                 const struct opaq_spec *spec) {
    const int64_t shape[2] = {s->rows, s->columns};
    struct opaq_proto proto;
    struct opaq_view view;
    struct opaq_error error;
    size_t bytes = 0;
    void *memory;
    if (opaq_proto_make(shape, 2, dtype, spec, (struct opaq_device){OPAQ_DEVICE_CPU, 0}, &proto, &error) !=
            OPAQ_OK ||
        opaq_view_bind_bytes(&proto, &bytes, &error) != OPAQ_OK) {
        stop("bad size", &error);
    }
    if (posix_memalign(&memory, 64, bytes + 64) != 0) {
        stop("out of memory; try a smaller --rows or --columns", NULL);
    }
    memset(memory, 0, bytes);
    if (opaq_view_bind(&proto, memory, bytes, &view, &error) != OPAQ_OK) {
        stop("bind", &error);
    }
    return view;
}

/* Approximately normal weights; one in a thousand is twenty times as large. */
static void fill(const struct opaq_view *x) {
    const int64_t count = opaq_proto_rows(&x->proto) * opaq_proto_columns(&x->proto);
    uint64_t state = 1;
    for (int64_t i = 0; i < count; ++i) {
        float value = 0.02f * nearly_normal(&state);
        value = i % 1009 == 0 ? value * 20.0f : value;
        if (x->proto.dtype == OPAQ_F32) {
            ((float *)x->buffer[0].data)[i] = value;
        } else {
            ((uint16_t *)x->buffer[0].data)[i] =
                (uint16_t)opaq_element_encode((enum opaq_element)x->proto.dtype, value, OPAQ_IEEE);
        }
    }
}

static void prepare(struct bench_case *one, const struct quant_case *from, const struct settings *s) {
    struct opaq_spec spec;
    struct opaq_error error;
    if (opaq_spec_parse(from->spec, strlen(from->spec), &spec, &error) != OPAQ_OK) {
        stop("spec", &error);
    }
    one->spec = from->spec;
    one->dtype = from->dtype;
    one->q = allocate(s, from->dtype, &spec);
    (void)opaq_proto_bytes(&one->q.proto, &one->quantized_bytes, NULL);
    (void)opaq_proto_bytes(&one->x.proto, &one->plain_bytes, NULL);
    for (int usage = OPAQ_ROWWISE; usage <= OPAQ_COLUMNWISE; ++usage) {
        const int64_t count = opaq_amax_count(&one->q.proto, (enum opaq_usage)usage);
        if (count > 0) {
            one->amax[usage - 1] = malloc((size_t)count * sizeof(float));
            for (int64_t i = 0; one->amax[usage - 1] != NULL && i < count; ++i) {
                one->amax[usage - 1][i] = 0.8f; /* about the amax of the numbers of fill() */
            }
        }
    }
}

static bool is_timed(const struct bench_case *one, enum operation operation) {
    return operation != QUANTIZE_GIVEN || one->amax[0] != NULL || one->amax[1] != NULL;
}

static const struct target *target_of(const struct bench_case *one, enum operation operation) {
    for (size_t i = 0; i < sizeof targets / sizeof targets[0]; ++i) {
        if (targets[i].operation == operation && strcmp(targets[i].spec, one->spec) == 0 &&
            one->dtype == OPAQ_BF16) {
            return &targets[i];
        }
    }
    return NULL;
}

/* Bytes read and written. Dequantizing reads one of the two copies. */
static double bytes_moved(const struct bench_case *one, enum operation operation) {
    const double copies = operation == DEQUANTIZE && one->q.proto.spec.usage == OPAQ_BOTH ? 2.0 : 1.0;
    return (double)one->plain_bytes + (double)one->quantized_bytes / copies;
}

/* Seconds of the library's operation, with its buffers not in the caches. */
static double time_operation_of(const struct library *library, const struct bench_case *one,
                                enum operation operation, struct peaks *peaks,
                                const struct opaq_parallel *parallel) {
    const double more_than_caches = 96 << 20;
    struct opaq_error error;
    struct opaq_quantize_args args = {.random = {1, 2}};
    const struct opaq_execution on_threads = {.parallel = parallel};
    const struct opaq_execution *const execution = library->uses_threads ? &on_threads : NULL;
    if (operation == QUANTIZE_GIVEN) {
        args.amax_rowwise = one->amax[0];
        args.amax_columnwise = one->amax[1];
    }
    (void)peaks_sample(peaks, PEAK_READ, more_than_caches, parallel);
    const double start = now();
    const enum opaq_status status = operation == DEQUANTIZE
                                        ? library->dequantize(&one->q, 0, execution, &one->y, &error)
                                        : library->quantize(&one->x, &args, execution, &one->q, &error);
    const double seconds = now() - start;
    if (status != OPAQ_OK) {
        stop(one->spec, &error);
    }
    return seconds;
}

static double time_operation(const struct bench_case *one, enum operation operation, struct peaks *peaks,
                             const struct opaq_parallel *parallel) {
    return time_operation_of(&this_library, one, operation, peaks, parallel);
}

/* One round of a case. */
static void time_case(struct bench_case *one, enum operation operation, const struct library *against,
                      struct peaks *peaks, const struct opaq_parallel *parallel, bool counts) {
    for (int turn = 0; turn < TURNS; ++turn) {
        const bool is_first = turn % 2 == 1; /* each goes first in one turn */
        double seconds = is_first ? time_operation(one, operation, peaks, parallel) : 0.0;
        const double other = against == NULL
                                 ? peaks_sample(peaks, PEAK_COPY, bytes_moved(one, operation), parallel)
                                 : time_operation_of(against, one, operation, peaks, parallel);
        seconds = is_first ? seconds : time_operation(one, operation, peaks, parallel);
        if (counts) {
            rounds_turn(&one->rounds[operation], turn, seconds, other);
        }
    }
}

static void progress(int done, int all) {
    if (isatty(STDERR_FILENO)) {
        const int filled = 40 * done / all;
        fprintf(stderr, "\r[%.*s%*s] %d/%d%s", filled, "########################################", 40 - filled,
                "", done, all, done == all ? "\r\033[K" : "");
    }
}

static const char *dtype_name(enum opaq_element dtype) { return opaq_element_info(dtype)->name; }

/* Text for the end of the output. */
struct misses {
    char text[4096];
    int count;
};

static const char *judge(double value, double must, double aim, const char *spec, const char *what,
                         struct misses *misses) {
    if (value >= must) {
        return value >= aim ? "aim" : "must";
    }
    const size_t length = strlen(misses->text);
    (void)snprintf(misses->text + length, sizeof misses->text - length, "  %s %s: %.3f, must be %.2f\n", what,
                   spec, value, must);
    ++misses->count;
    return "MISS";
}

/* Prints one operation of one case: a line of the table and an object of the JSON. */
static void report(const struct bench_case *one, enum operation operation, const struct settings *s,
                   struct misses *misses, FILE *json) {
    double spread;
    const double seconds = rounds_best(&one->rounds[operation], &spread);
    const double elements = (double)s->rows * (double)s->columns;
    const struct figure share = rounds_figure(&one->rounds[operation], 1.0, false);
    const char *kernel = operation == DEQUANTIZE ? opaq_dequantize_kernel(&one->q.proto.spec)
                                                 : opaq_quantize_kernel(&one->q.proto.spec);
    const struct target *target = s->against != NULL ? NULL : target_of(one, operation);
    const char *mark = target == NULL ? ""
                                      : judge(share.value, target->must, target->aim, one->spec,
                                              operation_names[operation], misses);
    printf("%-34s %-4s %-24s %9.1f %9.3f %7.3f %5.2f-%4.2f %6.2f %7.2f", one->spec, dtype_name(one->dtype),
           kernel, elements / seconds * 1e-6, seconds * 1e3, share.value, share.low, share.high, share.minima,
           spread);
    if (target != NULL) {
        printf("  %.2f %.2f %s", target->must, target->aim, mark);
    }
    printf("\n");
    if (json != NULL) {
        fprintf(json,
                ",\n    {\"operation\": \"%s\", \"spec\": \"%s\", \"dtype\": \"%s\", \"kernel\": \"%s\", "
                "\"seconds\": %.9f, \"elements_per_second\": %.1f, \"bytes_moved\": %.0f, "
                "\"share_of_floor\": %.5f, \"median_over_best\": %.4f, ",
                operation_names[operation], one->spec, dtype_name(one->dtype), kernel, seconds,
                elements / seconds, bytes_moved(one, operation), share.value, spread);
        figure_json(json, &share);
        if (target != NULL) {
            fprintf(json, ", \"must\": %.2f, \"aim\": %.2f, \"mark\": \"%s\"", target->must, target->aim, mark);
        }
        fprintf(json, "}");
    }
}

static const struct bench_case *find_case(const struct bench_case *cases, int count, const char *base,
                                          const char *ending) {
    char text[64];
    (void)snprintf(text, sizeof text, "%s%s", base, ending);
    for (int i = 0; i < count; ++i) {
        if (strcmp(cases[i].spec, text) == 0 && cases[i].dtype == OPAQ_BF16) {
            return &cases[i];
        }
    }
    return NULL;
}

/* Making both copies at once against one after the other, for a format that has cases for all three. */
struct both {
    const char *format;
    const struct bench_case *row;
    const struct bench_case *column;
    const struct bench_case *at_once;
    enum operation
        operation; /* with a given amax if possible, because the pass for it would be counted twice otherwise */
    struct rounds rounds;
};

/* Finds the formats that have all three cases; returns their number. */
static int find_both(const struct bench_case *cases, int count, struct both *all) {
    int found = 0;
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        struct both both = {.format = opaq_format_row((enum opaq_format)format)->name};
        both.row = find_case(cases, count, both.format, "");
        both.column = find_case(cases, count, both.format, "+columnwise");
        both.at_once = find_case(cases, count, both.format, "+both");
        if (both.row != NULL && both.column != NULL && both.at_once != NULL) {
            both.operation = is_timed(both.at_once, QUANTIZE_GIVEN) ? QUANTIZE_GIVEN : QUANTIZE;
            all[found++] = both;
        }
    }
    return found;
}

static void time_both(struct both *both, struct peaks *peaks, const struct opaq_parallel *parallel,
                      bool counts) {
    double least_row = 0.0;
    double least_column = 0.0;
    for (int turn = 0; turn < TURNS; ++turn) {
        const double row = time_operation(both->row, both->operation, peaks, parallel);
        const double column = time_operation(both->column, both->operation, peaks, parallel);
        const double at_once = time_operation(both->at_once, both->operation, peaks, parallel);
        least_row = turn == 0 ? row : smaller(row, least_row);
        least_column = turn == 0 ? column : smaller(column, least_column);
        if (counts) {
            rounds_turn(&both->rounds, turn, at_once, least_row + least_column);
        }
    }
}

static void report_both(const struct both *both, struct misses *misses, FILE *json, bool is_first) {
    double spread;
    const double seconds = rounds_best(&both->rounds, &spread);
    const struct figure ratio = rounds_figure(&both->rounds, 1.0, false);
    const char *mark = judge(ratio.value, both_must, both_aim, both->format, "both copies of", misses);
    printf("%-34s %9.3f %7.3f %5.2f-%4.2f %6.2f %7.2f  %.2f %.2f %s\n", both->format, seconds * 1e3,
           ratio.value, ratio.low, ratio.high, ratio.minima, spread, both_must, both_aim, mark);
    if (json != NULL) {
        fprintf(json, "%s\n    {\"format\": \"%s\", \"both_seconds\": %.9f, \"ratio\": %.4f, ",
                is_first ? "" : ",", both->format, seconds, ratio.value);
        figure_json(json, &ratio);
        fprintf(json, ", \"median_over_best\": %.4f, \"must\": %.2f, \"aim\": %.2f, \"mark\": \"%s\"}", spread,
                both_must, both_aim, mark);
    }
}

static void usage(FILE *stream) {
    fprintf(stream, "usage: bench_quant [options]\n"
                    "Times quantize and dequantize for every quantizer of the shared case list.\n\n"
                    "  --rows N       rows of the tensor (default 4096)\n"
                    "  --columns N    columns (default 4096)\n"
                    "  --rounds N     rounds over all cases, at most 100 (default 5)\n"
                    "  --threads N    0 for one per processor (default 0)\n"
                    "  --only TEXT    only quantizers whose text contains TEXT\n"
                    "  --json FILE    also write the figures as JSON\n"
                    "  --against LIB  compare with another build's libopaq.so instead of a copy; one thread\n"
                    "  --subject LIB  time this libopaq.so instead of the one that is linked in\n");
}

/* The other build's functions. */
static struct library open_library(const char *path) {
    struct library library = {NULL, NULL, false};
    void *const handle = dlopen(path, RTLD_NOW | RTLD_LOCAL);
    void *const quantize = handle == NULL ? NULL : dlsym(handle, "opaq_quantize");
    void *const dequantize = handle == NULL ? NULL : dlsym(handle, "opaq_dequantize");
    if (quantize == NULL || dequantize == NULL) {
        fprintf(stderr, "bench_quant: %s: %s\n", path, dlerror());
        exit(2);
    }
    memcpy(&library.quantize, &quantize, sizeof quantize); /* C has no cast from void * to a function */
    memcpy(&library.dequantize, &dequantize, sizeof dequantize);
    return library;
}

static struct settings read_arguments(int argc, char **argv) {
    struct settings s = {4096, 4096, 5, 0, "", NULL, NULL, NULL};
    const struct bench_option options[] = {
        {"--rows", &s.rows, 1, 1 << 20, NULL},
        {"--columns", &s.columns, 1, 1 << 20, NULL},
        {"--rounds", &s.rounds, 1, ROUND_LIMIT, NULL},
        {"--threads", &s.threads, 0, 1024, NULL},
        {"--only", NULL, 0, 0, &s.filter},
        {"--json", NULL, 0, 0, &s.json},
        {"--against", NULL, 0, 0, &s.against},
        {"--subject", NULL, 0, 0, &s.subject},
    };
    bench_options_read(argc, argv, "bench_quant", usage, options, sizeof options / sizeof options[0]);
    s.threads = s.against != NULL ? 1 : s.threads;
    return s;
}

int main(int argc, char **argv) {
    const struct settings s = read_arguments(argc, argv);
    static struct bench_case cases[QUANT_CASE_COUNT];
    struct opaq_view inputs[OPAQ_ELEMENT_COUNT];
    struct opaq_view outputs[OPAQ_ELEMENT_COUNT];
    struct opaq_pool *pool;
    struct opaq_error error;
    int count = 0;
    if (opaq_pool_create(s.threads, &pool, &error) != OPAQ_OK) {
        stop("pool", &error);
    }
    FILE *json = s.json == NULL ? NULL : fopen(s.json, "w");
    if (s.json != NULL && json == NULL) {
        stop("the JSON file cannot be written", NULL);
    }
    for (int d = OPAQ_F16; d <= OPAQ_F32; ++d) {
        inputs[d] = allocate(&s, (enum opaq_element)d, NULL);
        outputs[d] = allocate(&s, (enum opaq_element)d, NULL);
        fill(&inputs[d]);
    }
    for (int i = 0; i < QUANT_CASE_COUNT; ++i) {
        if (strstr(quant_cases[i].spec, s.filter) != NULL) {
            cases[count].x = inputs[quant_cases[i].dtype];
            cases[count].y = outputs[quant_cases[i].dtype];
            prepare(&cases[count++], &quant_cases[i], &s);
        }
    }
    if (count == 0) {
        stop("no quantizer's text contains the text of --only", NULL);
    }
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    if (s.subject != NULL) {
        this_library = open_library(s.subject);
    }
    this_library.uses_threads = s.against == NULL;
    const struct library other = s.against != NULL ? open_library(s.against) : this_library;
    const struct library *const against = s.against != NULL ? &other : NULL;
    struct peaks peaks = peaks_make();
    if (peaks.memory == NULL) {
        stop("no memory", NULL);
    }
    static struct both both[OPAQ_FORMAT_COUNT];
    const int both_count = against != NULL ? 0 : find_both(cases, count, both);
    const int steps = OPERATION_COUNT * count + both_count;
    for (int round = -1; round < s.rounds; ++round) { /* round -1 warms up */
        for (int i = 0; i < OPERATION_COUNT * count; ++i) {
            struct bench_case *const one = &cases[i % count];
            const enum operation operation = (enum operation)(i / count);
            const int times = target_of(one, operation) == NULL ? 1 : TARGET_ROUNDS;
            for (int k = 0; is_timed(one, operation) && k < times; ++k) {
                time_case(one, operation, against, &peaks, &parallel, round >= 0);
            }
            progress((round + 1) * steps + i + 1, (s.rounds + 1) * steps);
        }
        for (int i = 0; i < both_count; ++i) {
            for (int k = 0; k < TARGET_ROUNDS; ++k) {
                time_both(&both[i], &peaks, &parallel, round >= 0);
            }
            progress((round + 1) * steps + OPERATION_COUNT * count + i + 1, (s.rounds + 1) * steps);
        }
    }
    const double bandwidth = peaks.best[PEAK_COPY];
    char features[128];
    (void)opaq_cpu_describe(opaq_cpu_features(), features, sizeof features);
    printf("opaq %s, %lld x %lld, %d threads, %d rounds, cpu: %s\n", opaq_version(), (long long)s.rows,
           (long long)s.columns, opaq_pool_threads(pool), s.rounds, features);
    printf("copy bandwidth (read + write), best of all rounds: %.2f GB/s\n\n", bandwidth * 1e-9);
    if (json != NULL) {
        fprintf(
            json,
            "{\n  \"version\": \"%s\", \"rows\": %lld, \"columns\": %lld, \"threads\": %d, \"rounds\": %d,\n"
            "  \"cpu\": \"%s\", \"copy_bytes_per_second\": %.1f,\n  \"results\": [\n"
            "    {\"operation\": \"copy\", \"bytes_per_second\": %.1f}",
            opaq_version(), (long long)s.rows, (long long)s.columns, opaq_pool_threads(pool), s.rounds,
            features, bandwidth, bandwidth);
    }
    struct misses misses = {"", 0};
    for (int operation = 0; operation < OPERATION_COUNT; ++operation) {
        printf("%-34s %-4s %-24s %9s %9s %7s %10s %6s %7s  %s\n", operation_names[operation], "from", "kernel",
               "Melem/s", "best ms", against == NULL ? "share" : "faster", "quartiles", "minima", "spread",
               "must, aim");
        for (int i = 0; i < count; ++i) {
            if (is_timed(&cases[i], (enum operation)operation)) {
                report(&cases[i], (enum operation)operation, &s, &misses, json);
            }
        }
        printf("\n");
    }
    if (json != NULL) {
        fprintf(json, "\n  ],\n  \"both\": [");
    }
    if (both_count > 0) {
        printf("%-34s %9s %7s %10s %6s %7s  %s\n", "both copies against one by one", "best ms", "ratio",
               "quartiles", "minima", "spread", "must, aim");
    }
    for (int i = 0; i < both_count; ++i) {
        report_both(&both[i], &misses, json, i == 0);
    }
    printf("\n");
    printf("%d rows miss their required value%s\n%s", misses.count, misses.count == 0 ? "" : ":", misses.text);
    if (json != NULL) {
        fprintf(json, "\n  ],\n  \"misses\": %d\n}\n", misses.count);
        if (fclose(json) != 0) {
            stop("the JSON file cannot be written", NULL);
        }
        printf("written: %s\n", s.json);
    }
    opaq_pool_destroy(pool);
    return 0;
}
