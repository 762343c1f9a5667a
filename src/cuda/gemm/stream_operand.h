/* cuda/gemm/stream_operand.h: operands of the products that copy them to shared memory ahead (product_stream.cu,
 * product_panels.cu): what a kernel needs of them, computed on the host, and where their pieces are in shared memory. Depends
 * on mma_chunk.h. */
#ifndef OPAQ_CUDA_GEMM_STREAM_OPERAND_H
#define OPAQ_CUDA_GEMM_STREAM_OPERAND_H

#include "cuda/gemm/mma_chunk.h"

/* ---- arguments ---- */

/* Scales that are bytes. A row's begin at first + (row >> row_shift) * step, or where swizzle.h says; four blocks further they
 * are `four` bytes further. */
struct stream_scales {
    const uint8_t *first;
    int64_t step; /* if is_swizzled, of 128 rows */
    int row_shift, four;
    bool is_swizzled;
};

/* Factors in float32, of a row or of 128 terms of one. */
struct stream_factors {
    const float *first; /* NULL: 1 */
    int64_t row_step, block_step;
    int row_shift;
    bool is_inverse;
};

/* The products of several groups of rows, each with a separate weight. */
struct stream_groups {
    const int64_t *first; /* device memory: where the rows of each group begin; NULL: one product */
    int count;
    int64_t code_step, scale_step, factor_step, bias_step; /* bytes or elements to the next weight's */
};

struct stream_arguments {
    const uint8_t *codes, *tokens;
    int64_t code_step, token_step; /* bytes of a row */
    int rows, weights, blocks;     /* rows: at most, of all groups */
    int scale_shift;               /* log2 of the terms under a scale */
    float constant;
    bool has_block_factors;
    struct mma_form form; /* of the weights */
    struct stream_scales scales;
    struct stream_factors token_factors, weight_factors;
    struct stream_groups groups;
    struct product_target target;
};

/* The factor of a row, of the operand whose factors begin at element `first`. */
static __device__ __forceinline__ float stream_factor(const struct stream_factors &factors, int64_t first,
                                                      int64_t row, int block) {
    if (factors.first == NULL) {
        return 1.0f;
    }
    const float stored =
        factors.first[first + (row >> factors.row_shift) * factors.row_step + block * factors.block_step];
    return !factors.is_inverse ? stored : stored == 0.0f ? 0.0f : 1.0f / stored;
}

static __device__ __forceinline__ const uint8_t *stream_scales_at(const struct stream_scales &scales, int row) {
    const int at = row >> scales.row_shift;
    return scales.first +
           (scales.is_swizzled ? at / 128 * scales.step + at % 32 * 16 + at % 128 / 32 * 4 : at * scales.step);
}

/* ---- stream_operand.cu ---- */

/* Bytes of shared memory that a kernel here may use: those of compute capability 8.0. */
enum { STREAM_MEMORY = 163 << 10 };

/* Whether these kernels take the product: OPAQ_CUDA_PRODUCT=stream selects them, the device has STREAM_MEMORY, and the operands
 * have the layouts they need. */
bool stream_takes(const struct gemm_job *job, enum product_part part, const struct mma_arguments *product,
                  const struct opaq_execution *execution);
struct stream_arguments stream_arguments_of(const struct mma_arguments *product);

/* ---- shared memory ---- */

enum { PIECE = 16 };

__host__ __device__ constexpr int code_bytes_of(int source) { /* of a chunk of a row */
    return is_codes4(source) ? CHUNK / 2 : source == SOURCE_CODES8 ? CHUNK : CHUNK * 2;
}

/* Where piece `piece` of a row of `row_bytes` is. */
static __device__ __forceinline__ int piece_place(int row, int piece, int row_bytes) {
    return row * row_bytes + (piece ^ (row & (row_bytes / PIECE - 1))) * PIECE;
}

/* 4-bit codes have two pieces in a row, which stay where they are: loads are of 8 bytes, and four rows fill the banks. */
template <int SOURCE> static __device__ __forceinline__ int code_place(int row, int piece) {
    return is_codes4(SOURCE) ? row * (CHUNK / 2) + piece * PIECE
                             : piece_place(row, piece, code_bytes_of(SOURCE));
}

/* The codes of part j of row `row` of a chunk in shared memory, and the byte of its word of scales that is at `byte`. */
template <int SOURCE>
static __device__ __forceinline__ void stream_read(const struct stream_arguments &job, const uint8_t *chunk,
                                                   int scales_at, int row, int j, int byte,
                                                   struct mma_raw<SOURCE> *raw) {
    if constexpr (is_codes4(SOURCE)) {
        read_two(chunk + code_place<SOURCE>(row, 0) + j * (PART / 2), raw->word);
    } else {
        read_four(chunk + code_place<SOURCE>(row, j), raw->word);
    }
    raw->scale = SOURCE != SOURCE_CODES8 || job.scales.first != NULL ? chunk[scales_at + row * 4 + byte] : 0;
}

/* Decodes two parts. */
template <int SOURCE>
static __device__ __forceinline__ void stream_decode(const struct stream_arguments &job,
                                                     const struct mma_raw<SOURCE> raw[2],
                                                     uint32_t weights[2][PART_WORDS]) {
    if constexpr (SOURCE == SOURCE_NVFP4) {
        const uint32_t scales = nvfp4_scales(raw[1].scale << 16 | raw[0].scale);
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            pairs_of_codes4(raw[i].word[0], weights[i]);
            pairs_of_codes4(raw[i].word[1], weights[i] + 4);
#pragma unroll
            for (int w = 0; w < PART_WORDS; ++w) {
                weights[i][w] = pair_multiply(weights[i][w], i == 0 ? low_twice(scales) : high_twice(scales));
            }
        }
    } else {
        decode_weights<SOURCE>(job.form, raw[0], weights[0]);
        decode_weights<SOURCE>(job.form, raw[1], weights[1]);
    }
}

#endif
