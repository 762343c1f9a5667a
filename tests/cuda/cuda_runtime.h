/* cuda_runtime.h: replaces NVIDIA's header where src/cuda is compiled by a C++ compiler for the host: an
 * emulated GPU that runs a grid block by block, and a block's threads as fibers that switch at __syncthreads
 * and at warp functions. Depends on emulation.cc. It declares only what src/cuda uses.
 *
 * Every second kernel runs its blocks and threads from the last to the first. A kernel in which a thread
 * returns while others wait, or whose threads wait at different places, ends the process with a message: on a
 * GPU that is undefined behaviour. */
#ifndef CUDA_RUNTIME_H
#define CUDA_RUNTIME_H

#include <math.h>
#include <stddef.h>
#include <stdint.h>
#include <string.h>

#define OPAQ_CUDA_EMULATION 1
#define __global__
#define __device__
#define __host__
#define __launch_bounds__(...)
#define __shared__ static thread_local /* blocks run in sequence, on the thread that launches */

struct emulation_index {
    unsigned x;
};
extern thread_local emulation_index threadIdx, blockIdx, blockDim, gridDim;

/* ---- the runtime's functions ---- */

enum cudaError_t {
    cudaSuccess = 0,
    cudaErrorInvalidValue = 1,
    cudaErrorMemoryAllocation = 2,
    cudaErrorInsufficientDriver = 35,
    cudaErrorNoDevice = 100,
    cudaErrorInvalidDevice = 101
};
enum cudaMemcpyKind { cudaMemcpyDeviceToHost = 2, cudaMemcpyDeviceToDevice = 3 };
enum cudaDeviceAttr {
    cudaDevAttrComputeCapabilityMajor = 75,
    cudaDevAttrComputeCapabilityMinor = 76,
    cudaDevAttrMaxSharedMemoryPerBlockOptin = 97
};
enum cudaStreamCaptureMode {
    cudaStreamCaptureModeGlobal,
    cudaStreamCaptureModeThreadLocal,
    cudaStreamCaptureModeRelaxed
};
enum cudaStreamCaptureStatus { cudaStreamCaptureStatusNone, cudaStreamCaptureStatusActive };
typedef struct emulation_stream *cudaStream_t;

cudaError_t cudaGetDeviceCount(int *count);
cudaError_t cudaGetDevice(int *device);
cudaError_t cudaSetDevice(int device);
cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device);
cudaError_t cudaDriverGetVersion(int *version);
cudaError_t cudaRuntimeGetVersion(int *version);
const char *cudaGetErrorString(cudaError_t error);
cudaError_t cudaMalloc(void **memory, size_t bytes);
cudaError_t cudaFree(void *memory);
cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream);
cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind, cudaStream_t stream);
cudaError_t cudaStreamSynchronize(cudaStream_t stream);
cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status);
cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode);

/* ---- threads ---- */

/* Runs call(context) for each thread of each block, with `memory` bytes of dynamic shared memory. */
void emulation_run(unsigned blocks, unsigned threads, unsigned memory, void (*call)(const void *context),
                   const void *context);

template <class Arguments> struct emulation_call {
    void (*kernel)(Arguments);
    const Arguments *arguments;
};

template <class Arguments> void emulation_thread(const void *context) {
    const emulation_call<Arguments> *call = (const emulation_call<Arguments> *)context;
    call->kernel(*call->arguments);
}

template <class Arguments>
cudaError_t emulation_launch(void (*kernel)(Arguments), unsigned blocks, unsigned threads,
                             const Arguments &arguments, unsigned memory) {
    static_assert(sizeof(Arguments) <= 4096, "a kernel's parameters take at most 4 KB");
    const emulation_call<Arguments> call = {kernel, &arguments};
    emulation_run(blocks, threads, memory, emulation_thread<Arguments>, &call);
    return cudaSuccess;
}

/* Shared memory of a block beyond 48 KB must be allowed before, up to what a GPU of compute capability 8.0 has. */
cudaError_t emulation_allow_shared_memory(unsigned bytes);
void *emulation_dynamic_memory(void); /* with bytes that are no numbers when a block begins */

/* Waits for the block; `place` identifies the call. */
void emulation_wait_block(const void *place);
void emulation_wait_warp(void);
/* Passes a word to the warp, waits for its lanes, and returns the word of lane `from`. */
uint32_t emulation_exchange(uint32_t word, unsigned from);
unsigned emulation_lane(void);

#define __syncthreads() emulation_wait_block((const void *)(uintptr_t)__LINE__)

static inline uint32_t __shfl_xor_sync(unsigned mask, uint32_t word, int lanes) {
    (void)mask;
    return emulation_exchange(word, emulation_lane() ^ (unsigned)lanes);
}

static inline float __shfl_sync(unsigned mask, float value, int lane) {
    uint32_t word;
    (void)mask;
    memcpy(&word, &value, sizeof word);
    word = emulation_exchange(word, (unsigned)lane);
    memcpy(&value, &word, sizeof value);
    return value;
}

static inline unsigned atomicMax(unsigned *place, unsigned value) {
    const unsigned before = __atomic_load_n(place, __ATOMIC_RELAXED);
    *place = value > before ? value : before;
    return before;
}

/* ---- tensor cores and asynchronous copies: the functions of cuda/gemm/mma.h ---- */

/* Products are exact and added up in double precision; the sum is rounded to float32 once. A GPU rounds otherwise. */
void emulation_mma(float sums[4], const uint32_t a[4], const uint32_t b[2]);
uint32_t emulation_pair_multiply(uint32_t a, uint32_t b);
/* A copy is made when its thread waits for it, not before. */
void emulation_copy_async(void *to, const void *from, unsigned bytes);
void emulation_copy_end_group(void);
void emulation_copy_wait(unsigned groups); /* except for the last groups */

static inline float __fmaf_rn(float a, float b, float c) { return __builtin_fmaf(a, b, c); }

#endif
