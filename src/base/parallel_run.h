/* base/parallel_run.h: running a body on a caller's threads, in the library's arithmetic. Depends on
 * opaq/parallel.h. */
#ifndef OPAQ_BASE_PARALLEL_RUN_H
#define OPAQ_BASE_PARALLEL_RUN_H

#include <stddef.h>

#include "opaq/parallel.h"

/* body over [0, count), on `parallel` or, if that is NULL, here; each piece between fp_environment_enter and
 * _leave. Returns when all is done. */
void parallel_run(const struct opaq_parallel *parallel, int64_t count, const struct opaq_body *body);

/* `parallel`, or NULL where so few elements are in question that waking threads would cost more than it saves. */
static inline const struct opaq_parallel *parallel_if_worth(const struct opaq_parallel *parallel,
                                                            int64_t elements) {
    const int64_t worth = 1 << 15; /* some 0.1 ms of the reference's work */
    return elements < worth ? NULL : parallel;
}

#endif
