/* cpu/quant/delayed_scaling.c: updates the amax history of delayed scaling on the CPU. */
#include <math.h>

#include "base/fp_environment.h"
#include "cpu/cpu_functions.h"
#include "definition/delayed_ref.h"

enum opaq_status cpu_delayed_update(const struct opaq_delayed_state *state, const float *recorded,
                                    const float *reduced, const struct delayed_rule *rule,
                                    const struct opaq_execution *execution, struct opaq_error *error) {
    (void)execution;
    (void)error;
    const uint64_t saved = fp_environment_enter();
    const float target = ldexpf(opaq_element_info(rule->element)->largest, -rule->margin);
    for (int64_t i = 0; i < state->count; ++i) {
        delayed_record(state, recorded, i);
        if (rule->updates) {
            delayed_rescale(state, reduced, rule->algorithm, target, i);
        }
    }
    fp_environment_leave(saved);
    return OPAQ_OK;
}
