/* cpu/quant/simd/quantize_nvfp4_columns_vec.h: nvfp4's columnwise copy, in vectors. Depends on columns_vec.h, scales_vec.h and
 * transpose_vec.h. Specification: docs/formats.md.
 *
 * Codes are made row by row of x, four rows to a word, into a strip that is then transposed, because the copy is stored
 * transposed. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_NVFP4_COLUMNS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_NVFP4_COLUMNS_VEC_H

#include "cpu/quant/simd/columns_vec.h"
#include "cpu/quant/simd/four_over_six_vec.h"
#include "cpu/quant/simd/scales_vec.h"
#include "cpu/quant/simd/specialize_vec.h"
#include "cpu/quant/simd/stochastic_vec.h"
#include "cpu/quant/simd/transpose_vec.h"
#include "format/swizzle.h"

/* A strip of this many columns is done at a time: its codes and scales as they lie in x, in rows of so many bytes, until
 * there are enough of them to be turned. Columns are written in runs, since each may lie in a page of its own. */
enum {
    NVFP4_STRIP = 512,
    NVFP4_STRIP_ROWS = 512,
    NVFP4_BLOCKS = NVFP4_STRIP_ROWS / HELD_ROWS,
    NVFP4_QUADS = HELD_ROWS / 4, /* of rows, in a block */
    NVFP4_PITCH = 2 * NVFP4_STRIP + 64,
    NVFP4_SCALE_PITCH = NVFP4_STRIP + 64
};
struct nvfp4_strip {
    _Alignas(VEC_BYTES) uint8_t codes[NVFP4_BLOCKS * NVFP4_QUADS * NVFP4_PITCH]; /* words, of four rows each */
    uint8_t scales[NVFP4_BLOCKS * NVFP4_SCALE_PITCH];
    float global[NVFP4_STRIP];
    float inverse[NVFP4_STRIP]; /* one over it */
    float stored[NVFP4_STRIP];  /* the amax behind it */
};

VEC_INLINE uint8_t *strip_codes(struct nvfp4_strip *strip, int64_t block, int quad, int64_t c) {
    return strip->codes + (block * NVFP4_QUADS + quad) * NVFP4_PITCH + 2 * c;
}

/* How columns become blocks. The first three are constants in what is inlined into an out-of-line function. */
struct nvfp4_columns {
    struct encode_how how; /* of what is encoded, which is bf16 after a Hadamard transform */
    enum opaq_element dtype;
    bool is_hadamard;
    bool is_square;
    const struct opaq_spec *spec;
    const struct random_source *random; /* or NULL: rounded to the nearest */
};

/* Codes of a step of HELD_ROWS rows: those of rows 4i to 4i + 3 in the words of quad[i], and of the scales. */
struct nvfp4_column_codes {
    vec16 quad[NVFP4_QUADS];
    vec16 scale;
};

VEC_INLINE struct step_floats square_amaxes(struct step_floats amax, bool is_square) {
    if (!is_square) {
        return amax;
    }
    const vecf all = (vecf)max_in_halves(max32((vec32)amax.even, (vec32)amax.odd));
    return (struct step_floats){all, all};
}

VEC_INLINE vec16 encode_held(struct encode_how how, struct step x, vecf even, vecf odd, bool is_plain) {
    return is_plain ? encode_plain(x, how.dtype, how.element, even, odd) : encode_step(how, x, even, odd);
}

VEC_INLINE void join_quads(const vec16 codes[HELD_ROWS], vec16 quad[NVFP4_QUADS]) {
    for (int i = 0; i < NVFP4_QUADS; ++i) {
        quad[i] = codes[4 * i] | codes[4 * i + 1] << 4 | codes[4 * i + 2] << 8 | codes[4 * i + 3] << 12;
    }
}

/* Beyond the last row there is code 0, whatever the factor makes of zero. */
VEC_INLINE void encode_held_quads(struct encode_how how, const struct step held[HELD_ROWS], int64_t rows,
                                  vecf even, vecf odd, bool is_plain, vec16 quad[NVFP4_QUADS]) {
    vec16 codes[HELD_ROWS];
    for (int i = 0; i < HELD_ROWS; ++i) {
        codes[i] = i < rows ? encode_held(how, held[i], even, odd, is_plain) : vec16_set(0);
    }
    join_quads(codes, quad);
}

