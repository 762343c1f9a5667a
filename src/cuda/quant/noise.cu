/* cuda/quant/noise.cu: a tensor against its quantized form, summed in the CPU's order: in slots of rows, in each of them
 * panels of 32 rows by 256 columns. The sums go to host memory, so this is the one function that waits. */
#include "cuda/cuda_functions.h"
#include "definition/decode_ref.h"

enum { SLOTS = 64, PANEL_ROWS = 32, PANEL_COLUMNS = 256, PART = 16 };

struct noise_arguments {
    struct quant_copy copy; /* its operand is x */
    struct opaq_spec spec;
    struct opaq_noise *slots;
};

static __device__ void add_row(const struct noise_arguments *job, int64_t r, int64_t c, int64_t c_end,
                               struct opaq_noise *sum) {
    for (int64_t part = c; part < c_end; part += PART) {
        float x[PART];
        float q[PART];
        segment_load(&job->copy.operand, r, part, PART, x);
        decode_segment(&job->spec, &job->copy, true, r, part, PART, q);
        for (int i = 0; i < PART && part + i < c_end; ++i) {
            const double value = (double)x[i];
            const double difference = (double)q[i] - value;
            sum->signal += value * value;
            sum->noise += difference * difference;
        }
    }
}

/* A thread for each slot. */
static __global__ void noise_kernel(struct noise_arguments job) {
    const struct quant_matrix *x = &job.copy.operand;
    const int64_t share = ceil_div(x->rows, SLOTS);
    const int64_t slot = thread_index();
    const int64_t row_end = min_int64(x->rows, (slot + 1) * share);
    struct opaq_noise sum = {0.0, 0.0};
    for (int64_t row = slot * share; row < row_end; row += PANEL_ROWS) {
        for (int64_t c = 0; c < x->columns; c += PANEL_COLUMNS) {
            for (int64_t r = row; r < min_int64(row + PANEL_ROWS, row_end); ++r) {
                add_row(&job, r, c, min_int64(c + PANEL_COLUMNS, x->columns), &sum);
            }
        }
    }
    job.slots[slot] = sum;
}

/* The slots' sums in host memory; `memory` holds them on the device. */
static enum opaq_status sum_slots(const struct quant_job *job, struct opaq_noise *memory,
                                  struct opaq_noise slots[SLOTS], const struct opaq_execution *execution,
                                  struct opaq_error *error) {
    const struct noise_arguments arguments = {job->copy[0], job->spec, memory};
    struct device_state saved;
    TRY(launch("noise", noise_kernel, 1, SLOTS, arguments, execution, error));
    TRY(device_enter(execution->device, &saved, error));
    cudaError_t result =
        cudaMemcpyAsync(slots, memory, SLOTS * sizeof *slots, cudaMemcpyDeviceToHost, stream_of(execution));
    result = result == cudaSuccess ? cudaStreamSynchronize(stream_of(execution)) : result;
    device_leave(execution->device, saved);
    return cuda_status(result, "to copy sums to the host", error);
}

enum opaq_status cuda_noise(const struct quant_job *job, struct opaq_noise *noise,
                            const struct opaq_execution *execution, struct opaq_error *error) {
    struct opaq_noise slots[SLOTS];
    cudaStreamCaptureStatus capture = cudaStreamCaptureStatusNone;
    struct device_state saved;
    void *memory;
    *noise = (struct opaq_noise){0.0, 0.0};
    TRY(device_enter(execution->device, &saved, error)); /* the default stream is that of the current device */
    const cudaError_t result = cudaStreamIsCapturing(stream_of(execution), &capture);
    device_leave(execution->device, saved);
    TRY(cuda_status(result, "to measure noise", error));
    if (capture != cudaStreamCaptureStatusNone) { /* waiting would end the capture */
        return opaq_fail(error, OPAQ_ERROR_UNSUPPORTED,
                         "noise is measured on the host, which is not possible while a CUDA graph is captured");
    }
    TRY(cuda_allocate(execution->device, sizeof slots, &memory, error));
    const enum opaq_status status = sum_slots(job, (struct opaq_noise *)memory, slots, execution, error);
    cuda_release(execution->device, memory);
    for (int i = 0; status == OPAQ_OK && i < SLOTS; ++i) {
        noise->signal += slots[i].signal;
        noise->noise += slots[i].noise;
    }
    return status;
}
