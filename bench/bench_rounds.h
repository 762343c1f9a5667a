/* bench_rounds.h: alternate timing of a subject and its reference. Depends on libc.
 *
 * Machines are noisy: shared memory is faster in one second than in the next, and a fast phase may affect only
 * one of two subjects. So the two are timed alternately within a few milliseconds, a round keeps the minimum of
 * each, and a figure is the median of the rounds' ratios, with the quartiles. */
#ifndef OPAQ_BENCH_BENCH_ROUNDS_H
#define OPAQ_BENCH_BENCH_ROUNDS_H

#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { ROUND_LIMIT = 100, ROUND_FACTOR = 10 /* factor on the maximum number of rounds of short cases */ };

/* Minimum seconds of each round. */
struct rounds {
    int count;
    double subject[ROUND_LIMIT * ROUND_FACTOR];
    double against[ROUND_LIMIT * ROUND_FACTOR];
};

/* A ratio: the median of all rounds, the quartiles, and the ratio of the minima of all rounds. */
struct figure {
    double value;
    double low;
    double high;
    double minima;
};

static inline double smaller(double a, double b) { return a < b ? a : b; }

/* Records one more turn of the round that begins with turn 0. Seconds are 0 if unknown. */
static inline void rounds_turn(struct rounds *rounds, int turn, double subject, double against) {
    if (turn == 0) {
        rounds->subject[rounds->count] = subject;
        rounds->against[rounds->count] = against;
        ++rounds->count;
        return;
    }
    const int i = rounds->count - 1;
    rounds->subject[i] = smaller(rounds->subject[i], subject);
    rounds->against[i] = smaller(rounds->against[i], against);
}

static inline int by_size(const void *a, const void *b) {
    const double x = *(const double *)a;
    const double y = *(const double *)b;
    return (x > y) - (x < y);
}

/* The best of all rounds, and the median divided by it. */
static inline double rounds_best(const struct rounds *rounds, double *spread) {
    double sorted[ROUND_LIMIT * ROUND_FACTOR];
    memcpy(sorted, rounds->subject, (size_t)rounds->count * sizeof sorted[0]);
    qsort(sorted, (size_t)rounds->count, sizeof sorted[0], by_size);
    *spread = sorted[rounds->count / 2] / sorted[0];
    return sorted[0];
}

/* factor * against / subject, that is, how many times faster the subject is; if less is better, the inverse
 * with the same factor. Zeros if there is nothing to compare with. */
static inline struct figure rounds_figure(const struct rounds *rounds, double factor, int is_less_better) {
    const double *const above = is_less_better ? rounds->subject : rounds->against;
    const double *const below = is_less_better ? rounds->against : rounds->subject;
    double sorted[ROUND_LIMIT * ROUND_FACTOR];
    double least_above = above[0];
    double least_below = below[0];
    if (rounds->count == 0 || rounds->against[0] <= 0.0) {
        return (struct figure){0.0, 0.0, 0.0, 0.0};
    }
    for (int i = 0; i < rounds->count; ++i) {
        sorted[i] = factor * above[i] / below[i];
        least_above = smaller(least_above, above[i]);
        least_below = smaller(least_below, below[i]);
    }
    qsort(sorted, (size_t)rounds->count, sizeof sorted[0], by_size);
    const int last = rounds->count - 1;
    const double median = 0.5 * (sorted[last / 2] + sorted[(last + 1) / 2]);
    return (struct figure){median, sorted[(last + 2) / 4], sorted[last - (last + 2) / 4],
                           factor * least_above / least_below};
}

static inline void figure_json(FILE *json, const struct figure *figure) {
    fprintf(json, "\"low\": %.5f, \"high\": %.5f, \"of_minima\": %.5f", figure->low, figure->high,
            figure->minima);
}

#endif
