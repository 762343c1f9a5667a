/* format/format_traits.h: properties of formats that follow from the rows of the format table. Depends on
 * opaq/spec.h. */
#ifndef OPAQ_FORMAT_FORMAT_TRAITS_H
#define OPAQ_FORMAT_FORMAT_TRAITS_H

#include <stdbool.h>

#include "opaq/spec.h"

/* Bits. */
enum format_trait {
    TRAIT_TENSOR_SCALE = 1, /* one scale for the whole tensor, which both copies share: fp8 */
    TRAIT_ROW_SCALES = 2,   /* one scale for each row of a copy: fp8row */
    TRAIT_SECOND_SCALE =
        4, /* block scales are relative to a float of each copy, or of each of its rows, in a buffer of
                               the role AMAX: nvfp4 */
    TRAIT_SQUARE_BLOCKS = 8 /* a scale covers a square, without +2d too: fp8, fp8blk2 */
};

/* The traits of a format; 0 for a number that is not a format. */
unsigned format_traits(uint8_t format);

static inline bool spec_has_tensor_scale(const struct opaq_spec *spec) {
    return (format_traits(spec->format) & TRAIT_TENSOR_SCALE) != 0;
}

static inline bool spec_has_row_scales(const struct opaq_spec *spec) {
    return (format_traits(spec->format) & TRAIT_ROW_SCALES) != 0;
}

static inline bool spec_has_second_scale(const struct opaq_spec *spec) {
    return (format_traits(spec->format) & TRAIT_SECOND_SCALE) != 0;
}

/* The scale of a whole tensor follows from its amax, which may be given. */
static inline bool spec_has_tensor_figure(const struct opaq_spec *spec) {
    return (format_traits(spec->format) & (TRAIT_TENSOR_SCALE | TRAIT_SECOND_SCALE)) != 0;
}

/* One copy is the other one transposed, codes and scales. */
static inline bool spec_has_square_blocks(const struct opaq_spec *spec) {
    return (spec->options & OPAQ_2D) != 0 || (format_traits(spec->format) & TRAIT_SQUARE_BLOCKS) != 0;
}

#endif