/* The same with stochastic rounding: a column's block of random bits has a byte for each of the rows. */
VEC_INLINE void encode_random_quads(struct encode_how how, const struct step held[HELD_ROWS], int64_t rows,
                                    vecf even, vecf odd, const struct random_source *source, int64_t c,
                                    int64_t block, vec16 quad[NVFP4_QUADS]) {
    const uint64_t step = (uint64_t)source->row_blocks;
    const uint64_t first = (uint64_t)c * step + (uint64_t)block;
    const struct random_words even_words = random_blocks(source, first, 2 * step);
    const struct random_words odd_words = random_blocks(source, first + step, 2 * step);
    vec16 codes[HELD_ROWS];
    for (int i = 0; i < HELD_ROWS; ++i) {
        const int shift = i % 4 * 8;
        const struct step_floats random = {to_floats(even_words.word[i / 4] >> shift & 0xFFu),
                                           to_floats(odd_words.word[i / 4] >> shift & 0xFFu)};
        codes[i] = i < rows ? encode_stochastic(how, held[i], even, odd, random) : vec16_set(0);
    }
    join_quads(codes, quad);
}

/* G of the columns of a step, one over it, and the amax behind it. */
struct nvfp4_column_globals {
    struct step_floats global;
    struct step_floats inverse;
    struct step_floats stored;
};

/* The scales of a step of columns. */
struct nvfp4_column_scales {
    struct block_scales even;
    struct block_scales odd;
};

/* The errors of a step of columns, its even or its odd ones. */
VEC_INLINE struct candidate_errors held_errors(const struct step held[HELD_ROWS], enum opaq_element dtype,
                                               bool is_odd, const struct candidates *candidates, bool is_mse) {
    struct candidate_errors errors = no_errors();
    for (int i = 0; i < HELD_ROWS; ++i) {
        const struct step_floats magnitudes = step_magnitudes(held[i], dtype);
        add_errors(&errors, candidates, is_odd ? magnitudes.odd : magnitudes.even, is_mse);
    }
    return errors;
}

/* With the option 4over6. A square block's errors are summed over its columns, as a tree. */
VEC_INLINE struct nvfp4_column_scales four_over_six_columns(struct nvfp4_columns kind,
                                                            const struct step held[HELD_ROWS],
                                                            struct step_floats amax,
                                                            const struct nvfp4_column_globals *globals,
                                                            bool is_mse) {
    const struct candidates even =
        candidates_of(amax.even, globals->global.even, globals->inverse.even, globals->stored.even, kind.spec);
    const struct candidates odd =
        candidates_of(amax.odd, globals->global.odd, globals->inverse.odd, globals->stored.odd, kind.spec);
    struct candidate_errors even_errors = held_errors(held, kind.how.dtype, false, &even, is_mse);
    struct candidate_errors odd_errors = held_errors(held, kind.how.dtype, true, &odd, is_mse);
    if (kind.is_square) {
        even_errors.six = sum_in_halves(even_errors.six) + sum_in_halves(odd_errors.six);
        even_errors.four = sum_in_halves(even_errors.four) + sum_in_halves(odd_errors.four);
        odd_errors = even_errors;
    }
    return (struct nvfp4_column_scales){better_scales(&even, &even_errors), better_scales(&odd, &odd_errors)};
}

VEC_INLINE struct nvfp4_column_scales nvfp4_column_scales(struct nvfp4_columns kind,
                                                          const struct step held[HELD_ROWS],
                                                          struct step_floats amax,
                                                          const struct nvfp4_column_globals *globals) {
    const bool is_te = !kind.how.is_careful;
    if (is_te && !kind.is_hadamard && (kind.spec->options & OPAQ_4OVER6) != 0) {
        return kind.spec->error_mode == OPAQ_ERROR_MODE_MSE
                   ? four_over_six_columns(kind, held, amax, globals, true)
                   : four_over_six_columns(kind, held, amax, globals, false);
    }
    return (struct nvfp4_column_scales){
        nvfp4_scales(amax.even, globals->global.even, globals->inverse.even, kind.spec, is_te),
        nvfp4_scales(amax.odd, globals->global.odd, globals->inverse.odd, kind.spec, is_te)};
}

