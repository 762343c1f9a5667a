/* quant/quantize_nvfp4_columns_vec.h: nvfp4's columnwise copy, in vectors. Depends on columns_vec.h, scales_vec.h and
 * transpose_vec.h. Specification: docs/formats.md.
 *
 * Codes are made row by row of x, two rows to a byte, into a tile that is then transposed, because the copy is stored
 * transposed. */
#ifndef OPAQ_QUANT_QUANTIZE_NVFP4_COLUMNS_VEC_H
#define OPAQ_QUANT_QUANTIZE_NVFP4_COLUMNS_VEC_H

#include "format/swizzle.h"
#include "quant/columns_vec.h"
#include "quant/scales_vec.h"
#include "quant/transpose_vec.h"

enum { NVFP4_TILE_ROWS = 2 * TILE, NVFP4_TILE_BLOCKS = NVFP4_TILE_ROWS / HELD_ROWS };

/* Constants where it is used, except `spec`. */
struct nvfp4_columns {
    struct encode_how how; /* of what is encoded, which is bf16 after a Hadamard transform */
    enum opaq_element dtype;
    bool is_hadamard;
    bool is_square;
    const struct opaq_spec *spec;
};

/* Codes of a step of HELD_ROWS rows: those of rows 2i and 2i + 1 in the words of pair[i], and of the scales. */
struct nvfp4_column_codes {
    vec16 pair[HELD_ROWS / 2];
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

VEC_INLINE void encode_held_pairs(struct encode_how how, const struct step held[HELD_ROWS], int64_t rows,
                                  vecf even, vecf odd, bool is_plain, vec16 pair[HELD_ROWS / 2]) {
    for (int i = 0; i < HELD_ROWS / 2; ++i) {
        const vec16 first = encode_held(how, held[2 * i], even, odd, is_plain);
        const vec16 second = encode_held(how, held[2 * i + 1], even, odd, is_plain);
        /* beyond the last row there is code 0, whatever the factor makes of zero */
        pair[i] = 2 * i + 1 < rows ? first | second << 4 : 2 * i < rows ? first : vec16_set(0);
    }
}

VEC_INLINE struct nvfp4_column_codes nvfp4_column_step(struct nvfp4_columns kind,
                                                       const struct step held[HELD_ROWS], int64_t rows,
                                                       struct step_floats global) {
    const bool is_te = !kind.how.is_careful;
    struct step_floats amax = held_amaxes(held, kind.how.dtype, false);
    const bool drops_nans = is_te && has_nans(amax);
    if (drops_nans) {
        amax = held_amaxes(held, kind.how.dtype, true);
    }
    amax = square_amaxes(amax, kind.is_square);
    const struct block_scales even = nvfp4_scales(amax.even, global.even, kind.spec, is_te);
    const struct block_scales odd = nvfp4_scales(amax.odd, global.odd, kind.spec, is_te);
    struct nvfp4_column_codes codes;
    codes.scale = join_words(even.codes & 0xFFu, odd.codes & 0xFFu);
    if (is_te && even.is_plain && odd.is_plain && !drops_nans) {
        const float down = plain_factor(OPAQ_E2M1);
        encode_held_pairs(kind.how, held, HELD_ROWS, even.factors * down, odd.factors * down, true, codes.pair);
    } else {
        encode_held_pairs(kind.how, held, rows, even.factors, odd.factors, false, codes.pair);
    }
    return codes;
}

/* Scale bytes of `columns` columns from c on, from block `block` on; scales[i] is a row of TILE of them. */
static inline void store_column_scales(const struct quant_copy *copy, int64_t c, int64_t columns, int64_t block,
                                       int64_t blocks, const uint8_t scales[16 * TILE]) {
    vec32 row[16];
    uint8_t turned[16 * TILE];
    for (int i = 0; i < 16; ++i) {
        row[i] = i < NVFP4_TILE_BLOCKS ? vec_load(scales + i * TILE) : vec32_set(0);
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
        } else if (blocks == NVFP4_TILE_BLOCKS) {
            memcpy(scale + (c + i) * layout->row_step + block, from, NVFP4_TILE_BLOCKS);
        } else {
            memcpy(scale + (c + i) * layout->row_step + block, from, (size_t)blocks);
        }
    }
}

