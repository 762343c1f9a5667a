/* cli/commands/command_bench.c: `opaq bench`: speed of quantizing and dequantizing, compared with copying. Each round
 * measures everything once, so that other load affects all alike; the best round is reported. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "cli/cli_memory.h"
#include "cli/cli_try.h"
#include "cli/commands/commands.h"
#include "cli/console/interrupt.h"
#include "cli/console/json_output.h"
#include "cli/console/progress.h"
#include "opaq/cpu.h"
#include "opaq/parallel.h"
#include "opaq/quant.h"

enum { SIZE = 4096, PART = 4096 /* bytes */, ROUND_LIMIT = 1000 };
enum operation { QUANTIZE, DEQUANTIZE, OPERATION_COUNT };
enum width { ONE_THREAD, ALL_THREADS, WIDTH_COUNT };

static const char *const operation_names[OPERATION_COUNT] = {"quantize", "dequantize"};

struct bench {
    struct opaq_view plain;                        /* the input */
    struct opaq_view decoded;                      /* the output of dequantizing and of copying */
    struct opaq_view quantized[OPAQ_FORMAT_COUNT]; /* each with its own memory */
    size_t plain_bytes;
    struct opaq_pool *pool;
    struct opaq_parallel parallel;
    struct opaq_execution execution; /* on all threads */
    int widths;                      /* 1 if there is one thread only */
    double copy_seconds[WIDTH_COUNT];
    double seconds[OPERATION_COUNT][OPAQ_FORMAT_COUNT][WIDTH_COUNT];
    int rounds;
};

static double now(void) {
    struct timespec time;
    (void)clock_gettime(CLOCK_MONOTONIC, &time);
    return (double)time.tv_sec + 1e-9 * (double)time.tv_nsec;
}

static enum opaq_status bind(const struct opaq_spec *spec, struct opaq_view *view, struct opaq_error *error) {
    static const int64_t shape[2] = {SIZE, SIZE};
    const struct opaq_device processor = {OPAQ_DEVICE_CPU, 0};
    struct opaq_proto proto;
    size_t bytes = 0;
    CLI_TRY(opaq_proto_make(shape, 2, OPAQ_BF16, spec, processor, &proto, error));
    CLI_TRY(opaq_view_bind_bytes(&proto, &bytes, error));
    void *const memory = alloc_aligned(bytes);
    memset(memory, 0, bytes);
    return opaq_view_bind(&proto, memory, bytes, view, error);
}

/* Approximately normal numbers, like weights. */
static void fill(const struct opaq_view *view) {
    uint16_t *const codes = view->buffer[0].data;
    uint64_t state = 1;
    for (size_t i = 0; i < (size_t)SIZE * SIZE; ++i) {
        state = state * 6364136223846793005u + 1442695040888963407u;
        const uint32_t bits = (uint32_t)(state >> 33);
        const uint32_t sum = (bits & 0x3FF) + (bits >> 10 & 0x3FF) + (bits >> 20 & 0x3FF);
        codes[i] = (uint16_t)opaq_element_encode(OPAQ_BF16, ((float)sum - 1534.5f) / 25600.0f, OPAQ_SATURATE);
    }
}

static enum opaq_status prepare(struct bench *bench, int threads, struct opaq_error *error) {
    CLI_TRY(opaq_pool_create(threads, &bench->pool, error));
    CLI_TRY(bind(NULL, &bench->plain, error));
    CLI_TRY(bind(NULL, &bench->decoded, error));
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        struct opaq_spec spec;
        CLI_TRY(opaq_spec_make((enum opaq_format)format, &spec, error));
        CLI_TRY(bind(&spec, &bench->quantized[format], error));
    }
    fill(&bench->plain);
    bench->parallel = opaq_pool_parallel(bench->pool);
    bench->execution = (struct opaq_execution){.parallel = &bench->parallel};
    bench->widths = opaq_pool_threads(bench->pool) > 1 ? WIDTH_COUNT : 1;
    bench->plain_bytes = (size_t)SIZE * SIZE * sizeof(uint16_t);
    return OPAQ_OK;
}

static void release(struct bench *bench) {
    opaq_pool_destroy(bench->pool);
    free(bench->plain.buffer[0].data);
    free(bench->decoded.buffer[0].data);
    for (int format = 0; format < OPAQ_FORMAT_COUNT; ++format) {
        free(bench->quantized[format].buffer[0].data);
    }
}

static const struct opaq_execution *execution_of(const struct bench *bench, int width) {
    return width == ALL_THREADS ? &bench->execution : NULL;
}

