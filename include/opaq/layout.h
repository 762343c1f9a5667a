/* opaq/layout.h: how checkpoints name and shape the tensors of a quantized weight. Depends on format.h.
 *
 * A layout has one table row for each format it supports. The tensors' contents are described in
 * docs/formats.md, "In checkpoints"; opaq/stored.h converts them. The library does not read or write
 * files. */
#ifndef OPAQ_LAYOUT_H
#define OPAQ_LAYOUT_H

#include <stdint.h>

#include "opaq/format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The order is part of the ABI: append. */
enum opaq_layout {
    OPAQ_LAYOUT_COMPRESSED_TENSORS = 0,
    OPAQ_LAYOUT_MODELOPT = 1,
    OPAQ_LAYOUT_DEEPSEEK = 2, /* DeepSeek's fp8 blocks, also as transformers writes them */
    OPAQ_LAYOUT_GPT_OSS = 3   /* experts in blocks of mxfp4 */
};
#define OPAQ_LAYOUT_COUNT 4

struct opaq_layout_row {
    enum opaq_layout layout;
    enum opaq_format format;
    /* The name in the configuration: compressed-tensors' format, ModelOpt's quant_algo, otherwise quant_method.
     * Spelled as it is written; readers ignore case. */
    const char *method;
    /* A weight whose plain tensor would be called W is stored in the tensors W + data, W + scale and, unless
     * `global` is "", W + global. */
    const char *data;
    const char *scale;
    const char *global;
    /* Name of the input scale, a tensor of the weight's module: "input_scale"; "" if there is none. */
    const char *input;
    /* Dtypes by their safetensors names, separated by spaces: all are readable, the first is written. */
    const char *data_dtypes;
    const char *scale_dtypes;
    /* The dimensions of the scales, one letter each: 'R' rows, 'r' blocks of rows, 'c' blocks of columns, '1'
     * one. opaq_layout_shape evaluates them. */
    const char *scale_shape;
    const char *global_shape;
    /* The scale rule of the software that defines the layout. */
    enum opaq_rule rule;
    /* The dimensions of the codes: also 'C' the bytes of a row, 'b' the bytes of a block. */
    const char *data_shape;
    /* Dtypes of the global scale and of the input scale, as above, for rows that have them. */
    const char *global_dtypes;
    const char *input_dtypes;
};

/* All rows; those of one layout are consecutive. NULL beyond the last. */
OPAQ_API const struct opaq_layout_row *opaq_layout_row(int index);

/* The row of a layout for a format; NULL if it has none. */
OPAQ_API const struct opaq_layout_row *opaq_layout_find(enum opaq_layout layout, enum opaq_format format);

/* A shape that a row gives in letters, for a weight of rows x columns. A stack's dimensions come before it. */
#define OPAQ_LAYOUT_RANK_LIMIT 4
struct opaq_layout_shape {
    int32_t rank;
    int32_t rows_dim;    /* the dimension of the rows or their blocks; -1: one entry covers all rows */
    int32_t columns_dim; /* that of the columns, their bytes or their blocks; -1: one covers all columns */
    int64_t size[OPAQ_LAYOUT_RANK_LIMIT]; /* 0 beyond the rank */
};

/* Evaluates data_shape, scale_shape or global_shape of a row with this format. Returns 0 for other letters, too
 * many letters, an unknown format, and negative sizes. */
OPAQ_API int opaq_layout_shape(const char *letters, enum opaq_format format, int64_t rows, int64_t columns,
                               struct opaq_layout_shape *shape);

/* "compressed-tensors"; NULL for a number that is not a layout. opaq_layout_number returns -1 for an unknown
 * name. */
OPAQ_API const char *opaq_layout_name(enum opaq_layout layout);
OPAQ_API int opaq_layout_number(const char *name);

#ifdef __cplusplus
}
#endif

#endif