/* G of the columns of a step. */
VEC_INLINE struct step_floats nvfp4_column_globals(const float *globals) {
    const vec32 first = vec_load(globals);
    const vec32 second = vec_load(globals + FLOATS);
    return (struct step_floats){(vecf)split_even(first, second), (vecf)split_odd(first, second)};
}

/* Rows from `row` on, a tile of them, and up to TILE columns from c on. */
VEC_INLINE void nvfp4_column_tile(struct nvfp4_columns kind, const struct quant_copy *copy, int64_t row,
                                  int64_t c, int64_t columns, const float globals[TILE]) {
    enum { STEPS = TILE / STEP };
    char staged[NVFP4_TILE_ROWS * TILE * 4];
    uint8_t tile[TILE * TILE];
    uint8_t scales[16 * TILE];
    const int64_t rows = min_int64(NVFP4_TILE_ROWS, copy->operand.columns - row);
    const int64_t blocks = ceil_div(rows, HELD_ROWS);
    const struct column_source source =
        column_source_at(&copy->operand, row, rows, c, columns, TILE, kind.dtype, staged);
    for (int64_t block = 0; block < blocks; ++block) {
        struct nvfp4_column_codes codes[STEPS];
        const int64_t here = min_int64(HELD_ROWS, rows - block * HELD_ROWS);
        for (int s = 0; s < STEPS; ++s) {
            struct step held[HELD_ROWS];
            const int64_t place = s * STEP * element_bytes(kind.dtype);
            if (here == HELD_ROWS) {
                hold_rows(&source, block * HELD_ROWS, HELD_ROWS, place, kind.dtype, held);
            } else {
                hold_rows(&source, block * HELD_ROWS, here, place, kind.dtype, held);
            }
            if (kind.is_hadamard) { /* a group is stored whole, beyond the last row too */
                transform_held(held, kind.dtype, kind.spec->hadamard_mask);
            }
            codes[s] = nvfp4_column_step(kind, held, kind.is_hadamard ? HELD_ROWS : here,
                                         nvfp4_column_globals(globals + s * STEP));
        }
        for (int i = 0; i < HELD_ROWS / 2; ++i) {
            vec_store(tile + (block * (HELD_ROWS / 2) + i) * TILE,
                      pack_bytes(codes[0].pair[i], codes[1].pair[i]));
        }
        vec_store(scales + block * TILE, pack_bytes(codes[0].scale, codes[1].scale));
    }
    transpose_tile(tile, blocks * (HELD_ROWS / 2), columns, copy->data + (c * copy->data_row_step + row) / 2,
                   copy->data_row_step / 2);
    store_column_scales(copy, c, columns, row / HELD_ROWS, blocks, scales);
}

/* Rows [row, row_end) and columns [c, c_end) of x; row is a multiple of NVFP4_TILE_ROWS, c of TILE. */
VEC_INLINE void nvfp4_column_range(struct nvfp4_columns kind, const struct quant_copy *copy, int64_t row,
                                   int64_t row_end, int64_t c, int64_t c_end) {
    for (; row < row_end; row += NVFP4_TILE_ROWS) {
        for (int64_t i = c; i < c_end; i += TILE) {
            float globals[TILE];
            const int64_t columns = min_int64(TILE, c_end - i);
            for (int k = 0; k < TILE; ++k) { /* the last one's, beyond it */
                const int64_t column = i + min_int64(k, columns - 1);
                globals[k] = k > 0 && copy->amax_step == 0
                                 ? globals[0]
                                 : nvfp4_global_of_stored(kind.spec, copy->amax[column * copy->amax_step]);
            }
            nvfp4_column_tile(kind, copy, row, i, columns, globals);
        }
    }
}

#endif
