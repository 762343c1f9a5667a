/* base/pieces.h: splits a count of units into pieces that threads take one at a time, several per thread, for
 * load balance. Depends on checked.h. */
#ifndef OPAQ_BASE_PIECES_H
#define OPAQ_BASE_PIECES_H

#include <stdatomic.h>
#include <stdbool.h>
#include <stdint.h>

#include "base/checked.h"

enum { PIECES_PER_THREAD = 4 };

struct pieces {
    int64_t count;
    int64_t pieces;
    _Atomic int64_t next;
};

static inline void pieces_init(struct pieces *pieces, int64_t count, int64_t threads) {
    pieces->count = count;
    pieces->pieces = threads == 1 ? 1 : min_int64(count, threads * PIECES_PER_THREAD);
    atomic_init(&pieces->next, 0);
}

/* Takes the next piece, units [begin, end); false if none is left. */
static inline bool pieces_take(struct pieces *pieces, int64_t *begin, int64_t *end) {
    const int64_t piece = atomic_fetch_add_explicit(&pieces->next, 1, memory_order_relaxed);
    if (piece >= pieces->pieces) {
        return false;
    }
    const int64_t share = pieces->count / pieces->pieces;
    const int64_t extra = pieces->count % pieces->pieces; /* the first `extra` pieces are one longer */
    *begin = piece * share + min_int64(piece, extra);
    *end = *begin + share + (piece < extra);
    return true;
}

#endif
