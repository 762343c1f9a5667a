/* cli/report/weight_compare.h: the errors of all weight pairs of two checkpoints, in chunks of a few MB on all
 * threads. */
#ifndef OPAQ_CLI_REPORT_WEIGHT_COMPARE_H
#define OPAQ_CLI_REPORT_WEIGHT_COMPARE_H

#include "cli/console/progress.h"
#include "cli/report/weight_error.h"
#include "cli/report/weight_pairs.h"
#include "opaq/parallel.h"

struct comparison {
    const struct weight_pair *pair;
    bool has_error;              /* both were read as floats: `error` is set */
    bool is_equal;               /* byte for byte, or in all values if the dtypes differ */
    uint64_t different_bytes;    /* if bytes were compared */
    uint64_t different_elements; /* if values were compared */
    uint64_t rounded_elements;   /* of these: within a few float32 roundings */
    struct weight_error error;
};

/* Bytes that compare_weights reads. */
uint64_t compare_bytes(const struct weight_pairs *pairs);

/* One result for each pair, in their order; pairs without a partner or of other shapes are not read. `results` is
 * released with free(). Stops with OPAQ_ERROR_SYSTEM and sets `is_stopped` when the user interrupts. */
enum opaq_status compare_weights(const struct weight_pairs *pairs, struct opaq_pool *pool,
                                 struct progress *progress, struct comparison **results, bool *is_stopped,
                                 struct opaq_error *error);

#endif
