/* cpu/quant/simd/quantize_blocks_vec.h: mxfp8, mxfp4 and nvfp4 along contiguous rows, in vectors. Depends on
 * fold_vec.h.
 *
 * A group is FLOATS blocks of a row: their scales are computed together, one in each lane. Square blocks are the same
 * with the amax taken over several rows. The rest of a row is copied to a separate group, padded with zeros.
 *
 * quantize_mx_vec.h or quantize_nvfp4_vec.h comes before it and says which blocks: BLOCK elements under one scale,
 * BLOCKS_ARE_NVFP4, and FOR_BLOCK_ELEMENT, which makes the element a constant. */
#ifndef OPAQ_CPU_QUANT_SIMD_QUANTIZE_BLOCKS_VEC_H
#define OPAQ_CPU_QUANT_SIMD_QUANTIZE_BLOCKS_VEC_H

#include "backend/quant_job.h"
#include "base/checked.h"
#include "cpu/quant/simd/copy_vec.h"
#include "cpu/quant/simd/fold_vec.h"
#include "cpu/quant/simd/four_over_six_vec.h"
#include "cpu/quant/simd/region_vec.h"
#include "cpu/quant/simd/scales_vec.h"
#include "cpu/quant/simd/specialize_vec.h"
#include "cpu/quant/simd/stochastic_vec.h"
#include "format/swizzle.h"

enum { BLOCK_ROW_LIMIT = 32, SEGMENT_ELEMENTS = 2048, SEGMENT_GROUPS = SEGMENT_ELEMENTS / (16 * FLOATS) };

/* How blocks are quantized. Functions that are inlined get these, and whether stores are non-temporal, as
 * constants. */
struct block_kind {
    struct encode_how how;
    const struct opaq_spec *spec;
    int64_t ahead;                      /* prefetch distance, in bytes */
    bool streams;                       /* codes are written past the caches */
    const struct random_source *random; /* or NULL: rounded to the nearest */
};

/* `how`, of a rule of other software, with constants. */
VEC_INLINE struct encode_how not_te_how(struct encode_how how, enum opaq_element dtype,
                                        enum opaq_element element) {
    how = encode_not_te(how, dtype, element, BLOCKS_ARE_NVFP4);
    if (BLOCKS_ARE_NVFP4) {
        how.drops_zero_sign = true;
        how.halves_down = false;
    }
    return how;
}

/* Scales of nvfp4 besides those of blocks: G, and the tensor's or the row's amax. */
struct block_globals {
    float global;
    float stored;
};

/* The amaxes of FLOATS blocks from column 0 of `rows` on. Under rule te, without drop_nan, a NaN may
 * have any payload. */
VEC_INLINE vecf group_amax(struct encode_how how, const char *x, int64_t row_bytes, int rows, bool drop_nan) {
    enum { PART_LIMIT = 32 };
    vec32 key[PART_LIMIT];
    const enum opaq_element dtype = how.dtype;
    const int parts = BLOCK * FLOATS * element_bytes(dtype) / VEC_BYTES;
    for (int i = 0; i < parts; ++i) {
        key[i] = key_of(vec_load(x + i * VEC_BYTES), dtype, drop_nan);
    }
    for (int row = 1; row < rows; ++row) {
        for (int i = 0; i < parts; ++i) {
            const vec32 part = vec_load(x + row * row_bytes + i * VEC_BYTES);
            key[i] = key_max(key[i], key_of(part, dtype, drop_nan), dtype);
        }
    }
    const vec32 magnitude = key_magnitude(fold_keys(key, parts, dtype), dtype, drop_nan);
    return how.not_te ? magnitudes_to_floats(magnitude, dtype) : magnitudes_as_floats(magnitude, dtype);
}

/* The factors of step i of a group. */
VEC_INLINE vecf step_factors(const float *factors, int i) {
    return (int)STEP > (int)BLOCK ? load_halves(factors, i) : vecf_set(factors[i * STEP / BLOCK]);
}

