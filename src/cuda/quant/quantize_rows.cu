/* cuda/quant/quantize_rows.cu: rowwise copies of contiguous bf16 rows: a thread for each part of 16 values, which it reads and writes
 * once. Which copies: takes_rows(). The others go to quantize_blocks.cu and quantize_fp8.cu. */
#include "cuda/quant/part_codes.h"

/* ---- one scale for the tensor, or for blocks of 16, 32 or 128 values ---- */

template <int KIND>
static __global__ void __launch_bounds__(THREADS) quantize_rows_kernel(struct quant_arguments arguments) {
    const struct quant_copy copy = copy_of_group(&arguments.copy, &arguments.group);
    const uint32_t across = (uint32_t)(copy.operand.columns / PART);
    const uint32_t count = (uint32_t)copy.operand.rows * across;
    const uint32_t lane = threadIdx.x % WARP;
    const bool drop_nan = arguments.job.spec.rule == OPAQ_RULE_TE;
    const float tensor_apply = KIND == PART_FP8 ? fp8_tensor_scale(&arguments).apply : 0.0f;
    /* the lanes of a warp stay together, because they exchange maxima */
    for (int64_t first = thread_index() - lane; first < count; first += thread_count()) {
        const uint32_t i = (uint32_t)first + lane;
        const bool is_inside = i < count;
        const uint32_t r = is_inside ? i / across : 0;
        const uint32_t c = is_inside ? (i - r * across) * PART : 0;
        uint32_t words[PART_WORDS];
        uint32_t codes[code_words(KIND)];
        read_part_words((const uint16_t *)copy.operand.data + r * copy.operand.row_step + c, words);
        float apply = tensor_apply;
        if constexpr (KIND != PART_FP8) {
            enum { LANES = threads_of_block(KIND) };
            const uint32_t amax =
                neighbours_max<LANES>(magnitude_bits(pair_magnitudes<PART_WORDS>(words, drop_nan)));
            apply = settle_scale<KIND>(&arguments, &copy, r, c, amax, is_inside && lane % LANES == 0);
        }
        part_codes<KIND>(&arguments, &copy, words, r, c, apply, codes);
        if (is_inside) {
            store_part<KIND>(&copy, r, c, codes);
        }
    }
}

/* ---- fp8row: a team of threads for each row, which keeps it in registers ---- */

enum { KEPT = 4, LONG_ROW = WARP * PART * KEPT };

template <int TEAM> static __device__ uint32_t team_max(uint32_t value) {
    __shared__ uint32_t of_warp[THREADS / WARP];
    value = neighbours_max<WARP>(value);
    if constexpr (TEAM > WARP) {
        __syncthreads(); /* all threads have read the previous row's maxima */
        if (threadIdx.x % WARP == 0) {
            of_warp[threadIdx.x / WARP] = value;
        }
        __syncthreads();
        for (int i = 0; i < TEAM / WARP; ++i) {
            value = of_warp[i] > value ? of_warp[i] : value;
        }
    }
    return value;
}

template <int TEAM>
static __global__ void __launch_bounds__(THREADS) quantize_fp8_rows_kernel(struct quant_arguments arguments) {
    const struct quant_copy copy = copy_of_group(&arguments.copy, &arguments.group);
    const int64_t teams = thread_count() / TEAM;
    const int columns = (int)copy.operand.columns;
    const int begin = (int)(threadIdx.x % TEAM) * PART;
    const bool drop_nan = arguments.job.spec.rule == OPAQ_RULE_TE;
    for (int64_t r = thread_index() / TEAM; r < copy.operand.rows; r += teams) {
        const uint16_t *const row = (const uint16_t *)copy.operand.data + r * copy.operand.row_step;
        uint32_t kept[KEPT][PART_WORDS];
        uint32_t bits = 0;
#pragma unroll
        for (int n = 0; n < KEPT; ++n) {
            const int c = begin + n * TEAM * PART;
            if (c < columns) {
                read_part_words(row + c, kept[n]);
                const uint32_t part = magnitude_bits(pair_magnitudes<PART_WORDS>(kept[n], drop_nan));
                bits = part > bits ? part : bits;
            }
        }
        for (int c = begin + KEPT * TEAM * PART; c < columns; c += TEAM * PART) {
            uint32_t words[PART_WORDS];
            read_part_words(row + c, words);
            const uint32_t part = magnitude_bits(pair_magnitudes<PART_WORDS>(words, drop_nan));
            bits = part > bits ? part : bits;
        }
        const struct fp8_scale scale =
            fp8_scale_from_amax(&arguments.job.spec, amax_from_bits(team_max<TEAM>(bits)),
                                fp8_scale_limit(&arguments.job.spec, copy.operand.dtype));
        if (begin == 0) {
            ((float *)copy.scale)[r * copy.scale_layout.row_step] = scale.stored;
        }
        uint32_t codes[code_words(PART_FP8)];
#pragma unroll
        for (int n = 0; n < KEPT; ++n) {
            const int c = begin + n * TEAM * PART;
            if (c < columns) {
                part_codes<PART_FP8>(&arguments, &copy, kept[n], r, c, scale.apply, codes);
                store_part<PART_FP8>(&copy, r, c, codes);
            }
        }
        for (int c = begin + KEPT * TEAM * PART; c < columns; c += TEAM * PART) {
            uint32_t words[PART_WORDS];
            read_part_words(row + c, words);
            part_codes<PART_FP8>(&arguments, &copy, words, r, c, scale.apply, codes);
            store_part<PART_FP8>(&copy, r, c, codes);
        }
    }
}

/* ---- launcher ---- */

bool takes_rows(const struct quant_job *job, const struct quant_copy *copy) {
    const struct quant_matrix *operand = &copy->operand;
    const bool is_whole =
        job->spec.format == OPAQ_FP8 || job->spec.format == OPAQ_FP8ROW; /* one scale for a row or more */
    return copy->usage == OPAQ_ROWWISE && takes_parts(job, copy) && operand->columns > 0 &&
           operand->columns < PART_COLUMNS_LIMIT &&
           (is_whole || (copy->block_rows == 1 && operand->columns % copy->block_columns == 0)) &&
           operand->rows < INT32_MAX && operand->rows * (operand->columns / PART) < INT32_MAX;
}

enum opaq_status quantize_rows(const struct quant_arguments *arguments, const struct opaq_execution *execution,
                               struct opaq_error *error) {
    const struct quant_matrix *operand = &arguments->copy.operand;
    if (arguments->job.spec.format == OPAQ_FP8ROW) {
        const bool is_long = operand->columns > LONG_ROW;
        return launch(
            "quantize_fp8_rows", is_long ? quantize_fp8_rows_kernel<THREADS> : quantize_fp8_rows_kernel<WARP>,
            blocks_for(operand->rows, is_long ? 1 : THREADS / WARP), THREADS, *arguments, execution, error);
    }
    static void (*const kernels[])(struct quant_arguments) = {
        quantize_rows_kernel<PART_FP8>, quantize_rows_kernel<PART_FP8_BLOCK>, quantize_rows_kernel<PART_MX8>,
        quantize_rows_kernel<PART_MX4>, quantize_rows_kernel<PART_NVFP4>};
    return launch("quantize_rows", kernels[part_kind_of(&arguments->job.spec)],
                  blocks_for(operand->rows * (operand->columns / PART), THREADS), THREADS, *arguments,
                  execution, error);
}