/* A step of columns from c on; `block` counts blocks down the columns. */
VEC_INLINE struct nvfp4_column_codes nvfp4_column_step(struct nvfp4_columns kind,
                                                       const struct step held[HELD_ROWS], int64_t rows,
                                                       const struct nvfp4_column_globals *globals, int64_t c,
                                                       int64_t block) {
    const bool is_te = !kind.how.is_careful;
    struct step_floats amax = held_amaxes(held, kind.how.dtype, false);
    const bool drops_nans = is_te && has_nans(amax);
    if (drops_nans) {
        amax = held_amaxes(held, kind.how.dtype, true);
    }
    amax = square_amaxes(amax, kind.is_square);
    const struct nvfp4_column_scales scales = nvfp4_column_scales(kind, held, amax, globals);
    const struct block_scales even = scales.even;
    const struct block_scales odd = scales.odd;
    struct nvfp4_column_codes codes;
    codes.scale = join_words(even.codes & 0xFFu, odd.codes & 0xFFu);
    if (is_te && kind.random != NULL) {
        encode_random_quads(kind.how, held, rows, even.factors, odd.factors, kind.random, c, block, codes.quad);
    } else if (is_te && even.is_plain && odd.is_plain && !drops_nans) {
        const float down = plain_factor(OPAQ_E2M1);
        encode_held_quads(kind.how, held, HELD_ROWS, even.factors * down, odd.factors * down, true, codes.quad);
    } else {
        encode_held_quads(kind.how, held, rows, even.factors, odd.factors, false, codes.quad);
    }
    return codes;
}

/* Scale bytes of up to TILE columns from c on, from block `block` on, at most 16; scales[i * NVFP4_SCALE_PITCH] is a row
 * of them. */
VEC_OUTLINE void store_column_scales(const struct quant_copy *copy, int64_t c, int64_t columns, int64_t block,
                                     int64_t blocks, const uint8_t *scales) {
    vec32 row[16];
    uint8_t turned[16 * TILE];
    for (int i = 0; i < 16; ++i) {
        row[i] = i < blocks ? vec_load(scales + i * NVFP4_SCALE_PITCH) : vec32_set(0);
    }
    transpose_lanes(row);
    for (int i = 0; i < 16; ++i) {
        vec_store(turned + i * TILE, row[i]);
    }
    const struct scale_layout *layout = &copy->scale_layout;
    uint8_t *const scale = copy->scale;
    for (int64_t i = 0; i < columns; ++i) {
        const uint8_t *const from = turned + i % 16 * TILE + i / 16 * 16;
        if (layout->swizzled_columns != 0) {
            for (int64_t b = 0; b < blocks; b += SWIZZLE_COLUMNS) {
                memcpy(scale + swizzle_offset(c + i, block + b, layout->swizzled_columns), from + b,
                       (size_t)min_int64(SWIZZLE_COLUMNS, blocks - b));
            }
        } else if (blocks == 16) {
            memcpy(scale + (c + i) * layout->row_step + block, from, 16);
        } else {
            memcpy(scale + (c + i) * layout->row_step + block, from, (size_t)blocks);
        }
    }
}

/* A number for each column of a step. */
VEC_INLINE struct step_floats split_columns(const float *numbers) {
    const vec32 first = vec_load(numbers);
    const vec32 second = vec_load(numbers + FLOATS);
    return (struct step_floats){(vecf)split_even(first, second), (vecf)split_odd(first, second)};
}

static inline void nvfp4_strip_begin(struct nvfp4_strip *strip, const struct opaq_spec *spec,
                                     const struct quant_copy *copy, int64_t c, int64_t columns) {
    const int different = copy->amax_step == 0 ? 1 : NVFP4_STRIP;
    for (int k = 0; k < different; ++k) { /* the last one's, beyond it */
        strip->stored[k] = copy->amax[(c + min_int64(k, columns - 1)) * copy->amax_step];
        strip->global[k] = nvfp4_global_of_stored(spec, strip->stored[k]);
        strip->inverse[k] = 1.0f / strip->global[k];
    }
    for (int k = different; k < NVFP4_STRIP; ++k) {
        strip->stored[k] = strip->stored[0];
        strip->global[k] = strip->global[0];
        strip->inverse[k] = strip->inverse[0];
    }
}

