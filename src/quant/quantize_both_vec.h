/* quant/quantize_both_vec.h: the scales of both copies of mxfp8, mxfp4 and nvfp4 in one pass over x, in vectors. Depends
 * on quantize_blocks_vec.h and columns_vec.h. Specification: docs/formats.md.
 *
 * A part of x is a block of rows, so many rows as a block is long, and BOTH_COLUMNS columns. It is read once for the amaxes
 * of both copies and once for their codes, while memory is asked for the next part. That is for what is usual: rule te,
 * blocks of one row or column, no NaN. */
#ifndef OPAQ_QUANT_QUANTIZE_BOTH_VEC_H
#define OPAQ_QUANT_QUANTIZE_BOTH_VEC_H

#include "quant/columns_vec.h"
#include "quant/quantize_blocks_vec.h"

enum { BOTH_COLUMNS = 512, BOTH_STEPS = BOTH_COLUMNS / STEP };

/* What rows and columns are multiplied with, times plain_factor(), and the codes of their scales. Rows have
 * BOTH_COLUMNS / block of them each. */
struct both_scales {
    float row_factors[BOTH_COLUMNS];
    uint8_t row_codes[BOTH_COLUMNS];
    struct step_floats column_factors[BOTH_STEPS];
    uint8_t column_codes[BOTH_COLUMNS];
    /* no element is NaN, infinite or scaled beyond the largest value; of columns, in two steps from an even one on */
    bool row_is_plain[BLOCK_ROW_LIMIT];
    bool column_is_plain[BOTH_STEPS];
    bool is_plain; /* all of them */
    bool has_nans;
};

/* G of each row and each column of a part, and one over it; nvfp4 only. */
struct both_globals {
    float row[HELD_ROWS];
    const float *column;
    const float *column_inverse;
};

VEC_INLINE struct block_scales both_scales_of(struct block_kind kind, vecf amax, vecf global, vecf inverse) {
    return kind.is_nvfp4 ? nvfp4_scales(amax, global, inverse, kind.spec, true)
                         : mx_scales(amax, kind.how.element, kind.spec, true);
}

/* FLOATS blocks of a row; their keys are joined to those of the columns. */
VEC_INLINE void both_row_group(struct block_kind kind, const char *x, float global, vec32 *column_keys,
                               float *factors, uint8_t *codes, bool *is_plain, bool *has_nans) {
    enum { PART_LIMIT = 32 };
    vec32 key[PART_LIMIT];
    const enum opaq_element dtype = kind.how.dtype;
    const int parts = kind.block * FLOATS * element_bytes(dtype) / VEC_BYTES;
    for (int i = 0; i < parts; ++i) {
        key[i] = key_of(vec_load(x + i * VEC_BYTES), dtype, false);
        column_keys[i] = key_max(column_keys[i], key[i], dtype);
    }
    const vecf amax = magnitudes_to_floats(fold_keys(key, parts, dtype), dtype);
    const struct block_scales scales = both_scales_of(kind, amax, vecf_set(global), vecf_set(1.0f / global));
    vec_store(factors, (vec32)(scales.factors * plain_factor(kind.how.element)));
    store_low_bytes(codes, scales.codes);
    *is_plain = *is_plain && scales.is_plain;
    *has_nans = *has_nans || any32(above32((vec32)amax, 0x7F800000u));
}

VEC_INLINE struct step_floats both_globals_of(const float *globals) {
    const vec32 first = vec_load(globals);
    const vec32 second = vec_load(globals + FLOATS);
    return (struct step_floats){(vecf)split_even(first, second), (vecf)split_odd(first, second)};
}

