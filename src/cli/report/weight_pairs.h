/* cli/report/weight_pairs.h: which weight of one checkpoint is which of another. By plain name; the experts that one checkpoint
 * stacks may be single weights in the other (weight_slice.h). */
#ifndef OPAQ_CLI_REPORT_WEIGHT_PAIRS_H
#define OPAQ_CLI_REPORT_WEIGHT_PAIRS_H

#include "cli/read/checkpoint.h"
#include "cli/read/weight_slice.h"

struct weight_pair {
    const char *name;              /* of the slice that has one, the quantized side's if both have */
    struct weight_slice original;  /* its weight is NULL if there is none */
    struct weight_slice quantized; /* likewise */
    int64_t matrices; /* from the slices' own on; the shapes of both are the same unless is_other_shape */
    bool is_other_shape;
};

struct weight_pairs {
    const struct checkpoint *original;
    const struct checkpoint *quantized;
    struct weight_pair *items; /* sorted by name */
    size_t count;
};

/* Numbers that a calibration leaves beside weights (plain scalars called ..._scale) need no partner. */
void weight_pairs_make(const struct checkpoint *original, const struct checkpoint *quantized,
                       struct weight_pairs *pairs);
void weight_pairs_free(struct weight_pairs *pairs);

/* Both are plain, whole and of one dtype: then their bytes can be compared. */
bool pair_is_bytes(const struct weight_pair *pair);

/* Both can be read as floats. */
bool pair_is_floats(const struct weight_pair *pair);

uint64_t pair_elements(const struct weight_pair *pair);

#endif
