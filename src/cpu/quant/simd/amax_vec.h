/* cpu/quant/simd/amax_vec.h: the amax of contiguous elements, in vectors. Depends on fold_vec.h. */
#ifndef OPAQ_CPU_QUANT_SIMD_AMAX_VEC_H
#define OPAQ_CPU_QUANT_SIMD_AMAX_VEC_H

#include "backend/quant_job.h"
#include "base/float_bits.h"
#include "cpu/quant/simd/fold_vec.h"
#include "cpu/quant/simd/specialize_vec.h"

/* Keys gathered so far, in several vectors so that a maximum does not wait for the previous one. */
enum { AMAX_CHAINS = 4 };
struct amax_keys {
    vec32 chain[AMAX_CHAINS];
};

VEC_INLINE struct amax_keys amax_keys_none(void) {
    return (struct amax_keys){{vec32_set(0), vec32_set(0), vec32_set(0), vec32_set(0)}};
}

/* Adds n elements. */
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

/* Adds n elements of each of AMAX_CHAINS streams, which begin `stream_bytes` apart: memory is read faster from several
 * places at once than from one. */
VEC_INLINE void amax_keys_add_streams(struct amax_keys *keys, const char *x, int64_t stream_bytes, int64_t n,
                                      enum opaq_element dtype, bool drop_nan) {
    enum { AT_ONCE = 128, AHEAD = 1024 };
    const int64_t whole = n * element_bytes(dtype) / AT_ONCE * AT_ONCE;
    for (int64_t i = 0; i < whole; i += AT_ONCE) {
        for (int k = 0; k < AMAX_CHAINS; ++k) {
            const char *const from = x + k * stream_bytes + i;
            for (int line = 0; line < AT_ONCE; line += 64) {
                __builtin_prefetch(from + AHEAD + line, 0, 2);
            }
            for (int v = 0; v < AT_ONCE; v += VEC_BYTES) {
                keys->chain[k] = key_max(keys->chain[k], key_of(vec_load(from + v), dtype, drop_nan), dtype);
            }
        }
    }
    for (int k = 0; k < AMAX_CHAINS; ++k) {
        amax_keys_add(keys, x + k * stream_bytes + whole, n - whole / element_bytes(dtype), dtype, drop_nan);
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

/* The same for any dtype, out of line. */
VEC_OUTLINE uint32_t amax_of_run(const char *x, int64_t n, enum opaq_element dtype, bool drop_nan) {
    uint32_t bits;
    FOR_DTYPE(dtype, FOR_FLAG(drop_nan, bits = amax_run(x, n, DTYPE, FLAG)));
    return bits;
}

#endif
