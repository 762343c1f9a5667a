/* quant/stochastic_vec.h: random bits and stochastic rounding, in vectors. Depends on encode_vec.h. What
 * narrow_encode_stochastic() and philox() do for one number. */
#ifndef OPAQ_QUANT_STOCHASTIC_VEC_H
#define OPAQ_QUANT_STOCHASTIC_VEC_H

#include "base/checked.h"
#include "quant/encode_vec.h"
#include "quant/quant_job.h"

/* Where a copy's random bits come from: a block of 16 bytes for every 16 columns of an operand row. */
struct random_source {
    struct opaq_random random;
    uint32_t high_bit;
    int64_t row_blocks;
};

static inline struct random_source random_source(const struct quant_job *job, const struct quant_copy *copy) {
    return (struct random_source){job->random, copy->usage == OPAQ_COLUMNWISE ? 0x80000000u : 0,
                                  ceil_div(copy->operand.columns, 16)};
}

/* The four words of FLOATS blocks. */
struct random_words {
    vec32 word[4];
};

struct wide_product {
    vec32 low;
    vec32 high;
};

VEC_INLINE struct wide_product multiply_wide(vec32 a, uint32_t b) {
    const vec32 even = multiply_even(a, vec32_set(b));
    const vec32 odd = multiply_even(odd_to_even(a), vec32_set(b));
    return (struct wide_product){blend_odd(even, even_to_odd(odd)), blend_odd(odd_to_even(even), odd)};
}

/* philox() of the blocks whose numbers are given. */
VEC_INLINE struct random_words random_blocks(const struct random_source *source, const uint64_t *block) {
    uint32_t low[FLOATS];
    uint32_t high[FLOATS];
    for (int i = 0; i < FLOATS; ++i) {
        low[i] = (uint32_t)block[i];
        high[i] = (uint32_t)(block[i] >> 32);
    }
    vec32 a = vec_load(low);
    vec32 b = vec_load(high);
    vec32 c = vec32_set((uint32_t)source->random.offset);
    vec32 d = vec32_set((uint32_t)(source->random.offset >> 32) | source->high_bit);
    uint32_t key0 = (uint32_t)source->random.seed;
    uint32_t key1 = (uint32_t)(source->random.seed >> 32);
    for (int round = 0; round < 10; ++round) {
        const struct wide_product left = multiply_wide(a, 0xD2511F53u);
        const struct wide_product right = multiply_wide(c, 0xCD9E8D57u);
        a = right.high ^ b ^ key0;
        c = left.high ^ d ^ key1;
        b = right.low;
        d = left.low;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return (struct random_words){{a, b, c, d}};
}

/* The bytes of `count` blocks of an operand row from block `block` on; up to FLOATS blocks more are written. */
static inline void random_row(const struct random_source *source, int64_t row, int64_t block, int64_t count,
                              uint8_t *bytes) {
    for (int64_t i = 0; i < count; i += FLOATS) {
        uint64_t number[FLOATS];
        for (int k = 0; k < FLOATS; ++k) {
            number[k] = (uint64_t)(row * source->row_blocks + block + i + k);
        }
        const struct random_words words = random_blocks(source, number);
        const vec32 first[2] = {dwords_first(words.word[0], words.word[1]),
                                dwords_first(words.word[2], words.word[3])};
        const vec32 second[2] = {dwords_second(words.word[0], words.word[1]),
                                 dwords_second(words.word[2], words.word[3])};
        const vec32 blocks[4] = {quads_first(first[0], first[1]), quads_second(first[0], first[1]),
                                 quads_first(second[0], second[1]), quads_second(second[0], second[1])};
        for (int j = 0; j < 4; ++j) {
            uint8_t lanes[VEC_BYTES];
            vec_store(lanes, blocks[j]);
            for (int lane = 0; lane < LANES; ++lane) {
                memcpy(bytes + (i + 4 * lane + j) * 16, lanes + lane * 16, 16);
            }
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

/* Codes, as words, of a step under finite factors above 0. */
VEC_INLINE vec16 encode_stochastic(struct encode_how how, struct step x, vecf even, vecf odd,
                                   struct step_floats random) {
    const struct step_floats a = step_magnitudes(x, how.dtype);
    const mask16 nans = step_nans(x, how.dtype);
    const vec16 codes = join_words(cut_to_codes(a.even * even, random.even, how.element),
                                   cut_to_codes(a.odd * odd, random.odd, how.element));
    return finish_codes(codes, step_signs(x, how.dtype), nans, nans, how.element);
}

#endif