/* Two steps of columns. */
VEC_INLINE void both_column_steps(struct block_kind kind, const struct step keys[2], int64_t c,
                                  const struct both_globals *globals, struct step_floats factors[2],
                                  uint8_t *codes, bool *is_plain) {
    vec16 words[2];
    for (int i = 0; i < 2; ++i) {
        const struct step_floats amax = step_amaxes(keys[i], kind.how.dtype, false);
        struct step_floats global = {vecf_set(1.0f), vecf_set(1.0f)};
        struct step_floats inverse = global;
        if (kind.is_nvfp4) {
            global = both_globals_of(globals->column + c + i * STEP);
            inverse = both_globals_of(globals->column_inverse + c + i * STEP);
        }
        const struct block_scales even = both_scales_of(kind, amax.even, global.even, inverse.even);
        const struct block_scales odd = both_scales_of(kind, amax.odd, global.odd, inverse.odd);
        words[i] = join_words(even.codes & 0xFFu, odd.codes & 0xFFu);
        factors[i] = (struct step_floats){even.factors * plain_factor(kind.how.element),
                                          odd.factors * plain_factor(kind.how.element)};
        *is_plain = *is_plain && even.is_plain && odd.is_plain;
    }
    vec_store(codes, pack_bytes(words[0], words[1]));
}

VEC_INLINE void both_find_scales(struct block_kind kind, const char *x, int64_t row_bytes,
                                 const struct both_globals *globals, struct both_scales *scales) {
    enum { PARTS = BOTH_COLUMNS * 4 / VEC_BYTES };
    const int64_t bytes = element_bytes(kind.how.dtype);
    const int step_parts = kind.how.dtype == OPAQ_F32 ? 2 : 1;
    const int blocks = BOTH_COLUMNS / kind.block;
    vec32 keys[PARTS];
    memset(keys, 0, sizeof keys);
    scales->is_plain = true;
    scales->has_nans = false;
    for (int row = 0; row < kind.block; ++row) {
        scales->row_is_plain[row] = true;
        for (int b = 0; b < blocks; b += FLOATS) {
            const int64_t place = b * kind.block * bytes;
            both_row_group(kind, x + row * row_bytes + place, kind.is_nvfp4 ? globals->row[row] : 1.0f,
                           keys + place / VEC_BYTES, scales->row_factors + row * blocks + b,
                           scales->row_codes + row * blocks + b, &scales->row_is_plain[row], &scales->has_nans);
        }
        scales->is_plain = scales->is_plain && scales->row_is_plain[row];
    }
    for (int s = 0; s < BOTH_STEPS; s += 2) {
        const vec32 *const first = keys + s * step_parts;
        const struct step steps[2] = {{{first[0], first[step_parts - 1]}},
                                      {{first[step_parts], first[2 * step_parts - 1]}}};
        scales->column_is_plain[s] = true;
        both_column_steps(kind, steps, s * STEP, globals, &scales->column_factors[s],
                          scales->column_codes + s * STEP, &scales->column_is_plain[s]);
        scales->is_plain = scales->is_plain && scales->column_is_plain[s];
    }
}

/* Codes of a step under factors that were multiplied with plain_factor(), which does not round. */
VEC_INLINE vec16 both_encode(struct encode_how how, struct step step, vecf even, vecf odd, bool is_plain) {
    const float up = 1.0f / plain_factor(how.element);
    return is_plain ? encode_plain(step, how.dtype, how.element, even, odd)
                    : encode_step(how, step, even * up, odd * up);
}

/* For the rowwise copy. */
VEC_INLINE vec16 both_along(struct block_kind kind, struct step step, const float *row_factors, int s,
                            bool is_plain) {
    const int group_steps = kind.block * FLOATS / STEP;
    const vecf factor =
        step_factors(row_factors + s / group_steps * FLOATS, s % group_steps, kind.block);
    return both_encode(kind.how, step, factor, factor, is_plain);
}

/* For the columnwise copy. */
VEC_INLINE vec16 both_down(struct block_kind kind, struct step step, const struct step_floats *factors, int s,
                           bool is_plain) {
    return both_encode(kind.how, step, factors[s].even, factors[s].odd, is_plain);
}

/* Memory is asked for a step that comes later. */
VEC_INLINE void prefetch_step(const char *x, enum opaq_element dtype) {
    for (int i = 0; i < STEP * element_bytes(dtype); i += 64) {
        __builtin_prefetch(x + i);
    }
}

#endif
