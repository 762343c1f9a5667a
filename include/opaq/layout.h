/* opaq/layout.h: how checkpoints name and shape the tensors of a quantized weight. Depends on format.h.
 *
 * A layout is rows of a table, one for each format it has. What the tensors hold is docs/formats.md, "As checkpoints hold
 * it"; opaq/stored.h moves them. Reading and writing files is not the library's business. */
#ifndef OPAQ_LAYOUT_H
#define OPAQ_LAYOUT_H

#include "opaq/format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The order is part of the ABI: append. */
enum opaq_layout {
    OPAQ_LAYOUT_COMPRESSED_TENSORS = 0,
    OPAQ_LAYOUT_MODELOPT = 1,
    OPAQ_LAYOUT_DEEPSEEK = 2, /* DeepSeek's fp8 blocks, and what transformers writes in their manner */
    OPAQ_LAYOUT_GPT_OSS = 3   /* experts in blocks of mxfp4 */
};
#define OPAQ_LAYOUT_COUNT 4

struct opaq_layout_row {
    enum opaq_layout layout;
    enum opaq_format format;
    /* What the configuration calls it: compressed-tensors' format, ModelOpt's quant_algo, the quant_method of others. As
     * it is written; readers compare without case. */
    const char *method;
    /* A weight that would be called W if it were plain is in the tensors W + data, W + scale and, if there is one, W +
     * global ("" if not). */
    const char *data;
    const char *scale;
    const char *global;
    /* The input's scale, a tensor of the weight's module: "input_scale"; "" if it has none. */
    const char *input;
    /* Dtypes by their names in safetensors, separated by spaces: all that are read, the first is written. */
    const char *data_dtypes;
    const char *scale_dtypes;
    /* The dimensions of the scales as they are written, a letter for each: 'R' rows, 'r' blocks of rows, 'c' blocks of
     * columns, '1' one. */
    const char *scale_shape;
    const char *global_shape;
    /* By which the layout's own software makes its scales. */
    enum opaq_rule rule;
};

/* The rows one after another, those of a layout together; NULL beyond the last. */
OPAQ_API const struct opaq_layout_row *opaq_layout_row(int index);

/* The row of a layout for a format; NULL if it has none. */
OPAQ_API const struct opaq_layout_row *opaq_layout_find(enum opaq_layout layout, enum opaq_format format);

/* "compressed-tensors"; NULL for a number that is not a layout. The other way -1 for an unknown name. */
OPAQ_API const char *opaq_layout_name(enum opaq_layout layout);
OPAQ_API int opaq_layout_number(const char *name);

#ifdef __cplusplus
}
#endif

#endif
