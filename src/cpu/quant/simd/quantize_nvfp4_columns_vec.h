/* cpu/quant/simd/quantize_nvfp4_columns_vec.h: nvfp4's columnwise copy, in vectors. Depends on columns_vec.h,
 * scales_vec.h and transpose_vec.h. Specification: docs/formats.md.
 *
 * Codes are computed row by row of x, four rows to a word, into a buffer that is then transposed, because the copy is
 * stored transposed. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_NVFP4_COLUMNS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_NVFP4_COLUMNS_VEC_H

#include "cpu/quant/simd/columns_vec.h"
#include "cpu/quant/simd/four_over_six_vec.h"
#include "cpu/quant/simd/scales_vec.h"
#include "cpu/quant/simd/specialize_vec.h"
#include "cpu/quant/simd/stochastic_vec.h"
#include "cpu/quant/simd/transpose_vec.h"
#include "format/swizzle.h"

/* Codes and scales of NVFP4_BUFFER_ROWS rows and NVFP4_BUFFER_COLUMNS columns, in the order of x, to be transposed
 * together: each column of the copy may lie in a page of its own, so it is written in long runs. Pitches are bytes of a
 * row. */
enum {
    NVFP4_BUFFER_COLUMNS = 512,
    NVFP4_BUFFER_ROWS = 512,
    NVFP4_BLOCKS = NVFP4_BUFFER_ROWS / HELD_ROWS,
    NVFP4_QUADS = HELD_ROWS / 4, /* of rows, in a block */
    NVFP4_PITCH = 2 * NVFP4_BUFFER_COLUMNS + 64,
    NVFP4_SCALE_PITCH = NVFP4_BUFFER_COLUMNS + 64
};
struct nvfp4_buffer {
    _Alignas(VEC_BYTES) uint8_t codes[NVFP4_BLOCKS * NVFP4_QUADS * NVFP4_PITCH]; /* words, of four rows each */
    uint8_t scales[NVFP4_BLOCKS * NVFP4_SCALE_PITCH];
    struct step_floats global[NVFP4_BUFFER_COLUMNS / STEP];
    struct step_floats inverse[NVFP4_BUFFER_COLUMNS / STEP]; /* 1 / global */
    struct step_floats stored[NVFP4_BUFFER_COLUMNS / STEP];  /* the amax that `global` is computed from */
};

VEC_INLINE uint8_t *buffer_codes(struct nvfp4_buffer *buffer, int64_t block, int quad, int64_t c) {
    return buffer->codes + (block * NVFP4_QUADS + quad) * NVFP4_PITCH + 2 * c;
}

/* How columns become blocks. */
struct nvfp4_columns {
    struct encode_how how;
    bool is_hadamard;
    bool is_square;
    const struct opaq_spec *spec;
    const struct random_source *random; /* or NULL: rounded to the nearest */
};

/* Constants of inlined functions. Only rule te supports stochastic rounding and 4over6, and not both. */
struct nvfp4_column_how {
    struct encode_how encode;
    bool is_random;
    bool is_4over6;
};

/* By the rules of other software. */
VEC_INLINE struct encode_how nvfp4_not_te(enum opaq_element dtype) {
    return (struct encode_how){
        .dtype = dtype, .element = OPAQ_E2M1, .not_te = true, .divides = true, .drops_zero_sign = true};
}

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

VEC_INLINE vec16 encode_held(struct encode_how how, struct step x, vecf even, vecf odd, bool is_regular) {
    return is_regular ? encode_regular(x, how.dtype, how.element, even, odd) : encode_step(how, x, even, odd);
}

/* Stores code 0 beyond the last of `rows` rows, even where the factor would turn zero into something else. */
VEC_INLINE void join_quads(vec16 codes[HELD_ROWS], int64_t rows, vec16 quad[NVFP4_QUADS]) {
    if (rows < HELD_ROWS) {
        for (int i = 0; i < HELD_ROWS; ++i) {
            codes[i] = i < rows ? codes[i] : vec16_set(0);
        }
    }
    for (int i = 0; i < NVFP4_QUADS; ++i) {
        quad[i] = codes[4 * i] | codes[4 * i + 1] << 4 | codes[4 * i + 2] << 8 | codes[4 * i + 3] << 12;
    }
}

