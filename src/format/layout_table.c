/* format/layout_table.c: the table of opaq/layout.h. */
#include <stddef.h>
#include <string.h>

#include "opaq/layout.h"

#define FLOATS "F32 BF16"

#define CT(format_, method_, data_, global_, input_, data_dtypes_, scale_dtypes_, shape_)                    \
    {                                                                                                        \
        .layout = OPAQ_LAYOUT_COMPRESSED_TENSORS, .format = (format_), .method = (method_), .data = (data_), \
        .scale = "_scale", .global = (global_), .input = (input_), .data_dtypes = (data_dtypes_),            \
        .scale_dtypes = (scale_dtypes_), .scale_shape = (shape_), .global_shape = "1",                       \
        .rule = OPAQ_RULE_COMPRESSED_TENSORS                                                                 \
    }
#define MODELOPT(format_, method_, global_, input_, data_dtypes_, scale_dtypes_, shape_)          \
    {                                                                                             \
        .layout = OPAQ_LAYOUT_MODELOPT, .format = (format_), .method = (method_), .data = "",     \
        .scale = "_scale", .global = (global_), .input = (input_), .data_dtypes = (data_dtypes_), \
        .scale_dtypes = (scale_dtypes_), .scale_shape = (shape_), .global_shape = "",             \
        .rule = OPAQ_RULE_MODELOPT                                                                \
    }
#define OTHER(layout_, format_, method_, data_, scale_, data_dtypes_, scale_dtypes_, shape_, rule_)        \
    {                                                                                                      \
        .layout = (layout_), .format = (format_), .method = (method_), .data = (data_), .scale = (scale_), \
        .global = "", .input = "", .data_dtypes = (data_dtypes_), .scale_dtypes = (scale_dtypes_),         \
        .scale_shape = (shape_), .global_shape = "", .rule = (rule_)                                       \
    }

static const struct opaq_layout_row rows[] = {
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
    OTHER(OPAQ_LAYOUT_DEEPSEEK, OPAQ_FP8BLK2, "fp8", "", "_scale_inv", "F8_E4M3", FLOATS " F8_E8M0", "rc",
          OPAQ_RULE_MODELOPT),
    OTHER(OPAQ_LAYOUT_DEEPSEEK, OPAQ_MXFP8, "mxfp8", "", "_scale_inv", "F8_E4M3", "U8 F8_E8M0", "Rc",
          OPAQ_RULE_TE),
    OTHER(OPAQ_LAYOUT_GPT_OSS, OPAQ_MXFP4, "mxfp4", "_blocks", "_scales", "U8", "U8 F8_E8M0", "Rc",
          OPAQ_RULE_OCP),
};

static const char *const names[OPAQ_LAYOUT_COUNT] = {"compressed-tensors", "modelopt", "deepseek", "gpt-oss"};

const struct opaq_layout_row *opaq_layout_row(int index) {
    return index < 0 || index >= (int)(sizeof rows / sizeof rows[0]) ? NULL : &rows[index];
}

const struct opaq_layout_row *opaq_layout_find(enum opaq_layout layout, enum opaq_format format) {
    for (size_t i = 0; i < sizeof rows / sizeof rows[0]; ++i) {
        if (rows[i].layout == layout && rows[i].format == format) {
            return &rows[i];
        }
    }
    return NULL;
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
