/* cpu/quant/simd/stochastic_vec.h: random bits and stochastic rounding, in vectors. Depends on encode_vec.h. What
 * narrow_encode_stochastic() and philox() do for one number. */
#ifndef OPAQ_CPU_QUANT_SIMD_STOCHASTIC_VEC_H
#define OPAQ_CPU_QUANT_SIMD_STOCHASTIC_VEC_H

#include "backend/quant_job.h"
#include "base/checked.h"
#include "cpu/quant/simd/encode_vec.h"

enum { RANDOM_ROUNDS = 10, RANDOM_PAIRS = VEC_BYTES / 8 };

/* Where a copy's random bits come from: a block of 16 bytes for every 16 columns of an operand row. fp8's columnwise
 * copy is its rowwise one transposed, random bits and all: its blocks are `mirrored`, for 16 rows of an operand
 * column. */
struct random_source {
    uint64_t offset; /* the counter's second half */
    bool is_mirrored;
    int64_t row_blocks;
    uint32_t key[RANDOM_ROUNDS][2]; /* of each round */
};

static inline struct random_source random_source(const struct quant_job *job, const struct quant_copy *copy) {
    const bool is_columnwise = copy->usage == OPAQ_COLUMNWISE;
    const bool is_mirrored = is_columnwise && job->spec.format == OPAQ_FP8;
    struct random_source source = {job->random.offset | (is_columnwise && !is_mirrored ? (uint64_t)1 << 63 : 0),
                                   is_mirrored,
                                   ceil_div(is_mirrored ? copy->operand.rows : copy->operand.columns, 16),
                                   {{(uint32_t)job->random.seed, (uint32_t)(job->random.seed >> 32)}}};
    for (int round = 1; round < RANDOM_ROUNDS; ++round) {
        source.key[round][0] = source.key[round - 1][0] + 0x9E3779B9u;
        source.key[round][1] = source.key[round - 1][1] + 0xBB67AE85u;
    }
    return source;
}

/* The four words of blocks. */
struct random_words {
    vec32 word[4];
};

/* philox() of two times RANDOM_PAIRS blocks whose numbers are given: words in the even dwords; the odd ones are
 * undefined. */
VEC_INLINE void random_even(const struct random_source *source, uint64_t number[2][RANDOM_PAIRS],
                            struct random_words words[2]) {
    for (int i = 0; i < 2; ++i) {
        words[i] = (struct random_words){{vec_load(number[i]), odd_to_even(vec_load(number[i])),
                                          vec32_set((uint32_t)source->offset),
                                          vec32_set((uint32_t)(source->offset >> 32))}};
    }
    for (int round = 0; round < RANDOM_ROUNDS; ++round) {
        for (int i = 0; i < 2; ++i) {
            vec32 *const word = words[i].word;
            const vec32 left = multiply_even(word[0], vec32_set(0xD2511F53u));
            const vec32 right = multiply_even(word[2], vec32_set(0xCD9E8D57u));
            word[0] = odd_to_even(right) ^ word[1] ^ vec32_set(source->key[round][0]);
            word[2] = odd_to_even(left) ^ word[3] ^ vec32_set(source->key[round][1]);
            word[1] = right;
            word[3] = left;
        }
    }
}

/* The words of FLOATS blocks, `step` apart from `first` on. */
VEC_INLINE struct random_words random_blocks(const struct random_source *source, uint64_t first,
                                             uint64_t step) {
    uint64_t number[2][RANDOM_PAIRS];
    for (uint64_t i = 0; i < RANDOM_PAIRS; ++i) {
        number[0][i] = first + 2 * i * step;
        number[1][i] = first + (2 * i + 1) * step;
    }
    struct random_words half[2];
    struct random_words words;
    random_even(source, number, half);
    for (int i = 0; i < 4; ++i) {
        words.word[i] = blend_odd(half[0].word[i], even_to_odd(half[1].word[i]));
    }
    return words;
}

/* The bytes of `count` blocks of a row from block `block` on; up to FLOATS blocks more are written. */
static void random_row(const struct random_source *source, int64_t row, int64_t block, int64_t count,
                       uint8_t *bytes) {
    for (int64_t i = 0; i < count; i += FLOATS) {
        const uint64_t first = (uint64_t)(row * source->row_blocks + block + i);
        uint64_t number[2][RANDOM_PAIRS];
        struct random_words words[2];
        for (uint64_t k = 0; k < RANDOM_PAIRS; ++k) { /* in an order that leaves LANES of them in a vector */
            number[0][k] = first + k % 2 * LANES + k / 2;
            number[1][k] = number[0][k] + RANDOM_PAIRS;
        }
        random_even(source, number, words);
        for (int half = 0; half < 2; ++half) {
            const vec32 low = blend_odd(words[half].word[0], even_to_odd(words[half].word[1]));
            const vec32 high = blend_odd(words[half].word[2], even_to_odd(words[half].word[3]));
            uint8_t *const to = bytes + (i + half * RANDOM_PAIRS) * 16;
            vec_store(to, quads_first(low, high));
            vec_store(to + VEC_BYTES, quads_second(low, high));
        }
    }
}

/* A step's random bytes as floats. */
VEC_INLINE struct step_floats random_of_bytes(const uint8_t *bytes) {
    const vec32 words = (vec32)load_bytes_as_words(bytes);
    return (struct step_floats){to_floats(words & 0xFFFFu), to_floats(words >> 16)};
}

/* Codes, without signs, of scaled magnitudes: adds `random` 256ths of a step, then truncates. NaN becomes the largest. */
VEC_INLINE vec32 cut_to_codes(vecf a, vecf random, enum opaq_element element) {
    const uint32_t bits = (uint32_t)mantissa_bits(element);
    const vecf kept = minf(a, vecf_set(largest_value(element)));
    const vec32 power = max32((vec32)kept & 0x7F800000u, vec32_set(least_normal(element)));
    const vecf jittered = multiply_add(random, (vecf)(power - ((bits + 8u) << 23)), kept);
    const vec32 normal = ((vec32)jittered >> (23u - bits)) - (((least_normal(element) >> 23) - 1u) << bits);
    const vecf smallest =
        (vecf)vec32_set((254u + bits - (least_normal(element) >> 23)) << 23); /* one over it */
    return replace32(above32((vec32)jittered, least_normal(element) - 1u), to_integers(jittered * smallest),
                     normal);
}

/* Codes, as words, of a step under finite factors above 0, or NaN under some rules. */
VEC_INLINE vec16 encode_stochastic(struct encode_how how, struct step x, vecf even, vecf odd,
                                   struct step_floats random) {
    const struct step_floats magnitudes = step_magnitudes(x, how.dtype);
    const struct step_floats a = {magnitudes.even * even, magnitudes.odd * odd};
    const mask16 nans = how.not_te ? scaled_nans(a) : step_nans(x, how.dtype);
    const vec16 codes = join_words(cut_to_codes(a.even, random.even, how.element),
                                   cut_to_codes(a.odd, random.odd, how.element));
    return finish_codes(codes, step_signs(x, how.dtype), nans, nans, how.element);
}

#endif
