/* base/parallel_run.c: runs a body on the caller's threads. */
#include "base/parallel_run.h"

#include <stddef.h>

#include "base/fp_environment.h"

static void guarded_call(void *argument, int64_t begin, int64_t end) {
    const struct opaq_body *body = argument;
    const uint64_t saved = fp_environment_enter();
    body->call(body->argument, begin, end);
    fp_environment_leave(saved);
}

void parallel_run(const struct opaq_parallel *parallel, int64_t count, const struct opaq_body *body) {
    if (count <= 0) {
        return;
    }
    struct opaq_body inner = *body;
    const struct opaq_body guarded = {guarded_call, &inner};
    if (parallel == NULL || parallel->run == NULL || count == 1) {
        guarded.call(guarded.argument, 0, count);
    } else {
        parallel->run(parallel->context, count, &guarded);
    }
}
