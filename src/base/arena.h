/* base/arena.h: bump allocation from a workspace, aligned to 64 bytes. Depends on checked.h.
 *
 * An arena without memory only counts, so that one function both measures its workspace and runs in it.
 * Addresses are never dereferenced here: they may belong to another device. */
#ifndef OPAQ_BASE_ARENA_H
#define OPAQ_BASE_ARENA_H

#include <stddef.h>

#include "base/checked.h"

struct arena {
    char *memory;
    size_t bytes; /* size of the memory; not read here */
    size_t used;  /* more than OPAQ_SIZE_LIMIT after an overflow */
    size_t most;  /* high-water mark: memory is released by lowering `used` */
};

/* Returns NULL while only counting. */
static inline void *arena_take(struct arena *arena, size_t bytes) {
    void *const taken = arena->memory == NULL ? NULL : arena->memory + arena->used;
    const size_t limit = (size_t)OPAQ_SIZE_LIMIT + 64;
    const size_t rounded = bytes < limit ? (bytes + 63) / 64 * 64 : limit;
    arena->used = rounded < limit - arena->used ? arena->used + rounded : limit;
    arena->most = arena->used > arena->most ? arena->used : arena->most;
    return taken;
}

/* Array version; an overflowing size counts as more than OPAQ_SIZE_LIMIT. */
static inline void *arena_take_array(struct arena *arena, int64_t count, size_t size) {
    int64_t bytes;
    return arena_take(arena, checked_multiply(count, (int64_t)size, &bytes) ? (size_t)bytes : SIZE_MAX);
}

#endif