/* The codes of block `block` of a strip: `rows` rows from `row` on. */
VEC_INLINE void nvfp4_strip_block(struct nvfp4_columns kind, const struct quant_copy *copy,
                                  struct nvfp4_strip *strip, int64_t block, int64_t row, int64_t rows,
                                  int64_t c, int64_t columns, bool prefetches) {
    enum { STEPS = TILE / STEP };
    const int64_t bytes = element_bytes(kind.dtype);
    char staged[HELD_ROWS * TILE * 4];
    const struct hadamard_quarters quarters = hadamard_quarters(kind.spec->hadamard_mask);
    for (int64_t i = 0; i < columns; i += TILE) {
        struct nvfp4_column_codes codes[STEPS];
        const struct column_source source =
            column_source_at(&copy->operand, row, rows, c + i, columns - i, TILE, kind.dtype, staged);
        for (int s = 0; s < STEPS; ++s) {
            struct step held[HELD_ROWS];
            const int64_t place = s * STEP * bytes;
            if (rows == HELD_ROWS) {
                hold_rows(&source, 0, HELD_ROWS, place, kind.dtype, held);
            } else {
                hold_rows(&source, 0, rows, place, kind.dtype, held);
            }
            if (prefetches) {
                for (int k = 0; k < HELD_ROWS; ++k) {
                    __builtin_prefetch(source.x + (k + HELD_ROWS) * source.row_bytes + place);
                }
            }
            if (kind.is_hadamard) { /* a group is stored whole, beyond the last row too */
                transform_held(held, kind.dtype, &quarters);
            }
            const struct nvfp4_column_globals globals = {split_columns(strip->global + i + s * STEP),
                                                         split_columns(strip->inverse + i + s * STEP),
                                                         split_columns(strip->stored + i + s * STEP)};
            codes[s] = nvfp4_column_step(kind, held, kind.is_hadamard ? HELD_ROWS : rows, &globals,
                                         c + i + s * STEP, row / HELD_ROWS);
        }
        for (int k = 0; k < STEPS * NVFP4_QUADS; ++k) {
            vec_store(strip_codes(strip, block, k % NVFP4_QUADS, i + k / NVFP4_QUADS * STEP),
                      (vec32)codes[k / NVFP4_QUADS].quad[k % NVFP4_QUADS]);
        }
        vec_store(strip->scales + block * NVFP4_SCALE_PITCH + i, pack_bytes(codes[0].scale, codes[1].scale));
    }
}

/* With constants. */
VEC_INLINE struct nvfp4_columns nvfp4_columns_kind(struct nvfp4_columns kind, enum opaq_element dtype,
                                                   bool is_hadamard, bool is_careful) {
    const enum opaq_element encoded = is_hadamard ? OPAQ_BF16 : dtype;
    kind.how = encode_simply(encoded, OPAQ_E2M1);
    if (is_careful) {
        kind.how = encode_carefully(kind.how, encoded, OPAQ_E2M1, true);
        kind.how.drops_zero_sign = true;
    }
    kind.dtype = dtype;
    kind.is_hadamard = is_hadamard;
    return kind;
}

/* nvfp4_strip_block() out of line. */
VEC_OUTLINE void nvfp4_careful_strip_block(const struct nvfp4_columns *kind, const struct quant_copy *copy,
                                           struct nvfp4_strip *strip, int64_t block, int64_t row, int64_t rows,
                                           int64_t c, int64_t columns, bool prefetches) {
    if (kind->is_hadamard) {
        FOR_DTYPE(kind->dtype, nvfp4_strip_block(nvfp4_columns_kind(*kind, DTYPE, true, true), copy, strip,
                                                 block, row, rows, c, columns, prefetches));
    } else {
        FOR_DTYPE(kind->dtype, nvfp4_strip_block(nvfp4_columns_kind(*kind, DTYPE, false, true), copy, strip,
                                                 block, row, rows, c, columns, prefetches));
    }
}

VEC_OUTLINE void nvfp4_hadamard_strip_block(const struct nvfp4_columns *kind, const struct quant_copy *copy,
                                            struct nvfp4_strip *strip, int64_t block, int64_t row, int64_t rows,
                                            int64_t c, int64_t columns, bool prefetches) {
    FOR_DTYPE(kind->dtype, nvfp4_strip_block(nvfp4_columns_kind(*kind, DTYPE, true, false), copy, strip, block,
                                             row, rows, c, columns, prefetches));
}

