/* bench_numbers.h: numbers to fill tensors with, equal on every machine. Depends on libc. */
#ifndef OPAQ_BENCH_BENCH_NUMBERS_H
#define OPAQ_BENCH_BENCH_NUMBERS_H

#include <stdint.h>

/* Returns the next approximately normal number. */
static inline float nearly_normal(uint64_t *state) {
    *state = *state * 6364136223846793005u + 1442695040888963407u;
    const uint32_t a = (uint32_t)(*state >> 33);
    return ((float)(a & 0x3FF) + (float)(a >> 10 & 0x3FF) + (float)(a >> 20 & 0x3FF) - 1534.5f) / 512.0f;
}

#endif
