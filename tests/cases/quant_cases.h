/* quant_cases.h: the list of quantizers that both the kernel tests and the benchmark use, so that the same
 * kernels are tested and timed. Depends on opaq/element.h. */
#ifndef QUANT_CASES_H
#define QUANT_CASES_H

#include <stdint.h>

#include "opaq/element.h"

struct quant_case {
    const char *spec;
    enum opaq_element dtype; /* of the input, and of the dequantized output */
};

static const struct quant_case quant_cases[] = {
    /* every format, in each usage, from bf16 */
    {"fp8", OPAQ_BF16},
    {"fp8+columnwise", OPAQ_BF16},
    {"fp8+both", OPAQ_BF16},
    {"fp8row", OPAQ_BF16},
    {"fp8row+columnwise", OPAQ_BF16},
    {"fp8row+both", OPAQ_BF16},
    {"fp8blk1", OPAQ_BF16},
    {"fp8blk1+columnwise", OPAQ_BF16},
    {"fp8blk1+both", OPAQ_BF16},
    {"fp8blk2", OPAQ_BF16},
    {"fp8blk2+columnwise", OPAQ_BF16},
    {"fp8blk2+both", OPAQ_BF16},
    {"mxfp8", OPAQ_BF16},
    {"mxfp8+columnwise", OPAQ_BF16},
    {"mxfp8+both", OPAQ_BF16},
    {"mxfp4", OPAQ_BF16},
    {"mxfp4+columnwise", OPAQ_BF16},
    {"mxfp4+both", OPAQ_BF16},
    {"nvfp4", OPAQ_BF16},
    {"nvfp4+columnwise", OPAQ_BF16},
    {"nvfp4+both", OPAQ_BF16},
    /* the other inputs */
    {"fp8", OPAQ_F32},
    {"fp8blk2", OPAQ_F32},
    {"mxfp8", OPAQ_F32},
    {"mxfp4", OPAQ_F32},
    {"nvfp4", OPAQ_F32},
    {"fp8", OPAQ_F16},
    {"mxfp8", OPAQ_F16},
    {"nvfp4", OPAQ_F16},
    /* quantizers of the training recipes */
    {"fp8.e5m2+both", OPAQ_BF16},
    {"fp8blk1+both+pow2", OPAQ_BF16},
    {"fp8blk2+both+pow2", OPAQ_BF16},
    {"mxfp8.e5m2+both", OPAQ_BF16},
    {"mxfp8+both+2d", OPAQ_BF16},
    {"nvfp4+both+2d", OPAQ_BF16},
    {"nvfp4+both+rht", OPAQ_BF16},
    {"nvfp4+both+rht+sr", OPAQ_BF16},
    {"nvfp4+both+rowscaled", OPAQ_BF16},
    {"nvfp4+4over6", OPAQ_BF16},
    {"nvfp4+both+2d+4over6=mse", OPAQ_BF16},
    {"mxfp8+both+swizzle", OPAQ_BF16},
    {"nvfp4+both+swizzle", OPAQ_BF16},
    {"nvfp4+tiled", OPAQ_BF16},
    {"mxfp8+tiled", OPAQ_BF16},
    {"mxfp4+both+sr", OPAQ_BF16},
    {"fp8+both+sr", OPAQ_BF16},
    /* scale rules of other software */
    {"fp8row+rule=compressed-tensors", OPAQ_BF16},
    {"fp8blk2+rule=modelopt", OPAQ_BF16},
    {"mxfp8+rule=ocp", OPAQ_BF16},
    {"mxfp8+rule=modelopt", OPAQ_BF16},
    {"mxfp4+rule=ocp", OPAQ_BF16},
    {"mxfp4+rule=rceil", OPAQ_BF16},
    {"mxfp4+rule=compressed-tensors", OPAQ_BF16},
    {"mxfp4+rule=modelopt", OPAQ_BF16},
    {"nvfp4+rule=compressed-tensors", OPAQ_BF16},
    {"nvfp4+rule=modelopt", OPAQ_BF16},
    {"nvfp4+both+global+rule=compressed-tensors", OPAQ_BF16},
    {"nvfp4+both+rowscaled+swizzle+global+rule=modelopt", OPAQ_BF16},
};
enum { QUANT_CASE_COUNT = sizeof quant_cases / sizeof quant_cases[0] };

/* Shapes of the tests: one element, less than a block, one block, partial blocks, odd, several panels, one row
 * or column, empty. */
static const int64_t quant_case_shapes[][2] = {{1, 1},   {1, 15},   {3, 17},    {16, 16},   {31, 33},
                                               {32, 64}, {127, 65}, {128, 128}, {129, 257}, {200, 100},
                                               {150, 1}, {1, 2200}, {0, 32},    {32, 0}};
enum { QUANT_CASE_SHAPE_COUNT = sizeof quant_case_shapes / sizeof quant_case_shapes[0] };

#endif
