/* cli/report/inventory.h: counts of a checkpoint's weights by kind and by groups of similar modules. */
#ifndef OPAQ_CLI_REPORT_INVENTORY_H
#define OPAQ_CLI_REPORT_INVENTORY_H

#include "cli/read/checkpoint.h"

struct tally {
    const char *kind; /* "nvfp4", "BF16" */
    size_t count;
    uint64_t elements;
    uint64_t bytes;
};

/* Weights of the same kind and shape whose names differ in numbers only. */
struct like_group {
    char *pattern; /* "model.layers.*.mlp.up_proj.weight" */
    const struct weight *first;
    size_t count;
};

struct inventory {
    struct tally *kinds; /* quantized ones first, then by name */
    size_t kind_count;
    struct tally quantized;
    struct tally all;
    struct like_group *groups; /* by pattern */
    size_t group_count;
};

void inventory_make(const struct weights *weights, struct inventory *inventory);
void inventory_free(struct inventory *inventory);

/* The name with every component that is a number replaced by '*'; released with free(). */
char *like_pattern(const char *name);

#endif
