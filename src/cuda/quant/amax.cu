/* cuda/quant/amax.cu: the amax of a tensor or of its rows. Partial results are combined by an integer maximum
 * of bits, so their order does not matter. */
#include "cuda/quant/tile_parts.h"

struct amax_arguments {
    struct quant_copy copy;
    struct opaq_spec spec;
    struct group_part group;
    bool is_stored;
    float *amax;
    int64_t count; /* of entries */
};

static __device__ uint32_t part_bits(const struct quant_copy *copy, const struct opaq_spec *spec, uint32_t bits,
                                     int64_t r, int64_t c) {
    float values[PART];
    copy_load(copy, spec, r, c, PART, values);
    return amax_bits(bits, values, PART, spec->rule == OPAQ_RULE_TE);
}

/* One amax for all rows; must be zero before. */
static __global__ void amax_tensor_kernel(struct amax_arguments job) {
    const struct quant_copy copy = copy_of_group(&job.copy, &job.group);
    const int64_t parts = ceil_div(copy.operand.columns, PART);
    uint32_t bits = 0;
    for (int64_t i = thread_index(); i < copy.operand.rows * parts; i += thread_count()) {
        bits = part_bits(&copy, &job.spec, bits, i / parts, i % parts * PART);
    }
    bits = warp_max(bits);
    if (threadIdx.x % WARP == 0 && bits != 0) {
        (void)atomicMax((unsigned *)job.amax, bits);
    }
}

/* The largest of the threads' maxima into the tensor's, which must be zero before. All threads of a warp must call it. */
static __device__ void combine_maxima(uint32_t pair, float *amax) {
    const uint32_t bits = warp_max(magnitude_bits(pair));
    if (threadIdx.x % WARP == 0 && bits != 0) {
        (void)atomicMax((unsigned *)amax, bits);
    }
}

/* The same for x in parts (is_in_parts). */
static __global__ void __launch_bounds__(THREADS) amax_parts_kernel(struct amax_arguments job) {
    const struct quant_matrix &x = job.copy.operand;
    const int64_t rows = rows_of_group(&job.group, x.rows);
    const uint32_t across = (uint32_t)(x.columns / PART);
    const uint32_t count = (uint32_t)(rows * across);
    const bool drop_nan = job.spec.rule == OPAQ_RULE_TE;
    uint32_t pair = 0;
#pragma unroll 4
    for (int64_t i = thread_index(); i < count; i += thread_count()) {
        const uint32_t r = (uint32_t)i / across;
        uint32_t words[PART_WORDS];
        read_part_words((const uint16_t *)x.data + r * x.row_step + ((uint32_t)i - r * across) * PART, words);
        pair = pair_max(pair, pair_magnitudes<PART_WORDS>(words, drop_nan));
    }
    combine_maxima(pair, job.amax);
}

/* The same after the Hadamard transform of x's columns. */
static __global__ void __launch_bounds__(THREADS) amax_hadamard_kernel(struct amax_arguments job) {
    __shared__ struct tile tile;
    const struct quant_matrix x = {job.copy.operand.data,        OPAQ_BF16,
                                   job.copy.operand.columns,     job.copy.operand.rows,
                                   job.copy.operand.column_step, 1};
    const uint32_t count = (uint32_t)(ceil_div(x.rows, TILE) * ceil_div(x.columns, TILE));
    const bool drop_nan = job.spec.rule == OPAQ_RULE_TE;
    uint32_t pair = 0;
    for (uint32_t index = blockIdx.x; index < count; index += gridDim.x) {
        const struct tile_place at = tile_place_of(index, x.columns);
        __syncthreads(); /* all threads have read the previous tile */
#pragma unroll
        for (int pass = 0; pass < PASSES; ++pass) {
            uint32_t words[PART_WORDS];
            (void)load_row_part(&x, at.r + row_of_thread(pass), at.c + part_of_thread() * PART, words);
            write_row_part(&tile, row_of_thread(pass), part_of_thread(), words);
        }
        __syncthreads(); /* the tile is there */
#pragma unroll 1
        for (int pass = 0; pass < COLUMN_PASSES; ++pass) {
            uint32_t words[2][PART_WORDS];
            read_column_parts(&tile, column_part_of_thread<8>(pass), words[0], words[1]);
#pragma unroll
            for (int n = 0; n < 2; ++n) {
                part_hadamard(words[n], job.spec.hadamard_mask);
                pair = pair_max(pair, pair_magnitudes<PART_WORDS>(words[n], drop_nan));
            }
        }
    }
    combine_maxima(pair, job.amax);
}

