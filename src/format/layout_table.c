/* format/layout_table.c: the table of opaq/layout.h. */
#include <stddef.h>
#include <string.h>

#include "opaq/element.h"
#include "opaq/layout.h"

#define FLOATS "F32 BF16"
#define GLOBAL_AND_INPUT .global_dtypes = "F32", .input_dtypes = FLOATS

#define CT(format_, method_, data_, global_, input_, data_dtypes_, scale_dtypes_, shape_)                    \
    {                                                                                                        \
        .layout = OPAQ_LAYOUT_COMPRESSED_TENSORS, .format = (format_), .method = (method_), .data = (data_), \
        .scale = "_scale", .global = (global_), .input = (input_), .data_dtypes = (data_dtypes_),            \
        .scale_dtypes = (scale_dtypes_), .scale_shape = (shape_), .global_shape = "1",                       \
        .rule = OPAQ_RULE_COMPRESSED_TENSORS, .data_shape = "RC", GLOBAL_AND_INPUT                           \
    }
#define MODELOPT(format_, method_, global_, input_, data_dtypes_, scale_dtypes_, shape_)          \
    {                                                                                             \
        .layout = OPAQ_LAYOUT_MODELOPT, .format = (format_), .method = (method_), .data = "",     \
        .scale = "_scale", .global = (global_), .input = (input_), .data_dtypes = (data_dtypes_), \
        .scale_dtypes = (scale_dtypes_), .scale_shape = (shape_), .global_shape = "",             \
        .rule = OPAQ_RULE_MODELOPT, .data_shape = "RC", GLOBAL_AND_INPUT                          \
    }
#define OTHER(layout_, format_, method_, data_, scale_, data_dtypes_, scale_dtypes_, data_shape_, shape_,  \
              rule_)                                                                                       \
    {                                                                                                      \
        .layout = (layout_), .format = (format_), .method = (method_), .data = (data_), .scale = (scale_), \
        .global = "", .input = "", .data_dtypes = (data_dtypes_), .scale_dtypes = (scale_dtypes_),         \
        .scale_shape = (shape_), .global_shape = "", .rule = (rule_), .data_shape = (data_shape_),         \
        GLOBAL_AND_INPUT                                                                                   \
    }

static const struct opaq_layout_row layout_rows[] = {
    CT(OPAQ_NVFP4, "nvfp4-pack-quantized", "_packed", "_global_scale", "input_global_scale", "U8", "F8_E4M3",
       "Rc"),
    CT(OPAQ_MXFP4, "mxfp4-pack-quantized", "_packed", "", "", "U8", "U8 F8_E8M0", "Rc"),
    CT(OPAQ_MXFP8, "mxfp8-quantized", "", "", "", "F8_E4M3", "U8 F8_E8M0", "Rc"),
    CT(OPAQ_FP8, "float-quantized", "", "", "input_scale", "F8_E4M3", FLOATS, "1"),
    CT(OPAQ_FP8ROW, "float-quantized", "", "", "", "F8_E4M3", FLOATS, "R1"),
    CT(OPAQ_FP8BLK2, "float-quantized", "", "", "", "F8_E4M3", FLOATS, "rc"),
    MODELOPT(OPAQ_NVFP4, "NVFP4", "_scale_2", "input_scale", "U8", "F8_E4M3", "Rc"),
    MODELOPT(OPAQ_MXFP4, "mxfp4", "", "input_scale", "U8", "U8 F8_E8M0", "Rc"),
    MODELOPT(OPAQ_MXFP8, "MXFP8", "", "", "F8_E4M3", "U8 F8_E8M0", "Rc"),
    MODELOPT(OPAQ_FP8, "FP8", "", "input_scale", "F8_E4M3", FLOATS, ""),
    MODELOPT(OPAQ_FP8ROW, "FP8_PER_CHANNEL_PER_TOKEN", "", "", "F8_E4M3", FLOATS, "R"),
    MODELOPT(OPAQ_FP8BLK2, "fp8_pb_wo", "", "", "F8_E4M3", FLOATS, "r1c1"),
    OTHER(OPAQ_LAYOUT_DEEPSEEK, OPAQ_FP8BLK2, "fp8", "", "_scale_inv", "F8_E4M3", FLOATS " F8_E8M0", "RC", "rc",
          OPAQ_RULE_MODELOPT),
    OTHER(OPAQ_LAYOUT_DEEPSEEK, OPAQ_MXFP8, "mxfp8", "", "_scale_inv", "F8_E4M3", "U8 F8_E8M0", "RC", "Rc",
          OPAQ_RULE_TE),
    OTHER(OPAQ_LAYOUT_GPT_OSS, OPAQ_MXFP4, "mxfp4", "_blocks", "_scales", "U8", "U8 F8_E8M0", "Rcb", "Rc",
          OPAQ_RULE_OCP),
};

static const char *const names[OPAQ_LAYOUT_COUNT] = {"compressed-tensors", "modelopt", "deepseek", "gpt-oss"};

const struct opaq_layout_row *opaq_layout_row(int index) {
    return index < 0 || index >= (int)(sizeof layout_rows / sizeof layout_rows[0]) ? NULL : &layout_rows[index];
}

const struct opaq_layout_row *opaq_layout_find(enum opaq_layout layout, enum opaq_format format) {
    for (size_t i = 0; i < sizeof layout_rows / sizeof layout_rows[0]; ++i) {
        if (layout_rows[i].layout == layout && layout_rows[i].format == format) {
            return &layout_rows[i];
        }
    }
    return NULL;
}

/* The number of blocks; a block of 0 is as long as the row or column. */
static int64_t blocks(int64_t size, int32_t block) {
    return block == 0 ? 1 : size / block + (size % block != 0);
}

int opaq_layout_shape(const char *letters, enum opaq_format format, int64_t rows, int64_t columns,
                      struct opaq_layout_shape *shape) {
    const struct opaq_format_row *const row = opaq_format_row(format);
    struct opaq_layout_shape found = {.rows_dim = -1, .columns_dim = -1};
    if (letters == NULL || row == NULL || rows < 0 || columns < 0 || shape == NULL) {
        return 0;
    }
    const int per_byte = 8 / opaq_element_info(row->element_default)->bits;
    for (; *letters != '\0'; ++letters, ++found.rank) {
        if (found.rank == OPAQ_LAYOUT_RANK_LIMIT) {
            return 0;
        }
        int64_t *const size = &found.size[found.rank];
        switch (*letters) {
        case 'R':
            found.rows_dim = found.rank;
            *size = rows;
            break;
        case 'r':
            found.rows_dim = found.rank;
            *size = blocks(rows, row->block_rows);
            break;
        case 'c':
            found.columns_dim = found.rank;
            *size = blocks(columns, row->block_columns);
            break;
        case 'C':
            found.columns_dim = found.rank;
            *size = blocks(columns, per_byte);
            break;
        case 'b':
            *size = blocks(row->block_columns, per_byte);
            break;
        case '1':
            *size = 1;
            break;
        default:
            return 0;
        }
    }
    *shape = found;
    return 1;
}

const char *opaq_layout_name(enum opaq_layout layout) {
    return (int)layout < 0 || (int)layout >= OPAQ_LAYOUT_COUNT ? NULL : names[layout];
}

int opaq_layout_number(const char *name) {
    for (int i = 0; i < OPAQ_LAYOUT_COUNT; ++i) {
        if (name != NULL && strcmp(names[i], name) == 0) {
            return i;
        }
    }
    return -1;
}
