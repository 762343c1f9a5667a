/* cpu/quant/simd/decode_factors_vec.h: the factors of stored codes, in vectors. Depends on decode_vec.h.
 * Specification: docs/formats.md. */
#ifndef OPAQ_CPU_QUANT_SIMD_DECODE_FACTORS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_DECODE_FACTORS_VEC_H

#include "backend/quant_job.h"
#include "base/checked.h"
#include "base/float_bits.h"
#include "cpu/quant/simd/decode_vec.h"
#include "format/swizzle.h"
#include "format/tile.h"

/* Elements whose scales are looked up together. */
enum { SCALED_AT_ONCE = 2048, SCALES_AT_ONCE = SCALED_AT_ONCE / 16 };

/* What codes are multiplied with, one for every block. */
struct decode_factors {
    float value[SCALES_AT_ONCE];
    bool all_in_range; /* all finite, not 0 and far from the largest float */
};

VEC_INLINE bool format_has_bytes(const struct opaq_spec *spec) {
    return spec->format == OPAQ_MXFP8 || spec->format == OPAQ_MXFP4 || spec->format == OPAQ_NVFP4;
}

/* The entry of block `block` in operand row `row`. */
VEC_INLINE int64_t scale_place(const struct scale_layout *layout, int64_t row, int64_t block) {
    return layout->tiled_columns != 0 ? tile_scale_offset(row, block, layout->tiled_columns, layout->tile_rows)
           : layout->swizzled_columns != 0 ? swizzle_offset(row, block, layout->swizzled_columns)
                                           : row * layout->row_step + block * layout->column_step;
}

/* `count` scale bytes of a row from block `block` on: in place if they are consecutive, else copied. */
VEC_INLINE const uint8_t *scales_at(const struct quant_copy *copy, int64_t row, int64_t block, int64_t count,
                                    uint8_t buffer[SCALES_AT_ONCE]) {
    const uint8_t *const scale = copy->scale;
    const struct scale_layout *layout = &copy->scale_layout;
    if (layout->swizzled_columns == 0 && layout->tiled_columns == 0 && layout->column_step == 1) {
        return scale + row * layout->row_step + block;
    }
    int64_t i = 0;
    if (layout->swizzled_columns != 0 && block % SWIZZLE_COLUMNS == 0) { /* columns of tiles, 512 bytes apart */
        const uint8_t *const first = scale + swizzle_offset(row, block, layout->swizzled_columns);
        for (; i + SWIZZLE_COLUMNS <= count; i += SWIZZLE_COLUMNS) {
            memcpy(buffer + i, first + i * SWIZZLE_ROWS, SWIZZLE_COLUMNS);
        }
    }
    for (; i < count; ++i) {
        buffer[i] = scale[scale_place(layout, row, block + i)];
    }
    return buffer;
}

/* nvfp4_decode_factor() */
VEC_INLINE vecf nvfp4_factors(vec32 codes, const struct opaq_spec *spec, vecf stored) {
    const vecf scale = e4m3_values(codes);
    if ((spec->options & OPAQ_GLOBAL) == 0) {
        return scale * stored * (1.0f / (6.0f * (float)spec->e4m3_max));
    }
    if (spec->rule == OPAQ_RULE_MODELOPT) {
        return scale * stored;
    }
    const mask32 empty = equal32(((vec32)scale | (vec32)stored) & 0x7FFFFFFFu, 0);
    return (vecf)clear32(empty, (vec32)(scale / stored));
}

/* Of FLOATS scale bytes, `stored` being the rows' amaxes or global scales, if there are any. */
VEC_INLINE vecf byte_factors(const uint8_t *codes, const struct opaq_spec *spec, vecf stored) {
    const vec32 some = load_bytes_as_dwords(codes);
    return spec->format == OPAQ_NVFP4 ? nvfp4_factors(some, spec, stored) : e8m0_values(some);
}

/* `count` blocks of a row from block `block` on. */
VEC_INLINE void factors_of_bytes(const struct quant_copy *copy, const struct opaq_spec *spec, int64_t row,
                                 int64_t block, int64_t count, struct decode_factors *factors) {
    uint8_t buffer[SCALES_AT_ONCE];
    const vecf stored = vecf_set(copy->amax == NULL ? 0.0f : copy->amax[row * copy->amax_step]);
    const uint8_t *const codes = scales_at(copy, row, block, count, buffer);
    vec32 largest = vec32_set(0);
    int64_t i = 0;
    for (; i + FLOATS <= count; i += FLOATS) {
        const vec32 values = (vec32)byte_factors(codes + i, spec, stored);
        vec_store(factors->value + i, values);
        largest = max32(largest, values & 0x7FFFFFFFu);
    }
    if (i < count) {
        uint8_t rest[FLOATS] = {0};
        for (int64_t k = i; k < count; ++k) {
            rest[k - i] = codes[k];
        }
        const vec32 values = (vec32)byte_factors(rest, spec, stored);
        vec_store(factors->value + i, values);
        largest = max32(largest, values & 0x7FFFFFFFu);
    }
    factors->all_in_range = !any32(above32(largest, (127u + 118u) << 23));
}

/* The same for scales that are floats, for n elements from column c on, a multiple of 128. */
VEC_INLINE void factors_of_floats(const struct quant_copy *copy, int64_t row, int64_t c, int64_t n,
                                  struct decode_factors *factors) {
    const struct scale_layout *layout = &copy->scale_layout;
    const float *const scale = (const float *)copy->scale + row / layout->row_per * layout->row_step;
    const int64_t count = ceil_div(n, 128);
    if (layout->column_step == 0) { /* one scale for the row */
        for (int i = 0; i < SCALED_AT_ONCE / 128; i += FLOATS) {
            vec_store(factors->value + i, (vec32)vecf_set(scale[0]));
        }
        factors->all_in_range = scale[0] != 0.0f && float_abs(scale[0]) < 0x1p118f;
        return;
    }
    vec32 beyond = vec32_set(0); /* the largest of the magnitudes - 1: that of 0 exceeds all others */
    int64_t i = 0;
    factors->value[0] = 0.0f; /* defined even if n is 0 */
    for (; layout->column_step == 1 && i + FLOATS <= count; i += FLOATS) {
        const vec32 values = vec_load(scale + c / 128 + i);
        vec_store(factors->value + i, values);
        beyond = max32(beyond, (values & 0x7FFFFFFFu) - 1u);
    }
    factors->all_in_range = !any32(above32(beyond, ((127u + 118u) << 23) - 2u));
    for (; i < count; ++i) {
        const float value = scale[(c / 128 + i) * layout->column_step];
        factors->value[i] = value;
        factors->all_in_range &= value != 0.0f && float_abs(value) < 0x1p118f;
    }
}

#endif