VEC_OUTLINE void nvfp4_strip_block_of(const struct nvfp4_columns *kind, const struct quant_copy *copy,
                                      struct nvfp4_strip *strip, int64_t block, int64_t row, int64_t rows,
                                      int64_t c, int64_t columns, bool prefetches) {
    if (kind->how.is_careful) {
        nvfp4_careful_strip_block(kind, copy, strip, block, row, rows, c, columns, prefetches);
    } else if (kind->is_hadamard) {
        nvfp4_hadamard_strip_block(kind, copy, strip, block, row, rows, c, columns, prefetches);
    } else {
        FOR_DTYPE(kind->dtype, nvfp4_strip_block(nvfp4_columns_kind(*kind, DTYPE, false, false), copy, strip,
                                                 block, row, rows, c, columns, prefetches));
    }
}

/* Codes of a block of a strip, 8 bytes of a column: of those columns that lie in the first or in the second halves of
 * lanes, two of each lane in each vector. */
VEC_INLINE void turn_block(const uint8_t *words, bool second, vec32 columns[2]) {
    vec32 quad[NVFP4_QUADS];
    vec32 half[2];
    for (int i = 0; i < NVFP4_QUADS; ++i) {
        quad[i] = vec_load(words + i * NVFP4_PITCH);
    }
    for (int i = 0; i < 2; ++i) {
        half[i] =
            second ? words_second(quad[2 * i], quad[2 * i + 1]) : words_first(quad[2 * i], quad[2 * i + 1]);
    }
    columns[0] = dwords_first(half[0], half[1]);
    columns[1] = dwords_second(half[0], half[1]);
}

/* Half of a step's columns of QUADS blocks: a vector of each. */
VEC_INLINE void turn_half(const uint8_t *words, bool second, uint8_t *to, int64_t step, bool streams) {
    vec32 row[2][QUADS];
    for (int i = 0; i < QUADS; ++i) {
        vec32 each[2];
        turn_block(words + i * NVFP4_QUADS * NVFP4_PITCH, second, each);
        row[0][i] = each[0];
        row[1][i] = each[1];
    }
    for (int k = 0; k < 2; ++k) {
        vec32 column[QUADS];
        transpose_quads(row[k], column);
        for (int i = 0; i < QUADS; ++i) {
            const int c = i % LANES * 8 + (second ? 4 : 0) + 2 * k + i / LANES;
            vec_put(to + c * step, column[i], streams);
        }
    }
}

VEC_INLINE void turn_step(const uint8_t *words, uint8_t *to, int64_t step, bool streams) {
    turn_half(words, false, to, step, streams);
    turn_half(words, true, to, step, streams);
}

/* The same with fewer columns, or fewer bytes of them. */
VEC_OUTLINE void turn_partly(const uint8_t *words, int64_t columns, int64_t bytes, uint8_t *to, int64_t step) {
    uint8_t staged[STEP * VEC_BYTES];
    turn_step(words, staged, VEC_BYTES, false);
    for (int64_t i = 0; i < columns; ++i) {
        memcpy(to + i * step, staged + i * VEC_BYTES, (size_t)bytes);
    }
}

/* A strip of `blocks` blocks from row `row` on to where it goes. */
VEC_OUTLINE void nvfp4_strip_end(struct nvfp4_strip *strip, const struct quant_copy *copy, int64_t row,
                                 int64_t blocks, int64_t c, int64_t columns) {
    const int64_t block_bytes = HELD_ROWS / 2;
    const int64_t step = copy->data_row_step / 2;
    uint8_t *const to = copy->data + c * step + row / 2;
    const bool streams = turns_past_caches(to, step, copy->operand.rows * step);
    for (int64_t i = 0; i < columns; i += STEP) {
        for (int64_t b = 0; b < blocks; b += QUADS) {
            const uint8_t *const words = strip_codes(strip, b, 0, i);
            uint8_t *const first = to + i * step + b * block_bytes;
            if (columns - i < STEP || blocks - b < QUADS) {
                turn_partly(words, min_int64(STEP, columns - i), min_int64(QUADS, blocks - b) * block_bytes,
                            first, step);
            } else if (streams) {
                turn_step(words, first, step, true);
            } else {
                turn_step(words, first, step, false);
            }
        }
    }
    for (int64_t i = 0; i < columns; i += TILE) {
        for (int64_t b = 0; b < blocks; b += 16) {
            store_column_scales(copy, c + i, min_int64(TILE, columns - i), row / HELD_ROWS + b,
                                min_int64(16, blocks - b), strip->scales + b * NVFP4_SCALE_PITCH + i);
        }
    }
}

#endif
