/* opaq/format.h: the format table. Depends on element.h.
 *
 * A format is a row and its layout is data: each buffer's extents are
 *
 *     extent = round_up(ceil_div(D, per), to)        D = rows, columns, or the constant 1
 *
 * where a tensor of shape (d0, ..., dn-2, K) has rows M = d0 * ... * dn-2 and columns K. Nothing else in
 * opaq, in C or outside it, describes a layout; evaluate these rows, on int64_t or on symbolic sizes. */
#ifndef OPAQ_FORMAT_H
#define OPAQ_FORMAT_H

#include <stdint.h>

#include "opaq/element.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The order is part of the ABI and of the tables in format_table.c and quant_table_ref.c: append. */
enum opaq_format {
    OPAQ_FP8 = 0,     /* one scale per tensor */
    OPAQ_FP8ROW = 1,  /* one scale per row (columnwise: per column) */
    OPAQ_FP8BLK1 = 2, /* one scale per 1x128 */
    OPAQ_FP8BLK2 = 3, /* one scale per 128x128 */
    OPAQ_MXFP8 = 4,   /* one power-of-two scale per 1x32 */
    OPAQ_MXFP4 = 5,   /* one power-of-two scale per 1x32 */
    OPAQ_NVFP4 = 6    /* one E4M3 scale per 1x16, one float per tensor */
};
#define OPAQ_FORMAT_COUNT 7

/* The direction of the scaled blocks. Rowwise: along the columns of a row, as the operand of y = x w^T needs
 * them. Columnwise: along the rows of a column. Bits. */
enum opaq_usage { OPAQ_ROWWISE = 1, OPAQ_COLUMNWISE = 2, OPAQ_BOTH = 3 };

/* Options of a quantizer. Bits. */
enum opaq_option {
    OPAQ_DELAYED = 1 << 0,    /* the caller supplies the scale; the amax is returned */
    OPAQ_POW2 = 1 << 1,       /* scales are rounded down to powers of two */
    OPAQ_2D = 1 << 2,         /* square blocks: 32x32 for MX, 16x16 for NVFP4 */
    OPAQ_HADAMARD = 1 << 3,   /* the columnwise copy is transformed in groups of 16 rows */
    OPAQ_STOCHASTIC = 1 << 4, /* stochastic rounding */
    OPAQ_ROWSCALED = 1 << 5,  /* NVFP4's float is per row instead of per tensor */
    OPAQ_4OVER6 = 1 << 6,     /* each block tries both 6 and 4 as the code of its largest value */
    OPAQ_SWIZZLED = 1 << 7,   /* block scales in the 128x4 tiles that GEMM hardware reads */
    OPAQ_GLOBAL = 1 << 8,     /* NVFP4's float is the rule's own global scale instead of the amax */
    OPAQ_TILED = 1 << 9       /* codes and block scales in the tiles that processors' kernels read */
};
#define OPAQ_OPTION_COUNT 10

/* How a scale is computed from an amax; rules differ in their bytes. docs/formats.md, "Scale rules". */
enum opaq_rule {
    OPAQ_RULE_TE = 0,
    OPAQ_RULE_OCP = 1,
    OPAQ_RULE_RCEIL = 2,
    OPAQ_RULE_COMPRESSED_TENSORS = 3,
    OPAQ_RULE_MODELOPT = 4
};
#define OPAQ_RULE_COUNT 5

enum opaq_dim { OPAQ_DIM_ONE = 0, OPAQ_DIM_ROWS = 1, OPAQ_DIM_COLUMNS = 2 };

struct opaq_extent {
    enum opaq_dim dim;
    int32_t per;
    int32_t to;
};

/* NVFP4's float has the role AMAX even where OPAQ_GLOBAL makes it a global scale. */
enum opaq_role { OPAQ_ROLE_DATA = 0, OPAQ_ROLE_SCALE = 1, OPAQ_ROLE_AMAX = 2 };

/* opaq_buffer_row.element: the spec's element. */
#define OPAQ_ELEMENT_OF_SPEC (-1)

struct opaq_buffer_row {
    const char *name; /* the name in Transformer Engine: "_rowwise_data" */
    enum opaq_role role;
    int usage;                 /* present when the spec has any of these usages ... */
    uint32_t options_needed;   /* ... and all of these options ... */
    uint32_t options_excluded; /* ... and none of these */
    int element;               /* enum opaq_element, or OPAQ_ELEMENT_OF_SPEC. Codes of at most 8 bits lie in
                                  bytes; an E2M1 pair shares one, the even element in the low nibble. */
    int rank;                  /* 1 or 2 */
    /* Row-major. In a data buffer, an extent of exactly the rows (per 1, to 1) becomes the leading dimensions
     * d0, ..., dn-2. */
    struct opaq_extent extent[2];
};

struct opaq_format_row {
    enum opaq_format format;
    const char *name;
    uint32_t elements; /* bits 1 << enum opaq_element */
    enum opaq_element element_default;
    uint32_t options; /* supported options */
    uint32_t rules;   /* bits 1 << enum opaq_rule */
    /* A rowwise scale covers block_rows x block_columns elements, 0 meaning all of them; a columnwise one
     * block_columns x block_rows. OPAQ_2D makes both the larger of the two. */
    int32_t block_rows;
    int32_t block_columns;
    int32_t buffer_count;
    const struct opaq_buffer_row *buffers; /* in flatten order, see opaq/proto.h */
};

/* NULL for a number that is not a format. The row lives as long as the library. */
OPAQ_API const struct opaq_format_row *opaq_format_row(enum opaq_format format);

/* "nvfp4" -> OPAQ_NVFP4; -1 for an unknown name. */
OPAQ_API int opaq_format_find(const char *name);

/* The name in a spec's text ("sr", "compressed-tensors"); NULL unless `option` is exactly one option bit, or
 * for an unknown rule. */
OPAQ_API const char *opaq_option_name(enum opaq_option option);
OPAQ_API const char *opaq_rule_name(enum opaq_rule rule);

/* Evaluates one extent; -1 for NULL, a negative size, `per` or `to` below 1, or an overflow. */
OPAQ_API int64_t opaq_extent_eval(const struct opaq_extent *extent, int64_t rows, int64_t columns);

/* Converts a scale matrix of rows x columns bytes (multiples of 128 and 4) from row-major order into 128x4
 * tiles and back. In a tile, byte (r, c) is at (r % 32) * 16 + (r / 32) * 4 + c; tiles are in row-major order. */
OPAQ_API enum opaq_status opaq_scale_swizzle(const uint8_t *plain, int64_t rows, int64_t columns,
                                             uint8_t *swizzled, struct opaq_error *error);
OPAQ_API enum opaq_status opaq_scale_unswizzle(const uint8_t *swizzled, int64_t rows, int64_t columns,
                                               uint8_t *plain, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
