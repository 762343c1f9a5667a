/* cuda/gemm/mma_operand.h: decodes a product's operand to bf16, for tensor cores. Depends on product_operand.h, mma.h.
 *
 * A decoded value is what bf16 holds exactly: a bf16 number, or a code times its block's scale if that is one byte. Scales in
 * float32 (of a tensor, a row, or a block of 128 terms) are factors: they stay outside the sums of which they are constant.
 *
 * The unit is a part: 16 values of a row, from a multiple of 16 on, as 8 words of two (the even one in the low half). */
#ifndef OPAQ_CUDA_GEMM_MMA_OPERAND_H
#define OPAQ_CUDA_GEMM_MMA_OPERAND_H

#include "cuda/gemm/mma.h"
#include "cuda/gemm/product_operand.h"

enum { PART = OPERAND_PART, PART_WORDS = PART / 2 };

/* How parts are read. All but ANY read a part at once: its row is contiguous, aligned, and has whole parts. Products read ANY
 * from a copy in bf16, which has rows like that. */
enum source { SOURCE_BF16, SOURCE_NVFP4, SOURCE_MXFP4, SOURCE_CODES8, SOURCE_ANY };
enum scale_kind { SCALE_NONE, SCALE_E8M0, SCALE_E4M3 }; /* what a code is multiplied with */
enum factor_kind { FACTOR_NONE, FACTOR_SCALE, FACTOR_AMAX, FACTOR_INVERSE };

/* How an operand is read, as the host finds it out. */
struct mma_form {
    enum source source;
    enum scale_kind scale;
    enum factor_kind factor;
    bool has_block_factors; /* the factor changes every 128 terms */
    bool is_e5m2, is_swizzled;
    bool is_across_memory; /* neighbours in memory are neighbours in a column */
    int scale_shift;       /* log2 of the columns under a scale */
    int64_t scale_step;    /* bytes from a scale to the next one of the row */
};

/* An operand in a kernel: in shared memory. */
struct mma_side {
    struct product_operand operand;
    int rows, depth;
};

/* Where a row of it begins. */
struct mma_row {
    const uint8_t *data, *scales;
};

__host__ __device__ constexpr bool is_codes4(int source) {
    return source == SOURCE_NVFP4 || source == SOURCE_MXFP4;
}

/* A part as it is stored. */
template <int SOURCE> struct mma_raw {
    enum { WORDS = is_codes4(SOURCE) ? 2 : SOURCE == SOURCE_CODES8 ? 4 : PART_WORDS };
    uint32_t word[WORDS];
    uint32_t scale;
};

/* Beyond the last row it is the last one: what comes of it is not stored. */
static __device__ __forceinline__ struct mma_row mma_row_at(const struct mma_form &form,
                                                            const struct mma_side &side, int64_t row) {
    const struct gemm_operand &operand = side.operand.gemm;
    const struct quant_copy &copy = side.operand.of.copy;
    row = min_int64(row, side.rows - 1);
    if (form.source == SOURCE_BF16) {
        return {(const uint8_t *)operand.plain.data + row * operand.plain.row_step * 2, NULL};
    }
    return {copy.data + row * copy.data_row_step / (copy.is_packed ? 2 : 1),
            (const uint8_t *)copy.scale + (form.scale == SCALE_NONE ? 0 : scale_index(&copy, row, 0))};
}

/* ---- bf16 ---- */

static __device__ __forceinline__ uint32_t pair_of(uint32_t half) { return half << 16 | half; }

/* A block's scale as bf16. */
static __device__ __forceinline__ uint32_t scale_bf16(enum scale_kind kind, uint32_t byte) {
    if (kind == SCALE_E8M0) {
        return byte == 255 ? 0x7FC0u : byte == 0 ? 0x40u : byte << 7;
    }
    if (kind == SCALE_NONE) {
        return 0x3F80u;
    }
    /* the bits of an e4m3 at the end of a float's exponent are its value times 2^-120 */
    const float value = float_from_bits((byte & 0x7Fu) << 20) * 0x1p120f;
    return (byte & 0x7Fu) == 0x7Fu ? 0x7FC0u : float_to_bits(value) >> 16 | (byte & 0x80u) << 8;
}

/* The same for codes: with their magnitude at the end of the exponent they are their value times a power of two, the
 * smallest ones as subnormal numbers. */
enum { POWER_E2M1 = 0x7E80, POWER_E4M3 = 0x7B80, POWER_E5M2 = 0x7780 }; /* 2^126, 2^120, 2^112 */