/* One amax per row, by a warp. */
static __global__ void amax_rows_kernel(struct amax_arguments job) {
    const struct quant_copy copy = copy_of_group(&job.copy, &job.group);
    const int64_t lane = threadIdx.x % WARP;
    for (int64_t r = thread_index() / WARP; r < copy.operand.rows; r += thread_count() / WARP) {
        uint32_t bits = 0;
        for (int64_t c = lane * PART; c < copy.operand.columns; c += WARP * PART) {
            bits = part_bits(&copy, &job.spec, bits, r, c);
        }
        bits = warp_max(bits);
        if (lane == 0) {
            ((uint32_t *)job.amax)[r] = bits;
        }
    }
}

static __global__ void finish_amax_kernel(struct amax_arguments job) {
    for (int64_t i = thread_index(); i < job.count; i += thread_count()) {
        const float amax = amax_from_bits(((const uint32_t *)job.amax)[i]);
        job.amax[i] = job.is_stored ? nvfp4_stored(&job.spec, amax) : amax;
    }
}

/* Whether one of the kernels for parts takes the copy; parts and columns are counted in 32 bits. */
static bool can_read_parts(const struct amax_arguments *job) {
    const struct quant_matrix x = plain_operand(&job->copy);
    return uses_parts() && is_in_parts(&x) && x.columns < PART_COLUMNS_LIMIT &&
           x.rows * (x.columns / PART) < INT32_MAX &&
           (job->group.first == NULL || job->copy.usage == OPAQ_ROWWISE) &&
           !(job->copy.is_hadamard && job->group.first != NULL);
}

static enum opaq_status amax_of_parts(const struct amax_arguments *job, const struct opaq_execution *execution,
                                      struct opaq_error *error) {
    struct amax_arguments parts = *job;
    const struct quant_matrix x = plain_operand(&job->copy);
    if (job->copy.is_hadamard) {
        return launch("amax_hadamard", amax_hadamard_kernel, blocks_for(tile_count(&x), 1), THREADS, *job,
                      execution, error);
    }
    parts.copy.operand = x;
    return launch("amax_parts", amax_parts_kernel, blocks_for(x.rows * (x.columns / PART), THREADS), THREADS,
                  parts, execution, error);
}

enum opaq_status amax_group(const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored,
                            int64_t step, float *amax, const struct group_part *group,
                            const struct opaq_execution *execution, struct opaq_error *error) {
    const struct quant_matrix *operand = &copy->operand;
    struct amax_arguments job = {*copy, *spec, *group, is_stored, amax, step == 0 ? 1 : operand->rows};
    if (job.count == 0) {
        return OPAQ_OK;
    }
    TRY(queue_set(amax, 0, (size_t)job.count * sizeof *amax, execution, error));
    if (operand->rows > 0 && operand->columns > 0 && step != 0) {
        TRY(launch("amax_rows", amax_rows_kernel, blocks_for(operand->rows, THREADS / WARP), THREADS, job,
                   execution, error));
    } else if (operand->rows > 0 && operand->columns > 0 && can_read_parts(&job)) {
        TRY(amax_of_parts(&job, execution, error));
    } else if (operand->rows > 0 && operand->columns > 0) {
        if (!copy->is_hadamard && operand->column_step != 1) { /* the same elements in memory order */
            job.copy.operand = quant_matrix_transposed(*operand);
            job.copy.usage = copy->usage == OPAQ_ROWWISE ? OPAQ_COLUMNWISE : OPAQ_ROWWISE;
        }
        const int64_t units = job.copy.operand.rows * ceil_div(job.copy.operand.columns, PART);
        TRY(launch("amax_tensor", amax_tensor_kernel, blocks_for(units, THREADS), THREADS, job, execution,
                   error));
    }
    if (spec->rule == OPAQ_RULE_TE && !(is_stored && (spec->options & OPAQ_GLOBAL) != 0)) {
        return OPAQ_OK; /* the bits are those of the amax, which is no NaN */
    }
    return launch("finish_amax", finish_amax_kernel, blocks_for(job.count, THREADS), THREADS, job, execution,
                  error);
}

enum opaq_status cuda_amax(const struct quant_copy *copy, const struct opaq_spec *spec, bool is_stored,
                           int64_t step, float *amax, const struct opaq_execution *execution,
                           struct opaq_error *error) {
    const struct group_part all = {NULL, 0};
    return amax_group(copy, spec, is_stored, step, amax, &all, execution, error);
}
