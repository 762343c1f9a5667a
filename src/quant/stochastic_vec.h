/* quant/stochastic_vec.h: random bits and stochastic rounding, in vectors. Depends on encode_vec.h. What
 * narrow_encode_stochastic() and philox() do for one number. */
#ifndef OPAQ_QUANT_STOCHASTIC_VEC_H
#define OPAQ_QUANT_STOCHASTIC_VEC_H

#include "base/checked.h"
#include "quant/encode_vec.h"
#include "quant/quant_job.h"

/* Where a copy's random bits come from: a block of 16 bytes for every 16 columns of an operand row. fp8's columnwise copy
 * is its rowwise one transposed, random bits and all: its blocks are `mirrored`, for 16 rows of an operand column. */
struct random_source {
    struct opaq_random random;
    uint32_t high_bit;
    bool is_mirrored;
    int64_t row_blocks;
};

static inline struct random_source random_source(const struct quant_job *job, const struct quant_copy *copy) {
    const bool is_columnwise = copy->usage == OPAQ_COLUMNWISE;
    const bool is_mirrored = is_columnwise && job->spec.format == OPAQ_FP8;
    return (struct random_source){job->random, is_columnwise && !is_mirrored ? 0x80000000u : 0, is_mirrored,
                                  ceil_div(is_mirrored ? copy->operand.rows : copy->operand.columns, 16)};
}

/* The four words of blocks. */
struct random_words {
    vec32 word[4];
};

enum { RANDOM_PAIRS = VEC_BYTES / 8 };

/* philox() of RANDOM_PAIRS blocks whose numbers are given: words in the even dwords, with anything beside them. */
VEC_INLINE struct random_words random_even(const struct random_source *source,
                                           const uint64_t number[RANDOM_PAIRS]) {
    const vec32 first = vec32_set(0xD2511F53u);
    const vec32 second = vec32_set(0xCD9E8D57u);
    vec32 a = vec_load(number);
    vec32 b = odd_to_even(a);
    vec32 c = vec32_set((uint32_t)source->random.offset);
    vec32 d = vec32_set((uint32_t)(source->random.offset >> 32) | source->high_bit);
    uint32_t key0 = (uint32_t)source->random.seed;
    uint32_t key1 = (uint32_t)(source->random.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const vec32 left = multiply_even(a, first);
        const vec32 right = multiply_even(c, second);
        a = odd_to_even(right) ^ b ^ vec32_set(key0);
        c = odd_to_even(left) ^ d ^ vec32_set(key1);
        b = right;
        d = left;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return (struct random_words){{a, b, c, d}};
}

/* The words of FLOATS blocks: `first`, and so many after it each. */
VEC_INLINE struct random_words random_blocks(const struct random_source *source, uint64_t first,
                                             uint64_t step) {
    uint64_t number[2][RANDOM_PAIRS];
    for (uint64_t i = 0; i < RANDOM_PAIRS; ++i) {
        number[0][i] = first + 2 * i * step;
        number[1][i] = first + (2 * i + 1) * step;
    }
    const struct random_words even = random_even(source, number[0]);
    const struct random_words odd = random_even(source, number[1]);
    struct random_words words;
    for (int i = 0; i < 4; ++i) {
        words.word[i] = blend_odd(even.word[i], even_to_odd(odd.word[i]));
    }
    return words;
}

/* The bytes of `count` blocks of a row from block `block` on; up to FLOATS blocks more are written. */
static inline void random_row(const struct random_source *source, int64_t row, int64_t block, int64_t count,
                              uint8_t *bytes) {
    for (int64_t i = 0; i < count; i += FLOATS) {
        const uint64_t first = (uint64_t)(row * source->row_blocks + block + i);
        for (uint64_t half = 0; half < 2; ++half) {
            /* in an order that leaves LANES of them in a vector */
            uint64_t number[RANDOM_PAIRS];
            for (uint64_t k = 0; k < RANDOM_PAIRS; ++k) {
                number[k] = first + half * RANDOM_PAIRS + k % 2 * LANES + k / 2;
            }
            const struct random_words words = random_even(source, number);
            const vec32 low = blend_odd(words.word[0], even_to_odd(words.word[1]));
            const vec32 high = blend_odd(words.word[2], even_to_odd(words.word[3]));
            uint8_t *const to = bytes + (i + (int64_t)half * RANDOM_PAIRS) * 16;
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

/* Codes, without signs, of scaled magnitudes that are cut after so many 256ths of a step were added; NaN becomes the
 * largest. */
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

/* Codes, as words, of a step under finite factors above 0; careful ones may be NaN. */
VEC_INLINE vec16 encode_stochastic(struct encode_how how, struct step x, vecf even, vecf odd,
                                   struct step_floats random) {
    const struct step_floats magnitudes = step_magnitudes(x, how.dtype);
    const struct step_floats a = {magnitudes.even * even, magnitudes.odd * odd};
    const mask16 nans = how.is_careful ? scaled_nans(a) : step_nans(x, how.dtype);
    const vec16 codes = join_words(cut_to_codes(a.even, random.even, how.element),
                                   cut_to_codes(a.odd, random.odd, how.element));
    return finish_codes(codes, step_signs(x, how.dtype), nans, nans, how.element);
}

#endif
