/* format/format_table.c: one row per format. This is the only description of a layout in opaq.
 * Specification: docs/formats.md, "Buffers". A new format appends its id in opaq/format.h and its row here. */
#include "opaq/format.h"

#include <stddef.h>
#include <string.h>

#include "base/checked.h"
#include "format/format_traits.h"

/* clang-format off */
#define ONE             {OPAQ_DIM_ONE, 1, 1}
#define ROWS(per, to)   {OPAQ_DIM_ROWS, per, to}
#define COLS(per, to)   {OPAQ_DIM_COLUMNS, per, to}
#define ROW             OPAQ_ROWWISE
#define COL             OPAQ_COLUMNWISE
#define DATA            OPAQ_ROLE_DATA
#define SCALE           OPAQ_ROLE_SCALE
#define AMAX            OPAQ_ROLE_AMAX
#define CODES           OPAQ_ELEMENT_OF_SPEC
#define TILED           OPAQ_TILED

static const struct opaq_buffer_row buffers_fp8[] = {
    {"_data",                 DATA,  ROW,       0, TILED, CODES,     2, {ROWS(1, 1), COLS(1, 1)}},
    {"_tiles",                DATA,  ROW,       TILED, 0, CODES, 2, {ROWS(1, 32), COLS(1, 32)}},
    {"_transpose",            DATA,  COL,       0, 0, CODES,     2, {COLS(1, 1), ROWS(1, 1)}},
    {"_scale_inv",            SCALE, ROW | COL, 0, 0, OPAQ_F32,  1, {ONE, ONE}},
};

static const struct opaq_buffer_row buffers_fp8row[] = {
    {"_rowwise_data",         DATA,  ROW, 0, TILED, CODES,     2, {ROWS(1, 1), COLS(1, 1)}},
    {"_tiles",                DATA,  ROW, TILED, 0, CODES, 2, {ROWS(1, 32), COLS(1, 32)}},
    {"_rowwise_scale_inv",    SCALE, ROW, 0, 0, OPAQ_F32,  2, {ROWS(1, 1), ONE}},
    {"_columnwise_data",      DATA,  COL, 0, 0, CODES,     2, {COLS(1, 1), ROWS(1, 1)}},
    {"_columnwise_scale_inv", SCALE, COL, 0, 0, OPAQ_F32,  2, {COLS(1, 1), ONE}},
};

static const struct opaq_buffer_row buffers_fp8blk1[] = {
    {"_rowwise_data",         DATA,  ROW, 0, 0, CODES,     2, {ROWS(1, 1), COLS(1, 1)}},
    {"_rowwise_scale_inv",    SCALE, ROW, 0, 0, OPAQ_F32,  2, {COLS(128, 1), ROWS(1, 4)}},
    {"_columnwise_data",      DATA,  COL, 0, 0, CODES,     2, {COLS(1, 1), ROWS(1, 1)}},
    {"_columnwise_scale_inv", SCALE, COL, 0, 0, OPAQ_F32,  2, {ROWS(128, 1), COLS(1, 4)}},
};

static const struct opaq_buffer_row buffers_fp8blk2[] = {
    {"_rowwise_data",         DATA,  ROW, 0, TILED, CODES,     2, {ROWS(1, 1), COLS(1, 1)}},
    {"_tiles",                DATA,  ROW, TILED, 0, CODES, 2, {ROWS(1, 32), COLS(1, 32)}},
    {"_rowwise_scale_inv",    SCALE, ROW, 0, 0, OPAQ_F32,  2, {ROWS(128, 1), COLS(128, 4)}},
    {"_columnwise_data",      DATA,  COL, 0, 0, CODES,     2, {COLS(1, 1), ROWS(1, 1)}},
    {"_columnwise_scale_inv", SCALE, COL, 0, 0, OPAQ_F32,  2, {COLS(128, 1), ROWS(128, 4)}},
};

static const struct opaq_buffer_row buffers_mxfp8[] = {
    {"_rowwise_data",         DATA,  ROW, 0, TILED, CODES,     2, {ROWS(1, 1), COLS(1, 1)}},
    {"_tiles",                DATA,  ROW, TILED, 0, CODES,     2, {ROWS(1, 32), COLS(1, 32)}},
    {"_rowwise_scale_inv",    SCALE, ROW, 0, TILED, OPAQ_E8M0, 2, {ROWS(1, 128), COLS(32, 4)}},
    {"_tile_scales",          SCALE, ROW, TILED, 0, OPAQ_E8M0, 2, {ROWS(1, 32), COLS(32, 1)}},
    {"_columnwise_data",      DATA,  COL, 0, 0, CODES,     2, {ROWS(1, 1), COLS(1, 1)}},
    {"_columnwise_scale_inv", SCALE, COL, 0, 0, OPAQ_E8M0, 2, {ROWS(32, 4), COLS(1, 128)}},
};

