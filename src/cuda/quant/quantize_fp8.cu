/* cuda/quant/quantize_fp8.cu: fp8 (a thread for each element), and fp8row, fp8blk1 and fp8blk2 (a block of threads for each
 * scale). Specification: docs/formats.md. */
#include "cuda/quant/quant_kernels.h"
#include "definition/block_ref.h"

/* ---- one scale for the tensor ---- */

static __global__ void encode_fp8_kernel(struct quant_arguments arguments) {
    const struct quant_copy copy = copy_of_group(&arguments.copy, &arguments.group);
    const struct quant_job job = job_of(&arguments);
    const float apply = fp8_tensor_scale(&arguments).apply;
    const bool along_rows = copy.operand.column_step == 1; /* adjacent threads read adjacent elements */
    const int64_t inner = along_rows ? copy.operand.columns : copy.operand.rows;
    const int64_t count = copy.operand.rows * copy.operand.columns;
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        const int64_t outer = i / inner;
        const int64_t r = along_rows ? outer : i - outer * inner;
        const int64_t c = along_rows ? i - outer * inner : outer;
        encode_fp8_segment(&job, &copy, r, c, 1, apply);
    }
}

enum opaq_status encode_fp8_tensor(const struct quant_arguments *arguments,
                                   const struct opaq_execution *execution, struct opaq_error *error) {
    const struct quant_matrix *operand = &arguments->copy.operand;
    return launch("encode_fp8", encode_fp8_kernel, blocks_for(operand->rows * operand->columns, THREADS),
                  THREADS, *arguments, execution, error);
}

struct finish_arguments {
    struct quant_arguments quant;
    float *amax, *returned;
};

static __global__ void finish_fp8_kernel(struct finish_arguments arguments) {
    const struct fp8_scale scale = fp8_tensor_scale(&arguments.quant);
    if (arguments.returned != NULL) {
        *arguments.returned = *arguments.quant.amax;
    }
    *arguments.amax = scale.stored;
}

enum opaq_status finish_fp8_tensor(const struct quant_arguments *arguments, float *amax, float *returned,
                                   const struct opaq_execution *execution, struct opaq_error *error) {
    const struct finish_arguments job = {*arguments, amax, returned};
    return launch("finish_fp8", finish_fp8_kernel, 1, 1, job, execution, error);
}

/* ---- a scale for each row or block ---- */

enum { BLOCK_THREADS = 128 };

/* The maximum over all threads of a block, in each of them. */
static __device__ uint32_t block_max(uint32_t value) {
    __shared__ uint32_t of_warp[BLOCK_THREADS / WARP];
    const uint32_t largest = warp_max(value);
    __syncthreads(); /* all threads have read the previous call's values */
    if (threadIdx.x % WARP == 0) {
        of_warp[threadIdx.x / WARP] = largest;
    }
    __syncthreads();
    uint32_t all = of_warp[0];
    for (int i = 1; i < BLOCK_THREADS / WARP; ++i) {
        all = of_warp[i] > all ? of_warp[i] : all;
    }
    return all;
}

/* Element i of a block of `rows` x `columns`, in memory order. */
struct place {
    int64_t r, c;
};

static __device__ struct place place_of(int64_t i, int64_t rows, int64_t columns, bool along_rows) {
    return along_rows ? (struct place){i / columns, i % columns} : (struct place){i % rows, i / rows};
}

static __global__ void quantize_fp8_blocks_kernel(struct quant_arguments arguments) {
    const struct quant_copy copy = copy_of_group(&arguments.copy, &arguments.group);
    const struct quant_job job = job_of(&arguments);
    const struct quant_matrix *operand = &copy.operand;
    const bool along_rows = operand->column_step == 1;
    const bool whole_row = job.spec.format == OPAQ_FP8ROW; /* a row without elements still has its scale */
    const int64_t across = max_int64(ceil_div(operand->columns, copy.block_columns), whole_row ? 1 : 0);
    const int64_t blocks = ceil_div(operand->rows, copy.block_rows) * across;
    for (int64_t block = blockIdx.x; block < blocks; block += gridDim.x) {
        const int64_t r = block / across * copy.block_rows;
        const int64_t c = block % across * copy.block_columns;
        const int64_t rows = min_int64(copy.block_rows, operand->rows - r);
        const int64_t columns = min_int64(copy.block_columns, operand->columns - c);
        uint32_t bits = 0;
        for (int64_t i = threadIdx.x; i < rows * columns; i += BLOCK_THREADS) {
            const struct place at = place_of(i, rows, columns, along_rows);
            float value;
            segment_load(operand, r + at.r, c + at.c, 1, &value);
            bits = amax_bits(bits, &value, 1, job.spec.rule == OPAQ_RULE_TE);
        }
        const struct fp8_scale scale = fp8_scale_from_amax(&job.spec, amax_from_bits(block_max(bits)),
                                                           fp8_scale_limit(&job.spec, operand->dtype));
        if (threadIdx.x == 0) {
            ((float *)copy.scale)[scale_index(&copy, r, c)] = scale.stored;
        }
        for (int64_t i = threadIdx.x; i < rows * columns; i += BLOCK_THREADS) {
            const struct place at = place_of(i, rows, columns, along_rows);
            encode_fp8_segment(&job, &copy, r + at.r, c + at.c, 1, scale.apply);
        }
    }
}

enum opaq_status quantize_fp8_blocks(const struct quant_arguments *arguments,
                                     const struct opaq_execution *execution, struct opaq_error *error) {
    const struct quant_copy *copy = &arguments->copy;
    const int64_t blocks = ceil_div(copy->operand.rows, copy->block_rows) *
                           max_int64(1, ceil_div(copy->operand.columns, copy->block_columns));
    return launch("quantize_fp8_blocks", quantize_fp8_blocks_kernel, blocks_for(blocks, 1), BLOCK_THREADS,
                  *arguments, execution, error);
}