/* A group of a row, with its random bytes if it is not rounded to the nearest. */
VEC_INLINE void encode_group(struct encode_how how, const char *x, int64_t ahead, const float *factors,
                             bool is_regular, const uint8_t *random, bool streams, uint8_t *data) {
    enum { AT_ONCE = 4 };
    const int64_t step_bytes = STEP * element_bytes(how.dtype);
    const float up = how.not_te ? 1.0f : 1.0f / regular_factor(how.element);
    for (int i = 0; i < BLOCK * FLOATS / STEP; i += AT_ONCE) {
        vec16 codes[AT_ONCE];
        for (int k = 0; k < AT_ONCE; ++k) {
            const vecf factor = step_factors(factors, i + k);
            const vecf apply = is_regular ? factor : factor * up;
            const struct step step = step_load(x + (i + k) * step_bytes, how.dtype);
            __builtin_prefetch(x + (i + k) * step_bytes + ahead, 0, 2); /* into the second-level cache */
            codes[k] = random != NULL ? encode_stochastic(how, step, apply, apply,
                                                          random_of_bytes(random + (i + k) * STEP))
                       : is_regular   ? encode_regular(step, how.dtype, how.element, apply, apply)
                                      : encode_step(how, step, apply, apply);
        }
        if (how.element == OPAQ_E2M1) {
            vec_put(data + i * STEP / 2, pack_nibbles(codes[0], codes[1], codes[2], codes[3]), streams);
        } else {
            vec_put(data + i * STEP, pack_bytes(codes[0], codes[1]), streams);
            vec_put(data + (i + 2) * STEP, pack_bytes(codes[2], codes[3]), streams);
        }
    }
}

/* `groups` groups of one row. */
VEC_INLINE void encode_groups(struct encode_how how, const char *x, int groups, int64_t ahead,
                              const float *factors, bool is_regular, const uint8_t *random, bool streams,
                              uint8_t *data) {
    const int packing = how.element == OPAQ_E2M1 ? 2 : 1;
    const int64_t group = BLOCK * FLOATS;
    for (int g = 0; g < groups; ++g) {
        encode_group(how, x + g * group * element_bytes(how.dtype), ahead, factors + g * FLOATS, is_regular,
                     random == NULL ? NULL : random + g * group, streams, data + g * group / packing);
    }
}

/* The same out of line: to the nearest by the rules of other software, and in any way. */
VEC_OUTLINE void encode_groups_not_te(const struct block_kind *kind, const char *x, int groups,
                                      const float *factors, bool streams, uint8_t *data) {
    const struct encode_how how = kind->how;
    FOR_DTYPE(how.dtype,
              FOR_BLOCK_ELEMENT(how.element, encode_groups(not_te_how(how, DTYPE, ELEMENT), x, groups,
                                                           kind->ahead, factors, false, NULL, streams, data)));
}

VEC_OUTLINE void encode_groups_of(const struct block_kind *kind, const char *x, int groups,
                                  const float *factors, bool is_regular, const uint8_t *random, bool streams,
                                  uint8_t *data) {
    const struct encode_how how = kind->how;
    const int64_t ahead = kind->ahead;
    if (random != NULL) {
        FOR_DTYPE(how.dtype,
                  FOR_BLOCK_ELEMENT(how.element, encode_groups(encode_at_random(how, DTYPE, ELEMENT), x, groups,
                                                               ahead, factors, false, random, streams, data)));
    } else if (how.not_te) {
        encode_groups_not_te(kind, x, groups, factors, streams, data);
    } else if (!is_regular) {
        FOR_BLOCK_TE(how, encode_groups(HOW, x, groups, ahead, factors, false, NULL, streams, data));
    } else {
        FOR_BLOCK_TE(how,
                     FOR_FLAG(streams, encode_groups(HOW, x, groups, ahead, factors, true, NULL, FLAG, data)));
    }
}

/* `count` scale bytes of a row from block `block` on. */
static void store_scales(const struct quant_copy *copy, int64_t row, int64_t block, int64_t count,
                         const uint8_t *codes) {
    uint8_t *const scale = copy->scale;
    const struct scale_layout *layout = &copy->scale_layout;
    if (layout->swizzled_columns == 0) {
        copy_few(scale + row * layout->row_step + block, codes, count);
        return;
    }
    for (int64_t i = 0; i < count; i += SWIZZLE_COLUMNS) {
        memcpy(scale + swizzle_offset(row, block + i, layout->swizzled_columns), codes + i,
               (size_t)min_int64(SWIZZLE_COLUMNS, count - i));
    }
}

/* n codes of a group that extends beyond the row. Bytes end where the row does; a packed row ends with a whole block,
 * with code 0 beyond its last element, even where the factor turns zeros into something else. */
VEC_INLINE void store_partly(uint8_t *data, uint8_t *codes, int64_t n, bool is_packed, int64_t padded) {
    if (!is_packed) {
        memcpy(data, codes, (size_t)n);
        return;
    }
    if (n % 2 != 0) {
        codes[n / 2] &= 0x0F;
    }
    memcpy(data, codes, (size_t)ceil_div(n, 2));
    memset(data + ceil_div(n, 2), 0, (size_t)(padded / 2 - ceil_div(n, 2)));
}

/* A segment of the rows that share their scales: its source, and the destination of its codes. */
struct block_segment {
    const char *x;
    int64_t row_bytes;
    uint8_t *data;
    int64_t data_row_bytes;
    int rows;
    int groups;
};