static const struct opaq_buffer_row buffers_mxfp4[] = {
    {"_rowwise_data",         DATA,  ROW, 0, TILED, CODES,     2, {ROWS(1, 1), COLS(2, 16)}},
    {"_tiles",                DATA,  ROW, TILED, 0, CODES,     2, {ROWS(1, 16), COLS(2, 32)}},
    {"_rowwise_scale_inv",    SCALE, ROW, 0, TILED, OPAQ_E8M0, 2, {ROWS(1, 128), COLS(32, 4)}},
    {"_tile_scales",          SCALE, ROW, TILED, 0, OPAQ_E8M0, 2, {ROWS(1, 16), COLS(32, 2)}},
    {"_columnwise_data",      DATA,  COL, 0, 0, CODES,     2, {ROWS(1, 1), COLS(2, 16)}},
    {"_columnwise_scale_inv", SCALE, COL, 0, 0, OPAQ_E8M0, 2, {ROWS(32, 4), COLS(1, 128)}},
};

static const struct opaq_buffer_row buffers_nvfp4[] = {
    {"_rowwise_data",         DATA,  ROW, 0, TILED, CODES,     2, {ROWS(1, 1), COLS(2, 8)}},
    {"_tiles",                DATA,  ROW, TILED, 0, CODES,     2, {ROWS(1, 16), COLS(2, 32)}},
    {"_rowwise_scale_inv",    SCALE, ROW, 0, TILED, OPAQ_E4M3, 2, {ROWS(1, 128), COLS(16, 4)}},
    {"_tile_scales",          SCALE, ROW, TILED, 0, OPAQ_E4M3, 2, {ROWS(1, 16), COLS(16, 4)}},
    {"_columnwise_data",      DATA,  COL, 0, 0, CODES,     2, {COLS(1, 1), ROWS(2, 8)}},
    {"_columnwise_scale_inv", SCALE, COL, 0, 0, OPAQ_E4M3, 2, {COLS(1, 128), ROWS(16, 4)}},
    {"_amax_rowwise",          AMAX,  ROW, 0, OPAQ_ROWSCALED | OPAQ_GLOBAL, OPAQ_F32, 1, {ONE, ONE}},
    {"_amax_rowwise",          AMAX,  ROW, OPAQ_ROWSCALED, OPAQ_GLOBAL, OPAQ_F32, 1, {ROWS(1, 1), ONE}},
    {"_amax_columnwise",       AMAX,  COL, 0, OPAQ_ROWSCALED | OPAQ_GLOBAL, OPAQ_F32, 1, {ONE, ONE}},
    {"_amax_columnwise",       AMAX,  COL, OPAQ_ROWSCALED, OPAQ_GLOBAL, OPAQ_F32, 1, {COLS(1, 1), ONE}},
    {"_global_rowwise",        AMAX,  ROW, OPAQ_GLOBAL, OPAQ_ROWSCALED, OPAQ_F32, 1, {ONE, ONE}},
    {"_global_rowwise",        AMAX,  ROW, OPAQ_GLOBAL | OPAQ_ROWSCALED, 0, OPAQ_F32, 1, {ROWS(1, 1), ONE}},
    {"_global_columnwise",     AMAX,  COL, OPAQ_GLOBAL, OPAQ_ROWSCALED, OPAQ_F32, 1, {ONE, ONE}},
    {"_global_columnwise",     AMAX,  COL, OPAQ_GLOBAL | OPAQ_ROWSCALED, 0, OPAQ_F32, 1, {COLS(1, 1), ONE}},
};

#define FP8_ELEMENTS    (1u << OPAQ_E4M3 | 1u << OPAQ_E5M2)
#define FP4_ELEMENTS    (1u << OPAQ_E2M1)
#define FLOAT_RULES     (1u << OPAQ_RULE_TE | 1u << OPAQ_RULE_COMPRESSED_TENSORS | 1u << OPAQ_RULE_MODELOPT)
#define MX_RULES        (FLOAT_RULES | 1u << OPAQ_RULE_OCP | 1u << OPAQ_RULE_RCEIL)
#define BLK1_OPTIONS    (OPAQ_POW2 | OPAQ_STOCHASTIC)
#define FP8_OPTIONS     (BLK1_OPTIONS | OPAQ_TILED)
#define MX_OPTIONS      (OPAQ_2D | OPAQ_STOCHASTIC | OPAQ_SWIZZLED | OPAQ_TILED)
#define NVFP4_OPTIONS   (MX_OPTIONS | OPAQ_HADAMARD | OPAQ_ROWSCALED | OPAQ_4OVER6 | OPAQ_GLOBAL)
#define BUFFERS(list)   (int32_t)(sizeof(list) / sizeof(list)[0]), list

