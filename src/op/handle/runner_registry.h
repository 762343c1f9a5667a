/* op/handle/runner_registry.h: runners by their handles, found without a lock. Depends on opaq/runner.h.
 *
 * A handle is generation << 16 | slot. Each slot has one atomic word:
 *
 *     generation (31 bits) | valid (1 bit) | holds (32 bits)
 *
 * Whoever runs a runner holds it: one compare-and-swap that adds 1 where generation and valid are as they should be. The
 * registry itself holds it too, until it is destroyed, which clears the valid bit first. The hold that goes last
 * destroys the state and gives the slot back; its next user gets the next generation, so an old handle never finds
 * somebody else's runner. Slots stand in pages that are never freed, so a look-up may read any of them at any time. */
#ifndef OPAQ_OP_HANDLE_RUNNER_REGISTRY_H
#define OPAQ_OP_HANDLE_RUNNER_REGISTRY_H

#include "opaq/runner.h"

/* What a slot keeps; constant while it is held. */
struct runner {
    struct opaq_runner_info info;
    struct opaq_runner_functions functions;
    void *state;
};

/* Any kind. */
enum { RUNNER_ANY = -1 };

/* The runner of a handle, which must be of `kind`. It stays until it is released. NULL with an OPAQ_ERROR_ARGUMENT if
 * there is none. */
const struct runner *runner_hold(int64_t handle, int kind, struct opaq_error *error);
void runner_release(int64_t handle);

/* "linear" */
const char *runner_kind_name(int kind);

#endif
