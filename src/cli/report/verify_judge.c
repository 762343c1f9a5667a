/* cli/report/verify_judge.c: see verify_judge.h. */
#include "cli/report/verify_judge.h"

#include <math.h>
#include <stdlib.h>
#include <string.h>

/* Normal numbers reach about 20.5 dB (nvfp4), 18.5 dB (mxfp4) and 31.5 dB (8 bits); weights with outliers reach less. */
static const struct limit four_bits = {14, 0.98};
static const struct limit eight_bits = {25, 0.998};

const char *verdict_name(enum verdict verdict) {
    static const char *const names[] = {
        "pass", "below the threshold", "unequal", "not finite", "other shape or dtype", "extra", "missing",
    };
    return names[verdict];
}

struct limit limit_of(enum opaq_format format, struct limit given) {
    const struct limit own = format == OPAQ_NVFP4 || format == OPAQ_MXFP4 ? four_bits : eight_bits;
    return (struct limit){isnan(given.sqnr) ? own.sqnr : given.sqnr,
                          isnan(given.cosine) ? own.cosine : given.cosine};
}

static bool is_quantized(const struct comparison *comparison) {
    return comparison->pair->quantized.weight != NULL && comparison->pair->quantized.weight->scheme != NULL;
}

static enum verdict verdict_of(const struct comparison *comparison, struct limit given) {
    const struct weight_pair *const pair = comparison->pair;
    const struct weight_error *const error = &comparison->error;
    if (pair->quantized.weight == NULL) {
        return VERDICT_MISSING;
    }
    if (pair->original.weight == NULL) {
        return VERDICT_EXTRA;
    }
    if (pair->is_other_shape || (!comparison->has_error && !pair_is_bytes(pair))) {
        return VERDICT_SHAPE;
    }
    if (!is_quantized(comparison)) {
        return comparison->is_equal ? VERDICT_PASS : VERDICT_UNEQUAL;
    }
    if (error->original_not_finite != 0 || error->quantized_not_finite != 0) {
        return VERDICT_NOT_FINITE;
    }
    const struct limit limit = limit_of(pair->quantized.weight->scheme->format, given);
    return error->sqnr >= limit.sqnr && error->cosine >= limit.cosine ? VERDICT_PASS : VERDICT_LOW;
}

static int compare_judged(const void *first, const void *second) {
    const struct judged *const a = first;
    const struct judged *const b = second;
    if (a->verdict != b->verdict) {
        return a->verdict > b->verdict ? -1 : 1;
    }
    if (a->comparison->has_error != b->comparison->has_error) {
        return a->comparison->has_error ? -1 : 1;
    }
    const double a_sqnr = a->comparison->error.sqnr;
    const double b_sqnr = b->comparison->error.sqnr;
    if (a->comparison->has_error && a_sqnr != b_sqnr) {
        return a_sqnr < b_sqnr ? -1 : 1;
    }
    return strcmp(a->comparison->pair->name, b->comparison->pair->name);
}

/* ---- by kind ---- */

static struct kind_summary *summary_of(struct judgement *judgement, const struct judged *judged,
                                       struct limit given) {
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        if (strcmp(judgement->kinds[i].kind, judged->kind) == 0) {
            return &judgement->kinds[i];
        }
    }
    judgement->kinds = realloc_array(judgement->kinds, judgement->kind_count + 1, sizeof *judgement->kinds);
    struct kind_summary *const added = &judgement->kinds[judgement->kind_count++];
    *added = (struct kind_summary){.kind = judged->kind, .is_quantized = is_quantized(judged->comparison)};
    if (added->is_quantized) {
        added->limit = limit_of(judged->comparison->pair->quantized.weight->scheme->format, given);
    }
    return added;
}

static void summary_add(struct kind_summary *summary, const struct judged *judged) {
    const struct weight_error *const error = &judged->comparison->error;
    ++summary->count;
    summary->failed += judged->verdict != VERDICT_PASS;
    if (!judged->comparison->has_error) {
        return;
    }
    const bool is_first = summary->measured++ == 0;
    summary->least_sqnr = is_first ? error->sqnr : fmin(summary->least_sqnr, error->sqnr);
    summary->least_cosine = is_first ? error->cosine : fmin(summary->least_cosine, error->cosine);
    summary->most_relative = is_first ? error->relative : fmax(summary->most_relative, error->relative);
    summary->exact += error->exact;
    for (size_t i = 0; i < ERROR_BINS; ++i) {
        summary->histogram[i] += error->histogram[i];
    }
}

static int compare_numbers(const void *first, const void *second) {
    const double a = *(const double *)first;
    const double b = *(const double *)second;
    return (a > b) - (a < b);
}

static double median_of(const struct judgement *judgement, const struct kind_summary *summary) {
    if (summary->measured == 0) {
        return (double)NAN;
    }
    double *const numbers = alloc_array(summary->measured, sizeof *numbers);
    size_t count = 0;
    for (size_t i = 0; i < judgement->count; ++i) {
        const struct judged *const judged = &judgement->items[i];
        if (judged->comparison->has_error && strcmp(judged->kind, summary->kind) == 0) {
            numbers[count++] = judged->comparison->error.sqnr;
        }
    }
    qsort(numbers, count, sizeof *numbers, compare_numbers);
    const double lower = numbers[(count - 1) / 2];
    const double upper = numbers[count / 2];
    const double median = lower == upper ? lower : lower / 2 + upper / 2;
    free(numbers);
    return median;
}

static int compare_summaries(const void *first, const void *second) {
    const struct kind_summary *const a = first;
    const struct kind_summary *const b = second;
    return a->is_quantized != b->is_quantized ? b->is_quantized - a->is_quantized : strcmp(a->kind, b->kind);
}

void judge(const struct comparison *comparisons, size_t count, struct limit given,
           struct judgement *judgement) {
    *judgement = (struct judgement){.count = count};
    judgement->items = alloc_array(count, sizeof *judgement->items);
    for (size_t i = 0; i < count; ++i) {
        const struct weight_pair *const pair = comparisons[i].pair;
        struct judged *const judged = &judgement->items[i];
        judged->comparison = &comparisons[i];
        judged->kind =
            weight_kind(pair->quantized.weight != NULL ? pair->quantized.weight : pair->original.weight);
        judged->verdict = verdict_of(&comparisons[i], given);
        judgement->failed += judged->verdict != VERDICT_PASS;
        summary_add(summary_of(judgement, judged, given), judged);
    }
    for (size_t i = 0; i < judgement->kind_count; ++i) {
        judgement->kinds[i].median_sqnr = median_of(judgement, &judgement->kinds[i]);
    }
    if (count != 0) {
        qsort(judgement->items, count, sizeof *judgement->items, compare_judged);
        qsort(judgement->kinds, judgement->kind_count, sizeof *judgement->kinds, compare_summaries);
    }
}

void judgement_free(struct judgement *judgement) {
    free(judgement->items);
    free(judgement->kinds);
    *judgement = (struct judgement){0};
}