VEC_INLINE int64_t group_bytes(enum opaq_element dtype) {
    return (int64_t)BLOCK * FLOATS * element_bytes(dtype);
}

/* The amaxes of a segment's blocks. Whether there is a NaN. */
VEC_INLINE bool find_amaxes(struct encode_how how, const struct block_segment *segment, int rows, bool drop_nan,
                            float *amaxes) {
    const int groups = segment->groups;
    vec32 largest = vec32_set(0);
    for (int g = 0; g < groups; ++g) {
        const vecf amax =
            group_amax(how, segment->x + g * group_bytes(how.dtype), segment->row_bytes, rows, drop_nan);
        vec_store(amaxes + g * FLOATS, (vec32)amax);
        largest = max32(largest, (vec32)amax);
    }
    return any32(above32(largest, 0x7F800000u));
}

VEC_INLINE struct encode_how amax_how(enum opaq_element dtype, bool not_te) {
    return (struct encode_how){.dtype = dtype, .not_te = not_te};
}

/* The same out of line. */
VEC_OUTLINE bool find_amaxes_of(const struct block_kind *kind, const struct block_segment *segment,
                                bool drop_nan, float *amaxes) {
    const enum opaq_element dtype = kind->how.dtype;
    const int rows = segment->rows;
    bool has_nans;
    if (kind->how.not_te) {
        FOR_DTYPE(dtype, has_nans = find_amaxes(amax_how(DTYPE, true), segment, rows, false, amaxes));
    } else if (drop_nan) {
        FOR_DTYPE(dtype, has_nans = find_amaxes(amax_how(DTYPE, false), segment, rows, true, amaxes));
    } else if (rows == 1) {
        FOR_DTYPE(dtype, has_nans = find_amaxes(amax_how(DTYPE, false), segment, 1, false, amaxes));
    } else {
        FOR_DTYPE(dtype, has_nans = find_amaxes(amax_how(DTYPE, false), segment, rows, false, amaxes));
    }
    return has_nans;
}

/* The same. Rule te ignores NaNs: if there are any, a second pass removes them. */
static inline bool segment_amaxes(const struct block_kind *kind, const struct block_segment *segment,
                                  float *amaxes) {
    const bool has_nans = find_amaxes_of(kind, segment, false, amaxes);
    if (!kind->how.not_te && has_nans) {
        find_amaxes_of(kind, segment, true, amaxes);
    }
    return has_nans;
}

/* The scales of group g from its amaxes. */
VEC_INLINE struct block_scales group_scales(struct encode_how how, const struct opaq_spec *spec,
                                            const struct block_segment *segment, int g, vecf amax,
                                            struct block_globals globals, bool is_4over6) {
    const float global = globals.global;
    if (is_4over6) {
        return four_over_six_blocks(segment->x + g * group_bytes(how.dtype), segment->row_bytes, segment->rows,
                                    amax, global, globals.stored, spec, how.dtype);
    }
    const bool is_te = !how.not_te;
    return BLOCKS_ARE_NVFP4 ? nvfp4_scales(amax, vecf_set(global), vecf_set(1.0f / global), spec, is_te)
                            : mx_scales(amax, how.element, spec, is_te);
}

/* From amaxes to factors, in their place, and codes of scales. Under rule te factors are times regular_factor(), which
 * does not round. Returns whether all blocks are regular. */
VEC_INLINE bool segment_scales(struct encode_how how, const struct opaq_spec *spec,
                               const struct block_segment *segment, struct block_globals globals,
                               bool is_4over6, float *factors, uint8_t *codes) {
    const int groups = segment->groups;
    bool is_regular = true;
    for (int g = 0; g < groups; ++g) {
        const vecf amax = (vecf)vec_load(factors + g * FLOATS);
        const struct block_scales scales = group_scales(how, spec, segment, g, amax, globals, is_4over6);
        vec_store(factors + g * FLOATS,
                  (vec32)(how.not_te ? scales.factors : scales.factors * regular_factor(how.element)));
        store_low_bytes(codes + g * FLOATS, scales.codes);
        is_regular &= scales.is_regular;
    }
    return is_regular;
}

/* The same out of line. */
VEC_OUTLINE bool segment_scales_of(const struct block_kind *kind, const struct block_segment *segment,
                                   struct block_globals globals, float *factors, uint8_t *codes) {
    const struct opaq_spec *const spec = kind->spec;
    const enum opaq_element dtype = kind->how.dtype;
    bool is_regular;
    if (kind->how.not_te) {
        is_regular = segment_scales(not_te_how(kind->how, dtype, kind->how.element), spec, segment, globals,
                                    false, factors, codes);
    } else if (BLOCKS_ARE_NVFP4 && (spec->options & OPAQ_4OVER6) != 0) {
        FOR_DTYPE(dtype, is_regular = segment_scales(encode_te(DTYPE, OPAQ_E2M1), spec, segment, globals, true,
                                                     factors, codes));
    } else {
        FOR_BLOCK_ELEMENT(kind->how.element,
                          is_regular = segment_scales(encode_te(OPAQ_BF16, ELEMENT), spec, segment, globals,
                                                      false, factors, codes)); /* the dtype does not matter */
    }
    return is_regular;
}