VEC_INLINE void encode_held_quads(struct encode_how how, const struct step held[HELD_ROWS], int64_t rows,
                                  vecf even, vecf odd, bool is_regular, vec16 quad[NVFP4_QUADS]) {
    vec16 codes[HELD_ROWS];
    for (int i = 0; i < HELD_ROWS; ++i) {
        codes[i] = encode_held(how, held[i], even, odd, is_regular);
    }
    join_quads(codes, rows, quad);
}

/* The random words of block `block` of the columns of a step from c on: the even ones', then the odd ones'. */
VEC_OUTLINE void column_random_words(const struct random_source *source, int64_t c, int64_t block,
                                     struct random_words words[2]) {
    const uint64_t step = (uint64_t)source->row_blocks;
    const uint64_t first = (uint64_t)c * step + (uint64_t)block;
    words[0] = random_blocks(source, first, 2 * step);
    words[1] = random_blocks(source, first + step, 2 * step);
}

/* The same with stochastic rounding: a column's block of random bits has a byte for each of the rows. */
VEC_INLINE void encode_random_quads(struct encode_how how, const struct step held[HELD_ROWS], int64_t rows,
                                    vecf even, vecf odd, const struct random_source *source, int64_t c,
                                    int64_t block, vec16 quad[NVFP4_QUADS]) {
    struct random_words words[2];
    column_random_words(source, c, block, words);
    vec16 codes[HELD_ROWS];
    for (int i = 0; i < HELD_ROWS; ++i) {
        const int shift = i % 4 * 8;
        const struct step_floats random = {to_floats(words[0].word[i / 4] >> shift & 0xFFu),
                                           to_floats(words[1].word[i / 4] >> shift & 0xFFu)};
        codes[i] = encode_stochastic(how, held[i], even, odd, random);
    }
    join_quads(codes, rows, quad);
}

/* G of the columns of a step, 1 / G, and the amax that it is computed from. */
struct nvfp4_column_globals {
    const struct step_floats *global;
    const struct step_floats *inverse;
    const struct step_floats *stored;
};

/* The scales of a step of columns. */
struct nvfp4_column_scales {
    struct block_scales even;
    struct block_scales odd;
};

/* The errors of a step of columns, its even or its odd ones. */
VEC_INLINE struct candidate_errors held_errors(const struct step_floats magnitudes[HELD_ROWS], bool is_odd,
                                               const struct candidates *candidates, bool is_mse) {
    struct candidate_errors errors = no_errors();
    for (int i = 0; i < HELD_ROWS; ++i) {
        add_errors(&errors, candidates, is_odd ? magnitudes[i].odd : magnitudes[i].even, is_mse);
    }
    return errors;
}

/* With the option 4over6. A square block's errors are summed over its columns, as a tree. */
VEC_OUTLINE struct nvfp4_column_scales four_over_six_columns(const struct nvfp4_columns *kind,
                                                             const struct step_floats magnitudes[HELD_ROWS],
                                                             struct step_floats amax,
                                                             const struct nvfp4_column_globals *globals) {
    const struct candidates even = candidates_of(amax.even, globals->global->even, globals->inverse->even,
                                                 globals->stored->even, kind->spec);
    const struct candidates odd =
        candidates_of(amax.odd, globals->global->odd, globals->inverse->odd, globals->stored->odd, kind->spec);
    const bool is_mse = kind->spec->error_mode == OPAQ_ERROR_MODE_MSE;
    struct candidate_errors even_errors =
        is_mse ? held_errors(magnitudes, false, &even, true) : held_errors(magnitudes, false, &even, false);
    struct candidate_errors odd_errors =
        is_mse ? held_errors(magnitudes, true, &odd, true) : held_errors(magnitudes, true, &odd, false);
    if (kind->is_square) {
        even_errors.six = sum_in_halves(even_errors.six) + sum_in_halves(odd_errors.six);
        even_errors.four = sum_in_halves(even_errors.four) + sum_in_halves(odd_errors.four);
        odd_errors = even_errors;
    }
    return (struct nvfp4_column_scales){better_scales(&even, &even_errors), better_scales(&odd, &odd_errors)};
}