/* Byte b of 4: its two codes at the top of the word's halves. */
static __device__ __forceinline__ uint32_t pair_of_codes4(uint32_t word, int b) {
    const uint32_t top = select_bytes(word << 4, word, (uint32_t)(4 + b) << 12 | (uint32_t)b << 4);
    return (top & 0x80008000u) | (top >> 6 & 0x01C001C0u);
}

/* Bytes 2 h and 2 h + 1, a code each. e4m3 has NaN and e5m2 infinities beside, which no power of two makes. */
static __device__ __forceinline__ uint32_t pair_of_codes8(uint32_t word, int h, bool is_e5m2) {
    const uint32_t top = select_bytes(word, 0, h == 0 ? 0x1404u : 0x3424u);
    return is_e5m2 ? (top & 0x80008000u) | (top >> 3 & 0x0FE00FE0u)
                   : (top & 0x80008000u) | (top >> 4 & 0x07F007F0u);
}

static __device__ __forceinline__ uint32_t special_pair(uint32_t pair, bool is_e5m2) {
    const uint32_t least = is_e5m2 ? 0x0F80u : 0x07F0u; /* the magnitude from which on there are no numbers */
    const uint32_t set = is_e5m2 ? 0x7F80u : 0x7FC0u;
    const uint32_t low = (pair & 0x7FFFu) >= least ? set : 0u;
    const uint32_t high = (pair >> 16 & 0x7FFFu) >= least ? set : 0u;
    return pair | high << 16 | low;
}

/* Whether one of a word's four codes is not a finite number. */
static __device__ __forceinline__ bool has_special(uint32_t word, bool is_e5m2) {
    const uint32_t least = is_e5m2 ? 0x04040404u : 0x01010101u;
    return (((word & 0x7F7F7F7Fu) + least) & 0x80808080u) != 0;
}

/* ---- any operand, value by value ---- */

static __device__ __forceinline__ uint32_t any_value(const struct mma_form &form, const struct mma_side &side,
                                                     int row, int k) {
    const struct gemm_operand &operand = side.operand.gemm;
    if (k >= side.depth) {
        return 0;
    }
    if (operand.copy == NULL) {
        return (
            (const uint16_t *)operand.plain.data)[row * operand.plain.row_step + k * operand.plain.column_step];
    }
    const struct quant_copy &copy = side.operand.of.copy;
    const int64_t r = operand.is_across ? k : row;
    const int64_t c = operand.is_across ? row : k;
    if (c >= copy.data_columns) {
        return 0;
    }
    int shift;
    const uint32_t byte = *code_place(&copy, r, c, &shift);
    const float value = decode_element(&side.operand.of.spec, copy.is_packed ? byte >> shift & 15 : byte);
    const uint32_t scale =
        form.scale == SCALE_NONE ? 0 : ((const uint8_t *)copy.scale)[scale_index(&copy, r, c)];
    return encode_bf16_ieee(value * decode_bf16(scale_bf16(form.scale, scale)));
}

/* Words move up one place for each pair, so that none is found by a variable index, which would need a stack frame. */
static __device__ __forceinline__ void any_part(const struct mma_form &form, const struct mma_side &side,
                                                int row, int k, uint32_t words[PART_WORDS]) {
#pragma unroll 1
    for (int i = 0; i < PART; i += 2) {
        const uint32_t low = any_value(form, side, row, k + i);
        const uint32_t high = any_value(form, side, row, k + i + 1);
#pragma unroll
        for (int n = 0; n + 1 < PART_WORDS; ++n) {
            words[n] = words[n + 1];
        }
        words[PART_WORDS - 1] = high << 16 | low;
    }
}

/* ---- parts ---- */

/* 16 and 8 bytes of shared memory, and of any. */
struct alignas(16) four_words {
    uint32_t word[4];
};

static __device__ __forceinline__ void read_four(const void *from, uint32_t *words) {
    const struct four_words four = *(const struct four_words *)from;
#pragma unroll
    for (int i = 0; i < 4; ++i) {
        words[i] = four.word[i];
    }
}

static __device__ __forceinline__ void store_four(const uint32_t *words, void *to) {
    *(struct four_words *)to = {words[0], words[1], words[2], words[3]};
}

struct alignas(8) two_words {
    uint32_t word[2];
};

static __device__ __forceinline__ void read_two(const void *from, uint32_t *words) {
    const struct two_words two = *(const struct two_words *)from;
    words[0] = two.word[0];
    words[1] = two.word[1];
}

struct alignas(8) two_floats {
    float value[2];
};

