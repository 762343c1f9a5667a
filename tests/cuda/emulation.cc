/* emulation.cc: the emulated GPU of cuda_runtime.h. */
#include "emulation.h"

#include <stdio.h>
#include <stdlib.h>

#include "base/fp_environment.h"
#include "cuda_runtime.h"

thread_local emulation_index threadIdx, blockIdx, blockDim, gridDim;

/* ---- fibers ---- */

enum { STACK_BYTES = 128 << 10, THREAD_LIMIT = 1024, LANES = 32, EXCHANGED_WORDS = 6, COPY_LIMIT = 64 };

#if defined(__x86_64__)
/* Saves the callee-saved registers on this stack and continues where the other fiber was left. */
extern "C" void emulation_switch(void **save, void *load);
__asm__(".text\n"
        ".globl emulation_switch\n"
        ".hidden emulation_switch\n"
        "emulation_switch:\n"
        "  pushq %rbp\n  pushq %rbx\n  pushq %r12\n  pushq %r13\n  pushq %r14\n  pushq %r15\n"
        "  movq %rsp, (%rdi)\n"
        "  movq %rsi, %rsp\n"
        "  popq %r15\n  popq %r14\n  popq %r13\n  popq %r12\n  popq %rbx\n  popq %rbp\n"
        "  ret\n");

struct fiber {
    void *stack_pointer;
};

static void fiber_make(fiber *fiber, char *stack, void (*start)(void)) {
    void **top = (void **)(stack + STACK_BYTES);
    *--top = NULL; /* alignment: where a return address would be */
    *--top = (void *)start;
    for (int i = 0; i < 6; ++i) {
        *--top = NULL;
    }
    fiber->stack_pointer = top;
}

static void fiber_switch(fiber *from, fiber *to) { emulation_switch(&from->stack_pointer, to->stack_pointer); }
#else
#include <ucontext.h>

struct fiber {
    ucontext_t context;
};

static void fiber_make(fiber *fiber, char *stack, void (*start)(void)) {
    (void)getcontext(&fiber->context);
    fiber->context.uc_stack.ss_sp = stack;
    fiber->context.uc_stack.ss_size = STACK_BYTES;
    fiber->context.uc_link = NULL;
    makecontext(&fiber->context, start, 0);
}

static void fiber_switch(fiber *from, fiber *to) { (void)swapcontext(&from->context, &to->context); }
#endif

/* ---- a block ---- */

enum state { READY, AT_BLOCK, AT_WARP, DONE };

struct pending_copy {
    void *to;
    const void *from;
    unsigned bytes, group;
};

struct emulated_block {
    fiber scheduler;
    fiber fibers[THREAD_LIMIT];
    enum state state[THREAD_LIMIT];
    const void *place[THREAD_LIMIT];
    uint32_t given[THREAD_LIMIT][EXCHANGED_WORDS], published[THREAD_LIMIT][EXCHANGED_WORDS];
    pending_copy copies[THREAD_LIMIT][COPY_LIMIT];
    unsigned copy_count[THREAD_LIMIT], copy_groups[THREAD_LIMIT]; /* groups that have ended */
    unsigned threads, running;
    bool is_reversed; /* threads run from the last to the first */
    void (*call)(const void *context);
    const void *context;
    char *stacks, *memory; /* dynamic shared memory */
    unsigned memory_bytes;
};

static thread_local emulated_block *block;

static void stop(const char *what) {
    fprintf(stderr, "emulated GPU: block %u of %u, %u threads: %s\n", blockIdx.x, gridDim.x, blockDim.x, what);
    abort();
}

static void yield(enum state state, const void *place) {
    const unsigned self = block->running;
    block->state[self] = state;
    block->place[self] = place;
    fiber_switch(&block->fibers[self], &block->scheduler);
}

static void start_thread(void) {
    block->call(block->context);
    if (block->copy_count[block->running] > 0) {
        stop("a thread has left the kernel before its copies were made");
    }
    yield(DONE, NULL);
}

void emulation_wait_block(const void *place) { yield(AT_BLOCK, place); }

void emulation_wait_warp(void) { yield(AT_WARP, NULL); }

void *emulation_dynamic_memory(void) { return block->memory; }

unsigned emulation_lane(void) { return block->running % LANES; }

uint32_t emulation_exchange(uint32_t word, unsigned from) {
    const unsigned first = block->running / LANES * LANES;
    block->given[block->running][0] = word;
    yield(AT_WARP, NULL);
    return block->published[first + from % LANES][0];
}

/* ---- tensor cores and asynchronous copies ---- */

