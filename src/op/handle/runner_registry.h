/* op/handle/runner_registry.h: lock-free lookup of runners by handle. Depends on opaq/runner.h.
 *
 * A handle is generation << 16 | slot. Each slot has one atomic word:
 *
 *     generation (31 bits) | valid (1 bit) | holds (32 bits)
 *
 * A run takes a hold on its runner: one compare-and-swap that adds 1 if generation and valid match. The
 * registry has a hold too, until the runner is destroyed, which first clears the valid bit. Releasing the last
 * hold destroys the state and frees the slot; its next runner gets the next generation, so an old handle never
 * refers to another runner. Slots are in pages that are never freed, so a lookup may read any of them at any
 * time. */
#ifndef OPAQ_OP_HANDLE_RUNNER_REGISTRY_H
#define OPAQ_OP_HANDLE_RUNNER_REGISTRY_H

#include "opaq/runner.h"

/* The contents of a slot; constant while it is held. */
struct runner {
    struct opaq_runner_info info;
    struct opaq_runner_functions functions;
    /* Computes the gradients of the inputs: the inputs are dy and those that the gradients depend on, `output` points to
     * one gradient after another. NULL if the runner has none; `destroy` is not called. */
    const struct opaq_runner_functions *backward;
    void *state;
};

/* opaq_runner_register, of a runner with gradients. */
enum opaq_status runner_register(const struct opaq_runner_info *info,
                                 const struct opaq_runner_functions *functions,
                                 const struct opaq_runner_functions *backward, void *state, int64_t *handle,
                                 struct opaq_error *error);

/* Any kind of runner. */
enum { RUNNER_ANY = -1 };

/* The runner of a handle, which must be of `kind`. It stays until it is released. NULL with an OPAQ_ERROR_ARGUMENT if
 * there is none. */
const struct runner *runner_hold(int64_t handle, int kind, struct opaq_error *error);
void runner_release(int64_t handle);

/* "linear" */
const char *runner_kind_name(int kind);

#endif
