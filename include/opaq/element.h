/* opaq/element.h: conversion of single numbers between float32 and the element types. Depends on status.h. The
 * rules are in docs/formats.md, "Elements".
 *
 * A code is the bit pattern in the low bits of a uint32_t. Every function is defined for every float and every
 * code. */
#ifndef OPAQ_ELEMENT_H
#define OPAQ_ELEMENT_H

#include <stdint.h>

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* The order is part of the ABI and of the table in element.c. */
enum opaq_element {
    OPAQ_E2M1 = 0, /* 4 bits: 0 .5 1 1.5 2 3 4 6 and their negatives; no infinity, no NaN */
    OPAQ_E4M3 = 1, /* "fn": largest 448, one NaN per sign, no infinity */
    OPAQ_E5M2 = 2, /* IEEE-like: largest 57344, infinities, NaNs */
    OPAQ_E8M0 = 3, /* 2^(code-127), unsigned, 255 is NaN, no zero */
    OPAQ_F16 = 4,
    OPAQ_BF16 = 5,
    OPAQ_F32 = 6
};
#define OPAQ_ELEMENT_COUNT 7

struct opaq_element_info {
    const char *name; /* "e4m3" */
    int bits;         /* of one code */
    int exponent_bits;
    int mantissa_bits;
    int bias;
    float largest; /* finite */
    int has_infinity;
    int has_nan;
};

/* NULL for a number that is not an element. */
OPAQ_API const struct opaq_element_info *opaq_element_info(enum opaq_element element);

/* What a value above the largest finite one becomes. */
enum opaq_overflow {
    OPAQ_SATURATE = 0, /* the largest finite value; infinities too. This is what quantizers use. */
    OPAQ_IEEE = 1      /* infinity if the element has one, else NaN, else the largest value */
};

OPAQ_API float opaq_element_decode(enum opaq_element element, uint32_t code);

/* Round to nearest, ties to even. */
OPAQ_API uint32_t opaq_element_encode(enum opaq_element element, float value, enum opaq_overflow overflow);

/* Stochastic rounding, saturating. Uses the low 8 bits of `random` for codes of at most 8 bits, 13 for f16 and
 * 16 for bf16 (the mantissa bits that these drop): with u = random / 2^bits, |value| + u * step is truncated to
 * the grid. */
OPAQ_API uint32_t opaq_element_encode_stochastic(enum opaq_element element, float value, uint32_t random);

/* Array versions. Codes are stored one per byte (up to 8 bits), one per uint16_t or one per uint32_t. A NULL
 * pointer makes the call do nothing. */
OPAQ_API void opaq_element_decode_array(enum opaq_element element, const void *codes, int64_t count,
                                        float *values);
OPAQ_API void opaq_element_encode_array(enum opaq_element element, const float *values, int64_t count,
                                        enum opaq_overflow overflow, void *codes);
OPAQ_API void opaq_element_encode_stochastic_array(enum opaq_element element, const float *values,
                                                   const uint32_t *random, int64_t count, void *codes);

#ifdef __cplusplus
}
#endif

#endif
