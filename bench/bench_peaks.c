/* bench_peaks.c: peak rates of this machine on a number of threads: reading memory, copying it past the caches,
 * multiply-adds of floats and of bytes. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/opaq.h"

#include "bench_options.h"
#include "bench_peaks.h"
#include "bench_rounds.h"

struct settings {
    int rounds;
    int threads;
    const char *json;
};

static void stop(const char *what) {
    fprintf(stderr, "bench_peaks: %s\n", what);
    exit(1);
}

static void usage(FILE *stream) {
    fprintf(stream,
            "usage: bench_peaks [options]\n"
            "Measures this machine's limits: the best of all rounds.\n\n"
            "  --rounds N     at most 100 (default 10)\n"
            "  --threads N    0 for one per processor (default 0)\n"
            "  --json FILE    also write the figures as JSON; \"-\": instead, to the standard output\n");
}

static struct settings read_arguments(int argc, char **argv) {
    struct settings s = {10, 0, NULL};
    const struct bench_option options[] = {
        {"--rounds", &s.rounds, 1, ROUND_LIMIT, NULL},
        {"--threads", &s.threads, 0, 1024, NULL},
        {"--json", NULL, 0, 0, &s.json},
    };
    bench_options_read(argc, argv, "bench_peaks", usage, options, sizeof options / sizeof options[0]);
    return s;
}

static void write_json(FILE *file, const struct peaks *peaks, int threads, int rounds) {
    char features[128];
    (void)opaq_cpu_describe(opaq_cpu_features(), features, sizeof features);
    fprintf(file,
            "{\"version\": \"%s\", \"threads\": %d, \"rounds\": %d, \"cpu\": \"%s\", "
            "\"read_bytes_per_second\": %.1f, \"copy_bytes_per_second\": %.1f, "
            "\"float_operations_per_second\": %.1f, \"byte_operations_per_second\": %.1f}\n",
            opaq_version(), threads, rounds, features, peaks->best[PEAK_READ], peaks->best[PEAK_COPY],
            peaks->best[PEAK_FMA], peaks->best[PEAK_BYTES]);
}

int main(int argc, char **argv) {
    const struct settings s = read_arguments(argc, argv);
    struct peaks peaks = peaks_make();
    struct opaq_pool *pool;
    struct opaq_error error;
    if (opaq_pool_create(s.threads, &pool, &error) != OPAQ_OK) {
        stop(error.text);
    }
    if (peaks.memory == NULL) {
        stop("no memory");
    }
    const struct opaq_parallel parallel = opaq_pool_parallel(pool);
    const int threads = opaq_pool_threads(pool);
    for (int round = 0; round < s.rounds; ++round) {
        peaks_update(&peaks, &parallel, threads);
    }
    if (s.json == NULL || strcmp(s.json, "-") != 0) {
        printf(
            "%d threads: read %.2f GB/s, copy (read + write) %.2f GB/s, multiply-adds %.1f GFLOP/s, of bytes "
            "%.1f GOP/s\n",
            threads, peaks.best[PEAK_READ] * 1e-9, peaks.best[PEAK_COPY] * 1e-9, peaks.best[PEAK_FMA] * 1e-9,
            peaks.best[PEAK_BYTES] * 1e-9);
    }
    if (s.json != NULL) {
        FILE *file = strcmp(s.json, "-") == 0 ? stdout : fopen(s.json, "w");
        if (file == NULL) {
            stop("the JSON file cannot be written");
        }
        write_json(file, &peaks, threads, s.rounds);
        if (file != stdout && fclose(file) != 0) {
            stop("the JSON file cannot be written");
        }
    }
    free(peaks.memory);
    opaq_pool_destroy(pool);
    return 0;
}
