/* cuda/quant/quantize_run.cu: quantizing on a GPU: tensor-wide figures first, then the copies: together or each by a fast kernel
 * (quantize_tiles.cu, quantize_rows.cu), or by one that takes any. There is no scratch memory: an amax is computed where the
 * scale, or the amax itself, is stored. */
#include "cuda/quant/quant_kernels.h"

/* Bytes of a copy's codes. */
static size_t code_bytes(const struct quant_copy *copy) {
    const int64_t codes = copy->tile_rows != 0
                              ? round_up(copy->operand.rows, copy->tile_rows) * copy->data_columns
                          : copy->data_column_step == 1 ? copy->operand.rows * copy->data_row_step
                                                        : copy->operand.columns * copy->data_column_step;
    return (size_t)(copy->is_packed ? codes / 2 : codes);
}

/* Whether the scales are fewer than their buffer has room for. */
static bool has_padded_scales(const struct quant_copy *copy) {
    const struct scale_layout *layout = &copy->scale_layout;
    const int64_t down = layout->row_step == 0 ? 1 : ceil_div(copy->operand.rows, layout->row_per);
    const int64_t across = layout->column_step == 0 ? 1 : ceil_div(copy->operand.columns, layout->column_per);
    return layout->tiled_columns != 0 ||
           (size_t)(down * across * copy->scale_bytes) != copy->scale_buffer_bytes;
}

/* Clears padding: of scales, and of codes that are tiled, or packed and or-ed in (`is_fast`: they are not). */
static enum opaq_status clear_copy(const struct quant_copy *copy, bool is_fast, const struct group_part *group,
                                   const struct opaq_execution *execution, struct opaq_error *error) {
    if (group->first != NULL || has_padded_scales(copy)) {
        TRY(queue_set(copy->scale, 0, copy->scale_buffer_bytes, execution, error));
    }
    return !is_fast && (copy->is_packed || copy->tile_rows != 0)
               ? queue_set(copy->data, 0, code_bytes(copy), execution, error)
               : OPAQ_OK;
}

bool is_in_parts(const struct quant_matrix *x) {
    return x->dtype == OPAQ_BF16 && x->column_step == 1 && x->row_step % 8 == 0 && x->columns % 16 == 0 &&
           (uintptr_t)x->data % 16 == 0;
}

bool uses_parts(void) {
    static int state;
    return !variable_is("OPAQ_CUDA_QUANTIZER", "general", &state);
}

bool takes_parts(const struct quant_job *job, const struct quant_copy *copy) {
    const struct opaq_spec *spec = &job->spec;
    const struct quant_matrix x = plain_operand(copy);
    const bool is_mx = spec->format == OPAQ_MXFP8 || spec->format == OPAQ_MXFP4;
    return uses_parts() && is_in_parts(&x) && (!is_mx || x.columns % 32 == 0) && !rule_divides(spec) &&
           (spec->options & OPAQ_4OVER6) == 0 && copy->tile_rows == 0 &&
           copy->data_columns == copy->operand.columns && (uintptr_t)copy->data % 16 == 0 &&
           !(copy->is_hadamard && copy->block_rows > 1);
}

/* The address of the tensor's amax until encoding: the given one, or the scale's entry. */
static enum opaq_status settle_fp8(const struct quant_job *job, const struct quantize_figures *figures,
                                   struct quant_arguments *arguments, const struct opaq_execution *execution,
                                   struct opaq_error *error) {
    const float *given = figures->amax_rowwise != NULL ? figures->amax_rowwise : figures->amax_columnwise;
    float *const scale = (float *)job->copy[0].scale;
    arguments->scale = figures->scale;
    arguments->amax = given != NULL ? given : scale;
    if (given == NULL && (figures->scale == NULL || figures->amax != NULL)) {
        return amax_group(&job->copy[0], &job->spec, false, 0, scale, &arguments->group, execution, error);
    }
    return OPAQ_OK;
}

/* nvfp4: each copy's amax, or the global scale that follows from it, into its buffer. A square block shares it between the
 * copies, as does the data. What is given is stored as it is. */
