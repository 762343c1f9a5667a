/* cli/read/checkpoint.c: see checkpoint.h. */
#include "cli/read/checkpoint.h"

#include <string.h>

#include "cli/cli_try.h"

bool checkpoint_open(const struct command_call *call, const char *path, struct checkpoint *checkpoint) {
    struct opaq_error error;
    if (model_open(path, call_has(call, "follow-links"), &checkpoint->model, &error) != OPAQ_OK) {
        complain(call, "%s", error.text);
        return false;
    }
    if (weights_find(&checkpoint->model, &checkpoint->weights, &error) != OPAQ_OK) {
        complain(call, "%s", error.text);
        model_close(&checkpoint->model);
        return false;
    }
    return true;
}

void checkpoint_close(struct checkpoint *checkpoint) {
    weights_free(&checkpoint->weights);
    model_close(&checkpoint->model);
}

enum opaq_status checkpoints_check(const struct checkpoint *a, const struct checkpoint *b,
                                   struct opaq_error *error) {
    CLI_TRY(model_check(&a->model, error));
    return model_check(&b->model, error);
}

int weight_shape(const struct weight *weight, int64_t shape[ST_RANK_LIMIT]) {
    const struct st_tensor *const data = weight->data->tensor;
    const int extra = weight->scheme == NULL ? 0 : (int)strlen(weight->scheme->data_shape) - 2;
    const int rank = data->rank - extra; /* without the dimension within blocks */
    memcpy(shape, data->shape, (size_t)rank * sizeof *shape);
    if (weight->scheme != NULL && rank > 0) {
        shape[rank - 1] = weight->columns;
    }
    return rank;
}

uint64_t weight_elements(const struct weight *weight) {
    return (uint64_t)weight->stack * (uint64_t)weight->rows * (uint64_t)weight->columns;
}

struct tensor_use *checkpoint_uses(const struct checkpoint *checkpoint) {
    const struct model *const model = &checkpoint->model;
    struct tensor_use *const uses = alloc_array(model->tensor_count, sizeof *uses);
    for (size_t i = 0; i < checkpoint->weights.count; ++i) {
        const struct weight *const weight = &checkpoint->weights.items[i];
        const struct model_tensor *const tensors[] = {weight->data, weight->scale, weight->global,
                                                      weight->input};
        static const enum tensor_role roles[] = {ROLE_CODES, ROLE_SCALES, ROLE_GLOBAL_SCALE, ROLE_INPUT_SCALE};
        for (size_t t = 0; t < sizeof tensors / sizeof tensors[0]; ++t) {
            if (tensors[t] != NULL) {
                uses[tensors[t] - model->tensors] =
                    (struct tensor_use){weight, weight->scheme == NULL ? ROLE_PLAIN : roles[t]};
            }
        }
    }
    return uses;
}

const char *tensor_role_name(enum tensor_role role) {
    static const char *const names[] = {"plain", "codes", "scales", "global scale", "input scale"};
    return names[role];
}
