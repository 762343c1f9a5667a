/* format/spec_query.c: properties of specs, and derived specs. Depends on opaq/spec.h. */
#include <stdbool.h>

#include "format/format_traits.h"
#include "opaq/spec.h"
#include "opaq/status.h"

/* Options that apply to one product: a tensor that a layer returns is quantized without them. */
enum { inner_options = OPAQ_2D | OPAQ_HADAMARD | OPAQ_STOCHASTIC | OPAQ_ROWSCALED | OPAQ_4OVER6 };

static int64_t rows_per_scale(const struct opaq_spec *spec, const struct opaq_format_row *row) {
    const bool crosses_rows = (spec->usage & OPAQ_COLUMNWISE) || (spec->options & OPAQ_2D);
    const int32_t across = crosses_rows ? row->block_columns : 1;
    const int32_t rows = row->block_rows > across ? row->block_rows : across;
    return rows > 1 ? rows : 1;
}

static bool has_tensor_amax(const struct opaq_spec *spec) {
    return spec_has_tensor_figure(spec) && (spec->options & (OPAQ_DELAYED | OPAQ_ROWSCALED)) == 0;
}

static bool column_covers_rows(const struct opaq_spec *spec) {
    return (spec->usage & OPAQ_COLUMNWISE) && (spec_has_row_scales(spec) || (spec->options & OPAQ_ROWSCALED));
}

int64_t opaq_spec_query(const struct opaq_spec *spec, enum opaq_spec_property property) {
    struct opaq_spec tiled;
    if (opaq_spec_check(spec, NULL) != OPAQ_OK) {
        return -1;
    }
    const struct opaq_format_row *const row = opaq_format_row((enum opaq_format)spec->format);
    switch (property) {
    case OPAQ_SPEC_IS_DELAYED:
        return (spec->options & OPAQ_DELAYED) != 0;
    case OPAQ_SPEC_IS_STOCHASTIC:
        return (spec->options & OPAQ_STOCHASTIC) != 0;
    case OPAQ_SPEC_IS_TILED:
        return (spec->options & OPAQ_TILED) != 0;
    case OPAQ_SPEC_IS_PLAIN_ROWWISE:
        return spec->usage == OPAQ_ROWWISE && (spec->options & (OPAQ_SWIZZLED | OPAQ_TILED)) == 0;
    case OPAQ_SPEC_CAN_BE_TILED:
        return opaq_spec_derive(spec, OPAQ_DERIVE_TILED, &tiled, NULL) == OPAQ_OK;
    case OPAQ_SPEC_TENSOR_AMAXES:
        return has_tensor_amax(spec) ? spec->usage : 0;
    case OPAQ_SPEC_COLUMN_COVERS_ROWS:
        return column_covers_rows(spec);
    case OPAQ_SPEC_ROWS_PER_SCALE:
        return rows_per_scale(spec, row);
    case OPAQ_SPEC_HAS_ROW_SCALES:
        return spec_has_row_scales(spec);
    case OPAQ_SPEC_GIVES_AMAX:
        return spec_has_tensor_scale(spec);
    }
    return -1;
}

enum opaq_status opaq_spec_derive(const struct opaq_spec *spec, enum opaq_derivation derivation,
                                  struct opaq_spec *derived, struct opaq_error *error) {
    const enum opaq_status status = opaq_spec_check(spec, error);
    if (status != OPAQ_OK || derived == NULL) {
        return status != OPAQ_OK ? status
                                 : opaq_fail(error, OPAQ_ERROR_ARGUMENT, "spec_derive: derived is NULL");
    }
    struct opaq_spec made = *spec;
    switch (derivation) {
    case OPAQ_DERIVE_TILED:
        made.usage = OPAQ_ROWWISE;
        made.options = (uint16_t)((made.options & ~(unsigned)OPAQ_SWIZZLED) | OPAQ_TILED);
        break;
    case OPAQ_DERIVE_UNTILED:
        made.options &= (uint16_t) ~(unsigned)OPAQ_TILED;
        break;
    case OPAQ_DERIVE_CURRENT:
        made.options &= (uint16_t) ~(unsigned)OPAQ_DELAYED;
        break;
    case OPAQ_DERIVE_HANDED_ON:
        made.options &= (uint16_t) ~(unsigned)inner_options;
        made.hadamard_mask = 0;
        made.error_mode = OPAQ_ERROR_MODE_NONE;
        made.e4m3_max = spec_has_second_scale(&made) ? 448 : 0;
        break;
    case OPAQ_DERIVE_ROW_AMAXES:
        if (has_tensor_amax(spec) && spec_has_second_scale(spec)) {
            made.options |= OPAQ_ROWSCALED;
        } else if (has_tensor_amax(spec)) {
            made.format = OPAQ_FP8ROW;
        }
        break;
    default:
        return opaq_fail(error, OPAQ_ERROR_ARGUMENT, "spec_derive: derivation is %d, expected 0 to %d",
                         (int)derivation, OPAQ_DERIVE_ROW_AMAXES);
    }
    const enum opaq_status checked = opaq_spec_check(&made, error);
    if (checked == OPAQ_OK) {
        *derived = made;
    }
    return checked;
}
