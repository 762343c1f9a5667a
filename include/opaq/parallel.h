/* opaq/parallel.h: the threads of an operation, supplied by the caller. Depends on status.h.
 *
 * A `struct opaq_parallel` is a parallel-for; NULL means "on the calling thread". A framework passes its own
 * pool; a C program can create one here. The result of an operation never depends on it. */
#ifndef OPAQ_PARALLEL_H
#define OPAQ_PARALLEL_H

#include <stdint.h>

#include "opaq/status.h"

#ifdef __cplusplus
extern "C" {
#endif

/* Works on [begin, end) of a range. */
struct opaq_body {
    void (*call)(void *argument, int64_t begin, int64_t end);
    void *argument;
};

struct opaq_parallel {
    /* Calls body->call on disjoint pieces that cover [0, count) exactly once, in any order, on any
     * threads, and returns when all have returned. */
    void (*run)(void *context, int64_t count, const struct opaq_body *body);
    void *context;
};

struct opaq_pool;

/* A pool of `threads` threads, including the calling one; 0 means one per processor. At most 1024. */
OPAQ_API enum opaq_status opaq_pool_create(int threads, struct opaq_pool **pool, struct opaq_error *error);

/* Ends the threads. No operation may be running on the pool. NULL is allowed. In a forked child it only frees
 * memory. */
OPAQ_API void opaq_pool_destroy(struct opaq_pool *pool);

OPAQ_API int opaq_pool_threads(const struct opaq_pool *pool);

/* The pool as an argument for operations; valid as long as the pool. Several threads may use one pool at once:
 * one call gets the workers, the others run on their calling thread only, as do calls in a forked child. */
OPAQ_API struct opaq_parallel opaq_pool_parallel(struct opaq_pool *pool);

#ifdef __cplusplus
}
#endif

#endif
