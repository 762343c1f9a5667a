/* quant/amax_vec.h: the amax of elements that lie one after another, in vectors. Depends on fold_vec.h. */
#ifndef OPAQ_QUANT_AMAX_VEC_H
#define OPAQ_QUANT_AMAX_VEC_H

#include "base/float_bits.h"
#include "quant/fold_vec.h"
#include "quant/quant_job.h"

/* Keys gathered so far, in several vectors so that one maximum need not wait for the last. */
enum { AMAX_CHAINS = 4 };
struct amax_keys {
    vec32 chain[AMAX_CHAINS];
};

VEC_INLINE struct amax_keys amax_keys_none(void) {
    return (struct amax_keys){{vec32_set(0), vec32_set(0), vec32_set(0), vec32_set(0)}};
}

/* n elements more. */
VEC_INLINE void amax_keys_add(struct amax_keys *keys, const char *x, int64_t n, enum opaq_element dtype,
                              bool drop_nan) {
    const int64_t bytes = n * element_bytes(dtype);
    int64_t i = 0;
    for (; i + AMAX_CHAINS * VEC_BYTES <= bytes; i += AMAX_CHAINS * VEC_BYTES) {
        for (int k = 0; k < AMAX_CHAINS; ++k) {
            const vec32 key = key_of(vec_load(x + i + k * VEC_BYTES), dtype, drop_nan);
            keys->chain[k] = key_max(keys->chain[k], key, dtype);
        }
    }
    for (; i < bytes; i += VEC_BYTES) {
        char staged[VEC_BYTES] = {0};
        const int64_t inside = bytes - i < VEC_BYTES ? bytes - i : VEC_BYTES;
        memcpy(staged, x + i, (size_t)inside);
        keys->chain[0] = key_max(keys->chain[0], key_of(vec_load(staged), dtype, drop_nan), dtype);
    }
}

/* As the bits of a float. */
VEC_INLINE uint32_t amax_keys_bits(const struct amax_keys *keys, enum opaq_element dtype, bool drop_nan) {
    vec32 key = key_max(key_max(keys->chain[0], keys->chain[1], dtype),
                        key_max(keys->chain[2], keys->chain[3], dtype), dtype);
    key = key_max(key, quads_second(key, key), dtype);
    key = key_max(key, dwords_odd(key, key), dtype);
    if (dtype != OPAQ_F32) {
        key = key_max(key, key >> 16, dtype) & 0xFFFFu;
    }
    const vec32 magnitude = key_magnitude(key, dtype, drop_nan);
    const vec32 bits = (vec32)magnitudes_to_floats(magnitude, dtype);
    uint32_t lane[FLOATS];
    uint32_t result = 0;
    vec_store(lane, bits);
    for (int i = 0; i < LANES; ++i) {
        result = lane[4 * i] > result ? lane[4 * i] : result;
    }
    return result;
}

VEC_INLINE uint32_t amax_run(const char *x, int64_t n, enum opaq_element dtype, bool drop_nan) {
    struct amax_keys keys = amax_keys_none();
    amax_keys_add(&keys, x, n, dtype, drop_nan);
    return amax_keys_bits(&keys, dtype, drop_nan);
}

#endif
