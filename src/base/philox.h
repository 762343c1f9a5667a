/* base/philox.h: the counter-based generator Philox 4x32 with 10 rounds. Depends on device.h.
 *
 * Salmon, Moraes, Dror, Shaw, "Parallel random numbers: as easy as 1, 2, 3" (SC 2011). Checked against the
 * known-answer vectors of the authors' Random123. */
#ifndef OPAQ_BASE_PHILOX_H
#define OPAQ_BASE_PHILOX_H

#include <stdint.h>

#include "base/device.h"

struct philox_block {
    uint32_t word[4];
};

OPAQ_DEVICE static inline struct philox_block philox(struct philox_block counter, uint32_t key0,
                                                     uint32_t key1) {
    uint32_t a = counter.word[0];
    uint32_t b = counter.word[1];
    uint32_t c = counter.word[2];
    uint32_t d = counter.word[3];
    for (int round = 0; round < 10; ++round) {
        const uint64_t left = (uint64_t)0xD2511F53u * a;
        const uint64_t right = (uint64_t)0xCD9E8D57u * c;
        const uint32_t new_a = (uint32_t)(right >> 32) ^ b ^ key0;
        const uint32_t new_c = (uint32_t)(left >> 32) ^ d ^ key1;
        b = (uint32_t)right;
        d = (uint32_t)left;
        a = new_a;
        c = new_c;
        key0 += 0x9E3779B9u;
        key1 += 0xBB67AE85u;
    }
    return (struct philox_block){{a, b, c, d}};
}

#endif
