/* base/shares.h: splits a count of units into shares that threads take one at a time, several per thread, for
 * load balance. Depends on checked.h. */
#ifndef OPAQ_BASE_SHARES_H
#define OPAQ_BASE_SHARES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/checked.h"

enum { SHARES_PER_THREAD = 4 };

struct shares {
    int64_t count; /* of units */
    int64_t total;
    _Atomic int64_t next;
};

static inline void shares_init(struct shares *shares, int64_t count, int64_t threads) {
    shares->count = count;
    shares->total = threads == 1 ? 1 : min_int64(count, threads * SHARES_PER_THREAD);
    atomic_init(&shares->next, 0);
}

/* Takes the next share, units [begin, end); false if none is left. */
static inline bool shares_take(struct shares *shares, int64_t *begin, int64_t *end) {
    const int64_t share = atomic_fetch_add_explicit(&shares->next, 1, memory_order_relaxed);
    if (share >= shares->total) {
        return false;
    }
    const int64_t length = shares->count / shares->total;
    const int64_t extra = shares->count % shares->total; /* the first `extra` shares are one longer */
    *begin = share * length + min_int64(share, extra);
    *end = *begin + length + (share < extra);
    return true;
}

#endif
