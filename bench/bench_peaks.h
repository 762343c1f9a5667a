/* bench_peaks.h: samples of this machine's peak rates, taken between those of the subjects, and the best of
 * them. Depends on opaq/parallel.h, bench_limits.h, bench_time.h. */
#ifndef OPAQ_BENCH_BENCH_PEAKS_H
#define OPAQ_BENCH_BENCH_PEAKS_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>

#include "opaq/parallel.h"

#include "bench_limits.h"
#include "bench_time.h"

/* Work is counted in bytes (for copying: read plus written) or operations. */
enum peak { PEAK_READ, PEAK_FMA, PEAK_BYTES, PEAK_COPY, PEAK_COUNT };

enum {
    PEAK_CHUNKS = (300 << 20) / LIMIT_CHUNK, /* bytes of memory, larger than any cache */
    PEAK_SAMPLES = 4,                        /* number of samples in peaks_update(), and their work: */
    PEAK_SAMPLE_BYTES = 16 << 20,
    PEAK_SAMPLE_UNITS = 8 /* per thread */
};

struct peaks {
    uint8_t *memory; /* PEAK_CHUNKS chunks, initialized */
    int64_t next;    /* index of the next chunk */
    int64_t samples;
    double best[PEAK_COUNT]; /* best rates, per second */
};

/* If an allocation fails, `memory` is NULL. */
static inline struct peaks peaks_make(void) {
    struct peaks peaks = {NULL, 0, 0, {0.0}};
    void *memory;
    if (posix_memalign(&memory, LIMIT_LINE, (size_t)PEAK_CHUNKS * LIMIT_CHUNK) == 0) {
        memset(memory, 1, (size_t)PEAK_CHUNKS * LIMIT_CHUNK);
        peaks.memory = memory;
    }
    return peaks;
}

/* Returns `count` chunks that were not used recently. */
static inline uint8_t *peaks_next(struct peaks *peaks, int64_t chunks) {
    peaks->next = peaks->next + chunks > PEAK_CHUNKS ? 0 : peaks->next;
    uint8_t *const at = peaks->memory + peaks->next * LIMIT_CHUNK;
    peaks->next += chunks;
    return at;
}

/* Seconds for `work` at the rate of a new sample of about that size; 0 if the rate is unknown. */
static inline double peaks_sample(struct peaks *peaks, enum peak kind, double work,
                                  const struct opaq_parallel *parallel) {
    struct limit_compute compute = kind == PEAK_FMA ? limit_fma() : limit_bytes();
    struct limit_read read = {.streams = peaks->samples++ % 2 == 0 ? LIMIT_STREAMS : LIMIT_STREAMS / 2};
    struct limit_copy copy;
    struct opaq_body body = {limit_compute_piece, &compute};
    double unit = compute.operations;
    int64_t units;
    if (kind == PEAK_READ || kind == PEAK_COPY) {
        unit = kind == PEAK_COPY ? 2.0 * LIMIT_CHUNK : LIMIT_CHUNK;
    } else if (compute.run == NULL) {
        return 0.0;
    }
    units = (int64_t)(work / unit + 0.5) > 1 ? (int64_t)(work / unit + 0.5) : 1;
    if (kind == PEAK_READ) {
        units = units > PEAK_CHUNKS ? PEAK_CHUNKS : units;
        read.from = peaks_next(peaks, units);
        body = (struct opaq_body){limit_read_piece, &read};
    } else if (kind == PEAK_COPY) {
        units = units > PEAK_CHUNKS / 2 ? PEAK_CHUNKS / 2 : units;
        copy.to = peaks_next(peaks, 2 * units);
        copy.from = copy.to + units * LIMIT_CHUNK;
        body = (struct opaq_body){limit_copy_piece, &copy};
    }
    const double start = now();
    parallel->run(parallel->context, units, &body);
    const double rate = (double)units * unit / (now() - start);
    peaks->best[kind] = rate > peaks->best[kind] ? rate : peaks->best[kind];
    return work / rate;
}

/* Takes some samples of each rate. */
static inline void peaks_update(struct peaks *peaks, const struct opaq_parallel *parallel, int threads) {
    const double units = (double)threads * PEAK_SAMPLE_UNITS;
    for (int i = 0; i < PEAK_SAMPLES; ++i) {
        (void)peaks_sample(peaks, PEAK_READ, PEAK_SAMPLE_BYTES, parallel);
        (void)peaks_sample(peaks, PEAK_COPY, 2.0 * PEAK_SAMPLE_BYTES, parallel);
        (void)peaks_sample(peaks, PEAK_FMA, units * limit_fma().operations, parallel);
        (void)peaks_sample(peaks, PEAK_BYTES, units * limit_bytes().operations, parallel);
    }
}

#endif
