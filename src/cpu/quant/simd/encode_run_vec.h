/* cpu/quant/simd/encode_run_vec.h: codes of contiguous elements under one factor, in vectors. Depends on amax_vec.h,
 * random_bytes_vec.h and region_vec.h. */
#ifndef OPAQ_CPU_QUANT_SIMD_ENCODE_RUN_VEC_H
#define OPAQ_CPU_QUANT_SIMD_ENCODE_RUN_VEC_H

#include "base/checked.h"
#include "cpu/quant/simd/amax_vec.h"
#include "cpu/quant/simd/random_bytes_vec.h"
#include "cpu/quant/simd/region_vec.h"

/* Codes of a step under one factor, with its random bytes if it is not rounded to the nearest. */
VEC_INLINE vec16 encode_one(struct encode_how how, struct step step, vecf apply, bool is_regular,
                            const uint8_t *random) {
    return random != NULL ? encode_stochastic(how, step, apply, apply, random_of_bytes(random))
           : is_regular   ? encode_regular(step, how.dtype, how.element, apply, apply)
                          : encode_step(how, step, apply, apply);
}

/* n elements under one factor, with their random bytes if they are not rounded to the nearest. Regular elements take
 * fewer instructions; the factor is the same. */
VEC_INLINE void encode_run(struct encode_how how, const char *x, int64_t n, float factor, bool is_regular,
                           const uint8_t *random, int64_t ahead, uint8_t *data) {
    enum { AT_ONCE = 2 * STEP };
    const int bytes = element_bytes(how.dtype);
    const vecf apply = vecf_set(is_regular ? factor * regular_factor(how.element) : factor);
    for (int64_t i = 0; i < n; i += AT_ONCE) {
        char staged[4 * VEC_BYTES];
        const char *from = x + i * bytes;
        const int64_t inside = min_int64(AT_ONCE, n - i);
        if (inside < AT_ONCE) {
            memset(staged, 0, sizeof staged);
            memcpy(staged, from, (size_t)(inside * bytes));
            from = staged;
        }
        for (int k = 0; ahead != 0 && k < AT_ONCE * bytes; k += 64) {
            __builtin_prefetch(x + i * bytes + ahead + k);
        }
        const struct step first = step_load(from, how.dtype);
        const struct step second = step_load(from + STEP * bytes, how.dtype);
        const vec32 codes =
            pack_bytes(encode_one(how, first, apply, is_regular, random == NULL ? NULL : random + i),
                       encode_one(how, second, apply, is_regular, random == NULL ? NULL : random + i + STEP));
        if (inside < AT_ONCE) {
            vec_store(staged, codes);
            memcpy(data + i, staged, (size_t)inside);
        } else {
            vec_store(data + i, codes);
        }
    }
}

/* Of `rows` rows of n elements under one factor, by a rule other than te. */
struct encode_rows {
    const char *x;
    int64_t row_bytes;
    int64_t rows;
    int64_t n;
    uint8_t *data;
    int64_t data_step;
    int64_t ahead; /* prefetch distance, in bytes; 0 for none */
};

/* encode_run() of rows by a rule other than te, out of line. */
VEC_OUTLINE void encode_rows_not_te(const struct encode_how *how, const struct encode_rows *of, float factor) {
    for (int64_t i = 0; i < of->rows; ++i) {
        FOR_DTYPE(how->dtype, encode_run(encode_not_te(*how, DTYPE, OPAQ_E4M3, true), of->x + i * of->row_bytes,
                                         of->n, factor, false, NULL, of->ahead, of->data + i * of->data_step));
    }
}

/* encode_run() of a whole row of bf16, as checkpoints have it, by a rule other than te; out of line. */
VEC_OUTLINE void encode_bf16_row_not_te(const struct encode_how *how, const char *x, int64_t n, float factor,
                                        int64_t ahead, uint8_t *data) {
    encode_run(encode_not_te(*how, OPAQ_BF16, OPAQ_E4M3, true), x, n, factor, false, NULL, ahead, data);
}

/* encode_run() of any elements, rounded to the nearest or, with random bytes, stochastically; out of line. */
VEC_OUTLINE void encode_any_run(struct encode_how how, const char *x, int64_t n, float factor,
                                const uint8_t *random, int64_t ahead, uint8_t *data) {
    if (how.not_te) {
        encode_rows_not_te(&how, &(struct encode_rows){x, 0, 1, n, data, 0, ahead}, factor);
    } else if (random != NULL) {
        FOR_FP8_TE(how, encode_run(HOW, x, n, factor, false, random, ahead, data));
    } else {
        FOR_FP8_TE(how, encode_run(HOW, x, n, factor, false, NULL, ahead, data));
    }
}

/* Regular elements, a multiple of ENCODE_STEPS, whose keys are added to `keys` unless that is NULL. With `streams`, a
 * constant, stores bypass the caches and `data` is aligned. */
