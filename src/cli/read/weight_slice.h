/* cli/read/weight_slice.h: a weight, or a matrix of a stack of experts, under the name that engines load it by. Checkpoints of
 * newer transformers hold a layer's experts in one tensor, gate and up joined; the layouts name each by itself. */
#ifndef OPAQ_CLI_READ_WEIGHT_SLICE_H
#define OPAQ_CLI_READ_WEIGHT_SLICE_H

#include <stddef.h>

#include "cli/read/weight_rows.h"

/* Projections that engines fuse along their rows, so that the scales of one module's are shared. */
enum { JOINED_MOST = 3 };

/* Names of modules; NULL behind the last of fewer than JOINED_MOST. */
extern const char *const joined_projections[][JOINED_MOST];
extern const size_t joined_count;

struct weight_slice {
    char *name; /* "model.layers.0.mlp.experts.7.gate_proj.weight" */
    const struct weight *weight;
    int64_t matrix; /* of the weight's stack */
    int64_t first;  /* row of the matrix, or its column if it is transposed */
    int64_t rows;
    int64_t columns;
    bool is_transposed; /* the matrix holds it transposed */
};

/* All matrices of a stacked weight as engines name them; 0 and NULL if it is not a stack of experts that opaq knows.
 * Released with weight_slices_free. */
size_t weight_slices(const struct model *model, const struct weight *weight, struct weight_slice **slices);
void weight_slices_free(struct weight_slice *slices, size_t count);

/* The weight as it is: one slice. */
struct weight_slice weight_whole(const struct weight *weight);

/* Whether config.json says gpt-oss, whose experts alternate gate and up and are transposed where they are plain. */
bool model_is_gpt_oss(const struct model *model);

/* Whether a weight is a plain stack of gpt-oss's experts; and its first matrix as its blocks hold it: [out, in]. */
bool is_gpt_oss_stack(const struct model *model, const struct weight *weight);
struct weight_slice gpt_oss_slice(const struct weight *weight);

/* Out of [columns][count] elements of `bytes` bytes into [count][columns]. */
void transpose_elements(const char *from, int64_t columns, int64_t count, int64_t bytes, char *to);

/* Rows [first, first + count) of a slice, as weight_rows gives them. */
enum opaq_status weight_slice_rows(const struct model *model, const struct weight_slice *slice, int64_t first,
                                   int64_t count, struct row_memory *memory, struct opaq_view *rows,
                                   struct opaq_error *error);

#endif
