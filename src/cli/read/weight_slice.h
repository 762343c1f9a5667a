/* cli/read/weight_slice.h: a weight, or one matrix of a stack of experts, with the name that engines load it by.
 * Checkpoints of newer transformers store the experts of a layer in one tensor, gate and up fused; the layouts name
 * each matrix separately. */
#ifndef OPAQ_CLI_READ_WEIGHT_SLICE_H
#define OPAQ_CLI_READ_WEIGHT_SLICE_H

#include <stddef.h>

#include "cli/read/weight_rows.h"

/* Projections that engines fuse along their rows, so that the scales of one module's are shared. */
enum { FUSED_MOST = 3 };

/* Names of modules; NULL after the last if fewer than FUSED_MOST. */
extern const char *const fused_projections[][FUSED_MOST];
extern const size_t fused_count;

struct weight_slice {
    char *name; /* "model.layers.0.mlp.experts.7.gate_proj.weight" */
    const struct weight *weight;
    int64_t matrix; /* of the weight's stack */
    int64_t first;  /* row in the matrix, or column if transposed */
    int64_t rows;
    int64_t columns;
    bool is_transposed; /* stored transposed */
};

/* All matrices of a stacked weight as engines name them; 0 and NULL if it is not a known stack of experts.
 * Released with weight_slices_free. */
size_t weight_slices(const struct model *model, const struct weight *weight, struct weight_slice **slices);
void weight_slices_free(struct weight_slice *slices, size_t count);

/* The whole weight as one slice. */
struct weight_slice weight_whole(const struct weight *weight);

/* Whether config.json says gpt-oss, whose experts interleave gate and up and are stored transposed when plain. */
bool model_is_gpt_oss(const struct model *model);

/* Whether a weight is a plain stack of gpt-oss's experts; its first matrix as [out, in], like the quantized blocks. */
bool is_gpt_oss_stack(const struct model *model, const struct weight *weight);
struct weight_slice gpt_oss_slice(const struct weight *weight);

/* Transposes [columns][count] elements of `bytes` bytes to [count][columns]. */
void transpose_elements(const char *from, int64_t columns, int64_t count, int64_t bytes, char *to);

/* weight_rows for a slice: its rows [first, first + count). */
enum opaq_status weight_slice_rows(const struct model *model, const struct weight_slice *slice, int64_t first,
                                   int64_t count, struct row_memory *memory, struct opaq_view *rows,
                                   struct opaq_error *error);

#endif
