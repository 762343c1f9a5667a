/* limits_library.c: samples of this machine's limits for benchmarks that are not written in C, as a library. */
#include <stdlib.h>

#include "opaq/opaq.h"

#include "bench_peaks.h"

struct bench_limits {
    struct opaq_pool *pool;
    struct peaks peaks;
};

__attribute__((visibility("default"))) void *bench_limits_open(int threads);
__attribute__((visibility("default"))) double bench_limits_sample(void *handle, int kind, double work);
__attribute__((visibility("default"))) double bench_limits_best(const void *handle, int kind);
__attribute__((visibility("default"))) void bench_limits_close(void *handle);

/* Creates `threads` threads; NULL if an allocation fails. */
void *bench_limits_open(int threads) {
    struct bench_limits *const limits = malloc(sizeof *limits);
    struct opaq_error error;
    if (limits == NULL) {
        return NULL;
    }
    limits->peaks = peaks_make();
    if (limits->peaks.memory == NULL || opaq_pool_create(threads, &limits->pool, &error) != OPAQ_OK) {
        free(limits->peaks.memory);
        free(limits);
        return NULL;
    }
    return limits;
}

/* Seconds for `work` at the rate of a new sample; `kind` is an enum peak. 0 if the rate is unknown. */
double bench_limits_sample(void *handle, int kind, double work) {
    struct bench_limits *const limits = handle;
    const struct opaq_parallel parallel = opaq_pool_parallel(limits->pool);
    return peaks_sample(&limits->peaks, (enum peak)kind, work, &parallel);
}

/* The best rate of all samples so far, per second. */
double bench_limits_best(const void *handle, int kind) {
    return ((const struct bench_limits *)handle)->peaks.best[kind];
}

void bench_limits_close(void *handle) {
    struct bench_limits *const limits = handle;
    opaq_pool_destroy(limits->pool);
    free(limits->peaks.memory);
    free(limits);
}