static __device__ __forceinline__ void store_two(const float *values, void *to) {
    *(struct two_floats *)to = {values[0], values[1]};
}

/* The part from k on; zeros beyond the depth. */
template <int SOURCE>
static __device__ __forceinline__ void load_part(const struct mma_form &form, const struct mma_side &side,
                                                 const struct mma_row &row, int k,
                                                 struct mma_raw<SOURCE> *raw) {
#pragma unroll
    for (int i = 0; i < mma_raw<SOURCE>::WORDS; ++i) {
        raw->word[i] = 0;
    }
    raw->scale = 0;
    if (k >= side.depth) {
        return;
    }
    if constexpr (SOURCE == SOURCE_BF16) {
        load_four(row.data + 2 * (int64_t)k, raw->word);
        load_four(row.data + 2 * (int64_t)k + 16, raw->word + 4);
    } else if constexpr (SOURCE == SOURCE_CODES8) {
        load_four(row.data + k, raw->word);
    } else {
        load_two(row.data + k / 2, raw->word);
    }
    if constexpr (SOURCE != SOURCE_BF16) {
        const int block = k >> form.scale_shift;
        if (form.scale != SCALE_NONE) { /* swizzle.h: 512 bytes for four columns of scales */
            raw->scale = load_byte(row.scales + (form.is_swizzled ? (int64_t)(block / 4) * 512 + block % 4
                                                                  : block * form.scale_step));
        }
    }
}

template <int SOURCE>
static __device__ __forceinline__ void decode_part(const struct mma_form &form,
                                                   const struct mma_raw<SOURCE> &raw,
                                                   uint32_t words[PART_WORDS]) {
    if constexpr (SOURCE == SOURCE_BF16) {
#pragma unroll
        for (int i = 0; i < PART_WORDS; ++i) {
            words[i] = raw.word[i];
        }
        return;
    } else if constexpr (is_codes4(SOURCE)) {
        const uint32_t scale = pair_of(scale_bf16(form.scale, raw.scale));
#pragma unroll
        for (int i = 0; i < PART_WORDS; ++i) {
            words[i] = pair_multiply(pair_multiply(pair_of_codes4(raw.word[i / 4], i % 4), pair_of(POWER_E2M1)),
                                     scale);
        }
    } else {
        const uint32_t scale = pair_of(scale_bf16(form.scale, raw.scale));
        const uint32_t power = pair_of(form.is_e5m2 ? POWER_E5M2 : POWER_E4M3);
        bool is_special = false;
#pragma unroll
        for (int i = 0; i < PART_WORDS; ++i) {
            words[i] = pair_of_codes8(raw.word[i / 2], i % 2, form.is_e5m2);
            is_special = is_special || (i % 2 == 0 && has_special(raw.word[i / 2], form.is_e5m2));
        }
        if (is_special) {
#pragma unroll
            for (int i = 0; i < PART_WORDS; ++i) {
                words[i] = special_pair(words[i], form.is_e5m2);
            }
        }
#pragma unroll
        for (int i = 0; i < PART_WORDS; ++i) {
            words[i] = pair_multiply(pair_multiply(words[i], power), scale);
        }
    }
}

/* ---- parts of weights, in the order of products ----
 *
 * A product may take the terms of a sum in any order that is the same for both operands. 4-bit codes are decoded fastest in pairs
 * that are four apart: words 0 to 3 are then terms (0, 4), (1, 5), (2, 6) and (3, 7) of the part, words 4 to 7 the same of its
 * second half. Other weights keep their order. */

/* Decoded 4-bit codes of nvfp4 are their values times 2^-NVFP4_POWER: the scale, which is at most 448, makes up for the
 * rest of 2^-126, so that one multiplication is enough. Values and sums keep all their bits. */
enum { NVFP4_POWER = 7 };

static __device__ __forceinline__ uint32_t nvfp4_scale_pair(uint32_t byte) {
    const float value =
        float_from_bits((byte << 20 & 0x07F00000u) | (byte << 24 & 0x80000000u)) * 0x1p120f * 0x1p119f;
    const uint32_t bits = (byte & 0x7Fu) == 0x7Fu ? 0x7FC00000u : float_to_bits(value);
    return select_bytes(bits, 0, 0x3232u);
}

