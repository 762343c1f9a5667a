/* gemm_cases.h: the list of operand pairs and shapes that both the tests of the matrix product and its
 * benchmark use, so that every timed case is tested. Depends on the C library only. */
#ifndef GEMM_CASES_H
#define GEMM_CASES_H

#include <stdbool.h>
#include <stdint.h>

/* An operand is "f32", "bf16", "f16" or the text of a quantizer. "+columnwise" in it says that the tensor is stored
 * with the contraction along its rows, and that the product reads its columnwise copy. "across " before a quantizer says that
 * the tensor is stored in the same way, and that the product reads its rowwise copy across the rows. */
struct gemm_case {
    const char *a;
    const char *b;
    bool is_timed;
};

static const struct gemm_case gemm_cases[] = {
    /* plain */
    {"f32", "f32", true},
    {"bf16", "bf16", true},
    {"f16", "f16", false},
    {"f32", "bf16", false},
    {"f16", "f32", false},
    /* weights only, as in inference */
    {"bf16", "fp8row", true},
    {"bf16", "fp8blk2", false},
    {"bf16", "mxfp8", false},
    {"bf16", "mxfp4", true},
    {"bf16", "nvfp4", true},
    {"f32", "nvfp4+rule=modelopt", false},
    {"f16", "nvfp4+rule=compressed-tensors", false},
    {"bf16", "nvfp4+global+rule=compressed-tensors", false},
    {"bf16", "nvfp4+rowscaled+global+rule=compressed-tensors", false},
    {"nvfp4+columnwise+rowscaled+global+rule=modelopt", "nvfp4+columnwise+global+rule=modelopt", false},
    {"mxfp4", "bf16", false},
    /* every format on both sides, in each direction */
    {"fp8", "fp8", true},
    {"fp8+columnwise", "fp8+columnwise", false},
    {"fp8row", "fp8row", false},
    {"fp8row+columnwise", "fp8row+columnwise", false},
    {"fp8blk1", "fp8blk2", true},
    {"fp8blk1+columnwise", "fp8blk2+columnwise", false},
    {"fp8blk1+columnwise", "fp8blk1+columnwise", false},
    {"mxfp8", "mxfp8", true},
    {"mxfp8+columnwise", "mxfp8+columnwise", true},
    {"mxfp4", "mxfp4", true},
    {"mxfp4+columnwise", "mxfp4+columnwise", false},
    {"nvfp4", "nvfp4", true},
    {"nvfp4+columnwise", "nvfp4+columnwise", false},
    /* gradients, and pairs of the training recipes */
    {"fp8.e5m2", "fp8", false},
    {"fp8.e5m2+columnwise", "fp8+columnwise", false},
    {"mxfp8.e5m2", "mxfp8", false},
    {"mxfp8.e5m2+columnwise", "mxfp8+columnwise", false},
    {"fp8.e5m2", "fp8.e5m2", false},
    {"fp8blk1+pow2", "fp8blk2+pow2", false},
    {"mxfp8", "mxfp8+2d", false},
    {"mxfp8+columnwise", "mxfp8+columnwise+2d", false},
    {"mxfp8+swizzle", "mxfp8+swizzle", false},
    {"mxfp8+columnwise+swizzle", "mxfp8+columnwise+swizzle", false},
    {"nvfp4", "nvfp4+2d", false},
    {"nvfp4+columnwise", "nvfp4+columnwise+2d", false},
    {"nvfp4+rowscaled", "nvfp4+rowscaled", false},
    {"nvfp4+columnwise+rowscaled", "nvfp4", false},
    {"nvfp4+swizzle", "nvfp4+swizzle", false},
    {"nvfp4+columnwise+swizzle", "nvfp4+columnwise+swizzle", false},
    {"nvfp4+columnwise+rht", "nvfp4+columnwise+rht", true},
    {"nvfp4+columnwise+rht", "nvfp4", false},
    {"bf16", "nvfp4+columnwise+rht", false},
    /* gradients of inputs through packed weights */
    {"bf16", "across nvfp4", true},
    {"f32", "across nvfp4", true},
    {"f16", "across nvfp4", false},
    {"bf16", "across nvfp4+tiled", true},
    {"f32", "across nvfp4+tiled", false},
    {"bf16", "across nvfp4+2d", false},
    {"bf16", "across nvfp4+swizzle", false},
    {"bf16", "across nvfp4+rowscaled", false},
    {"bf16", "across nvfp4+rowscaled+tiled", false},
    {"bf16", "across nvfp4+rule=modelopt", false},
    {"bf16", "across nvfp4+global+rule=modelopt", false},
    {"bf16", "across nvfp4+global+rule=compressed-tensors", false},
    {"f32", "across nvfp4+global+rule=compressed-tensors", false},
    {"bf16", "across nvfp4+global+rule=compressed-tensors+tiled", false},
    {"bf16", "across mxfp4", true},
    {"f32", "across mxfp4", false},
    {"bf16", "across mxfp4+tiled", false},
    {"bf16", "across mxfp8", true},
    {"bf16", "across mxfp8.e5m2", false},
    {"bf16", "across mxfp8+swizzle", false},
    {"f32", "across mxfp8+tiled", false},
    {"bf16", "across mxfp8+tiled", false},
    {"bf16", "across fp8", true},
    {"f32", "across fp8", false},
    {"bf16", "across fp8.e5m2+tiled", false},
    {"bf16", "across fp8+tiled", false},
    {"bf16", "across fp8row", true},
    {"bf16", "across fp8row+tiled", false},
    {"bf16", "across fp8blk1", false},
    {"bf16", "across fp8blk2", true},
    {"bf16", "across fp8blk2+tiled", false},
    {"mxfp8.e5m2", "across mxfp8", false},
    {"fp8.e5m2", "across fp8", false},
};
enum { GEMM_CASE_COUNT = sizeof gemm_cases / sizeof gemm_cases[0] };

/* M, N, K of the tests: one element, less than a tile, a partial Hadamard group, sizes around a tile, the rows
 * of a task and a block of K, empty ones. */
static const int64_t gemm_test_shapes[][3] = {{1, 1, 1},     {1, 33, 17},   {3, 5, 16},    {9, 40, 40},
                                              {32, 64, 256}, {33, 31, 257}, {70, 49, 530}, {0, 5, 32},
                                              {5, 0, 32},    {5, 6, 0},     {40, 33, 0},   {7, 300, 140}};
enum { GEMM_TEST_SHAPE_COUNT = sizeof gemm_test_shapes / sizeof gemm_test_shapes[0] };

/* Of the benchmark: one token, a few, a batch, with two sizes of weights; those of a training step. */
static const int64_t gemm_bench_shapes[][3] = {{1, 1024, 1024},   {16, 1024, 1024},  {512, 1024, 1024},
                                               {1, 4096, 4096},   {16, 4096, 4096},  {512, 512, 512},
                                               {512, 4096, 4096}, {2048, 1024, 1024}};
enum { GEMM_BENCH_SHAPE_COUNT = sizeof gemm_bench_shapes / sizeof gemm_bench_shapes[0] };

#endif
