/* cli/read/checkpoint.h: a model and its weights, opened together for a command. */
#ifndef OPAQ_CLI_READ_CHECKPOINT_H
#define OPAQ_CLI_READ_CHECKPOINT_H

#include "cli/command.h"
#include "cli/read/weights.h"

/* Must not be moved: the weights point to the model. */
struct checkpoint {
    struct model model;
    struct weights weights;
};

/* Returns false after a message on stderr. */
bool checkpoint_open(const struct command_call *call, const char *path, struct checkpoint *checkpoint);
void checkpoint_close(struct checkpoint *checkpoint);

/* Fails if a file of either has changed since it was opened. */
enum opaq_status checkpoints_check(const struct checkpoint *a, const struct checkpoint *b,
                                   struct opaq_error *error);

/* The shape of a weight, independent of how it is stored. Returns the rank. */
int weight_shape(const struct weight *weight, int64_t shape[ST_RANK_LIMIT]);
uint64_t weight_elements(const struct weight *weight);

/* Role of a tensor in the weight it belongs to. */
enum tensor_role { ROLE_PLAIN, ROLE_CODES, ROLE_SCALES, ROLE_GLOBAL_SCALE, ROLE_INPUT_SCALE };
struct tensor_use {
    const struct weight *weight;
    enum tensor_role role;
};

/* One for each of the model's tensors, in their order; released with free(). */
struct tensor_use *checkpoint_uses(const struct checkpoint *checkpoint);

/* "codes", "global scale", ... */
const char *tensor_role_name(enum tensor_role role);

#endif
