/* cuda/moe/route.cu: which rows belong to which group. Of few slots one block sorts all; otherwise a block of threads for each group
 * reads all slots. So their order is kept whatever runs first. A device cannot report: slots with an id out of range, and splits beyond the rows, are
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
    __shared__ int64_t sums[2][THREADS];
    const int thread = (int)threadIdx.x;
    int from = 0;
    __syncthreads(); /* all threads have read the previous call's sums */
    sums[from][thread] = value;
    __syncthreads();
    for (int step = 1; step < THREADS; step *= 2) {
        sums[1 - from][thread] = sums[from][thread] + (thread >= step ? sums[from][thread - step] : 0);
        from = 1 - from;
        __syncthreads();
    }
    *before = sums[from][thread] - value;
    return sums[from][THREADS - 1];
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

/* Converts sizes to offsets, in one block. */
static __global__ void __launch_bounds__(THREADS) add_counts_kernel(struct route_arguments arguments) {
    const struct row_groups *groups = &arguments.job.groups;
    int64_t total = 0;
    for (int64_t begin = 0; begin < groups->count; begin += THREADS) {
        const int64_t e = begin + threadIdx.x;
        const int64_t count = e < groups->count ? groups->first[e + 1] : 0;
        int64_t before;
        const int64_t sum = block_sum(count, &before);
        if (e < groups->count) {
            groups->first[e + 1] = total + before + count;
        }
        total += sum;
    }
    if (threadIdx.x == 0) {
        groups->first[0] = 0;
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

/* Slots for which one block does everything. Few on an emulated GPU, so that the other kernels run too. */
#if defined(OPAQ_CUDA_EMULATION)
enum { FEW_SLOTS = 16 };
#else
enum { FEW_SLOTS = 512 };
#endif

/* A thread counts and places the slots of one group, then of one THREADS further. */
static __global__ void __launch_bounds__(THREADS) route_few_kernel(struct route_arguments arguments) {
    __shared__ int group_of[FEW_SLOTS];
    const struct route_job *job = &arguments.job;
    const struct row_groups *groups = &job->groups;
    const struct quant_matrix weights = {
        job->weights.data, (enum opaq_element)job->weights.dtype, 1, groups->rows, 0, 1};
    const int slots = (int)groups->rows;
    int64_t total = 0;
    for (int s = (int)threadIdx.x; s < slots; s += THREADS) {
        group_of[s] = (int)route_group(job, tensor_integer(&job->ids, s));
        groups->weight[s] = matrix_at(&weights, tensor_offset(&job->weights, s));
    }
    __syncthreads();
    for (int64_t begin = 0; begin < groups->count; begin += THREADS) {
        const int64_t e = begin + threadIdx.x;
        const bool is_group = e < groups->count;
        int count = 0;
        for (int s = 0; s < slots; ++s) {
            count += is_group && group_of[s] == e ? 1 : 0;
        }
        int64_t before;
        const int64_t sum = block_sum(count, &before);
        if (is_group) {
            groups->first[e + 1] = total + before + count;
        }
        int64_t next = total + before;
        for (int s = 0; count > 0 && s < slots; ++s) {
            if (group_of[s] == e) {
                groups->slot[next++] = s;
            }
        }
        total += sum;
    }
    if (threadIdx.x == 0) {
        groups->first[0] = 0;
    }
}

enum opaq_status cuda_route(const struct route_job *job, const struct opaq_execution *execution,
                            struct opaq_error *error) {
    const struct route_arguments arguments = {*job};
    const int64_t blocks = blocks_for(job->groups.count, 1);
    if (job->groups.rows <= FEW_SLOTS && job->groups.count <= INT32_MAX) {
        return launch("route_few", route_few_kernel, 1, THREADS, arguments, execution, error);
    }
    TRY(launch("load_weights", load_weights_kernel, blocks_for(job->groups.rows, THREADS), THREADS, arguments,
               execution, error));
    TRY(launch("count_slots", count_slots_kernel, blocks, THREADS, arguments, execution, error));
    TRY(launch("add_counts", add_counts_kernel, 1, THREADS, arguments, execution, error));
    return launch("place_slots", place_slots_kernel, blocks, THREADS, arguments, execution, error);
}

struct split_arguments {
    struct split_job job;
};

/* In one block. Sizes are at most what the rows leave. */
static __global__ void __launch_bounds__(THREADS) split_kernel(struct split_arguments arguments) {
    const struct row_groups *groups = &arguments.job.groups;
    int64_t total = 0;
    for (int64_t begin = 0; begin < groups->count; begin += THREADS) {
        const int64_t e = begin + threadIdx.x;
        const int64_t split = e < groups->count ? tensor_integer(&arguments.job.splits, e) : 0;
        const int64_t size = max_int64(0, min_int64(split, groups->rows));
        int64_t before;
        const int64_t sum = block_sum(size, &before);
        if (e < groups->count) {
            groups->first[e + 1] = min_int64(total + before + size, groups->rows);
        }
        total = min_int64(total + sum, groups->rows);
    }
    if (threadIdx.x == 0) {
        groups->first[0] = 0;
    }
}

enum opaq_status cuda_split(const struct split_job *job, const struct opaq_execution *execution,
                            struct opaq_error *error) {
    const struct split_arguments arguments = {*job};
    return launch("split", split_kernel, 1, THREADS, arguments, execution, error);
}
