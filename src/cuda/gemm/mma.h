/* cuda/gemm/mma.h: the GPU's instructions that C++ has no words for, as functions: matrix multiply-accumulate of bf16,
 * asynchronous copies to shared memory, pairs of bf16 in one word. Inline PTX for nvcc, every instruction of which compute_80
 * has; functions of tests/cuda on the emulated GPU. Depends on the CUDA runtime. */
#ifndef OPAQ_CUDA_GEMM_MMA_H
#define OPAQ_CUDA_GEMM_MMA_H

#include "cuda/cuda_device.h"

#if defined(__CUDACC__)

/* sums (16 x 8) += a (16 x 16) b (16 x 8), by a whole warp. With g = lane / 4 and j = lane % 4, a lane's words hold two values each:
 *     a[0]: row g, columns 2j and 2j + 1;  a[1]: row g + 8;  a[2] and a[3]: the same rows, columns 8 + 2j and 9 + 2j
 *     b[0]: column g, rows 2j and 2j + 1;  b[1]: rows 8 + 2j and 9 + 2j
 *     sums[0], sums[1]: row g, columns 2j and 2j + 1;  sums[2], sums[3]: row g + 8 */
static __device__ __forceinline__ void mma_bf16(float sums[4], const uint32_t a[4], const uint32_t b[2]) {
    asm("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, "
        "{%0,%1,%2,%3};"
        : "+f"(sums[0]), "+f"(sums[1]), "+f"(sums[2]), "+f"(sums[3])
        : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b[0]), "r"(b[1]));
}

/* Starts a copy of 16 bytes from global to shared memory, both aligned to 16. */
static __device__ __forceinline__ void copy_async(void *to, const void *from) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}

/* The same from memory that is read once: the rest of its 128 bytes will be needed soon. */
static __device__ __forceinline__ void copy_async_once(void *to, const void *from) {
    asm volatile(
        "cp.async.cg.shared.global.L2::128B [%0], [%1], 16;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
        "l"(from)
        : "memory");
}

/* Starts a copy of four bytes. */
static __device__ __forceinline__ void copy_async_word(void *to, const void *from) {
    asm volatile("cp.async.ca.shared.global [%0], [%1], 4;" ::"r"((uint32_t)__cvta_generic_to_shared(to)),
                 "l"(from)
                 : "memory");
}

/* Ends a group: the thread's copies since the last one. */
static __device__ __forceinline__ void copy_async_end_group(void) {
    asm volatile("cp.async.commit_group;" ::: "memory");
}

/* Waits for the thread's own copies, except those of the last GROUPS groups. */
template <int GROUPS> static __device__ __forceinline__ void copy_async_wait(void) {
    asm volatile("cp.async.wait_group %0;" ::"n"(GROUPS) : "memory");
}

/* Waits for all lanes of the warp, whose accesses to memory before are then seen by all. */
static __device__ __forceinline__ void warp_wait(void) { __syncwarp(); }

/* The shared memory of a block whose size the launch states, aligned to 16 bytes. */
static __device__ __forceinline__ uint8_t *dynamic_shared_memory(void) {
    extern __shared__ uint4 dynamic_memory[];
    return (uint8_t *)dynamic_memory;
}

/* Each half of a times that of b: one rounding, subnormal numbers kept. (A product plus -0, because sm_80 has no bf16 product.) */
static __device__ __forceinline__ uint32_t pair_multiply(uint32_t a, uint32_t b) {
    uint32_t product;
    asm("fma.rn.bf16x2 %0, %1, %2, %3;" : "=r"(product) : "r"(a), "r"(b), "r"(0x80008000u));
    return product;
}

/* A half of a word, twice. Written like this it is part of the instruction that uses it. */
static __device__ __forceinline__ uint32_t low_twice(uint32_t word) {
    uint32_t twice;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {low, low}; }" : "=r"(twice) : "r"(word));
    return twice;
}

static __device__ __forceinline__ uint32_t high_twice(uint32_t word) {
    uint32_t twice;
    asm("{ .reg .b16 low, high; mov.b32 {low, high}, %1; mov.b32 %0, {high, high}; }"
        : "=r"(twice)
        : "r"(word));
    return twice;
}

/* Four bytes of a (0 to 3) and b (4 to 7), as the digits of `selector` say, the lowest first. */
static __device__ __forceinline__ uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    return __byte_perm(a, b, selector);
}

/* 16 and 8 bytes of global memory that nothing writes while the kernel runs. */
static __device__ __forceinline__ void load_four(const void *from, uint32_t words[4]) {
    const uint4 four = __ldg((const uint4 *)from);
    words[0] = four.x;
    words[1] = four.y;
    words[2] = four.z;
    words[3] = four.w;
}

static __device__ __forceinline__ void load_two(const void *from, uint32_t words[2]) {
    const uint2 two = __ldg((const uint2 *)from);
    words[0] = two.x;
    words[1] = two.y;
}

static __device__ __forceinline__ uint32_t load_byte(const uint8_t *from) { return __ldg(from); }

#else /* tests/cuda/cuda_runtime.h */

#define __forceinline__ inline

static inline void mma_bf16(float sums[4], const uint32_t a[4], const uint32_t b[2]) {
    emulation_mma(sums, a, b);
}

static inline void copy_async(void *to, const void *from) { emulation_copy_async(to, from, 16); }
static inline void copy_async_once(void *to, const void *from) { emulation_copy_async(to, from, 16); }
static inline void copy_async_word(void *to, const void *from) { emulation_copy_async(to, from, 4); }
static inline void copy_async_end_group(void) { emulation_copy_end_group(); }
template <int GROUPS> static inline void copy_async_wait(void) { emulation_copy_wait(GROUPS); }
static inline void warp_wait(void) { emulation_wait_warp(); }
static inline uint8_t *dynamic_shared_memory(void) { return (uint8_t *)emulation_dynamic_memory(); }
static inline uint32_t pair_multiply(uint32_t a, uint32_t b) { return emulation_pair_multiply(a, b); }

static inline uint32_t low_twice(uint32_t word) { return word << 16 | (word & 0xFFFFu); }
static inline uint32_t high_twice(uint32_t word) { return (word & 0xFFFF0000u) | word >> 16; }

static inline void load_four(const void *from, uint32_t words[4]) { memcpy(words, from, 4 * sizeof *words); }
static inline void load_two(const void *from, uint32_t words[2]) { memcpy(words, from, 2 * sizeof *words); }
static inline uint32_t load_byte(const uint8_t *from) { return *from; }

static inline uint32_t select_bytes(uint32_t a, uint32_t b, uint32_t selector) {
    const uint64_t bytes = (uint64_t)b << 32 | a;
    uint32_t selected = 0;
    for (int i = 0; i < 4; ++i) {
        selected |= (uint32_t)(bytes >> (selector >> 4 * i & 7) * 8 & 0xFF) << 8 * i;
    }
    return selected;
}

#endif

#endif
