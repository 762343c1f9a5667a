/* bench_peaks.h: the best that was seen of this machine's limits, measured again and again between the cases of a
 * benchmark. Depends on opaq/parallel.h, bench_limits.h, bench_time.h. */
#ifndef OPAQ_BENCH_BENCH_PEAKS_H
#define OPAQ_BENCH_BENCH_PEAKS_H

#include <stdint.h>

#include "opaq/parallel.h"

#include "bench_limits.h"
#include "bench_time.h"

/* In bytes or operations for each second. */
enum peak { PEAK_READ, PEAK_FMA, PEAK_BYTES, PEAK_COPY, PEAK_COUNT };

enum {
    PEAK_MEMORY = 300 << 20, /* larger than any cache */
    PEAK_CHUNKS =
        (16 << 20) / LIMIT_CHUNK, /* of a sample: what an 8-bit weight of the benchmarks has, for a peak that
                                             * lasts shorter than a product is one that no product could reach */
    PEAK_SAMPLES = 4,
    PEAK_UNITS = 8
};

struct peaks {
    uint8_t *memory; /* PEAK_MEMORY bytes, written to before, aligned to 64 */
    int64_t next;    /* chunk */
    double best[PEAK_COUNT];
};

static inline void peaks_keep(struct peaks *peaks, enum peak kind, double rate) {
    peaks->best[kind] = rate > peaks->best[kind] ? rate : peaks->best[kind];
}

/* So many chunks that nobody has touched for a long time. */
static inline uint8_t *peaks_next(struct peaks *peaks, int64_t chunks) {
    uint8_t *const at = peaks->memory + peaks->next * LIMIT_CHUNK;
    peaks->next = (peaks->next + chunks) % (PEAK_MEMORY / LIMIT_CHUNK - 4 * PEAK_CHUNKS);
    return at;
}

static inline void peaks_update_compute(struct peaks *peaks, enum peak kind, struct limit_compute compute,
                                        const struct opaq_parallel *parallel, int threads) {
    const struct opaq_body body = {limit_compute_piece, &compute};
    const int64_t units = (int64_t)threads * PEAK_UNITS;
    for (int i = 0; i < PEAK_SAMPLES && compute.run != 0; ++i) {
        const double start = now();
        parallel->run(parallel->context, units, &body);
        peaks_keep(peaks, kind, (double)units * compute.operations / (now() - start));
    }
}

/* Reading, multiply-adds of floats and of bytes, once more. */
static inline void peaks_update(struct peaks *peaks, const struct opaq_parallel *parallel, int threads) {
    struct limit_read read = {.streams = LIMIT_STREAMS};
    const struct opaq_body body = {limit_read_piece, &read};
    for (int i = 0; i < PEAK_SAMPLES; ++i) {
        read.from = peaks_next(peaks, PEAK_CHUNKS);
        read.streams = i % 2 == 0 ? LIMIT_STREAMS : LIMIT_STREAMS / 2;
        const double start = now();
        parallel->run(parallel->context, PEAK_CHUNKS, &body);
        peaks_keep(peaks, PEAK_READ, (double)PEAK_CHUNKS * LIMIT_CHUNK / (now() - start));
    }
    peaks_update_compute(peaks, PEAK_FMA, limit_fma(), parallel, threads);
    peaks_update_compute(peaks, PEAK_BYTES, limit_bytes(), parallel, threads);
}

/* Copying past the caches, once more; bytes are read and written ones. */
static inline void peaks_update_copy(struct peaks *peaks, const struct opaq_parallel *parallel) {
    const int64_t chunks = PEAK_CHUNKS;
    for (int i = 0; i < PEAK_SAMPLES; ++i) {
        uint8_t *const from = peaks_next(peaks, 2 * chunks);
        struct copy_task copy = {(char *)from + chunks * LIMIT_CHUNK, (char *)from};
        const struct opaq_body body = {stream_piece, &copy};
        const double start = now();
        parallel->run(parallel->context, chunks * LIMIT_CHUNK / 4096, &body);
        peaks_keep(peaks, PEAK_COPY, 2.0 * (double)(chunks * LIMIT_CHUNK) / (now() - start));
    }
}

#endif
