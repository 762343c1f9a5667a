/* cli/read/weights.h: what the tensors of a checkpoint are: quantized weights of several tensors each, and the rest, plain.
 * Found by names, dtypes and shapes (opaq/layout.h); the configuration decides where two layouts look alike. */
#ifndef OPAQ_CLI_READ_WEIGHTS_H
#define OPAQ_CLI_READ_WEIGHTS_H

#include "cli/read/model.h"
#include "opaq/layout.h"
#include "opaq/opaq.h"

struct weight {
    char *name; /* as it would be called if it were plain: "model.layers.0.mlp.up_proj.weight" */
    const struct opaq_layout_row *scheme; /* NULL: plain */
    const struct model_tensor *data;
    const struct model_tensor *scale;
    const struct model_tensor *global;
    const struct model_tensor *input; /* the input's scale, where there is one */
    struct opaq_spec spec;            /* quantized: how its bytes are read */
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

/* Every tensor belongs to one item. */
enum opaq_status weights_find(const struct model *model, struct weights *weights, struct opaq_error *error);
void weights_free(struct weights *weights);
const struct weight *weights_named(const struct weights *weights, const char *name);

/* Whether a plain weight is of f32, bf16 or f16, and the enum opaq_element of it. */
bool weight_is_float(const struct weight *weight);

/* Bytes of all its tensors in the files. */
uint64_t weight_bytes(const struct weight *weight);

/* The enum opaq_layout that a quantization_config speaks of, -1 if it is none or of something else. */
int layout_of_config(yyjson_val *quantization);

/* ModelOpt's mxfp4 is read only: it rounds ties away from opaq's rules, and no engine loads it. */
bool layout_is_written(const struct opaq_layout_row *scheme);

/* "nvfp4", or "BF16". */
const char *weight_kind(const struct weight *weight);

#endif
