/* cuda/quant/amax.cu: the amax of a tensor or of its rows. Partial results are combined by an integer maximum
 * of bits, so their order does not matter. */
#include "cuda/quant/quant_kernels.h"
#include "definition/block_ref.h"

enum { PART = 16 }; /* elements that a thread reads at once: a Hadamard group */

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
    } else if (operand->rows > 0 && operand->columns > 0) {
        if (!copy->is_hadamard && operand->column_step != 1) { /* the same elements in memory order */
            job.copy.operand = quant_matrix_transposed(*operand);
            job.copy.usage = copy->usage == OPAQ_ROWWISE ? OPAQ_COLUMNWISE : OPAQ_ROWWISE;
        }
        const int64_t units = job.copy.operand.rows * ceil_div(job.copy.operand.columns, PART);
        TRY(launch("amax_tensor", amax_tensor_kernel, blocks_for(units, THREADS), THREADS, job, execution,
                   error));
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
