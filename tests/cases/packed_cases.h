/* packed_cases.h: the timed products with tiled weights and their required and target shares; they are also
 * tested. Depends on gemm/packed.h. */
#ifndef OPAQ_TESTS_CASES_PACKED_CASES_H
#define OPAQ_TESTS_CASES_PACKED_CASES_H

#include "cpu/gemm/packed.h"

enum { PACKED_CASE_COLUMNS = 4096 };

/* The reference of a case: reading its weight, as many multiply-adds of floats or of bytes, a good product of
 * floats, the case of the same name with one row, or (for preparing x) the product. */
enum limit { LIMIT_READ, LIMIT_FMA, LIMIT_BYTES, LIMIT_GEMM, LIMIT_ONE_ROW, LIMIT_PRODUCT };

struct packed_case {
    const char *name;
    enum packed_format format;
    enum packed_precision precision;
    int64_t rows;
    enum limit limit;
    /* Share of the limit. LIMIT_ONE_ROW: maximum time relative to the case with one row. LIMIT_PRODUCT, for
     * preparing x: maximum share of the time of the product. */
    double must;
    double aim;
};

static const struct packed_case packed_cases[] = {
    {"nvfp4 fast", PACKED_NVFP4, PACKED_FAST, 1, LIMIT_READ, 0.85, 0.95},
    {"nvfp4 fast", PACKED_NVFP4, PACKED_FAST, 8, LIMIT_ONE_ROW, 2.5, 1.8},
    {"nvfp4 fast", PACKED_NVFP4, PACKED_FAST, 1, LIMIT_PRODUCT, 0.05, 0.01},
    {"nvfp4 fast", PACKED_NVFP4, PACKED_FAST, 512, LIMIT_PRODUCT, 0.04, 0.02},
    {"nvfp4 fast", PACKED_NVFP4, PACKED_FAST, 64, LIMIT_BYTES, 0.42, 0.50},
    {"nvfp4 fast", PACKED_NVFP4, PACKED_FAST, 512, LIMIT_BYTES, 0.50, 0.58},
    {"nvfp4 fast32", PACKED_NVFP4, PACKED_FAST32, 1, LIMIT_READ, 0.85, 0.95},
    {"nvfp4 fast32", PACKED_NVFP4, PACKED_FAST32, 512, LIMIT_BYTES, 0.42, 0.50},
    {"nvfp4 fast32", PACKED_NVFP4, PACKED_FAST32, 512, LIMIT_PRODUCT, 0.04, 0.02},
    {"nvfp4 codes", PACKED_NVFP4, PACKED_CODES, 1, LIMIT_READ, 0.85, 0.95},
    {"nvfp4 codes", PACKED_NVFP4, PACKED_CODES, 512, LIMIT_BYTES, 0.40, 0.50},
    {"nvfp4 near", PACKED_NVFP4, PACKED_NEAR, 1, LIMIT_READ, 0.80, 0.90},
    {"nvfp4 near", PACKED_NVFP4, PACKED_NEAR, 512, LIMIT_GEMM, 1.20, 1.40},
    {"nvfp4 near", PACKED_NVFP4, PACKED_NEAR, 1, LIMIT_PRODUCT, 0.05, 0.01},
    {"nvfp4 near", PACKED_NVFP4, PACKED_NEAR, 512, LIMIT_PRODUCT, 0.04, 0.02},
    {"nvfp4 exact", PACKED_NVFP4, PACKED_EXACT, 1, LIMIT_READ, 0.75, 0.85},
    {"nvfp4 exact", PACKED_NVFP4, PACKED_EXACT, 8, LIMIT_FMA, 0.70, 0.80},
    {"nvfp4 exact", PACKED_NVFP4, PACKED_EXACT, 512, LIMIT_FMA, 0.80, 0.88},
    {"nvfp4 bf16", PACKED_NVFP4, PACKED_BF16, 1, LIMIT_READ, 0.75, 0.85},
    {"nvfp4 bf16", PACKED_NVFP4, PACKED_BF16, 8, LIMIT_FMA, 1.00, 1.20},
    {"nvfp4 bf16", PACKED_NVFP4, PACKED_BF16, 512, LIMIT_FMA, 1.20, 1.50},
    {"nvfp4 bf16", PACKED_NVFP4, PACKED_BF16, 512, LIMIT_PRODUCT, 0.04, 0.02},
    {"mxfp4 fast", PACKED_MXFP4, PACKED_FAST, 1, LIMIT_READ, 0.85, 0.95},
    {"mxfp4 fast", PACKED_MXFP4, PACKED_FAST, 8, LIMIT_ONE_ROW, 2.5, 1.8},
    {"mxfp4 fast", PACKED_MXFP4, PACKED_FAST, 512, LIMIT_BYTES, 0.60, 0.70},
    {"mxfp4 fast32", PACKED_MXFP4, PACKED_FAST32, 512, LIMIT_BYTES, 0.55, 0.65},
    {"mxfp4 codes", PACKED_MXFP4, PACKED_CODES, 512, LIMIT_BYTES, 0.55, 0.65},
    {"mxfp4 near", PACKED_MXFP4, PACKED_NEAR, 512, LIMIT_GEMM, 1.20, 1.40},
    {"mxfp4 exact", PACKED_MXFP4, PACKED_EXACT, 1, LIMIT_READ, 0.75, 0.85},
    {"mxfp4 exact", PACKED_MXFP4, PACKED_EXACT, 512, LIMIT_FMA, 0.80, 0.88},
    {"mxfp4 bf16", PACKED_MXFP4, PACKED_BF16, 1, LIMIT_READ, 0.75, 0.85},
    {"mxfp4 bf16", PACKED_MXFP4, PACKED_BF16, 512, LIMIT_FMA, 1.20, 1.50},
    {"mxfp8 exact", PACKED_MXFP8, PACKED_EXACT, 1, LIMIT_READ, 0.75, 0.90},
    {"mxfp8 exact", PACKED_MXFP8, PACKED_EXACT, 512, LIMIT_FMA, 0.80, 0.88},
    {"mxfp8 bf16", PACKED_MXFP8, PACKED_BF16, 1, LIMIT_READ, 0.75, 0.90},
    {"mxfp8 bf16", PACKED_MXFP8, PACKED_BF16, 512, LIMIT_FMA, 1.20, 1.50},
    {"fp8 exact", PACKED_FP8, PACKED_EXACT, 1, LIMIT_READ, 0.75, 0.90},
    {"fp8 exact", PACKED_FP8, PACKED_EXACT, 512, LIMIT_FMA, 0.80, 0.88},
    {"fp8 bf16", PACKED_FP8, PACKED_BF16, 1, LIMIT_READ, 0.75, 0.90},
    {"fp8 bf16", PACKED_FP8, PACKED_BF16, 512, LIMIT_FMA, 1.20, 1.50},
    {"fp8blk bf16", PACKED_FP8BLK, PACKED_BF16, 1, LIMIT_READ, 0.75, 0.90},
    {"fp8blk bf16", PACKED_FP8BLK, PACKED_BF16, 512, LIMIT_FMA, 1.20, 1.50},
    {"fp8blk exact", PACKED_FP8BLK, PACKED_EXACT, 1, LIMIT_READ, 0.75, 0.90},
    {"fp8blk exact", PACKED_FP8BLK, PACKED_EXACT, 512, LIMIT_FMA, 0.80, 0.88},
};
enum { PACKED_CASE_COUNT = sizeof packed_cases / sizeof packed_cases[0], PACKED_CASE_MOST_ROWS = 512 };

#endif
