/* cli/read/weights.h: groups the tensors of a checkpoint into weights: quantized ones of several tensors, and plain
 * ones. Found by names, dtypes and shapes (opaq/layout.h); the configuration decides where two layouts look alike. */
#ifndef OPAQ_CLI_READ_WEIGHTS_H
#define OPAQ_CLI_READ_WEIGHTS_H

#include "cli/read/model.h"
#include "opaq/layout.h"
#include "opaq/opaq.h"

struct weight {
    char *name;                           /* name of the plain weight: "model.layers.0.mlp.up_proj.weight" */
    const struct opaq_layout_row *scheme; /* format and layout; NULL: plain */
    const struct model_tensor *data;
    const struct model_tensor *scale;
    const struct model_tensor *global;
    const struct model_tensor *input; /* scale of the input activations; NULL if there is none */
    struct opaq_spec spec;            /* of a quantized weight */
    /* As matrices: `stack` of them (the leading dimensions of more than two), each rows x columns. A plain tensor of
     * less than two dimensions is one row. */
    int64_t stack;
    int64_t rows;
    int64_t columns;
};

struct weights {
    const struct model *model;
    struct weight *items; /* sorted by name */
    size_t count;
    int layout; /* enum opaq_layout of the quantized ones, -1 if there are none */
};

/* Every tensor belongs to exactly one item. */
enum opaq_status weights_find(const struct model *model, struct weights *weights, struct opaq_error *error);
void weights_free(struct weights *weights);
const struct weight *weights_named(const struct weights *weights, const char *name);

/* Whether a weight is plain and of dtype f32, bf16 or f16. */
bool weight_is_float(const struct weight *weight);

/* Bytes of all its tensors in the files. */
uint64_t weight_bytes(const struct weight *weight);

/* False for ModelOpt's mxfp4, which is only read: it rounds ties differently, and no engine loads it. */
bool layout_is_written(const struct opaq_layout_row *scheme);

/* "nvfp4", or "BF16". */
const char *weight_kind(const struct weight *weight);

#endif
