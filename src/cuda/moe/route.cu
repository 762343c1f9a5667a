/* cuda/moe/route.cu: which rows belong to which group. A block of threads for each group reads all slots, so their order is
 * kept whatever runs first. A device cannot report: slots with an id out of range, and splits beyond the rows, are
 * skipped. */
#include "cuda/cuda_functions.h"
#include "definition/segment_ref.h"
#include "definition/sorted_rows.h"

struct route_arguments {
    struct route_job job;
};

static __global__ void load_weights_kernel(struct route_arguments arguments) {
    const struct route_job *job = &arguments.job;
    const struct quant_matrix weights = {
        job->weights.data, (enum opaq_element)job->weights.dtype, 1, job->groups.rows, 0, 1};
    for (int64_t s = thread_index(); s < job->groups.rows; s += thread_count()) {
        job->groups.weight[s] = matrix_at(&weights, tensor_offset(&job->weights, s));
    }
}

/* The sum over all threads of a block, in each of them; *before is the sum of the threads before this one. */
static __device__ int64_t block_sum(int64_t value, int64_t *before) {
    __shared__ int64_t values[THREADS];
    __syncthreads(); /* all threads have read the previous call's values */
    values[threadIdx.x] = value;
    __syncthreads();
    int64_t sum = 0;
    *before = 0;
    for (int i = 0; i < THREADS; ++i) {
        *before += i < (int)threadIdx.x ? values[i] : 0;
        sum += values[i];
    }
    return sum;
}

static __device__ bool is_in_group(const struct route_job *job, int64_t s, int64_t group) {
    return s < job->groups.rows && route_group(job, tensor_integer(&job->ids, s)) == group;
}

/* first[e + 1] = the slots of group e. */
static __global__ void __launch_bounds__(THREADS) count_slots_kernel(struct route_arguments arguments) {
    const struct route_job *job = &arguments.job;
    for (int64_t e = blockIdx.x; e < job->groups.count; e += gridDim.x) {
        int64_t count = 0;
        int64_t before;
        for (int64_t s = threadIdx.x; s < job->groups.rows; s += THREADS) {
            count += is_in_group(job, s, e) ? 1 : 0;
        }
        const int64_t sum = block_sum(count, &before);
        if (threadIdx.x == 0) {
            job->groups.first[e + 1] = sum;
        }
    }
}

/* Converts sizes to offsets, in one thread. */
static __global__ void add_counts_kernel(struct route_arguments arguments) {
    const struct row_groups *groups = &arguments.job.groups;
    groups->first[0] = 0;
    for (int64_t e = 0; e < groups->count; ++e) {
        groups->first[e + 1] += groups->first[e];
    }
}

static __global__ void __launch_bounds__(THREADS) place_slots_kernel(struct route_arguments arguments) {
    const struct route_job *job = &arguments.job;
    for (int64_t e = blockIdx.x; e < job->groups.count; e += gridDim.x) {
        int64_t next = job->groups.first[e];
        for (int64_t begin = 0; begin < job->groups.rows; begin += THREADS) {
            const int64_t s = begin + threadIdx.x;
            const bool is_here = is_in_group(job, s, e);
            int64_t before;
            const int64_t sum = block_sum(is_here ? 1 : 0, &before);
            if (is_here) {
                job->groups.slot[next + before] = s;
            }
            next += sum;
        }
    }
}

enum opaq_status cuda_route(const struct route_job *job, const struct opaq_execution *execution,
                            struct opaq_error *error) {
    const struct route_arguments arguments = {*job};
    const int64_t blocks = blocks_for(job->groups.count, 1);
    if (job->groups.rows > 0) {
        TRY(launch("load_weights", load_weights_kernel, blocks_for(job->groups.rows, THREADS), THREADS,
                   arguments, execution, error));
    }
    TRY(launch("count_slots", count_slots_kernel, blocks, THREADS, arguments, execution, error));
    TRY(launch("add_counts", add_counts_kernel, 1, 1, arguments, execution, error));
    return launch("place_slots", place_slots_kernel, blocks, THREADS, arguments, execution, error);
}

struct split_arguments {
    struct split_job job;
};

static __global__ void split_kernel(struct split_arguments arguments) {
    const struct row_groups *groups = &arguments.job.groups;
    groups->first[0] = 0;
    for (int64_t e = 0; e < groups->count; ++e) {
        const int64_t split = tensor_integer(&arguments.job.splits, e);
        const int64_t left = groups->rows - groups->first[e];
        groups->first[e + 1] = groups->first[e] + max_int64(0, min_int64(split, left));
    }
}

enum opaq_status cuda_split(const struct split_job *job, const struct opaq_execution *execution,
                            struct opaq_error *error) {
    const struct split_arguments arguments = {*job};
    return launch("split", split_kernel, 1, 1, arguments, execution, error);
}
