/* cuda/quant/part_codes.h: quantizes a part: 16 consecutive bf16 values of an operand's row, as 8 words of two. What decides
 * bytes comes from definition; here is only how a thread gets there in few instructions. Depends on quant_kernels.h.
 *
 * A part is all of an nvfp4 block, half of an mxfp8 or mxfp4 block, an eighth of a block of fp8blk1. Threads with the parts of one
 * block are neighbours in a warp. */
#ifndef OPAQ_CUDA_QUANT_PART_CODES_H
#define OPAQ_CUDA_QUANT_PART_CODES_H

#include "cuda/quant/quant_kernels.h"
#include "definition/block_ref.h"

enum {
    PART = 16,
    PART_WORDS = PART / 2,
    PART_COLUMNS_LIMIT =
        INT32_MAX - 65536 /* columns and one round of a block's threads are counted in 32 bits */
};

/* What a kernel is compiled for. FP8: one scale for the tensor. FP8_BLOCK: fp8blk1 and fp8blk2. */
enum part_kind { PART_FP8, PART_FP8_BLOCK, PART_MX8, PART_MX4, PART_NVFP4 };

static inline enum part_kind part_kind_of(const struct opaq_spec *spec) {
    switch ((enum opaq_format)spec->format) {
    case OPAQ_FP8:
    case OPAQ_FP8ROW:
        break;
    case OPAQ_FP8BLK1:
    case OPAQ_FP8BLK2:
        return PART_FP8_BLOCK;
    case OPAQ_MXFP8:
        return PART_MX8;
    case OPAQ_MXFP4:
        return PART_MX4;
    case OPAQ_NVFP4:
        return PART_NVFP4;
    }
    return PART_FP8;
}

/* Values under one scale, in a row of the operand; 0: all. */
static __device__ constexpr int block_length(int kind) {
    return kind == PART_FP8 ? 0 : kind == PART_FP8_BLOCK ? 128 : kind == PART_NVFP4 ? 16 : 32;
}

/* Threads that share a scale. */
static __device__ constexpr int threads_of_block(int kind) {
    return block_length(kind) <= PART ? 1 : block_length(kind) / PART;
}

static __device__ constexpr bool is_4_bit(int kind) { return kind == PART_MX4 || kind == PART_NVFP4; }

/* 32-bit words of a part's codes. */
static __device__ constexpr int code_words(int kind) { return is_4_bit(kind) ? 2 : 4; }

#if defined(__CUDACC__)
#define OPAQ_INLINE __forceinline__
#else
#define OPAQ_INLINE inline
#endif

/* ---- amax ---- */

/* The larger unsigned number in each half of a word. */
static __device__ OPAQ_INLINE uint32_t pair_max(uint32_t a, uint32_t b) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 900
    return __vmaxu2(a, b);
#else
    const uint32_t low = (a & 0xFFFFu) > (b & 0xFFFFu) ? a & 0xFFFFu : b & 0xFFFFu;
    const uint32_t high = (a & 0xFFFF0000u) > (b & 0xFFFF0000u) ? a & 0xFFFF0000u : b & 0xFFFF0000u;
    return high | low;
#endif
}

static __device__ OPAQ_INLINE uint32_t drop_nan_half(uint32_t half) { return half > 0x7F80u ? 0u : half; }

/* The largest magnitudes of the words' halves. Rule te ignores NaNs; under the others their bits are the largest. */
template <int WORDS>
static __device__ OPAQ_INLINE uint32_t pair_magnitudes(const uint32_t words[WORDS], bool drop_nan) {
    uint32_t largest = words[0] & 0x7FFF7FFFu;
#pragma unroll
    for (int i = 1; i < WORDS; ++i) {
        largest = pair_max(largest, words[i] & 0x7FFF7FFFu);
    }
    if (drop_nan && ((largest & 0xFFFFu) > 0x7F80u || largest >> 16 > 0x7F80u)) {
        largest = 0;
#pragma unroll
        for (int i = 0; i < WORDS; ++i) {
            const uint32_t low = drop_nan_half(words[i] & 0x7FFFu);
            const uint32_t high = drop_nan_half(words[i] >> 16 & 0x7FFFu);
            largest = pair_max(largest, high << 16 | low);
        }
    }
    return largest;
}

/* A float's bits: the larger half. */
static __device__ OPAQ_INLINE uint32_t magnitude_bits(uint32_t pair) {
    const uint32_t low = pair << 16;
    const uint32_t high = pair & 0xFFFF0000u;
    return low > high ? low : high;
}

/* The maximum over `lanes` neighbours of a warp, a power of two. All lanes of the warp must call it. */
template <int LANES> static __device__ OPAQ_INLINE uint32_t neighbours_max(uint32_t value) {
#pragma unroll
    for (int step = 1; step < LANES; step *= 2) {
        const uint32_t other = __shfl_xor_sync(0xFFFFFFFFu, value, step);
        value = other > value ? other : value;
    }
    return value;
}

