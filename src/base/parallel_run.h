/* base/parallel_run.h: runs a body on the caller's threads, in the library's floating-point environment.
 * Depends on opaq/parallel.h. */
#ifndef OPAQ_BASE_PARALLEL_RUN_H
#define OPAQ_BASE_PARALLEL_RUN_H

#include <stddef.h>

#include "opaq/parallel.h"

/* Runs the body over [0, count) on `parallel`, or on this thread if that is NULL; each share between
 * fp_environment_enter and _leave. Returns when all shares are done. */
void parallel_run(const struct opaq_parallel *parallel, int64_t count, const struct opaq_body *body);

/* `parallel`, or NULL if there are so few elements that waking threads would cost more than it saves. */
static inline const struct opaq_parallel *parallel_if_worth(const struct opaq_parallel *parallel,
                                                            int64_t elements) {
    const int64_t worth = 1 << 15; /* about 0.1 ms of work for the reference kernels */
    return elements < worth ? NULL : parallel;
}

#endif