static enum opaq_status settle_nvfp4(const struct quant_job *job, const struct quantize_figures *figures,
                                     const struct group_part *group, const struct opaq_execution *execution,
                                     struct opaq_error *error) {
    for (int i = 0; i < job->copy_count; ++i) {
        const struct quant_copy *copy = &job->copy[i];
        const float *given = copy->usage == OPAQ_ROWWISE ? figures->amax_rowwise : figures->amax_columnwise;
        const int64_t count = copy->amax_step == 0 ? 1 : copy->operand.rows;
        const bool is_shared =
            i > 0 && copy->amax_step == 0 && !copy->is_hadamard && figures->amax_rowwise == NULL;
        if (given == NULL && !is_shared) {
            TRY(amax_group(copy, &job->spec, true, copy->amax_step, copy->amax, group, execution, error));
        } else {
            TRY(queue_copy(given != NULL ? given : job->copy[0].amax, copy->amax,
                           (size_t)count * sizeof *copy->amax, execution, error));
        }
    }
    return OPAQ_OK;
}

/* A copy by itself. */
static enum opaq_status quantize_copy(const struct quant_arguments *arguments,
                                      const struct opaq_execution *execution, struct opaq_error *error) {
    const enum opaq_format format = (enum opaq_format)arguments->job.spec.format;
    const struct quant_matrix *operand = &arguments->copy.operand;
    if (operand->rows == 0 || (operand->columns == 0 && format != OPAQ_FP8ROW)) {
        return OPAQ_OK;
    }
    if (takes_rows(&arguments->job, &arguments->copy)) {
        return quantize_rows(arguments, execution, error);
    }
    switch (format) {
    case OPAQ_FP8:
        return encode_fp8_tensor(arguments, execution, error);
    case OPAQ_FP8ROW:
    case OPAQ_FP8BLK1:
    case OPAQ_FP8BLK2:
        return quantize_fp8_blocks(arguments, execution, error);
    case OPAQ_MXFP8:
    case OPAQ_MXFP4:
    case OPAQ_NVFP4:
        break;
    }
    return quantize_small_blocks(arguments, execution, error);
}

enum opaq_status quantize_group(const struct quant_job *job, const struct quantize_figures *figures,
                                const struct group_part *group, const struct opaq_execution *execution,
                                struct opaq_error *error) {
    struct quant_arguments arguments;
    bool has_only_rows = true;
    for (int i = 0; i < job->copy_count; ++i) {
        has_only_rows = has_only_rows && takes_rows(job, &job->copy[i]);
    }
    const bool is_tiled = !has_only_rows && group->first == NULL && takes_tiles(job);
    memset(&arguments, 0, sizeof arguments);
    arguments.job = *job;
    arguments.group = *group;
    arguments.random = figures->random;
    for (int i = 0; i < job->copy_count; ++i) {
        TRY(clear_copy(&job->copy[i], is_tiled || takes_rows(job, &job->copy[i]), group, execution, error));
    }
    if (job->spec.format == OPAQ_FP8) {
        arguments.copy = job->copy[0];
        TRY(settle_fp8(job, figures, &arguments, execution, error));
    } else if (job->spec.format == OPAQ_NVFP4) {
        TRY(settle_nvfp4(job, figures, group, execution, error));
    }
    if (is_tiled) {
        TRY(quantize_tiles(&arguments, job, execution, error));
    }
    for (int i = 0; i < job->copy_count && !is_tiled; ++i) {
        arguments.copy = job->copy[i];
        TRY(quantize_copy(&arguments, execution, error));
    }
    return job->spec.format == OPAQ_FP8
               ? finish_fp8_tensor(&arguments, (float *)job->copy[0].scale, figures->amax, execution, error)
               : OPAQ_OK;
}

enum opaq_status cuda_quantize(const struct quant_job *job, const struct quantize_figures *figures,
                               const struct opaq_execution *execution, struct opaq_error *error) {
    const struct group_part all = {NULL, 0};
    return quantize_group(job, figures, &all, execution, error);
}
