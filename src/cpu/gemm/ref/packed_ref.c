/* cpu/gemm/ref/packed_ref.c: reference products with a tiled weight in C: the other kernels are tested against
 * it, and it is used where no other is supported. */
#include <math.h>
#include <stddef.h>

#include "base/checked.h"
#include "cpu/gemm/packed.h"
#include "format/element_codec.h"

/* Columns that are multiplied with one scale; without block scales the number does not matter. */
static int64_t columns_per_scale(enum packed_format format) {
    return format == PACKED_FP8BLK ? 128 : packed_block_columns(format);
}

/* Columns of one sum: fewer for floats, to limit rounding errors. */
static int step_columns(enum packed_format format, enum packed_precision precision) {
    if (precision == PACKED_EXACT) {
        return format <= PACKED_MXFP4 ? 16 : 32;
    }
    return (int)min_int64(columns_per_scale(format), 32);
}

/* A 4-bit code's value times 2. */
static int twice_e2m1(const struct packed_weight *weight, int64_t n, int64_t k) {
    static const int8_t values[16] = {0, 1, 2, 3, 4, 6, 8, 12, 0, -1, -2, -3, -4, -6, -8, -12};
    int shift;
    const int64_t at = tile4_offset(n, k, weight->tile_columns * TILE4_COLUMNS, &shift);
    return values[weight->data[at] >> shift & 15];
}

static float value_at(const struct packed_weight *weight, int64_t n, int64_t k) {
    if (weight->format <= PACKED_MXFP4) {
        return 0.5f * (float)twice_e2m1(weight, n, k);
    }
    const uint8_t code = weight->data[tile8_offset(n, k, weight->tile_columns * TILE8_COLUMNS)];
    return weight->is_e5m2 ? decode_e5m2(code) : decode_e4m3(code);
}

/* Of the block that column k is in. */
static float scale_at(const struct packed_weight *weight, int64_t n, int64_t k) {
    const bool is_4_bit = weight->format <= PACKED_MXFP4;
    const int64_t columns = weight->tile_columns * (is_4_bit ? TILE4_COLUMNS : TILE8_COLUMNS);
    const int64_t per = columns_per_scale(weight->format);
    if (weight->format == PACKED_FP8) {
        return 1.0f;
    }
    if (weight->format == PACKED_FP8BLK) {
        return weight->block_scale[n / 128 * weight->block_scale_step + k / 128];
    }
    const int64_t at = tile_scale_offset(n, k / per, columns / per, is_4_bit ? TILE4_ROWS : TILE8_ROWS);
    return weight->format == PACKED_NVFP4 ? decode_e4m3(weight->scale[at]) : decode_e8m0(weight->scale[at]);
}

/* The integers of row m, or the floats. */
static float float_at(const struct packed_rows *x, int64_t m, int64_t k) {
    return x->precision == PACKED_BF16 ? decode_bf16(x->bf16[m * x->padded + k]) : x->f32[m * x->padded + k];
}

static int integer_at(const struct packed_rows *x, int64_t m, int64_t k) {
    return x->precision == PACKED_NEAR ? x->q16[m * x->padded + k] : x->q8[m * x->padded + k];
}

/* One block's products: exact integers times 1/2, or float32 in order. */
static float block_sum(const struct packed_weight *weight, const struct packed_rows *x, int64_t m, int64_t n,
                       int64_t k, int64_t end) {
    if (x->precision == PACKED_EXACT || x->precision == PACKED_BF16) {
        float sum = 0.0f;
        for (int64_t i = k; i < end; ++i) {
            sum = fmaf(value_at(weight, n, i), float_at(x, m, i), sum);
        }
        return sum;
    }
    int32_t sum = 0;
    for (int64_t i = k; i < end; ++i) {
        sum += twice_e2m1(weight, n, i) * integer_at(x, m, i);
    }
    return 0.5f * (float)sum;
}

static float activation_scale(const struct packed_weight *weight, const struct packed_rows *x, int64_t m,
                              int64_t k) {
    if (x->precision == PACKED_FAST32) {
        return x->block_scale[m * (x->padded / 32) + k / 32];
    }
    if (x->precision == PACKED_CODES) {
        const int64_t per = columns_per_scale(weight->format);
        return 0.5f * x->block_scale[m * (x->padded / per) + k / per];
    }
    return 1.0f;
}

static void run_ref(const struct packed_weight *weight, const struct packed_rows *x, int64_t begin, int64_t end,
                    float *y, int64_t y_step, void *panel) {
    const int64_t tile_rows = weight->format <= PACKED_MXFP4 ? TILE4_ROWS : TILE8_ROWS;
    const int per = step_columns(weight->format, x->precision);
    (void)panel;
    for (int64_t n = begin * tile_rows; n < min_int64(end * tile_rows, weight->rows); ++n) {
        const float factor = weight->factor * (weight->row_factor == NULL ? 1.0f : weight->row_factor[n]);
        for (int64_t m = 0; m < x->rows; ++m) {
            float total = 0.0f;
            for (int64_t k = 0; k < weight->columns; k += per) {
                const int64_t k_end = min_int64(k + per, weight->columns);
                /* in this order, because a scale may be the smallest number there is */
                const float sum = block_sum(weight, x, m, n, k, k_end) * activation_scale(weight, x, m, k);
                total = fmaf(sum, scale_at(weight, n, k), total);
            }
            const bool has_row_scale = x->precision == PACKED_NEAR || x->precision == PACKED_FAST;
            y[m * y_step + n] = total * factor * (has_row_scale ? x->row_scale[m] : 1.0f);
        }
    }
}

/* clang-format off */
#define REF(format, precision) {"packed_" #format "_" #precision "_ref", run_ref, 0, 0, 1}
#define NONE                   {NULL, NULL, 0, 0, 0}

const struct packed_table packed_table_ref = {
    "ref", 0, {
        {REF(nvfp4, exact), REF(nvfp4, near), REF(nvfp4, fast), REF(nvfp4, fast32), REF(nvfp4, codes), REF(nvfp4, bf16)},
        {REF(mxfp4, exact), REF(mxfp4, near), REF(mxfp4, fast), REF(mxfp4, fast32), REF(mxfp4, codes), REF(mxfp4, bf16)},
        {REF(mxfp8, exact), NONE, NONE, NONE, NONE, REF(mxfp8, bf16)},
        {REF(fp8, exact), NONE, NONE, NONE, NONE, REF(fp8, bf16)},
        {REF(fp8blk, exact), NONE, NONE, NONE, NONE, REF(fp8blk, bf16)},
    },
};
/* clang-format on */