VEC_INLINE struct nvfp4_column_scales nvfp4_column_scales(struct nvfp4_column_how how,
                                                          const struct nvfp4_columns *kind,
                                                          const struct step held[HELD_ROWS],
                                                          struct step_floats amax,
                                                          const struct nvfp4_column_globals *globals) {
    const struct opaq_spec *const spec = kind->spec;
    const bool is_te = !how.encode.not_te;
    if (how.is_4over6) {
        struct step_floats magnitudes[HELD_ROWS];
        for (int i = 0; i < HELD_ROWS; ++i) {
            magnitudes[i] = step_magnitudes(held[i], how.encode.dtype);
        }
        return four_over_six_columns(kind, magnitudes, amax, globals);
    }
    return (struct nvfp4_column_scales){
        nvfp4_scales(amax.even, globals->global->even, globals->inverse->even, spec, is_te),
        nvfp4_scales(amax.odd, globals->global->odd, globals->inverse->odd, spec, is_te)};
}

/* A step of columns from c on; `block` counts blocks down the columns. */
VEC_INLINE struct nvfp4_column_codes nvfp4_column_step(struct nvfp4_column_how how,
                                                       const struct nvfp4_columns *kind,
                                                       const struct step held[HELD_ROWS], int64_t rows,
                                                       const struct nvfp4_column_globals *globals, int64_t c,
                                                       int64_t block) {
    const bool is_te = !how.encode.not_te;
    struct step_floats amax = held_amaxes(held, how.encode.dtype, false);
    const bool drops_nans = is_te && has_nans(amax);
    if (drops_nans) {
        amax = held_amaxes(held, how.encode.dtype, true);
    }
    amax = square_amaxes(amax, is_te && kind->is_square);
    const struct nvfp4_column_scales scales = nvfp4_column_scales(how, kind, held, amax, globals);
    const struct block_scales even = scales.even;
    const struct block_scales odd = scales.odd;
    struct nvfp4_column_codes codes;
    codes.scale = join_words(even.codes & 0xFFu, odd.codes & 0xFFu);
    if (how.is_random) {
        encode_random_quads(how.encode, held, rows, even.factors, odd.factors, kind->random, c, block,
                            codes.quad);
    } else if (is_te && even.is_regular && odd.is_regular && !drops_nans) {
        const float down = regular_factor(OPAQ_E2M1);
        encode_held_quads(how.encode, held, HELD_ROWS, even.factors * down, odd.factors * down, true,
                          codes.quad);
    } else {
        encode_held_quads(how.encode, held, rows, even.factors, odd.factors, false, codes.quad);
    }
    return codes;
}

/* Scale bytes of up to TILE columns from c on, from block `block` on, at most 16; scales[i * NVFP4_SCALE_PITCH] is a
 * row of them. */
