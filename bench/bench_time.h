/* bench_time.h: a clock. Depends on libc. */
#ifndef OPAQ_BENCH_BENCH_TIME_H
#define OPAQ_BENCH_BENCH_TIME_H

#include <time.h>

static inline double now(void) {
    struct timespec t;
    clock_gettime(CLOCK_MONOTONIC, &t);
    return (double)t.tv_sec + 1e-9 * (double)t.tv_nsec;
}

#endif
