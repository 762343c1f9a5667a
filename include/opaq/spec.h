/* opaq/spec.h: a quantizer as a plain value. Depends on format.h. Grammar: docs/spec.md.
 *
 * A spec holds all that defines a quantizer, and has exactly one canonical text: equal texts, equal values,
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

/* The longest canonical text is shorter than this, the terminator included. */
#define OPAQ_SPEC_TEXT_BYTES 128

/* The plain quantizer of a format: its default element, rowwise, rule te, no options. */
OPAQ_API enum opaq_status opaq_spec_make(enum opaq_format format, struct opaq_spec *spec,
                                         struct opaq_error *error);

/* Whether the fields fit together; the error names the two that do not. */
OPAQ_API enum opaq_status opaq_spec_check(const struct opaq_spec *spec, struct opaq_error *error);

/* Options may stand in any order and defaults may be written out; the value is the same. The error names
 * the offending part and its position (from 0). */
OPAQ_API enum opaq_status opaq_spec_parse(const char *text, size_t length, struct opaq_spec *spec,
                                          struct opaq_error *error);

/* The canonical text, terminated. */
OPAQ_API enum opaq_status opaq_spec_print(const struct opaq_spec *spec, char *buffer, size_t capacity,
                                          struct opaq_error *error);

OPAQ_API int opaq_spec_equal(const struct opaq_spec *a, const struct opaq_spec *b); /* 0 for NULL */
OPAQ_API uint64_t opaq_spec_hash(const struct opaq_spec *spec);                     /* 0 for NULL */

/* The one shared copy of the value that `text` stands for; it lives as long as the process. Two texts of
 * the same value give the same pointer. Safe from any number of threads; a text seen before is found
 * without a lock. At most OPAQ_INTERN_LIMIT texts are kept, then OPAQ_ERROR_LIMIT. */
#define OPAQ_INTERN_LIMIT 65536
OPAQ_API enum opaq_status opaq_spec_intern(const char *text, size_t length, const struct opaq_spec **spec,
                                           struct opaq_error *error);

/* What a spec means for who holds, cuts or hands on tensors of it. The numbers are part of the ABI: append. */
enum opaq_spec_property {
    OPAQ_SPEC_IS_DELAYED = 0,       /* its scale is given */
    OPAQ_SPEC_IS_STOCHASTIC = 1,    /* rounding takes random numbers */
    OPAQ_SPEC_IS_TILED = 2,         /* its rowwise copy is in tiles */
    OPAQ_SPEC_IS_PLAIN_ROWWISE = 3, /* a rowwise copy only, row by row, scales too */
    OPAQ_SPEC_CAN_BE_TILED = 4,     /* its rowwise copy can be in tiles: OPAQ_DERIVE_TILED gives a spec */
    OPAQ_SPEC_TENSOR_AMAXES =
        5, /* enum opaq_usage, or 0: the copies for which one amax covers all of a tensor, so
                                         that ranks that hold parts of it have to agree on it */
    OPAQ_SPEC_COLUMN_COVERS_ROWS =
        6, /* a column's scale covers all rows: some of them cannot be quantized alone */
    OPAQ_SPEC_ROWS_PER_SCALE =
        7, /* rows that share a scale in some copy, of those that do not cover all: a tensor
                                         is cut at multiples of it; at least 1 */
    OPAQ_SPEC_HAS_ROW_SCALES = 8, /* a row's only scale is its own */
    OPAQ_SPEC_GIVES_AMAX = 9      /* opaq_quantize gives the amax back */
};

/* The answer, 0 or 1 where the question is one of yes or no; -1 for a spec that is not valid or another number. */
OPAQ_API int64_t opaq_spec_query(const struct opaq_spec *spec, enum opaq_spec_property property);

/* Specs that follow from one. The numbers are part of the ABI: append. */
enum opaq_derivation {
    OPAQ_DERIVE_TILED = 0,     /* its rowwise copy in tiles, alone */
    OPAQ_DERIVE_UNTILED = 1,   /* without tiles */
    OPAQ_DERIVE_CURRENT = 2,   /* its scale comes from the data instead of being given */
    OPAQ_DERIVE_HANDED_ON = 3, /* for a tensor that leaves a layer: without the options of single products */
    OPAQ_DERIVE_ROW_AMAXES =
        4 /* where one amax, computed from the data, covers the tensor, each row has its own */
};

/* The error is that of opaq_spec_check where the result is not valid. */
OPAQ_API enum opaq_status opaq_spec_derive(const struct opaq_spec *spec, enum opaq_derivation derivation,
                                           struct opaq_spec *derived, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
