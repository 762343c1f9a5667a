/* demo_formats.c: every format on one weight-like tensor: size, rounding error and speed on this machine.
 *
 * `demo_formats --json FILE` also writes the figures to a file, for the page of the demonstration.
 *
 * The tensor is normal with a standard deviation of 0.02, like a trained weight; on average one element in 1024 is
 * multiplied by 25.
 * Only the public headers are used; the formats are read from the library's table. */
#include <math.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "opaq/opaq.h"

enum { ROWS = 2048, COLUMNS = 4096, REPEATS = 3, VARIANT_COUNT = 14 };

/* The seven formats with default options, then variants. */
static const char *const variants[VARIANT_COUNT] = {
    "fp8",      "fp8row",       "fp8blk1",  "fp8blk2",        "mxfp8",    "mxfp4",           "nvfp4",
    "fp8.e5m2", "fp8blk2+pow2", "mxfp8+2d", "mxfp4+rule=ocp", "nvfp4+2d", "nvfp4+rowscaled", "nvfp4+4over6",
};

struct figures {
    double bits;
    double bytes;
    double sqnr;
    double cosine;
    double largest_error;
    double quantize_rate;
    double dequantize_rate;
};

static void stop(const char *what, const struct opaq_error *error) {
    fprintf(stderr, "demo_formats: %s%s%s\n", what, error == NULL ? "" : ": ",
            error == NULL ? "" : error->text);
    exit(1);
}

static double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static void progress(int done) {
    if (isatty(STDERR_FILENO)) {
        fprintf(stderr, "\r[%.*s%*s]%s", 2 * done, "############################", 2 * (VARIANT_COUNT - done),
                "", done == VARIANT_COUNT ? "\r\033[K" : "");
    }
}

static struct opaq_view make_tensor(const struct opaq_spec *spec) {
    const int64_t shape[2] = {ROWS, COLUMNS};
    struct opaq_proto proto;
    struct opaq_view view;
    struct opaq_error error;
    size_t bytes = 0;
    void *memory;
    if (opaq_proto_make(shape, 2, OPAQ_BF16, spec, (struct opaq_device){OPAQ_DEVICE_CPU, 0}, &proto, &error) !=
            OPAQ_OK ||
        opaq_view_bind_bytes(&proto, &bytes, &error) != OPAQ_OK) {
        stop("tensor", &error);
    }
    if (posix_memalign(&memory, 64, bytes) != 0) {
        stop("no memory", NULL);
    }
    if (opaq_view_bind(&proto, memory, bytes, &view, &error) != OPAQ_OK) {
        stop("tensor", &error);
    }
    return view;
}

static double uniform(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    return ((double)(*state >> 11) + 0.5) * 0x1p-53;
}

/* Box and Muller's method. */
static double normal(uint64_t *state) {
    const double radius = sqrt(-2.0 * log(uniform(state)));
    return radius * cos(6.283185307179586 * uniform(state));
}

static void fill_like_weights(const struct opaq_view *x) {
    uint64_t state = 2026;
    uint16_t *data = x->buffer[0].data;
    for (int64_t i = 0; i < (int64_t)ROWS * COLUMNS; ++i) {
        const double value = 0.02 * normal(&state) * (uniform(&state) < 1.0 / 1024 ? 25.0 : 1.0);
        data[i] = (uint16_t)opaq_element_encode(OPAQ_BF16, (float)value, OPAQ_IEEE);
    }
}

static void compare(const struct opaq_view *x, const struct opaq_view *y, struct figures *f) {
    const uint16_t *a = x->buffer[0].data;
    const uint16_t *b = y->buffer[0].data;
    double signal = 0.0;
    double other = 0.0;
    double product = 0.0;
    double noise = 0.0;
    f->largest_error = 0.0;
    for (int64_t i = 0; i < (int64_t)ROWS * COLUMNS; ++i) {
        const double u = (double)opaq_element_decode(OPAQ_BF16, a[i]);
        const double v = (double)opaq_element_decode(OPAQ_BF16, b[i]);
        signal += u * u;
        other += v * v;
        product += u * v;
        noise += (u - v) * (u - v);
        f->largest_error = fmax(f->largest_error, fabs(u - v));
    }
    f->sqnr = 10.0 * log10(signal / noise);
    f->cosine = product / sqrt(signal * other);
}

