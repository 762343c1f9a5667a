/* cli/report/coverage.h: the share of a checkpoint's parameters that is quantized, and the reasons for the rest. */
#ifndef OPAQ_CLI_REPORT_COVERAGE_H
#define OPAQ_CLI_REPORT_COVERAGE_H

#include <stddef.h>
#include <stdint.h>

#include "cli/read/weights.h"

enum coverage {
    COVERED, /* quantized */
    SKIPPED_OTHER,
    SKIPPED_EMBEDDING,
    SKIPPED_BY_DEFAULT,
    SKIPPED_IGNORED,
    SKIPPED_NOT_INCLUDED,
    SKIPPED_RAGGED,
    SKIPPED_STACKED,
    SKIPPED_INTERLEAVED,
    SKIPPED_NOT_EXPERTS,
    SKIPPED_SOURCE,
    COVERAGE_COUNT
};

struct coverage_tally {
    size_t weights;
    uint64_t parameters;
    const char *first; /* name of the first weight; NULL if there is none */
};

struct coverages {
    struct coverage_tally of[COVERAGE_COUNT];
};

void coverage_add(struct coverages *coverages, enum coverage coverage, const struct weight *weight);

/* "embedding", for JSON; a phrase, for the summary. */
const char *coverage_name(enum coverage coverage);
const char *coverage_text(enum coverage coverage);

uint64_t coverage_parameters(const struct coverages *coverages); /* of all weights */

#endif