static void copy_parts(void *argument, int64_t begin, int64_t end) {
    const struct bench *const bench = argument;
    const char *const from = bench->plain.buffer[0].data;
    char *const to = bench->decoded.buffer[0].data;
    memcpy(to + begin * PART, from + begin * PART, (size_t)(end - begin) * PART);
}

static void keep_best(double *best, double begin) {
    const double seconds = now() - begin;
    *best = *best == 0.0 || seconds < *best ? seconds : *best;
}

static void measure_copy(struct bench *bench, int width) {
    const int64_t parts = (int64_t)(bench->plain_bytes / PART);
    const struct opaq_body body = {copy_parts, bench};
    const double begin = now();
    if (width == ALL_THREADS) {
        bench->parallel.run(bench->parallel.context, parts, &body);
    } else {
        copy_parts(bench, 0, parts);
    }
    keep_best(&bench->copy_seconds[width], begin);
}

static enum opaq_status measure(struct bench *bench, enum operation operation, int format, int width,
                                struct opaq_error *error) {
    const struct opaq_execution *execution = execution_of(bench, width);
    const double begin = now();
    const enum opaq_status status =
        operation == QUANTIZE
            ? opaq_quantize(&bench->plain, NULL, execution, &bench->quantized[format], error)
            : opaq_dequantize(&bench->quantized[format], 0, execution, &bench->decoded, error);
    keep_best(&bench->seconds[operation][format][width], begin);
    return status;
}

/* Measures every operation once. `progress` may be NULL. */
static enum opaq_status run_round(struct bench *bench, struct progress *progress, struct opaq_error *error) {
    for (int width = 0; width < bench->widths; ++width) {
        measure_copy(bench, width);
        for (int i = 0; i < OPAQ_FORMAT_COUNT * OPERATION_COUNT && !interrupt_seen(); ++i) {
            const enum operation operation = (enum operation)(i % OPERATION_COUNT);
            CLI_TRY(measure(bench, operation, i / OPERATION_COUNT, width, error));
            if (progress != NULL) {
                progress_add(progress, bench->plain_bytes);
            }
        }
    }
    ++bench->rounds;
    return OPAQ_OK;
}

/* The first round determines how many more fit into the time. */
static enum opaq_status run_rounds(struct bench *bench, double seconds, struct opaq_error *error) {
    const double begin = now();
    enum opaq_status status = run_round(bench, NULL, error);
    if (status != OPAQ_OK || interrupt_seen()) {
        return status;
    }
    const double fitting = seconds / (now() - begin) - 1.0;
    const int rounds = fitting < 1.0 ? 1 : fitting > ROUND_LIMIT ? ROUND_LIMIT : (int)fitting;
    const uint64_t steps = (uint64_t)rounds * OPAQ_FORMAT_COUNT * OPERATION_COUNT * (uint64_t)bench->widths;
    struct progress *const progress = progress_begin("measuring", steps * bench->plain_bytes, false);
    for (int i = 0; i < rounds && status == OPAQ_OK && !interrupt_seen(); ++i) {
        status = run_round(bench, progress, error);
    }
    progress_end(progress, false);
    return status;
}

static double rate_of(const struct bench *bench, enum operation operation, int format, int width) {
    return (double)bench->plain_bytes / bench->seconds[operation][format][width];
}

/* Copying moves the plain bytes twice; the operation moves the plain and the quantized bytes once each. */
static double share_of(const struct bench *bench, enum operation operation, int format, int width) {
    size_t quantized = 0;
    (void)opaq_proto_bytes(&bench->quantized[format].proto, &quantized, NULL);
    const double moved = (double)(bench->plain_bytes + quantized) / (2.0 * (double)bench->plain_bytes);
    return moved * bench->copy_seconds[width] / bench->seconds[operation][format][width];
}

static int threads_of(const struct bench *bench, int width) {
    return width == ONE_THREAD ? 1 : opaq_pool_threads(bench->pool);
}