VEC_OUTLINE void store_column_scales(const struct quant_copy *copy, int64_t c, int64_t columns, int64_t block,
                                     int64_t blocks, const uint8_t *scales) {
    vec32 row[16];
    uint8_t transposed[16 * TILE];
    for (int i = 0; i < 16; ++i) {
        row[i] = i < blocks ? vec_load(scales + i * NVFP4_SCALE_PITCH) : vec32_set(0);
    }
    transpose_lanes(row);
    for (int i = 0; i < 16; ++i) {
        vec_store(transposed + i * TILE, row[i]);
    }
    const struct scale_layout *layout = &copy->scale_layout;
    uint8_t *const scale = copy->scale;
    for (int64_t i = 0; i < columns; ++i) {
        const uint8_t *const from = transposed + i % 16 * TILE + i / 16 * 16;
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

static inline void nvfp4_buffer_begin(struct nvfp4_buffer *buffer, const struct opaq_spec *spec,
                                      const struct quant_copy *copy, int64_t c, int64_t columns) {
    for (int s = 0; s < NVFP4_BUFFER_COLUMNS / STEP; ++s) {
        float stored[STEP];
        float global[STEP];
        if (s > 0 && copy->amax_step == 0) {
            buffer->stored[s] = buffer->stored[0];
            buffer->global[s] = buffer->global[0];
            buffer->inverse[s] = buffer->inverse[0];
            continue;
        }
        for (int k = 0; k < STEP; ++k) { /* the last one's, beyond it */
            const int even_first = k % FLOATS * 2 + k / FLOATS;
            stored[k] = copy->amax[(c + min_int64(s * STEP + even_first, columns - 1)) * copy->amax_step];
            global[k] = nvfp4_global_of_stored(spec, stored[k]);
        }
        buffer->stored[s] = (struct step_floats){(vecf)vec_load(stored), (vecf)vec_load(stored + FLOATS)};
        buffer->global[s] = (struct step_floats){(vecf)vec_load(global), (vecf)vec_load(global + FLOATS)};
        buffer->inverse[s] = (struct step_floats){1.0f / buffer->global[s].even, 1.0f / buffer->global[s].odd};
    }
}

/* The codes of block `block` of a buffer: `rows` rows of the source, which is x from row `row` and column c on. */
VEC_INLINE void nvfp4_encode_block(struct nvfp4_column_how how, const struct nvfp4_columns *kind,
                                   struct column_source source, struct nvfp4_buffer *buffer, int64_t block,
                                   int64_t row, int64_t rows, int64_t c, int64_t columns, bool prefetches) {
    enum { STEPS = TILE / STEP };
    const int64_t bytes = element_bytes(how.encode.dtype);
    char staged[HELD_ROWS * TILE * 4];
    for (int64_t i = 0; i < columns; i += TILE) {
        struct nvfp4_column_codes codes[STEPS];
        const struct column_source part =
            column_source_part(source, rows, i, columns - i, TILE, how.encode.dtype, staged);
        for (int s = 0; s < STEPS; ++s) {
            struct step held[HELD_ROWS];
            const int64_t place = s * STEP * bytes;
            if (rows == HELD_ROWS) {
                hold_rows(&part, 0, HELD_ROWS, place, how.encode.dtype, held);
            } else {
                hold_rows(&part, 0, rows, place, how.encode.dtype, held);
            }
            if (prefetches) {
                for (int r = 0; r < HELD_ROWS; ++r) {
                    __builtin_prefetch(part.x + (r + HELD_ROWS) * part.row_bytes + place);
                }
            }
            const int64_t k = i / STEP + s;
            const struct nvfp4_column_globals globals = {&buffer->global[k], &buffer->inverse[k],
                                                         &buffer->stored[k]};
            codes[s] = nvfp4_column_step(how, kind, held, rows, &globals, c + i + s * STEP, row / HELD_ROWS);
        }
        for (int k = 0; k < STEPS * NVFP4_QUADS; ++k) {
            vec_store(buffer_codes(buffer, block, k % NVFP4_QUADS, i + k / NVFP4_QUADS * STEP),
                      (vec32)codes[k / NVFP4_QUADS].quad[k % NVFP4_QUADS]);
        }
        vec_store(buffer->scales + block * NVFP4_SCALE_PITCH + i, pack_bytes(codes[0].scale, codes[1].scale));
    }
}

/* The same out of line, each way. */
VEC_OUTLINE void nvfp4_te_block(enum opaq_element dtype, const struct nvfp4_columns *kind,
                                struct column_source source, struct nvfp4_buffer *buffer, int64_t block,
                                int64_t row, int64_t rows, int64_t c, int64_t columns, bool prefetches) {
    FOR_DTYPE(dtype, nvfp4_encode_block((struct nvfp4_column_how){encode_te(DTYPE, OPAQ_E2M1), false, false},
                                        kind, source, buffer, block, row, rows, c, columns, prefetches));
}

VEC_OUTLINE void nvfp4_random_block(enum opaq_element dtype, const struct nvfp4_columns *kind,
                                    struct column_source source, struct nvfp4_buffer *buffer, int64_t block,
                                    int64_t row, int64_t rows, int64_t c, int64_t columns, bool prefetches) {
    FOR_DTYPE(dtype, nvfp4_encode_block((struct nvfp4_column_how){encode_te(DTYPE, OPAQ_E2M1), true, false},
                                        kind, source, buffer, block, row, rows, c, columns, prefetches));
}

VEC_OUTLINE void nvfp4_4over6_block(enum opaq_element dtype, const struct nvfp4_columns *kind,
                                    struct column_source source, struct nvfp4_buffer *buffer, int64_t block,
                                    int64_t row, int64_t rows, int64_t c, int64_t columns, bool prefetches) {
    FOR_DTYPE(dtype, nvfp4_encode_block((struct nvfp4_column_how){encode_te(DTYPE, OPAQ_E2M1), false, true},
                                        kind, source, buffer, block, row, rows, c, columns, prefetches));
}

VEC_OUTLINE void nvfp4_not_te_block(enum opaq_element dtype, const struct nvfp4_columns *kind,
                                    struct column_source source, struct nvfp4_buffer *buffer, int64_t block,
                                    int64_t row, int64_t rows, int64_t c, int64_t columns, bool prefetches) {
    FOR_DTYPE(dtype, nvfp4_encode_block((struct nvfp4_column_how){nvfp4_not_te(DTYPE), false, false}, kind,
                                        source, buffer, block, row, rows, c, columns, prefetches));
}

VEC_INLINE void nvfp4_encode_block_of(enum opaq_element dtype, const struct nvfp4_columns *kind,
                                      struct column_source source, struct nvfp4_buffer *buffer, int64_t block,
                                      int64_t row, int64_t rows, int64_t c, int64_t columns, bool prefetches) {
    (kind->how.not_te       ? nvfp4_not_te_block
     : kind->random != NULL ? nvfp4_random_block
     : (kind->spec->options & OPAQ_4OVER6) != 0
         ? nvfp4_4over6_block
         : nvfp4_te_block)(dtype, kind, source, buffer, block, row, rows, c, columns, prefetches);
}

/* ---- the Hadamard transform: rows are transformed to a buffer of bf16 and quantized from there ---- */

/* HELD_ROWS rows of NVFP4_BUFFER_COLUMNS columns of bf16. */
struct nvfp4_transformed {
    _Alignas(VEC_BYTES) uint8_t rows[HELD_ROWS][NVFP4_BUFFER_COLUMNS * 2];
};

VEC_INLINE void transform_rows(enum opaq_element dtype, struct column_source source, int64_t rows,
                               int64_t columns, uint16_t mask, bool prefetches, struct nvfp4_transformed *to) {
    const struct hadamard_quarters quarters = hadamard_quarters(mask);
    char staged[HELD_ROWS * STEP * 4];
    for (int64_t i = 0; i < columns; i += STEP) {
        struct step held[HELD_ROWS];
        const struct column_source part = column_source_part(source, rows, i, columns - i, STEP, dtype, staged);
        hold_rows(&part, 0, rows, 0, dtype, held);
        if (prefetches) {
            for (int k = 0; k < HELD_ROWS; ++k) {
                __builtin_prefetch(part.x + (k + HELD_ROWS) * part.row_bytes);
            }
        }
        transform_held(held, dtype, &quarters);
        for (int k = 0; k < HELD_ROWS; ++k) {
            vec_store(to->rows[k] + i * 2, held[k].part[0]);
        }
    }
}

/* The same out of line. */
VEC_OUTLINE void transform_rows_of(enum opaq_element dtype, struct column_source source, int64_t rows,
                                   int64_t columns, uint16_t mask, bool prefetches,
                                   struct nvfp4_transformed *to) {
    FOR_DTYPE(dtype, transform_rows(DTYPE, source, rows, columns, mask, prefetches, to));
}

/* The codes of block `block` of a buffer: `rows` rows of x from `row` on. */
static inline void nvfp4_column_block(const struct nvfp4_columns *kind, const struct quant_copy *copy,
                                      struct nvfp4_buffer *buffer, int64_t block, int64_t row, int64_t rows,
                                      int64_t c, int64_t columns, bool prefetches) {
    const enum opaq_element dtype = kind->how.dtype;
    const struct column_source source = column_source_at(&copy->operand, row, c, dtype);
    if (!kind->is_hadamard) {
        nvfp4_encode_block_of(dtype, kind, source, buffer, block, row, rows, c, columns, prefetches);
        return;
    }
    struct nvfp4_transformed transformed;
    transform_rows_of(dtype, source, rows, columns, kind->spec->hadamard_mask, prefetches, &transformed);
    const struct column_source instead = {(const char *)transformed.rows, sizeof transformed.rows[0]};
    /* a group is stored whole, beyond the last row too */
    nvfp4_encode_block_of(OPAQ_BF16, kind, instead, buffer, block, row, HELD_ROWS, c, columns, false);
}

/* Codes of a block of a buffer, 8 bytes of a column: of those columns that lie in the first or in the second halves of
 * lanes, two of each lane in each vector. */
VEC_INLINE void transpose_block(const uint8_t *words, bool second, vec32 columns[2]) {
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
VEC_INLINE void transpose_half(const uint8_t *words, bool second, uint8_t *to, int64_t step, bool streams) {
    vec32 row[2][QUADS];
    for (int i = 0; i < QUADS; ++i) {
        vec32 each[2];
        transpose_block(words + i * NVFP4_QUADS * NVFP4_PITCH, second, each);
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

VEC_INLINE void transpose_step(const uint8_t *words, uint8_t *to, int64_t step, bool streams) {
    transpose_half(words, false, to, step, streams);
    transpose_half(words, true, to, step, streams);
}

/* The same for fewer columns, or fewer bytes of them. */
VEC_OUTLINE void transpose_partly(const uint8_t *words, int64_t columns, int64_t bytes, uint8_t *to,
                                  int64_t step) {
    uint8_t staged[STEP * VEC_BYTES];
    transpose_step(words, staged, VEC_BYTES, false);
    for (int64_t i = 0; i < columns; ++i) {
        memcpy(to + i * step, staged + i * VEC_BYTES, (size_t)bytes);
    }
}

/* Transposes a buffer of `blocks` blocks from row `row` on into the copy. */
VEC_OUTLINE void nvfp4_buffer_end(struct nvfp4_buffer *buffer, const struct quant_copy *copy, int64_t row,
                                  int64_t blocks, int64_t c, int64_t columns) {
    const int64_t block_bytes = HELD_ROWS / 2;
    const int64_t step = copy->data_row_step / 2;
    uint8_t *const to = copy->data + c * step + row / 2;
    const bool streams = transpose_streams(to, step, copy->operand.rows * step);
    for (int64_t i = 0; i < columns; i += STEP) {
        for (int64_t b = 0; b < blocks; b += QUADS) {
            const uint8_t *const words = buffer_codes(buffer, b, 0, i);
            uint8_t *const first = to + i * step + b * block_bytes;
            if (columns - i < STEP || blocks - b < QUADS) {
                transpose_partly(words, min_int64(STEP, columns - i),
                                 min_int64(QUADS, blocks - b) * block_bytes, first, step);
            } else if (streams) {
                transpose_step(words, first, step, true);
            } else {
                transpose_step(words, first, step, false);
            }
        }
    }
    for (int64_t i = 0; i < columns; i += TILE) {
        for (int64_t b = 0; b < blocks; b += 16) {
            store_column_scales(copy, c + i, min_int64(TILE, columns - i), row / HELD_ROWS + b,
                                min_int64(16, blocks - b), buffer->scales + b * NVFP4_SCALE_PITCH + i);
        }
    }
}

#endif