/* Computes all scales first: the latency of one is long, but many overlap. Prefetches during encoding, which reads no
 * other memory. */
static inline void quantize_segment(const struct block_kind *kind, const struct block_segment *segment,
                                    bool streams, const struct quant_copy *copy, int64_t r, int64_t block,
                                    int64_t blocks, struct block_globals globals) {
    _Alignas(VEC_BYTES) float factors[SEGMENT_GROUPS * FLOATS];
    uint8_t codes[SEGMENT_GROUPS * FLOATS];
    const bool has_nans = segment_amaxes(kind, segment, factors);
    bool is_regular = segment_scales_of(kind, segment, globals, factors, codes);
    is_regular = is_regular && !kind->how.not_te && !has_nans && kind->random == NULL;
    for (int i = 0; i < segment->rows; ++i) {
        const char *const x = segment->x + i * segment->row_bytes;
        uint8_t *const data = segment->data + i * segment->data_row_bytes;
        store_scales(copy, r + i, block, blocks, codes);
        if (kind->random != NULL) {
            uint8_t random[SEGMENT_ELEMENTS];
            const int64_t random_blocks = (int64_t)segment->groups * FLOATS * BLOCK / 16;
            random_row(kind->random, r + i, block * BLOCK / 16, random_blocks, random);
            encode_groups_of(kind, x, segment->groups, factors, false, random, streams, data);
        } else {
            encode_groups_of(kind, x, segment->groups, factors, is_regular, NULL, streams, data);
        }
    }
}

/* Columns [c, c_end) of rows [r, r + rows), which share their scales; c_end is the last one, or c_end - c a multiple of
 * a group. */
VEC_OUTLINE void quantize_block_rows(const struct block_kind *kind, const struct quant_copy *copy, int64_t r,
                                     int rows, int64_t c, int64_t c_end, struct block_globals globals) {
    enum { GROUP_LIMIT = 32 * FLOATS };
    char staged[BLOCK_ROW_LIMIT * GROUP_LIMIT * 4];
    uint8_t staged_codes[BLOCK_ROW_LIMIT * GROUP_LIMIT];
    const bool is_packed = kind->how.element == OPAQ_E2M1;
    const int64_t group = BLOCK * FLOATS;
    const int64_t bytes = element_bytes(kind->how.dtype);
    const int64_t data_row_bytes = is_packed ? copy->data_row_step / 2 : copy->data_row_step;
    const struct quant_matrix *m = &copy->operand;
    const int64_t row_bytes = m->row_step * bytes;
    int64_t n;
    for (; c < c_end; c += n) {
        uint8_t *const data = copy->data + r * data_row_bytes + (is_packed ? c / 2 : c);
        const int64_t groups = min_int64(SEGMENT_ELEMENTS / group, (c_end - c) / group);
        struct block_segment segment = {(const char *)m->data + r * row_bytes + c * bytes,
                                        row_bytes,
                                        data,
                                        data_row_bytes,
                                        rows,
                                        (int)groups};
        n = groups * group;
        if (groups == 0) { /* the last few blocks */
            n = c_end - c;
            for (int i = 0; i < rows; ++i) {
                char *const to = staged + i * group * bytes;
                memcpy(to, segment.x + i * row_bytes, (size_t)(n * bytes));
                memset(to + n * bytes, 0, (size_t)((group - n) * bytes));
            }
            segment = (struct block_segment){staged, group * bytes, staged_codes, group, rows, 1};
        }
        const int64_t blocks = ceil_div(n, BLOCK);
        quantize_segment(kind, &segment, kind->streams && groups != 0, copy, r, c / BLOCK, blocks, globals);
        for (int i = 0; groups == 0 && i < rows; ++i) {
            store_partly(data + i * data_row_bytes, staged_codes + i * group, n, is_packed, blocks * BLOCK);
        }
    }
}

/* Whether the operand's rows, their codes and their scales are contiguous, and there is no transform. */
VEC_INLINE bool is_along_rows(const struct quant_copy *copy) {
    const struct scale_layout *layout = &copy->scale_layout;
    return copy->operand.column_step == 1 && copy->data_column_step == 1 && !copy->is_hadamard &&
           (layout->column_step == 1 || layout->swizzled_columns != 0);
}

#endif