static struct figures measure(const struct opaq_view *x, const struct opaq_view *y, const char *text,
                              const struct opaq_parallel *parallel) {
    struct opaq_spec spec;
    struct opaq_error error;
    struct figures f = {0};
    size_t bytes;
    if (opaq_spec_parse(text, strlen(text), &spec, &error) != OPAQ_OK) {
        stop("spec", &error);
    }
    struct opaq_view q = make_tensor(&spec);
    const struct opaq_execution execution = {.parallel = parallel};
    double quantize_best = 1e9;
    double dequantize_best = 1e9;
    for (int i = 0; i < REPEATS; ++i) {
        const double start = now();
        if (opaq_quantize(x, NULL, &execution, &q, &error) != OPAQ_OK) {
            stop(text, &error);
        }
        const double middle = now();
        if (opaq_dequantize(&q, 0, &execution, y, &error) != OPAQ_OK) {
            stop(text, &error);
        }
        quantize_best = fmin(quantize_best, middle - start);
        dequantize_best = fmin(dequantize_best, now() - middle);
    }
    const double elements = (double)ROWS * COLUMNS;
    (void)opaq_proto_bytes(&q.proto, &bytes, NULL);
    f.bytes = (double)bytes;
    f.bits = 8.0 * f.bytes / elements;
    f.quantize_rate = elements / quantize_best * 1e-6;
    f.dequantize_rate = elements / dequantize_best * 1e-6;
    compare(x, y, &f);
    free(q.buffer[0].data); /* one allocation, which starts with the first buffer */
    return f;
}

static void write_json(const char *path, const struct figures *figures, int threads) {
    FILE *file = fopen(path, "w");
    if (file == NULL) {
        stop(path, NULL);
    }
    fprintf(file, "{\"rows\": %d, \"columns\": %d, \"threads\": %d, \"formats\": [", ROWS, COLUMNS, threads);
    for (int i = 0; i < VARIANT_COUNT; ++i) {
        const struct figures *f = &figures[i];
        fprintf(
            file,
            "%s\n{\"quantizer\": \"%s\", \"bits\": %.6f, \"bytes\": %.0f, \"sqnr_db\": %.6f, \"cosine\": %.9f, "
            "\"largest_error\": %.6e, \"quantize_rate\": %.3f, \"dequantize_rate\": %.3f}",
            i == 0 ? "" : ",", variants[i], f->bits, f->bytes, f->sqnr, f->cosine, f->largest_error,
            f->quantize_rate, f->dequantize_rate);
    }
    fprintf(file, "\n]}\n");
    if (fclose(file) != 0) {
        stop(path, NULL);
    }
}

int main(int argc, char **argv) {
    struct opaq_pool *pool;
    struct opaq_error error;
    struct figures figures[VARIANT_COUNT];
    char cpu[128];
    if (argc != 1 && (argc != 3 || strcmp(argv[1], "--json") != 0)) {
        stop("usage: demo_formats [--json FILE]", NULL);
    }
    if (opaq_pool_create(0, &pool, &error) != OPAQ_OK) {
        stop("pool", &error);
    }
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    struct opaq_view x = make_tensor(NULL);
    struct opaq_view y = make_tensor(NULL);
    fill_like_weights(&x);
    for (int i = 0; i < VARIANT_COUNT; ++i) {
        figures[i] = measure(&x, &y, variants[i], &parallel);
        progress(i + 1);
    }
    (void)opaq_cpu_describe(opaq_cpu_features(), cpu, sizeof cpu);
    printf("opaq %s: a bf16 weight of %d x %d (normal, 0.1 %% outliers), %d threads, cpu: %s\n\n",
           opaq_version(), ROWS, COLUMNS, opaq_pool_threads(pool), cpu);
    printf("%-17s %9s %11s %8s %9s %11s %12s %14s\n", "quantizer", "bits/elem", "bytes", "SQNR dB", "cosine",
           "max error", "quantize M/s", "dequantize M/s");
    printf("%-17s %9.3f %11.0f %8s %9s %11s %12s %14s\n", "bf16 (source)", 16.0, 2.0 * ROWS * COLUMNS, "-",
           "1.000000", "0", "-", "-");
    for (int i = 0; i < VARIANT_COUNT; ++i) {
        const struct figures *f = &figures[i];
        printf("%s%-17s %9.3f %11.0f %8.2f %9.6f %11.3e %12.1f %14.1f\n", i == OPAQ_FORMAT_COUNT ? "\n" : "",
               variants[i], f->bits, f->bytes, f->sqnr, f->cosine, f->largest_error, f->quantize_rate,
               f->dequantize_rate);
    }
    printf("\nM/s: million elements per second.\n");
    if (argc == 3) {
        write_json(argv[2], figures, opaq_pool_threads(pool));
    }
    free(x.buffer[0].data);
    free(y.buffer[0].data);
    opaq_pool_destroy(pool);
    return 0;
}
