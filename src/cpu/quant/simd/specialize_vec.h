/* cpu/quant/simd/specialize_vec.h: runs a statement with a dtype or an element that is a constant. Depends on
 * opaq/element.h.
 *
 * Kernels are inlined into out-of-line functions that switch with these, and the code around them is compiled once. A
 * switch around whole kernels instead costs minutes of compile time and megabytes of code. */
#ifndef OPAQ_CPU_QUANT_SIMD_SPECIALIZE_VEC_H
#define OPAQ_CPU_QUANT_SIMD_SPECIALIZE_VEC_H

#include "opaq/element.h"

/* A function that is never inlined. Not every file that includes it calls it. */
#define VEC_OUTLINE static __attribute__((noinline, unused))

/* `statement` with DTYPE, a constant, for `dtype`. */
#define FOR_DTYPE(dtype, statement)                    \
    do {                                               \
        if ((dtype) == OPAQ_BF16) {                    \
            const enum opaq_element DTYPE = OPAQ_BF16; \
            statement;                                 \
        } else if ((dtype) == OPAQ_F16) {              \
            const enum opaq_element DTYPE = OPAQ_F16;  \
            statement;                                 \
        } else {                                       \
            const enum opaq_element DTYPE = OPAQ_F32;  \
            statement;                                 \
        }                                              \
    } while (0)

/* `statement` with ELEMENT, a constant, for `element`, one of 8 bits. */
#define FOR_FP8_ELEMENT(element, statement)              \
    do {                                                 \
        if ((element) == OPAQ_E5M2) {                    \
            const enum opaq_element ELEMENT = OPAQ_E5M2; \
            statement;                                   \
        } else {                                         \
            const enum opaq_element ELEMENT = OPAQ_E4M3; \
            statement;                                   \
        }                                                \
    } while (0)

/* The same for one of 4 or 8 bits. */
#define FOR_ELEMENT(element, statement)                  \
    do {                                                 \
        if ((element) == OPAQ_E2M1) {                    \
            const enum opaq_element ELEMENT = OPAQ_E2M1; \
            statement;                                   \
        } else {                                         \
            FOR_FP8_ELEMENT(element, statement);         \
        }                                                \
    } while (0)

/* `statement` with FLAG, a constant, for `flag`. */
#define FOR_FLAG(flag, statement)  \
    do {                           \
        if (flag) {                \
            enum { FLAG = true };  \
            statement;             \
        } else {                   \
            enum { FLAG = false }; \
            statement;             \
        }                          \
    } while (0)

/* `statement` with HOW, a constant struct encode_how: rule te, `how`'s dtype and its element, one of 8 bits or any. */
#define FOR_FP8_TE(how, statement)                                         \
    FOR_DTYPE((how).dtype, FOR_FP8_ELEMENT((how).element, {                \
                  const struct encode_how HOW = encode_te(DTYPE, ELEMENT); \
                  statement;                                               \
              }))
#define FOR_BLOCK_TE(how, statement)                                       \
    FOR_DTYPE((how).dtype, FOR_BLOCK_ELEMENT((how).element, {              \
                  const struct encode_how HOW = encode_te(DTYPE, ELEMENT); \
                  statement;                                               \
              }))

#endif
