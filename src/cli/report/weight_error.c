/* cli/report/weight_error.c: see weight_error.h. */
#include "cli/report/weight_error.h"

#include <math.h>
#include <stdbool.h>
#include <string.h>

enum { MAGNITUDE_SHIFT = 20 }; /* of a float's bits to its bin */

/* Two layouts of the same codes differ by at most this: one divides by the global scale, the other multiplies
 * by its inverse. Five roundings, 2^-24 each. */
static const double rounding = 0x1p-21;

void error_sums_clear(struct error_sums *sums) {
    memset(sums, 0, sizeof *sums);
    sums->largest_at = -1;
}

static uint32_t magnitude_bin(double error) {
    const float magnitude = (float)error;
    uint32_t bits = 0;
    memcpy(&bits, &magnitude, sizeof bits);
    return bits >> MAGNITUDE_SHIFT;
}

/* The geometric middle of a bin. */
static double magnitude_of_bin(uint32_t bin) {
    float edges[2] = {0, 0};
    for (uint32_t i = 0; i < 2; ++i) {
        const uint32_t bits = (bin + i) << MAGNITUDE_SHIFT;
        memcpy(&edges[i], &bits, sizeof bits);
    }
    if (bin == 0) {
        return (double)edges[1] / 2;
    }
    return isfinite(edges[1]) ? sqrt((double)edges[0] * (double)edges[1]) : (double)edges[0];
}

void error_sums_add(struct error_sums *sums, const float *original, const float *quantized, size_t count,
                    int64_t first) {
    double original2 = 0;
    double quantized2 = 0;
    double product = 0;
    double error2 = 0;
    for (size_t i = 0; i < count; ++i) {
        const double x = (double)original[i];
        const double y = (double)quantized[i];
        if (!isfinite(x) || !isfinite(y)) {
            ++sums->skipped;
            sums->original_not_finite += !isfinite(x);
            sums->quantized_not_finite += !isfinite(y);
            sums->agreeing += x == y || (isnan(x) && isnan(y));
            continue;
        }
        const double error = fabs(x - y);
        original2 += x * x;
        quantized2 += y * y;
        product += x * y;
        error2 += error * error;
        if (error == 0) {
            ++sums->exact;
            continue;
        }
        ++sums->magnitudes[magnitude_bin(error)];
        sums->rounded += error <= rounding * fabs(x);
        if (error > sums->largest) {
            sums->largest = error;
            sums->largest_at = first + (int64_t)i;
        }
    }
    sums->elements += count;
    sums->original2 += original2;
    sums->quantized2 += quantized2;
    sums->product += product;
    sums->error2 += error2;
}

void error_sums_join(struct error_sums *sums, const struct error_sums *later) {
    sums->original2 += later->original2;
    sums->quantized2 += later->quantized2;
    sums->product += later->product;
    sums->error2 += later->error2;
    sums->elements += later->elements;
    sums->exact += later->exact;
    sums->rounded += later->rounded;
    sums->skipped += later->skipped;
    sums->agreeing += later->agreeing;
    sums->original_not_finite += later->original_not_finite;
    sums->quantized_not_finite += later->quantized_not_finite;
    if (later->largest > sums->largest) {
        sums->largest = later->largest;
        sums->largest_at = later->largest_at;
    }
    for (size_t i = 0; i < MAGNITUDE_BINS; ++i) {
        sums->magnitudes[i] += later->magnitudes[i];
    }
}

static void fill_histogram(const struct error_sums *sums, double rms, uint64_t histogram[ERROR_BINS]) {
    for (uint32_t i = 0; i < MAGNITUDE_BINS; ++i) {
        if (sums->magnitudes[i] == 0) {
            continue;
        }
        const double octaves = rms > 0 ? log2(magnitude_of_bin(i) / rms) : ERROR_OCTAVES;
        const double bin = floor((octaves + ERROR_OCTAVES) * 2);
        histogram[bin < 0 ? 0 : bin >= ERROR_BINS ? ERROR_BINS - 1 : (int)bin] += sums->magnitudes[i];
    }
}

void weight_error_of(const struct error_sums *sums, struct weight_error *error) {
    const uint64_t finite = sums->elements - sums->skipped;
    *error = (struct weight_error){
        .largest = sums->largest,
        .largest_at = sums->largest_at,
        .elements = sums->elements,
        .exact = sums->exact,
        .original_not_finite = sums->original_not_finite,
        .quantized_not_finite = sums->quantized_not_finite,
        .rms = finite == 0 ? 0 : sqrt(sums->original2 / (double)finite),
    };
    const double norms = sqrt(sums->original2) * sqrt(sums->quantized2);
    const bool are_both_zero = sums->original2 == 0 && sums->quantized2 == 0;
    if (sums->error2 == 0) {
        error->sqnr = (double)INFINITY;
        error->cosine = 1;
    } else {
        error->sqnr = 10 * log10(sums->original2 / sums->error2);
        error->cosine = are_both_zero ? 1 : norms == 0 ? 0 : sums->product / norms;
        error->relative = sums->original2 == 0 ? (double)INFINITY : sqrt(sums->error2) / sqrt(sums->original2);
    }
    fill_histogram(sums, error->rms, error->histogram);
}
