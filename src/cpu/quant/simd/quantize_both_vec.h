/* cpu/quant/simd/quantize_both_vec.h: the scales of both copies of mxfp8, mxfp4 and nvfp4 in one pass over x, in
 * vectors. Depends on quantize_blocks_vec.h and columns_vec.h. Specification: docs/formats.md.
 *
 * A part of x is BLOCK rows and BOTH_COLUMNS columns. It is read once for the amaxes of both copies and once for their
 * codes, while the next part is prefetched. Only for rule te, blocks of one row or column, and no NaN. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_BOTH_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_BOTH_VEC_H

#include "cpu/quant/simd/columns_vec.h"
#include "cpu/quant/simd/quantize_blocks_vec.h"

enum { BOTH_COLUMNS = 512, BOTH_STEPS = BOTH_COLUMNS / STEP };

/* What rows and columns are multiplied with, times regular_factor(), and the codes of their scales. Rows have
 * BOTH_COLUMNS / block of them each. */
struct both_scales {
    float row_factors[BOTH_COLUMNS];
    uint8_t row_codes[BOTH_COLUMNS];
    struct step_floats column_factors[BOTH_STEPS];
    uint8_t column_codes[BOTH_COLUMNS];
    /* no element is NaN, infinite or scaled beyond the largest value; of columns, in two steps from an even one on */
    bool row_is_regular[BLOCK_ROW_LIMIT];
    bool column_is_regular[BOTH_STEPS];
    bool is_regular; /* all of them */
    bool has_nans;
};

/* G of each row and each column of a part, and one over it; nvfp4 only. */
struct both_globals {
    float row[HELD_ROWS];
    const struct step_floats *column;
    const struct step_floats *column_inverse;
};

VEC_INLINE struct block_scales both_scales_of(struct encode_how how, const struct opaq_spec *spec, vecf amax,
                                              vecf global, vecf inverse) {
    return BLOCKS_ARE_NVFP4 ? nvfp4_scales(amax, global, inverse, spec, true)
                            : mx_scales(amax, how.element, spec, true);
}

/* Vectors that hold FLOATS blocks of a row; at most 32. */
VEC_INLINE int both_parts(enum opaq_element dtype) { return BLOCK * FLOATS * element_bytes(dtype) / VEC_BYTES; }

/* The amaxes of FLOATS blocks in each row; they are joined to the keys of the columns. A NaN stays one. */
VEC_INLINE void both_amaxes(enum opaq_element dtype, const char *x, int64_t row_bytes, vec32 *column_keys,
                            float *amaxes, int amax_step) {
    enum { PART_LIMIT = 32 };
    vec32 columns[PART_LIMIT];
    for (int i = 0; i < both_parts(dtype); ++i) {
        columns[i] = vec32_set(0);
    }
    for (int row = 0; row < BLOCK; ++row) {
        vec32 key[PART_LIMIT];
        for (int i = 0; i < both_parts(dtype); ++i) {
            key[i] = key_of(vec_load(x + row * row_bytes + i * VEC_BYTES), dtype, false);
            columns[i] = key_max(columns[i], key[i], dtype);
        }
        const vec32 folded = fold_keys(key, both_parts(dtype), dtype);
        vec_store(amaxes + row * amax_step, (vec32)magnitudes_as_floats(folded, dtype));
    }
    for (int i = 0; i < both_parts(dtype); ++i) {
        column_keys[i] = columns[i];
    }
}

/* From the amaxes of `blocks` blocks of a row to their factors, in the same place, and codes. */
VEC_INLINE void both_row_scales(struct encode_how how, const struct opaq_spec *spec, int blocks, float global,
                                float *factors, uint8_t *codes, bool *is_regular, bool *has_nans) {
    bool all_are_regular = true;
    vec32 largest = vec32_set(0);
    for (int b = 0; b < blocks; b += FLOATS) {
        const vecf amax = (vecf)vec_load(factors + b);
        const struct block_scales scales =
            both_scales_of(how, spec, amax, vecf_set(global), vecf_set(1.0f / global));
        vec_store(factors + b, (vec32)(scales.factors * regular_factor(how.element)));
        store_low_bytes(codes + b, scales.codes);
        all_are_regular = all_are_regular && scales.is_regular;
        largest = max32(largest, (vec32)amax);
    }
    *is_regular = all_are_regular;
    *has_nans = *has_nans || any32(above32(largest, 0x7F800000u));
}

/* G of step s of columns, or one over it; 1 where the format has none. */
VEC_INLINE struct step_floats both_globals_at(const struct both_globals *globals, bool is_inverse, int s) {
    if (BLOCKS_ARE_NVFP4) {
        return is_inverse ? globals->column_inverse[s] : globals->column[s];
    }
    return (struct step_floats){vecf_set(1.0f), vecf_set(1.0f)};
}

