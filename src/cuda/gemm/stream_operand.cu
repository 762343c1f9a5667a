/* cuda/gemm/stream_operand.cu: which products stream_operand.h's kernels take, and the arguments of these. */
#include "cuda/gemm/stream_operand.h"

enum { LIMIT_ROWS = 128 }; /* rows of a tile, at most: offsets within it have 32 bits */

static bool is_selected(void) {
    static int state;
    return variable_is("OPAQ_CUDA_PRODUCT", "stream", &state);
}

static bool is_power_of_two(int64_t n) { return n > 0 && (n & (n - 1)) == 0; }

static int log2_of(int64_t power) { return power == 1 ? 0 : 1 + log2_of(power / 2); }

/* Copies of four scales at a time need them side by side, from multiples of four bytes on. */
static bool has_words_of_scales(const struct quant_copy *copy, const struct mma_form *form) {
    const struct scale_layout *layout = &copy->scale_layout;
    return form->scale == SCALE_NONE ||
           ((uintptr_t)copy->scale % 4 == 0 && is_power_of_two(layout->row_per) &&
            (form->is_swizzled || (form->scale_step == 1 && layout->row_step % 4 == 0)));
}

/* Whether stream_factor finds the operand's factors. */
static bool has_simple_factors(const struct gemm_operand *operand, const struct mma_form *form) {
    if (operand->copy == NULL || form->factor != FACTOR_SCALE) {
        return true;
    }
    const struct scale_layout *layout = &operand->copy->scale_layout;
    return layout->tiled_columns == 0 && layout->swizzled_columns == 0 &&
           ((layout->row_step == 0 && !form->has_block_factors) ||
            (!operand->is_across && is_power_of_two(layout->row_per)));
}

bool stream_takes(const struct gemm_job *job, enum product_part part, const struct mma_arguments *product,
                  const struct opaq_execution *execution) {
    const struct mma_form *form = &product->b_form;
    const int64_t depth = operand_depth(&job->b);
    const bool is_plain = form->source == SOURCE_BF16;
    return is_selected() && shared_memory_of(execution->device) >= STREAM_MEMORY && part != PRODUCT_TERMS &&
           operand_depth(&job->a) == depth && depth > 0 && depth % SUM_BLOCK == 0 &&
           depth <= INT32_MAX / (2 * LIMIT_ROWS) && has_simple_factors(&job->a, &product->a_form) &&
           has_simple_factors(&job->b, form) &&
           (is_plain || (product->b.of.copy.data_row_step % (2 * PIECE) == 0 &&
                         has_words_of_scales(&product->b.of.copy, form)));
}

static struct stream_scales scales_of(const struct quant_copy *copy, const struct mma_form *form) {
    const struct scale_layout *layout = &copy->scale_layout;
    return form->scale == SCALE_NONE ? (struct stream_scales){NULL, 0, 0, 0, false}
           : form->is_swizzled
               ? (struct stream_scales){(const uint8_t *)copy->scale, layout->swizzled_columns / 4 * 512,
                                        log2_of(layout->row_per), 512, true}
               : (struct stream_scales){(const uint8_t *)copy->scale, layout->row_step,
                                        log2_of(layout->row_per), 4, false};
}

static struct stream_factors factors_from(const struct quant_copy *copy, const struct mma_form *form) {
    const struct scale_layout *layout = &copy->scale_layout;
    return form->factor == FACTOR_NONE ? (struct stream_factors){NULL, 0, 0, 0, false}
           : form->factor == FACTOR_SCALE
               ? (struct stream_factors){(const float *)copy->scale, layout->row_step,
                                         form->has_block_factors ? layout->column_step : 0,
                                         layout->row_step == 0 ? 0 : log2_of(layout->row_per), false}
               : (struct stream_factors){copy->amax, copy->amax_step, 0, 0, form->factor == FACTOR_INVERSE};
}

struct stream_arguments stream_arguments_of(const struct mma_arguments *product) {
    const struct quant_copy *copy = &product->b.of.copy;
    const struct mma_form *form = &product->b_form;
    const bool is_plain = form->source == SOURCE_BF16;
    struct stream_arguments arguments;
    memset(&arguments, 0, sizeof arguments);
    arguments.codes = is_plain ? (const uint8_t *)product->b.gemm.plain.data : copy->data;
    arguments.code_step =
        is_plain ? product->b.gemm.plain.row_step * 2 : copy->data_row_step / (copy->is_packed ? 2 : 1);
    arguments.tokens = (const uint8_t *)product->a.gemm.plain.data;
    arguments.token_step = product->a.gemm.plain.row_step * 2;
    arguments.rows = (int)product->a.gemm.plain.rows;
    arguments.weights = (int)product->target.c.columns;
    arguments.blocks = (int)(operand_depth(&product->b.gemm) / SUM_BLOCK);
    arguments.scale_shift = form->scale_shift;
    arguments.constant = product->constant;
    arguments.has_block_factors = product->a_form.has_block_factors || form->has_block_factors;
    arguments.form = *form;
    if (!is_plain) {
        arguments.scales = scales_of(copy, form);
    }
    arguments.weight_factors = factors_from(copy, form);
    arguments.token_factors = factors_from(&product->a.of.copy, &product->a_form);
    arguments.target = product->target;
    return arguments;
}
