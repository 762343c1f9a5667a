/* cpu/gemm/packed_weight.c: a tiled copy as packed kernels read it. */
#include "cpu/gemm/packed_weight.h"

#include "base/checked.h"

enum packed_format packed_format_of(const struct opaq_spec *spec) {
    switch ((enum opaq_format)spec->format) {
    case OPAQ_NVFP4:
        return PACKED_NVFP4;
    case OPAQ_MXFP4:
        return PACKED_MXFP4;
    case OPAQ_MXFP8:
        return PACKED_MXFP8;
    case OPAQ_FP8BLK2:
        return PACKED_FP8BLK;
    case OPAQ_FP8:
    case OPAQ_FP8ROW:
    case OPAQ_FP8BLK1:
        break;
    }
    return PACKED_FP8;
}

int64_t packed_padded_columns(const struct gemm_operand *b) { return round_up(b->copy->data_columns, 64); }

bool packed_weight_can_run(const struct gemm_operand *b) {
    return b->copy != NULL && b->copy->tile_rows != 0 && (uintptr_t)b->copy->data % 64 == 0;
}

/* The factor that NVFP4's second-level float stands for. */
static float nvfp4_factor(const struct opaq_spec *spec, float number) {
    if (spec->options & OPAQ_GLOBAL) {
        return spec->rule == OPAQ_RULE_MODELOPT ? number : 1.0f / number;
    }
    return number * (1.0f / (6.0f * (float)spec->e4m3_max));
}

/* Whether row factors are computed from the copy's, row by row. */
static bool makes_row_factors(const struct gemm_operand *b) {
    return packed_format_of(b->spec) == PACKED_NVFP4 && b->copy->amax_step != 0;
}

int64_t packed_row_factor_bytes(const struct gemm_operand *b) {
    return makes_row_factors(b) ? round_up(b->plain.rows * (int64_t)sizeof(float), 64) : 0;
}

void packed_row_factors(const struct gemm_operand *b, int64_t begin, int64_t end, float *row_factors) {
    const bool makes = makes_row_factors(b);
    for (int64_t n = begin; makes && n < end; ++n) {
        row_factors[n] = nvfp4_factor(b->spec, b->copy->amax[n]);
    }
}

struct packed_weight packed_weight_of(const struct gemm_operand *b, float *row_factors) {
    const struct quant_copy *copy = b->copy;
    const enum packed_format format = packed_format_of(b->spec);
    struct packed_weight weight = {.format = format,
                                   .is_e5m2 = b->spec->element == OPAQ_E5M2,
                                   .rows = b->plain.rows,
                                   .columns = b->plain.columns,
                                   .tile_columns = copy->data_columns /
                                                   (packed_is_4_bit(format) ? TILE4_COLUMNS : TILE8_COLUMNS),
                                   .data = copy->data,
                                   .scale = copy->scale,
                                   .block_scale = copy->scale,
                                   .block_scale_step = copy->scale_layout.row_step,
                                   .factor = 1.0f};
    if (makes_row_factors(b)) {
        weight.row_factor = row_factors;
    } else if (format == PACKED_NVFP4) {
        weight.factor = nvfp4_factor(b->spec, copy->amax[0]);
    } else if (format == PACKED_FP8 && copy->scale_layout.row_step == 0) {
        weight.factor = *(const float *)copy->scale;
    } else if (format == PACKED_FP8) {
        weight.row_factor = copy->scale;
    }
    return weight;
}