/* ---- values ---- */

static __device__ OPAQ_INLINE float low_value(uint32_t word) { return float_from_bits(word << 16); }
static __device__ OPAQ_INLINE float high_value(uint32_t word) { return float_from_bits(word & 0xFFFF0000u); }

/* The Hadamard transform, whose results are bf16 numbers. */
static __device__ OPAQ_INLINE void part_hadamard(uint32_t words[PART_WORDS], uint32_t mask) {
    float values[PART];
#pragma unroll
    for (int i = 0; i < PART_WORDS; ++i) {
        values[2 * i] = low_value(words[i]);
        values[2 * i + 1] = high_value(words[i]);
    }
    hadamard_forward(values, (uint16_t)mask);
#pragma unroll
    for (int i = 0; i < PART_WORDS; ++i) {
        words[i] = (float_to_bits(values[2 * i + 1]) & 0xFFFF0000u) | float_to_bits(values[2 * i]) >> 16;
    }
}

/* ---- codes ---- */

/* The e2m1 code of a value: rounding to a multiple of the value's step is adding 2^23 steps. The step is half of the power of two at
 * or below the magnitude, at least 1/2; codes are consecutive from one power of two to the next. */
static __device__ OPAQ_INLINE uint32_t code_e2m1(float value) {
    const uint32_t bits = float_to_bits(value);
    const float magnitude = fminf(fabsf(value), 6.0f); /* 6 for a NaN */
    const uint32_t power = float_to_bits(magnitude) & 0x7F800000u;
    const uint32_t least = power > 0x3F800000u ? power : 0x3F800000u;
    const uint32_t addend = least + (22u << 23);
    const uint32_t sum = float_to_bits(magnitude + float_from_bits(addend));
    const uint32_t code = sum - addend + (least >> 22) - 254u;
#if defined(__CUDA_ARCH__) /* a product that is NaN is positive there */
    return (bits >> 28 & 8u) | code;
#else
    return (bits > 0xFF800000u ? 0u : bits >> 28 & 8u) | code;
#endif
}

/* The codes of two values with 8 bits, the first in the low byte. */
static __device__ OPAQ_INLINE uint32_t codes_8bit(float low, float high, bool is_e5m2) {
#if defined(__CUDA_ARCH__) && __CUDA_ARCH__ >= 890
    uint16_t codes;
    if (is_e5m2) {
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    } else {
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(codes) : "f"(high), "f"(low));
    }
    return codes;
#else
    return is_e5m2 ? encode_e5m2(high) << 8 | encode_e5m2(low) : encode_e4m3(high) << 8 | encode_e4m3(low);
#endif
}

