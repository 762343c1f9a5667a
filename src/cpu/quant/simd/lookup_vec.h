/* cpu/quant/simd/lookup_vec.h: decodes blocks of packed codes to 16-bit elements by table lookup. Depends on
 * decode_factors_vec.h.
 *
 * If all rows share one amax (or have none), a scale byte determines the sixteen possible elements of its
 * block. The table has them for every scale byte; codes are indices. */
#ifndef OPAQ_CPU_QUANT_SIMD_LOOKUP_VEC_H
#define OPAQ_CPU_QUANT_SIMD_LOOKUP_VEC_H

#include "cpu/quant/simd/decode_factors_vec.h"
#include "cpu/quant/simd/specialize_vec.h"

/* Minimum number of elements for which a table is faster. */
enum { LOOKUP_WORTH = 1 << 15 };

struct lookup {
    _Alignas(64) uint8_t block[256][LOOKUP_BYTES];
};

VEC_INLINE void lookup_make(const struct opaq_spec *spec, float stored, enum opaq_element dtype,
                            struct lookup *table) {
    enum { CODES = STEP / 16 };
    for (int first = 0; first < 256; first += FLOATS) {
        uint8_t codes[FLOATS];
        float factors[FLOATS];
        for (int i = 0; i < FLOATS; ++i) {
            codes[i] = (uint8_t)(first + i);
        }
        vec_store(factors, (vec32)byte_factors(codes, spec, vecf_set(stored)));
        for (int i = 0; i < FLOATS; i += CODES) {
            const struct step step =
                step_of_values(e2m1_all(0) * factors[i], e2m1_all(1) * factors[i + CODES - 1], dtype, true);
            lookup_store(table->block[first + i], (vec16)step.part[0]);
        }
    }
}

/* n elements of a row, whole blocks, under scale bytes. */
VEC_INLINE void lookup_run(const struct lookup *table, const uint8_t *codes, const uint8_t *scales, int64_t n,
                           int block, bool streams, char *y) {
    for (int64_t i = 0; i < n; i += block) {
        const uint8_t *const values = table->block[scales[i / block]];
        for (int k = 0; k < block; k += 16) {
            lookup_block(values, codes + (i + k) / 2, y + (i + k) * 2, streams);
        }
    }
}

/* lookup_make() out of line. */
VEC_OUTLINE void lookup_make_of(const struct opaq_spec *spec, float stored, enum opaq_element dtype,
                                struct lookup *table) {
    if (dtype == OPAQ_BF16) {
        lookup_make(spec, stored, OPAQ_BF16, table);
    } else {
        lookup_make(spec, stored, OPAQ_F16, table);
    }
}

#endif
