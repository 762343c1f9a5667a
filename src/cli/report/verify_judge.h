/* cli/report/verify_judge.h: verdicts on the comparisons, worst first, and a summary by kind. */
#ifndef OPAQ_CLI_REPORT_VERIFY_JUDGE_H
#define OPAQ_CLI_REPORT_VERIFY_JUDGE_H

#include "cli/report/weight_compare.h"

/* The worst last. */
enum verdict {
    VERDICT_PASS,
    VERDICT_LOW,        /* below the least SQNR or cosine */
    VERDICT_UNEQUAL,    /* a plain tensor that differs */
    VERDICT_NOT_FINITE, /* NaNs or infinities */
    VERDICT_SHAPE,      /* another shape, or a dtype that cannot be compared */
    VERDICT_EXTRA,
    VERDICT_MISSING
};

/* "pass", "below the threshold", ... */
const char *verdict_name(enum verdict verdict);

/* Required figures of quantized weights. */
struct limit {
    double sqnr;
    double cosine;
};

/* NaN in `given` selects the default of the format: the value of normal numbers minus a margin. */
struct limit limit_of(enum opaq_format format, struct limit given);

struct judged {
    const struct comparison *comparison;
    const char *kind;
    enum verdict verdict;
};

struct kind_summary {
    const char *kind;
    bool is_quantized;
    struct limit limit; /* of quantized ones */
    size_t count;
    size_t failed;
    size_t measured; /* number with an error; the fields below cover these */
    double least_sqnr;
    double median_sqnr;
    double least_cosine;
    double most_relative;
    uint64_t exact;
    uint64_t histogram[ERROR_BINS];
};

struct judgement {
    struct judged *items; /* the worst first */
    size_t count;
    size_t failed;
    struct kind_summary *kinds; /* quantized ones first, then by name */
    size_t kind_count;
};

void judge(const struct comparison *comparisons, size_t count, struct limit given, struct judgement *judgement);
void judgement_free(struct judgement *judgement);

#endif
