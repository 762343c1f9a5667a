/* bench_time.h: what the benchmarks share: a clock, rounds of one case, copying as the measure of bandwidth. Depends on
 * libc. */
#ifndef OPAQ_BENCH_BENCH_TIME_H
#define OPAQ_BENCH_BENCH_TIME_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

enum { ROUND_LIMIT = 100 };

struct timing {
    double seconds[ROUND_LIMIT];
};

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

static inline int by_size(const void *a, const void *b) {
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* Best, and median over best. */
static inline double best(const struct timing *timing, int rounds, double *spread) {
    double sorted[ROUND_LIMIT];
    memcpy(sorted, timing->seconds, (size_t)rounds * sizeof sorted[0]);
    qsort(sorted, (size_t)rounds, sizeof sorted[0], by_size);
    *spread = sorted[rounds / 2] / sorted[0];
    return sorted[0];
}

/* Pieces of 4096 bytes, as an opaq_body has them. */
struct copy_task {
    char *to;
    char *from;
};

static inline void copy_piece(void *argument, int64_t begin, int64_t end) {
    const struct copy_task *task = argument;
    memcpy(task->to + begin * 4096, task->from + begin * 4096, (size_t)(end - begin) * 4096);
}

/* The same past the caches, which is the fastest way to copy more than fits them. The memory is aligned to 16 bytes. */
static inline void stream_piece(void *argument, int64_t begin, int64_t end) {
#if defined(__SSE2__)
    const struct copy_task *task = argument;
    for (int64_t i = begin * 4096; i < end * 4096; i += 64) {
        const __m128i *const from = (const __m128i *)(const void *)(task->from + i);
        __m128i *const to = (__m128i *)(void *)(task->to + i);
        const __m128i a = _mm_load_si128(from);
        const __m128i b = _mm_load_si128(from + 1);
        const __m128i c = _mm_load_si128(from + 2);
        const __m128i d = _mm_load_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    _mm_sfence();
#else
    copy_piece(argument, begin, end);
#endif
}

#endif