/* In the order of enum opaq_format. */
static const struct opaq_format_row rows[OPAQ_FORMAT_COUNT] = {
    {OPAQ_FP8,     "fp8",     FP8_ELEMENTS, OPAQ_E4M3, FP8_OPTIONS | OPAQ_DELAYED, FLOAT_RULES,   0,   0, BUFFERS(buffers_fp8)},
    {OPAQ_FP8ROW,  "fp8row",  FP8_ELEMENTS, OPAQ_E4M3, FP8_OPTIONS,                FLOAT_RULES,   1,   0, BUFFERS(buffers_fp8row)},
    {OPAQ_FP8BLK1, "fp8blk1", FP8_ELEMENTS, OPAQ_E4M3, BLK1_OPTIONS,               FLOAT_RULES,   1, 128, BUFFERS(buffers_fp8blk1)},
    {OPAQ_FP8BLK2, "fp8blk2", FP8_ELEMENTS, OPAQ_E4M3, FP8_OPTIONS,                FLOAT_RULES, 128, 128, BUFFERS(buffers_fp8blk2)},
    {OPAQ_MXFP8,   "mxfp8",   FP8_ELEMENTS, OPAQ_E4M3, MX_OPTIONS,                 MX_RULES,      1,  32, BUFFERS(buffers_mxfp8)},
    {OPAQ_MXFP4,   "mxfp4",   FP4_ELEMENTS, OPAQ_E2M1, MX_OPTIONS,                 MX_RULES,      1,  32, BUFFERS(buffers_mxfp4)},
    {OPAQ_NVFP4,   "nvfp4",   FP4_ELEMENTS, OPAQ_E2M1, NVFP4_OPTIONS,              FLOAT_RULES,   1,  16, BUFFERS(buffers_nvfp4)},
};

/* In the order of the bits of enum opaq_option, and of enum opaq_rule. */
static const char *const option_names[OPAQ_OPTION_COUNT] = {
    "delayed", "pow2", "2d", "rht", "sr", "rowscaled", "4over6", "swizzle", "global", "tiled",
};
static const char *const rule_names[OPAQ_RULE_COUNT] = {
    "te", "ocp", "rceil", "compressed-tensors", "modelopt",
};
/* clang-format on */

const struct opaq_format_row *opaq_format_row(enum opaq_format format) {
    return (unsigned)format < OPAQ_FORMAT_COUNT ? &rows[format] : NULL;
}

unsigned format_traits(uint8_t format) {
    if (format >= OPAQ_FORMAT_COUNT) {
        return 0;
    }
    const struct opaq_format_row *row = &rows[format];
    const unsigned of_scales = row->block_columns != 0 ? 0
                               : row->block_rows == 0  ? TRAIT_TENSOR_SCALE
                                                       : TRAIT_ROW_SCALES;
    const bool has_amax = row->buffers[row->buffer_count - 1].role == OPAQ_ROLE_AMAX; /* amaxes come last */
    return of_scales | (has_amax ? TRAIT_SECOND_SCALE : 0u) |
           (row->block_rows == row->block_columns ? TRAIT_SQUARE_BLOCKS : 0u);
}

int opaq_format_find(const char *name) {
    for (int i = 0; name != NULL && i < OPAQ_FORMAT_COUNT; ++i) {
        if (strcmp(rows[i].name, name) == 0) {
            return i;
        }
    }
    return -1;
}

const char *opaq_option_name(enum opaq_option option) {
    for (int i = 0; i < OPAQ_OPTION_COUNT; ++i) {
        if ((unsigned)option == 1u << i) {
            return option_names[i];
        }
    }
    return NULL;
}

const char *opaq_rule_name(enum opaq_rule rule) {
    return (unsigned)rule < OPAQ_RULE_COUNT ? rule_names[rule] : NULL;
}

int64_t opaq_extent_eval(const struct opaq_extent *extent, int64_t rows_size, int64_t columns_size) {
    if (extent == NULL || extent->per < 1 || extent->to < 1) {
        return -1;
    }
    const int64_t size = extent->dim == OPAQ_DIM_ROWS      ? rows_size
                         : extent->dim == OPAQ_DIM_COLUMNS ? columns_size
                                                           : 1;
    if (size < 0 || size > OPAQ_SIZE_LIMIT) {
        return -1;
    }
    return round_up(ceil_div(size, extent->per), extent->to);
}
