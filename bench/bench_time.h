/* bench_time.h: what the benchmarks share: a clock, rounds of one case, copying as the measure of bandwidth. Depends on
 * libc. */
#ifndef OPAQ_BENCH_BENCH_TIME_H
#define OPAQ_BENCH_BENCH_TIME_H

#include <stdint.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

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

#endif
