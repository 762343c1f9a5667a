/* opaq/spec.h: a quantizer as a plain value. Depends on format.h. Grammar: docs/spec.md.
 *
 * A spec is the complete definition of a quantizer, with exactly one canonical text: equal texts, equal values,
 * equal bytes. Fill one with opaq_spec_make or opaq_spec_parse, change fields, and check it. */
#ifndef OPAQ_SPEC_H
#define OPAQ_SPEC_H

#include <stddef.h>
#include <stdint.h>

#include "opaq/format.h"

#ifdef __cplusplus
extern "C" {
#endif

/* How OPAQ_4OVER6 compares its two candidates. */
enum opaq_error_mode { OPAQ_ERROR_MODE_NONE = 0, OPAQ_ERROR_MODE_MAE = 1, OPAQ_ERROR_MODE_MSE = 2 };

#define OPAQ_HADAMARD_MASK_DEFAULT 0xD7E8

struct opaq_spec {
    uint8_t format;         /* enum opaq_format */
    uint8_t element;        /* enum opaq_element */
    uint8_t usage;          /* enum opaq_usage, at least one */
    uint8_t rule;           /* enum opaq_rule */
    uint16_t options;       /* enum opaq_option */
    uint16_t hadamard_mask; /* bit i set: row i of each group of 16 is negated. 0 without OPAQ_HADAMARD */
    uint16_t e4m3_max;      /* NVFP4: 448, or 256 with OPAQ_4OVER6. 0 otherwise */
    uint8_t error_mode;     /* enum opaq_error_mode; NONE without OPAQ_4OVER6 */
    uint8_t reserved;       /* 0 */
    float epsilon;          /* FP8 formats: a floor for amax, finite, >= 0 */
};

/* Longer than any canonical text, including the terminator. */
#define OPAQ_SPEC_TEXT_BYTES 128

/* The default quantizer of a format: its default element, rowwise, rule te, no options. */
OPAQ_API enum opaq_status opaq_spec_make(enum opaq_format format, struct opaq_spec *spec,
                                         struct opaq_error *error);

/* Checks that the fields are valid together; the error names the two that are not. */
OPAQ_API enum opaq_status opaq_spec_check(const struct opaq_spec *spec, struct opaq_error *error);

/* Options may come in any order and defaults may be written out; the value is the same. The error names the
 * offending part and its position (from 0). */
OPAQ_API enum opaq_status opaq_spec_parse(const char *text, size_t length, struct opaq_spec *spec,
                                          struct opaq_error *error);

/* The canonical text, terminated. */
OPAQ_API enum opaq_status opaq_spec_print(const struct opaq_spec *spec, char *buffer, size_t capacity,
                                          struct opaq_error *error);

OPAQ_API int opaq_spec_equal(const struct opaq_spec *a, const struct opaq_spec *b); /* 0 for NULL */
OPAQ_API uint64_t opaq_spec_hash(const struct opaq_spec *spec);                     /* 0 for NULL */

/* The shared copy of the value that `text` describes; it lives as long as the process. Texts of the same value
 * give the same pointer. Safe from any number of threads; a text seen before is found without a lock. Fails
 * with OPAQ_ERROR_LIMIT beyond OPAQ_INTERN_LIMIT texts. */
#define OPAQ_INTERN_LIMIT 65536
OPAQ_API enum opaq_status opaq_spec_intern(const char *text, size_t length, const struct opaq_spec **spec,
                                           struct opaq_error *error);

/* Properties of a spec for callers that store, split or pass on its tensors. The numbers are part of the ABI:
 * append. */
enum opaq_spec_property {
    OPAQ_SPEC_IS_DELAYED = 0,       /* the caller supplies its scale */
    OPAQ_SPEC_IS_STOCHASTIC = 1,    /* rounding uses random numbers */
    OPAQ_SPEC_IS_TILED = 2,         /* its rowwise copy is stored in tiles */
    OPAQ_SPEC_IS_PLAIN_ROWWISE = 3, /* only a rowwise copy, codes and scales in row-major order */
    OPAQ_SPEC_CAN_BE_TILED = 4,     /* its rowwise copy can be tiled: OPAQ_DERIVE_TILED succeeds */
    /* enum opaq_usage, or 0: the copies that have one amax for the whole tensor, so that ranks that hold parts of it
     * must reduce it */
    OPAQ_SPEC_TENSOR_AMAXES = 5,
    /* a column's scale covers all rows, so a part of the rows cannot be quantized alone */
    OPAQ_SPEC_COLUMN_COVERS_ROWS = 6,
    /* the number of rows that share a scale in some copy, not counting scales that cover all rows: split a tensor at
     * multiples of it; at least 1 */
    OPAQ_SPEC_ROWS_PER_SCALE = 7,
    OPAQ_SPEC_HAS_ROW_SCALES = 8, /* each row has exactly one scale */
    OPAQ_SPEC_GIVES_AMAX = 9      /* opaq_quantize returns the amax */
};

/* The property's value, 0 or 1 for a yes-or-no property; -1 for an invalid spec or an unknown property. */
OPAQ_API int64_t opaq_spec_query(const struct opaq_spec *spec, enum opaq_spec_property property);

/* Derived specs. The numbers are part of the ABI: append. */
enum opaq_derivation {
    OPAQ_DERIVE_TILED = 0,     /* only a rowwise copy, in tiles */
    OPAQ_DERIVE_UNTILED = 1,   /* without tiles */
    OPAQ_DERIVE_CURRENT = 2,   /* its scale is computed from the data instead of supplied */
    OPAQ_DERIVE_HANDED_ON = 3, /* for a layer's result: without options that apply to one product only */
    OPAQ_DERIVE_ROW_AMAXES = 4 /* one computed amax per tensor becomes one per row */
};

/* Fails with the error of opaq_spec_check if the derived spec is not valid. */
OPAQ_API enum opaq_status opaq_spec_derive(const struct opaq_spec *spec, enum opaq_derivation derivation,
                                           struct opaq_spec *derived, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
