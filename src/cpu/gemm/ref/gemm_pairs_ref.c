/* cpu/gemm/ref/gemm_pairs_ref.c: the tile kernel for pairs of bf16, as it is defined; to be compared with. */
#include <math.h>

#include "base/float_bits.h"
#include "cpu/gemm/gemm_table.h"

enum { COLUMNS = 16 };

static float upper(float pair) { return float_from_bits(float_to_bits(pair) & 0xFFFF0000u); }

static float lower(float pair) { return float_from_bits(float_to_bits(pair) << 16); }

static void run(const float *a, int rows, const float *b, int depth, float *total, int64_t total_step) {
    for (int row = 0; row < rows; ++row) {
        for (int column = 0; column < COLUMNS; ++column) {
            float sum = 0.0f;
            for (int k = 0; k < depth; ++k) {
                const float factor = a[row * GEMM_BLOCK + k];
                const float other = b[k * COLUMNS + column];
                sum = fmaf(upper(factor), upper(other), sum);
                sum = fmaf(lower(factor), lower(other), sum);
            }
            total[row * total_step + column] += sum;
        }
    }
}

const struct gemm_table gemm_pairs_ref = {
    .name = "gemm_bf16_ref", .features = 0, .tile_columns = COLUMNS, .run = run};
