/* opaq/execution.h: where and how an operation runs. Depends on parallel.h and proto.h.
 *
 * Every operation on memory takes a `const struct opaq_execution *`. NULL means: on the device of the tensors, on the
 * calling thread or on the device's default stream. Results never depend on it. */
#ifndef OPAQ_EXECUTION_H
#define OPAQ_EXECUTION_H

#include "opaq/parallel.h"
#include "opaq/proto.h"

#ifdef __cplusplus
extern "C" {
#endif

struct opaq_execution {
    struct opaq_device device; /* the device of the tensors; another one is an error */
    void *stream;              /* CUDA: the stream that the work is queued on; NULL: the default stream */
    const struct opaq_parallel *parallel; /* CPU: the threads; NULL: the calling thread */
};

/* Checks that this build and this machine can process tensors of a device; with index -1, of any device of that
 * type. The CUDA back end, a separate shared library, is loaded by the first such check or the first CUDA tensor; the
 * error says what is missing. */
OPAQ_API enum opaq_status opaq_device_check(struct opaq_device device, struct opaq_error *error);

#ifdef __cplusplus
}
#endif

#endif