enum { ENCODE_STEPS = 2 * STEP };
VEC_INLINE void encode_regular_steps(struct encode_how how, const char *x, int64_t n, float factor,
                                     int64_t ahead, bool streams, uint8_t *data, struct amax_keys *keys) {
    const int bytes = element_bytes(how.dtype);
    const vecf apply = vecf_set(factor * regular_factor(how.element));
    for (int64_t i = 0; i < n; i += ENCODE_STEPS) {
        const char *const from = x + i * bytes;
        for (int k = 0; k < ENCODE_STEPS * bytes; k += 64) {
            __builtin_prefetch(from + ahead + k);
        }
        const struct step step[2] = {step_load(from, how.dtype), step_load(from + STEP * bytes, how.dtype)};
        for (int k = 0; keys != NULL && k < AMAX_CHAINS; ++k) {
            if (how.dtype == OPAQ_F32 || k % 2 == 0) {
                const vec32 key = key_of(step[k / 2].part[k % 2], how.dtype, false);
                keys->chain[k] = key_max(keys->chain[k], key, how.dtype);
            }
        }
        vec_put(data + i,
                pack_bytes(encode_regular(step[0], how.dtype, how.element, apply, apply),
                           encode_regular(step[1], how.dtype, how.element, apply, apply)),
                streams);
    }
}

/* encode_run() of regular elements, out of line. */
VEC_OUTLINE void encode_regular_run(struct encode_how how, const char *x, int64_t n, float factor,
                                    int64_t ahead, bool streams, uint8_t *data) {
    const int64_t whole = n / ENCODE_STEPS * ENCODE_STEPS;
    FOR_FP8_TE(how, FOR_FLAG(streams, encode_regular_steps(HOW, x, whole, factor, ahead, FLAG, data, NULL)));
    if (whole < n) {
        encode_any_run(how, x + whole * element_bytes(how.dtype), n - whole, factor, NULL, 0, data + whole);
    }
}

/* Whether elements up to this one (NaN standing for any) are regular under a factor. What is scaled to less than half a
 * step beyond the largest value rounds to it. */
VEC_INLINE bool is_regular_amax(struct encode_how how, float amax, float factor) {
    const float half_beyond = how.element == OPAQ_E4M3 ? 464.0f : 61440.0f;
    return !how.not_te && factor >= 0x1p-90f && amax * factor < half_beyond;
}

/* Encodes elements, a multiple of ENCODE_STEPS, as if they were regular, by rule te. Returns whether they are. */
VEC_OUTLINE bool encode_seen_steps(struct encode_how how, const char *x, int64_t n, float factor, int64_t ahead,
                                   bool streams, uint8_t *data) {
    struct amax_keys keys = amax_keys_none();
    uint32_t amax;
    FOR_FP8_TE(how, FOR_FLAG(streams, encode_regular_steps(HOW, x, n, factor, ahead, FLAG, data, &keys)));
    FOR_DTYPE(how.dtype, amax = amax_keys_bits(&keys, DTYPE, false));
    return is_regular_amax(how, float_from_bits(amax), factor);
}

/* Encodes elements whose amax is unknown: as regular ones first, and again if they are not. */
static inline void encode_unseen(struct encode_how how, const char *x, int64_t n, float factor, int64_t ahead,
                                 bool streams, uint8_t *data) {
    enum { AT_ONCE = 2048 };
    int64_t i = 0;
    while (i < n) {
        const char *const from = x + i * element_bytes(how.dtype);
        const int64_t whole = min_int64(AT_ONCE, (n - i) / ENCODE_STEPS * ENCODE_STEPS);
        const bool may_be_regular = !how.not_te && whole > 0;
        const int64_t count = may_be_regular ? whole : min_int64(AT_ONCE, n - i);
        if (!may_be_regular || !encode_seen_steps(how, from, count, factor, ahead, streams, data + i)) {
            finish_streams(); /* before other stores to the same codes */
            encode_any_run(how, from, count, factor, NULL, ahead, data + i);
        }
        i += count;
    }
}

/* Elements of row `row` of x from column c on, rounded stochastically. */
VEC_INLINE void encode_randomly(struct encode_how how, struct random_bytes *random, int64_t row, int64_t c,
                                const char *x, int64_t n, float factor, int64_t ahead, uint8_t *data) {
    const int64_t at_once = random_columns(random);
    for (int64_t i = 0; i < n; i += at_once) {
        const int64_t count = min_int64(at_once, n - i);
        encode_any_run(how, x + i * element_bytes(how.dtype), count, factor,
                       random_bytes(random, row, c + i, count), ahead, data + i);
    }
}

VEC_INLINE const char *operand_at(const struct quant_matrix *m, int64_t r, int64_t c, enum opaq_element dtype) {
    return (const char *)m->data + (r * m->row_step + c) * element_bytes(dtype);
}

#endif
