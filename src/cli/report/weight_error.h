/* cli/report/weight_error.h: the error of a quantized weight. Sums are computed for chunks of rows and added in the
 * order of the chunks, so the result does not depend on the number of threads. */
#ifndef OPAQ_CLI_REPORT_WEIGHT_ERROR_H
#define OPAQ_CLI_REPORT_WEIGHT_ERROR_H

#include <stddef.h>
#include <stdint.h>

/* The histogram of |error| / rms: half octaves from 2^-ERROR_OCTAVES to 2^ERROR_OCTAVES, the first and the
 * last bin include values beyond. Errors of exactly zero are counted separately. */
#define ERROR_OCTAVES 16
#define ERROR_BINS (4 * ERROR_OCTAVES)
#define MAGNITUDE_BINS 2048 /* a float's exponent and three bits more */

struct error_sums {
    double original2; /* sums of squares, and of products */
    double quantized2;
    double product;
    double error2;
    double largest; /* |error|, and its element; -1 if there is none */
    int64_t largest_at;
    uint64_t elements;
    uint64_t exact;   /* errors of zero */
    uint64_t rounded; /* nonzero errors within a few float32 roundings */
    /* NaNs and infinities; elements with one are skipped in all of the above */
    uint64_t skipped;
    uint64_t agreeing; /* skipped elements that are equal on both sides */
    uint64_t original_not_finite;
    uint64_t quantized_not_finite;
    uint64_t magnitudes[MAGNITUDE_BINS]; /* of |error| as a float */
};
void error_sums_clear(struct error_sums *sums);

/* Adds `count` elements, the first of which is element `first` of the weight. */
void error_sums_add(struct error_sums *sums, const float *original, const float *quantized, size_t count,
                    int64_t first);

/* Adds the sums of the elements that follow. */
void error_sums_join(struct error_sums *sums, const struct error_sums *later);

struct weight_error {
    double sqnr;     /* 10 log10(sum x^2 / sum (x-y)^2): infinite if there is no error */
    double cosine;   /* 1 if both are zero, 0 if one is */
    double relative; /* the error's Frobenius norm by the original's */
    double rms;      /* of the original */
    double largest;
    int64_t largest_at;
    uint64_t elements;
    uint64_t exact;
    uint64_t original_not_finite;
    uint64_t quantized_not_finite;
    uint64_t histogram[ERROR_BINS];
};
void weight_error_of(const struct error_sums *sums, struct weight_error *error);

#endif
