/* cli/report/weight_pairs.h: pairs the weights of two checkpoints by plain name. Experts that are stacked in one
 * checkpoint may be single weights in the other (weight_slice.h). */
#ifndef OPAQ_CLI_REPORT_WEIGHT_PAIRS_H
#define OPAQ_CLI_REPORT_WEIGHT_PAIRS_H

#include "cli/read/checkpoint.h"
#include "cli/read/weight_slice.h"

struct weight_pair {
    const char *name;              /* of the quantized side if it has the weight, else of the original */
    struct weight_slice original;  /* its weight is NULL if it is missing */
    struct weight_slice quantized; /* likewise */
    int64_t matrices;              /* number of matrices compared; shapes are equal unless is_other_shape */
    bool is_other_shape;
};

struct weight_pairs {
    const struct checkpoint *original;
    const struct checkpoint *quantized;
    struct weight_pair *items; /* sorted by name */
    size_t count;
};

/* Plain scalars called ..._scale, which a calibration adds, need no counterpart. */
void weight_pairs_make(const struct checkpoint *original, const struct checkpoint *quantized,
                       struct weight_pairs *pairs);
void weight_pairs_free(struct weight_pairs *pairs);

/* Both are plain, whole and of one dtype: then their bytes can be compared. */
bool pair_is_bytes(const struct weight_pair *pair);

/* Both can be read as floats. */
bool pair_is_floats(const struct weight_pair *pair);

uint64_t pair_elements(const struct weight_pair *pair);

/* Bytes of the quantized side, which may be some matrices of a stack; 0 if it is missing. */
uint64_t pair_bytes(const struct weight_pair *pair);

#endif
