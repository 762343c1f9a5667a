/* cuda/quant/delayed_scaling.cu: updates the amax history of delayed scaling: one thread per tensor. */
#include "cuda/cuda_functions.h"
#include "definition/delayed_ref.h"

struct delayed_arguments {
    struct opaq_delayed_state state;
    const float *recorded, *reduced;
    enum opaq_amax_algorithm algorithm;
    bool updates;
    float target;
};

static __global__ void delayed_kernel(struct delayed_arguments job) {
    for (int64_t i = thread_index(); i < job.state.count; i += thread_count()) {
        delayed_record(&job.state, job.recorded, i);
        if (job.updates) {
            delayed_rescale(&job.state, job.reduced, job.algorithm, job.target, i);
        }
    }
}

enum opaq_status cuda_delayed_update(const struct opaq_delayed_state *state, const float *recorded,
                                     const float *reduced, const struct delayed_rule *rule,
                                     const struct opaq_execution *execution, struct opaq_error *error) {
    const float target = ldexpf(opaq_element_info(rule->element)->largest, -rule->margin);
    const struct delayed_arguments job = {*state, recorded, reduced, rule->algorithm, rule->updates, target};
    return state->count == 0 ? OPAQ_OK
                             : launch("delayed_update", delayed_kernel, blocks_for(state->count, WARP), WARP,
                                      job, execution, error);
}