static float half_value(uint32_t word, unsigned half) {
    const uint32_t bits = (word >> 16 * half) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

/* Row `row` of a (first 0) or column `row` of b (first 4), from the words that the lanes gave. */
static void gather(const uint32_t (*lanes)[EXCHANGED_WORDS], unsigned row, unsigned first, double values[16]) {
    for (unsigned j = 0; j < 4; ++j) {
        const uint32_t *words = lanes[row % 8 * 4 + j] + first + row / 8;
        const unsigned step = first == 0 ? 2 : 1; /* from a row's columns 2 j, 2 j + 1 to 8 + 2 j, 9 + 2 j */
        for (unsigned half = 0; half < 2; ++half) {
            values[2 * j + half] = (double)half_value(words[0], half);
            values[8 + 2 * j + half] = (double)half_value(words[step], half);
        }
    }
}

void emulation_mma(float sums[4], const uint32_t a[4], const uint32_t b[2]) {
    const unsigned self = block->running;
    const unsigned lane = self % LANES;
    double rows[2][16];
    double columns[2][16];
    memcpy(block->given[self], a, 4 * sizeof *a);
    memcpy(block->given[self] + 4, b, 2 * sizeof *b);
    yield(AT_WARP, NULL);
    const uint32_t(*const lanes)[EXCHANGED_WORDS] = block->published + self / LANES * LANES;
    for (unsigned i = 0; i < 2; ++i) {
        gather(lanes, lane / 4 + 8 * i, 0, rows[i]);
        gather(lanes, lane % 4 * 2 + i, 4, columns[i]);
    }
    for (unsigned i = 0; i < 4; ++i) {
        double sum = (double)sums[i];
        for (unsigned k = 0; k < 16; ++k) {
            sum += rows[i / 2][k] * columns[i % 2][k];
        }
        sums[i] = (float)sum;
    }
}

static uint32_t half_multiply(uint32_t a, uint32_t b, unsigned half) {
    const float product = half_value(a, half) * half_value(b, half); /* exact, unless it is subnormal */
    uint32_t bits;
    memcpy(&bits, &product, sizeof bits);
    return product != product ? 0x7FFF : (bits + 0x7FFF + ((bits >> 16 & 1))) >> 16;
}

uint32_t emulation_pair_multiply(uint32_t a, uint32_t b) {
    return half_multiply(a, b, 1) << 16 | half_multiply(a, b, 0);
}

void emulation_copy_async(void *to, const void *from, unsigned bytes) {
    unsigned *count = &block->copy_count[block->running];
    if ((uintptr_t)to % bytes != 0 || (uintptr_t)from % bytes != 0 || *count == COPY_LIMIT) {
        stop("an asynchronous copy is not aligned, or there are too many");
    }
    block->copies[block->running][(*count)++] = {to, from, bytes, block->copy_groups[block->running]};
}

void emulation_copy_end_group(void) { ++block->copy_groups[block->running]; }

void emulation_copy_wait(unsigned groups) {
    const unsigned self = block->running;
    unsigned left = 0;
    for (unsigned i = 0; i < block->copy_count[self]; ++i) {
        const pending_copy copy = block->copies[self][i];
        if (copy.group + groups < block->copy_groups[self]) {
            memcpy(copy.to, copy.from, copy.bytes);
        } else {
            block->copies[self][left++] = copy;
        }
    }
    block->copy_count[self] = left;
}

/* Whether threads [first, end) all wait in `state`; ends the process if they never will. */
static bool all_wait(unsigned first, unsigned end, enum state state) {
    unsigned waiting = 0;
    unsigned done = 0;
    bool is_one_place = true;
    for (unsigned i = first; i < end; ++i) {
        waiting += block->state[i] == state;
        done += block->state[i] == DONE;
        is_one_place = is_one_place && block->place[i] == block->place[first];
    }
    if (waiting > 0 && done > 0 && waiting + done == end - first) {
        stop("a thread has left the kernel while others wait for it");
    }
    if (waiting == end - first && !is_one_place) {
        stop("threads wait at different places");
    }
    return waiting == end - first;
}

static bool release(void) {
    bool released = false;
    for (unsigned first = 0; first < block->threads; first += LANES) {
        const unsigned end = first + LANES < block->threads ? first + LANES : block->threads;
        if (all_wait(first, end, AT_WARP)) {
            for (unsigned i = first; i < end; ++i) {
                memcpy(block->published[i], block->given[i], sizeof block->given[i]);
                block->state[i] = READY;
            }
            released = true;
        }
    }
    if (all_wait(0, block->threads, AT_BLOCK)) {
        for (unsigned i = 0; i < block->threads; ++i) {
            block->state[i] = READY;
        }
        released = true;
    }
    return released;
}

static void run_block(void) {
    unsigned left = block->threads;
    memset(block->memory, 0xFF, block->memory_bytes);
    for (unsigned i = 0; i < block->threads; ++i) {
        fiber_make(&block->fibers[i], block->stacks + (size_t)i * STACK_BYTES, start_thread);
        block->state[i] = READY;
    }
    for (;;) {
        bool has_run = false;
        for (unsigned turn = 0; turn < block->threads; ++turn) {
            const unsigned i = block->is_reversed ? block->threads - 1 - turn : turn;
            if (block->state[i] == READY) {
                block->running = i;
                threadIdx.x = i;
                fiber_switch(&block->scheduler, &block->fibers[i]);
                left -= block->state[i] == DONE;
                has_run = true;
            }
        }
        if (left == 0) {
            return;
        }
        if (!release() && !has_run) {
            stop("threads wait for one another");
        }
    }
}

static void need_device(const char *what);

static void nothing(void) {}
static void (*enter_memory)(void) = nothing;
static void (*leave_memory)(void) = nothing;

void emulation_set_hooks(void (*enter)(void), void (*leave)(void)) {
    enter_memory = enter;
    leave_memory = leave;
}

static long kernels;

long emulation_kernels(void) { return __atomic_load_n(&kernels, __ATOMIC_RELAXED); }

/* One per host thread, freed with it. */
struct block_owner {
    emulated_block *owned = NULL;
    ~block_owner() {
        if (owned != NULL) {
            free(owned->stacks);
            free(owned->memory);
            free(owned);
        }
    }
};
static thread_local block_owner owner;

enum { SHARED_MEMORY_DEFAULT = 48 << 10, SHARED_MEMORY_LIMIT = 163 << 10 };
static unsigned allowed_memory = SHARED_MEMORY_DEFAULT; /* of all kernels, unlike a GPU's */

cudaError_t emulation_allow_shared_memory(unsigned bytes) {
    if (bytes > SHARED_MEMORY_LIMIT) {
        return cudaErrorInvalidValue;
    }
    if (bytes > __atomic_load_n(&allowed_memory, __ATOMIC_RELAXED)) {
        __atomic_store_n(&allowed_memory, bytes, __ATOMIC_RELAXED);
    }
    return cudaSuccess;
}

void emulation_run(unsigned blocks, unsigned threads, unsigned memory, void (*call)(const void *context),
                   const void *context) {
    if (owner.owned == NULL) {
        owner.owned = (emulated_block *)calloc(1, sizeof *owner.owned);
        owner.owned->stacks = (char *)aligned_alloc(4096, (size_t)THREAD_LIMIT * STACK_BYTES);
        owner.owned->memory = (char *)aligned_alloc(4096, SHARED_MEMORY_LIMIT / 4096 * 4096 + 4096);
    }
    block = owner.owned;
    need_device("a kernel");
    if (threads == 0 || threads > THREAD_LIMIT || blocks == 0) {
        stop("the grid is empty or has too many threads");
    }
    if (memory > __atomic_load_n(&allowed_memory, __ATOMIC_RELAXED)) {
        stop("more shared memory than has been allowed");
    }
    block->memory_bytes = memory;
    /* every second kernel runs backwards, so that one that depends on the order gives other bytes */
    block->is_reversed = __atomic_add_fetch(&kernels, 1, __ATOMIC_RELAXED) % 2 == 0;
    block->threads = threads;
    block->call = call;
    block->context = context;
    blockDim.x = threads;
    gridDim.x = blocks;
    const uint64_t saved = fp_environment_enter(); /* a GPU ignores the caller's rounding mode */
    enter_memory();
    for (unsigned turn = 0; turn < blocks; ++turn) {
        blockIdx.x = block->is_reversed ? blocks - 1 - turn : turn;
        run_block();
    }
    leave_memory();
    fp_environment_leave(saved);
}

/* ---- the runtime's functions ---- */

enum { DEVICE_LIMIT = 16, NEEDED_DRIVER = 13000 };

static struct {
    int driver, count;
    int capabilities[DEVICE_LIMIT];
} machine = {NEEDED_DRIVER, 2, {90, 90}};

void emulation_set_machine(int driver, const int *capabilities, int count) {
    machine.driver = driver;
    machine.count = count < DEVICE_LIMIT ? count : DEVICE_LIMIT;
    for (int i = 0; i < machine.count; ++i) {
        machine.capabilities[i] = capabilities[i];
    }
}

cudaError_t cudaGetDeviceCount(int *count) {
    *count = 0;
    if (machine.driver < NEEDED_DRIVER) {
        return cudaErrorInsufficientDriver;
    }
    *count = machine.count;
    return machine.count == 0 ? cudaErrorNoDevice : cudaSuccess;
}

/* The tests' tensors are on device 0. A thread begins with another one, and stops if work is given to that. */
static thread_local int current_device = 1;

static void need_device(const char *what) {
    if (current_device != 0) {
        fprintf(stderr, "emulated GPU: %s while device %d is current, which is not that of the tensors\n", what,
                current_device);
        abort();
    }
}

cudaError_t cudaGetDevice(int *device) {
    *device = current_device;
    return cudaSuccess;
}

cudaError_t cudaSetDevice(int device) {
    if (device < 0 || device >= machine.count) {
        return cudaErrorInvalidDevice;
    }
    current_device = device;
    return cudaSuccess;
}

cudaError_t cudaDeviceGetAttribute(int *value, cudaDeviceAttr attribute, int device) {
    if (device < 0 || device >= machine.count) {
        return cudaErrorInvalidDevice;
    }
    const int capability = machine.capabilities[device];
    switch (attribute) {
    case cudaDevAttrComputeCapabilityMajor:
        *value = capability / 10;
        break;
    case cudaDevAttrComputeCapabilityMinor:
        *value = capability % 10;
        break;
    case cudaDevAttrMaxSharedMemoryPerBlockOptin:
        *value = SHARED_MEMORY_LIMIT;
        break;
    }
    return cudaSuccess;
}

cudaError_t cudaDriverGetVersion(int *version) {
    *version = machine.driver;
    return cudaSuccess;
}

cudaError_t cudaRuntimeGetVersion(int *version) {
    *version = NEEDED_DRIVER;
    return cudaSuccess;
}

const char *cudaGetErrorString(cudaError_t error) {
    return error == cudaErrorInvalidValue    ? "invalid argument"
           : error == cudaErrorInvalidDevice ? "invalid device ordinal"
           : error == cudaErrorNoDevice      ? "no CUDA-capable device is detected"
                                             : "an error of the emulated GPU";
}

static thread_local bool is_captured;
static thread_local cudaStreamCaptureMode capture_mode;

void emulation_capture(int is_capturing) { is_captured = is_capturing != 0; }

/* `what` is not work for a stream, so a graph cannot hold it. */
static void refuse_capture(const char *what) {
    if (is_captured) {
        fprintf(stderr, "emulated GPU: %s while a CUDA graph is captured\n", what);
        abort();
    }
}

cudaError_t cudaThreadExchangeStreamCaptureMode(cudaStreamCaptureMode *mode) {
    const cudaStreamCaptureMode before = capture_mode;
    capture_mode = *mode;
    *mode = before;
    return cudaSuccess;
}

cudaError_t cudaStreamIsCapturing(cudaStream_t stream, cudaStreamCaptureStatus *status) {
    (void)stream;
    need_device("a question about a stream");
    *status = is_captured ? cudaStreamCaptureStatusActive : cudaStreamCaptureStatusNone;
    return cudaSuccess;
}

cudaError_t cudaMalloc(void **memory, size_t bytes) {
    refuse_capture("an allocation");
    need_device("an allocation");
    *memory = aligned_alloc(256, (bytes + 255) / 256 * 256);
    return *memory == NULL ? cudaErrorMemoryAllocation : cudaSuccess;
}

cudaError_t cudaFree(void *memory) {
    refuse_capture("freeing memory");
    free(memory);
    return cudaSuccess;
}

cudaError_t cudaMemsetAsync(void *memory, int value, size_t bytes, cudaStream_t stream) {
    (void)stream;
    need_device("a fill");
    enter_memory();
    memset(memory, value, bytes);
    leave_memory();
    return cudaSuccess;
}

cudaError_t cudaMemcpyAsync(void *to, const void *from, size_t bytes, cudaMemcpyKind kind,
                            cudaStream_t stream) {
    (void)stream;
    need_device("a copy");
    if (kind != cudaMemcpyDeviceToDevice) {
        refuse_capture("a copy to the host");
    }
    enter_memory();
    memmove(to, from, bytes);
    leave_memory();
    return cudaSuccess;
}

cudaError_t cudaStreamSynchronize(cudaStream_t stream) {
    refuse_capture("waiting");
    need_device("waiting");
    (void)stream;
    return cudaSuccess;
}
