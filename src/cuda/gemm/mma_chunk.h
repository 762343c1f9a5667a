/* cuda/gemm/mma_chunk.h: the step that all products on tensor cores share: 64 terms of the sums of a warp. Depends on mma_form.h. */
#ifndef OPAQ_CUDA_GEMM_MMA_CHUNK_H
#define OPAQ_CUDA_GEMM_MMA_CHUNK_H

#include "cuda/gemm/mma_form.h"

enum {
    CHUNK = 64,
    STEPS = CHUNK / 16, /* mma of a chunk */
    SUM_BLOCK = 128,    /* terms of one sum */
    CHUNKS_OF_BLOCK = SUM_BLOCK / CHUNK,
    WARPS = THREADS / WARP,
    MMA_ROWS = 16,
    MMA_COLUMNS = 8
};

/* One chunk of the sums of 16 RT rows of weights by eight tokens, sums[..][tt]. */
template <int RT, int TT>
static __device__ __forceinline__ void multiply_chunk(const uint32_t weights[RT][2][PART_WORDS],
                                                      const uint32_t tokens[PART_WORDS], int tt,
                                                      float sums[RT][TT][4]) {
#pragma unroll
    for (int s = 0; s < STEPS; ++s) {
#pragma unroll
        for (int rt = 0; rt < RT; ++rt) {
            const uint32_t rows[4] = {weights[rt][0][2 * s], weights[rt][1][2 * s], weights[rt][0][2 * s + 1],
                                      weights[rt][1][2 * s + 1]};
            mma_bf16(sums[rt][tt], rows, tokens + 2 * s);
        }
    }
}

/* The place of a tile: eight rows of tiles are passed through together, so that both operands stay in the cache. */
static inline __device__ void tile_place(int64_t tile, int64_t down, int64_t across, int64_t *token_tile,
                                         int64_t *weight_tile) {
    const int64_t band = 8;
    const int64_t first = tile / (band * across) * band;
    const int64_t height = min_int64(band, down - first);
    *token_tile = first + tile % (band * across) % height;
    *weight_tile = tile % (band * across) / height;
}

/* Large tiles where they occupy a GPU of about this many multiprocessors; an emulated one runs them often. */
#if defined(OPAQ_CUDA_EMULATION)
enum { MULTIPROCESSORS = 2 };
#else
enum { MULTIPROCESSORS = 128 };
#endif

#endif
