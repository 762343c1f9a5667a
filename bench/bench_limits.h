/* bench_limits.h: loops that reach the peak rates of one thread: reading memory, copying it, float
 * multiply-adds and byte multiply-adds. Depends on opaq/cpu.h.
 *
 * Each is a function for an opaq_body; the caller computes the rate from the work and the time. */
#ifndef OPAQ_BENCH_BENCH_LIMITS_H
#define OPAQ_BENCH_BENCH_LIMITS_H

#include <stdint.h>
#include <string.h>
#if defined(__SSE2__)
#include <emmintrin.h>
#endif

#include "opaq/cpu.h"

/* ---- reading ---- */

enum { LIMIT_STREAMS = 8, LIMIT_LINE = 64, LIMIT_AHEAD = 512, LIMIT_CHUNK = 8 * 4096 };

struct limit_read {
    const uint8_t *from; /* chunks of LIMIT_CHUNK bytes, each one unit of a piece */
    int streams;         /* LIMIT_STREAMS or half of it */
    _Atomic uint64_t sum;
};

/* Reads a piece in several streams, one word per cache line, with a prefetch some lines ahead. */
static inline void limit_read_piece(void *argument, int64_t begin, int64_t end) {
    struct limit_read *read = argument;
    const uint8_t *from = read->from + begin * LIMIT_CHUNK;
    const int64_t step = (end - begin) * (LIMIT_CHUNK / read->streams);
    uint64_t sum = 0;
    for (int64_t i = 0; i < step; i += LIMIT_LINE) {
        for (int s = 0; s < LIMIT_STREAMS / 2; ++s) {
            const uint8_t *const at = from + s * step + i;
            __builtin_prefetch(at + LIMIT_AHEAD, 0, 2);
            sum += *(const uint64_t *)(const void *)at;
        }
        for (int s = LIMIT_STREAMS / 2; s < read->streams; ++s) {
            const uint8_t *const at = from + s * step + i;
            __builtin_prefetch(at + LIMIT_AHEAD, 0, 2);
            sum += *(const uint64_t *)(const void *)at;
        }
    }
    read->sum += sum;
}

/* ---- copying ---- */

struct limit_copy {
    uint8_t *to; /* aligned to 16 bytes, as is `from`; chunks as above */
    const uint8_t *from;
};

/* Copies with non-temporal stores, which is fastest for blocks larger than the caches. */
static inline void limit_copy_piece(void *argument, int64_t begin, int64_t end) {
    const struct limit_copy *copy = argument;
#if defined(__SSE2__)
    for (int64_t i = begin * LIMIT_CHUNK; i < end * LIMIT_CHUNK; i += LIMIT_LINE) {
        const __m128i *const from = (const __m128i *)(const void *)(copy->from + i);
        __m128i *const to = (__m128i *)(void *)(copy->to + i);
        const __m128i a = _mm_load_si128(from);
        const __m128i b = _mm_load_si128(from + 1);
        const __m128i c = _mm_load_si128(from + 2);
        const __m128i d = _mm_load_si128(from + 3);
        _mm_stream_si128(to, a);
        _mm_stream_si128(to + 1, b);
        _mm_stream_si128(to + 2, c);
        _mm_stream_si128(to + 3, d);
    }
    _mm_sfence();
#else
    memcpy(copy->to + begin * LIMIT_CHUNK, copy->from + begin * LIMIT_CHUNK,
           (size_t)((end - begin) * LIMIT_CHUNK));
#endif
}

/* ---- computing: LIMIT_REPEATS rounds of LIMIT_CHAINS independent instructions for each unit of a piece ---- */

enum { LIMIT_CHAINS = 12, LIMIT_REPEATS = 4000 };

#if defined(__x86_64__)
/* One instruction on twelve registers, repeated; the registers start at zero. */
#define LIMIT_LOOP(name, step)                                                                               \
    static inline void limit_##name(int64_t units) {                                                         \
        int64_t count = units * LIMIT_REPEATS;                                                               \
        __asm__ volatile("vzeroall\n"                                                                        \
                         "1:\n" LIMIT_##step(0) LIMIT_##step(1) LIMIT_##step(2) LIMIT_##step(3)              \
                             LIMIT_##step(4) LIMIT_##step(5) LIMIT_##step(6) LIMIT_##step(7) LIMIT_##step(8) \
                                 LIMIT_##step(9) LIMIT_##step(10) LIMIT_##step(11) "dec %0\n"                \
                                                                                   "jnz 1b\n"                \
                                                                                   "vzeroupper\n"            \
                         : "+r"(count)                                                                       \
                         :                                                                                   \
                         : "cc", "xmm0", "xmm1", "xmm2", "xmm3", "xmm4", "xmm5", "xmm6", "xmm7", "xmm8",     \
                           "xmm9", "xmm10", "xmm11", "xmm12", "xmm13", "xmm14", "xmm15");                    \
    }
#define LIMIT_FMA_512(i) "vfmadd231ps %%zmm14, %%zmm15, %%zmm" #i "\n"
#define LIMIT_FMA_256(i) "vfmadd231ps %%ymm14, %%ymm15, %%ymm" #i "\n"
#define LIMIT_BYTES_512(i) "vpdpbusd %%zmm14, %%zmm15, %%zmm" #i "\n"
#define LIMIT_BYTES_256(i) "vpmaddubsw %%ymm14, %%ymm15, %%ymm" #i "\n"
LIMIT_LOOP(fma_avx512, FMA_512)
LIMIT_LOOP(fma_avx2, FMA_256)
LIMIT_LOOP(bytes_avx512, BYTES_512)
LIMIT_LOOP(bytes_avx2, BYTES_256)
#endif

/* A kind of computation and its operations (multiplications and additions) per unit; 0 if this file has no loop
 * for this machine. */
struct limit_compute {
    void (*run)(int64_t units);
    double operations;
};

static inline struct limit_compute limit_fma(void) {
#if defined(__x86_64__)
    if (opaq_cpu_features() & OPAQ_CPU_AVX512) {
        return (struct limit_compute){limit_fma_avx512, 32.0 * LIMIT_CHAINS * LIMIT_REPEATS};
    }
    if (opaq_cpu_features() & OPAQ_CPU_AVX2) {
        return (struct limit_compute){limit_fma_avx2, 16.0 * LIMIT_CHAINS * LIMIT_REPEATS};
    }
#endif
    return (struct limit_compute){0, 0.0};
}

static inline struct limit_compute limit_bytes(void) {
#if defined(__x86_64__)
    if (opaq_cpu_features() & OPAQ_CPU_AVX512_VNNI) {
        return (struct limit_compute){limit_bytes_avx512, 128.0 * LIMIT_CHAINS * LIMIT_REPEATS};
    }
    if (opaq_cpu_features() & OPAQ_CPU_AVX2) { /* not counting the additions of pairs */
        return (struct limit_compute){limit_bytes_avx2, 64.0 * LIMIT_CHAINS * LIMIT_REPEATS};
    }
#endif
    return (struct limit_compute){0, 0.0};
}

static inline void limit_compute_piece(void *argument, int64_t begin, int64_t end) {
    ((const struct limit_compute *)argument)->run(end - begin);
}

#endif