static void print_table(const struct bench *bench) {
    char features[256];
    (void)opaq_cpu_describe(opaq_cpu_features(), features, sizeof features);
    printf("%dx%d of bf16, best of %d rounds%s%s\n\n", SIZE, SIZE, bench->rounds,
           features[0] == '\0' ? "" : ", ", features);
    printf("%-20s", "");
    for (int width = 0; width < bench->widths; ++width) {
        char title[32];
        const int threads = threads_of(bench, width);
        (void)snprintf(title, sizeof title, "%d thread%s", threads, threads == 1 ? "" : "s");
        printf(" %18s", title);
    }
    printf("\n%-20s", "");
    for (int width = 0; width < bench->widths; ++width) {
        printf(" %9s %8s", "GB/s", "share");
    }
    printf("\n%-20s", "copy");
    for (int width = 0; width < bench->widths; ++width) {
        printf(" %9.2f%*s", (double)bench->plain_bytes / bench->copy_seconds[width] * 1e-9,
               width + 1 < bench->widths ? 9 : 0, "");
    }
    printf("\n");
    for (int i = 0; i < OPERATION_COUNT * OPAQ_FORMAT_COUNT; ++i) {
        const enum operation operation = (enum operation)(i / OPAQ_FORMAT_COUNT);
        const int format = i % OPAQ_FORMAT_COUNT;
        printf("%-10s %-9s", operation_names[operation], opaq_format_row((enum opaq_format)format)->name);
        for (int width = 0; width < bench->widths; ++width) {
            printf(" %9.2f %8.2f", rate_of(bench, operation, format, width) * 1e-9,
                   share_of(bench, operation, format, width));
        }
        printf("\n");
    }
}

static void add_result(yyjson_mut_doc *document, yyjson_mut_val *list, const struct bench *bench,
                       enum operation operation, int format, int width) {
    const struct opaq_spec *const spec = &bench->quantized[format].proto.spec;
    yyjson_mut_val *const entry = yyjson_mut_arr_add_obj(document, list);
    yyjson_mut_obj_add_str(document, entry, "operation", operation_names[operation]);
    yyjson_mut_obj_add_str(document, entry, "format", opaq_format_row((enum opaq_format)format)->name);
    yyjson_mut_obj_add_str(document, entry, "kernel",
                           operation == QUANTIZE ? opaq_quantize_kernel(spec) : opaq_dequantize_kernel(spec));
    yyjson_mut_obj_add_int(document, entry, "threads", threads_of(bench, width));
    yyjson_mut_obj_add_real(document, entry, "bytes_per_second", rate_of(bench, operation, format, width));
    yyjson_mut_obj_add_real(document, entry, "share_of_copy", share_of(bench, operation, format, width));
}

static enum exit_code print_json(const struct command_call *call, const struct bench *bench) {
    yyjson_mut_doc *const document = json_begin();
    yyjson_mut_val *const root = yyjson_mut_doc_get_root(document);
    yyjson_mut_obj_add_str(document, root, "version", opaq_version());
    yyjson_mut_obj_add_int(document, root, "rows", SIZE);
    yyjson_mut_obj_add_int(document, root, "columns", SIZE);
    yyjson_mut_obj_add_str(document, root, "dtype", "bf16");
    yyjson_mut_obj_add_int(document, root, "rounds", bench->rounds);
    yyjson_mut_val *const copies = yyjson_mut_obj_add_arr(document, root, "copy");
    yyjson_mut_val *const results = yyjson_mut_obj_add_arr(document, root, "results");
    for (int width = 0; width < bench->widths; ++width) {
        yyjson_mut_val *const copy = yyjson_mut_arr_add_obj(document, copies);
        yyjson_mut_obj_add_int(document, copy, "threads", threads_of(bench, width));
        yyjson_mut_obj_add_real(document, copy, "bytes_per_second",
                                (double)bench->plain_bytes / bench->copy_seconds[width]);
        for (int i = 0; i < OPERATION_COUNT * OPAQ_FORMAT_COUNT; ++i) {
            add_result(document, results, bench, (enum operation)(i / OPAQ_FORMAT_COUNT), i % OPAQ_FORMAT_COUNT,
                       width);
        }
    }
    return json_finish(call, document);
}

enum exit_code command_bench(const struct command_call *call) {
    double seconds = 3.0;
    long long threads = 0;
    if (!call_real(call, "seconds", 0.01, 3600.0, &seconds) ||
        !call_integer(call, "threads", 1, 1024, &threads)) {
        return EXIT_USAGE;
    }
    struct bench *const bench = alloc_array(1, sizeof *bench);
    struct opaq_error error;
    enum exit_code code = EXIT_FINE;
    if (prepare(bench, (int)threads, &error) != OPAQ_OK || run_rounds(bench, seconds, &error) != OPAQ_OK) {
        complain(call, "%s", error.text);
        code = EXIT_TROUBLE;
    } else if (interrupt_seen()) {
        code = EXIT_STOPPED;
    } else if (call_has(call, "json")) {
        code = print_json(call, bench);
    } else {
        print_table(bench);
    }
    release(bench);
    free(bench);
    return code;
}