/* The codes of a part times `apply`, nearest even. */
template <int KIND>
static __device__ OPAQ_INLINE void encode_part(const uint32_t words[PART_WORDS], float apply, bool is_e5m2,
                                               uint32_t codes[code_words(KIND)]) {
#pragma unroll
    for (int i = 0; i < code_words(KIND); ++i) {
        codes[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < PART_WORDS; ++i) {
        const float low = low_value(words[i]) * apply;
        const float high = high_value(words[i]) * apply;
        if constexpr (is_4_bit(KIND)) {
            codes[i / 4] |= (code_e2m1(low) | code_e2m1(high) << 4) << i % 4 * 8;
        } else {
            codes[i / 2] |= codes_8bit(low, high, is_e5m2) << i % 2 * 16;
        }
    }
}

/* The same with stochastic rounding. `group`: the part's number, from which its random bits follow (segment_random). */
template <int KIND>
static __device__ void encode_part_stochastic(const struct quant_job *job, const uint32_t words[PART_WORDS],
                                              float apply, bool is_columnwise, int64_t group,
                                              uint32_t codes[code_words(KIND)]) {
    const struct narrow narrow = is_4_bit(KIND)                   ? narrow_e2m1
                                 : job->spec.element == OPAQ_E5M2 ? narrow_e5m2
                                                                  : narrow_e4m3;
    const struct opaq_random *random = &job->random;
    const struct philox_block counter = {
        {(uint32_t)group, (uint32_t)((uint64_t)group >> 32), (uint32_t)random->offset,
         (uint32_t)(random->offset >> 32) | (is_columnwise ? 0x80000000u : 0u)}};
    const struct philox_block bytes = philox(counter, (uint32_t)random->seed, (uint32_t)(random->seed >> 32));
    enum { BITS = is_4_bit(KIND) ? 4 : 8 };
#pragma unroll
    for (int i = 0; i < code_words(KIND); ++i) {
        codes[i] = 0;
    }
#pragma unroll
    for (int i = 0; i < PART; ++i) {
        const float value = (i % 2 == 0 ? low_value(words[i / 2]) : high_value(words[i / 2])) * apply;
        codes[i * BITS / 32] |=
            narrow_encode_stochastic(value, narrow, bytes.word[i / 4] >> i % 4 * 8 & 0xFFu, 8) << i * BITS % 32;
    }
}

/* ---- scales ---- */

/* The place of the scale of the block from (r, c) on; c is a multiple of the block's length. */
template <int KIND>
static __device__ OPAQ_INLINE int64_t part_scale_index(const struct quant_copy *copy, int64_t r, int64_t c) {
    const struct scale_layout *layout = &copy->scale_layout;
    const int64_t block = c / block_length(KIND);
    if ((KIND == PART_MX8 || KIND == PART_MX4 || KIND == PART_NVFP4) && layout->swizzled_columns != 0) {
        return swizzle_offset(r, block, layout->swizzled_columns);
    }
    return (layout->row_per == 1 ? r : r / 128) * layout->row_step + block * layout->column_step;
}

/* The multiplier of a part, from its block's amax; a thread of each block stores the scale. */
template <int KIND>
static __device__ OPAQ_INLINE float settle_scale(const struct quant_arguments *arguments,
                                                 const struct quant_copy *copy, int64_t r, int64_t c,
                                                 uint32_t amax_bits_of_block, bool stores) {
    const struct opaq_spec *spec = &arguments->job.spec;
    const float amax = amax_from_bits(amax_bits_of_block);
    if constexpr (KIND == PART_FP8) {
        return fp8_tensor_scale(arguments).apply;
    } else if constexpr (KIND == PART_FP8_BLOCK) {
        const struct fp8_scale scale =
            fp8_scale_from_amax(spec, amax, fp8_scale_limit(spec, copy->operand.dtype));
        if (stores) {
            ((float *)copy->scale)[part_scale_index<KIND>(copy, r, c)] = scale.stored;
        }
        return scale.apply;
    } else {
        uint32_t code;
        float apply;
        if constexpr (KIND == PART_NVFP4) {
            const float stored = copy->amax[r * copy->amax_step];
            const struct nvfp4_scale scale = nvfp4_block(spec, nvfp4_global_of_stored(spec, stored), amax);
            code = scale.code;
            apply = scale.apply;
        } else {
            code = mx_exponent(spec, amax);
            apply = mx_factor(code);
        }
        if (stores) {
            ((uint8_t *)copy->scale)[part_scale_index<KIND>(copy, r, c)] = (uint8_t)code;
        }
        return apply;
    }
}

/* The codes of the part of row r from c on. */
template <int KIND>
static __device__ OPAQ_INLINE void part_codes(const struct quant_arguments *arguments,
                                              const struct quant_copy *copy, const uint32_t words[PART_WORDS],
                                              int64_t r, int64_t c, float apply,
                                              uint32_t codes[code_words(KIND)]) {
    const struct opaq_spec *spec = &arguments->job.spec;
    if (spec->options & OPAQ_STOCHASTIC) {
        const struct quant_job job = job_of(arguments);
        encode_part_stochastic<KIND>(&job, words, apply, copy->usage == OPAQ_COLUMNWISE,
                                     r * ceil_div(copy->operand.columns, PART) + c / PART, codes);
    } else {
        encode_part<KIND>(words, apply, spec->element == OPAQ_E5M2, codes);
    }
}

/* ---- memory ---- */

struct alignas(16) part_half {
    uint32_t word[4];
};
struct alignas(8) part_codes4 {
    uint32_t word[2];
};

/* 16 values from an address that is a multiple of 16. */
static __device__ OPAQ_INLINE void read_part_words(const uint16_t *from, uint32_t words[PART_WORDS]) {
    const struct part_half *const halves = (const struct part_half *)from;
#pragma unroll
    for (int h = 0; h < 2; ++h) {
        const struct part_half half = halves[h];
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            words[4 * h + i] = half.word[i];
        }
    }
}

static __device__ OPAQ_INLINE void clear_part(uint32_t words[PART_WORDS]) {
#pragma unroll
    for (int i = 0; i < PART_WORDS; ++i) {
        words[i] = 0;
    }
}

/* The codes of a part to the row's place, which is aligned to their size. */
template <int KIND>
static __device__ OPAQ_INLINE void store_part(const struct quant_copy *copy, int64_t r, int64_t c,
                                              const uint32_t codes[code_words(KIND)]) {
    uint8_t *const to = copy->data + (r * copy->data_row_step + c) / (is_4_bit(KIND) ? 2 : 1);
    if constexpr (is_4_bit(KIND)) {
        *(struct part_codes4 *)to = {codes[0], codes[1]};
    } else {
        *(struct part_half *)to = {codes[0], codes[1], codes[2], codes[3]};
    }
}

#endif
