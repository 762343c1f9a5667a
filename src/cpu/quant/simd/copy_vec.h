/* cpu/quant/simd/copy_vec.h: copies of a few bytes, such as a row's scales. Depends on nothing; vec_avx512.h or
 * vec_avx2.h comes before it. */
#ifndef OPAQ_CPU_QUANT_SIMD_COPY_VEC_H
#define OPAQ_CPU_QUANT_SIMD_COPY_VEC_H

/* memcpy() for up to a few hundred bytes. gcc compiles a memcpy() of bounded size to `rep movsq`, whose startup
 * takes longer than this copy. */
VEC_INLINE void copy_few(uint8_t *to, const uint8_t *from, int64_t n) {
    int64_t i = 0;
    for (; i + VEC_BYTES <= n; i += VEC_BYTES) {
        vec_store(to + i, vec_load(from + i));
    }
    for (; i + 8 <= n; i += 8) {
        memcpy(to + i, from + i, 8);
    }
    for (; i < n; ++i) {
        to[i] = from[i];
    }
}

#endif