/* The same for two scales, whose bytes are the low ones of the halves: one in each half of the result. */
static __device__ __forceinline__ uint32_t nvfp4_scales(uint32_t bytes) {
    const uint32_t magnitudes = bytes & 0x007F007Fu;
    const uint32_t numbers = pair_multiply(pair_multiply(magnitudes << 4, 0x7B807B80u), 0x7B007B00u);
    const uint32_t nans =
        (magnitudes + 0x00010001u) & 0x00800080u; /* 0x80 times 0xFF is the exponent of a NaN */
    return numbers | (bytes << 8 & 0x80008000u) | nans * 0xFFu;
}

/* The magnitude at the end of the exponent, the sign on top: a code is there twice after the multiplication. */
static __device__ __forceinline__ void pairs_of_codes4(uint32_t word, uint32_t pairs[4]) {
    const uint32_t low = 0x000F000Fu;
    const uint32_t high = 0x00F000F0u;
    const uint32_t kept = 0x81C081C0u;
    const uint32_t upper = word >> 8;
    pairs[0] = (word & low) * 0x1040u & kept;
    pairs[1] = (word & high) * 0x104u & kept;
    pairs[2] = (upper & low) * 0x1040u & kept;
    pairs[3] = (upper & high) * 0x104u & kept;
}

template <int SOURCE>
static __device__ __forceinline__ void decode_weights(const struct mma_form &form,
                                                      const struct mma_raw<SOURCE> &raw,
                                                      uint32_t words[PART_WORDS]) {
    if constexpr (is_codes4(SOURCE)) {
        const uint32_t scale =
            SOURCE == SOURCE_NVFP4 ? nvfp4_scale_pair(raw.scale) : pair_of(scale_bf16(SCALE_E8M0, raw.scale));
        pairs_of_codes4(raw.word[0], words);
        pairs_of_codes4(raw.word[1], words + 4);
#pragma unroll
        for (int i = 0; i < PART_WORDS; ++i) {
            const uint32_t word =
                SOURCE == SOURCE_NVFP4 ? words[i] : pair_multiply(words[i], pair_of(POWER_E2M1));
            words[i] = pair_multiply(word, scale);
        }
    } else {
        decode_part<SOURCE>(form, raw, words);
    }
}

/* Brings a part of the tokens into the order of the weights. */
template <int SOURCE> static __device__ __forceinline__ void order_tokens(uint32_t words[PART_WORDS]) {
    if constexpr (is_codes4(SOURCE)) {
#pragma unroll
        for (int half = 0; half < PART_WORDS; half += 4) {
            const uint32_t *const from = words + half;
            const uint32_t ordered[4] = {
                select_bytes(from[0], from[2], 0x5410u), select_bytes(from[0], from[2], 0x7632u),
                select_bytes(from[1], from[3], 0x5410u), select_bytes(from[1], from[3], 0x7632u)};
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                words[half + i] = ordered[i];
            }
        }
    }
}

template <int SOURCE>
static __device__ __forceinline__ void read_part(const struct mma_form &form, const struct mma_side &side,
                                                 const struct mma_row &row, int k, uint32_t words[PART_WORDS]) {
    struct mma_raw<SOURCE> raw;
    load_part<SOURCE>(form, side, row, k, &raw);
    decode_part<SOURCE>(form, raw, words);
}

/* ---- factors ---- */

/* The factors of a row: one, or one for each 128 terms. */
struct mma_factors {
    const float *first; /* NULL: 1 */
    int64_t step;
};

/* Beyond the last row they are the last one's. */
static __device__ __forceinline__ struct mma_factors factors_at(const struct mma_form &form,
                                                                const struct mma_side &side, int64_t row) {
    const struct quant_copy &copy = side.operand.of.copy;
    row = min_int64(row, side.rows - 1);
    if (form.factor == FACTOR_NONE) {
        return {NULL, 0};
    }
    if (form.factor != FACTOR_SCALE) {
        return {copy.amax + row * copy.amax_step, 0};
    }
    const bool is_across = side.operand.gemm.is_across;
    return {(const float *)copy.scale + scale_index(&copy, is_across ? 0 : row, is_across ? row : 0),
            !form.has_block_factors ? 0
            : is_across             ? copy.scale_layout.row_step
                                    : copy.scale_layout.column_step};
}

/* The factor of terms 128 block to 128 block + 127. */
static __device__ __forceinline__ float factor_of(const struct mma_form &form, const struct mma_side &side,
                                                  const struct mma_factors &factors, int block) {
    if (factors.first == NULL || block * 128 >= side.depth) {
        return 1.0f;
    }
    const float stored = factors.first[block * factors.step];
    return form.factor != FACTOR_INVERSE ? stored : stored == 0.0f ? 0.0f : 1.0f / stored;
}

#endif