/* Two steps of columns. */
VEC_INLINE void both_column_steps(struct encode_how how, const struct opaq_spec *spec,
                                  const struct step keys[2], int s, const struct both_globals *globals,
                                  struct step_floats factors[2], uint8_t *codes, bool *is_regular) {
    vec16 words[2];
    for (int i = 0; i < 2; ++i) {
        const struct step_floats amax = step_amaxes(keys[i], how.dtype, false);
        const struct step_floats global = both_globals_at(globals, false, s + i);
        const struct step_floats inverse = both_globals_at(globals, true, s + i);
        const struct block_scales even = both_scales_of(how, spec, amax.even, global.even, inverse.even);
        const struct block_scales odd = both_scales_of(how, spec, amax.odd, global.odd, inverse.odd);
        words[i] = join_words(even.codes & 0xFFu, odd.codes & 0xFFu);
        factors[i] = (struct step_floats){even.factors * regular_factor(how.element),
                                          odd.factors * regular_factor(how.element)};
        *is_regular = *is_regular && even.is_regular && odd.is_regular;
    }
    vec_store(codes, pack_bytes(words[0], words[1]));
}

VEC_INLINE void both_find_scales(struct encode_how how, const struct opaq_spec *spec, const char *x,
                                 int64_t row_bytes, const struct both_globals *globals,
                                 struct both_scales *scales) {
    enum { PARTS = BOTH_COLUMNS * 4 / VEC_BYTES };
    const int64_t bytes = element_bytes(how.dtype);
    const int step_parts = how.dtype == OPAQ_F32 ? 2 : 1;
    const int blocks = BOTH_COLUMNS / BLOCK;
    vec32 keys[PARTS];
    scales->is_regular = true;
    scales->has_nans = false;
    for (int b = 0; b < blocks; b += FLOATS) {
        const int64_t place = b * BLOCK * bytes;
        both_amaxes(how.dtype, x + place, row_bytes, keys + place / VEC_BYTES, scales->row_factors + b, blocks);
    }
    for (int row = 0; row < BLOCK; ++row) {
        both_row_scales(how, spec, blocks, BLOCKS_ARE_NVFP4 ? globals->row[row] : 1.0f,
                        scales->row_factors + row * blocks, scales->row_codes + row * blocks,
                        &scales->row_is_regular[row], &scales->has_nans);
        scales->is_regular = scales->is_regular && scales->row_is_regular[row];
    }
    for (int s = 0; s < BOTH_STEPS; s += 2) {
        const vec32 *const first = keys + s * step_parts;
        const struct step steps[2] = {{{first[0], first[step_parts - 1]}},
                                      {{first[step_parts], first[2 * step_parts - 1]}}};
        scales->column_is_regular[s] = true;
        both_column_steps(how, spec, steps, s, globals, &scales->column_factors[s],
                          scales->column_codes + s * STEP, &scales->column_is_regular[s]);
        scales->is_regular = scales->is_regular && scales->column_is_regular[s];
    }
}

/* The same out of line. */
VEC_OUTLINE void both_find_scales_of(const struct block_kind *kind, const char *x, int64_t row_bytes,
                                     const struct both_globals *globals, struct both_scales *scales) {
    FOR_BLOCK_TE(kind->how, both_find_scales(HOW, kind->spec, x, row_bytes, globals, scales));
}

/* Codes of a step under factors that were multiplied with regular_factor(), which does not round. */
VEC_INLINE vec16 both_encode(struct encode_how how, struct step step, vecf even, vecf odd, bool is_regular) {
    const float up = 1.0f / regular_factor(how.element);
    return is_regular ? encode_regular(step, how.dtype, how.element, even, odd)
                      : encode_step(how, step, even * up, odd * up);
}

/* For the rowwise copy. */
VEC_INLINE vec16 both_along(struct encode_how how, struct step step, const float *row_factors, int s,
                            bool is_regular) {
    const vecf factor =
        (int)STEP > (int)BLOCK ? load_two(&row_factors[2 * s]) : vecf_set(row_factors[s * STEP / BLOCK]);
    return both_encode(how, step, factor, factor, is_regular);
}

/* For the columnwise copy. */
VEC_INLINE vec16 both_down(struct encode_how how, struct step step, const struct step_floats *factors, int s,
                           bool is_regular) {
    return both_encode(how, step, factors[s].even, factors[s].odd, is_regular);
}

/* Prefetches a step. */
VEC_INLINE void prefetch_step(const char *x, enum opaq_element dtype) {
    for (int i = 0; i < STEP * element_bytes(dtype); i += 64) {
        __builtin_prefetch(x + i);
    }
}

#endif
